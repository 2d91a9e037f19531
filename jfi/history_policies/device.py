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
    capacity: int | None = None,
) -> Selected:
    """Returns the events that stay.

    Args:
        tables: of the policy.
        cells: `[S]` integers in [0, C).
        segments: `[B]` integers in [0, K).
        offsets: `[B + 1]` int64, the ranges of the histories among the S events; what lies behind the last is padding.
        capacity: length of the results, for which nothing waits for the device; None for as many as stay. Events
            beyond the capacity are left out, and the lengths count what is in.
    """
    events = cells.size(0)
    positions = torch.arange(events, device=cells.device)
    history = torch.searchsorted(offsets[1:].contiguous(), positions, right=True)  # of padding B

    def spread(of_history: Tensor) -> Tensor:
        return torch.cat([of_history, of_history.new_zeros(1)])[history]

    entry = spread(segments.to(torch.int64) * tables.keep.size(1)) + cells
    end = spread(offsets[1:])
    keep = tables.keep.flatten().index_select(0, entry)
    if tables.newest:
        keep = keep | (end - positions <= tables.newest)
    keep = keep & (history < segments.size(0))
    if tables.cap is not None:  # an event stays if from it to the end no more than the cap stay
        before = _counted(keep)
        keep = keep & (before[:-1] >= before[end] - spread(tables.cap[segments.to(torch.int64)]))
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
