"""Statistics of a dataset and warnings about likely mistakes in it, for the screen and `summary.json`."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jfi.data.errors import DataError
from jfi.utils.files import reading_file, write_file

_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True)
class Summary:
    """A dataset in numbers. Shares are between 0 and 1.

    Args:
        rows: interactions, those that are only part of histories included.
        users, items: distinct ids.
        first_time, last_time: in UTC, by ISO 8601; None if they are no dates of this calendar.
        samples: labeled rows by split; without a label the positives, before negatives are sampled.
        label_shares: by split the share of label 1, of the first label; {} for a regression.
        history_lengths: mean, quantiles and share of the empty ones over the samples of all splits, cut at
            `data.max_history`.
        missing: by column the share of its users, items or events without a value; columns without gaps are left out.
        unseen: by split, except training, and by column the share of samples with a value that training has not seen,
            under "user" and "item" that of the ids. Of a multi-valued column it is the share of samples all of whose
            values are unseen; under "<column> (in part)" that of samples with seen values beside unseen ones.
        vocabulary_sizes: by column the number of known values, or of hash buckets.
        warnings: a line each.
    """

    rows: int
    users: int
    items: int
    first_time: str | None
    last_time: str | None
    samples: dict[str, int]
    label_shares: dict[str, float]
    history_lengths: dict[str, float]
    missing: dict[str, float]
    unseen: dict[str, dict[str, float]]
    vocabulary_sizes: dict[str, int]
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> "Summary":
        """The summary that `save` wrote.

        Raises:
            DataError: the file is missing or damaged.
        """
        with reading_file(path, DataError):
            content = path.read_bytes()
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}: damaged, not a summary of this version of jfi") from error

    def save(self, path: Path) -> None:
        """Writes all fields as JSON, whole or not at all."""
        write_file(path, json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n")

    def __str__(self) -> str:
        """The lines for a screen."""
        days = f", {self.first_time[:10]} to {self.last_time[:10]}" if self.first_time and self.last_time else ""
        shares = {name: f" ({share:.1%} positive)" for name, share in self.label_shares.items()}
        parts = [f"{name} {count:,}{shares.get(name, '')}" for name, count in self.samples.items()]
        lengths = self.history_lengths
        lines = [
            f"data: {self.rows:,} rows, {self.users:,} users, {self.items:,} items{days}",
            f"samples: {', '.join(parts)}",
            f"histories: mean {lengths['mean']:.1f}, median {lengths['p50']:.0f}, 90% at most {lengths['p90']:.0f}, "
            f"longest {lengths['max']:.0f}, empty {lengths['empty']:.1%}",
            f"known values: {', '.join(f'{name} {count:,}' for name, count in self.vocabulary_sizes.items())}",
        ]
        if self.missing:
            lines.append(f"missing: {_shares(self.missing)}")
        lines += [f"unseen in {split}: {_shares(shares)}" for split, shares in self.unseen.items()]
        return "\n".join(lines + [f"warning: {warning}" for warning in self.warnings])


def describe_lengths(lengths: np.ndarray, counts: np.ndarray, max_history: int) -> dict[str, float]:
    """Mean, share of 0, and quantiles of the lengths of histories, cut at `max_history`.

    Args:
        lengths: `[L]` integers, ascending.
        counts: `[L]` integers, the number of samples with a history of each length.
        max_history: no history is longer.

    Example:
        >>> found = describe_lengths(np.array([0, 4, 9]), np.array([1, 2, 1]), max_history=8)
        >>> found["mean"], found["empty"], found["p50"], found["max"]
        (4.0, 0.25, 4.0, 8.0)
    """
    lengths, ends = np.minimum(lengths, max_history), np.cumsum(counts)
    described = {"mean": float(lengths @ counts / ends[-1]), "empty": float(counts[lengths == 0].sum() / ends[-1])}
    for name, quantile in _QUANTILES.items():
        place = (ends[-1] - 1) * quantile
        low, high = lengths[np.searchsorted(ends, [np.floor(place), np.ceil(place)], side="right")]
        described[name] = float(low + (high - low) * (place - np.floor(place)))
    return described


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
