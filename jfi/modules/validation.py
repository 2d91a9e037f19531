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
    RelativeTimeBias,
    SequenceFeatureConfig,
    TimeBias,
    WeightBias,
    has_own_buckets,
)
from jfi.modules.table_rows import UnreadRows
from jfi.ops.gather_rows import FLOATING, check_dense, may_read
from jfi.utils.arguments import MAX_ROWS, check_ascending, check_int

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


def event_input(sequences: dict[str, JaggedTensor], key: str) -> JaggedTensor:
    """Returns the bucket ids or times of a key, which `with_event_inputs` or the caller of a layer has put there."""
    events = sequences.get(input_key(key), sequences.get(key))
    if not isinstance(events, JaggedTensor):
        _refuse_type(sequences, key)
    return events


def check_jagged(name: str, events: JaggedTensor | KeyedJaggedTensor) -> Tensor:
    """Checks that the parts of what has this name are dense tensors on one device, and its lengths integers.

    Returns its values, for their shape, dtype and device alone.
    """
    values, weights = unread(events), events.weights_or_none()
    check_dense(name, values)
    if values.dim() == 0:
        raise ValueError(f"{name} must hold a tensor of at least one dimension, got one of none")
    if weights is not None:
        check_dense(f"the weights of {name}", weights)
    for what, part in (("lengths", events.lengths_or_none()), ("offsets", events.offsets_or_none())):
        if part is not None and (not isinstance(part, Tensor) or part.dtype not in _INTEGERS or part.is_nested):
            got = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise TypeError(f"{name} must have {what} in a dense int32 or int64 tensor, got {got}")
        if part is not None and (part.layout is not torch.strided or part.dim() != 1):
            got = f"{part.layout} of shape {list(part.shape)}"
            raise ValueError(f"{name} must have {what} in a dense tensor of one dimension, got {got}")
        for tensor in (part, weights):
            if tensor is not None and tensor.device != values.device:
                raise ValueError(f"{name} must be on one device, got {values.device} and {tensor.device}")
    return values


@torch.fx.wrap
def check_ids(argument: str, ids: KeyedJaggedTensor, needed: list[str], sharded: bool) -> None:
    """Checks the ids that embedding collections are about to read, where these would fail less clearly."""
    if not isinstance(ids, KeyedJaggedTensor):
        raise TypeError(f"{argument} must be a KeyedJaggedTensor of ids, got {type(ids).__name__}")
    require_keys(argument, ids.keys(), needed)
    values, weights = check_jagged(argument, ids), ids.weights_or_none()
    if values.dtype not in _INTEGERS or values.dim() != 1:
        got = f"{values.dtype} of shape {list(values.shape)}"
        raise TypeError(f"{argument} must hold int32 or int64 ids [S], got {got}")
    if weights is not None and weights.shape != values.shape:
        raise ValueError(f"{argument} must have weights of shape {list(values.shape)}, got {list(weights.shape)}")
    varies = ids.variable_stride_per_key()
    if may_read(values) and not varies:
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


def check_inputs(
    sequences: dict[str, JaggedTensor],
    groups: list[FeatureGroup],
    targets: dict[str, Tensor] | None,
    target_offsets: Tensor | None,
    has_times: bool,
) -> None:
    """Checks all that the features of all groups read.

    Args:
        sequences: the events, by key.
        groups: the features.
        targets: the embeddings, by target key; None if none are read.
        target_offsets: [U + 1], of ragged targets, which `check_ragged_targets` has checked.
        has_times: whether targets and events have times.

    Raises:
        ValueError, TypeError: the first fault.
    """
    batch_size = first_key = None
    for group in groups:
        dtype = None
        for feature in group.features:
            events, values = _check_events(sequences, feature, group.embedding_dim, has_times)
            if dtype is None:
                dtype = values.dtype
            elif values.dtype != dtype:
                raise ValueError(
                    f"sequences['{feature.sequence_keys[0]}'] must be {dtype} like '{group.sequence_keys[0][0]}', "
                    f"since both are read in one launch, got {values.dtype}"
                )
            if targets is None:
                continue
            lengths = events.lengths_or_none()
            samples = events.offsets().size(0) - 1 if lengths is None else lengths.size(0)
            if batch_size is None:
                batch_size, first_key, rows = samples, feature.sequence_keys[0], samples
                if target_offsets is not None:
                    key = group.target_keys[0][0]
                    rows = targets[key].size(0)
                    if target_offsets.size(0) != samples + 1:
                        raise ValueError(
                            f"targets['{key}'] must have {samples} users like sequences['{first_key}'], "
                            f"got {target_offsets.size(0) - 1}"
                        )
            elif samples != batch_size:
                raise ValueError(
                    f"sequences['{feature.sequence_keys[0]}'] must have {batch_size} samples like '{first_key}', "
                    f"since both enter one output, got {samples}"
                )
            for key in feature.target_keys:
                target = targets.get(key)
                is_dense = isinstance(target, Tensor) and not target.is_nested and target.layout is torch.strided
                if not is_dense or target.shape != (rows, group.width_of_targets) or target.dtype not in FLOATING:
                    _refuse_target(targets, key, rows, group.width_of_targets, target_offsets is not None)
                if target.device != values.device:
                    of = f"that of sequences['{feature.sequence_keys[0]}']"
                    raise ValueError(f"targets['{key}'] must be on {values.device}, {of}, got {target.device}")


def _check_events(
    sequences: dict[str, JaggedTensor], feature: SequenceFeatureConfig, embedding_dim: int, has_times: bool
) -> tuple[JaggedTensor, Tensor]:
    """Checks the events of a feature with what its bias and its values read; returns the first field, and its rows."""
    first_key, first = feature.sequence_keys[0], None
    for key in feature.sequence_keys:
        events = sequences.get(key)
        if not isinstance(events, JaggedTensor):
            _refuse_type(sequences, key)
        values = check_jagged(f"sequences['{key}']", events)
        if values.dim() != 2 or values.size(1) != embedding_dim or values.dtype not in FLOATING:
            raise ValueError(
                f"sequences['{key}'] must hold embeddings of shape [S, {embedding_dim}] (events, embedding_dim), "
                f"got {values.dtype} of shape {list(values.shape)}"
            )
        if first is None:
            first, rows, reads_contents = events, values, may_read(values)
            continue
        if values.dtype != rows.dtype:
            raise ValueError(f"sequences['{key}'] must be {rows.dtype} like '{first_key}', got {values.dtype}")
        check_aligned(f"sequences['{key}']", events, first_key, first, reads_contents)
    if reads_contents:
        check_lengths(f"sequences['{first_key}']", first, rows.size(0))
    bias = feature.bias
    if feature.weighted_values or isinstance(bias, WeightBias):
        _check_weights(feature, first)
    if isinstance(bias, KeyBias) and not (has_times and isinstance(bias, TimeBias)):
        _check_bucket_ids(sequences, feature, first)
    if isinstance(feature.relative_bias, RelativeTimeBias):
        because = f", since feature '{feature.name}' has a RelativeTimeBias"
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
        options = {"target_times": target_times, "event_times": event_times, "max_events": max_events}
        given = next(name for name, option in options.items() if option is not None)
        raise TypeError(
            f"{given} needs ragged targets: targets['{first_key}'] must be a JaggedTensor, got {type(first).__name__}"
        )
    values = check_jagged(f"targets['{first_key}']", first)
    reads_contents = may_read(values)
    for key in dict.fromkeys(key for feature in features for key in feature.target_keys):
        name = f"targets['{key}']"
        require_keys("targets", targets, [key])
        target = targets[key]
        if not isinstance(target, JaggedTensor):
            raise TypeError(
                f"{name} must be a JaggedTensor like '{first_key}', got {type(target).__name__}: ragged and "
                "dense targets cannot be mixed"
            )
        if check_jagged(name, target).dim() != 2:
            raise ValueError(f"{name} must be [R, embedding_dim], got shape {list(target.values().shape)}")
        if key != first_key:
            check_aligned(name, target, first_key, first, reads_contents, "candidates")
        elif reads_contents:
            check_lengths(name, first, values.size(0), "candidates")
    _check_options(features, target_times, event_times, max_events)
    if target_times is None:
        return
    times = _check_times("target_times", target_times, first_key, first, "candidates")
    if times.device != values.device:
        raise ValueError(f"target_times must be on {values.device} like the targets, got {times.device}")
    for key in dict.fromkeys(feature.sequence_keys[0] for feature in features):
        name, own = "event_times", event_times
        if not isinstance(event_times, JaggedTensor):
            require_keys(name, event_times, [key])
            name, own = f"event_times['{key}']", event_times[key]
        if not isinstance(own, JaggedTensor):
            raise TypeError(f"{name} must be a JaggedTensor, got {type(own).__name__}")
        events = sequences.get(key)
        if not isinstance(events, JaggedTensor):
            continue  # check_inputs refuses it
        of_events = _check_times(name, own, key, events)
        if of_events.device != times.device:
            raise ValueError(f"{name} must be on {times.device} like target_times, got {of_events.device}")
        if of_events.dtype != times.dtype:
            raise TypeError(f"{name} must be {times.dtype} like target_times, got {of_events.dtype}")


def _check_options(
    features: list[SequenceFeatureConfig],
    target_times: JaggedTensor | None,
    event_times: JaggedTensor | dict[str, JaggedTensor] | None,
    max_events: int | None,
) -> None:
    if (target_times is None) != (event_times is None):
        given, missing = ("target_times", "event_times")[:: 1 if event_times is None else -1]
        raise ValueError(f"{missing} must be given with {given}, got None")
    if max_events is not None:
        check_int("max_events", max_events, most=MAX_ROWS)
        if target_times is None:
            raise ValueError("max_events needs target_times, which say what lies before a candidate, got None")
    if target_times is None:
        return
    if not isinstance(target_times, JaggedTensor):
        raise TypeError(f"target_times must be a JaggedTensor, got {type(target_times).__name__}")
    if not isinstance(event_times, JaggedTensor | dict):
        raise TypeError(f"event_times must be a JaggedTensor or a dict of them, got {type(event_times).__name__}")
    for feature in features:
        if isinstance(feature.bias, KeyBias) and not isinstance(feature.bias, TimeBias):
            raise ValueError(
                f"target_times must be None for feature '{feature.name}' with {feature.bias!r}, whose ids are the same "
                "for all candidates of a user: TimeBias computes ages from the times"
            )
        if has_own_buckets(feature.bias):
            raise ValueError(
                f"target_times must be None for feature '{feature.name}' with {feature.bias!r}: by pair of candidate "
                "and event the kernels know the buckets of PositionBias alone"
            )


def _refuse_type(sequences: dict[str, JaggedTensor], key: str) -> None:
    require_keys("sequences", sequences, [key])
    raise TypeError(f"sequences['{key}'] must be a JaggedTensor, got {type(sequences[key]).__name__}")


def _refuse_target(targets: dict[str, Tensor], key: str, count: int, embedding_dim: int, is_ragged: bool) -> None:
    require_keys("targets", targets, [key])
    target = targets[key]
    if not isinstance(target, Tensor):
        raise TypeError(f"targets['{key}'] must be a Tensor, got {type(target).__name__}")
    check_dense(f"targets['{key}']", target)
    if target.dtype not in FLOATING:
        raise TypeError(f"targets['{key}'] must be float32, bfloat16, float16 or float64, got {target.dtype}")
    what, got = "rows" if is_ragged else "samples", list(target.shape)
    raise ValueError(f"targets['{key}'] must have shape [{count}, {embedding_dim}] ({what}, embedding_dim), got {got}")


def _check_weights(feature: SequenceFeatureConfig, events: JaggedTensor) -> None:
    key, weights, count = feature.sequence_keys[0], events.weights_or_none(), unread(events).size(0)
    is_bias = isinstance(feature.bias, WeightBias)
    reason = f"since feature '{feature.name}' has " + ("a WeightBias" if is_bias else "weighted_values=True")
    if weights is None or not weights.is_floating_point() or weights.shape != (count,):
        got = "none" if weights is None else f"{weights.dtype} of shape {list(weights.shape)}"
        raise ValueError(
            f"sequences['{key}'] must have floating weights of shape [{count}], {reason}, got {got}; "
            "an EmbeddingCollection drops its input's"
        )
    # Weighted values may be of either sign; a logarithm's argument may not.
    if is_bias and may_read(weights) and not (weights >= 0).all():
        got = weights[~(weights >= 0)][0].item()
        raise ValueError(f"sequences['{key}'] must have weights of at least 0, {reason}, got {got}")


def _check_bucket_ids(sequences: dict[str, JaggedTensor], feature: SequenceFeatureConfig, first: JaggedTensor) -> None:
    key, num_buckets = feature.bias.key, feature.bias.num_buckets
    ids = event_input(sequences, key)
    values = check_jagged(f"sequences['{key}']", ids)
    if values.dtype not in _INTEGERS or values.dim() != 1:
        raise TypeError(
            f"sequences['{key}'] must hold integer bucket ids of shape [S], since it is the bias of feature "
            f"'{feature.name}', got {values.dtype} of shape {list(values.shape)}"
        )
    reads_contents = may_read(values)
    check_aligned(f"sequences['{key}']", ids, feature.sequence_keys[0], first, reads_contents)
    if reads_contents and values.numel():
        low, high = values.min().item(), values.max().item()
        if low < 0 or high >= num_buckets:
            raise ValueError(
                f"sequences['{key}'] must hold bucket ids from 0 to {num_buckets - 1} "
                f"(num_buckets={num_buckets} in feature '{feature.name}'), got {low if low < 0 else high}"
            )


def _check_times(
    name: str, times: JaggedTensor, first_key: str, first: JaggedTensor, rows: str = "events", because: str = ""
) -> Tensor:
    """Checks times that must be aligned with `first` and, where readable, not decrease; returns their values."""
    values = check_jagged(name, times)
    check_aligned(name, times, first_key, first, may_read(values), rows)
    if values.dtype not in (torch.int32, torch.int64, torch.float64) or values.dim() != 1:
        raise TypeError(
            f"{name} must hold times of shape [{'S' if rows == 'events' else 'R'}], int32, int64 or float64{because}, "
            f"got {values.dtype} of shape {list(values.shape)}"
        )
    if may_read(values) and values.numel():
        check_ascending(name, values, first.offsets(), rows[:-1])
    return values


def check_aligned(
    name: str, tensor: JaggedTensor, first_key: str, first: JaggedTensor, reads_contents: bool, rows: str = "events"
) -> None:
    """Checks that the jagged tensor of this name, whose rows are `rows`, has the lengths of another one."""
    count, first_count = unread(tensor).size(0), unread(first).size(0)
    if torch.compiler.is_compiling():
        # Both counts may come from the data, where a compiler cannot branch on them.
        torch._check(count == first_count)
    elif count != first_count:
        raise ValueError(f"{name} must be aligned with '{first_key}', which has {first_count} {rows}, got {count}")
    if reads_contents:
        lengths, first_lengths = tensor.lengths(), first.lengths()
        if lengths.shape != first_lengths.shape or not torch.equal(lengths.long(), first_lengths.long()):
            raise ValueError(f"{name} must be aligned with '{first_key}', got other lengths in at least one sample")


def check_lengths(name: str, tensor: JaggedTensor, count: int, rows: str = "events") -> None:
    """Checks that the offsets of the jagged tensor of this name go from 0 to the number of rows, never down."""
    offsets = tensor.offsets()
    if offsets.numel() == 0:
        return
    first, last = offsets[0].item(), offsets[-1].item()
    if (first, last) != (0, count):
        raise ValueError(f"{name} must have offsets from 0 to {count}, the number of its {rows}, got {first} to {last}")
    lengths = offsets.diff()
    if (lengths < 0).any():
        raise ValueError(f"{name} must have lengths of at least 0, got {lengths.min().item()}")


def unread(events: JaggedTensor) -> Tensor:
    """Returns the values of events, for their shape, dtype and device: of rows not read yet a tensor without memory."""
    return events.rows if isinstance(events, UnreadRows) else events.values()
