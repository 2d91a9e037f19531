"""The examples run as they are, and learn; tests/test_docs.py runs dataframe_to_scores.py as the page shows it."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_data import options

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns the variables of an example that has run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> dict[str, object]:
        monkeypatch.setattr("sys.argv", [name, *arguments])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


def test_a_torchrec_model_learns_from_its_history(run):
    found = run("torchrec_layer.py")
    assert found["loss"].item() < 0.1 < found["constant"].item()


def test_a_dlrm_trains_by_a_config(run):
    config = str(EXAMPLES.parent / "configs/quickstart.yaml")
    small = [*options(num_users=60), "--training.epochs", "1", "--training.device", "cpu"]
    result = run("train_dlrm.py", "--config", config, *small)["result"]
    assert result.best_epoch == 1 and Path(result.run_dir, "config.yaml").exists()


@pytest.mark.slow
def test_a_log_is_followed_and_served(run, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    small = ["--first-hours", "3", "--hours", "2", "--rows", "600", "--publish-every", "0"]
    run("online.py", *small, "--epochs", "1")
    found = capsys.readouterr().out
    assert found.count("$ jfi ") == 5
    line = r"hour (\d): AUC (0\.\d+) by version (\d+).*, (0\.\d+) by the first; served \d"
    (*before, first), (*after, last) = re.findall(line, found)
    assert before[0] == "3" and before[2] == "1" and before[1] == first  # nothing was learned yet
    assert after[0] == "4" and int(after[2]) > 1 and after[1] != last
    mean = {name: float(auc) for auc, name in re.findall(r"(0\.\d+) mean AUC, (.*)", found)}
    assert mean["as served"] == pytest.approx(mean["the trainer's own"], abs=0.01)
    assert mean["as served"] != mean["the model of the beginning"]


def test_a_loop_that_fails_says_what_has_failed(tmp_path):
    command = [sys.executable, str(EXAMPLES / "online.py"), "--out", str(tmp_path / "out"), "--first-hours", "1"]
    ended = subprocess.run([*command, "--epochs", "0"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "train ended with exit code 2: error: " in ended.stderr
