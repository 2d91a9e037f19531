"""From TorchRec's types to the plain tensors of a group of features: validate everything, read, concatenate.

Feature f of F in a group has samples f·B to (f+1)·B of one jagged batch, so that one call of an operator serves all
features; the number of kernels does not depend on F. What is adjacent in memory already is not copied: the outputs of a
sharded EmbeddingCollection are, and so are the lengths, ids and weights of neighbouring keys of a KeyedJaggedTensor.

Call these functions through the module (`inputs.read_inputs`): torch.fx.wrap patches this module's globals, so that
TorchRec's tracers would trace into a function that is imported by name.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from jfi.modules.adjacent import join
from jfi.modules.id_counts import OutsideIds
from jfi.modules.ragged_targets import Candidates, RaggedTargets, is_by_pair, read_ragged_targets
from jfi.modules.sequence_configs import (
    FeatureGroup,
    KeyBias,
    PositionBias,
    SequenceFeatureConfig,
    TimeBias,
    WeightBias,
)
from jfi.modules.spread_rows import SpreadEvents, SpreadRows
from jfi.modules.table_rows import DigitRows, TableRows, digit_numbers, with_weights
from jfi.modules.validation import check_inputs, event_input, input_key, require_keys, unread
from jfi.ops.gather_rows import bound_ids, check_indices, table_bias
from jfi.ops.rows_by_id import RowsById, bounded_rows_by_id, join_rows, read_rows, sum_rows
from jfi.utils.context import is_traced
from jfi.utils.padding import padding_state


class GroupInputs(NamedTuple):
    """The F features of a group as plain tensors."""

    target: Tensor | None  # [F, B, target_width]; of ragged targets [F, R, target_width]
    fields: tuple[Tensor, ...]  # [S, ...]: side by side they are the events, sequence_width in all; or one, unread
    offsets: Tensor  # [F * B + 1]
    score_bias: Tensor | None  # [S], floating, the same for all heads
    bias_index: Tensor | None  # [S], integer: rows of the learned tables [F * num_buckets, H], one below the other
    value_scale: Tensor | None  # [S]
    events: list[int]  # how many of the S are each feature's
    times: Tensor | None = None  # [S]
    candidates: Candidates | None = None  # of ragged targets
    by_id: RowsById | None = None  # events whose rows the attention reads itself
    digits: tuple[DigitRows, ...] = ()  # events whose digits it reads itself, feature by feature
    spread: tuple[SpreadEvents, ...] = ()  # events on several ranks, those of each feature in one of these

    @property
    def rows(self) -> Tensor:
        """`history`; of events whose digits are read [S, L + 2], the digits."""
        return digit_numbers(self.digits) if self.digits else self.history

    @property
    def history(self) -> Tensor:
        """[S, sequence_width], an event a row; a copy if there are several fields or the rows were not read."""
        if self.digits:
            return join([one.values() for one in self.digits])
        if self.by_id is not None:
            return read_rows(self.by_id)
        return self.fields[0] if len(self.fields) == 1 else torch.cat(self.fields, dim=1)


@torch.fx.wrap
def allow_no_samples(ids: KeyedJaggedTensor) -> None:
    """Lets collections that are not sharded look up a batch of no samples.

    KeyedJaggedTensor.to_dict, which they begin with, fails at stride 0, so its cache is filled here.
    """
    if ids.stride() == 0:
        keys = ids.keys()
        ids._jt_dict = {key: ids[key] for key in keys}


def is_read_by_id(collection: nn.Module, ids: KeyedJaggedTensor) -> bool:
    """Whether `look_up` serves in place of the collection: TorchRec's own, with dense gradients, on a GPU, untraced."""
    # With room ids behind the last sample are 0, not padding.
    if type(collection) is not EmbeddingCollection or not isinstance(ids, KeyedJaggedTensor):
        return False
    if is_traced() or padding_state.is_padded:
        return False
    modules = [collection, *collection.embeddings.values()]
    if any([module._forward_hooks or module._forward_pre_hooks for module in modules]):
        return False
    tables = collection.embeddings.values()
    return all([type(one.weight) is nn.Parameter and one.weight.is_cuda and not one.sparse for one in tables])


def look_up(collection: EmbeddingCollection, ids: KeyedJaggedTensor, outside: OutsideIds) -> dict[str, JaggedTensor]:
    """The collection's output as rows that are not read yet, with the same gradients; counts ids outside of tables."""
    by_key, found, values, weights = ids.to_dict(), {}, [], []
    lookups = [
        (embedding, key, table.name)
        for table, names in zip(collection.embedding_configs(), collection.embedding_names_by_table(), strict=True)
        for embedding, key in zip(names, table.feature_names, strict=True)
    ]
    for _, key, table in lookups:
        own, weight = by_key[key].values(), collection.embeddings[table].weight
        check_indices(f"features['{key}']", own, weight.shape[0], f"table '{table}'", padded=False)
        values.append(own)
        weights.append(weight)
    values = bound_ids(values, [weight.shape[0] for weight in weights], outside.on(values[0].device))
    for (embedding, key, _), own, weight in zip(lookups, values, weights, strict=True):
        parts = by_key[key].lengths_or_none(), by_key[key].offsets_or_none()
        # As the collection converts them, whatever the table's dtype.
        by_id = bounded_rows_by_id((weight,), (own,), torch.float32)
        found[embedding] = TableRows(by_id.tables[0], by_id.indices[0], by_id.rows, *parts)
    return found


@torch.fx.wrap
def with_event_inputs(
    embeddings: dict[str, JaggedTensor],
    ids: KeyedJaggedTensor,
    features: list[SequenceFeatureConfig],
    id_keys: dict[str, str],
) -> dict[str, JaggedTensor]:
    """Adds to an EmbeddingCollection's output what only its input has: weights, bucket ids and times of the events.

    Args:
        embeddings: the output.
        ids: the input, with the keys of biases.
        features: what reads them.
        id_keys: by key of the output that of the ids where they differ.
    """
    sequences, present = as_dict(embeddings), ids.keys()
    for feature in features:
        for key in feature.input_keys:
            # For targets with times TimeBias reads no ids; without times `check_inputs` asks for these.
            if isinstance(feature.bias, TimeBias) and key == feature.bias_key and key not in present:
                continue
            require_keys("sequences", present, [key])
            sequences[input_key(key)] = ids[key]
        if feature.reads_weights:
            key = feature.sequence_keys[0]
            sequences[key] = with_weights(sequences[key], ids[id_keys.get(key, key)].weights_or_none())
    return sequences


def waited(output: object) -> object:
    """Returns what the awaitable of a sharded collection holds, once it has arrived; anything else as it is.

    Called before the first look at an attribute: that waits too, but torch.compile cannot trace it.
    """
    return _wait(output) if isinstance(output, LazyAwaitable) else output


@torch.compiler.disable
def _wait(awaitable: LazyAwaitable) -> object:
    return LazyAwaitable._wait_async(awaitable)  # which keeps the result, for all that read the same awaitable


def as_dict(
    sequences: dict[str, JaggedTensor], must_be: str = "a dict of JaggedTensor by key"
) -> dict[str, JaggedTensor]:
    """The mapping as a new dict, or what the awaitable holds that a sharded collection returns.

    A ManagedCollisionEmbeddingCollection returns it in a tuple, with the remapped ids or None.
    """
    if type(sequences) is tuple and len(sequences) == 2:
        sequences = sequences[0]
    sequences = waited(sequences)
    if not hasattr(sequences, "items"):
        raise TypeError(f"sequences must be {must_be}, got {type(sequences).__name__}")
    return dict(sequences.items())


def fetched(sequences: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    """The mapping with the rows that lie on several ranks, for what cannot go to them."""
    if isinstance(sequences, KeyedJaggedTensor):
        return sequences  # which `read_inputs` refuses
    read = as_dict(sequences)
    for key, events in read.items():
        if isinstance(events, SpreadRows):
            parts = {"lengths": events.lengths_or_none(), "offsets": events.offsets_or_none()}
            read[key] = JaggedTensor(events.values(), weights=events.weights_or_none(), **parts)
    return read


@torch.fx.wrap
def require_targets(targets: object) -> object:
    """Returns the targets of a layer that reads them; `read_inputs` takes None for those that are not read."""
    if targets is None:
        raise TypeError("targets must be a KeyedTensor or a dict of Tensor by target key, got None")
    return targets


@torch.fx.wrap
def read_inputs(
    sequences: dict[str, JaggedTensor],
    groups: list[FeatureGroup],
    targets: KeyedTensor | dict[str, Tensor] | dict[str, JaggedTensor] | None = None,
    target_times: JaggedTensor | None = None,
    event_times: JaggedTensor | dict[str, JaggedTensor] | None = None,
    max_events: int | None = None,
) -> list[GroupInputs]:
    """Checks, reads and concatenates the tensors of every group.

    Args:
        sequences: embeddings [S, embedding_dim] by sequence key, and bucket ids and times [S] by the keys of biases.
        groups: what to read.
        targets: embeddings [B, embedding_dim] by target key, or ragged ones; None where no target is read.
        target_times: of ragged targets, as `JaggedFeatureInteraction.forward` takes them.
        event_times: given with target_times.
        max_events: the most events that a candidate sees.
    """
    if isinstance(sequences, KeyedJaggedTensor):
        raise TypeError(
            "sequences is a KeyedJaggedTensor of ids, which needs embedding_collection given at construction; "
            "without it sequences must be an EmbeddingCollection's output, dict[str, JaggedTensor]"
        )
    sequences = as_dict(sequences)
    targets = waited(targets)
    if isinstance(targets, dict):
        targets = {key: waited(target) for key, target in targets.items()}
    elif targets is not None:
        if hasattr(targets, "to_dict"):
            targets = targets.to_dict()
        elif hasattr(targets, "items"):
            targets = dict(targets.items())
        else:
            raise TypeError(
                "targets must be a KeyedTensor or a dict of Tensor by target key, such as "
                f"{{'{groups[0].target_keys[0][0]}': target}}, got {type(targets).__name__}"
            )
    ragged = None
    if targets is not None:
        options = (target_times, event_times, max_events)
        has_options = target_times is not None or event_times is not None or max_events is not None
        first = targets.get(groups[0].target_keys[0][0])
        if isinstance(first, JaggedTensor) or has_options:
            ragged = read_ragged_targets(targets, groups, sequences, *options)
            targets = ragged.values
    check_inputs(sequences, groups, targets, ragged)
    device = sequences[groups[0].sequence_keys[0][0]].device()
    if device.type != "meta" and torch.is_autocast_enabled(device.type):  # under which cat refuses some dtypes
        with torch.autocast(device.type, enabled=False):
            return _read_groups(sequences, groups, targets, ragged)
    return _read_groups(sequences, groups, targets, ragged)


def _read_groups(
    sequences: dict[str, JaggedTensor],
    groups: list[FeatureGroup],
    targets: dict[str, Tensor] | None,
    ragged: RaggedTargets | None,
) -> list[GroupInputs]:
    """Reads and concatenates; field by field, so that adding or concatenating fields is one kernel for all features."""
    read = []
    for group in groups:
        feature, target, fields = group.features[0], None, []
        if targets is not None:
            target = combine(_stacked(targets, group.target_keys), feature)
        by_id = _rows_by_id(sequences, group)
        digits = () if targets is None else _digits(sequences, group)
        spread = () if targets is None else _spread(sequences, group, ragged is not None)
        if by_id is not None:
            fields = [by_id.rows]
        elif digits:
            count = sum([one.rows.size(0) for one in digits])
            fields = [digits[0].rows.new_zeros(()).expand(count, group.embedding_dim)]
        elif spread:  # whose bias and weights lie where the rows do
            offsets = sequences[group.sequence_keys[0][0]].offsets()
            fields = (target.new_zeros((), dtype=spread[0].dtype).expand(0, group.embedding_dim),)
            read.append(GroupInputs(target, fields, offsets, None, None, None, [], spread=spread))
            continue
        else:
            for keys in group.sequence_keys:
                fields.append(
                    sequences[keys[0]].values() if len(keys) == 1 else join([sequences[k].values() for k in keys])
                )
        if feature.combine == "sum" and len(fields) > 1:
            fields = [combine(fields, feature)]
        firsts = [sequences[key] for key in group.sequence_keys[0]]
        offsets, count = join_offsets(firsts), fields[0].size(0)
        if padding_state.is_padded:
            sources = [[sequences[key] for key in keys] for keys in group.sequence_keys]
            if len(fields) < len(sources):
                sources = [[one for field in sources for one in field]]
            fields = [own_rows(rows, offsets, own) for rows, own in zip(fields, sources, strict=True)]

        weights = score_bias = bias_index = times = None
        if group.reads_weights:
            weights = join([events.weights() for events in firsts])
        bias = feature.bias
        candidates = None if ragged is None else ragged.of(group)
        if candidates is not None and is_by_pair(bias, candidates.times is not None):
            pass  # the operator finds the buckets of each pair
        elif isinstance(bias, WeightBias):
            score_bias = _log_weights(weights)
        elif isinstance(bias, PositionBias):
            bias_index = position_buckets(offsets, count, bias.num_buckets, padding_state.is_padded)
        elif isinstance(bias, KeyBias):
            ids = join([event_input(sequences, one.bias.key).values() for one in group.features])
            (bias_index,) = bound_ids([ids], [bias.num_buckets])  # else an id would name another feature's rows
        if bias_index is not None and len(firsts) > 1:
            stacked = bias_index + _first_rows(offsets, count, len(firsts), bias.num_buckets)
            bias_index = torch.where(bias_index < 0, -1, stacked) if isinstance(bias, KeyBias) else stacked
        if feature.relative_bias is not None and feature.time_key is not None:
            times = join([event_input(sequences, one.time_key).values() for one in group.features])
        value_scale = weights if feature.weighted_values else None
        events = [count] if len(firsts) == 1 else [unread(one).size(0) for one in firsts]
        own = (score_bias, bias_index, value_scale, events, times, candidates, by_id, digits)
        read.append(GroupInputs(target, tuple(fields), offsets, *own))
    return read


def _rows_by_id(sequences: dict[str, JaggedTensor], group: FeatureGroup) -> RowsById | None:
    """The events of a group whose rows lie in tables: field by field in one for all features, and fields are added."""
    if not isinstance(sequences[group.sequence_keys[0][0]], TableRows):
        return None
    if len(group.sequence_keys) > 1 and group.features[0].combine != "sum":
        return None
    fields = []
    for keys in group.sequence_keys:
        events = [sequences[key] for key in keys]
        tables = {one.table.data_ptr() for one in events if isinstance(one, TableRows)}
        if len(tables) != 1 or not all([isinstance(one, TableRows) for one in events]):
            return None
        first = events[0]
        rows = first.rows if len(events) == 1 else join_rows([one.rows for one in events])
        fields.append(RowsById(rows, (first.table,), (join([one.ids for one in events]),)))
    return sum_rows(fields)


def _digits(sequences: dict[str, JaggedTensor], group: FeatureGroup) -> tuple[DigitRows, ...]:
    """The events of a group, feature by feature, if they are semantic IDs alone and `digit_attention` takes them."""
    first = sequences[group.sequence_keys[0][0]]
    if len(group.sequence_keys) > 1 or not isinstance(first, DigitRows):
        return ()
    events = [sequences[key] for key in group.sequence_keys[0]]
    if not all([isinstance(one, DigitRows) for one in events]):
        return ()
    if any([one.embedding is not first.embedding for one in events]):
        return ()
    if first.rows.is_cuda and first.rows.dtype == torch.float64:  # kernels take none
        return ()
    if group.features[0].weighted_values and any([one.weights().requires_grad for one in events]):
        return ()
    return tuple(events)


def _spread(sequences: dict[str, JaggedTensor], group: FeatureGroup, ragged: bool) -> tuple[SpreadEvents, ...]:
    """The events of a group, if they lie on several ranks and attention can go there."""
    found = []
    for feature in group.features:
        events = None
        for key in feature.sequence_keys:
            if isinstance(sequences[key], SpreadRows):
                events = sequences[key].events.get(feature.name)
                break
        if events is None:
            return ()
        if events not in found:
            found.append(events)
    if ragged:
        raise ValueError(
            f"attention that goes to the rows of other ranks takes a target a sample, got ragged targets for feature "
            f"'{group.features[0].name}': exchange rows instead"
        )
    return tuple(found)


def own_rows(rows: Tensor, offsets: Tensor, sources: list[JaggedTensor]) -> Tensor:
    """Rows [S, D] of these sources as they are, in a batch with room with a gradient of zero behind the last sample.

    Kernels leave the gradient of these rows unwritten, and an nn.Embedding adds up what it gets. A subclass of
    JaggedTensor has rows by id, and the step of its table leaves padding out.
    """
    if all([isinstance(one, TableRows) for one in sources]) or not rows.requires_grad:
        return rows
    return _OwnRows.apply(rows, offsets)


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (offsets,) = ctx.saved_tensors
        behind = torch.arange(grad.size(0), device=grad.device) >= offsets[-1]
        return grad.masked_fill(behind.unsqueeze(1), 0.0), None


def _stacked(targets: dict[str, Tensor], fields: list[tuple[str, ...]]) -> list[Tensor]:
    """Field by field the targets of all features [F, B, embedding_dim]."""
    stacked = []
    for keys in fields:
        alone = len(keys) == 1
        stacked.append(targets[keys[0]].unsqueeze(0) if alone else torch.stack([targets[key] for key in keys]))
    return stacked


def combine(fields: list[Tensor], feature: SequenceFeatureConfig) -> Tensor:
    """Aligned fields as one tensor: added, or side by side in the last dimension."""
    if len(fields) == 1:
        return fields[0]
    if feature.combine == "concat":
        return torch.cat(fields, dim=-1)
    total = fields[0] + fields[1]
    for field in fields[2:]:
        total += field  # in place: one tensor of the history's size, however many fields
    return total


def _log_weights(weights: Tensor) -> Tensor:
    """The score bias by which an event of weight 2 counts as two: the logarithm, -inf at 0 without a gradient."""
    if not weights.requires_grad:
        return weights.log()
    # The gradient of log(0) is infinite, and 0 * inf is NaN: an event left out must not pass through log.
    left_out = weights == 0
    return weights.masked_fill(left_out, 1).log().masked_fill(left_out, -torch.inf)


def position_buckets(offsets: Tensor, num_events: int, num_buckets: int, room: bool = False) -> Tensor:
    """Bucket floor(log2(d + 1)) of each event [S], where d counts the events after it in its sample.

    Example:
        >>> position_buckets(torch.tensor([0, 1, 1, 6]), 6, 32)
        tensor([0, 2, 2, 1, 1, 0], dtype=torch.int32)
    """
    place = torch.arange(num_events, device=offsets.device, dtype=offsets.dtype)
    # An event's sample ends at the first offset beyond it.
    ends = torch.searchsorted(offsets, place, right=True, out_int32=True)
    if room:  # rows behind the last sample, which nobody reads
        ends = ends.clamp_(max=offsets.size(0) - 1)
    ends = offsets.index_select(0, ends)
    return floor_log2(ends - place, num_buckets)


def floor_log2(count: Tensor, num_buckets: int) -> Tensor:
    """floor(log2(count)), int32, at most num_buckets - 1: how many of the powers 2, 4, ... the count has reached.

    Compared as integers, since a logarithm may round up.
    """
    bits = torch.iinfo(count.dtype).bits - 1
    exponents = torch.arange(1, min(num_buckets, bits), device=count.device, dtype=count.dtype)
    return torch.bucketize(count, 1 << exponents, right=True, out_int32=True)


def _first_rows(offsets: Tensor, num_events: int, num_features: int, num_buckets: int) -> Tensor:
    """[S]: the first row of the table of each event's feature; computed on the device to avoid a copy from the host."""
    events = offsets.diff().view(num_features, -1).sum(1)
    rows = torch.arange(0, num_features * num_buckets, num_buckets, device=offsets.device)
    return torch.repeat_interleave(rows, events, output_size=num_events)


def join_offsets(tensors: list[JaggedTensor]) -> Tensor:
    """Offsets [F * B + 1] of F jagged tensors of B samples whose rows are concatenated."""
    if len(tensors) == 1:
        return tensors[0].offsets()
    lengths = [tensor.lengths_or_none() for tensor in tensors]
    if any([one is None for one in lengths]):
        joined = torch.stack([tensor.offsets() for tensor in tensors]).diff().flatten()
    else:
        joined = join(lengths)
    return F.pad(joined.cumsum(0), (1, 0))


@torch.fx.wrap
def key_bias(inputs: GroupInputs, table: Tensor | None, num_heads: int, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores of each event, by head.

    Args:
        inputs: whose events they are.
        table: [F * num_buckets, H], the learned values, if any.
        num_heads: H.
        dtype: of the result.

    Returns:
        [S, H], or None for features without a bias.
    """
    if inputs.bias_index is not None:
        return table_bias(table, inputs.bias_index).to(dtype)
    if inputs.score_bias is not None:
        return inputs.score_bias.unsqueeze(1).expand(-1, num_heads).to(dtype)
    return None
