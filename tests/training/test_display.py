"""Lines of progress where there is no terminal, and the loop that shows them."""

import io
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable

import pytest
from own_table import config_of, row, write_table
from test_run import tiny

from jfi.data import load_dataset
from jfi.data.prepared import prepare
from jfi.data.prepared.prepare import prepare_dataset
from jfi.training.distributed.processes import World
from jfi.training.loop.trainer import Trainer
from jfi.training.model.build_model import build_model
from jfi.training.run.recorder import SPEED, read_metrics
from jfi.training.run.run_data import save_data
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.saved_run import SavedRun
from jfi.utils import display
from jfi.utils.display import Display

LOG_EVERY = 4


class Err(io.StringIO):
    """Stands in for stderr; `sys.stderr` is another one in the fixtures of a test than in the test."""

    def __init__(self, is_terminal: bool = False) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.fixture
def due_at_once(monkeypatch):
    """A line is due after 0.05 s."""
    monkeypatch.setattr(display, "INTERVAL", 0.05)


def test_a_log_file_gets_a_line_whenever_one_is_due(due_at_once, monkeypatch):
    monkeypatch.setattr(sys, "stderr", written := Err())
    with Display("epoch 2", 1000, 200) as shown:
        for _ in range(2):
            time.sleep(0.06)
            shown.update(300, lambda: {"step": 1234, "loss": 0.5})
            shown.update(0, pytest.fail)  # no line is due, so nothing waits for the loss
    number, left = r"[\d.]+", r"\d\d:\d\d left"
    for share, line in zip((50, 80), written.getvalue().splitlines(), strict=True):
        wanted = rf"epoch 2: {share}% of 1000 samples, {number} samples/s, step=1234, loss=0.5, {left}"
        assert re.fullmatch(wanted, line), line


def test_a_short_task_and_a_silent_process_write_nothing(monkeypatch, capsys):
    with Display("test", 10) as shown:
        shown.update(10)
    monkeypatch.setattr(display, "INTERVAL", 0.0)
    with Display("test", 10, silent=True, ticking=True) as shown:
        shown.update(10)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_and_no_lines(due_at_once, monkeypatch):
    monkeypatch.setattr(sys, "stderr", written := Err(is_terminal=True))
    with Display("epoch 1", 10) as shown:
        shown.update(5)
        shown.refresh()
    assert "epoch 1:  50%" in written.getvalue() and "left" not in written.getvalue()


def test_a_task_of_unknown_length_shows_what_is_done_and_the_time(due_at_once, monkeypatch):
    monkeypatch.setattr(sys, "stderr", written := Err())
    with Display("read", None, unit="rows") as shown:
        time.sleep(0.06)
        shown.update(8000)
    assert re.fullmatch(r"read: 8000 rows, [\d.]+ rows/s, 00:00 so far\n", written.getvalue())


def test_the_parts_of_several_processes_never_pass_the_total(due_at_once, monkeypatch):
    monkeypatch.setattr(sys, "stderr", written := Err())
    with Display("epoch 1", 10) as shown:
        time.sleep(0.06)
        shown.update(12)
    assert written.getvalue().startswith("epoch 1: 100% of 10 samples")


def test_a_ticking_task_writes_lines_while_nothing_is_done(due_at_once, monkeypatch):
    monkeypatch.setattr(sys, "stderr", written := Err())
    threads = threading.active_count()
    with Display("read", None, ticking=True):
        while written.getvalue().count("\n") < 2:
            time.sleep(0.01)
    assert written.getvalue().splitlines()[1].startswith("read: 0 samples")
    assert threading.active_count() == threads  # nobody writes any more


@pytest.fixture
def shown(monkeypatch, capsys) -> Callable[[], list[str]]:
    """Gives the lines written to stderr since the last call, where a line is due at any time."""
    monkeypatch.setattr(display, "INTERVAL", 0.0)
    return lambda: capsys.readouterr().err.splitlines()


def test_loading_writes_lines_to_a_log_while_a_file_is_read_and_while_rows_are_sorted(tmp_path, shown, monkeypatch):
    write_table(tmp_path / "table.csv", [row(i) for i in range(200)])
    lines: list[str] = []
    for name in ("RowReader", "sort_rows", "order_and_split", "write_prepared"):
        slow = getattr(prepare, name)

        def slower(*arguments: object, slow: Callable = slow) -> object:
            lines.extend(shown())
            before = len(lines)
            while len(lines) == before:
                time.sleep(0.01)
                lines.extend(shown())
            return slow(*arguments)

        monkeypatch.setattr(prepare, name, slower)
    load_dataset(config_of(tmp_path / "table.csv", tmp_path / "run").data)
    tasks = {line.split(":")[0] for line in [*lines, *shown()]}
    assert tasks == {"read", "sort", "split", "encode and write"}


def test_prediction_and_preparation_write_lines_to_a_log(tmp_path, shown):
    write_table(tmp_path / "table.csv", [row(i) for i in range(200)])
    config = config_of(tmp_path / "table.csv", tmp_path / "run")
    prepare_dataset(config.data, tmp_path / "out")
    schema = load_dataset(config.data).schema
    model = build_model(config.model, config.encoder, schema)
    SavedRun(tmp_path, config, schema, model).predict(tmp_path / "table.csv")
    tasks = {line.split(":")[0] for line in shown()}
    assert {"read", "sort", "split", "predict"} <= tasks
    prepare_dataset(config.data, tmp_path / "silent", show=False)
    assert shown() == []


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory):
    """A run whose every look at the clock takes 5 seconds, and the text that it wrote to stderr."""
    path = tmp_path_factory.mktemp("slow") / "run"
    config = tiny(path, epochs=1, eval_batch_size=8)
    seconds, err = itertools.count(0.0, 5.0), io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.stderr", err)
        patched.setattr(display, "INTERVAL", 0.0)
        for name in ("draw_curves", "draw_attention"):
            patched.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
        dataset, run = load_dataset(config.data), RunFolder.create(config)
        save_data(run, dataset)
        trainer = Trainer(config, dataset, World(), clock=lambda: next(seconds))
        trainer.fit(run)
    return path, err.getvalue()


def test_training_and_evaluation_write_lines_to_a_log(slow_run):
    lines = slow_run[1].splitlines()
    by_task = {task: [line for line in lines if line.startswith(task)] for task in ("epoch 1:", "validation:", "test:")}
    assert all(by_task.values()), lines
    for line in by_task["epoch 1:"]:
        assert "samples/s, step=" in line and ", loss=0." in line and line.endswith(" left")
    assert "loss" not in by_task["test:"][0]


def test_metrics_hold_the_samples_a_second(slow_run):
    log = read_metrics(slow_run[0] / "metrics.jsonl")
    assert all(line[SPEED] > 0 for line in log)
    # Four steps of 64 samples, at a look at the clock a step.
    assert log[1]["split"] == "train" and log[1][SPEED] == pytest.approx(4 * 64 / 20, rel=0.2)
