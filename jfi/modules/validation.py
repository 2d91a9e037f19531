"""Checks of a batch, before any of it is read: each message names the key, what it holds and what it must hold.

Types, shapes and dtypes are always checked; contents on the CPU, and on a GPU only under `jfi.ops.validation`, since
reading them there waits for the device.
"""

import difflib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.modules.sequence_configs import FeatureGroup, KeyBias, SequenceFeatureConfig, TimeBias, WeightBias
from jfi.modules.table_rows import UnreadRows
from jfi.ops.gather_rows import may_read
from jfi.times import check_ascending

if TYPE_CHECKING:
    from jfi.modules.ragged_targets import RaggedTargets

Collections = EmbeddingCollection | ManagedCollisionEmbeddingCollection


def require_keys(argument: str, present: Collection[str], needed: Iterable[str]) -> None:
    """Raises a ValueError that names the first of `needed` that `present` lacks, and the nearest it has."""
    for key in needed:
        if key not in present:
            nearest = difflib.get_close_matches(key, present, n=3)
            known = f"nearest: {nearest}" if nearest else f"known: {sorted(present)}"
            raise ValueError(f"{argument} must hold the key '{key}', got none of that name; {known}")


@torch.fx.wrap
def check_ids(argument: str, ids: KeyedJaggedTensor, needed: list[str], sharded: bool) -> None:
    """Checks the ids that embedding collections are about to read, where these would fail less clearly."""
    if not isinstance(ids, KeyedJaggedTensor):
        raise TypeError(f"{argument} must be a KeyedJaggedTensor of ids, got {type(ids).__name__}")
    require_keys(argument, ids.keys(), needed)
    if not sharded and ids.variable_stride_per_key():
        raise ValueError(
            f"{argument} must have one batch size for all keys, got {ids.stride_per_key()}: variable batch sizes (VBE) "
            "need a collection that is sharded, by DistributedModelParallel"
        )


def check_collection(collection: Collections, features: list[SequenceFeatureConfig], embedding_dim: int) -> list[str]:
    """Checks that a collection of a layer fits its features, and returns the keys that the collection reads."""
    managed = isinstance(collection, ManagedCollisionEmbeddingCollection)
    tables = (collection._embedding_collection if managed else collection).embedding_configs()
    for table in tables:
        if table.embedding_dim != embedding_dim:
            raise ValueError(
                f"embedding_collection must be embedding_dim={embedding_dim} wide, got {table.embedding_dim}"
            )
    inner = collection._embedding_collection if managed else collection
    names = [name for names in inner.embedding_names_by_table() for name in names]
    for feature in features:
        require_keys("embedding_collection", names, feature.sequence_keys)
    return [name for table in tables for name in table.feature_names]


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
                if not isinstance(target, Tensor) or target.shape != (rows, group.width_of_targets):
                    what = "samples" if ragged is None else "rows"
                    _refuse_target(targets, key, rows, group.width_of_targets, what)


def _check_events(
    sequences: dict[str, JaggedTensor], feature: SequenceFeatureConfig, embedding_dim: int, has_times: bool
) -> tuple[JaggedTensor, torch.dtype]:
    """Checks the events of a feature with what its bias and its values read, and returns the first field, its dtype."""
    first = None
    for key in feature.sequence_keys:
        events = sequences.get(key)
        if not isinstance(events, JaggedTensor):
            _refuse_type(sequences, key)
        values = unread(events)
        if values.dim() != 2 or values.size(1) != embedding_dim or not values.is_floating_point():
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
    ids = sequences.get(key)
    if not isinstance(ids, JaggedTensor):
        _refuse_type(sequences, key)
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
    key, times = feature.time_key, sequences.get(feature.time_key)
    if not isinstance(times, JaggedTensor):
        _refuse_type(sequences, key)
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
    """Whether values are on the CPU, where reading them stalls nothing, or `jfi.ops.validation` asks to read them."""
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type == "cpu" or (tensor.is_cuda and may_read(tensor))


def unread(events: JaggedTensor) -> Tensor:
    """The values of events, for their shape, dtype and device alone: of rows not read yet a tensor without memory."""
    return events.rows if isinstance(events, UnreadRows) else events.values()
