"""Samples with histories, assembled into batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jfi.data.batch import Batch
from jfi.data.candidates import Candidates, Kind
from jfi.data.columns import Categorical, ranges
from jfi.data.events import Events
from jfi.data.negatives import NegativeSampler
from jfi.data.order import Shuffled
from jfi.data.schema import DataSchema
from jfi.data.summary import Summary
from jfi.data.unknown import UnknownIds
from jfi.encoding import UNKNOWN, age_buckets
from jfi.suggest import suggest


@dataclass(frozen=True)
class Arrays:
    """All arrays of a dataset, as `InteractionDataset` takes them."""

    events: Events
    columns: list[Categorical]
    dense: tuple[np.ndarray, np.ndarray]
    samples: dict[str, np.ndarray]
    negatives: NegativeSampler | None


class InteractionDataset:
    """Samples with histories; `load_dataset` makes one.

    Args:
        events: all events; every history is a range of them.
        schema: the keys of the batches and the encodings of their values.
        columns: by key of `schema.features`, except the age, the ids of each user, item or event.
        dense: `[U, Du]` and `[N, Di]` float32, the dense features of users and of items.
        samples: by split the events that are its samples, ordered by (timestamp, user, item).
        negatives: draws the negatives of implicit feedback; None for a table with labels.
        unknown_share: share of the known ids of a training batch that become 0.
    """

    def __init__(
        self,
        events: Events,
        schema: DataSchema,
        columns: list[Categorical],
        dense: tuple[np.ndarray, np.ndarray],
        samples: dict[str, np.ndarray],
        negatives: NegativeSampler | None,
        unknown_share: float = 0.0,
    ) -> None:
        #: Of a prepared dataset, its folder.
        self.folder: Path | None = None
        #: The dataset in numbers, if they have been computed.
        self.summary: Summary | None = None
        self.schema = schema
        self.features = schema.features
        self._events = events
        self._columns = columns
        self._dense_users, self._dense_items = dense
        self._samples = samples
        self._negatives = negatives
        self._unknown_share = unknown_share

    def arrays(self) -> Arrays:
        """The arrays that the batches are made of; not copies."""
        return Arrays(
            self._events, self._columns, (self._dense_users, self._dense_items), self._samples, self._negatives
        )

    def num_samples(self, split: str) -> int:
        """Number of samples of a split, sampled negatives included."""
        return len(self._rows(split)) * self._samples_per_row

    def num_batches(self, split: str, batch_size: int) -> int:
        """Number of batches of an epoch, the same on every rank."""
        return -(-self.num_samples(split) // batch_size)

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        start_batch: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> Iterator[Batch]:
        """The batches of one epoch, a pure function of the arguments.

        The order and the sampled negatives depend on `seed` and `epoch` only, so `start_batch=n` continues an epoch
        after n batches. A batch has the same samples for any number of ranks. Each rank gets a contiguous part of it,
        and the sizes of the parts differ by at most one; with fewer samples than ranks some parts are empty, so that
        all ranks make the same number of steps.

        Args:
            split: "train", "validation" or "test".
            batch_size: samples per batch, summed over all ranks.
            shuffle: False gives the order (timestamp, user, item).
            seed: seed of the order and of the sampled negatives, together with `epoch`.
            epoch: number of the epoch.
            start_batch: number of batches to skip.
            rank: of this process.
            world_size: number of ranks.

        Raises:
            ValueError: an unknown split, a batch size below 1, or a rank outside of the world.

        Example::

            >>> from jfi.data import DataConfig, load_dataset
            >>> dataset = load_dataset(DataConfig(source="synthetic"))
            >>> batch = next(dataset.batches("train", 32, shuffle=True))
            >>> batch.labels.shape, batch.sparse_features.keys()[:2]
            (torch.Size([32]), ['item', 'category'])
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be in [0, world_size = {world_size})")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        count = self.num_samples(split)
        shuffled = Shuffled(count, seed, epoch) if shuffle else None

        def assemble(first: int) -> Batch:
            last = min(first + batch_size, count)
            shared = np.arange(first, last) if shuffled is None else shuffled[first:last]
            mine = shared[len(shared) * rank // world_size : len(shared) * (rank + 1) // world_size]
            return self._assemble(*self._draw(split, mine, seed, epoch), mine, unknown)

        unknown = UnknownIds(self._unknown_share, seed, epoch) if split == "train" and self._unknown_share else None
        # Not a generator function, so that this call reports wrong arguments, and not the first batch.
        return map(assemble, range(start_batch * batch_size, count, batch_size))

    @property
    def is_implicit(self) -> bool:
        """Whether every row is a positive and negatives are sampled."""
        return self._negatives is not None

    def candidates(self, split: str, kind: Kind, limit: int | None, num_sampled: int) -> Candidates:
        """The items that positives of a split are ranked among, for implicit feedback.

        Args:
            split: "validation" or "test".
            kind: "sampled", or "full" for all items of training.
            limit: the most positives, which are spread evenly over the split; None for all.
            num_sampled: candidates of a positive, if they are sampled.
        """
        rows = self._rows(split)
        if limit is not None and limit < len(rows):
            rows = rows[np.arange(limit) * len(rows) // limit]
        rows, events = rows.astype(np.int64), self._events
        user, item = events.user[rows].astype(np.int64, copy=False), events.item[rows].astype(np.int64, copy=False)
        positives = rows, user, item, events.time[rows]
        return Candidates(*positives, self._negatives, kind, num_sampled)

    def batch_of(self, rows: np.ndarray, item: np.ndarray) -> Batch:
        """The interactions `rows [B]` with other targets, `item [B]`; their labels are 0."""
        return self._assemble(rows, item, np.zeros(len(rows), np.float32))

    @property
    def _samples_per_row(self) -> int:
        return 1 if self._negatives is None else 1 + self._negatives.per_positive

    def _rows(self, split: str) -> np.ndarray:
        if split not in self._samples:
            raise ValueError(f"split is '{split}'; {suggest(split, self._samples)}")
        return self._samples[split]

    def _draw(self, split: str, samples: np.ndarray, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        """The events, the target items and the labels of samples of a split, `[B]` each."""
        events = self._rows(split)[samples // self._samples_per_row]
        item, label = self._events.item[events].astype(np.int64, copy=False), self._events.label[events]
        if self._negatives is not None:
            drawn = np.flatnonzero(samples % self._samples_per_row)
            user, time = self._events.user[events[drawn]].astype(np.int64), self._events.time[events[drawn]]
            item[drawn] = self._negatives.draw(user, time, samples[drawn], seed, epoch)
            label[drawn] = 0.0
        return events, item, label

    def _assemble(
        self,
        events: np.ndarray,
        item: np.ndarray,
        label: np.ndarray,
        samples: np.ndarray | None = None,
        unknown: UnknownIds | None = None,
    ) -> Batch:
        table = self._events
        user = table.user[events].astype(np.int64, copy=False)
        start, history_lengths = table.histories(events, self.schema.max_history)
        history = ranges(start, history_lengths)
        if table.rows is not None:
            history = table.rows[history].astype(np.int64, copy=False)
        history_item = table.item[history].astype(np.int64, copy=False)  # once for all of its columns
        rows = {
            ("user", "user"): user,
            ("item", "item"): item,
            ("history", "item"): history_item,
            ("history", "event"): history,
        }

        lengths = np.empty((len(self.features), len(events)), np.int64)
        for i, (spec, ids) in enumerate(zip(self.features, self._columns, strict=False)):
            is_history = spec.role == "history"
            lengths[i] = history_lengths if is_history else ids.counts(rows[spec.role, spec.of])
        lengths[-1] = history_lengths
        length_per_key = lengths.sum(axis=1)
        ends = np.cumsum(length_per_key)
        values = np.empty(ends[-1], np.int64)
        for i, (spec, ids) in enumerate(zip(self.features, self._columns, strict=False)):
            part = values[ends[i] - length_per_key[i] : ends[i]]
            ids.fill(rows[spec.role, spec.of], part)
            if unknown is not None and spec.column in self.schema.encodings.vocabularies:
                # An event is unknown to all samples of the epoch, and another value of the sample to this one.
                part[unknown(i, history if spec.role == "history" else np.repeat(samples, lengths[i]))] = UNKNOWN
        now = np.repeat(table.time[events], history_lengths)
        values[ends[-1] - length_per_key[-1] :] = age_buckets(now - table.time[history], self.schema.num_age_buckets)

        sparse = KeyedJaggedTensor(
            keys=[spec.key for spec in self.features],
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(lengths.ravel()),
            stride=len(events),
            # Without it the first split of the tensor would synchronize with the device to compute it.
            length_per_key=length_per_key.tolist(),
        )
        dense = np.concatenate([self._dense_users[user], self._dense_items[item]], axis=1)
        if not self.schema.dense_names:
            dense = np.zeros((len(events), 1), np.float32)
        return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(label), torch.from_numpy(user))
