"""Checks of a batch, before any of it is read: each message names the key, what it holds and what it must hold.

Types, shapes and dtypes are always checked; contents on the CPU, and on a GPU only under `jfi.ops.validation`, since
reading them there waits for the device.
"""

import difflib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection, get_embedding_names_by_table
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.modules.sequence_configs import FeatureGroup, KeyBias, SequenceFeatureConfig, TimeBias, WeightBias
from jfi.modules.table_rows import UnreadRows
from jfi.ops.gather_rows import may_read
from jfi.utils.arguments import check_ascending, check_type

if TYPE_CHECKING:
    from jfi.modules.ragged_targets import RaggedTargets

_INTEGERS = (torch.int32, torch.int64)
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Collections = EmbeddingCollection | ManagedCollisionEmbeddingCollection


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


def check_dense(name: str, tensor: Tensor) -> None:
    """Raises unless what has this name is a Tensor, and neither a sparse nor a nested one."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must hold a Tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise TypeError(f"{name} must hold a dense tensor, got {'a nested' if tensor.is_nested else 'a sparse'} one")


def check_jagged(name: str, events: JaggedTensor | KeyedJaggedTensor) -> None:
    """Checks that the parts of what has this name are dense tensors on one device, and its lengths integers."""
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


@torch.fx.wrap
def check_ids(argument: str, ids: KeyedJaggedTensor, needed: list[str], sharded: bool) -> None:
    """Checks the ids that embedding collections are about to read, where these would fail less clearly."""
    if not isinstance(ids, KeyedJaggedTensor):
        raise TypeError(f"{argument} must be a KeyedJaggedTensor of ids, got {type(ids).__name__}")
    require_keys(argument, ids.keys(), needed)
    check_jagged(argument, ids)
    values, weights = ids.values(), ids.weights_or_none()
    if values.dtype not in _INTEGERS or values.dim() != 1:
        got = f"{values.dtype} of shape {list(values.shape)}"
        raise TypeError(f"{argument} must hold int32 or int64 ids [S], got {got}")
    if weights is not None and weights.shape != values.shape:
        raise ValueError(f"{argument} must have weights of shape {list(values.shape)}, got {list(weights.shape)}")
    varies = ids.variable_stride_per_key()
    if contents_are_free(values) and not varies:
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


def check_collection(
    collection: Collections, features: list[SequenceFeatureConfig], embedding_dim: int
) -> dict[str, str]:
    """Checks that a collection of a layer fits its features, and returns by key of its output that of the ids."""
    must = "an EmbeddingCollection, a ManagedCollisionEmbeddingCollection or None"
    check_type("embedding_collection", collection, Collections, must)
    managed = isinstance(collection, ManagedCollisionEmbeddingCollection)
    tables = (collection._embedding_collection if managed else collection).embedding_configs()
    for table in tables:
        if table.embedding_dim != embedding_dim:
            raise ValueError(
                f"embedding_collection must be embedding_dim={embedding_dim} wide, got {table.embedding_dim}"
            )
    names = id_keys(tables)
    for feature in features:
        require_keys("embedding_collection", names, feature.sequence_keys)
    return names


def id_keys(tables: list[BaseEmbeddingConfig]) -> dict[str, str]:
    """Returns by key of a collection's output that of the ids; a key of several tables is `<key>@<table>` there."""
    names = get_embedding_names_by_table(tables)
    pairs = [zip(own, table.feature_names, strict=True) for own, table in zip(names, tables, strict=True)]
    return {name: key for own in pairs for name, key in own}


def check_inputs(
    sequences: dict[str, JaggedTensor],
    groups: list[FeatureGroup],
    targets: dict[str, Tensor] | None = None,
    ragged: "RaggedTargets | None" = None,
) -> None:
    """Checks all that the features of all groups read; `targets` only if they are given: those of `ragged`, if any.

    Raises:
        ValueError, TypeError: the first fault.
    """
    batch_size = first_key = None
    has_times = ragged is not None and ragged.times is not None
    for group in groups:
        dtype = None
        for feature in group.features:
            events, own_dtype = _check_events(sequences, feature, group.embedding_dim, has_times)
            if dtype is None:
                dtype = own_dtype
            elif own_dtype != dtype:
                raise ValueError(
                    f"sequences['{feature.sequence_keys[0]}'] must be {dtype} like '{group.sequence_keys[0][0]}', "
                    f"since both are read in one launch, got {own_dtype}"
                )
            if targets is None:
                continue
            lengths = events.lengths_or_none()
            samples = events.offsets().size(0) - 1 if lengths is None else lengths.size(0)
            if batch_size is None:
                batch_size, first_key, rows = samples, feature.sequence_keys[0], samples
                if ragged is not None:
                    rows = targets[ragged.first_key].size(0)
                    if ragged.offsets.size(0) != samples + 1:
                        raise ValueError(
                            f"targets['{ragged.first_key}'] must have {samples} users like sequences['{first_key}'], "
                            f"got {ragged.offsets.size(0) - 1}"
                        )
            elif samples != batch_size:
                raise ValueError(
                    f"sequences['{feature.sequence_keys[0]}'] must have {batch_size} samples like '{first_key}', "
                    f"since both enter one output, got {samples}"
                )
            for key in feature.target_keys:
                target = targets.get(key)
                is_dense = isinstance(target, Tensor) and not target.is_nested and target.layout is torch.strided
                if not is_dense or target.shape != (rows, group.width_of_targets) or target.dtype not in _FLOATING:
                    what = "samples" if ragged is None else "rows"
                    _refuse_target(targets, key, rows, group.width_of_targets, what)
                device = unread(events).device
                if target.device != device:
                    of = f"that of sequences['{feature.sequence_keys[0]}']"
                    raise ValueError(f"targets['{key}'] must be on {device}, {of}, got {target.device}")


def _check_events(
    sequences: dict[str, JaggedTensor], feature: SequenceFeatureConfig, embedding_dim: int, has_times: bool
) -> tuple[JaggedTensor, torch.dtype]:
    """Checks the events of a feature with what its bias and its values read, and returns the first field, its dtype."""
    first = None
    for key in feature.sequence_keys:
        events = sequences.get(key)
        if not isinstance(events, JaggedTensor):
            _refuse_type(sequences, key)
        check_jagged(f"sequences['{key}']", events)
        values = unread(events)
        if values.dim() != 2 or values.size(1) != embedding_dim or values.dtype not in _FLOATING:
            raise ValueError(
                f"sequences['{key}'] must hold embeddings of shape [S, {embedding_dim}] (events, embedding_dim), "
                f"got {values.dtype} of shape {list(values.shape)}"
            )
        if first is None:
            first, dtype, reads_contents = events, values.dtype, contents_are_free(values)
            continue
        if values.dtype != dtype:
            raise ValueError(
                f"sequences['{key}'] must be {dtype} like '{feature.sequence_keys[0]}', got {values.dtype}"
            )
        check_aligned(f"sequences['{key}']", events, feature.sequence_keys[0], first, reads_contents)
    if reads_contents:
        check_lengths(f"sequences['{feature.sequence_keys[0]}']", first)
    if feature.weighted_values or isinstance(feature.bias, WeightBias):
        _check_weights(feature, first)
    if isinstance(feature.bias, KeyBias) and not (has_times and isinstance(feature.bias, TimeBias)):
        _check_bucket_ids(sequences, feature, first)
    if feature.relative_bias is not None and feature.time_key is not None:
        _check_times(sequences, feature, first)
    return first, dtype


def _refuse_type(sequences: dict[str, JaggedTensor], key: str) -> None:
    require_keys("sequences", sequences, [key])
    raise TypeError(f"sequences['{key}'] must be a JaggedTensor, got {type(sequences[key]).__name__}")


def _refuse_target(targets: dict[str, Tensor], key: str, count: int, embedding_dim: int, rows: str) -> None:
    require_keys("targets", targets, [key])
    target = targets[key]
    if not isinstance(target, Tensor):
        raise TypeError(f"targets['{key}'] must be a Tensor, got {type(target).__name__}")
    check_dense(f"targets['{key}']", target)
    if target.dtype not in _FLOATING:
        raise TypeError(f"targets['{key}'] must be float32, bfloat16 or float16, got {target.dtype}")
    raise ValueError(
        f"targets['{key}'] must have shape [{count}, {embedding_dim}] ({rows}, embedding_dim), got {list(target.shape)}"
    )


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
    if is_bias and contents_are_free(weights) and not (weights >= 0).all():
        got = weights[~(weights >= 0)][0].item()
        raise ValueError(f"sequences['{key}'] must have weights of at least 0, {reason}, got {got}")


def _check_bucket_ids(sequences: dict[str, JaggedTensor], feature: SequenceFeatureConfig, first: JaggedTensor) -> None:
    key, num_buckets = feature.bias.key, feature.bias.num_buckets
    ids = event_input(sequences, key)
    check_jagged(f"sequences['{key}']", ids)
    values = ids.values()
    if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
        raise TypeError(
            f"sequences['{key}'] must hold integer bucket ids of shape [S], since it is the bias of feature "
            f"'{feature.name}', got {values.dtype} of shape {list(values.shape)}"
        )
    reads_contents = contents_are_free(values)
    check_aligned(f"sequences['{key}']", ids, feature.sequence_keys[0], first, reads_contents)
    if reads_contents and values.numel():
        low, high = values.min().item(), values.max().item()
        if low < 0 or high >= num_buckets:
            raise ValueError(
                f"sequences['{key}'] must hold bucket ids from 0 to {num_buckets - 1} "
                f"(num_buckets={num_buckets} in feature '{feature.name}'), got {low if low < 0 else high}"
            )


def _check_times(sequences: dict[str, JaggedTensor], feature: SequenceFeatureConfig, first: JaggedTensor) -> None:
    key = feature.time_key
    times = event_input(sequences, key)
    check_jagged(f"sequences['{key}']", times)
    check_aligned(f"sequences['{key}']", times, feature.sequence_keys[0], first, contents_are_free(times.values()))
    check_times(f"sequences['{key}']", times, first, because=f", since feature '{feature.name}' has a RelativeTimeBias")


def check_times(name: str, times: JaggedTensor, first: JaggedTensor, rows: str = "events", because: str = "") -> None:
    """Checks the times of this name, which are aligned with `first`: where they may be read, they never decrease."""
    values = times.values()
    if values.dtype not in (torch.int32, torch.int64, torch.float64) or values.dim() != 1:
        raise TypeError(
            f"{name} must hold times of shape [{'S' if rows == 'events' else 'R'}], int32, int64 or float64{because}, "
            f"got {values.dtype} of shape {list(values.shape)}"
        )
    if contents_are_free(values) and values.numel():
        check_ascending(name, values, first.offsets(), rows[:-1])


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


def check_lengths(name: str, tensor: JaggedTensor, rows: str = "events") -> None:
    """Checks that the offsets of the jagged tensor of this name go from 0 to the number of rows, never down."""
    offsets, count = tensor.offsets(), unread(tensor).size(0)
    if offsets.numel() == 0:
        return
    first, last = offsets[0].item(), offsets[-1].item()
    if (first, last) != (0, count):
        raise ValueError(f"{name} must have offsets from 0 to {count}, the number of its {rows}, got {first} to {last}")
    lengths = offsets.diff()
    if (lengths < 0).any():
        raise ValueError(f"{name} must have lengths of at least 0, got {lengths.min().item()}")


def contents_are_free(tensor: Tensor) -> bool:
    """Returns whether values may be read: on a CPU, and on a GPU if `jfi.ops.validation` asks for it."""
    return may_read(tensor)


def unread(events: JaggedTensor) -> Tensor:
    """The values of events, for their shape, dtype and device alone: of rows not read yet a tensor without memory."""
    return events.rows if isinstance(events, UnreadRows) else events.values()
