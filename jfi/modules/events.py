"""The events of a batch as operators take them: `Events`, built once from TorchRec's types.

Feature f of F in a group has samples f·B to (f+1)·B of one jagged batch, so that one call of an operator serves all
features; the number of kernels does not depend on F. What is adjacent in memory already is not copied: the outputs of a
sharded EmbeddingCollection are, and so are the lengths, ids and weights of neighbouring keys of a KeyedJaggedTensor.

With times, a candidate of ragged targets sees the events of its user that are strictly older than itself.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from jfi.modules import validation
from jfi.modules.sequence_configs import (
    Bias,
    FeatureGroup,
    KeyBias,
    PositionBias,
    SequenceFeatureConfig,
    TimeBias,
    WeightBias,
)
from jfi.ops.target_attention import table_bias
from jfi.tables.gather_rows import bound_ids, read_rows
from jfi.tables.rows_by_id import RowsById, join_rows, sum_rows
from jfi.tables.table_rows import (
    DigitRows,
    RemoteAttention,
    RemoteRows,
    TableRows,
    UnreadRows,
    join,
    own_rows,
)
from jfi.utils.context import padding_state, without_autocast


@dataclass
class Events:
    """The events and the targets of a group of F features.

    The vectors of the S events are in one of `fields`, `by_id`, `digits` and `remote`.

    Attributes:
        offsets: [F * B + 1], of the events; of ragged targets B is the number of users.
        fields: [S, ...] each; concatenated they are the events, `sequence_width` wide. Of vectors elsewhere one tensor
            of their shape and dtype without memory.
        target: [F, B, target_width], or [B, target_width] of one feature; B is R where targets are ragged.
        by_id: rows of tables, which the attention reads itself.
        digits: events whose digits it reads itself, feature by feature.
        remote: events whose rows lie on several ranks, those of each feature in one of these.
        counts: how many of the S events each feature has.
        score_bias: [S], floating, the same for all heads.
        bias_index: [S], integer: rows of the learned tables [F * num_buckets, H], one below the other.
        value_scale: [S].
        times: [S], of a TimeBias of pairs and of ragged targets with times.
        target_offsets: [F * B + 1], from 0 to F * R: the candidates of each user; None unless targets are ragged.
        target_times: [F * R]; with them a candidate sees strictly older events.
        max_visible: with times the most events that a candidate sees, the newest ones; None for all.
    """

    offsets: Tensor
    fields: tuple[Tensor, ...]
    target: Tensor | None = None
    by_id: RowsById | None = None
    digits: tuple[DigitRows, ...] = ()
    remote: tuple[RemoteAttention, ...] = ()
    counts: tuple[int, ...] = ()
    score_bias: Tensor | None = None
    bias_index: Tensor | None = None
    value_scale: Tensor | None = None
    times: Tensor | None = None
    target_offsets: Tensor | None = None
    target_times: Tensor | None = None
    max_visible: int | None = None

    @property
    def stacked_target(self) -> Tensor:
        """Returns the targets [F, B, target_width], also of one feature."""
        return self.target.unsqueeze(0) if self.target.dim() == 2 else self.target

    @property
    def history(self) -> Tensor:
        """Returns [S, sequence_width], an event a row; a copy if there are several fields or the rows were not read."""
        if self.digits:
            return join([one.values() for one in self.digits])
        if self.by_id is not None:
            return read_rows(self.by_id)
        return self.fields[0] if len(self.fields) == 1 else torch.cat(self.fields, dim=1)

    def key_bias(self, table: Tensor | None, num_heads: int, dtype: torch.dtype) -> Tensor | None:
        """Returns what is added to the scores of each event, by head: [S, H], or None without a bias.

        The table [F * num_buckets, H] has the learned values of a learned bias.
        """
        if self.bias_index is not None:
            return table_bias(table, self.bias_index, dtype)
        if self.score_bias is not None:
            return self.score_bias.unsqueeze(1).expand(-1, num_heads).to(dtype)
        return None


_SEQUENCES = "sequences must be a dict of JaggedTensor by key"
_TARGETS = "targets must be a KeyedTensor or a dict of Tensor by target key, such as {{'{}': target}}"
#: Ragged targets: their offsets [U + 1] from 0 to R, and what `read_events` takes for them.
_Candidates = tuple[Tensor, JaggedTensor | None, JaggedTensor | dict[str, JaggedTensor] | None, int | None]


def read_events(
    sequences: dict[str, JaggedTensor],
    groups: list[FeatureGroup],
    targets: KeyedTensor | dict[str, Tensor] | dict[str, JaggedTensor] | None = None,
    target_times: JaggedTensor | None = None,
    event_times: JaggedTensor | dict[str, JaggedTensor] | None = None,
    max_events: int | None = None,
    only_ragged: bool = False,
) -> list[Events]:
    """Checks, reads and concatenates the tensors of every group.

    A caller's module registers it by `torch.fx.wrap("read_events")`, so that TorchRec's tracers do not enter it. The
    arguments are those of `JaggedFeatureInteraction.forward` without a collection; no targets are read if they are
    None, or with `only_ragged` if they are dense.
    """
    if isinstance(sequences, KeyedJaggedTensor):
        raise TypeError(
            "sequences is a KeyedJaggedTensor of ids, which needs embedding_collection given at construction; "
            "without it sequences must be an EmbeddingCollection's output, dict[str, JaggedTensor]"
        )
    if type(sequences) is not dict:
        sequences = as_dict(sequences)
    candidates, first_key, times = None, groups[0].target_keys[0][0], (target_times, event_times, max_events)
    has_times = target_times is not None or event_times is not None or max_events is not None
    if targets is not None or has_times:
        targets = as_dict({} if targets is None else targets, _TARGETS, first_key, of_targets=True)
        if has_times or isinstance(targets.get(first_key), JaggedTensor):
            validation.check_ragged_targets(targets, groups, sequences, *times)
            candidates = targets[first_key].offsets(), *times
            read = {key for group in groups for keys in group.target_keys for key in keys}
            targets = {key: targets[key].values() for key in read}
        elif only_ragged:
            targets = None
    target_offsets = None if candidates is None else candidates[0]
    validation.check_inputs(sequences, groups, targets, target_offsets, target_times is not None)
    device = sequences[groups[0].sequence_keys[0][0]].offsets().device
    with without_autocast(device.type):  # under which cat refuses some dtypes
        return [_read_group(sequences, group, targets, candidates) for group in groups]


@torch.compiler.disable
def wait(awaitable: LazyAwaitable) -> object:
    return LazyAwaitable._wait_async(awaitable)  # which keeps the result, for all that read the same awaitable


def as_dict(tensors: object, must: str = _SEQUENCES, key: str = "", of_targets: bool = False) -> dict[str, Any]:
    """Returns a mapping of tensors by key, a KeyedTensor or what an awaitable holds as a new dict.

    Sequences may be the tuple that a ManagedCollisionEmbeddingCollection returns, targets a KeyedJaggedTensor.
    """
    if type(tensors) is not dict:
        if not of_targets and type(tensors) is tuple and len(tensors) == 2:
            tensors = tensors[0]
        if isinstance(tensors, LazyAwaitable):  # a look at an attribute waits too, but torch.compile cannot trace it
            tensors = wait(tensors)
        if isinstance(tensors, KeyedTensor) or (of_targets and isinstance(tensors, KeyedJaggedTensor)):
            tensors = tensors.to_dict()
        if not hasattr(tensors, "items"):
            raise TypeError(f"{must.format(key)}, got {type(tensors).__name__}")
    found = dict(tensors.items())
    for key, one in found.items():
        if isinstance(one, LazyAwaitable):
            found[key] = wait(one)
    return found


def _read_group(
    sequences: dict[str, JaggedTensor],
    group: FeatureGroup,
    targets: dict[str, Tensor] | None,
    candidates: _Candidates | None,
) -> Events:
    """Reads and concatenates; field by field, so that adding or concatenating fields is one kernel for all features."""
    feature, firsts = group.features[0], [sequences[key] for key in group.sequence_keys[0]]
    events = Events(firsts[0].offsets(), ())
    if targets is not None:
        if len(group.features) == 1:
            fields = [targets[key] for (key,) in group.target_keys]
        else:
            fields = [torch.stack([targets[key] for key in keys]) for keys in group.target_keys]
        events.target = fields[0] if len(fields) == 1 else combine(fields, feature)
    is_unread = False
    for keys in group.sequence_keys:
        for key in keys:
            is_unread = is_unread or isinstance(sequences[key], UnreadRows)
    if not (is_unread and _refer_to_unread(events, sequences, group, firsts, candidates is not None)):
        fields = []
        for keys in group.sequence_keys:
            alone = len(keys) == 1
            fields.append(sequences[keys[0]].values() if alone else join([sequences[key].values() for key in keys]))
        if feature.combine == "sum" and len(fields) > 1:
            fields = [combine(fields, feature)]
        events.fields = tuple(fields)
    if events.remote:  # whose bias and weights lie where the rows do
        return events
    events.counts = (events.fields[0].size(0),)
    if len(firsts) > 1:
        events.offsets = join_offsets(firsts)
        events.counts = tuple([validation.unread(one).size(0) for one in firsts])
    is_padded = bool(padding_state.blocks) and padding_state.is_padded  # the first part spares two calls
    if is_padded:
        sources = [sequences[key] for keys in group.sequence_keys for key in keys]
        events.fields = tuple([own_rows(rows, events.offsets, sources) for rows in events.fields])
    weights = join([one.weights() for one in firsts]) if group.reads_weights else None
    if feature.weighted_values:
        events.value_scale = weights
    if candidates is not None:
        _add_candidates(events, group, candidates)
    if isinstance(feature.relative_bias, TimeBias):
        events.times = join([validation.event_input(sequences, one.time_key).values() for one in group.features])
    if feature.bias is not None and (events.target_times is None or not is_by_pair(feature.bias, True)):
        _add_bias(events, sequences, group, weights, is_padded)
    return events


def _add_candidates(events: Events, group: FeatureGroup, candidates: _Candidates) -> None:
    features, (offsets, times, event_times, max_events) = len(group.features), candidates
    events.max_visible = None if max_events is None else int(max_events)
    events.target_offsets = offsets if features == 1 else F.pad(offsets.diff().repeat(features).cumsum(0), (1, 0))
    if times is not None:
        events.target_times = times.values() if features == 1 else times.values().repeat(features)
        by_feature = [
            (event_times if isinstance(event_times, JaggedTensor) else event_times[key]).values()
            for key in group.sequence_keys[0]
        ]
        events.times = by_feature[0] if features == 1 else torch.cat(by_feature)


def _add_bias(
    events: Events, sequences: dict[str, JaggedTensor], group: FeatureGroup, weights: Tensor | None, is_padded: bool
) -> None:
    bias, count = group.features[0].bias, events.fields[0].size(0)
    if isinstance(bias, WeightBias):
        if not weights.requires_grad:
            events.score_bias = weights.log()
        else:  # the gradient of log(0) is infinite, and 0 * inf is NaN
            left_out = weights == 0
            events.score_bias = weights.masked_fill(left_out, 1).log().masked_fill(left_out, -torch.inf)
        return
    if isinstance(bias, PositionBias):
        index = position_buckets(events.offsets, count, bias, is_padded)
    else:
        ids = join([validation.event_input(sequences, one.bias.key).values() for one in group.features])
        (index,) = bound_ids([ids], [bias.num_buckets])  # else an id would name another feature's rows
    features = len(group.features)
    if features > 1:  # on the device, to avoid a copy from the host
        counts = events.offsets.diff().view(features, -1).sum(1)
        firsts = torch.arange(0, features * bias.num_buckets, bias.num_buckets, device=counts.device)
        stacked = index + torch.repeat_interleave(firsts, counts, output_size=count)
        index = torch.where(index < 0, -1, stacked) if isinstance(bias, KeyBias) else stacked
    events.bias_index = index


def is_by_pair(bias: Bias | None, has_times: bool) -> bool:
    """Returns whether a learned bias belongs to a pair of candidate and event rather than to an event."""
    return has_times and isinstance(bias, PositionBias | TimeBias)


def _refer_to_unread(
    events: Events, sequences: dict[str, JaggedTensor], group: FeatureGroup, firsts: list[JaggedTensor], ragged: bool
) -> bool:
    """Lets the attention read the rows itself, if all are of a kind that it reads; returns whether it does."""
    events.by_id = _rows_by_id(sequences, group)
    if events.by_id is not None:
        events.fields = (events.by_id.rows,)
    elif events.target is None:
        return False
    elif _are_digits(firsts, group):
        events.digits = tuple(firsts)
        rows = firsts[0].rows
        events.fields = (rows.new_zeros(()).expand(sum([one.rows.size(0) for one in firsts]), group.embedding_dim),)
    else:
        events.remote = _remote(sequences, group, ragged)
        if events.remote:
            like = events.target.new_zeros((), dtype=events.remote[0].dtype)
            events.fields = (like.expand(0, group.embedding_dim),)
    return bool(events.fields)


def _rows_by_id(sequences: dict[str, JaggedTensor], group: FeatureGroup) -> RowsById | None:
    """Returns the events of a group whose rows lie in tables, each field in one for all features; fields are added."""
    if len(group.sequence_keys) > 1 and group.features[0].combine != "sum":
        return None
    fields = []
    for keys in group.sequence_keys:
        first, rows, ids = sequences[keys[0]], [], []
        for key in keys:
            one = sequences[key]
            if not isinstance(one, TableRows) or one.table.data_ptr() != first.table.data_ptr():
                return None
            rows.append(one.rows)
            ids.append(one.ids)
        fields.append(first.by_id if len(keys) == 1 else RowsById(join_rows(rows), (first.table,), (join(ids),)))
    return fields[0] if len(fields) == 1 else sum_rows(fields)


def _are_digits(firsts: list[JaggedTensor], group: FeatureGroup) -> bool:
    """Returns whether the events of a group are semantic IDs alone that `digit_attention` takes."""
    first = firsts[0]
    if len(group.sequence_keys) > 1 or not isinstance(first, DigitRows):
        return False
    if not all([isinstance(one, DigitRows) and one.embedding is first.embedding for one in firsts]):
        return False
    if first.rows.is_cuda and first.rows.dtype == torch.float64:  # kernels take none
        return False
    return not (group.features[0].weighted_values and any([one.weights().requires_grad for one in firsts]))


def _remote(sequences: dict[str, JaggedTensor], group: FeatureGroup, ragged: bool) -> tuple[RemoteAttention, ...]:
    """Returns the events of a group, if they lie on several ranks and attention can go there."""
    found = []
    for feature in group.features:
        events = None
        for key in feature.sequence_keys:
            if isinstance(sequences[key], RemoteRows):
                events = sequences[key].events.get(feature.name)
                break
        if events is None or not events.reads(feature, sequences):
            return ()
        if events not in found:
            found.append(events)
    if ragged:
        raise ValueError(
            f"attention that goes to the rows of other ranks takes a target a sample, got ragged targets for feature "
            f"'{group.features[0].name}': exchange rows instead"
        )
    return tuple(found)


def combine(fields: list[Tensor], feature: SequenceFeatureConfig) -> Tensor:
    """Adds aligned fields, or concatenates them along the last dimension."""
    if len(fields) == 1:
        return fields[0]
    if feature.combine == "concat":
        return torch.cat(fields, dim=-1)
    total = fields[0] + fields[1]
    for field in fields[2:]:
        total += field  # in place: one tensor of the history's size, however many fields
    return total


def position_buckets(offsets: Tensor, num_events: int, bias: PositionBias, is_padded: bool = False) -> Tensor:
    """Returns the bucket of each event [S] by how many events its sample has from it on.

    Example:
        >>> position_buckets(torch.tensor([0, 1, 1, 6]), 6, PositionBias())
        tensor([0, 2, 2, 1, 1, 0], dtype=torch.int32)
    """
    position = torch.arange(num_events, device=offsets.device, dtype=offsets.dtype)
    # An event's sample ends at the first offset beyond it.
    ends = torch.searchsorted(offsets, position, right=True, out_int32=True)
    if is_padded:  # rows behind the last sample, which nobody reads
        ends = ends.clamp_(max=offsets.size(0) - 1)
    count = offsets.index_select(0, ends) - position
    return floor_log2(count, bias.num_buckets) if bias.buckets is None else bias.buckets(count)


def floor_log2(count: Tensor, num_buckets: int) -> Tensor:
    """Returns floor(log2(count)), int32, at most num_buckets - 1: how many of 2, 4, ... the count has reached.

    Compared as integers, since a logarithm may round up.
    """
    bits = torch.iinfo(count.dtype).bits - 1
    exponents = torch.arange(1, min(num_buckets, bits), device=count.device, dtype=count.dtype)
    return torch.bucketize(count, 1 << exponents, right=True, out_int32=True)


def join_offsets(tensors: list[JaggedTensor]) -> Tensor:
    """Returns the offsets [F * B + 1] of F jagged tensors of B samples whose rows are concatenated."""
    if len(tensors) == 1:
        return tensors[0].offsets()
    lengths = [tensor.lengths_or_none() for tensor in tensors]
    if any([one is None for one in lengths]):
        joined = torch.stack([tensor.offsets() for tensor in tensors]).diff().flatten()
    else:
        joined = join(lengths)
    return F.pad(joined.cumsum(0), (1, 0))
