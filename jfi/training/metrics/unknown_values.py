"""Shares of samples without a known user, item or value of a column."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jfi.data import InteractionDataset

_log = logging.getLogger(__name__)
#: Samples that are counted at a time.
_BLOCK = 1 << 20


@dataclass(frozen=True)
class UnknownShares:
    """Shares of scored rows without a known user, item or value.

    Args:
        rows: the number of rows.
        shares: by column the share of rows without a known value: it is missing, training has not seen it, or it was
            too rare there. The columns are the categories of the user, the item and the context; the user's id is one
            of them if it is a feature.

    Example:
        >>> print(UnknownShares(200, {"item_id": 0.25, "country": 0.0}))
        unknown or missing in 200 rows: item_id 25.0%, country 0.0%
    """

    rows: int
    shares: dict[str, float]

    def __str__(self) -> str:
        return f"unknown or missing in {self.rows:,} rows: {', '.join(f'{k} {v:.1%}' for k, v in self.shares.items())}"

    @classmethod
    def of(cls, dataset: InteractionDataset, split: str, limit: int | None = None) -> "UnknownShares":
        """The shares of the samples of a split, or of about `limit` of them, evenly spread."""
        arrays, counts = dataset.arrays(), {}
        samples = arrays.samples[split]
        samples = samples[:: 1 if limit is None else max(1, len(samples) // limit)]
        index = {"user": arrays.events.user, "item": arrays.events.item, "event": None}
        for spec, ids in zip(dataset.features, arrays.columns, strict=False):
            if spec.role == "history" or spec.semantic:
                continue
            counts.setdefault(spec.column, 0)
            for begin in range(0, len(samples), _BLOCK):
                rows = samples[begin : begin + _BLOCK].astype(np.int64)
                rows = rows if index[spec.of] is None else index[spec.of][rows].astype(np.int64)
                counts[spec.column] += int(np.count_nonzero(ids.known_counts(rows) == 0))
        return cls(len(samples), {name: count / max(1, len(samples)) for name, count in counts.items()})

    def warn(self, expected: Mapping[str, float]) -> None:
        """Logs a warning of each column with an unknown value in most rows that should have a known one.

        Args:
            expected: by column the share in the run's test split; others are not warned of.
        """
        for column, usual in expected.items():
            share = self.shares.get(column, 0.0)
            if share > (1 + usual) / 2:
                _log.warning(
                    "'%s' is unknown or missing in %.1f%% of the rows, and in %.1f%% of the run's test split: are its "
                    "values written as in training?",
                    column,
                    100 * share,
                    100 * usual,
                )


class OutsideCounts:
    """Tells of ids outside of their tables, whose counts only grow."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def describe_new(self, tables: list[str], counts: list[float]) -> str:
        """Returns by table how many ids there are more than at the last call; "" if there are none."""
        total: dict[str, int] = {}
        for table, count in zip(tables, counts, strict=True):
            total[table] = total.get(table, 0) + int(count)
        new = {table: count - self._told.get(table, 0) for table, count in total.items()}
        self._told = total
        return ", ".join(f"{count:,} of '{table}'" for table, count in new.items() if count)


def expected_shares(dataset: InteractionDataset, item_id: bool) -> dict[str, float]:
    """Returns the shares of a run's test split, by column that the model reads.

    Args:
        dataset: of the run.
        item_id: whether the model reads the item's id.
    """
    shares = UnknownShares.of(dataset, "test", _BLOCK).shares
    return {name: share for name, share in shares.items() if item_id or name != dataset.schema.item_key}
