"""Samples with histories, assembled into batches."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jfi.data.batches.batch import Arrays, Batch, assemble
from jfi.data.batches.choose_events import EventChooser
from jfi.data.batches.negatives import Candidates, Kind
from jfi.data.batches.order import BatchPart, ChunkOrder, Chunks, Order, SampleOrder, cut_chunks, timeline_ranges
from jfi.data.config import TIMELINE, Batching
from jfi.data.schema.schema import DataSchema
from jfi.events.events import Histories
from jfi.history_policies import Policy
from jfi.utils.errors import suggest

if TYPE_CHECKING:
    from jfi.data.prepared.manifest import Verification
    from jfi.data.prepared.summary import Summary


class Batches(Sequence[Batch]):
    """The batches of an epoch, or a rank's parts of them; each is made when it is read, by any thread.

    Args:
        order: the samples of each batch.
        make: makes a batch from its number.
    """

    def __init__(self, order: Order, make: Callable[[int], Batch]) -> None:
        self.order, self._make = order, make

    def __len__(self) -> int:
        return self.order.num_batches

    def __iter__(self) -> Iterator[Batch]:
        return map(self._make, range(len(self)))  # Sequence's own would end at any IndexError

    def __getitem__(self, number: int) -> Batch:  # type: ignore[override] # no slices
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number}; there are {len(self)}, from 0 on")
        return self._make(number)


class InteractionDataset:
    """Samples with histories; `load_dataset` makes one.

    Args:
        arrays: of the events, their features and the samples.
        schema: the keys of the batches and the encodings of their values.
        batching: whether each sample of a batch has its own history, or the samples of a user share a timeline.
        policy: which events of a history stay, by their engagement; None keeps all.

    Raises:
        DataError: a policy without engagement, or one of other surfaces.
    """

    def __init__(
        self,
        arrays: Arrays,
        schema: DataSchema,
        batching: Batching = "sample",
        policy: Policy | None = None,
    ) -> None:
        #: Of a prepared dataset, its folder.
        self.folder: Path | None = None
        #: Of a prepared dataset with large files, the verification that runs in the background.
        self.verification: Verification | None = None
        #: The dataset in numbers, if they have been computed.
        self.summary: Summary | None = None
        self.schema = schema
        self.features = schema.features
        self._arrays = arrays
        #: Chooses among the events of a history; None keeps all.
        self.chooser: EventChooser | None = None
        if policy is not None:
            self.chooser = EventChooser(policy, arrays.events, arrays.engagement, schema.max_history)
        self.batching = batching
        self._chunks: dict[str, Chunks] = {}
        #: The order of the last batches, which the parts of a batch share, and its arguments.
        self._order: tuple[tuple, Order] | None = None

    def arrays(self) -> Arrays:
        """The arrays that the batches are made of; not copies."""
        return self._arrays

    @property
    def policy(self) -> Policy | None:
        """Which events of a history stay; None if all do."""
        return None if self.chooser is None else self.chooser.policy

    def num_samples(self, split: str) -> int:
        """Number of samples of a split, sampled negatives included."""
        return len(self._rows(split)) * self._samples_per_row

    def newer_than(self, time: float) -> "InteractionDataset":
        """Returns the dataset with the training samples after a time alone; all events stay in histories."""
        newer, rows = copy(self), self._rows("train")[self.num_until("train", time) :]
        newer._arrays = replace(self._arrays, samples={**self._arrays.samples, "train": rows})
        newer._chunks, newer._order = {}, None
        return newer

    def num_until(self, split: str, time: float) -> int:
        """Returns the number of a split's rows up to a time."""
        rows, times = self._rows(split), self._arrays.events.time
        return bisect_right(range(len(rows)), time, key=lambda index: times[rows[index]])

    def newest(self) -> float:
        """Returns the time of the newest training sample."""
        return float(self._arrays.events.time[self._rows("train")[-1]])

    def removed_share(self, batch_size: int) -> float:
        """Share of the events of the histories in training that the policy removes, of eight batches."""
        order, before, after = self._order_of("train", batch_size, None, self.batching), 0, 0
        for number in np.unique(np.linspace(0, order.num_batches - 1, 8).astype(np.int64)).tolist():
            part = order.part(number, 0, 1)
            events = self.draw("train", part.samples)[0]
            before += sum(int(one.lengths.sum()) for one in self._whole_histories(events, part.offsets))
            after += sum(int(one.lengths.sum()) for one in self._histories(events, part.offsets))
        return 1 - after / max(1, before)

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        batching: Batching | None = None,
        pin_memory: bool = False,
    ) -> "Batches":
        """Returns the batches of one epoch, a pure function of the arguments.

        A batch has the same samples for any number of ranks. Each rank gets a part of it, in the same order: of a batch
        by sample so that the parts have about as many events, and their sizes differ by at most one; of a batch by user
        whole timelines, so that the parts have about as many events, events times targets, and samples. Some parts may
        be empty, so that all ranks make the same number of steps.

        Args:
            split: "train", "validation" or "test".
            batch_size: samples per batch, summed over all ranks. By user it is a mean, since timelines are whole.
            shuffle: False gives the order (timestamp, user, item); by user (user, timestamp, item).
            seed: seed of the order and of the sampled negatives, together with `epoch`.
            epoch: number of the epoch.
            rank: of this process.
            world_size: number of ranks.
            batching: "sample" or "user"; None means that of the dataset.
            pin_memory: whether batches are in pinned memory, which a GPU copies while the host goes on.

        Raises:
            ValueError: an unknown split, a batch size below 1, or a rank outside of the world.

        Example::

            >>> import pyarrow as pa
            >>> from jfi.data import DataConfig, load_dataset
            >>> rows = {"user_id": [1, 2] * 20, "item_id": [*range(10)] * 4, "timestamp": [*range(40)]}
            >>> dataset = load_dataset(DataConfig(interactions=pa.table(rows), negatives=1))
            >>> batch = dataset.batches("train", 32, shuffle=True)[0]
            >>> batch.labels.shape, batch.sparse_features.keys()
            (torch.Size([32]), ['item_id', 'history_item_id', 'history_age'])
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be in [0, world_size = {world_size})")
        order = self._order_of(split, batch_size, (seed, epoch) if shuffle else None, batching or self.batching)

        def make(number: int) -> Batch:
            part = order.part(number, rank, world_size)
            drawn = self.draw(split, part.samples, seed, epoch)
            return assemble(self._arrays, self.schema, part, drawn, self._histories, pin_memory)

        return Batches(order, make)

    def _order_of(self, split: str, batch_size: int, shuffle: tuple[int, int] | None, batching: Batching) -> Order:
        asked = split, batch_size, shuffle, batching
        known = self._order
        if known is None or known[0] != asked:
            rows = self._rows(split)
            if batching == "sample":
                order = SampleOrder(self.num_samples(split), batch_size, shuffle, partial(self._num_events, rows))
            else:
                if split not in self._chunks:
                    longest = self.schema.max_history
                    self._chunks[split] = cut_chunks(self._arrays.events, rows, longest, TIMELINE * longest)
                order = ChunkOrder(self._chunks[split], self._samples_per_row, batch_size, shuffle)
            self._order = known = asked, order
        return known[1]

    def draw(
        self, split: str, samples: np.ndarray, seed: int = 0, epoch: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The events, the target items and the labels of samples, `[B]` each, as `batches` has them.

        A sampled negative has the event of its positive, and another item.

        Args:
            split: "train", "validation" or "test".
            samples: `[B]` int64, the samples by their position in the split.
            seed: of the sampled negatives, together with `epoch`.
            epoch: number of the epoch.
        """
        table, negatives = self._arrays.events, self._arrays.negatives
        events = self._rows(split)[samples // self._samples_per_row].astype(np.int64, copy=False)
        item, label = table.item[events].astype(np.int64, copy=False), table.label[events]
        if negatives is not None:
            drawn = np.flatnonzero(samples % self._samples_per_row)
            user, time = table.user[events[drawn]].astype(np.int64), table.time[events[drawn]]
            item[drawn] = negatives.draw(user, time, samples[drawn], seed, epoch)
            label[drawn] = 0.0
        return events, item, label

    @property
    def is_implicit(self) -> bool:
        """Returns whether every row is a positive and negatives are sampled."""
        return self._arrays.negatives is not None

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
        rows, events = rows.astype(np.int64), self._arrays.events
        user, item = events.user[rows].astype(np.int64, copy=False), events.item[rows].astype(np.int64, copy=False)
        positives = rows, user, item, events.time[rows]
        return Candidates(*positives, self._arrays.negatives, kind, num_sampled)  # type: ignore[arg-type] # implicit

    def batch_of(self, rows: np.ndarray, item: np.ndarray, pin_memory: bool = False) -> Batch:
        """The interactions `rows [B]` with other targets, `item [B]`; their labels are 0.

        By user, neighbours of the same interaction share its history.
        """
        offsets = None
        if self.batching == "user":
            offsets = np.append(np.flatnonzero(np.diff(rows, prepend=-1)), len(rows))
        part = BatchPart(np.arange(len(rows)), len(rows), offsets)
        drawn = rows, item, np.zeros(len(rows), np.float32)
        return assemble(self._arrays, self.schema, part, drawn, self._histories, pin_memory)

    @property
    def _samples_per_row(self) -> int:
        return 1 if self._arrays.negatives is None else 1 + self._arrays.negatives.per_positive

    def _rows(self, split: str) -> np.ndarray:
        if split not in self._arrays.samples:
            raise ValueError(f"split is '{split}'; {suggest(split, self._arrays.samples)}")
        return self._arrays.samples[split]

    def histories_of(self, split: str, samples: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns by history of samples `[B]` of a split the lengths `[B]`, and the events `[S]`."""
        rows, result = self._rows(split)[samples // self._samples_per_row].astype(np.int64), {}
        of_histories = zip(self.schema.histories, self._histories(rows), self._arrays.events.each, strict=True)
        for name, found, table in of_histories:
            events = [part for *_, part in found.blocks(table, max(1, int(found.lengths.sum())))]
            result[name] = found.lengths, np.concatenate([np.zeros(0, np.int64), *events])
        return result

    def _num_events(self, rows: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """`[B]` int64, the events of the histories of samples of a split with these rows."""
        events = rows[samples // self._samples_per_row].astype(np.int64, copy=False)
        return np.sum([one.lengths for one in self._histories(events)], axis=0)

    def _histories(self, events: np.ndarray, offsets: np.ndarray | None = None) -> list[Histories]:
        """The histories of samples `[B]`, or of the timelines at offsets `[U + 1]` of them, as the schema has them."""
        if self.chooser is not None:
            return [self.chooser.histories(events) if offsets is None else self.chooser.timelines(events, offsets)]
        return self._whole_histories(events, offsets)

    def _whole_histories(self, events: np.ndarray, offsets: np.ndarray | None) -> list[Histories]:
        """The same without a policy."""
        found = []
        for table, most in zip(self._arrays.events.each, self.schema.histories.values(), strict=True):
            if offsets is None:
                start, lengths = table.histories(events, most)
            else:
                start, lengths = timeline_ranges(table, events[offsets[:-1]], events[offsets[1:] - 1], most)
            found.append(Histories(lengths, start))
        return found
