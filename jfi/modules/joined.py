"""Features of one group as one jagged batch: their rows behind one another, in a number of kernels that F leaves alone.

Feature f of F has samples f·B to (f+1)·B of the batch, and one call of an operator serves all features. Modules call
`joined.read_groups(...)` under that name, for the reason that `jfi.modules.lookup` gives.

What lies behind one another in memory already is not copied: so do the outputs of a sharded EmbeddingCollection, and
the lengths, ids and weights of keys that follow one another in a KeyedJaggedTensor.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from jfi.modules import lookup
from jfi.modules.sequence_configs import SequenceFeatureConfig
from jfi.ops._checks import is_traced
from jfi.ops._dispatch import without_autocast


class JoinedInputs(NamedTuple):
    """The F features of a group as plain tensors."""

    target: Tensor  # [F, B, target_width]
    fields: tuple[Tensor, ...]  # [S, ...]: an event's row is theirs behind one another, sequence_width in all
    offsets: Tensor  # [F * B + 1]
    bias: Tensor | None  # by event: score bias [S], floating, or bucket id [S], integer, from 0 in every feature
    value_scale: Tensor | None  # [S]
    events: list[int]  # how many of the S are each feature's

    @property
    def history(self) -> Tensor:
        """[S, sequence_width], an event a row; a copy where there are several fields."""
        return concatenated(self.fields)


def concatenated(fields: tuple[Tensor, ...]) -> Tensor:
    return fields[0] if len(fields) == 1 else torch.cat(fields, dim=1)


@torch.fx.wrap
def read_groups(
    sequences: dict[str, JaggedTensor],
    targets: KeyedTensor | dict[str, Tensor],
    groups: list[list[SequenceFeatureConfig]],
    embedding_dim: int,
) -> list[JoinedInputs]:
    """Looks up, checks and joins the tensors of every group.

    Args:
        sequences: embeddings [S, embedding_dim] by sequence key, and bucket ids [S] by bucket key.
        targets: embeddings [B, embedding_dim] by target key.
        groups: features that agree in their numbers of keys, in how these are combined, in their kind of bias and in
            whether they have a value scale.
        embedding_dim: width that every embedding must have.
    """
    if isinstance(sequences, KeyedJaggedTensor):
        raise TypeError(
            "sequences is a KeyedJaggedTensor of ids, which needs embedding_collection given at construction; "
            "without it sequences must be an EmbeddingCollection's output, dict[str, JaggedTensor]"
        )
    sequences = lookup.by_key(sequences)
    with without_autocast(_device_type(sequences)):  # under which cat refuses some dtypes
        return _read_groups(sequences, targets, groups, embedding_dim)


def _device_type(sequences: dict[str, JaggedTensor]) -> str:
    return next((x.values().device.type for x in sequences.values() if isinstance(x, JaggedTensor)), "cpu")


def _read_groups(
    sequences: dict[str, JaggedTensor],
    targets: KeyedTensor | dict[str, Tensor],
    groups: list[list[SequenceFeatureConfig]],
    embedding_dim: int,
) -> list[JoinedInputs]:
    for features in groups:
        for feature in features:
            lookup.check_history(sequences, feature, embedding_dim)
    _check_equal_batches(sequences, [feature for features in groups for feature in features])
    targets = targets if isinstance(targets, dict) else targets.to_dict()
    return [_read_group(sequences, targets, features, embedding_dim) for features in groups]


def _read_group(
    sequences: dict[str, JaggedTensor],
    targets: dict[str, Tensor],
    features: list[SequenceFeatureConfig],
    embedding_dim: int,
) -> JoinedInputs:
    one = features[0]
    firsts = [sequences[feature.sequence_keys[0]] for feature in features]
    _check_one_dtype([feature.sequence_keys[0] for feature in features], firsts)
    events = [first.values().size(0) for first in firsts]
    for feature in features:
        lookup.check_targets(targets, feature, lookup.num_samples(firsts[0]), embedding_dim)

    # Field by field, so that adding or concatenating them is one kernel for all features.
    target = lookup.combine([_stack([targets[key] for key in keys]) for keys in _fields(features, "target_keys")], one)
    fields = _fields(features, "sequence_keys")
    fields = [join([sequences[key].values() for key in keys]) for keys in fields]
    fields = tuple(fields) if one.combine == "concat" else (lookup.combine(fields, one),)
    offsets = join_offsets(firsts)

    weights = bias = None
    if "weights" in (one.bias, one.value_scale):
        weights = join([lookup.read_weights(sequences, feature) for feature in features])
    if one.bias == "weights":
        bias = lookup.log_weights(weights)
    elif one.bias == "position":
        bias = lookup.position_buckets(offsets, fields[0].size(0), one.num_buckets)
    elif one.bias is not None:
        bias = join([lookup.read_buckets(sequences, feature) for feature in features])
    return JoinedInputs(target, fields, offsets, bias, weights if one.value_scale else None, events)


def _fields(features: list[SequenceFeatureConfig], keys: str) -> list[tuple[str, ...]]:
    """The features' first keys, then their second ones, ..."""
    return list(zip(*(getattr(feature, keys) for feature in features), strict=True))


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def join_offsets(tensors: list[JaggedTensor]) -> Tensor:
    """Offsets [F * B + 1] of F jagged tensors of B samples whose rows lie behind one another."""
    if len(tensors) == 1:
        return tensors[0].offsets()
    lengths = [tensor.lengths_or_none() for tensor in tensors]
    if any(one is None for one in lengths):
        joined = torch.stack([tensor.offsets() for tensor in tensors]).diff().flatten()
    else:
        joined = join(lengths)
    return F.pad(joined.cumsum(0), (1, 0))


def join(tensors: list[Tensor]) -> Tensor:
    """The rows of contiguous tensors behind one another: where they already lie so, without a copy.

    Example:
        >>> rows = torch.arange(6.0).view(3, 2)
        >>> join(list(rows.split([1, 2]))).data_ptr() == rows.data_ptr()
        True
    """
    if len(tensors) == 1:
        return tensors[0]
    if is_traced() or not _adjoin(tensors):
        return torch.cat(tensors)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return _span(tensors)
    return _Adjoined.apply(*tensors)


class _Adjoined(torch.autograd.Function):
    """`_span`, whose gradient is cut into views."""

    @staticmethod
    def forward(ctx, *tensors: Tensor) -> Tensor:
        ctx.sizes = [tensor.size(0) for tensor in tensors]
        return _span(tensors)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.split(ctx.sizes)


def _adjoin(tensors: list[Tensor]) -> bool:
    """Whether the tensors, those without an element aside, lie directly behind one another in one storage."""
    end = None
    for tensor in tensors:
        if type(tensor) is not Tensor:
            return False
        if tensor.numel() == 0:
            continue
        if end is None:
            first, end = tensor, tensor.storage_offset()
            storage = tensor.untyped_storage().data_ptr()
        if (
            tensor.storage_offset() != end
            or tensor.untyped_storage().data_ptr() != storage
            or tensor.dtype != first.dtype
            or tensor.shape[1:] != first.shape[1:]
            or not tensor.is_contiguous()
        ):
            return False
        end += tensor.numel()
    return end is not None


def _span(tensors: list[Tensor]) -> Tensor:
    """One tensor over the memory of tensors that adjoin."""
    first = next(tensor for tensor in tensors if tensor.numel())
    return first.detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,)).view(-1, *first.shape[1:])


def _check_equal_batches(sequences: dict[str, JaggedTensor], features: list[SequenceFeatureConfig]) -> None:
    first_key = features[0].sequence_keys[0]
    batch_size = lookup.num_samples(sequences[first_key])
    for feature in features:
        key = feature.sequence_keys[0]
        if (got := lookup.num_samples(sequences[key])) != batch_size:
            raise ValueError(
                f"sequences['{key}'] must have {batch_size} samples like '{first_key}', since both enter one output, "
                f"got {got}"
            )


def _check_one_dtype(keys: list[str], tensors: list[JaggedTensor]) -> None:
    dtype = tensors[0].values().dtype
    for key, tensor in zip(keys, tensors, strict=True):
        if tensor.values().dtype != dtype:
            raise ValueError(
                f"sequences['{key}'] must be {dtype} like '{keys[0]}', since both are read in one launch, "
                f"got {tensor.values().dtype}"
            )
