"""Which events of packed histories stay, and with which weights; plain torch, the same on a CPU and a GPU.

Events are packed by history, the oldest first. Each has a cell (surface and bin of dwell), each history a segment. An
event stays if the table keeps its cell for the segment, or if it is one of the history's newest ones; of those, the
newest `cap` stay.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Tables(NamedTuple):
    """A policy's tables for K segments and C cells, on one device.

    Args:
        keep: `[K, C]` bool.
        weight: `[K, C]` float32, or None where all weights are 1.
        cap: `[K]` int32, the most events of a history, or None for no limit.
        newest: how many of a history's newest events stay whatever their cell.
    """

    keep: Tensor
    weight: Tensor | None
    cap: Tensor | None
    newest: int


class Selected(NamedTuple):
    """The M events that stay, in their order.

    Attributes:
        rows: `[M]` int64, their places among the S events. With a capacity M is the capacity.
        lengths: `[B]` int64, how many stay of each history.
        weights: `[M]` float32, or None where all are 1.
        inside: with a capacity, `[M]` bool, whether there is an event; elsewhere rows and weights are 0.
        left_out: with a capacity, int64, how many events would stay if it were larger.
    """

    rows: Tensor
    lengths: Tensor
    weights: Tensor | None
    inside: Tensor | None = None
    left_out: Tensor | None = None


def select_events(
    tables: Tables,
    cells: Tensor,
    segments: Tensor,
    offsets: Tensor,
    seen_by: Tensor | None = None,
    capacity: int | None = None,
) -> Selected:
    """The events that stay.

    Args:
        tables: of the policy.
        cells: `[S]` integers in [0, C).
        segments: `[B]` integers in [0, K).
        offsets: `[B + 1]` int64, the ranges of the histories among the S events; what lies behind the last is room.
        seen_by: `[S]` int64: an event is one of the newest counted back from this place; None for the history's end.
        capacity: length of the results, for which nothing waits for the device; None for as many as stay. Events
            beyond the capacity are left out, and the lengths count what is in.
    """
    events, count = cells.size(0), segments.size(0)
    if capacity is None:

        def spread(of_history: Tensor) -> Tensor:
            return torch.repeat_interleave(of_history, offsets.diff(), output_size=events)
    else:  # there may be room, which belongs to no history
        places = torch.arange(events, device=cells.device)
        history = torch.searchsorted(offsets[1:].contiguous(), places, right=True)

        def spread(of_history: Tensor) -> Tensor:
            return torch.cat([of_history, of_history.new_zeros(1)])[history]

    # 32 bits where they suffice: on a CPU the indices of all events are what takes time.
    entry = spread(segments.to(torch.int32) * tables.keep.size(1)) + cells
    keep = tables.keep.flatten().index_select(0, entry)
    if tables.newest and events:
        _keep_newest(keep, offsets, tables.newest, seen_by)
    if capacity is not None:
        keep &= history < count
    if tables.cap is not None and count:
        before, cap = _counted(keep), tables.cap.index_select(0, segments.to(torch.int64))
        # An event stays if from it to the end no more than the cap stay.
        if seen_by is None:
            keep &= before[:-1] >= spread(before[offsets[1:]] - cap)
        else:
            keep &= before[:-1] >= before[seen_by] - spread(cap)
    inside = left_out = None
    if capacity is None:
        rows = _places(keep)
        lengths = torch.searchsorted(rows, offsets).diff()
    else:
        counts = _counted(keep)
        # Each event that stays is written to its place, the others to one behind the capacity.
        to = torch.where(keep, counts[:-1], capacity).clamp(max=capacity).to(torch.int64)
        rows = torch.zeros(capacity + 1, dtype=torch.int64, device=cells.device).scatter(0, to, places)[:capacity]
        inside = torch.arange(capacity, device=cells.device) < counts[-1]
        rows = torch.where(inside, rows, 0)
        lengths = counts[offsets].clamp(max=capacity).to(torch.int64).diff()
        left_out = (counts[-1] - capacity).clamp(min=0)
    weights = None
    if tables.weight is not None:
        weights = tables.weight.flatten().index_select(0, take(entry, rows))
        weights = weights if inside is None else torch.where(inside, weights, 0.0)
    return Selected(rows, lengths, weights, inside, left_out)


def take(values: Tensor, rows: Tensor) -> Tensor:
    """`values[rows]`; a capacity has rows where there are no values at all, which read 0."""
    return values.index_select(0, rows) if values.size(0) else values.new_zeros(rows.shape)


def _counted(keep: Tensor) -> Tensor:
    """`[S + 1]`, how many are true before each place."""
    dtype = torch.int32 if keep.size(0) < 2**31 else torch.int64
    return torch.nn.functional.pad(keep.cumsum(0, dtype=dtype), (1, 0))


def _places(keep: Tensor) -> Tensor:
    """`[M]` int64, where it is true; NumPy takes an eighth of torch's time for it on a CPU."""
    if keep.device.type != "cpu":
        return keep.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(keep.numpy()))


def _keep_newest(keep: Tensor, offsets: Tensor, newest: int, seen_by: Tensor | None) -> None:
    """Sets `keep [S]` for the newest events of each history."""
    events = keep.size(0)
    if seen_by is not None:
        keep |= seen_by - torch.arange(events, device=keep.device) <= newest
        return
    # [B, newest]: a history has few newest events beside all of its events.
    places = offsets[1:, None] - 1 - torch.arange(newest, device=keep.device)
    mine = places >= offsets[:-1, None]
    ones = torch.zeros(events + 1, dtype=torch.bool, device=keep.device)
    keep |= ones.index_fill_(0, torch.where(mine, places, events).flatten(), True)[:-1]


def find_cells(edges: Tensor, surface: Tensor, dwell: Tensor) -> Tensor:
    """`[S]` int64, the cell of each event, without a look at the contents.

    Args:
        edges: `[G + 1, E]` float32, by surface and for an unknown one, infinite behind the last edge of a surface.
        surface: `[S]` integers in [-1, G).
        dwell: `[S]`, NaN where missing.
    """
    surface = torch.where(surface < 0, edges.size(0) - 1, surface.to(torch.int64))
    own, dwell = edges[surface], dwell.to(torch.float32)
    bins = ((dwell[:, None] >= own) & own.isfinite()).sum(1)
    unknown = edges.size(1) + 1
    cells = surface * (unknown + 1) + torch.where(dwell.isnan(), unknown, bins)
    return torch.where(surface == edges.size(0) - 1, surface * (unknown + 1), cells)


def first_seen(offsets: Tensor, event_times: Tensor, row_offsets: Tensor, target_times: Tensor) -> Tensor:
    """`[S]` int64: for each event of U timelines the end of what the first row sees that sees the event.

    A row sees the events that are strictly older than itself. An event that no row sees gets the timeline's end.

    Args:
        offsets: `[U + 1]`, the events of each timeline.
        event_times: `[S]`, not decreasing within a timeline.
        row_offsets: `[U + 1]`, the rows of each timeline.
        target_times: `[R]`, not decreasing within a timeline.
    """
    timeline = torch.repeat_interleave(offsets.diff(), output_size=event_times.size(0))
    row = _first_after(target_times, row_offsets[timeline], row_offsets[timeline + 1], event_times, strict=True)
    of_row = torch.repeat_interleave(row_offsets.diff(), output_size=target_times.size(0))
    ends = _first_after(event_times, offsets[of_row], offsets[of_row + 1], target_times, strict=False)
    seen = row < row_offsets[timeline + 1]
    padded = torch.cat([ends, ends.new_zeros(1)])
    return torch.where(seen, padded[torch.where(seen, row, ends.size(0))], offsets[timeline + 1])


def _first_after(values: Tensor, low: Tensor, high: Tensor, than: Tensor, strict: bool) -> Tensor:
    """`[N]`: the first place in [low, high) whose value is larger than (or, not strict, at least) `than`, else high.

    Bisection of all N at once, as many steps as the longest possible range needs, so that nothing is read back.
    """
    if not values.size(0):
        return high.clone()
    for _ in range(values.size(0).bit_length() + 1):
        middle = (low + high) // 2
        at = values[middle.clamp(max=values.size(0) - 1)]
        right = (at <= than if strict else at < than) & (low < high)
        low, high = torch.where(right, middle + 1, low), torch.where(right, high, torch.minimum(middle, high))
    return high
