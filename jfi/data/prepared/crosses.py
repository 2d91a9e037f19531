"""Crosses of columns of events that are too long for memory: a code for each combination of values that occurs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.prepared.column_files import new_map
from jfi.data.schema.coded import CodedColumn, blocks
from jfi.utils.encoding import CROSSED


def cross_columns(parts: list[tuple[CodedColumn | pa.Array, np.ndarray | None]], path: Path) -> CodedColumn:
    """The values of several columns as one, for each of E events; missing where one of them is.

    Memory grows with the combinations that occur, and not with the events.

    Args:
        parts: each a column of the events and None, or strings of the items and the item `[E]` of each event.
        path: the codes are maps of files whose names begin with it.
    """
    (values, codes), *others = (_EventCodes.of(*part) for part in parts)
    for number, (other, its_codes) in enumerate(others):
        pairs = _distinct_pairs(codes, its_codes, len(other))
        crossed = new_map(Path(f"{path}-{number}.npy"), np.int32, len(codes))
        for begin, end in blocks(len(codes)):
            key = _pair(codes, its_codes, len(other), begin, end)
            crossed[begin:end] = np.where(key < 0, -1, np.searchsorted(pairs, key))
        left, right = values.take(pa.array(pairs // len(other))), other.take(pa.array(pairs % len(other)))
        values = pc.binary_join_element_wise(left, right, pa.scalar(CROSSED, pa.large_string()))
        codes = _EventCodes(crossed, None)
    # Values that hold the separator themselves can give one text in two ways.
    distinct = values.dictionary_encode()
    if len(distinct.dictionary) < len(values):
        same = distinct.indices.to_numpy()
        for begin, end in blocks(len(crossed)):
            crossed[begin:end] = np.append(same, -1)[crossed[begin:end]]
    return CodedColumn(distinct.dictionary, crossed)


class _EventCodes:
    """The codes of a column of events, -1 where it is missing; of an item's column by the item of each event."""

    def __init__(self, codes: np.ndarray, index: np.ndarray | None) -> None:
        self._codes, self._index = codes, index

    @classmethod
    def of(cls, column: CodedColumn | pa.Array, index: np.ndarray | None) -> tuple[pa.Array, "_EventCodes"]:
        """The distinct values of a column, and its codes."""
        if isinstance(column, CodedColumn):
            return column.values.cast(pa.large_string()), cls(column.codes, None)
        encoded = column.cast(pa.large_string()).dictionary_encode()
        return encoded.dictionary, cls(pc.fill_null(encoded.indices, -1).to_numpy(), index)

    def __len__(self) -> int:
        return len(self._codes if self._index is None else self._index)

    def read(self, begin: int, end: int) -> np.ndarray:
        """`[end - begin]` int64."""
        codes = self._codes[begin:end] if self._index is None else self._codes[self._index[begin:end]]
        return codes.astype(np.int64)


def _pair(left: _EventCodes, right: _EventCodes, count: int, begin: int, end: int) -> np.ndarray:
    """`[end - begin]` int64, a number for each pair of codes, -1 where one is missing."""
    a, b = left.read(begin, end), right.read(begin, end)
    return np.where((a < 0) | (b < 0), -1, a * count + b)


def _distinct_pairs(left: _EventCodes, right: _EventCodes, count: int) -> np.ndarray:
    """The numbers of all pairs that occur, ascending."""

    def merged(parts: list[np.ndarray]) -> np.ndarray:
        return np.unique(np.concatenate(parts))

    def found() -> Iterator[np.ndarray]:
        for begin, end in blocks(len(left)):
            pairs = np.unique(_pair(left, right, count, begin, end))
            yield pairs[pairs >= 0]

    known, pending = np.empty(0, np.int64), []
    for pairs in found():
        pending.append(pairs)
        if sum(map(len, pending)) > len(known):
            known, pending = merged([known, *pending]), []
    return merged([known, *pending])
