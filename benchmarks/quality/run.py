"""Trains what a table lacks: the trials of each model, then the settings of the best one with all seeds or folds."""

import contextlib
import dataclasses
import datetime
import io
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import yaml
from torch import nn

from benchmarks import report
from benchmarks.quality.fuxictr import Peers, train_peer, write_rows
from benchmarks.quality.models import MODELS, PEER_TRAINING, Model
from benchmarks.quality.results import Results, chosen, final_runs, fingerprint, of_model
from benchmarks.quality.tables import ROOT, Table
from jfi.baselines import BaselineResult, run_baselines
from jfi.data import DataError, InteractionDataset, load_dataset
from jfi.data.config import FILES
from jfi.data.config_checks import check_data_config
from jfi.training import Config, train
from jfi.training.config_parser import parse_config
from jfi.training.run.saved_run import load_run


class SettingsError(DataError):
    """The settings of a model do not fit the kind of table, whatever is in its files."""


class Task:
    """A fold of a table, with what is read or written once for all of its trainings.

    Args:
        table: the table.
        fold: the number of the fold.
        data: folder of all tables.
        scratch: folder for what is not kept.
        peers: where FuxiCTR is.
    """

    def __init__(self, table: Table, fold: int, data: Path, scratch: Path, peers: Peers) -> None:
        self.table, self.fold, self.data, self.peers = table, fold, data, peers
        self.folder = scratch / f"fold-{fold}"
        self._datasets: dict[str, InteractionDataset] = {}
        self._peer_rows: dict | None = None
        self._baselines: dict[int, dict[str, list[BaselineResult]]] = {}

    def config(self, overrides: dict[str, object]) -> Config:
        """The table's config with other fields, by their dotted name; files are named from the folder of all tables.

        It has no statistics unless the fields name some: the settings of recorded cells name them where they have any.
        """
        overrides = {"data.statistics": []} | overrides
        files = {f"data.{name}" for name in FILES}
        overrides = {name: str(self.data / value) if name in files else value for name, value in overrides.items()}
        text = {name: value if isinstance(value, str) else json.dumps(value) for name, value in overrides.items()}
        more = [f"--{name}={value}" for name, value in text.items()]
        return parse_config([*self.table.arguments(self.fold, self.data), *more])[0]

    def dataset(self, config: Config) -> InteractionDataset:
        """The dataset of the section `data`, read once."""
        key = fingerprint(dataclasses.asdict(config.data))
        if key not in self._datasets:
            self._datasets = {key: load_dataset(config.data)}
        return self._datasets[key]

    def peer_rows(self) -> dict:
        """The rows of all splits as FuxiCTR gets them, written once."""
        if self._peer_rows is None:
            self.peers.check()
            self._peer_rows = write_rows(self.dataset(self.config({})), self.folder)
        return self._peer_rows

    def baselines(self, seed: int) -> dict[str, list[BaselineResult]]:
        """The results of all baselines, computed once; of labels no seed changes them."""
        dataset = self.dataset(self.config({}))
        seed = seed if dataset.is_implicit else 0
        if seed not in self._baselines:
            self._baselines[seed] = run_baselines(dataset, [seed])
        return self._baselines[seed]


def train_ours(task: Task, settings: dict, seed: int) -> tuple[dict, nn.Module, InteractionDataset]:
    """Trains one of our models: what a cell says of it, the model of its best epoch, and the data.

    Raises:
        SettingsError: the table does not allow the settings.
    """
    config = task.config(settings)
    try:
        check_data_config(config.data)
    except DataError as error:
        raise SettingsError(str(error)) from None
    dataset = task.dataset(config)
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = f"{scratch}/run"
        with contextlib.redirect_stdout(io.StringIO()):
            result = train(config.with_training(run_dir=run_dir, seed=seed), dataset)
        model = load_run(run_dir).model
    found = {
        "validation": result.validation,
        "test": result.test,
        "train_seconds": result.train_seconds,
        "epochs": result.epochs,
        "best_epoch": result.best_epoch,
        "parameters": sum(one.numel() for one in model.parameters()),
    }
    return found, model, dataset


def run_ours(task: Task, name: str, settings: dict, seed: int) -> dict:
    """Trains one of our models."""
    return train_ours(task, settings, seed)[0]


def run_peer(task: Task, name: str, settings: dict, seed: int) -> dict:
    """Trains one of FuxiCTR's models."""
    return train_peer(name, task.folder, task.peer_rows(), task.peers, PEER_TRAINING, seed, settings)


def run_baseline(task: Task, name: str, settings: dict, seed: int) -> dict:
    """A baseline on hand-made features, which chooses its settings itself."""
    (found,) = task.baselines(seed)[name]
    shown = {"chosen": found.settings, "validation": found.validation, "test": found.test}
    return shown | {"train_seconds": found.train_seconds, "epochs": None, "best_epoch": None, "parameters": None}


#: By kind of model what trains it: called with the task, the name, the settings and the seed, it returns the metrics
#: `validation` and `test`, `train_seconds`, and, where there are some, `epochs`, `best_epoch` and `parameters`.
RUNNERS: dict[str, Callable[[Task, str, dict, int], dict]] = {
    "ours": run_ours,
    "fuxictr": run_peer,
    "baseline": run_baseline,
}


def protocol(table: Table, model: Model) -> str:
    """Fingerprint of what a cell depends on beside its settings, fold and seed, as far as files say it.

    It has the settings of the config file, but for the names of tables; of code and defaults the cell has the commit.
    """
    config = yaml.safe_load((ROOT / table.config).read_text())
    data = {name: value for name, value in config["data"].items() if name not in FILES}
    if model.kind == "fuxictr":
        return fingerprint([data, PEER_TRAINING])
    return fingerprint(data if model.kind == "baseline" else config | {"data": data})


def run_table(
    table: Table,
    results: Results,
    names: Iterable[str],
    data: Path,
    peers: Peers,
    runners: dict[str, Callable] = RUNNERS,
    models: dict[str, Model] = MODELS,
) -> None:
    """Trains what is missing of the models `names`, and writes the results after each training.

    A model whose settings the table does not allow is left out, and a line says why.

    Args:
        table: the table.
        results: of the table so far.
        names: of the models.
        data: folder of all tables.
        peers: where FuxiCTR is.
        runners: by kind of model what trains it.
        models: by name.
    """
    runs, where = final_runs(table), environment()
    with tempfile.TemporaryDirectory() as scratch:
        tasks = {fold: Task(table, fold, data, Path(scratch), peers) for fold in {fold for fold, _ in runs}}

        def ensure(name: str, settings: dict, fold: int, seed: int, made: dict) -> None:
            settings = json.loads(json.dumps(settings))  # as the results read back
            if (fold, seed) in of_model(results.cells, name, settings):
                return
            found = runners[models[name].kind](tasks[fold], name, settings, seed)
            results.add({"model": name, "settings": settings, "fold": fold, "seed": seed} | made | found)
            shown = f"validation AUC {found['validation']['auc']:.4f}, test AUC {found['test']['auc']:.4f}"
            print(f"{name}, fold {fold}, seed {seed}, {settings}: {shown}, {found['train_seconds']:.0f} s", flush=True)

        for name in names:
            model = models[name]
            made = {"protocol": protocol(table, model)} | where
            results.keep(name, made["protocol"])
            try:
                for trial in model.trials:
                    ensure(name, model.settings | trial, *runs[0], made)
            except SettingsError as error:
                print(f"{name}: left out; {error}", flush=True)
                continue
            settings = chosen(results.cells, name, model, runs)
            for fold, seed in runs:
                ensure(name, settings, fold, seed, made)


def environment() -> dict[str, object]:
    """Where trainings run."""
    return {
        "commit": report.commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else report.cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
