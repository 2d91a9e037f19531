"""Prediction and preparation on a full disk: one line that names a file or folder, and the storage's exit code."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from own_table import config_of, row, write_table
from test_disturbed_runs import file_system

from jfi.data import load_dataset
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.stages.column_files import new_map
from jfi.training import Config
from jfi.training.model.build_model import build_model
from jfi.training.run.saved_run import SavedRun
from jfi.utils.exit_codes import run_command


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Within the block no file may grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def config(tmp_path) -> Config:
    write_table(tmp_path / "table.csv", [row(i) for i in range(400)])
    return config_of(tmp_path / "table.csv", tmp_path / "run")


def assert_full(run: Callable[[], None], size: int, place: Path, capsys: pytest.CaptureFixture) -> None:
    capsys.readouterr()
    with no_file_beyond(size):
        assert run_command(run) == 3
    *hints, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {place}") and ": File too large" in line, line
    assert hints in ([], [f"{place} keeps what is done; call again to continue, or remove it"])


@pytest.mark.parametrize("size", [0, 100, 2000])
def test_a_prepared_dataset_that_has_no_space_is_one_line_and_goes_on_when_there_is(config, tmp_path, capsys, size):
    out = tmp_path / "out"
    assert_full(lambda: prepare_dataset(config.data, out), size, tmp_path / ".out.preparing", capsys)
    assert run_command(lambda: prepare_dataset(config.data, out)) == 0
    assert (out / "manifest.json").exists()


@pytest.mark.parametrize("size", [0, 1000, 4000])
def test_scores_that_have_no_space_are_one_line_and_leave_no_file(config, tmp_path, capsys, size):
    schema = load_dataset(config.data).schema
    model = build_model(config.model, config.encoder, schema).eval()
    work = tmp_path / "work"
    work.mkdir()

    def predict() -> None:
        run = SavedRun(tmp_path, config, schema, model)
        run.predict(tmp_path / "table.csv", out=work / "scores.csv")

    assert_full(predict, size, work, capsys)
    assert list(work.iterdir()) == []
    assert run_command(predict) == 0 and (work / "scores.csv").exists()


def test_a_map_without_space_is_an_error_and_not_the_end_of_the_process(tmp_path):
    with file_system(tmp_path / "disk", "64k") as disk:
        with pytest.raises(OSError, match="No space left on device"):
            new_map(disk / "large.npy", np.int64, 100_000)
        new_map(disk / "large.npy", np.int64, 1000)[:] = 1
