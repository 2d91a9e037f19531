"""A fingerprint of a dataset, by which a run notices that its data has changed."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jfi.data.batches.dataset import InteractionDataset
from jfi.data.config import DataConfig
from jfi.data.prepared.source import column_settings
from jfi.data.prepared.splits import SPLITS
from jfi.data.schema.checked_json import checked_json, read_checked_json
from jfi.data.schema.columns import Categorical
from jfi.data.schema.labels import label_columns
from jfi.data.schema.rules import parse_rule
from jfi.data.schema.targets import WEIGHT, labels_of
from jfi.utils.files import writing_file

#: The file's name in a prepared dataset.
NAME = "fingerprint.json"
_FORMAT = "jfi data fingerprint 1"
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Fingerprint:
    """A digest of what a run trains on.

    It is of the values as the schema encodes them, which is all that training sees: another order of the table's rows,
    another file format or a value that is unknown before and after make no difference.

    Args:
        rows: interactions, those that are only part of histories included.
        columns: by column in use the SHA-256 of its values, in the order (user, timestamp, item).
        samples: by split the number of its samples, sampled negatives included.
        splits: by split the SHA-256 of its samples' (user, item, time, label), in their order.
        policy: fingerprint of the policy that histories are chosen by, "" without one.
    """

    rows: int
    columns: dict[str, str]
    samples: dict[str, int]
    splits: dict[str, str]
    policy: str = ""

    @classmethod
    def of(cls, dataset: InteractionDataset, config: DataConfig) -> "Fingerprint":
        """The fingerprint of a dataset; reads each array once, a block at a time.

        That of a prepared dataset was computed when it was prepared.
        """
        policy = "" if dataset.policy is None else dataset.policy.fingerprint
        if dataset.folder is not None and (dataset.folder / NAME).is_file():
            known = cls.load(dataset.folder / NAME)
            # The number of sampled negatives and the policy may be others.
            samples = {name: dataset.num_samples(name) for name in SPLITS}
            return dataclasses.replace(known, samples=samples, policy=policy)
        config = column_settings(config)
        arrays = dataset.arrays()
        events, names = (
            arrays.events,
            [*config.names("user", "number"), *config.names("item", "number"), *config.names("context", "number")],
        )
        # A user's or item's values are taken for each event, since the order of the items depends on their names.
        index = {"user": events.user, "item": events.item, "event": None}
        values: dict[str, list[Iterable[np.ndarray]]] = {
            config.user: [_blocks(events.user)],
            config.item: [_blocks(events.item)],
            config.timestamp: [_blocks(events.time)],
        }
        if config.label is not None:
            for one, column in zip(
                config.trained_labels(), labels_of(config, events.label, events.targets), strict=True
            ):
                for name in label_columns(one.label):
                    values.setdefault(name, []).append(_blocks(column))
        if config.weight is not None:
            values.setdefault(config.weight, []).append(_blocks(events.targets[WEIGHT]))
        if events.rows is not None:
            for name in parse_rule(config.history).columns:
                values.setdefault(name, []).append(_blocks(events.rows))
        if (fields := arrays.engagement) is not None:
            for name, column in (
                (config.dwell, fields.dwell),
                (config.surface, fields.surface),
                (config.session, fields.session),
            ):
                if name is not None:
                    values.setdefault(name, []).append(_blocks(column))
        for spec, column in zip(dataset.features, arrays.columns, strict=False):
            parts = values.setdefault(spec.column, [])
            parts.append(_id_blocks(column, index[spec.of], len(events.user)))
        users, items, contexts = arrays.dense
        dense = [
            *(map(column.take, _blocks(events.user)) for column in users.T),
            *(map(column.take, _blocks(events.item)) for column in items.T),
            *(_blocks(column) for column in contexts),
        ]
        for name, blocks in zip(names, dense, strict=True):
            values.setdefault(name, []).append(blocks)
        return cls(
            rows=len(events.user),
            columns={name: _digest(itertools.chain(*parts)) for name, parts in values.items()},
            samples={name: dataset.num_samples(name) for name in SPLITS},
            splits={
                name: _digest(
                    part[block]
                    for block in _blocks(rows)
                    for part in (events.user, events.item, events.time, events.label)
                )
                for name, rows in arrays.samples.items()
            },
            policy=policy,
        )

    def changes(self, now: "Fingerprint") -> str | None:
        """Returns what differs in `now`, in words; None if nothing does.

        >>> before = Fingerprint(9, {"clicked": "a"}, {"train": 5}, {"train": "b"})
        >>> before.changes(dataclasses.replace(before, rows=10))
        'it has 10 rows, 1 more than the run was started with'
        >>> before.changes(dataclasses.replace(before, columns={"clicked": "c"}, splits={"train": "d"}))
        "the values of column 'clicked' have changed"
        >>> before.changes(dataclasses.replace(before, samples={"train": 4}, splits={"train": "d"}))
        'the split has changed: train has 4 samples instead of 5'
        """
        if self.policy != now.policy:
            return "the policy of its histories (data.policy) has changed"
        if self.rows != now.rows:
            difference = f"{abs(now.rows - self.rows)} {'more' if now.rows > self.rows else 'fewer'}"
            return f"it has {now.rows} rows, {difference} than the run was started with"
        if self.columns.keys() != now.columns.keys():
            other = ", ".join(f"'{name}'" for name in sorted(self.columns.keys() ^ now.columns.keys()))
            return f"the columns in use have changed: {other}"
        other = [name for name in self.columns if self.columns[name] != now.columns[name]]
        if other:
            columns = f"column '{other[0]}'" if len(other) == 1 else "columns " + ", ".join(f"'{n}'" for n in other)
            return f"the values of {columns} have changed"
        counts = [
            f"{name} has {now.samples[name]} samples instead of {count}"
            for name, count in self.samples.items()
            if now.samples[name] != count
        ]
        if counts:
            return f"the split has changed: {', '.join(counts)}"
        other = [name for name in self.splits if self.splits[name] != now.splits[name]]
        return f"the split has changed: other samples in {', '.join(other)}" if other else None

    def text(self) -> str:
        """Returns the text of its JSON file."""
        return checked_json(_FORMAT, dataclasses.asdict(self))

    def save(self, path: Path) -> None:
        """Writes or replaces the file, whole or not at all."""
        with writing_file(path) as unfinished:
            unfinished.write_text(self.text(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Fingerprint":
        """The fingerprint that `save` wrote.

        Raises:
            DataError: the file is missing, damaged or of another kind.
        """
        return cls(**read_checked_json(path, _FORMAT))


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    return (array[first : first + _BLOCK] for first in range(0, len(array), _BLOCK))


def _id_blocks(column: Categorical, index: np.ndarray | None, count: int) -> Iterator[np.ndarray]:
    """The numbers of ids and the ids of each event, whose user or item is in `index`."""
    for first in range(0, count, _BLOCK):
        last = min(first + _BLOCK, count)
        rows = np.arange(first, last) if index is None else index[first:last]
        counts = column.counts(rows)
        ids = np.empty(int(counts.sum()), np.int64)
        column.fill(rows, ids)
        yield from (counts, ids)


def _digest(blocks: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        if block.dtype.kind == "i":
            block = block.astype(np.int64, copy=False)  # prepared datasets have smaller types
        digest.update(f"{block.dtype.str} {len(block)} ".encode())
        digest.update(np.ascontiguousarray(block).data)
    return digest.hexdigest()
