"""The benchmark of several processes, at a size that shows no more than that it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import scaling_paper
from benchmarks.scaling import EXCHANGES

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_measure_a_step_beside_one(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # there may be one GPU alone
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    for processes in ("1", "2"):
        command = [*launcher, processes, "-m", "benchmarks.scaling", "--tiny", "--out", tmp_path, "--commit", "none"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert {row["exchange"] for row in rows} == set(EXCHANGES) and len(rows) == 2 * 2 * len(EXCHANGES)
    by_case = {(row["case"], row["exchange"], row["processes"]): row for row in rows}
    for (case, exchange, processes), row in by_case.items():
        alone = by_case[case, exchange, 1]
        assert row["efficiency"] == pytest.approx(row["queries_per_second"] / alone["queries_per_second"] / processes)
        assert (row["sent_bytes"] > 0) == (processes > 1)
        assert row["fastest_us"] <= row["step_us"] <= row["slowest_us"]


def test_the_paper_has_less_to_send_where_attention_goes_to_the_rows(capsys, monkeypatch):
    command = [
        "scaling_paper",
        "--config",
        str(ROOT / "configs/multi_gpu.yaml"),
        "--events",
        "200",
        "--gpus",
        "2",
        "64",
    ]
    monkeypatch.setattr(sys, "argv", command)
    scaling_paper.main()
    cells = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    beyond = {(int(cell[0][2:]), cell[1]): float(cell[3].replace(",", "")) for cell in cells}
    assert beyond[2, "rows, float32"] == 0 and beyond[64, "rows, float32"] == 89_600
    assert beyond[64, "attention, group_size 8"] < 300 < beyond[64, "attention, table_row_wise"] < 15_000
