"""Runs that follow a log and are killed at any point go on to the same bits."""

import random
import shutil
from pathlib import Path

import pytest
from training.forked_runs import ForkedRuns, forked_runs

from jfi.training import train
from jfi.training.config_parser import save_config

from .comparing import assert_same, content
from .followed_log import FEATURES, GROWING, config_of, make_rows, write, write_parts


@pytest.fixture(scope="module")
def server():
    with forked_runs() as server:
        yield server


@pytest.fixture(scope="module")
def base(server: ForkedRuns, tmp_path_factory) -> tuple[Path, int]:
    """A folder with a run that has ended, parts, the same run after it has followed them, and its number of calls."""
    folder = tmp_path_factory.mktemp("kills")
    rows = make_rows(900, items=150)
    rows[-30]["timestamp"] -= 3000.0  # a late row
    write(folder / "log.parquet", rows[:500])
    write_parts(folder / "parts", [*rows[500:], rows[600]], 6)
    # New items take the rows of older ones: a batch has at most 80, and there are 150.
    data = {"statistics": ["item", "user", "similar"], "features": [*GROWING[2:], *FEATURES], "max_history": 4}
    config = config_of(folder / "log.parquet", folder / "run", **data).with_training(batch_size=16, admit_every=3)
    save_config(config, folder / "config.yaml")
    train(config)
    shutil.copytree(folder / "run", folder / "whole")
    outcome = follow(server, folder, folder / "whole")
    assert (outcome.code, outcome.errors.count("error")) == (0, 0), outcome.errors
    assert len(content(folder / "whole")["state"]) > 100
    return folder, outcome.calls


def follow(server: ForkedRuns, folder: Path, run: Path, **more: object):
    return server.do(folder / "config.yaml", run, follow=str(folder / "parts"), **more)


@pytest.mark.parametrize("kills", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_has_the_same_bits(server, base, tmp_path, record_property, kills):
    record_property("cases", kills)
    folder, calls = base
    draw, killed, number = random.Random(kills), 0, 0
    assert calls > 300
    while killed < kills:
        run = tmp_path / f"run-{number}"
        number += 1
        shutil.copytree(folder / "run", run)
        for _ in range(40):
            seconds = draw.choice([0.0, 0.3, 100.0])
            outcome = follow(server, folder, run, kill=draw.randrange(calls), options={"checkpoint_seconds": seconds})
            if outcome.code == 0:
                break
            assert outcome.code == -9, outcome.errors
            killed += 1
        else:
            assert follow(server, folder, run).code == 0
        assert_same(run, folder / "whole")


def test_the_time_of_checkpoints_influences_no_bit(server, base, tmp_path):
    folder, _ = base
    shutil.copytree(folder / "run", tmp_path / "run")
    assert follow(server, folder, tmp_path / "run", options={"checkpoint_seconds": 1e6}).code == 0
    assert_same(tmp_path / "run", folder / "whole")


def test_a_state_that_is_behind_or_gone_is_made_anew(server, base, tmp_path):
    folder, _ = base
    shutil.copytree(folder / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "follow" / "state")
    assert follow(server, folder, tmp_path / "run").code == 0
    assert_same(tmp_path / "run", folder / "whole")
