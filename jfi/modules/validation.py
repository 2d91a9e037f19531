"""Checks of a batch, before any of it is read: each message names the key, what it holds and what it must hold.

Types, shapes and dtypes are always checked; contents on the CPU, and on a GPU only under `jfi.ops.validation`, since
reading them there waits for the device.
"""

import difflib
from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.modules.sequence_configs import (
    FeatureGroup,
    KeyBias,
    SequenceFeatureConfig,
    TimeBias,
    WeightBias,
    has_own_buckets,
)
from jfi.ops.checks import FLOATING, check_dense
from jfi.ops.dispatch import PLAIN
from jfi.tables.table_rows import UnreadRows
from jfi.utils.arguments import MAX_ROWS, check_ascending, check_int, check_type
from jfi.utils.context import may_read

_INTEGERS = (torch.int32, torch.int64)


def require_keys(argument: str, present: Collection[str], needed: Iterable[str]) -> None:
    """Raises a ValueError that names the first of `needed` that `present` lacks, and the nearest it has."""
    for key in needed:
        if key not in present:
            nearest = difflib.get_close_matches(key, present, n=3)
            known = f"nearest: {nearest}" if nearest else f"known: {sorted(present)}"
            raise ValueError(f"{argument} must hold the key '{key}', got none of that name; {known}")


def input_key(key: str) -> str:
    """Returns where `with_event_inputs` puts bucket ids or times; the key itself may be that of embeddings."""
    return f"ids of {key}"


def jagged_of(argument: str, tensors: dict[str, JaggedTensor], key: str) -> JaggedTensor:
    """Returns the jagged tensor of a key; raises if there is none."""
    tensor = tensors.get(key)
    if not isinstance(tensor, JaggedTensor):
        require_keys(argument, tensors, [key])
        raise TypeError(f"{argument}['{key}'] must be a JaggedTensor, got {type(tensor).__name__}")
    return tensor


def event_input(sequences: dict[str, JaggedTensor], key: str) -> JaggedTensor:
    """Returns the bucket ids or times of a key, which `with_event_inputs` or the caller of a layer has put there."""
    return jagged_of("sequences", sequences, input_key(key) if input_key(key) in sequences else key)


def unread(events: JaggedTensor) -> Tensor:
    """Returns the values of events, for their shape, dtype and device: of rows not read yet a placeholder."""
    return events.rows if isinstance(events, UnreadRows) else events.values()


def check_jagged(name: str, events: JaggedTensor | KeyedJaggedTensor) -> Tensor:
    """Checks that all parts are dense tensors on one device, and the lengths integers; returns the `unread` values."""
    values, weights = unread(events), events.weights_or_none()
    if type(values) not in PLAIN or values.layout is not torch.strided or values.is_nested:
        check_dense(name, values)
    if values.dim() == 0:
        raise ValueError(f"{name} must hold a tensor of at least one dimension, got one of none")
    if weights is not None:
        check_dense(f"the weights of {name}", weights)
    for what, part in (("lengths", events.lengths_or_none()), ("offsets", events.offsets_or_none())):
        if part is not None:
            must = f"{name} must have {what} in a dense int32 or int64 tensor [B]"
            if not isinstance(part, Tensor) or part.dtype not in _INTEGERS:
                raise TypeError(f"{must}, got {part.dtype if isinstance(part, Tensor) else type(part).__name__}")
            is_dense = part.layout is torch.strided and not part.is_nested
            if not is_dense or part.dim() != 1:
                raise ValueError(f"{must}, got {f'shape {list(part.shape)}' if is_dense else part.layout}")
        for tensor in (part, weights):
            if tensor is not None and tensor.device != values.device:
                raise ValueError(f"{name} must be on one device, got {values.device} and {tensor.device}")
    return values


@torch.fx.wrap
def allow_no_samples(ids: KeyedJaggedTensor) -> None:
    """Fills the cache of to_dict, with which embedding collections begin, where it fails: for a batch of no samples."""
    if ids.stride() == 0:
        ids._jt_dict = {key: ids[key] for key in [*ids.keys()]}


@torch.fx.wrap
def check_ids(argument: str, ids: KeyedJaggedTensor, needed: list[str], sharded: bool) -> bool:
    """Checks the ids that embedding collections are about to read; returns whether their contents may be read."""
    if not isinstance(ids, KeyedJaggedTensor):
        raise TypeError(f"{argument} must be a KeyedJaggedTensor of ids, got {type(ids).__name__}")
    require_keys(argument, ids.keys(), needed)
    values, weights = check_jagged(argument, ids), ids.weights_or_none()
    if values.dtype not in _INTEGERS or values.dim() != 1:
        got = f"{values.dtype} of shape {list(values.shape)}"
        raise TypeError(f"{argument} must hold int32 or int64 ids [S], got {got}")
    if weights is not None and weights.shape != values.shape:
        raise ValueError(f"{argument} must have weights of shape {list(values.shape)}, got {list(weights.shape)}")
    varies, is_readable = ids.variable_stride_per_key(), may_read(values)
    if is_readable and not varies:
        lengths = ids.lengths()
        if lengths.numel() != len(ids.keys()) * ids.stride():
            raise ValueError(f"{argument} must have as many lengths for each of its keys, got {lengths.numel()} in all")
        if (lengths < 0).any():
            raise ValueError(f"{argument} must have lengths of at least 0, got {lengths.min().item()}")
        if sum(ids.length_per_key()) != values.size(0):
            got = f"{values.size(0)}, while its lengths count {sum(ids.length_per_key())}"
            raise ValueError(f"{argument} must hold as many ids as its lengths count, got {got}")
    if not sharded and varies:
        raise ValueError(
            f"{argument} must have one batch size for all keys, got {ids.stride_per_key()}: variable batch sizes (VBE) "
            "need a collection that is sharded, by DistributedModelParallel"
        )
    allow_no_samples(ids)
    return is_readable


def check_inputs(
    sequences: dict[str, JaggedTensor],
    groups: list[FeatureGroup],
    targets: dict[str, Tensor] | None,
    target_offsets: Tensor | None,
    has_times: bool,
) -> None:
    """Checks all that the features of all groups read.

    Ragged targets have `target_offsets` [U + 1], which `check_ragged_targets` has checked.
    """
    first_key, batch_size, rows = groups[0].sequence_keys[0][0], None, "samples"
    for group in groups:
        dtype = None
        for feature in group.features:
            key = feature.sequence_keys[0]
            events, values = _check_events(sequences, feature, group.embedding_dim, has_times)
            if dtype is None:
                dtype = values.dtype
            elif values.dtype != dtype:
                like = f"{dtype} like '{group.sequence_keys[0][0]}', since both are read in one launch"
                raise ValueError(f"sequences['{key}'] must be {like}, got {values.dtype}")
            if targets is None:
                continue
            lengths = events.lengths_or_none()
            samples = events.offsets().size(0) - 1 if lengths is None else lengths.size(0)
            if batch_size is None:
                batch_size = count = samples
                if target_offsets is not None:
                    target_key, rows = groups[0].target_keys[0][0], "rows"
                    count, users = targets[target_key].size(0), target_offsets.size(0) - 1
                    if users != samples:
                        must = f"have {samples} users like sequences['{key}']"
                        raise ValueError(f"targets['{target_key}'] must {must}, got {users}")
            elif samples != batch_size:
                must = f"have {batch_size} samples like '{first_key}', since both enter one output"
                raise ValueError(f"sequences['{key}'] must {must}, got {samples}")
            for target_key in feature.target_keys:
                shape = count, group.target_dim
                _check_target(targets, target_key, shape, rows, values.device, key)


def _check_events(
    sequences: dict[str, JaggedTensor], feature: SequenceFeatureConfig, embedding_dim: int, has_times: bool
) -> tuple[JaggedTensor, Tensor]:
    """Checks the events of a feature with what its bias and its values read; returns the first field, and its rows."""
    first_key, first = feature.sequence_keys[0], None
    for key in feature.sequence_keys:
        events, name = sequences.get(key), f"sequences['{key}']"
        if not isinstance(events, JaggedTensor):
            jagged_of("sequences", sequences, key)  # raises
        values = check_jagged(name, events)
        if values.dim() != 2 or values.size(1) != embedding_dim or values.dtype not in FLOATING:
            raise ValueError(
                f"{name} must hold embeddings of shape [S, {embedding_dim}] (events, embedding_dim), "
                f"got {values.dtype} of shape {list(values.shape)}"
            )
        if first is None:
            first, rows = events, values
            continue
        if values.dtype != rows.dtype:
            raise ValueError(f"{name} must be {rows.dtype} like '{first_key}', got {values.dtype}")
        check_aligned(name, events, first_key, first)
    _check_lengths(f"sequences['{first_key}']", first, rows)
    bias = feature.bias
    if feature.weighted_values or isinstance(bias, WeightBias):
        _check_weights(feature, first)
    if isinstance(bias, KeyBias) and not (has_times and isinstance(bias, TimeBias)):
        name, must = f"sequences['{bias.key}']", "integer bucket ids of shape [S]"
        must += f", since it is the bias of feature '{feature.name}'"
        ids = _check_numbers(name, event_input(sequences, bias.key), _INTEGERS, must, first_key, first)
        if may_read(ids) and ids.numel():
            low, high = ids.min().item(), ids.max().item()
            if low < 0 or high >= bias.num_buckets:
                must = f"from 0 to {bias.num_buckets - 1} (num_buckets={bias.num_buckets} in feature '{feature.name}')"
                raise ValueError(f"{name} must hold bucket ids {must}, got {low if low < 0 else high}")
    if isinstance(feature.relative_bias, TimeBias):
        because = f", since feature '{feature.name}' has a relative TimeBias"
        times = event_input(sequences, feature.time_key)
        _check_times(f"sequences['{feature.time_key}']", times, first_key, first, because=because)
    return first, rows


def check_ragged_targets(
    targets: dict[str, JaggedTensor],
    groups: list[FeatureGroup],
    sequences: dict[str, JaggedTensor],
    target_times: JaggedTensor | None,
    event_times: JaggedTensor | dict[str, JaggedTensor] | None,
    max_events: int | None,
) -> None:
    """Checks all about ragged targets but the shapes of their embeddings, which `check_inputs` checks.

    The arguments are those of `JaggedFeatureInteraction.forward`.
    """
    features = [feature for group in groups for feature in group.features]
    first_key = groups[0].target_keys[0][0]
    require_keys("targets", targets, [first_key])
    first = targets[first_key]
    if not isinstance(first, JaggedTensor):
        must = f"targets['{first_key}'] must be a JaggedTensor, got {type(first).__name__}"
        raise TypeError(f"target_times, event_times and max_events need ragged targets: {must}")
    for key in dict.fromkeys(key for feature in features for key in feature.target_keys):
        name = f"targets['{key}']"
        require_keys("targets", targets, [key])
        if not isinstance(targets[key], JaggedTensor):
            must = f"a JaggedTensor like '{first_key}', got {type(targets[key]).__name__}"
            raise TypeError(f"{name} must be {must}: ragged and dense targets cannot be mixed")
        values = check_jagged(name, targets[key])
        if key != first_key:
            check_aligned(name, targets[key], first_key, first, "candidates")
        else:
            _check_lengths(name, first, values, "candidates")
    if (target_times is None) != (event_times is None):
        given, missing = ("target_times", "event_times")[:: 1 if event_times is None else -1]
        raise ValueError(f"{missing} must be given with {given}, got None")
    if max_events is not None:
        check_int("max_events", max_events, most=MAX_ROWS)
        if target_times is None:
            raise ValueError("max_events needs target_times, which say what lies before a candidate, got None")
    if target_times is None:
        return
    check_type("target_times", target_times, JaggedTensor, "a JaggedTensor")
    check_type("event_times", event_times, JaggedTensor | dict, "a JaggedTensor or a dict of them")
    for feature in features:
        why = None
        if isinstance(feature.bias, KeyBias) and not isinstance(feature.bias, TimeBias):
            why = ", whose ids are the same for all candidates of a user: TimeBias computes ages from the times"
        if has_own_buckets(feature.bias):
            why = ": by pair of candidate and event the kernels know the buckets of PositionBias alone"
        if why is not None:
            raise ValueError(f"target_times must be None for feature '{feature.name}' with {feature.bias!r}{why}")
    times = _check_times("target_times", target_times, first_key, first, "candidates")
    for key in dict.fromkeys(feature.sequence_keys[0] for feature in features):
        name, times_of_key = "event_times", event_times
        if not isinstance(event_times, JaggedTensor):
            name, times_of_key = f"event_times['{key}']", jagged_of("event_times", event_times, key)
        of_events = _check_times(name, times_of_key, key, jagged_of("sequences", sequences, key))
        if of_events.dtype != times.dtype:
            raise TypeError(f"{name} must be {times.dtype} like target_times, got {of_events.dtype}")


def _check_target(
    targets: dict[str, Tensor], key: str, shape: tuple[int, int], rows: str, device: torch.device, like: str
) -> None:
    """Checks the embeddings of one key, whose rows are `rows`, on the device of the history `like`."""
    target, name = targets.get(key), f"targets['{key}']"
    if type(target) not in PLAIN or target.is_nested or target.layout is not torch.strided:
        require_keys("targets", targets, [key])
        check_dense(name, target)
    if target.dtype not in FLOATING:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {target.dtype}")
    if target.device != device:
        raise ValueError(f"{name} must be on {device}, that of sequences['{like}'], got {target.device}")
    if target.dim() == 2 and torch.compiler.is_compiling():
        # Its rows may come from the data, where a compiler cannot branch on them.
        torch._check(target.size(0) == shape[0])
        shape = target.size(0), shape[1]
    if target.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)} ({rows}, embedding_dim), got {list(target.shape)}")


def _check_weights(feature: SequenceFeatureConfig, events: JaggedTensor) -> None:
    key, weights, count = feature.sequence_keys[0], events.weights_or_none(), unread(events).size(0)
    is_bias = isinstance(feature.bias, WeightBias)
    reason = f"since feature '{feature.name}' has " + ("a WeightBias" if is_bias else "weighted_values=True")
    if weights is None or not weights.is_floating_point() or weights.shape != (count,):
        got = "none" if weights is None else f"{weights.dtype} of shape {list(weights.shape)}"
        raise ValueError(
            f"sequences['{key}'] must have floating weights of shape [{count}], {reason}, got {got}; "
            "an EmbeddingCollection drops its input's weights: give that KeyedJaggedTensor too, as ids="
        )
    # Weighted values may be of either sign; a logarithm's argument may not.
    if is_bias and may_read(weights) and not (weights >= 0).all():
        got = weights[~(weights >= 0)][0].item()
        raise ValueError(f"sequences['{key}'] must have weights of at least 0, {reason}, got {got}")


def _check_numbers(
    name: str,
    numbers: JaggedTensor,
    dtypes: tuple[torch.dtype, ...],
    must: str,
    first_key: str,
    first: JaggedTensor,
    rows: str = "events",
) -> Tensor:
    """Checks numbers of one dimension that are aligned with `first`, whose rows are `rows`; returns them."""
    values = check_jagged(name, numbers)
    if values.dtype not in dtypes or values.dim() != 1:
        raise TypeError(f"{name} must hold {must}, got {values.dtype} of shape {list(values.shape)}")
    check_aligned(name, numbers, first_key, first, rows)
    return values


def _check_times(
    name: str, times: JaggedTensor, first_key: str, first: JaggedTensor, rows: str = "events", because: str = ""
) -> Tensor:
    """Checks numbers that, where readable, must not decrease either; returns them."""
    must = f"times of shape [{'S' if rows == 'events' else 'R'}], int32, int64 or float64{because}"
    values = _check_numbers(name, times, (*_INTEGERS, torch.float64), must, first_key, first, rows)
    if may_read(values) and values.numel():
        check_ascending(name, values, first.offsets(), rows[:-1])
    return values


def check_aligned(name: str, tensor: JaggedTensor, first_key: str, first: JaggedTensor, rows: str = "events") -> None:
    """Checks that the jagged tensor of this name, whose rows are `rows`, has the device and lengths of another one."""
    values, first_values = unread(tensor), unread(first)
    if values.device != first_values.device:
        raise ValueError(f"{name} must be on {first_values.device} like '{first_key}', got {values.device}")
    count, first_count = values.size(0), first_values.size(0)
    if torch.compiler.is_compiling():
        # Both counts may come from the data, where a compiler cannot branch on them.
        torch._check(count == first_count)
    elif count != first_count:
        raise ValueError(f"{name} must be aligned with '{first_key}', which has {first_count} {rows}, got {count}")
    if may_read(first_values):
        lengths, first_lengths = tensor.lengths(), first.lengths()
        if lengths.shape != first_lengths.shape or not torch.equal(lengths.long(), first_lengths.long()):
            raise ValueError(f"{name} must be aligned with '{first_key}', got other lengths in at least one sample")


def _check_lengths(name: str, tensor: JaggedTensor, values: Tensor, rows: str = "events") -> None:
    """Checks, where they are readable, that offsets go from 0 to the number of values, never down."""
    if not may_read(values) or (offsets := tensor.offsets()).numel() == 0:
        return
    first, last, count = offsets[0].item(), offsets[-1].item(), values.size(0)
    if (first, last) != (0, count):
        raise ValueError(f"{name} must have offsets from 0 to {count}, the number of its {rows}, got {first} to {last}")
    lengths = offsets.diff()
    if (lengths < 0).any():
        raise ValueError(f"{name} must have lengths of at least 0, got {lengths.min().item()}")
