"""Scores of sampled negatives of a table's positives, and the ranks of the positives, for implicit feedback."""

from pathlib import Path

import numpy as np
import torch

from jfi.data import Batch, DataConfig
from jfi.data.batches.negatives import Candidates
from jfi.data.prepared.scoring import ScoringRows
from jfi.data.prepared.stages.column_files import new_map
from jfi.training.config import TrainingConfig
from jfi.training.distributed.processes import World
from jfi.training.metrics.ranking import Score, own_numbers, rank_positives, ranking_metrics


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
        count, limit = len(self.rows), training.ranking_positives
        #: `[M * per_positive]` float32, the logits of the negatives, by positive.
        self.negatives = new_map(folder / "negatives.npy", np.float32, count * config.negatives)
        chosen = count if limit is None else min(limit, count)
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
