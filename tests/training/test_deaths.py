"""Processes of torchrun that die or fail: what the others do, and how the run goes on."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ROOT, assert_same_metrics, environment, free_port, tiny, write_tables
from worker import without_pictures

from jfi.training import Config, train
from jfi.training.config_parser import save_config
from jfi.training.run.recorder import read_metrics

LOG_EVERY = 1

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("deaths")
    write_tables(path)
    return path


def torchrun(folder: Path, config: Config, deaths: list) -> tuple[subprocess.CompletedProcess, list[int]]:
    """How torchrun ended that starts two processes, once more than they die, and all processes that it started."""
    path = folder / f"{Path(config.training.run_dir).name}.yaml"
    save_config(config, path)
    restarts = sum(phase != "error" for phase, _ in deaths)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [f"--max_restarts={restarts}", ROOT / "tests/training/dying.py", json.dumps(deaths), "--config", path]
    mark = f"{os.getpid()}-{path.stem}"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "JFI_TEST_MARK": mark}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"JFI_TEST_MARK={mark}\0".encode() in (process / "environ").read_bytes():
                left.append(int(process.name))
        except OSError:  # it has ended, or is not ours
            continue
    return ended, left


def test_a_process_that_dies_in_any_phase_is_restarted(folder):
    """Each start but the last ends in another phase; the checkpoints are those of steps 5, 10, ..."""
    config = tiny(folder, "killed", "rowwise_adagrad", "row_wise", epochs=3)
    deaths = [["ids", 7], ["forward", 13], ["backward", 31], ["checkpoint", 44]]
    ended, left = torchrun(folder, config, deaths)
    assert ended.returncode == 0, ended.stderr
    assert not left
    assert re.findall("dies in (.*)", ended.stdout) == [phase for phase, _ in deaths]
    assert len(re.findall("epoch 1: validation", ended.stdout)) == 1  # it went on, and did not begin again
    assert ended.stdout.count("best epoch") == 1
    with without_pictures():
        train(tiny(folder, "alone", "rowwise_adagrad", epochs=3))
    assert_same_metrics(folder / "killed", folder / "alone", steps=63)
    assert not list((folder / "killed/checkpoints").glob(".*"))
    assert all((folder / "killed" / name).exists() for name in ("curves.png", "attention.png"))


def test_processes_that_end_badly_say_why_and_leave_no_orphan(folder):
    ended, left = torchrun(folder, tiny(folder, "failed"), [["error", 7]])
    assert ended.returncode != 0
    assert "RuntimeError: this process ends badly" in ended.stderr
    assert not left
    assert read_metrics(folder / "failed/metrics.jsonl")  # it had begun


def refused(folder: Path, *options: list[str]) -> list[tuple[int, str]]:
    """The exit code and the last line on stderr of two processes of one run, each with its options."""
    save_config(tiny(folder, "refused", "rowwise_adagrad", "row_wise"), folder / "refused.yaml")
    port, processes = str(free_port()), []
    for rank in range(2):
        command = [sys.executable, "-m", "jfi", "train", "--config", folder / "refused.yaml", *options[rank]]
        environ = {**os.environ, **environment(rank, 2), "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=300)[1] for process in processes]
    lines = [[line for line in error.splitlines() if line.startswith("error: ")] for error in errors]
    assert not any("terminate called" in error or "Traceback" in error for error in errors), errors
    return [(process.returncode, line) for process, line in zip(processes, lines, strict=True)]


def test_what_no_process_can_do_is_one_line_of_the_first(folder):
    size = ["--training.batch_size", "41"]
    line = "process 1 was started with other settings than process 0: training.batch_size was 40 and is 41"
    assert refused(folder, [], size) == [(2, [f"error: {line}"]), (2, [])]
    group = ["--sharding.group_size", "3"]
    line = "sharding.group_size: got 3, must be a divisor of the number of processes, 2"
    assert refused(folder, group, group) == [(2, [f"error: {line}"]), (2, [])]
    large = ["--data.features", "[{name: item_id, of: item, hash_buckets: 4294967296}]"]
    (code, (line,)), other = refused(folder, large, large)
    assert line.startswith("error: sharding: TorchRec's planner found no plan: ")
    assert (code, other) == (2, (2, []))
    assert not (folder / "refused").exists()
