"""From TorchRec's types to plain tensors: looks keys up, checks what stands there, combines aligned fields.

Modules call these functions as `lookup.read_events(...)`, since under that name alone `torch.fx.wrap` makes leaves of
them, which is how TorchRec's tracers get through the modules.
Contents are checked on the CPU alone, where that costs no synchronisation; shapes and dtypes are checked everywhere.
"""

import difflib
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.modules.sequence_configs import SequenceFeatureConfig


class EventInputs(NamedTuple):
    """The events of one sequence feature of a batch as plain tensors."""

    history: Tensor  # [S, sequence_width], an event a row
    offsets: Tensor  # [B + 1]
    bias: Tensor | None  # by event: score bias [S], floating, or bucket id [S], integer


def require_keys(argument: str, present: Collection[str], needed: Iterable[str]) -> None:
    """Raises a ValueError that names the first of `needed` that `present` lacks, and the nearest it has."""
    for key in needed:
        if key not in present:
            nearest = difflib.get_close_matches(key, present, n=3)
            known = f"nearest: {nearest}" if nearest else f"known: {sorted(present)}"
            raise ValueError(f"{argument} must hold the key '{key}', got none of that name; {known}")


@torch.fx.wrap
def require_id_keys(argument: str, ids: KeyedJaggedTensor, needed: list[str]) -> None:
    """`require_keys` on a KeyedJaggedTensor, before an embedding collection fails on it less clearly."""
    if not isinstance(ids, KeyedJaggedTensor):
        raise TypeError(f"{argument} must be a KeyedJaggedTensor of ids, got {type(ids).__name__}")
    require_keys(argument, ids.keys(), needed)


@torch.fx.wrap
def allow_no_samples(ids: KeyedJaggedTensor) -> None:
    """Lets collections that are not sharded look a batch of no samples up.

    KeyedJaggedTensor.to_dict, which they begin with, fails at stride 0, so its cache is filled here.
    """
    if ids.stride() == 0:
        keys = ids.keys()
        ids._jt_dict = {key: ids[key] for key in keys}


@torch.fx.wrap
def with_event_inputs(
    embeddings: dict[str, JaggedTensor], ids: KeyedJaggedTensor, features: list[SequenceFeatureConfig]
) -> dict[str, JaggedTensor]:
    """Adds to an EmbeddingCollection's output what only its input knows: weights and bucket ids of the events."""
    sequences = dict(embeddings.items())
    for feature in features:
        if feature.bucket_key is not None:
            require_keys("sequences", ids.keys(), [feature.bucket_key])
            sequences[feature.bucket_key] = ids[feature.bucket_key]
        if "weights" in (feature.bias, feature.value_scale):
            key = feature.sequence_keys[0]
            events = sequences[key]
            sequences[key] = JaggedTensor(
                values=events.values(),
                lengths=events.lengths_or_none(),
                offsets=events.offsets_or_none(),
                weights=ids[key].weights_or_none(),
            )
    return sequences


def by_key(
    sequences: dict[str, JaggedTensor], must_be: str = "a dict of JaggedTensor by key"
) -> dict[str, JaggedTensor]:
    """A copy of the mapping, after waiting for it where it is the awaitable that a sharded collection returns."""
    if not hasattr(sequences, "items"):
        raise TypeError(f"sequences must be {must_be}, got {type(sequences).__name__}")
    return dict(sequences.items())


@torch.fx.wrap
def read_events(
    sequences: dict[str, JaggedTensor], features: list[SequenceFeatureConfig], embedding_dim: int
) -> list[EventInputs]:
    """Looks up, checks and combines the events of every feature, in the order of `features`."""
    return [_read_events(sequences, feature, embedding_dim) for feature in features]


def _read_events(sequences: dict[str, JaggedTensor], feature: SequenceFeatureConfig, embedding_dim: int) -> EventInputs:
    history, offsets = read_history(sequences, feature, embedding_dim)
    bias = None
    if feature.bias == "weights":
        bias = log_weights(read_weights(sequences, feature))
    elif feature.bias == "position":
        bias = position_buckets(offsets, history.size(0), feature.num_buckets)
    elif feature.bias is not None:
        bias = read_buckets(sequences, feature)
    return EventInputs(history, offsets, bias)


def read_history(
    sequences: dict[str, JaggedTensor], feature: SequenceFeatureConfig, embedding_dim: int
) -> tuple[Tensor, Tensor]:
    """The feature's combined events [S, sequence_width] and their offsets [B + 1]."""
    check_history(sequences, feature, embedding_dim)
    history = combine([sequences[key].values() for key in feature.sequence_keys], feature)
    return history, sequences[feature.sequence_keys[0]].offsets()


def check_history(sequences: dict[str, JaggedTensor], feature: SequenceFeatureConfig, embedding_dim: int) -> None:
    """Raises unless the feature's sequence keys hold aligned embeddings."""
    require_keys("sequences", sequences, feature.sequence_keys)
    first = sequences[feature.sequence_keys[0]]
    for key in feature.sequence_keys:
        if not isinstance(sequences[key], JaggedTensor):
            raise TypeError(f"sequences['{key}'] must be a JaggedTensor, got {type(sequences[key]).__name__}")
        values = sequences[key].values()
        if not values.is_floating_point() or values.dim() != 2 or values.size(1) != embedding_dim:
            raise ValueError(
                f"sequences['{key}'] must hold embeddings of shape [S, {embedding_dim}] (events, embedding_dim), "
                f"got {values.dtype} of shape {list(values.shape)}"
            )
        if values.dtype != first.values().dtype:
            raise ValueError(
                f"sequences['{key}'] must be {first.values().dtype} like '{feature.sequence_keys[0]}', "
                f"got {values.dtype}"
            )
        _check_aligned(key, sequences[key], feature.sequence_keys[0], first)
    if _contents_are_free(first.values()):
        _check_offsets(feature.sequence_keys[0], first)


def check_targets(
    targets: dict[str, Tensor], feature: SequenceFeatureConfig, batch_size: int, embedding_dim: int
) -> None:
    """Raises unless the feature's target keys hold an embedding a sample."""
    require_keys("targets", targets, feature.target_keys)
    for key in feature.target_keys:
        if not isinstance(targets[key], Tensor):
            raise TypeError(f"targets['{key}'] must be a Tensor, got {type(targets[key]).__name__}")
        if targets[key].shape != (batch_size, embedding_dim):
            raise ValueError(
                f"targets['{key}'] must have shape [{batch_size}, {embedding_dim}] (samples, embedding_dim), "
                f"got {list(targets[key].shape)}"
            )


def num_samples(events: JaggedTensor) -> int:
    """B, without computing lengths or offsets that nobody else needs."""
    lengths = events.lengths_or_none()
    return events.offsets().size(0) - 1 if lengths is None else lengths.size(0)


def read_weights(sequences: dict[str, JaggedTensor], feature: SequenceFeatureConfig) -> Tensor:
    """Weights [S] of the feature's first sequence key, which its bias or its value scale asks for."""
    key = feature.sequence_keys[0]
    num_events, weights = sequences[key].values().size(0), sequences[key].weights_or_none()
    reason = f"since feature '{feature.name}' has {'bias' if feature.bias == 'weights' else 'value_scale'}='weights'"
    if weights is None or not weights.is_floating_point() or weights.shape != (num_events,):
        got = "none" if weights is None else f"{weights.dtype} of shape {list(weights.shape)}"
        raise ValueError(
            f"sequences['{key}'] must have floating weights of shape [{num_events}], {reason}, got {got}; "
            "an EmbeddingCollection drops its input's"
        )
    # A scale may be of either sign, a logarithm's argument may not.
    if feature.bias == "weights" and _contents_are_free(weights) and not (weights >= 0).all():
        got = weights[~(weights >= 0)][0].item()
        raise ValueError(f"sequences['{key}'] must have weights of at least 0, {reason}, got {got}")
    return weights


def log_weights(weights: Tensor) -> Tensor:
    """The score bias of events by which one of weight 2 counts as two: the logarithm, -inf at 0 without a gradient."""
    if not weights.requires_grad:
        return weights.log()
    # The gradient of log(0) is infinite, and 0 * inf NaN: an event left out must not pass through log.
    left_out = weights == 0
    return weights.masked_fill(left_out, 1).log().masked_fill(left_out, -torch.inf)


def read_buckets(sequences: dict[str, JaggedTensor], feature: SequenceFeatureConfig) -> Tensor:
    """Bucket ids [S] under the key that the feature's bias names."""
    require_keys("sequences", sequences, [feature.bias])
    buckets = sequences[feature.bias]
    if not isinstance(buckets, JaggedTensor):
        raise TypeError(f"sequences['{feature.bias}'] must be a JaggedTensor, got {type(buckets).__name__}")
    values = buckets.values()
    if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
        raise TypeError(
            f"sequences['{feature.bias}'] must hold integer bucket ids of shape [S], since it is the bias of feature "
            f"'{feature.name}', got {values.dtype} of shape {list(values.shape)}"
        )
    _check_aligned(feature.bias, buckets, feature.sequence_keys[0], sequences[feature.sequence_keys[0]])
    if _contents_are_free(values) and values.numel():
        low, high = values.min().item(), values.max().item()
        if low < 0 or high >= feature.num_buckets:
            raise ValueError(
                f"sequences['{feature.bias}'] must hold bucket ids from 0 to {feature.num_buckets - 1} "
                f"(num_buckets={feature.num_buckets} in feature '{feature.name}'), got {low if low < 0 else high}"
            )
    return values


def position_buckets(offsets: Tensor, num_events: int, num_buckets: int) -> Tensor:
    """Bucket floor(log2(d + 1)) of each event [S], where d counts the events after it in its sample.

    Example:
        >>> position_buckets(torch.tensor([0, 1, 1, 6]), 6, 32)
        tensor([0, 2, 2, 1, 1, 0], dtype=torch.int32)
    """
    place = torch.arange(num_events, device=offsets.device, dtype=offsets.dtype)
    # An event's sample ends at the first offset beyond it.
    ends = offsets.index_select(0, torch.searchsorted(offsets, place, right=True, out_int32=True))
    return _floor_log2(ends - place, num_buckets)


def _floor_log2(count: Tensor, num_buckets: int) -> Tensor:
    """floor(log2(count)), int32, at most num_buckets - 1: how many of the powers 2, 4, ... the count has reached.

    Compared as integers, since a logarithm may round up.
    """
    bits = torch.iinfo(count.dtype).bits - 1
    exponents = torch.arange(1, min(num_buckets, bits), device=count.device, dtype=count.dtype)
    return torch.bucketize(count, 1 << exponents, right=True, out_int32=True)


def combine(fields: list[Tensor], feature: SequenceFeatureConfig) -> Tensor:
    """Aligned fields as one tensor, added or side by side in the last dimension as `feature.combine` has it."""
    if len(fields) == 1:
        return fields[0]
    if feature.combine == "concat":
        return torch.cat(fields, dim=-1)
    total = fields[0] + fields[1]
    for field in fields[2:]:
        total += field  # in place: one tensor of the history's size, however many fields
    return total


def _check_aligned(key: str, events: JaggedTensor, first_key: str, first: JaggedTensor) -> None:
    if events is first:
        return
    count, first_count = events.values().size(0), first.values().size(0)
    if count != first_count:
        raise ValueError(
            f"sequences['{key}'] must be aligned with '{first_key}', which has {first_count} events, got {count}"
        )
    if _contents_are_free(first.values()):
        lengths, first_lengths = events.lengths(), first.lengths()
        if lengths.shape != first_lengths.shape or not torch.equal(lengths.long(), first_lengths.long()):
            raise ValueError(
                f"sequences['{key}'] must be aligned with '{first_key}', got other lengths in at least one sample"
            )


def _check_offsets(key: str, events: JaggedTensor) -> None:
    offsets, count = events.offsets(), events.values().size(0)
    if offsets.numel() == 0:
        return
    first, last = offsets[0].item(), offsets[-1].item()
    if (first, last) != (0, count):
        raise ValueError(
            f"sequences['{key}'] must have offsets from 0 to {count}, the number of its events, got {first} to {last}"
        )
    lengths = offsets.diff()
    if (lengths < 0).any():
        raise ValueError(f"sequences['{key}'] must have lengths of at least 0, got {lengths.min().item()}")


def _contents_are_free(tensor: Tensor) -> bool:
    """Whether looking at values stalls nothing: on the CPU, outside of a compiled graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
