"""The comparison at its smallest, and the configs that the repository ships."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jfi.training.cli import load_config

ROOT = Path(__file__).parents[2]


def test_compare_pooling(tmp_path):
    arguments = [
        *["--config", ROOT / "configs/quickstart.yaml", "--seeds", "0", "1", "--training.run_dir", "out"],
        *["--data.synthetic.num_users", "60", "--training.epochs", "1", "--training.batch_size", "256"],
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "examples/compare_pooling.py", *map(str, arguments)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.startswith("test split"))
    names = [line.split("  ")[0] for line in lines[head + 1 : lines.index("", head)]]
    assert (names[0], names[-4:]) == ("item mean", ["gradient boosting", "none", "mean", "attention"])

    record = json.loads((tmp_path / "out/comparison.json").read_text())
    assert list(record["summary"]) == [*record["baselines"], *record["runs"]] == names
    boosting = record["baselines"]["gradient boosting"]
    assert len(boosting) == 2 and record["summary"]["gradient boosting"]["test_ne"]["mean"] == boosting[0]["test"]["ne"]
    assert record["seeds"] == [0, 1]
    for pooling, runs in record["runs"].items():
        assert [Path(run["run_dir"]).name for run in runs] == [f"{pooling}-seed0", f"{pooling}-seed1"]
        mean = record["summary"][pooling]["test_auc"]["mean"]
        assert mean == pytest.approx((runs[0]["test"]["auc"] + runs[1]["test"]["auc"]) / 2)
        assert (tmp_path / "out" / f"{pooling}-seed0" / "curves.png").exists()
    assert f"{record['summary']['attention']['test_auc']['mean']:.4f}" in lines[head + len(names)]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path):
    config = load_config(path)
    config.data.check()
    assert not any(str(value).startswith("/") for value in vars(config.data).values())
