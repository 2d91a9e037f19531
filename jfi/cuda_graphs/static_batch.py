"""Batches in memory that stays where it is: tensors of fixed shape, and jagged keys padded to a capacity.

A batch is a tree of dataclasses and of what `torch.utils._pytree` knows; its leaves are tensors, KeyedJaggedTensors,
and constants such as None or a string. `describe` takes it apart into a structure, which two batches of equal shapes
share, and its tensors. `Buffers` holds one such tree in one block of memory, so that moving a batch within the device
is one copy. Behind the values of a key are padding ids up to the key's capacity; its lengths are those of the batch.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

#: Alignment in bytes of the tensors in a block.
_ALIGNMENT = 256
#: Capacities go by factors of GROWTH; the one of the reference batch has this much more than its values.
GROWTH, MARGIN = 1.25, 1.1
#: Exponents of GROWTH, of the smallest capacity to that of the largest.
_STEPS = range(-6, 7)
_MULTIPLE = 64
#: Leaves that are part of a batch's structure.
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)
#: Reason for an eager step.
OTHER_STRUCTURE = "another number of samples, or another structure"


class UnsupportedBatch(TypeError):
    """A batch with a part that has no static form; the message names it."""


class _TensorLeaf(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


class _JaggedLeaf(NamedTuple):
    keys: tuple[str, ...]
    stride: int
    dtype: torch.dtype
    weights: torch.dtype | None
    lengths: torch.dtype


class _ConstantLeaf(NamedTuple):
    kind: type
    value: Hashable


class Structure(NamedTuple):
    """A batch without its tensors: equal for batches of equal shapes, dtypes and constants."""

    tree: pytree.TreeSpec
    leaves: tuple[_TensorLeaf | _JaggedLeaf | _ConstantLeaf, ...]


class Described(NamedTuple):
    """A batch taken apart; `tensors` and `jagged` are in the order of the structure."""

    structure: Structure
    tensors: list[Tensor]
    jagged: list[KeyedJaggedTensor]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Returns the number of values of every key of every KeyedJaggedTensor."""
        return tuple(length for ids in self.jagged for length in ids.length_per_key())

    @property
    def keys(self) -> list[str]:
        """Returns the keys, in the order of `lengths`."""
        return [key for ids in self.jagged for key in ids.keys()]  # noqa: SIM118

    def is_on_host(self) -> bool:
        """Returns whether the lengths can be read without waiting for a device."""
        return all(ids.lengths().is_cpu for ids in self.jagged)

    def fixed_length(self) -> list[bool]:
        """Returns for each key whether it has one value a sample. Reads the lengths."""
        return [
            fixed
            for ids in self.jagged
            for fixed in (ids.lengths().view(len(ids.keys()), ids.stride()) == 1).all(dim=1).tolist()
        ]


def describe(batch: object) -> Described:
    """Takes a batch apart.

    Raises:
        UnsupportedBatch: it holds something else than tensors, KeyedJaggedTensors of one batch size, and constants.
    """
    leaves, tree = pytree.tree_flatten(batch, is_leaf=_is_leaf)
    kinds, tensors, jagged = [], [], []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.layout != torch.strided or leaf.is_nested or leaf.requires_grad:
                raise _unsupported(batch, leaf, "a sparse tensor, a nested one, or one that requires a gradient")
            tensors.append(leaf)
            kinds.append(_TensorLeaf(leaf.shape, leaf.dtype))
        elif isinstance(leaf, KeyedJaggedTensor):
            if leaf.variable_stride_per_key() or leaf.inverse_indices_or_none() is not None:
                raise _unsupported(batch, leaf, "a KeyedJaggedTensor with variable batch sizes")
            weights, dtypes = leaf.weights_or_none(), (leaf.values().dtype, leaf.lengths().dtype)
            jagged.append(leaf)
            weight_dtype = None if weights is None else weights.dtype
            kinds.append(_JaggedLeaf(tuple(leaf.keys()), leaf.stride(), dtypes[0], weight_dtype, dtypes[1]))
        elif isinstance(leaf, _CONSTANTS):
            kinds.append(_ConstantLeaf(type(leaf), leaf))
        else:
            raise _unsupported(batch, leaf, f"of type {type(leaf).__name__}, which has no fixed shape")
    return Described(Structure(tree, tuple(kinds)), tensors, jagged)


def _is_leaf(value: object) -> bool:
    """Returns whether a part of a batch is not taken apart; registers a dataclass that the tree does not know yet."""
    kind = type(value)
    if kind in pytree.SUPPORTED_NODES:
        return kind is KeyedJaggedTensor or kind is JaggedTensor
    if dataclasses.is_dataclass(kind):
        pytree.register_dataclass(kind)
    return False


def _unsupported(batch: object, part: object, what: str) -> UnsupportedBatch:
    """Returns the error of a part of a batch."""
    leaves, _ = pytree.tree_flatten_with_path(batch, is_leaf=_is_leaf)
    path = next(path for path, leaf in leaves if leaf is part)
    return UnsupportedBatch(f"the batch{pytree.keystr(path)} is {what}")


def to_device(batch: object, device: torch.device) -> Any:
    """Returns a batch with all that has a `.to` on the device; the host does not wait for it."""

    def moved(leaf: Any) -> Any:
        copy = leaf.to(device, non_blocking=True) if hasattr(leaf, "to") else leaf
        if isinstance(copy, KeyedJaggedTensor):
            copy._jt_dict = None  # what `to_dict()` has found, which TorchRec leaves where it was
        return copy

    return pytree.tree_map(moved, batch, is_leaf=_is_leaf)


class CapacityBuckets:
    """Capacities by key for batches like a reference batch: a function of the batch and of the reference alone.

    A key with one value a sample in the reference is not padded: all batches must have as many. The others have
    reference · MARGIN · GROWTH^step, all keys with the same step.

    Args:
        reference: the batch that capacities follow from.
        fixed: by key whether it has one value a sample; None for those of the reference.
        lengths: numbers of values by key, then any others that capacities hold; None for those of the reference.

    Attributes:
        structure: of the batches.
        padded_keys: the other keys than those with one value a sample in the reference.
        fixed_length_keys: keys with one value a sample in all batches that fit; none if that would have to be read
            from a device.
    """

    def __init__(
        self, reference: Described, fixed: list[bool] | None = None, lengths: Sequence[int] | None = None
    ) -> None:
        self.structure, self._keys = reference.structure, reference.keys
        self._fixed = reference.fixed_length() if fixed is None else fixed
        self._lengths = reference.lengths if lengths is None else lengths
        self.padded_keys = {key for key, is_fixed in zip(self._keys, self._fixed, strict=True) if not is_fixed}
        self.fixed_length_keys = frozenset(self._keys) - self.padded_keys if reference.is_on_host() else frozenset()
        is_fixed = self._fixed + [False] * (len(self._lengths) - len(self._fixed))
        self._buckets = [
            tuple(
                length if fixed else _MULTIPLE * math.ceil(max(1, length) * MARGIN * GROWTH**step / _MULTIPLE)
                for length, fixed in zip(self._lengths, is_fixed, strict=True)
            )
            for step in _STEPS
        ]

    def fit(self, batch: Described) -> tuple[int, ...] | str:
        """Returns the smallest capacities that hold a batch, or why there are none."""
        if batch.structure != self.structure:
            return OTHER_STRUCTURE
        if not self.fixed_length_keys:
            return self.capacities(batch.lengths, self._fixed)
        if not batch.is_on_host():
            return "lengths on the device, unlike those of the first batch"
        return self.capacities(batch.lengths, batch.fixed_length())

    def capacities(self, lengths: Sequence[int], fixed: list[bool]) -> tuple[int, ...] | str:
        """Returns the smallest capacities that hold so many values, or why there are none.

        Args:
            lengths: numbers of values, as those of the reference.
            fixed: by key whether it has one value a sample.
        """
        for key, was_fixed, is_fixed, length, reference in zip(
            self._keys, self._fixed, fixed, lengths, self._lengths, strict=False
        ):
            if was_fixed and not (is_fixed and length == reference):
                return f"not one value a sample in '{key}', as the first batch has"
        for capacities in self._buckets:
            if all(length <= capacity for length, capacity in zip(lengths, capacities, strict=True)):
                return capacities
        return "more values than the largest capacity"


class Buffers:
    """A batch of fixed shapes and capacities in one block of memory.

    Args:
        structure: of the batches.
        capacities: by key, in the order of `Described.lengths`.
        padding: by key the id that pads its values; 0 for other keys. Weights are padded with 0.
        device: of the memory.
    """

    def __init__(
        self, structure: Structure, capacities: tuple[int, ...], padding: Mapping[str, int], device: torch.device
    ) -> None:
        self.structure = structure
        self._tensors = [leaf for leaf in structure.leaves if isinstance(leaf, _TensorLeaf)]
        self._jagged = [leaf for leaf in structure.leaves if isinstance(leaf, _JaggedLeaf)]
        sizes = [(math.prod(leaf.shape), leaf.dtype) for leaf in self._tensors]
        rest = iter(capacities)
        self._capacities = [list(islice(rest, len(leaf.keys))) for leaf in self._jagged]
        for leaf, caps in zip(self._jagged, self._capacities, strict=True):
            keys, stride = len(leaf.keys), leaf.stride
            sizes += [(sum(caps), leaf.dtype), (keys * stride, leaf.lengths), (keys * (stride + 1), leaf.lengths)]
            sizes += [] if leaf.weights is None else [(sum(caps), leaf.weights)]
        ends = list(accumulate(-(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for size, dtype in sizes))
        self._spans = [(begin, size, dtype) for begin, (size, dtype) in zip([0, *ends[:-1]], sizes, strict=True)]
        self._blank = torch.zeros(ends[-1] if ends else 0, dtype=torch.uint8, device=device)
        for leaf, caps, (values, *_) in zip(self._jagged, self._capacities, self._views(self._blank)[1], strict=True):
            for key, part in zip(leaf.keys, values.split(caps), strict=True):
                part.fill_(padding.get(key, 0))

    def new_block(self) -> Tensor:
        """Returns memory of one batch, with padding alone."""
        return self._blank.clone()

    def _views(self, block: Tensor) -> tuple[list[Tensor], list[tuple[Tensor, Tensor, Tensor, Tensor | None]]]:
        """Returns the tensors of a block, and of each KeyedJaggedTensor of K keys and B samples its parts.

        They are the values of each key, padded to its capacity, lengths [K, B], offsets [K, B + 1], and weights.
        """
        parts = iter([block[begin : begin + size * dtype.itemsize].view(dtype) for begin, size, dtype in self._spans])
        tensors = [next(parts).view(leaf.shape) for leaf in self._tensors]
        jagged = []
        for leaf in self._jagged:
            keys = len(leaf.keys)
            values, lengths = next(parts), next(parts).view(keys, leaf.stride)
            offsets = next(parts).view(keys, leaf.stride + 1)
            jagged.append((values, lengths, offsets, None if leaf.weights is None else next(parts)))
        return tensors, jagged

    def fill(self, block: Tensor, batch: Described) -> None:
        """Writes a batch whose keys fit the capacities to a block; it waits for nothing.

        The batch is of the structure, or of its first part; the rest is padding then.
        """
        self.clear(block)
        tensors, jagged = self._views(block)
        for to, value in zip(tensors, batch.tensors, strict=False):
            to.copy_(value, non_blocking=True)
        for (values, lengths, offsets, weights), caps, ids in zip(jagged, self._capacities, batch.jagged, strict=True):
            lengths.copy_(ids.lengths().view_as(lengths), non_blocking=True)
            # Summed here, which may overlap the previous step, and not in the step.
            offsets[:, 1:].copy_(lengths.cumsum(1, dtype=offsets.dtype), non_blocking=True)
            for first, begin, count in _runs(ids.length_per_key(), caps):
                values[first : first + count].copy_(ids.values()[begin : begin + count], non_blocking=True)
                if weights is not None:
                    weights[first : first + count].copy_(ids.weights()[begin : begin + count], non_blocking=True)

    def clear(self, block: Tensor) -> None:
        """Resets a block to padding alone."""
        block.copy_(self._blank, non_blocking=True)

    def narrow(self, block: Tensor, wider: "Buffers", wider_block: Tensor) -> None:
        """Copies a batch that fits these capacities from a block of wider buffers.

        Their structure is the same but for last dimensions of tensors, of which the first elements are copied.
        """
        (tensors, jagged), (from_tensors, from_jagged) = self._views(block), wider._views(wider_block)
        for to, value in zip(tensors, from_tensors, strict=True):
            to.copy_(value if value.shape == to.shape else value[..., : to.size(-1)])
        sizes = zip(jagged, from_jagged, self._capacities, wider._capacities, strict=True)
        for (values, lengths, offsets, weights), wide, caps, others in sizes:
            lengths.copy_(wide[1])
            offsets.copy_(wide[2])
            for to, value in ((values, wide[0]), (weights, wide[3])):
                if to is None:
                    continue
                for part, other in zip(to.split(caps), value.split(others), strict=True):
                    part.copy_(other[: part.size(0)])

    def batch(self, block: Tensor) -> Any:
        """Returns a batch over a block's memory; a KeyedJaggedTensor caches what it computes, so it is made anew."""
        tensors, views = self._views(block)
        jagged = []
        for leaf, caps, (values, lengths, offsets, weights) in zip(self._jagged, self._capacities, views, strict=True):
            parts = zip(
                leaf.keys,
                values.split(caps),
                [None] * len(caps) if weights is None else weights.split(caps),
                lengths,
                offsets,
                strict=True,
            )
            jagged.append(
                KeyedJaggedTensor(
                    keys=list(leaf.keys),
                    values=values,
                    weights=weights,
                    lengths=lengths.view(-1),
                    stride=leaf.stride,
                    length_per_key=caps.copy(),
                    offset_per_key=[0, *accumulate(caps)],
                    jt_dict={key: JaggedTensor(x, w, lengths=n, offsets=o) for key, x, w, n, o in parts},
                )
            )
        parts = {_TensorLeaf: iter(tensors), _JaggedLeaf: iter(jagged)}
        leaves = [x.value if type(x) is _ConstantLeaf else next(parts[type(x)]) for x in self.structure.leaves]
        return pytree.tree_unflatten(leaves, self.structure.tree)


def _runs(lengths: list[int], capacities: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (first index in the buffer, first value in the batch, number of values) of each copy.

    Keys without padding between them are copied together.
    """
    first = begin = count = end = 0
    for length, capacity in zip(lengths, capacities, strict=True):
        count += length
        end += capacity
        if length < capacity:
            if count:
                yield first, begin, count
            first, begin, count = end, begin + count, 0
    if count:
        yield first, begin, count
