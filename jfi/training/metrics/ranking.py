"""HR@k and NDCG@k of implicit feedback: where a positive ranks among candidates.

hr@k      share of the positives among the first k of their candidates
ndcg@k    mean of 1 / log2(rank + 1) over the positives, 0 for a rank beyond k

A positive's rank is 1 plus the number of candidates with a higher score plus half of those with an equal one, so a
model that gives all items one score does not win. The names of the metrics against all items end in "_full".
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jfi.data import Batch, DataConfig, InteractionDataset
from jfi.data.batches.negatives import Candidates
from jfi.data.prepared.scoring import ScoringRows
from jfi.data.prepared.stages.column_files import new_map
from jfi.training.config import Config, TrainingConfig
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


class RankedPositives:
    """Scores sampled negatives, as in training, for each of the M rows of a table whose item training knows.

    A draw follows from the number of the positive among the M, so a held-out split as a table, in the order of
    (timestamp, user, item), has the negatives that training evaluates it with.

    Args:
        rows: the rows.
        folder: for a file of the negatives' scores, 4 bytes each.
        config: the section `data` of the run, for the numbers of negatives.
        training: the section `training` of the run, for what `ranking` asks for.
    """

    def __init__(self, rows: ScoringRows, folder: Path, config: DataConfig, training: TrainingConfig) -> None:
        #: `[M]` int64, their rows in the table.
        self.rows = np.flatnonzero(~np.isnan(rows.labels))
        self.per_positive, self._num_sampled = config.negatives, training.ranking_samples
        count = len(self.rows)
        #: `[M * per_positive]` float32, the logits of the negatives, by positive.
        self.negatives = new_map(folder / "negatives.npy", np.float32, count * config.negatives)
        chosen = min(training.ranking_positives, count)
        #: `[P]` int64, the numbers of the positives that are ranked, ascending, as in training.
        self.ranked = np.arange(chosen) * count // chosen
        self._k, self._kinds = training.ranking_k, training.ranking_kinds()
        self._ranks = {kind: torch.zeros(chosen, dtype=torch.float64) for kind in self._kinds}
        sizes = {"sampled": training.ranking_samples, "full": len(rows.negatives.candidates)}
        per_ranked = sum(1 + sizes[kind] for kind in self._kinds)
        #: The number of samples that `score` scores.
        self.num_samples = len(self.negatives) + chosen * per_ranked

    def score(self, rows: ScoringRows, score: Score, batch_size: int, device: torch.device) -> None:
        """Scores the negatives and the candidates of the positives.

        Args:
            rows: the rows.
            score: gives the logits of batches.
            batch_size: samples per batch.
            device: of the logits.
        """
        number, own = _find(self.rows, rows.rows)
        arrays = rows.dataset.arrays()
        events, chosen = arrays.events, arrays.samples["rows"][own].astype(np.int64)
        user, item = events.user[chosen].astype(np.int64), events.item[chosen].astype(np.int64)
        positives = chosen, user, item, events.time[chosen]
        self._score_negatives(rows, positives, number, score, batch_size, device)
        index, own = _find(self.ranked, number)
        positives = [column[own] for column in positives]
        for kind, ranks in self._ranks.items():
            candidates = Candidates(*positives, rows.negatives, kind, self._num_sampled, number[own])
            ranks[torch.from_numpy(index)] = rank_positives(rows.dataset, candidates, batch_size, score, World(device))

    def ranking(self, chosen: torch.Tensor | slice) -> dict[str, float]:
        """The metrics that `training.ranking` asks for, of the ranked positives at `chosen`; NaN where there is none.

        `ranked` is their number.
        """
        metrics: dict[str, float] = {}
        for kind, suffix in self._kinds.items():
            metrics["ranked"] = len(self._ranks[kind][chosen])
            metrics |= ranking_metrics(self._ranks[kind][chosen], self._k, suffix)
        return metrics

    def _score_negatives(
        self,
        rows: ScoringRows,
        positives: tuple[np.ndarray, ...],
        number: np.ndarray,
        score: Score,
        batch_size: int,
        device: torch.device,
    ) -> None:
        (events, user, _, time), per = positives, self.per_positive
        pairs = own_numbers(len(number) * per, batch_size, World())

        def assemble(pair: np.ndarray) -> Batch:
            own = pair // per
            # Training numbers a positive and its negatives together, and draws held-out ones with seed 0.
            samples = number[own] * (1 + per) + 1 + pair % per
            item = rows.negatives.draw(user[own], time[own], samples, seed=0, epoch=0)
            return rows.dataset.batch_of(events[own], item, pin_memory=device.type == "cuda")

        for pair, logits in zip(pairs(), score(assemble, pairs()), strict=True):
            self.negatives[number[pair // per] * per + pair % per] = logits.cpu().numpy()


def _find(known: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices in `known`, ascending, of those of `values` that it has; and whether it has each, bool."""
    index = np.minimum(np.searchsorted(known, values), len(known) - 1)
    found = known[index] == values
    return index[found], found
