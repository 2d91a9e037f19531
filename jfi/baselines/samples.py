"""The samples of a dataset's splits, as a run evaluates them."""

from dataclasses import dataclass

import numpy as np

from jfi.data import InteractionDataset
from jfi.data.prepared.stages.splits import SPLITS


@dataclass(frozen=True)
class Samples:
    """B samples: those of training, then those of validation, then those of test.

    Args:
        events: `[B]` int64, the event of each sample; that of its positive for a sampled negative.
        item: `[B]` int64, the target.
        label: `[B]` float32, 0 or 1.
        user: `[B]` int64.
        splits: by split the range of its samples.
    """

    events: np.ndarray
    item: np.ndarray
    label: np.ndarray
    user: np.ndarray
    splits: dict[str, slice]

    @classmethod
    def of(cls, dataset: InteractionDataset, seed: int = 0) -> "Samples":
        """All samples of a dataset.

        Args:
            dataset: of a training run.
            seed: of the training negatives, which are those of the run's first epoch. Held-out negatives are the same
                in every run.
        """
        parts, splits, first = [], {}, 0
        for name in SPLITS:
            count = dataset.num_samples(name)
            parts.append(dataset.draw(name, np.arange(count), seed if name == "train" else 0))
            splits[name] = slice(first, first + count)
            first += count
        events, item, label = map(np.concatenate, zip(*parts, strict=True))
        user = dataset.arrays().events.user[events].astype(np.int64, copy=False)
        return cls(events, item, label, user, splits)
