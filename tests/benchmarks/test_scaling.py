"""The benchmark of several processes, at a size that shows no more than that it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_measure_a_step_beside_one(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # there may be one GPU alone
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    for processes in ("1", "2"):
        command = [*launcher, processes, "-m", "benchmarks.scaling", "--tiny", "--out", tmp_path, "--commit", "none"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert [row["processes"] for row in rows] == [1, 2]
    assert rows[1]["efficiency"] == pytest.approx(rows[1]["queries_per_second"] / rows[0]["queries_per_second"] / 2)
    assert any("All2All" in kernel["name"] for kernel in rows[1]["kernels"])
