"""Metrics sent to an experiment tracker, by a logger of Lightning's interface."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from own_table import config_of, row, write_table
from worker import without_pictures

from jfi.training import ConfigError, TrainingConfig, resume, train
from jfi.training.config_parser import load_config, save_config
from jfi.training.loop.trainer import Trainer
from jfi.training.run.recorder import SPEED, read_metrics

LOG_EVERY = 1


class Fake:
    """A logger that remembers; `fails_at` is the call of log_metrics that raises."""

    made: list["Fake"] = []  # noqa: RUF012

    def __init__(self, fails_at: int = -1, **options: object) -> None:
        self.fails_at, self.options, self.calls = fails_at, options, []
        if options.get("experiment_name") == "wrong":
            raise ValueError("no such experiment\nmore")
        self.made.append(self)

    def log_hyperparams(self, params: dict) -> None:
        self.calls.append(("params", params))

    def log_metrics(self, metrics: dict, step: int) -> None:
        if sum(name == "metrics" for name, *_ in self.calls) == self.fails_at:
            raise ConnectionError("the tracker is down")
        self.calls.append(("metrics", metrics, step))

    def finalize(self, status: str) -> None:
        self.calls.append(("finalize", status))


@pytest.fixture
def lightning(monkeypatch):
    """Stands in for lightning, wandb and mlflow, whose loggers it has."""
    Fake.made.clear()
    loggers = ModuleType("lightning.pytorch.loggers")
    loggers.WandbLogger, loggers.MLFlowLogger = (type(name, (Fake,), {}) for name in ("Wandb", "MLFlow"))
    for name in ("lightning", "lightning.pytorch", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__spec__=1))
    monkeypatch.setitem(sys.modules, "lightning.pytorch.loggers", loggers)
    return loggers


@pytest.fixture
def run(tmp_path):
    write_table(tmp_path / "table.csv", [row(i) for i in range(120)])

    def run(given: object = None, **training):
        with without_pictures():
            return train(
                config_of(tmp_path / "table.csv", tmp_path / "run", **{"epochs": 1, **training}),
                logger=given,
            )

    return run


def check_calls(logger: Fake, log: list[dict]) -> None:
    """The logger got the config and every line of metrics."""
    (_, params), *lines, last = logger.calls
    assert params["data"]["label"] == "clicked"
    assert last == ("finalize", "success")
    assert len(lines) == len(log) > 3
    for (_, metrics, step), line in zip(lines, log, strict=True):
        split = line["split"]
        skipped = ("split", "epoch", "step", "data")
        expected = {f"{split}/{name}": v for name, v in line.items() if name not in skipped and v is not None}
        assert step == line["step"]
        assert metrics == pytest.approx(expected, rel=1e-3, abs=0.06) and f"{split}/{SPEED}" in metrics


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_every_line_of_metrics_and_the_config_are_sent(run, tmp_path, lightning, monkeypatch, name):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "clicks")
    run(logger=name)
    (logger,) = Fake.made
    assert type(logger) is {"wandb": lightning.WandbLogger, "mlflow": lightning.MLFlowLogger}[name]
    assert logger.options == ({"experiment_name": "clicks"} if name == "mlflow" else {})  # W&B reads its own
    check_calls(logger, read_metrics(tmp_path / "run" / "metrics.jsonl"))


def test_code_gives_any_logger_to_a_new_run_and_to_one_that_goes_on(run, tmp_path):
    given, log = Fake(), tmp_path / "run" / "metrics.jsonl"
    run(given)
    check_calls(given, read_metrics(log))
    path = tmp_path / "run" / "config.yaml"
    save_config(load_config(path).with_training(epochs=3), path)
    given, known = Fake(), [line for line in read_metrics(log) if line["split"] != "test"]
    with without_pictures():
        resume(tmp_path / "run", config_changed="accept", logger=given)
    assert given.calls[0][1]["training"]["epochs"] == 3
    check_calls(given, read_metrics(log)[len(known) :])


def test_a_tracker_that_goes_down_does_not_end_the_training(run, caplog):
    given = Fake(fails_at=2)
    assert run(given).epochs == 1
    assert "training.logger failed, and gets no more metrics: ConnectionError: the tracker is down" in caplog.text
    assert [name for name, *_ in given.calls] == ["params", "metrics", "metrics"]


def test_a_tracker_that_refuses_the_config_gets_the_metrics(run, monkeypatch, caplog):
    monkeypatch.setattr(Fake, "log_hyperparams", lambda *_: int("x"))
    given = Fake()
    run(given)
    assert "training.logger failed, and does not get the config: ValueError: invalid literal" in caplog.text
    kinds = [kind for kind, *_ in given.calls]
    assert kinds == ["metrics"] * (len(kinds) - 1) + ["finalize"] and len(kinds) > 3


class Wandb(Fake):
    """Opens a run as W&B does, which Lightning's logger leaves open; `ended` are the exit codes of runs."""

    ended: list[int] = []  # noqa: RUF012

    @property
    def experiment(self) -> object:
        return sys.modules["wandb"].run

    def log_hyperparams(self, params: dict) -> None:
        super().log_hyperparams(params)
        wandb = sys.modules["wandb"]
        wandb.run = wandb.run or SimpleNamespace(finish=self.finish)

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)
        sys.modules["wandb"].run = None


@pytest.mark.parametrize("given", [Fake(), None], ids=["logger", "none"])
def test_a_run_of_wandb_that_the_logger_has_not_opened_stays_open(run, monkeypatch, given):
    """Such as that of the user's own code, in a callback or beside another logger."""
    ended, saved = [], Trainer.load_best
    wandb = SimpleNamespace(run=None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    def open_run(*arguments):
        wandb.run = SimpleNamespace(finish=lambda exit_code: ended.append(exit_code))
        saved(*arguments)

    monkeypatch.setattr(Trainer, "load_best", open_run)
    run(given)
    assert wandb.run is not None and not ended


@pytest.mark.parametrize(("fails", "joins", "codes"), [(False, False, [0]), (True, False, [1]), (False, True, [])])
def test_a_run_of_wandb_ends_with_the_training_that_opened_it(run, monkeypatch, fails, joins, codes):
    Wandb.ended.clear()
    own = SimpleNamespace() if joins else None
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=own))
    if fails:
        monkeypatch.setattr("jfi.training.loop.trainer.Trainer.load_best", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        run(Wandb())
    assert Wandb.ended == codes and sys.modules["wandb"].run is own


def test_a_run_that_fails_is_reported_as_failed(run, monkeypatch):
    monkeypatch.setattr("jfi.training.loop.trainer.Trainer.load_best", lambda *_: 1 / 0)
    given = Fake()
    with pytest.raises(ZeroDivisionError):
        run(given)
    assert given.calls[-1] == ("finalize", "failed")


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "jfi.training.run.recorder.importlib.util.find_spec", lambda name: None if name == "wandb" else 1
    )
    expected = "training.logger: wandb needs wandb, which is not installed: pip install wandb"
    with pytest.raises(ConfigError, match=expected):
        run(logger="wandb")
    assert not (tmp_path / "run").exists()


def test_a_logger_that_cannot_be_started_is_one_line(run, lightning, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "wrong")
    with pytest.raises(ConfigError, match=r"training.logger: mlflow cannot be started: ValueError: no such experiment"):
        run(logger="mlflow")


@pytest.mark.parametrize("name", ["tensorflow", "subprocess:Popen"])
def test_a_config_names_known_trackers_alone(name):
    with pytest.raises(ConfigError, match=f"training.logger: got '{name}', must be wandb, mlflow or null"):
        TrainingConfig(logger=name)
