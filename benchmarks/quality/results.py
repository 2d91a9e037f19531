"""The results of a table: a cell for each finished training, in one JSON file that is also the checkpoint."""

import fcntl
import hashlib
import json
import os
import statistics
from pathlib import Path

from benchmarks.quality.models import SEEDS, Model
from benchmarks.quality.tables import Table
from jfi.utils.files import write_file

#: Metrics of a held-out split that are shown.
METRICS = ("auc", "ne", "user_auc")


def fingerprint(content: object) -> str:
    """A short hash of JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]


class Results:
    """The cells of a table, written after each.

    A cell is the result of one training: `model`, `settings`, `fold`, `seed`, `protocol` (a fingerprint of what else it
    depends on), the metrics `validation` and `test`, `train_seconds`, `epochs`, `best_epoch`, `parameters`, and where
    it ran.

    Several processes may add cells of different models to one file.

    Args:
        path: of the JSON file; it may be absent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._protocols: dict[str, str] = {}
        self.cells = self._read()

    def keep(self, model: str, protocol: str) -> None:
        """Drops the cells of a model that another protocol made; the file follows with the next cell."""
        self._protocols[model] = protocol
        self.cells = self._kept(self.cells)

    def add(self, cell: dict) -> None:
        """Adds a cell to what the file has by now, and writes it, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self.cells = [*self._kept(self._read()), cell]
            lines = ",\n".join(f"  {json.dumps(one)}" for one in self.cells)
            write_file(self.path, f'{{"cells": [\n{lines}\n]}}\n')
        finally:
            os.close(folder)

    def _read(self) -> list[dict]:
        return json.loads(self.path.read_text())["cells"] if self.path.exists() else []

    def _kept(self, cells: list[dict]) -> list[dict]:
        known = self._protocols
        return [cell for cell in cells if cell["model"] not in known or cell["protocol"] == known[cell["model"]]]


def final_runs(table: Table) -> list[tuple[int, int]]:
    """Fold and seed of the trainings that count: every seed of the only fold, or the first seed of every fold."""
    if len(table.folds) == 1:
        return [(0, seed) for seed in SEEDS]
    return [(fold, SEEDS[0]) for fold in range(len(table.folds))]


def of_model(cells: list[dict], name: str, settings: dict) -> dict[tuple[int, int], dict]:
    """The cells of a model with these settings, by fold and seed."""
    return {(c["fold"], c["seed"]): c for c in cells if c["model"] == name and c["settings"] == settings}


def chosen(cells: list[dict], name: str, model: Model, runs: list[tuple[int, int]]) -> dict | None:
    """The settings of the trial that is best on validation rows in the first of `runs`; None while one is missing."""
    trials = [model.settings | trial for trial in model.trials]
    found = [of_model(cells, name, settings).get(runs[0]) for settings in trials]
    if None in found:
        return None
    sign = 1 if model.chosen_by == "auc" else -1
    return max(found, key=lambda cell: sign * cell["validation"][model.chosen_by])["settings"]


def summary(cells: list[dict], name: str, model: Model, runs: list[tuple[int, int]]) -> dict | None:
    """Mean and population standard deviation over the final trainings of a model; None while some are missing."""
    settings = chosen(cells, name, model, runs)
    if settings is None:
        return None
    by_run = of_model(cells, name, settings)
    if any(run not in by_run for run in runs):
        return None
    found = [by_run[run] for run in runs]
    shown = {"settings": settings, "parameters": found[0]["parameters"], "runs": len(found)}
    shown["validation_auc"] = statistics.fmean(cell["validation"]["auc"] for cell in found)
    shown["train_seconds"] = statistics.fmean(cell["train_seconds"] for cell in found)
    for metric in METRICS:
        values = [cell["test"][metric] for cell in found]
        shown[metric] = {"mean": statistics.fmean(values), "std": statistics.pstdev(values)}
    return shown
