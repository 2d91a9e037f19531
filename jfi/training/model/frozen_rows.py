"""Rows of embedding tables that no step changes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from jfi.training.distributed.processes import World
from jfi.training.model.build_model import shards_of


class FrozenRows:
    """Rows of tables that keep their values.

    In a single process the collections leave these rows out of their steps. Under torchrun the tables have always an
    Adagrad, which divides by the root of a sum of squared gradients. There the sums of these rows are infinite, so that
    their steps are exactly zero. In checkpoints these sums are zero.

    Args:
        model: of the run.
        optimizer: of the run.
        tables: by column the name of its table's parameter and the number of rows.
        world: the processes of the run.
    """

    def __init__(self, model: nn.Module, optimizer: KeyedOptimizer, tables: dict[str, tuple[str, int]], world: World):
        self._model, self._optimizer, self._launched = model, optimizer, world.launched
        self._names = {column: name for column, (name, _) in tables.items()}
        #: By column which rows are frozen, `[rows]` bool, the same in every process.
        self.rows = {
            column: torch.zeros(rows, dtype=torch.bool, device=world.device) for column, (_, rows) in tables.items()
        }
        if not world.launched:
            for column, name in self._names.items():
                collection, _, table, _ = name.rsplit(".", 3)
                model.get_submodule(collection).freeze_rows(table, self.rows[column])

    def add(self, column: str, rows: Tensor) -> None:
        """Freezes the rows `[M]` of a column's table, if the column is one of `tables`."""
        if column in self.rows:
            self.rows[column][rows.to(self.rows[column].device)] = True
            self.hold()

    def hold(self) -> None:
        """Keeps the rows from now on, after the optimizer's state was loaded."""
        self._set_sums(math.inf)

    @contextmanager
    def released(self) -> Iterator[None]:
        """The optimizer's state within is that of rows without gradients."""
        self._set_sums(0.0)
        try:
            yield
        finally:
            self.hold()

    def _set_sums(self, value: float) -> None:
        if not self._launched or not self.rows:
            return
        parameters, state = self._model.state_dict(), self._optimizer.state_dict()["state"]
        for column, name in self._names.items():
            shards = shards_of(parameters[name])
            if shards:
                sums, *_ = state[name].values()  # Adagrad's comes first
                # Its shards are those of the table, in the same order.
                for (_, row, _), shard in zip(shards, sums.local_shards(), strict=True):
                    shard.tensor[self.rows[column][row : row + len(shard.tensor)]] = value
