"""Arrays of a dataset -> batches of samples, in the form that TorchRec's models and train pipelines take."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import PHWithMeta
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from jfi.data.batches.choose_events import Engagement
from jfi.data.batches.negatives import NegativeSampler
from jfi.data.batches.order import BatchPart
from jfi.data.config import NUM_AGE_BUCKETS, WEIGHT
from jfi.data.schema.columns import Categorical
from jfi.data.schema.schema import DataSchema, FeatureSpec
from jfi.events.events import Histories, SortedEvents
from jfi.events.statistics import DenseStatistics
from jfi.utils.encoding import age_buckets
from jfi.utils.jagged import Timelines, repeat


@dataclass
class Batch(Pipelineable):
    """B samples, ready for a model and for TorchRec's train pipelines.

    A rank's part may be empty. It then has the features of another rank's sample, since TorchRec's collections fail
    without any, but no label. Of a model's logits the rows of the first `len(labels)` samples count.

    Args:
        dense_features: `[B, max(1, num_dense)]` float32, standardized; one column of zeros where the table has no
            dense column.
        sparse_features: every categorical key, with stride B: user keys, item (target) keys and context keys, then
            the `history_*` keys. These are aligned: they have the same lengths, and the oldest event comes first. Of
            several histories each has its name in place of `history`, and lengths of its own.
            `item_sid` and `history_sid` hold semantic IDs, all others ids from 0 on.
        labels: `[B]` float32, 0 or 1, or any number of a regression. Of L labels `[B, L]`, NaN where a further one is
            missing. Auxiliary ones are the last ones, in all splits; a model has outputs for them in
            training mode alone.
        users: `[B]` int64, the sample's user, for metrics by user; not an input of the model.
        samples: `[B]` int64, the samples by their position in the split.
        total: samples of the batch on all ranks.
        weights: `[B]` float32, the samples' weights in the loss; None without `data.weight`.
        timelines: None for a batch by sample. By user the samples of a timeline are neighbours, in the order of time.

    For two samples, one with a history of two events and one without events::

        #                     sample 0   sample 1
        # "item"              [3]        [8]
        # "genres"            [1, 4]     [2]        a target may have several values
        # "history_item"      [5, 2]     []
        # "history_genres_0"  [1, 3]     []         a multi-valued field has slots, 0 where an event has fewer values
        # "history_genres_1"  [4, 0]     []
        # "history_rating"    [5, 1]     []
        # "history_age"       [17, 9]    []         buckets of ages from 2**16 s and from 2**8 s on

    By user the U timelines come first in the user and `history_*` keys, whose entries U to B stay empty, and ages
    follow from the times of `timelines`. For two samples of a user, of which the second also sees event 3::

        # "item"              [3]        [8]
        # "history_item"      [5, 2, 3]  []
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor
    users: Tensor
    samples: Tensor
    total: int
    timelines: Timelines | None = None
    weights: Tensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return self._map(lambda one: one.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        for one in self._tensors():
            one.record_stream(stream)

    def pin_memory(self) -> "Batch":
        return self._map(lambda one: one.pin_memory())

    def _tensors(self) -> list[Tensor | KeyedJaggedTensor]:
        times = self.timelines
        others = [] if self.weights is None else [self.weights]
        others += [] if times is None else [times.row_offsets, times.target_times, times.event_times]
        return [self.dense_features, self.sparse_features, self.labels, self.users, self.samples, *others]

    def _map(self, change: Callable) -> "Batch":
        dense, sparse, labels, users, samples, *others = map(change, self._tensors())
        weights = None if self.weights is None else others.pop(0)
        times = self.timelines and Timelines(others[0], others[1], others[2], self.timelines.max_events)
        return Batch(dense, sparse, labels, users, samples, self.total, times, weights)

    def to_proxy_tuple(self, model: nn.Module) -> dict[str, PHWithMeta]:
        """Tells TorchRec's train pipelines which field a model's argument of the same name comes from.

        A pipeline traces the model's forward and reads the ids of the next batch from it. It assumes one argument, the
        batch, unless the batch has this method. A forward(batch) ignores the names.
        """
        names = ("dense_features", "sparse_features", "timelines")
        return {name: PHWithMeta(ph_key=name) for name in names}


#: Events that are gathered together. Smaller blocks take less time alone, larger ones take Python's lock less often.
_BLOCK = 1 << 18

#: `[U, Du]` and `[N, Di]` float32, the dense features of users and of items, and those of contexts, `[E]` float32
#: each. The arrays of events stay apart, since each may be the map of a file.
Dense = tuple[np.ndarray, np.ndarray, list[np.ndarray]]


@dataclass(frozen=True)
class Arrays:
    """All arrays of a dataset, which may be maps of files.

    Args:
        events: all events; every history is a range of them.
        columns: by key of `DataSchema.features`, except the age, the ids of each user, item or event.
        dense: the dense features of users, of items and of contexts.
        samples: by split the events that are its samples, ordered by (timestamp, user, item).
        negatives: draws the negatives of implicit feedback; None for a table with labels.
        engagement: dwell and surface of the events, or None.
        statistics: gives those of other targets than the events' own items, whose columns are dense features of
            contexts; None without `data.statistics`.
    """

    events: SortedEvents
    columns: list[Categorical]
    dense: Dense
    samples: dict[str, np.ndarray]
    negatives: NegativeSampler | None
    engagement: Engagement | None = None
    statistics: DenseStatistics | None = None


def assemble(
    arrays: Arrays,
    schema: DataSchema,
    part: BatchPart,
    drawn: tuple[np.ndarray, np.ndarray, np.ndarray],
    find: Callable[[np.ndarray, np.ndarray | None], list[Histories]],
    pin_memory: bool = False,
) -> Batch:
    """Returns a batch.

    Args:
        arrays: of the dataset.
        schema: of the dataset.
        part: the samples, and the timelines that they share.
        drawn: the events, the target items and the labels of the samples, `[B]` each.
        find: gives the histories of events `[B]` that are samples, or of the timelines at offsets `[U + 1]` of these,
            in the order of the schema.
        pin_memory: whether all tensors are in pinned memory.
    """
    (events, item, label), table = drawn, arrays.events
    samples, offsets, count = part.samples, part.offsets, len(events) if part.counts else 0
    if not len(events):
        events = samples = np.zeros(1, np.int64)
        item, offsets = table.item[:1].astype(np.int64), None if offsets is None else np.array([0, 1])
    histories = dict(zip(schema.histories, find(events, offsets), strict=True))
    user = table.user[events].astype(np.int64, copy=False)
    owners = slice(None) if offsets is None else offsets[:-1]  # of the samples, those that a user's values belong to
    rows = {"user": user[owners], "item": item, "context": events}

    # A timeline has at least one sample, so a key for each sample is enough. By user there is no
    # age, which follows from the times.
    specs = schema.features if offsets is None else schema.encoded
    lengths = np.zeros((len(specs), len(events)), np.int64)
    for index, (own, spec) in enumerate(zip(lengths, specs, strict=True)):
        counts = histories[spec.history].lengths if spec.history else arrays.columns[index].counts(rows[spec.role])
        own[: len(counts)] = counts
    length_per_key = lengths.sum(axis=1).tolist()
    ends = list(accumulate(length_per_key))
    if pin_memory:
        values = torch.empty(ends[-1], dtype=torch.int64, pin_memory=True)
    else:
        values = torch.from_numpy(np.empty(ends[-1], np.int64))  # NumPy asks for huge pages: fewer page faults
    ids_of_keys = values.numpy()
    parts = [ids_of_keys[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    of_events: dict[str, list[tuple[str, Categorical, np.ndarray]]] = {name: [] for name in histories}
    for spec, ids, out in zip(specs, arrays.columns, parts, strict=False):
        if spec.history:
            of_events[spec.history].append((spec.of, ids, out))
        else:
            ids.fill(rows[spec.role], out)

    times = None
    if offsets is not None:  # there is one history then
        event_times = np.empty(sum(int(one.lengths.sum()) for one in histories.values()))
        target_times = torch.from_numpy(table.time[events])
        times = Timelines(torch.from_numpy(offsets), target_times, torch.from_numpy(event_times), schema.max_history)
    ages: list[np.ndarray | None] = [*parts[len(schema.encoded) :]] or [None]
    for (name, found), of_history, age in zip(histories.items(), table.each, ages, strict=True):
        for owner, own, event in found.blocks(of_history, _BLOCK):
            of = {"event": event, "item": table.item.take(event, mode="clip").astype(np.int64, copy=False)}
            for entity, ids, out in of_events[name]:
                ids.fill(of[entity], out[own])
            time = table.time.take(event, mode="clip")
            if age is None:
                event_times[own] = time
            else:
                now = repeat(table.time[events[owner]], found.lengths[owner])
                age[own] = age_buckets(np.subtract(now, time, out=now), NUM_AGE_BUCKETS)

    sparse = KeyedJaggedTensor(
        keys=[spec.key for spec in specs],
        values=values,
        weights=_weights(histories, specs, parts),
        lengths=torch.from_numpy(lengths.ravel()),
        stride=len(events),
        # Without it the first split of the tensor would synchronize with the device to compute it.
        length_per_key=length_per_key,
    )
    users, items, contexts = arrays.dense
    dense = np.zeros((len(events), 1), np.float32)
    if schema.dense_names:
        dense = np.concatenate([users[user], items[item], *(column[events, None] for column in contexts)], axis=1)
    if arrays.statistics is not None and len(negatives := np.flatnonzero(item != table.item[events])):
        arrays.statistics.fill(dense, negatives, events[negatives], item[negatives])
    further = [column[events[:count]] for name, column in table.targets.items() if name != WEIGHT]
    if further:
        label = np.stack([label[:count], *further], axis=1)
    weight = torch.from_numpy(table.targets[WEIGHT][events[:count]]) if WEIGHT in table.targets else None
    fields = map(torch.from_numpy, (label[:count], user[:count], samples[:count]))
    batch = Batch(torch.from_numpy(dense), sparse, *fields, part.total, times, weight)
    return batch.pin_memory() if pin_memory else batch


def _weights(histories: dict[str, Histories], specs: list[FeatureSpec], parts: list[np.ndarray]) -> torch.Tensor | None:
    """The weights of the events for the keys of histories and ages, 1 for the values of other keys; None for all 1."""
    of_events = {name: one.weights for name, one in histories.items() if one.weights is not None}
    if not of_events:
        return None
    ones = (
        of_events.get(spec.history, np.ones(len(part), np.float32)) for spec, part in zip(specs, parts, strict=True)
    )
    return torch.from_numpy(np.concatenate([*ones], dtype=np.float32))
