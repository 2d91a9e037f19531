"""Lines of progress where there is no terminal, and the loop that shows them."""

import io
import itertools
import threading
import time
from collections.abc import Callable

import pytest
from own_table import config_of, row, write_table
from test_run import tiny

from jfi.data import load_dataset
from jfi.data.prepared import prepare
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.scoring import Sources
from jfi.training.distributed.processes import World
from jfi.training.loop.trainer import Trainer
from jfi.training.model.build_model import build_model
from jfi.training.run.recorder import SPEED, read_metrics
from jfi.training.run.run_data import save_data
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.scores import scored
from jfi.utils.display import Display

LOG_EVERY = 4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_a_line_every_30_seconds():
    seconds = itertools.count(0.0, 12.0)  # 0 at the start, then 12, 24, 36, ...
    out = io.StringIO()
    with Display("epoch 2", 1000, 200, clock=lambda: next(seconds), stream=out) as display:
        for _ in range(8):
            display.update(100, lambda: {"step": 1234, "loss": 0.5})
    # 300 samples in 36 s, then 600 in 72 s; 500 and 200 samples are left.
    assert out.getvalue().splitlines() == [
        "epoch 2: 50% of 1,000 samples, 8.3 samples/s, step 1,234, loss 0.5000, 01:00 left",
        "epoch 2: 80% of 1,000 samples, 8.3 samples/s, step 1,234, loss 0.5000, 00:24 left",
    ]


def test_a_short_task_and_a_silent_process_write_nothing():
    out, seconds = io.StringIO(), itertools.count(0.0, 29.0)
    with Display("test", 10, clock=lambda: next(seconds), stream=out) as display:
        display.update(10)
    with Display("test", 10, clock=lambda: next(seconds), stream=out, interval=0.0, silent=True) as display:
        display.update(10)
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar_and_no_lines():
    out = Terminal()
    with Display("epoch 1", 10, clock=itertools.count(0.0, 100.0).__next__, stream=out) as display:
        display.update(5)
        display.bar.refresh()
    assert "epoch 1:  50%" in out.getvalue() and "left" not in out.getvalue()


def test_a_task_of_unknown_length_shows_what_is_done_and_the_time():
    out, seconds = io.StringIO(), itertools.count(0.0, 40.0)
    with Display("read", None, clock=lambda: next(seconds), stream=out, unit="rows") as display:
        display.update(0)
        display.update(8000)
    assert out.getvalue().splitlines() == ["read: 00:40 so far", "read: 8,000 rows, 100 rows/s, 01:20 so far"]


def test_a_ticking_task_writes_lines_while_nothing_is_done():
    seconds, out, threads = itertools.count(0.0, 40.0), io.StringIO(), threading.active_count()
    with Display("read", None, clock=lambda: next(seconds), stream=out, interval=0.0, ticking=True):
        while out.getvalue().count("\n") < 2:
            time.sleep(0.01)
    assert out.getvalue().splitlines()[:2] == ["read: 00:40 so far", "read: 01:20 so far"]
    assert threading.active_count() == threads  # nobody writes any more


@pytest.fixture
def shown(monkeypatch, capsys) -> Callable[[], list[str]]:
    """Gives the lines written to stderr since the last call, where a line is due at any time."""
    monkeypatch.setitem(Display.__init__.__kwdefaults__, "interval", 0.0)
    return lambda: capsys.readouterr().err.splitlines()


def test_loading_writes_lines_to_a_log_while_a_file_is_read_and_while_rows_are_sorted(tmp_path, shown, monkeypatch):
    write_table(tmp_path / "table.csv", [row(i) for i in range(200)])
    lines: list[str] = []
    for name in ("read_rows", "sort_rows", "order_and_split", "write_prepared"):
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
    with scored(model, Sources(str(tmp_path / "table.csv")), schema, config.data):
        pass
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
        assert "samples/s, step " in line and ", loss 0." in line and line.endswith(" left")
    assert "loss" not in by_task["test:"][0]


def test_metrics_hold_the_samples_a_second(slow_run):
    log = read_metrics(slow_run[0] / "metrics.jsonl")
    assert all(line[SPEED] > 0 for line in log)
    # Four steps of 64 samples, at two looks at the clock a step: by the loop, and by the display.
    assert log[1]["split"] == "train" and log[1][SPEED] == pytest.approx(4 * 64 / 45, rel=0.2)
