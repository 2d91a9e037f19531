"""A run that has ended, and the rows of the log that it follows."""

import shutil
from pathlib import Path

import pytest

from jfi.training import train

from .followed_log import KNOWN, config_of, make_rows, write


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return make_rows(500)


@pytest.fixture(scope="module")
def trained(rows, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("follow")
    write(folder / "log.parquet", rows[:KNOWN])
    train(config_of(folder / "log.parquet", folder / "run"))
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr("jfi.follow.plot.draw_windows", lambda *_: None)
