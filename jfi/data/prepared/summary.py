"""Statistics of a dataset and warnings about likely mistakes in it, for the screen and `summary.json`."""

import dataclasses
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from jfi.data.errors import DataError
from jfi.utils.files import reading_file, write_file


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
            values are unseen; under "<column> (in part)" that of samples with both seen and unseen values.
        vocabulary_sizes: by column the number of known values, or of hash buckets, or the capacity of a table
            that grows.
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

    def changes_since(self, path: Path) -> str:
        """Returns which numbers of rows or samples differ from an earlier summary's, a file; "" if none does."""
        try:
            was = Summary.load(path)
        except DataError:  # nothing but this line depends on it
            return ""
        if self.rows != was.rows:
            difference = f"{abs(self.rows - was.rows)} {'more' if self.rows > was.rows else 'fewer'}"
            return f"it has {self.rows} rows, {difference} than the run was started with"
        pairs = [(name, self.samples[name], count) for name, count in was.samples.items()]
        return ", ".join(f"{name} has {now} samples instead of {count}" for name, now, count in pairs if now != count)

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


def date_of(seconds: float) -> str | None:
    """Returns seconds since 1970 as a date in UTC, by ISO 8601; None if they are no date of this calendar."""
    try:
        return datetime.fromtimestamp(float(seconds), UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return None


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
