"""Batches in memory that stays where it is: tensors of fixed shape, and jagged keys with room for more values.

A batch is a tree of dataclasses, named tuples, tuples, lists and dicts; its leaves are tensors, KeyedJaggedTensors, and
constants such as None or a string. `describe` takes it apart into a structure, which two batches of equal shapes share,
and its tensors. `Buffers` holds one such tree in one block of memory, so that moving a batch within the device is one
copy. Behind the values of a key are padding ids up to the key's capacity; its lengths are those of the batch.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

#: Bytes that a tensor's place in the block is a multiple of.
_ALIGNMENT = 256
#: Capacities go by factors of GROWTH; the one of the reference batch has this much more than its values.
GROWTH, MARGIN = 1.25, 1.1
#: How many steps of the ladder there are below the reference batch and above.
_LEVELS = range(-6, 7)
_MULTIPLE = 64
#: Why a batch is no batch like the reference.
OTHER_STRUCTURE = "another number of samples, or another structure"


class UnsupportedBatch(TypeError):
    """A batch with a part that has no static form; the message names it."""


class _TensorNode(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class _JaggedNode(NamedTuple):
    keys: tuple[str, ...]
    stride: int
    dtype: torch.dtype
    weights: torch.dtype | None
    lengths: torch.dtype


class _Branch(NamedTuple):
    kind: type
    names: tuple[Hashable, ...]
    children: tuple[Any, ...]


class _Constant(NamedTuple):
    kind: type
    value: Hashable


class Described(NamedTuple):
    """A batch taken apart.

    `structure` is equal for batches of equal shapes, dtypes and constants; `tensors` and `jagged` are in its order.
    """

    structure: Hashable
    tensors: list[Tensor]
    jagged: list[KeyedJaggedTensor]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of values of every key of every KeyedJaggedTensor."""
        return tuple(length for one in self.jagged for length in one.length_per_key())

    @property
    def keys(self) -> list[str]:
        """Beside `lengths`."""
        return [key for one in self.jagged for key in [*one.keys()]]

    def is_on_host(self) -> bool:
        """Whether reading the lengths waits for no device."""
        return all(one.lengths().device.type == "cpu" for one in self.jagged)

    def single(self) -> list[bool]:
        """Beside `lengths`: whether the key has one value a sample. Reads the lengths."""
        return [
            bool(single)
            for one in self.jagged
            for single in (one.lengths().view(len(one.keys()), one.stride()) == 1).all(dim=1).tolist()
        ]


def describe(batch: object) -> Described:
    """Takes a batch apart.

    Raises:
        UnsupportedBatch: it holds something else than tensors, KeyedJaggedTensors of one batch size, and constants.
    """
    tensors: list[Tensor] = []
    jagged: list[KeyedJaggedTensor] = []

    def walk(value: object, path: str) -> Hashable:
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_nested or value.requires_grad:
                raise UnsupportedBatch(f"{path} is a sparse tensor, a nested one, or one that requires a gradient")
            tensors.append(value)
            return _TensorNode(tuple(value.shape), value.dtype)
        if isinstance(value, KeyedJaggedTensor):
            if value.variable_stride_per_key() or value.inverse_indices_or_none() is not None:
                raise UnsupportedBatch(f"{path} has variable batch sizes")
            weights, lengths = value.weights_or_none(), value.lengths()
            jagged.append(value)
            kinds = value.values().dtype, None if weights is None else weights.dtype, lengths.dtype
            return _JaggedNode(tuple(value.keys()), value.stride(), *kinds)
        names, children = _children(value)
        if names is not None:
            inner = tuple(walk(child, f"{path}.{name}") for name, child in zip(names, children, strict=True))
            return _Branch(type(value), names, inner)
        if not isinstance(value, None | bool | int | float | str | torch.dtype | torch.device):
            raise UnsupportedBatch(f"{path} is a {type(value).__name__}")
        return _Constant(type(value), value)

    return Described(walk(batch, "the batch"), tensors, jagged)


def _children(value: object) -> tuple[tuple[Hashable, ...] | None, list[object]]:
    """The names and values of a branch's children; None for what is no branch."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value) if field.init)
        return names, [getattr(value, name) for name in names]
    if type(value) is dict:
        return tuple(value), list(value.values())
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return tuple(range(len(value))), list(value)
    return None, []


def rebuild(structure: Hashable, tensors: Iterator[Tensor], jagged: Iterator[KeyedJaggedTensor]) -> Any:
    """The batch of a structure with these tensors; constants are the structure's."""
    if isinstance(structure, _TensorNode):
        return next(tensors)
    if isinstance(structure, _JaggedNode):
        return next(jagged)
    if isinstance(structure, _Constant):
        return structure.value
    children = [rebuild(child, tensors, jagged) for child in structure.children]
    kind, named = structure.kind, dict(zip(structure.names, children, strict=True))
    if kind is dict:
        return named
    if dataclasses.is_dataclass(kind):
        return kind(**named)
    return kind(*children) if hasattr(kind, "_fields") else kind(children)


def to_device(part: Tensor | KeyedJaggedTensor, device: torch.device) -> Tensor | KeyedJaggedTensor:
    """A tensor or a KeyedJaggedTensor of a batch on the device; the host does not wait for it."""
    found = part.to(device, non_blocking=True)
    if isinstance(found, KeyedJaggedTensor):
        found._jt_dict = None  # what `to_dict()` has found, which TorchRec leaves where it was
    return found


def moved(batch: object, change: Callable[[Any], Any]) -> Any:
    """The batch with `change` applied to each tensor and each KeyedJaggedTensor."""
    found = describe(batch)
    return rebuild(found.structure, iter([change(x) for x in found.tensors]), iter([change(x) for x in found.jagged]))


class CapacityBuckets:
    """Capacities by key for batches like a reference batch: a function of the batch and of the reference alone.

    A key with one value a sample in the reference has no room: all batches must have as many. The others have
    reference · MARGIN · GROWTH^level, all keys on one level.

    Args:
        structure: of the reference.
        keys: of the reference.
        lengths: its values, by key.
        fixed: by key whether it has one value a sample.
        singles: keys with one value a sample in all batches that fit; none if that would have to be read from a device.
    """

    def __init__(
        self,
        structure: Hashable,
        keys: list[str],
        lengths: tuple[int, ...],
        fixed: list[bool],
        singles: frozenset[str] = frozenset(),
    ) -> None:
        self.structure, self.singles = structure, singles
        self._keys, self._reference, self._fixed = keys, lengths, fixed
        self._levels = [tuple(self._capacity(i, level) for i in range(len(self._keys))) for level in _LEVELS]

    @classmethod
    def of(cls, reference: Described) -> "CapacityBuckets":
        """That of a reference batch."""
        fixed = reference.single()
        return cls(reference.structure, reference.keys, reference.lengths, fixed, single_keys(reference, fixed))

    def _capacity(self, key: int, level: int) -> int:
        if self._fixed[key]:
            return self._reference[key]
        return _MULTIPLE * math.ceil(max(1, self._reference[key]) * MARGIN * GROWTH**level / _MULTIPLE)

    def fit(self, batch: Described) -> tuple[int, ...] | str:
        """The smallest capacities that hold a batch, or why there are none."""
        if batch.structure != self.structure:
            return OTHER_STRUCTURE
        if self.singles and not batch.is_on_host():
            return "lengths on the device, unlike those of the first batch"
        singles = batch.single() if self.singles else [True] * len(batch.lengths)
        for key, fixed, single in zip(self._keys, self._fixed, singles, strict=True):
            if fixed and not single:
                return not_single(key)
        return self.capacities(batch.lengths)

    def capacities(self, lengths: tuple[int, ...]) -> tuple[int, ...] | str:
        """The smallest capacities that hold so many values, or why there are none."""
        for key, fixed, length, own in zip(self._keys, self._fixed, lengths, self._reference, strict=True):
            if fixed and length != own:
                return not_single(key)
        for capacities in self._levels:
            if all(length <= capacity for length, capacity in zip(lengths, capacities, strict=True)):
                return capacities
        return "more values than the largest capacity"


def single_keys(batch: Described, single: list[bool]) -> frozenset[str]:
    """The keys with one value a sample, if the batch is on the host; `single` as `Described.single` says it."""
    if not batch.is_on_host():
        return frozenset()
    return frozenset(batch.keys) - {key for key, one in zip(batch.keys, single, strict=True) if not one}


def not_single(key: str) -> str:
    """Why a batch does not fit a ladder."""
    return f"not one value a sample in '{key}', as the first batch has"


class _JaggedParts(NamedTuple):
    """The memory of a KeyedJaggedTensor of K keys and B samples."""

    values: Tensor  # those of each key, with room behind them
    lengths: Tensor  # [K, B]
    offsets: Tensor  # [K, B + 1], of each key from 0 on
    weights: Tensor | None


class Buffers:
    """A batch of fixed shapes and capacities in one block of memory.

    Args:
        structure: of the batches.
        capacities: by key, in the order of `Described.lengths`.
        padding: by key the id behind a batch's own; 0 for other keys. Weights are 0 there.
        device: of the memory.
    """

    def __init__(
        self, structure: Hashable, capacities: tuple[int, ...], padding: Mapping[str, int], device: torch.device
    ) -> None:
        self.structure, self.capacities = structure, capacities
        self._tensors, self._jagged = _nodes(structure)
        sizes = [(math.prod(node.shape), node.dtype) for node in self._tensors]
        rest = list(capacities)
        self._capacities: list[tuple[int, ...]] = []
        for node in self._jagged:
            own, rest = tuple(rest[: len(node.keys)]), rest[len(node.keys) :]
            self._capacities.append(own)
            keys = len(node.keys)
            sizes += [
                (sum(own), node.dtype),
                (keys * node.stride, node.lengths),
                (keys * (node.stride + 1), node.lengths),
            ]
            sizes += [] if node.weights is None else [(sum(own), node.weights)]
        ends = list(accumulate(-(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for size, dtype in sizes))
        self._places = [(begin, size, dtype) for begin, (size, dtype) in zip([0, *ends[:-1]], sizes, strict=True)]
        self._blank = torch.zeros(ends[-1] if ends else 0, dtype=torch.uint8, device=device)
        for node, own, parts in zip(self._jagged, self._capacities, self._views(self._blank)[1], strict=True):
            for key, part in zip(node.keys, parts.values.split(list(own)), strict=True):
                part.fill_(padding.get(key, 0))

    def new_block(self) -> Tensor:
        """Memory of one batch, without samples' values."""
        return self._blank.clone()

    def _views(self, block: Tensor) -> tuple[list[Tensor], list["_JaggedParts"]]:
        """The tensors of a block, and the parts of each KeyedJaggedTensor."""
        parts = iter([block[begin : begin + size * dtype.itemsize].view(dtype) for begin, size, dtype in self._places])
        tensors = [next(parts).view(node.shape) for node in self._tensors]
        jagged = []
        for node in self._jagged:
            keys = len(node.keys)
            values, lengths = next(parts), next(parts).view(keys, node.stride)
            offsets = next(parts).view(keys, node.stride + 1)
            jagged.append(_JaggedParts(values, lengths, offsets, None if node.weights is None else next(parts)))
        return tensors, jagged

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return self._blank.size(0)

    def fill(self, block: Tensor, batch: Described, behind: "Buffers | None" = None) -> None:
        """Writes a batch of the structure, whose keys fit the capacities, to a block; it waits for nothing.

        Args:
            block: of `new_block`.
            batch: what is written.
            behind: buffers whose structure is the first part of this one: that part is there already.
        """
        begin, skipped, known = 0, 0, 0
        if behind is not None:
            begin, skipped, known = behind.size, len(behind._tensors), len(behind._jagged)
            if self._places[: len(behind._places)] != behind._places:
                raise ValueError("the structure of `behind` must be the first part of this one's")
        block[begin:].copy_(self._blank[begin:], non_blocking=True)
        tensors, jagged = self._views(block)
        for to, value in list(zip(tensors, batch.tensors, strict=True))[skipped:]:
            to.copy_(value, non_blocking=True)
        for to, own, one in list(zip(jagged, self._capacities, batch.jagged, strict=True))[known:]:
            to.lengths.copy_(one.lengths().view_as(to.lengths), non_blocking=True)
            # Added up here, which may be beside the step before, and not in the step.
            to.offsets[:, 1:].copy_(to.lengths.cumsum(1, dtype=to.offsets.dtype), non_blocking=True)
            for first, begin, count in _runs(one.length_per_key(), own):
                to.values[first : first + count].copy_(one.values()[begin : begin + count], non_blocking=True)
                if to.weights is not None:
                    to.weights[first : first + count].copy_(one.weights()[begin : begin + count], non_blocking=True)

    def clear(self, block: Tensor) -> None:
        """Takes a block's samples' values away."""
        block.copy_(self._blank, non_blocking=True)

    def narrow(self, block: Tensor, wider: "Buffers", given: Tensor) -> None:
        """Copies a batch that fits this structure's capacities from a block of wider ones of the same structure."""
        (tensors, jagged), (from_tensors, from_jagged) = self._views(block), wider._views(given)
        for to, value in zip(tensors, from_tensors, strict=True):
            to.copy_(value, non_blocking=True)
        capacities = zip(jagged, from_jagged, self._capacities, wider._capacities, strict=True)
        for to, one, own, others in capacities:
            to.lengths.copy_(one.lengths, non_blocking=True)
            to.offsets.copy_(one.offsets, non_blocking=True)
            for narrow, wide in ((to.values, one.values), (to.weights, one.weights)):
                if narrow is not None:
                    for part, other, count in zip(narrow.split(list(own)), wide.split(list(others)), own, strict=True):
                        part.copy_(other[:count], non_blocking=True)

    def batch(self, block: Tensor) -> Any:
        """A batch over a block's memory, made anew: what a KeyedJaggedTensor computes and keeps is of one use."""
        tensors, jagged = self._views(block)
        made = []
        for node, own, parts in zip(self._jagged, self._capacities, jagged, strict=True):
            values = parts.values.split(list(own))
            weights = [None] * len(own) if parts.weights is None else parts.weights.split(list(own))
            by_key = {
                key: JaggedTensor(values[i], weights=weights[i], lengths=parts.lengths[i], offsets=parts.offsets[i])
                for i, key in enumerate(node.keys)
            }
            made.append(
                KeyedJaggedTensor(
                    keys=list(node.keys),
                    values=parts.values,
                    weights=parts.weights,
                    lengths=parts.lengths.view(-1),
                    stride=node.stride,
                    length_per_key=list(own),
                    offset_per_key=[0, *accumulate(own)],
                    jt_dict=by_key,
                )
            )
        return rebuild(self.structure, iter(tensors), iter(made))


def _nodes(structure: Hashable) -> tuple[list[_TensorNode], list[_JaggedNode]]:
    """The leaves of a structure, in its order."""
    if isinstance(structure, _TensorNode):
        return [structure], []
    if isinstance(structure, _JaggedNode):
        return [], [structure]
    found: tuple[list, list] = [], []
    for child in structure.children if isinstance(structure, _Branch) else ():
        for own, new in zip(found, _nodes(child), strict=True):
            own += new
    return found


def _runs(lengths: list[int], capacities: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(first place in the buffer, first value in the batch, number of values) of what is copied at once.

    Keys without room between them are copied together.
    """
    first = begin = count = place = 0
    for length, capacity in zip(lengths, capacities, strict=True):
        count += length
        place += capacity
        if length < capacity:
            if count:
                yield first, begin, count
            first, begin, count = place, begin + count, 0
    if count:
        yield first, begin, count
