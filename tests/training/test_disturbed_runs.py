"""Runs that are killed at a write, or whose storage is full, end with the bits of a run that nothing disturbed."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from data_configs import replace_data
from forked_runs import ForkedRuns, forked_runs
from test_run import assert_same_run, tiny, tiny_data

from jfi.data.config import LabelConfig
from jfi.training import EncoderConfig
from jfi.training.config_parser import save_config
from jfi.training.distributed.processes import World
from jfi.training.run.run_folder import writing_run
from jfi.training.run.saved_run import load_run

LOG_EVERY = 4


@pytest.fixture(scope="module")
def server():
    with forked_runs() as server:
        yield server


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A run with all that has a state of its own, which a checkpoint keeps: each alone is tested by its file."""
    training = {"eval_every": 5, "gradient_accumulation_steps": 2, "admit_every": 5, "max_grad_norm": 1.0}
    config = tiny(None, epochs=2, checkpoint_every=4, **training)
    labels = [LabelConfig("like", "rating >= 4"), LabelConfig("love", "rating >= 5")]
    data = replace_data(tiny_data(num_users=30), label=None, labels=labels, statistics="auto", capacity={"item": 35})
    encoder = EncoderConfig(num_layers=1, dropout=0.1)
    config = dataclasses.replace(config, data=data, encoder=encoder)
    config.optimizer = dataclasses.replace(config.optimizer, schedule="cosine", warmup_steps=5)
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
def test_a_run_killed_at_any_write_is_continued_to_the_same_bits(
    server, config, whole, tmp_path, record_property, points
):
    record_property("cases", points)
    path, calls = whole
    assert calls > 60
    for point in sorted({round(i * (2 * calls - 1) / (points - 1)) for i in range(points)}):
        run = tmp_path / f"killed-{point}"
        assert server.do(config, run, kill=point).code == -9
        assert_finishes(server, config, run, path)


@pytest.mark.parametrize("points", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_space(
    server, config, whole, tmp_path, record_property, points
):
    record_property("cases", points)
    path, calls = whole
    # The last calls remove the temporary folder of the last file, and empty the lock.
    for point in sorted({round(i * (calls - 5) / (points - 1)) for i in range(points)}):
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


@contextmanager
def file_system(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size; skips the test where mounting it is not allowed."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["16k", "64k", "128k", "256k", "512k"])
def test_a_full_file_system_is_one_line_and_the_run_goes_on_when_there_is_space(server, config, whole, tmp_path, size):
    with file_system(tmp_path / "disk", size) as disk:
        outcome = server.do(config, disk / "run")
        if outcome.code:
            assert_one_line(outcome.errors, "No space left on device")
            assert outcome.code == 3
        if (disk / "run").exists():
            shutil.copytree(disk / "run", tmp_path / "run")
    assert_finishes(server, config, tmp_path / "run", whole[0])


@pytest.mark.slow
def test_a_read_only_run_can_be_exported_and_resuming_it_is_one_line(server, config, whole, tmp_path):
    with file_system(tmp_path / "disk", "8m") as disk:
        assert server.do(config, disk / "run", kill=round(1.8 * whole[1])).code == -9
        before = {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        outcome = server.do(config, disk / "run")
        assert_one_line(outcome.errors, "Read-only file system")
        assert outcome.code == 3
        load_run(disk / "run")
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        assert {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()} == before
        assert_finishes(server, config, disk / "run", whole[0])


@pytest.mark.slow
def test_processes_under_torchrun_refuse_a_damaged_shard_and_a_locked_run_in_one_line(tmp_path):
    config = tiny(tmp_path / "run", epochs=1)
    config.optimizer.ema_decay = None
    config.sharding.type = "row_wise"
    save_config(config, tmp_path / "config.yaml")

    def launch(*arguments: object) -> tuple[int, list[str]]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command += ["-m", "jfi", "train", *arguments]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        return done.returncode, [line for line in done.stderr.splitlines() if line.startswith("error: ")]

    assert launch("--config", tmp_path / "config.yaml") == (0, [])
    (shard,) = (tmp_path / "run").rglob("rank-1.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    code, lines = launch("--resume", tmp_path / "run")
    assert code and len(lines) == 1 and f"{shard} is damaged" in lines[0], lines
    content[-1] ^= 1
    shard.write_bytes(content)
    with writing_run(tmp_path / "run", World()):
        code, lines = launch("--resume", tmp_path / "run")
    assert code and len(lines) == 1 and f"process {os.getpid()} on" in lines[0], lines
    assert launch("--resume", tmp_path / "run") == (0, [])


def assert_one_line(errors: str, part: str) -> None:
    lines = errors.splitlines()
    assert Counter(line.startswith("error: ") for line in lines) == {True: 1}, errors
    assert part in lines[0], errors
