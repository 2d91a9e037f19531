"""Metrics sent to an experiment tracker, by a logger of Lightning's interface."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from own_table import config_of, row, write_table
from worker import without_pictures

from jfi.training import ConfigError, TrainingConfig, train
from jfi.training.logger import find_logger
from jfi.training.loop import Trainer
from jfi.training.recorder import SPEED, read_metrics


class Fake:
    """A logger that remembers; `fails_at` is the call of log_metrics that raises."""

    made: list["Fake"] = []  # noqa: RUF012

    def __init__(self, project: str = "", fails_at: int = -1) -> None:
        self.project, self.fails_at, self.calls = project, fails_at, []
        if project == "wrong":
            raise ValueError("no such project\nmore")
        self.made.append(self)

    def log_hyperparams(self, params: dict) -> None:
        self.calls.append(("params", params))

    def log_metrics(self, metrics: dict, step: int) -> None:
        if sum(name == "metrics" for name, *_ in self.calls) == self.fails_at:
            raise ConnectionError("the tracker is down")
        self.calls.append(("metrics", metrics, step))

    def finalize(self, status: str) -> None:
        self.calls.append(("finalize", status))


@pytest.fixture(autouse=True)
def module(monkeypatch):
    Fake.made.clear()
    module = ModuleType("fake_tracker")
    module.Fake = Fake
    monkeypatch.setitem(sys.modules, "fake_tracker", module)


@pytest.fixture
def run(tmp_path):
    write_table(tmp_path / "table.csv", [row(i) for i in range(120)])

    def run(**training):
        with without_pictures():
            return train(config_of(tmp_path / "table.csv", tmp_path / "run", epochs=1, log_every=1, **training))

    return run


def test_every_line_of_metrics_and_the_config_are_sent(run, tmp_path):
    run(logger="fake_tracker:Fake", logger_options={"project": "clicks"})
    (logger,) = Fake.made
    assert logger.project == "clicks"
    (_, params), *lines, last = logger.calls
    assert params["data"]["label"] == "clicked" and params["training"]["logger"] == "fake_tracker:Fake"
    assert last == ("finalize", "success")
    log = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == len(log) > 3
    for (_, metrics, step), line in zip(lines, log, strict=True):
        split = line["split"]
        skipped = ("split", "epoch", "step", "data")
        expected = {f"{split}/{name}": v for name, v in line.items() if name not in skipped and v is not None}
        assert step == line["step"]
        assert metrics == pytest.approx(expected, rel=1e-3, abs=0.06) and f"{split}/{SPEED}" in metrics


def test_a_tracker_that_goes_down_does_not_end_the_training(run, caplog):
    result = run(logger="fake_tracker:Fake", logger_options={"fails_at": 2})
    assert result.epochs == 1
    assert "training.logger failed, and gets no more metrics: ConnectionError: the tracker is down" in caplog.text
    assert [name for name, *_ in Fake.made[0].calls] == ["params", "metrics", "metrics"]


def test_a_tracker_that_refuses_the_config_gets_the_metrics(run, monkeypatch, caplog):
    monkeypatch.setattr(Fake, "log_hyperparams", lambda *_: int("x"))
    run(logger="fake_tracker:Fake")
    assert "training.logger failed, and does not get the config: ValueError: invalid literal" in caplog.text
    kinds = [kind for kind, *_ in Fake.made[0].calls]
    assert kinds == ["metrics"] * (len(kinds) - 1) + ["finalize"] and len(kinds) > 3


class Wandb(Fake):
    """Opens a run as W&B does, which Lightning's logger leaves open; `ended` are the exit codes of runs."""

    ended: list[int] = []  # noqa: RUF012

    def log_hyperparams(self, params: dict) -> None:
        super().log_hyperparams(params)
        wandb = sys.modules["wandb"]
        wandb.run = wandb.run or SimpleNamespace(finish=self.finish)

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)
        sys.modules["wandb"].run = None


@pytest.mark.parametrize("logger", ["fake_tracker:Fake", None])
def test_a_run_of_wandb_that_the_logger_has_not_opened_stays_open(run, monkeypatch, logger):
    """Such as that of the user's own code, in a callback or beside another logger."""
    ended, saved = [], Trainer.load_best
    wandb = SimpleNamespace(run=None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    def open_run(*arguments):
        wandb.run = SimpleNamespace(finish=lambda exit_code: ended.append(exit_code))
        saved(*arguments)

    monkeypatch.setattr(Trainer, "load_best", open_run)
    run(logger=logger)
    assert wandb.run is not None and not ended


@pytest.mark.parametrize(("fails", "joins", "codes"), [(False, False, [0]), (True, False, [1]), (False, True, [])])
def test_a_run_of_wandb_ends_with_the_training_that_opened_it(run, monkeypatch, fails, joins, codes):
    Wandb.ended.clear()
    own = SimpleNamespace() if joins else None
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=own))
    monkeypatch.setattr(sys.modules["fake_tracker"], "Fake", Wandb)
    if fails:
        monkeypatch.setattr("jfi.training.loop.Trainer.load_best", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        run(logger="fake_tracker:Fake")
    assert Wandb.ended == codes and sys.modules["wandb"].run is own


def test_a_run_that_fails_is_reported_as_failed(run, monkeypatch):
    monkeypatch.setattr("jfi.training.loop.Trainer.load_best", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(logger="fake_tracker:Fake")
    assert Fake.made[0].calls[-1] == ("finalize", "failed")


def test_what_cannot_be_used_is_refused_before_anything_is_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr("jfi.training.logger.importlib.util.find_spec", lambda name: None if name == "wandb" else 1)
    for training, expected in (
        ({"logger": "wandb"}, "training.logger: wandb needs wandb, which is not installed: pip install wandb"),
        ({"logger": "tensorflow"}, "training.logger: got 'tensorflow', must be wandb, mlflow, null, or a class as"),
        ({"logger": "absent_module:X"}, "training.logger: 'absent_module:X' cannot be imported: No module named"),
        ({"logger": "fake_tracker:Absent"}, "training.logger: fake_tracker has no class 'Absent'"),
    ):
        with pytest.raises(ConfigError, match=expected):
            run(**training)
    assert not (tmp_path / "run").exists()
    with pytest.raises(
        ConfigError, match=r"training.logger_options: the logger cannot be made: ValueError: no such project"
    ):
        run(logger="fake_tracker:Fake", logger_options={"project": "wrong"})
    with pytest.raises(ConfigError, match=r"training.logger_options: got .*, must be \{\} without training.logger"):
        TrainingConfig(logger_options={"project": "clicks"})


def test_the_short_names_are_lightnings_loggers(monkeypatch):
    loggers = ModuleType("lightning.pytorch.loggers")
    loggers.WandbLogger, loggers.MLFlowLogger = (type(name, (Fake,), {}) for name in ("Wandb", "MLFlow"))
    for name in ("lightning", "lightning.pytorch", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__spec__=1))
    monkeypatch.setitem(sys.modules, "lightning.pytorch.loggers", loggers)
    assert find_logger(TrainingConfig(logger="wandb")) is loggers.WandbLogger
    assert find_logger(TrainingConfig(logger="mlflow")) is loggers.MLFlowLogger
    assert find_logger(TrainingConfig()) is None
