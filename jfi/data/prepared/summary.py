"""The summary of a dataset: its numbers and warnings about likely mistakes, for the screen and `summary.json`.

It is computed a block of rows at a time.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.batches.batch import Arrays
from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.prepared.stages.columns import Columns
from jfi.data.prepared.stages.splits import SPLITS
from jfi.data.prepared.stages.statistics import past_index
from jfi.data.schema.columns import Categorical, CodedColumn
from jfi.data.schema.schema import DataSchema, Entity, FeatureSpec
from jfi.events.events import SortedEvents, user_blocks
from jfi.events.point_in_time import Tallies
from jfi.semantic_ids.packing import UNKNOWN_SID
from jfi.utils.files import reading_file, write_file
from jfi.utils.jagged import blocks


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


#: Times outside of these years are probably of another unit.
_YEARS = (1980, 2100)
#: The median of the times is that of about as many of them.
_TIMES = 1 << 20
#: Training samples of which it is known whether they follow another event soon, about.
_ASKED = 1 << 18
#: A label that fewer of a split's rows have, or all but fewer, is nearly constant.
_RARE = 1e-3
#: If a label is the kind of a row, more than the first share of the positives, and at most the second one of the
#: negatives, follow an event of the same user and item within so many seconds. The odds are so many times as high.
_SOON, _POSITIVES, _NEGATIVES, _ODDS = 600, 0.5, 0.75, 6
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_YEAR = 365.2425 * 86_400
_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_HELD_OUT = [name for name in SPLITS if name != "train"]


def summarize(arrays: Arrays, schema: DataSchema, columns: Columns) -> Summary:
    """The summary of a dataset, whose arrays may be maps of files, and its raw columns."""
    config, encodings = columns.config, schema.encodings
    events, samples = arrays.events, arrays.samples
    trained, columns_of = config.trained_labels(), config.labels_of(events.label, events.targets)
    # Nothing reads the auxiliary labels of other splits than train.
    splits_of = [SPLITS] * len(config.targets()) + [["train"]] * len(config.auxiliary_labels())
    shares_of = [
        (one, {name: _share_of_ones(column, samples[name]) for name in splits})
        for one, column, splits in zip(trained, columns_of, splits_of, strict=True)
        if one.task != "regression"
    ]
    shares = shares_of[0][1] if config.task == "binary" else {}
    unseen = {name: {} for name in _HELD_OUT}
    for of, index in (("user", events.user), ("item", events.item)):
        known = columns.count_training(of) > 0
        for name in _HELD_OUT:
            unseen[name][of] = _share(samples[name], lambda rows, known=known, index=index: ~known[index[rows]])
    missing = _gaps(arrays, schema, columns, unseen)
    return Summary(
        rows=len(events),
        users=columns.count("user"),
        items=columns.count("item"),
        first_time=date_of(events.time.min()),
        last_time=date_of(events.time.max()),
        samples={name: len(rows) for name, rows in samples.items()},
        label_shares=shares,
        history_lengths=describe_lengths(*count_lengths(events, samples), config.max_history),
        missing={name: share for name, share in missing.items() if share},
        unseen=unseen,
        vocabulary_sizes={name: len(known.values) for name, known in encodings.vocabularies.items()}
        | {name: known.num_buckets for name, known in encodings.buckets.items()}
        | {name: known.capacity for name, known in encodings.capacities.items()},
        warnings=[
            *columns.notes,
            *_warn_of_time(events.time, config),
            *_warn_of_duplicates(columns),
            *_warn_of_changes(columns),
            *_warn_of_raw_events(arrays, schema, columns),
            *(line for one, own in shares_of if one.label for line in _warn_of_labels(own, samples, one.label)),
        ],
    )


def count_lengths(events: SortedEvents, samples: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """`[L]` int64 each: the lengths of the samples' histories without a limit, ascending, and the samples with each."""
    counts = np.zeros(0, np.int64)
    for rows in samples.values():
        for chosen in _chunks(rows):
            found = np.bincount(events.histories(chosen, len(events))[1], minlength=len(counts))
            found[: len(counts)] += counts
            counts = found
    lengths = np.flatnonzero(counts)
    return lengths, counts[lengths]


def describe_lengths(lengths: np.ndarray, counts: np.ndarray, max_history: int) -> dict[str, float]:
    """Mean, share of 0, and quantiles of the lengths of `count_lengths`, cut at `max_history`.

    Example:
        >>> found = describe_lengths(np.array([0, 4, 9]), np.array([1, 2, 1]), max_history=8)
        >>> found["mean"], found["empty"], found["p50"], found["max"]
        (4.0, 0.25, 4.0, 8.0)
    """
    lengths, ends = np.minimum(lengths, max_history), np.cumsum(counts)
    described = {"mean": float(lengths @ counts / ends[-1]), "empty": float(counts[lengths == 0].sum() / ends[-1])}
    return described | {name: float(lengths[np.searchsorted(ends, q * ends[-1])]) for name, q in _QUANTILES.items()}


def _chunks(rows: np.ndarray) -> Iterator[np.ndarray]:
    return (rows[begin:end].astype(np.int64) for begin, end in blocks(len(rows)))


def _share(rows: np.ndarray, holds: Callable[[np.ndarray], np.ndarray]) -> float:
    """The share of rows where `holds`, which takes some of them, is true."""
    return sum(int(np.count_nonzero(holds(chosen))) for chosen in _chunks(rows)) / max(1, len(rows))


def _share_of_ones(label: np.ndarray, rows: np.ndarray) -> float:
    ones = sum(int(np.count_nonzero(label[chosen] == 1)) for chosen in _chunks(rows))
    return ones / max(1, sum(int(np.count_nonzero(~np.isnan(label[chosen]))) for chosen in _chunks(rows)))


def _gaps(
    arrays: Arrays, schema: DataSchema, columns: Columns, unseen: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Shares of missing values by column; adds those of unseen values to `unseen`."""
    index = {"user": arrays.events.user, "item": arrays.events.item, "event": None}
    missing: dict[str, float] = {}
    keys: dict[str, list[tuple[FeatureSpec, Categorical]]] = {}
    for spec, encoded in zip(schema.features, arrays.columns, strict=False):
        keys.setdefault(spec.column, []).append((spec, encoded))
    del keys[schema.item_key]
    for name, ((spec, encoded), *_) in keys.items():
        if spec.semantic:
            missing[name] = float(np.mean(encoded.ids == UNKNOWN_SID))
            continue
        is_number = name in schema.encodings.edges
        counts = _counts((columns.numbers if is_number else columns.categories)(name, spec.of))
        missing[name] = _share_of_empty(columns, spec.of, counts)
        # The one key of all values, or a key for each of the first ones.
        slots = [key for other, key in keys[name] if other.slot is not None] if spec.slot is not None else [encoded]

        for split in _HELD_OUT:
            found, samples = np.zeros(2, np.int64), arrays.samples[split]
            for rows in _chunks(samples):
                rows = rows if index[spec.of] is None else index[spec.of][rows]
                count, known = counts(rows), sum(key.known_counts(rows) for key in slots)
                count = count if spec.slot is None else np.minimum(count, len(slots))
                found += np.count_nonzero([(known == 0) & (count > 0), (known > 0) & (known < count)], axis=1)
            shares = zip((name, f"{name} (in part)"), (found / max(1, len(samples))).tolist(), strict=True)
            unseen[split] |= {column: share for column, share in shares if share}
    for of, entity in (("user", "user"), ("item", "item"), ("context", "event")):
        for name in columns.config.names(of, "number"):
            missing[name] = _share_of_empty(columns, entity, _counts(columns.numbers(name, entity)))
    return missing


def _share_of_empty(columns: Columns, of: Entity, counts: Callable[[np.ndarray], np.ndarray]) -> float:
    count = columns.count(of)
    return sum(int((counts(np.arange(*block)) == 0).sum()) for block in blocks(count)) / max(1, count)


def _counts(column: np.ndarray | CodedColumn) -> Callable[[np.ndarray], np.ndarray]:
    """Gives the number of values of each of some rows `[B]`, 0 where it is missing or an empty list."""
    if isinstance(column, CodedColumn):
        return column.counts
    return lambda rows: np.isfinite(column[rows]).astype(np.int64)


def _warn_of_time(time: np.ndarray, config: DataConfig) -> list[str]:
    middle = float(np.median(time[:: max(1, len(time) // _TIMES)]))

    def year(unit: float) -> float:
        return 1970 + middle / _UNITS[config.timestamp_unit] * unit / _YEAR

    now = year(_UNITS[config.timestamp_unit])
    if _YEARS[0] <= now <= _YEARS[1]:
        return []
    text = f"'{config.timestamp}' lies around the year {now:.0f}"
    for unit, seconds in _UNITS.items():
        if _YEARS[0] <= year(seconds) <= _YEARS[1]:
            return [f"{text}; with data.timestamp_unit: {unit} it would be {year(seconds):.0f}"]
    return [f"{text}; ages of events are powers of two seconds, so set data.timestamp_unit if it is not seconds"]


def _warn_of_duplicates(columns: Columns) -> list[str]:
    """Counts rows that repeat one of the same user, item, time, labels and features of the event."""
    events, names = columns.events, columns.config.names
    categories, numbers = ([*names("event", kind), *names("context", kind)] for kind in ("category", "number"))
    read = [column.__getitem__ for column in (events.label, *events.targets.values())]
    read += [columns.categories(name, "event").numbers for name in categories]
    read += [columns.numbers(name, "event").__getitem__ for name in numbers]
    repeated = 0
    for begin, end in user_blocks(events.first):
        keys = (column[begin:end] for column in (events.user, events.time, events.item))
        same = np.logical_and.reduce([key[1:] == key[:-1] for key in keys])  # neighbours, since the rows are sorted
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        values = [np.append(0, np.cumsum(~same))[tied], *(of_rows(begin + tied) for of_rows in read)]
        table = pa.table({str(number): pa.array(one, from_pandas=True) for number, one in enumerate(values)})
        repeated += len(tied) - table.group_by(table.column_names).aggregate([]).num_rows
    if not repeated:
        return []
    return [
        f"{repeated:,} of {len(events):,} rows repeat another one, with the same user, item, time, label and features "
        "of the event; remove them if the table was exported or joined twice"
    ]


def _warn_of_raw_events(arrays: Arrays, schema: DataSchema, columns: Columns) -> list[str]:
    """Warns if most positives of training, and much fewer negatives, follow an event of the same user and item soon."""
    if columns.config.task != "binary" or columns.config.is_implicit:
        return []
    rows = arrays.samples["train"]
    if arrays.statistics is None:
        index = past_index(arrays.events, schema, arrays.columns, is_implicit=False, new=columns.temporary)
    else:
        index = arrays.statistics.statistics.index
    rows = rows[:: max(1, len(rows) // _ASKED)].astype(np.int64)
    label, tallies = arrays.events.label[rows], Tallies(index, index.queries(rows))
    soon = tallies.age("history", ("user", "item")) <= _SOON
    if "user_item" in columns.config.statistics_groups():  # they also read the labels of rows that are in no history
        soon |= tallies.age("labeled", ("user", "item")) <= _SOON
    of_negatives, of_positives = (
        np.count_nonzero(soon & (label == value)) / max(1, np.count_nonzero(label == value)) for value in (0, 1)
    )
    higher_odds = of_positives * (1 - of_negatives) >= _ODDS * of_negatives * (1 - of_positives)
    if of_positives <= _POSITIVES or of_negatives > _NEGATIVES or not higher_odds:
        return []
    return [
        f"{of_positives:.1%} of the positives of training, but {of_negatives:.1%} of the negatives, come within "
        f"{_SOON // 60} minutes after another event of the same user and item. If the label is the kind of a row, such "
        "as a purchase among views, metrics are too good, and scores of items not yet viewed useless: make the views "
        "the samples, such as data.samples: event == view, and label each by what comes later, such as data.label: "
        "{event: event == buy, within: 1 h, of: item}"
    ]


def _warn_of_changes(columns: Columns) -> list[str]:
    warnings = []
    for of, kind in (("user", "category"), ("user", "number"), ("item", "category"), ("item", "number")):
        for name in columns.config.names(of, kind):
            changing, count = columns.count_changing(name, of, kind == "number"), columns.count(of)
            if changing:
                warnings.append(
                    f"'{name}' changes for {changing:,} of {count:,} {of}s from row to row; every sample has the value "
                    f"of the {of}'s first row. If it describes the event, declare it in data.features as "
                    "`of: event`, and if it is known when the item is shown, as `of: context`"
                )
    return warnings


def _warn_of_labels(shares: dict[str, float], samples: dict[str, np.ndarray], label: str) -> list[str]:
    return [
        f"label '{label}' is nearly constant: {share:.2%} of the {len(samples[name]):,} labels of {name} are 1"
        for name, share in shares.items()
        if not _RARE <= share <= 1 - _RARE
    ]
