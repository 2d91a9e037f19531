"""Statistics of a dataset and warnings about likely mistakes in it, for the screen and `summary.json`."""

import dataclasses
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.arrange import Rows, members
from jfi.data.columns import Categorical, is_multi_valued, present
from jfi.data.config import DataConfig
from jfi.data.schema import DataSchema
from jfi.data.source import Columns
from jfi.data.splits import SPLITS
from jfi.files import write_file

#: Times outside of these years are probably of another unit.
_YEARS = (1980, 2100)
#: A label that fewer of a split's rows have, or all but fewer, is nearly constant.
_RARE = 1e-3
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_YEAR = 365.2425 * 86_400
#: After the name of a multi-valued column: some values of a row are unknown.
_PARTLY = "(in part)"
_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True)
class Summary:
    """A dataset in numbers. Shares are between 0 and 1.

    Args:
        rows: interactions, those that are only part of histories included.
        users, items: distinct ids.
        first_time, last_time: in UTC, by ISO 8601; None if they are no dates of this calendar.
        samples: labeled rows by split; without a label the positives, before negatives are sampled.
        label_shares: by split the share of label 1.
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

    def save(self, path: Path) -> None:
        """Writes all fields as JSON, whole or not at all."""
        write_file(path, json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n")

    def __str__(self) -> str:
        """The lines for a screen."""
        days = f", {self.first_time[:10]} to {self.last_time[:10]}" if self.first_time and self.last_time else ""
        parts = [f"{name} {count:,} ({self.label_shares[name]:.1%} positive)" for name, count in self.samples.items()]
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


def summarize(
    columns: Columns,
    rows: Rows,
    schema: DataSchema,
    ids: list[Categorical],
    samples: dict[str, np.ndarray],
    history_lengths: np.ndarray,
    config: DataConfig,
) -> Summary:
    """The summary of a dataset.

    Args:
        columns: the raw columns.
        rows: the interactions.
        schema: of the dataset.
        ids: of each key of `schema.features` but the age.
        samples: by split the rows that are its samples.
        history_lengths: `[S]`, of the samples of all splits, one split after another.
        config: the section `data`.
    """
    lengths = history_lengths
    shares = {name: float(rows.label[chosen].mean()) for name, chosen in samples.items()}
    missing, unseen = _gaps(columns, rows, schema, ids, samples, config)
    return Summary(
        rows=len(rows.user),
        users=len(rows.user_ids),
        items=len(rows.item_ids),
        first_time=_date(rows.time.min()),
        last_time=_date(rows.time.max()),
        samples={name: len(chosen) for name, chosen in samples.items()},
        label_shares=shares,
        history_lengths={
            "mean": float(lengths.mean()),
            "empty": float((lengths == 0).mean()),
            **{name: float(np.quantile(lengths, q)) for name, q in _QUANTILES.items()},
        },
        missing={name: share for name, share in missing.items() if share},
        unseen=unseen,
        vocabulary_sizes={name: len(known.values) for name, known in schema.encodings.vocabularies.items()}
        | {name: known.num_buckets for name, known in schema.encodings.buckets.items()},
        warnings=[
            *_warn_of_time(rows.time, config),
            *_warn_of_changes(columns, config),
            *([] if config.label is None else _warn_of_labels(shares, samples, config.label)),
        ],
    )


def _gaps(
    columns: Columns,
    rows: Rows,
    schema: DataSchema,
    ids: list[Categorical],
    samples: dict[str, np.ndarray],
    config: DataConfig,
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Shares of missing values by column, and of unseen ones by split and column."""
    index = {"user": rows.user, "item": rows.item, "event": np.arange(len(rows.user))}
    held_out = [name for name in SPLITS if name != "train"]
    missing: dict[str, float] = {}
    unseen: dict[str, dict[str, float]] = {name: {} for name in held_out}
    for key, of, count in (("user", rows.user, len(rows.user_ids)), ("item", rows.item, len(rows.item_ids))):
        known = members(of[rows.train], count)
        for name in held_out:
            unseen[name][key] = float((~known[of[samples[name]]]).mean())
    done = {schema.item_key}
    for spec, encoded in zip(schema.features, ids, strict=False):
        if spec.column in done:
            continue
        done.add(spec.column)
        if spec.column in schema.encodings.edges:
            count = np.isfinite(columns.numbers(spec.column, spec.of)).astype(np.int64)
        else:
            count = _count_values(columns.categories(spec.column, spec.of))
        missing[spec.column] = float((count == 0).mean()) if len(count) else 0.0
        keys = [encoded]
        if spec.slot is not None:  # a key for each of the first values of a row
            slots = zip(schema.features, ids, strict=False)
            keys = [key for other, key in slots if other.column == spec.column and other.slot is not None]
            count = np.minimum(count, len(keys))
        for name in held_out:
            chosen = index[spec.of][samples[name]]
            known = sum(key.known_counts(chosen) for key in keys)
            shares = {
                spec.column: float(((known == 0) & (count[chosen] > 0)).mean()),
                f"{spec.column} {_PARTLY}": float(((known > 0) & (known < count[chosen])).mean()),
            }
            unseen[name] |= {column: share for column, share in shares.items() if share}
    for names, entity in ((config.user_dense, "user"), (config.item_dense, "item")):
        for name in names:
            missing[name] = float((~np.isfinite(columns.numbers(name, entity))).mean())
    return missing, unseen


def _count_values(column: pa.Array) -> np.ndarray:
    """`[N]` int64: the number of values of each row, 0 where it is missing or an empty list."""
    if is_multi_valued(column):
        return np.diff(present(column)[1])
    return column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)


def _date(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(float(seconds), UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return None


def _warn_of_time(time: np.ndarray, config: DataConfig) -> list[str]:
    def year(unit: float) -> float:
        return 1970 + float(np.median(time)) / _UNITS[config.timestamp_unit] * unit / _YEAR

    now = year(_UNITS[config.timestamp_unit])
    if config.source == "synthetic" or _YEARS[0] <= now <= _YEARS[1]:
        return []
    text = f"'{config.timestamp}' lies around the year {now:.0f}"
    for unit, seconds in _UNITS.items():
        if _YEARS[0] <= year(seconds) <= _YEARS[1]:
            return [f"{text}; with data.timestamp_unit: {unit} it would be {year(seconds):.0f}"]
    return [f"{text}; ages of events are powers of two seconds, so set data.timestamp_unit if it is not seconds"]


def _warn_of_changes(columns: Columns, config: DataConfig) -> list[str]:
    warnings = []
    for of, names in (
        ("user", [*config.user_categorical, *config.user_dense]),
        ("item", [*config.item_categorical, *config.item_dense]),
    ):
        for name in names:
            changing, count = columns.count_changing(name, of)
            if changing:
                warnings.append(
                    f"'{name}' changes for {changing:,} of {count:,} {of}s from row to row; every sample has the value "
                    f"of the {of}'s first row. If it describes the event, list it in data.event_categorical or "
                    "data.event_dense"
                )
    return warnings


def _warn_of_labels(shares: dict[str, float], samples: dict[str, np.ndarray], label: str) -> list[str]:
    return [
        f"label '{label}' is nearly constant: {share:.2%} of the {len(samples[name]):,} labels of {name} are 1"
        for name, share in shares.items()
        if not _RARE <= share <= 1 - _RARE
    ]


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
