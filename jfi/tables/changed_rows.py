"""Marks of the rows of embedding tables that steps have changed, on the tables' device."""

from itertools import accumulate

import torch
from torch import Tensor


class ChangedRows:
    """Marks the rows that steps change, until they are taken.

    A mark is one kernel of fixed shape, without synchronization, so a captured step has it in its graph.

    TorchRec's ModelDeltaTracker keeps the ids of every batch of a DistributedModelParallel and finds the distinct ones
    when it is asked. It hooks into sharded collections alone, and its memory grows with the batches, where this takes
    a byte for each row.

    Example:
        >>> import torch
        >>> changed = ChangedRows()
        >>> changed.mark({"item": 4, "user": 3}, torch.tensor([1, 1, 5, 7]))  # 7 is padding
        >>> changed.take("item"), changed.take("user"), changed.take("user")
        (tensor([1]), tensor([1]), tensor([], dtype=torch.int64))
    """

    def __init__(self) -> None:
        #: By tables that are stepped together, as their rows are numbered, [N + 1]; the last one stands for padding.
        self._marks: dict[tuple[str, ...], Tensor] = {}
        self._slices: dict[tuple[str, ...], dict[str, slice]] = {}

    def mark(self, sizes: dict[str, int], rows: Tensor) -> None:
        """Marks rows [n], numbered through tables of these sizes; the sum of the sizes is padding."""
        names = tuple(sizes)
        if names not in self._marks:
            if rows.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a step must run once before it is captured, so that the marks of its rows exist")
            ends = [0, *accumulate(sizes.values())]
            self._slices[names] = {name: slice(*ends[i : i + 2]) for i, name in enumerate(names)}
            self._marks[names] = torch.zeros(ends[-1] + 1, dtype=torch.bool, device=rows.device)
        elif self._marks[names].device != rows.device:  # the tables were moved
            self._marks[names] = self._marks[names].to(rows.device)
        self._marks[names].index_fill_(0, rows.long(), True)

    def take(self, table: str) -> Tensor:
        """Returns the marked rows [n] of a table, ascending, and removes their marks. It waits for the device."""
        own = [marks[self._slices[names][table]] for names, marks in self._marks.items() if table in names]
        if not own:
            return torch.zeros(0, dtype=torch.int64)
        rows = torch.stack(own).any(0).nonzero().flatten() if len(own) > 1 else own[0].nonzero().flatten()
        for marks in own:
            marks.zero_()
        return rows

    def put_back(self, table: str, rows: Tensor) -> None:
        """Marks rows again that were taken and not used."""
        own = next((marks[self._slices[names][table]] for names, marks in self._marks.items() if table in names), None)
        if own is not None:
            own[rows] = True
