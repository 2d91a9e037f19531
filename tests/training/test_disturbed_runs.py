"""Runs that are killed at a write, or whose storage is full, end with the bits of a run that nothing disturbed."""

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from forked_runs import ForkedRuns, forked_runs
from test_run import assert_same_run, tiny

from jfi.training.cli import save_config


@pytest.fixture(scope="module")
def server():
    with forked_runs() as server:
        yield server


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    config = tiny(None, epochs=2, checkpoint_every=4)
    config.data.synthetic.num_users = 40
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    save_config(config, path)
    return path


@pytest.fixture(scope="module")
def whole(server: ForkedRuns, config: Path, tmp_path_factory) -> tuple[Path, int]:
    """A run that nothing disturbed, and the number of its calls that order writes."""
    path = tmp_path_factory.mktemp("whole") / "run"
    outcome = server.do(config, path)
    assert (outcome.code, outcome.errors) == (0, "")
    return path, outcome.calls


def assert_finishes(server: ForkedRuns, config: Path, run: Path, whole: Path) -> None:
    outcome = server.do(config, run)
    assert outcome.code == 0, outcome.errors
    assert_same_run(whole, run)


@pytest.mark.parametrize("points", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_write_is_continued_to_the_same_bits(server, config, whole, tmp_path, points):
    path, calls = whole
    assert calls > 60
    for point in sorted({round(i * (2 * calls - 1) / (points - 1)) for i in range(points)}):
        run = tmp_path / f"killed-{point}"
        assert server.do(config, run, kill=point).code == -9
        assert_finishes(server, config, run, path)


@pytest.mark.parametrize("points", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_space(server, config, whole, tmp_path, points):
    path, calls = whole
    for point in sorted(
        {round(i * (calls - 2) / (points - 1)) for i in range(points)}
    ):  # the last call empties the lock
        run = tmp_path / f"full-{point}"
        outcome = server.do(config, run, full=point)
        assert_one_line(outcome.errors, "No space left on device")
        assert outcome.code == 3
        assert_finishes(server, config, run, path)


@pytest.mark.parametrize("size", [1000, 12_000, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_file_that_may_not_grow_is_one_line_and_nothing_is_lost(server, config, whole, tmp_path, size):
    run = tmp_path / "run"
    outcome = server.do(config, run, fsize=size)
    assert_one_line(outcome.errors, "File too large")
    assert outcome.code == 3
    assert_finishes(server, config, run, whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [16, 64, 128, 256, 512])
def test_a_full_file_system_is_one_line_and_the_run_goes_on_when_there_is_space(
    server, config, whole, tmp_path, kilobytes
):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        outcome = server.do(config, disk / "run")
        if outcome.code:
            assert_one_line(outcome.errors, "No space left on device")
            assert outcome.code == 3
        shutil.copytree(disk / "run", tmp_path / "run") if (disk / "run").exists() else None
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert_finishes(server, config, tmp_path / "run", whole[0])


def assert_one_line(errors: str, part: str) -> None:
    lines = errors.splitlines()
    assert Counter(line.startswith("error: ") for line in lines) == {True: 1}, errors
    assert part in lines[0], errors
