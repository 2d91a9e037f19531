"""What a saved run writes besides its results."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet
import pytest
from own_table import config_of, row, write_table
from worker import without_pictures

from jfi.training import train
from jfi.training.run.saved_run import load_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a table and a run of it."""
    folder = tmp_path_factory.mktemp("trained")
    write_table(folder / "table.csv", [row(i) for i in range(200)])
    with without_pictures():
        train(config_of(folder / "table.csv", folder / "run", epochs=1))
    return folder


def test_temporary_files_are_beside_the_scores(folder, tmp_path, monkeypatch):
    """The system's folder may be too small."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    load_run(folder / "run").predict(folder / "table.csv", out=tmp_path / "scores.parquet")
    load_run(folder / "run").evaluate(folder / "table.csv", out=tmp_path / "again.parquet")
    tables = [pyarrow.parquet.read_table(tmp_path / name) for name in ("scores.parquet", "again.parquet")]
    assert tables[0] == tables[1] and len(tables[0]) == 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.parquet", "scores.parquet"]


def test_one_row_is_scored(folder, tmp_path):
    run = load_run(folder / "run")
    write_table(tmp_path / "one.csv", [row(0)])
    whole = run.predict(folder / "table.csv")
    one = run.predict(tmp_path / "one.csv")
    assert one.column("score").to_pylist() == pytest.approx(whole.column("score").to_pylist()[:1], abs=1e-6)


def test_a_command_prints_no_warning_of_torch_that_users_cannot_change(folder, tmp_path):
    command = [sys.executable, "-m", "jfi", "predict", "--run", folder / "run", "--interactions", folder / "table.csv"]
    command += ["--out", tmp_path / "scores.csv", "--device", "cpu"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
