"""The selection of `jfi.history_policies.select` in plain torch, for batches that lie on a device.

With a capacity the results have a fixed size and nothing is read back, so that a CUDA graph can hold it.
"""

import torch
from torch import Tensor

from jfi.history_policies.select import CellTables, Selected


def select_on_device(
    tables: CellTables,
    cells: Tensor,
    segments: Tensor,
    offsets: Tensor,
    seen_by: Tensor | None = None,
    capacity: int | None = None,
) -> Selected:
    """Returns the events that stay.

    Args:
        tables: of the policy.
        cells: `[S]` integers in [0, C).
        segments: `[B]` integers in [0, K).
        offsets: `[B + 1]` int64, the ranges of the histories among the S events; what lies behind the last is padding.
        seen_by: `[S]` int64: an event is one of the newest counted back from this index; None for the history's end.
        capacity: length of the results, for which nothing waits for the device; None for as many as stay. Events
            beyond the capacity are left out, and the lengths count what is in.
    """
    events = cells.size(0)
    positions = torch.arange(events, device=cells.device)
    history = torch.searchsorted(offsets[1:].contiguous(), positions, right=True)  # of padding B

    def spread(of_history: Tensor) -> Tensor:
        return torch.cat([of_history, of_history.new_zeros(1)])[history]

    entry = spread(segments.to(torch.int64) * tables.keep.size(1)) + cells
    seen_by = spread(offsets[1:]) if seen_by is None else seen_by
    keep = tables.keep.flatten().index_select(0, entry)
    if tables.newest:
        keep = keep | (seen_by - positions <= tables.newest)
    keep = keep & (history < segments.size(0))
    if tables.cap is not None:  # an event stays if from it to the end no more than the cap stay
        before = _counted(keep)
        keep = keep & (before[:-1] >= before[seen_by] - spread(tables.cap[segments.to(torch.int64)]))
    inside = left_out = None
    if capacity is None:
        rows = keep.nonzero().squeeze(1)
        lengths = torch.searchsorted(rows, offsets).diff()
    else:
        counts = _counted(keep)
        # Each event that stays is written to its index, the others to one behind the capacity.
        to = torch.where(keep, counts[:-1], capacity).clamp(max=capacity)
        rows = torch.zeros(capacity + 1, dtype=torch.int64, device=cells.device).scatter(0, to, positions)[:capacity]
        inside = torch.arange(capacity, device=cells.device) < counts[-1]
        rows = torch.where(inside, rows, 0)
        lengths = counts[offsets].clamp(max=capacity).diff()
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
    """`[S + 1]`, how many are true before each index."""
    return torch.nn.functional.pad(keep.cumsum(0), (1, 0))


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
