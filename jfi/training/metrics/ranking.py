"""HR@k and NDCG@k of implicit feedback: where a positive ranks among candidates.

hr@k      share of the positives among the first k of their candidates
ndcg@k    mean of 1 / log2(rank + 1) over the positives, 0 for a rank beyond k

A positive's rank is 1 plus the number of candidates with a higher score plus half of those with an equal one, so a
model that gives all items one score does not win. The names of the metrics against all items end in "_full".
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from jfi.data import Batch, InteractionDataset
from jfi.data.batches.negatives import Candidates
from jfi.training.config import Config
from jfi.training.distributed.processes import World
from jfi.utils.display import Display

#: Scores the batches that a function makes of arrays of numbers, assembled ahead: logits `[B]` of each.
Score = Callable[[Callable[[np.ndarray], Batch], Iterable[np.ndarray]], Iterator[Tensor]]


def ranking_metrics(ranks: Tensor, k: int, suffix: str = "") -> dict[str, float]:
    """HR@k and NDCG@k of ranks `[P]` float64, which count from 1.

    >>> ranking_metrics(torch.tensor([1.0, 3.0, 4.0, 11.0]), 3)
    {'hr@3': 0.5, 'ndcg@3': 0.375}
    """
    hit = ranks <= k
    gain = torch.where(hit, 1 / torch.log2(ranks.double() + 1), 0.0)
    return {f"hr@{k}{suffix}": hit.double().mean().item(), f"ndcg@{k}{suffix}": gain.mean().item()}


def rank_split(
    dataset: InteractionDataset,
    split: str,
    config: Config,
    score: Score,
    world: World,
    display: Callable[[str, int, int], Display],
) -> dict[str, float]:
    """HR@k and NDCG@k of a split of implicit feedback, those that `training.ranking` asks for.

    Args:
        dataset: of implicit feedback.
        split: "validation" or "test".
        config: the whole config.
        score: gives the logits of batches.
        world: the processes; each scores its part of every batch.
        display: by label, total and what is done, shows how far the scoring is.
    """
    training, metrics = config.training, {}
    for kind, suffix in training.ranking_kinds().items():
        candidates = dataset.candidates(split, kind, training.ranking_positives, training.ranking_samples)
        with display(f"{split}, ranking ({kind})", len(candidates.rows) + len(candidates), 0) as bar:

            def shown(
                assemble: Callable[[np.ndarray], Batch], items: Iterable[np.ndarray], bar: Display = bar
            ) -> Iterator[Tensor]:
                for logits in score(assemble, items):
                    yield logits
                    bar.update(len(logits) * world.size)

            ranks = rank_positives(dataset, candidates, training.eval_batch_size, shown, world)
        metrics |= ranking_metrics(ranks, training.ranking_k, suffix)
    return metrics


def rank_positives(
    dataset: InteractionDataset, candidates: Candidates, batch_size: int, score: Score, world: World
) -> Tensor:
    """The rank `[P]` float64 of each positive among its candidates.

    It holds a batch at a time, and three numbers for each positive. A candidate is a sample of its own, with the whole
    history of the positive's user.

    Args:
        dataset: of the candidates.
        candidates: the positives and whom they are ranked among.
        batch_size: samples of a batch, over all processes.
        score: gives the logits of batches.
        world: the processes; each scores its part of every batch.
    """
    count = len(candidates.rows)
    device = world.device
    pinned = device.type == "cuda"
    own = torch.zeros(count, dtype=torch.float64, device=device)
    numbers = own_numbers(count, batch_size, world)

    def positives(part: np.ndarray) -> Batch:
        return dataset.batch_of(candidates.rows[part], candidates.items[part], pinned)

    for part, logits in zip(numbers(), score(positives, numbers()), strict=True):
        own[torch.from_numpy(part).to(device)] = logits.double()
    own = world.sum(own)

    better = torch.zeros(count, dtype=torch.float64, device=device)
    numbers = own_numbers(len(candidates), batch_size, world)

    def pairs(part: np.ndarray) -> Batch:
        positive, item, _ = candidates.pairs(part)
        return dataset.batch_of(candidates.rows[positive], item, pinned)

    for part, logits in zip(numbers(), score(pairs, numbers()), strict=True):
        # Drawn again rather than kept, since batches are assembled ahead.
        positive, _, counts = (torch.from_numpy(x).to(device) for x in candidates.pairs(part))
        against = own[positive]
        points = (logits.double() > against).double() + (logits.double() == against).double() / 2
        better.index_add_(0, positive, points * counts)
    return 1 + world.sum(better).cpu()


def own_numbers(count: int, batch_size: int, world: World) -> Callable[[], Iterator[np.ndarray]]:
    """This rank's numbers below `count`, a batch at a time, as often as it is called."""

    def parts() -> Iterator[np.ndarray]:
        for first in range(0, count, batch_size):
            size = min(batch_size, count - first)
            yield np.arange(first + size * world.rank // world.size, first + size * (world.rank + 1) // world.size)

    return parts
