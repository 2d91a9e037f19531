"""A batch of samples in the form that TorchRec's models and train pipelines take."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import PHWithMeta
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from jfi.utils.jagged import Timelines


@dataclass
class Batch(Pipelineable):
    """B samples, ready for a model and for TorchRec's train pipelines.

    A rank's part may be empty. It then has the features of another rank's sample, since TorchRec's collections fail
    without any, but no label. Of a model's logits the rows of the first `len(labels)` samples count.

    Args:
        dense_features: `[B, max(1, num_dense)]` float32, standardized; one column of zeros where the table has no
            dense column.
        sparse_features: every categorical key, with stride B: user keys, item (target) keys and context keys, then
            the `history_*` keys. These are aligned: they have the same lengths, and the oldest event comes first.
            `item_sid` and `history_sid` hold semantic IDs, all others ids from 0 on.
        labels: `[B]` float32, 0 or 1, or any number of a regression. Of L labels `[B, L]`, NaN where a further one is
            missing. Auxiliary ones are the last ones, in all splits; a model has outputs for them in
            training mode alone.
        users: `[B]` int64, the sample's user, for metrics by user; not an input of the model.
        samples: `[B]` int64, the samples by their place in the split.
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
