"""The examples run as they are, and learn; tests/test_docs.py runs dataframe_to_scores.py as the page shows it."""

import runpy
from pathlib import Path

import pytest

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
    small = ["--data.synthetic.num_users", "60", "--training.epochs", "1", "--training.device", "cpu"]
    result = run("train_dlrm.py", "--config", config, *small)["result"]
    assert result.best_epoch == 1 and Path(result.run_dir, "config.yaml").exists()
