"""A fingerprint of a dataset, by which a run notices that its data has changed."""

import dataclasses
import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.batches.dataset import InteractionDataset
from jfi.data.config import DataConfig
from jfi.data.prepared.sources import column_settings
from jfi.data.prepared.stages.splits import SPLITS
from jfi.data.prepared.tables import column_name, dense_names, table_of
from jfi.data.schema.checked_json import checked_json, read_checked_json
from jfi.data.schema.labels import LABEL, WEIGHT
from jfi.data.schema.rules import label_columns, parse_rule
from jfi.data.schema.schema import Entity
from jfi.utils.files import write_file
from jfi.utils.jagged import blocks

#: The file's name in a prepared dataset.
NAME = "fingerprint.json"
_FORMAT = "jfi data fingerprint 1"


@dataclass(frozen=True)
class Fingerprint:
    """A digest of what a run trains on.

    It is of the values as the schema encodes them, which is all that training sees: another file format, or a value
    that is unknown before and after, makes no difference.

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
        """The fingerprint of a dataset; reads each array once.

        That of a prepared dataset was computed when it was prepared.
        """
        policy = "" if dataset.policy is None else dataset.policy.fingerprint
        samples = {name: dataset.num_samples(name) for name in SPLITS}
        if dataset.folder is not None and (dataset.folder / NAME).is_file():
            # The number of sampled negatives and the policy may be others.
            return dataclasses.replace(cls.load(dataset.folder / NAME), samples=samples, policy=policy)
        config, arrays = column_settings(config), dataset.arrays()
        events, digests = arrays.events, defaultdict(hashlib.sha256)
        for of in ("event", "user", "item"):
            sources = _sources(dataset, config, of)
            for name, column in table_of(dataset, config, of).items():
                for source in sources.get(name, []):
                    _update(digests[source], column)
        for name in [] if events.rows is None else parse_rule(config.history).columns:
            _update(digests[name], events.rows)
        splits = {}
        for name, rows in arrays.samples.items():
            digest = hashlib.sha256()
            for part in (events.user, events.item, events.time, events.label):
                for begin, end in blocks(len(rows)):
                    digest.update(np.ascontiguousarray(part[rows[begin:end]]).data)
            splits[name] = digest.hexdigest()
        columns = {name: digest.hexdigest() for name, digest in digests.items()}
        return cls(len(events), columns, samples, splits, policy)

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
            # Users and items come first; with other ids the columns of users and items are in another order.
            other = other[:1] if other[0] in list(self.columns)[:2] else other
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

    def save(self, path: Path) -> None:
        """Writes or replaces the file, whole or not at all."""
        write_file(path, checked_json(_FORMAT, dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Fingerprint":
        """The fingerprint that `save` wrote.

        Raises:
            DataError: the file is missing, damaged or of another kind.
        """
        return read_checked_json(path, _FORMAT, cls)


def _sources(dataset: InteractionDataset, config: DataConfig, of: Entity) -> dict[str, list[str]]:
    """Returns by column of a table of a prepared dataset the columns of the config that it is made of."""
    found = {column_name(spec): [spec.column] for spec in dataset.features[:-1] if spec.of == of}
    own = config.names("context" if of == "event" else of, "number")
    found |= {name: [source] for name, source in zip(dense_names(config)[of], own, strict=True)}
    if of == "event":
        settings = {"user": config.user, "item": config.item, "time": config.timestamp, WEIGHT: config.weight}
        settings |= {"dwell": config.dwell, "surface": config.surface, "session": config.session}
        found |= {name: [source] for name, source in settings.items() if source is not None}
        labels = [] if config.is_implicit else config.trained_labels()
        names = ["label", *(LABEL + one.name for one in labels[1:])]
        found |= {name: label_columns(one.label) for name, one in zip(names, labels, strict=False)}
    return found


def _update(digest: "hashlib._Hash", column: np.ndarray | pa.Array) -> None:
    parts = [column] if isinstance(column, np.ndarray) else [column.offsets.to_numpy(), column.values.to_numpy()]
    for part in parts:
        digest.update(f"{part.dtype.str} {len(part)} ".encode())
        digest.update(np.ascontiguousarray(part).data)
