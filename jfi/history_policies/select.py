"""Which events of packed histories stay, and with which weights: a lookup of cells, for logs, datasets and requests.

Events are packed by history, the oldest first. Each has a cell (surface and bin of dwell), each history a segment. An
event stays if the table keeps its cell for the segment, or if it is one of the history's newest ones; of those, the
newest `cap` stay.
"""

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Array = TypeVar("Array", np.ndarray, "Tensor")


class CellTables(NamedTuple, Generic[Array]):
    """A policy's tables for K segments and C cells: NumPy arrays, or tensors on one device.

    Args:
        keep: `[K, C]` bool.
        weight: `[K, C]` float32, or None where all weights are 1.
        cap: `[K]` int32, the most events of a history, or None for no limit.
        newest: how many of a history's newest events stay whatever their cell.
    """

    keep: Array
    weight: Array | None
    cap: Array | None
    newest: int


class Selected(NamedTuple, Generic[Array]):
    """The M events that stay, in their order; with a capacity M is the capacity.

    Attributes:
        rows: `[M]` int64, their indices among the S events.
        lengths: `[B]` int64, how many stay of each history.
        weights: `[M]` float32, or None where all are 1.
        inside: with a capacity, `[M]` bool, whether there is an event; elsewhere rows and weights are 0.
        left_out: with a capacity, int64, how many events would stay if it were larger.
    """

    rows: Array
    lengths: Array
    weights: Array | None
    inside: Array | None = None
    left_out: Array | None = None


def select_events(
    tables: CellTables, cells: np.ndarray, segments: np.ndarray, lengths: np.ndarray, seen_by: np.ndarray | None = None
) -> Selected:
    """Returns the events that stay; on a GPU it is `PolicyModule`.

    Args:
        cells: `[S]` integers in [0, C).
        segments: `[B]` integers in [0, K).
        lengths: `[B]` of the histories, their sum S.
        seen_by: `[S]` int64: an event is one of the newest counted back from this index; None for the history's end.
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    kind = np.int16 if tables.keep.size < 2**15 else np.int32  # of all events' entries: narrow ones take less time
    entry = (segments.astype(kind) * tables.keep.shape[1]).astype(kind).repeat(lengths) + cells
    keep = tables.keep.ravel().take(entry)
    if tables.newest:
        if seen_by is None:  # [B, newest], which is far smaller than S
            newest = offsets[1:, None] - 1 - np.arange(tables.newest)
            keep[newest[newest >= offsets[:-1, None]]] = True
        else:
            keep |= seen_by - np.arange(len(keep)) <= tables.newest
    (rows,) = keep.nonzero()
    ends = rows.searchsorted(offsets)
    if tables.cap is not None:  # an event stays if from it to the end no more than the cap stay
        end = ends[1:].repeat(np.diff(ends)) if seen_by is None else rows.searchsorted(seen_by.take(rows))
        rows = rows[np.arange(len(rows)) >= end - tables.cap.take(segments).repeat(np.diff(ends))]
        ends = rows.searchsorted(offsets)
    weights = None if tables.weight is None else tables.weight.ravel().take(entry.take(rows))
    return Selected(rows, np.diff(ends), weights)
