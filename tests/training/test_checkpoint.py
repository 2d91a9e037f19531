import pytest
import torch

from jfi.training import checkpoint
from jfi.training.checkpoint import (
    checkpoint_name,
    keep_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    read_progress,
    save_checkpoint,
)


def state(value: float) -> dict:
    return {
        "model": {"weight": torch.full((3, 2), value)},
        "optimizer": {"state": {"weight": {"step": torch.tensor(2)}}},
    }


def test_round_trip(tmp_path):
    save_checkpoint(tmp_path, checkpoint_name(1, 20), state(4.0), {"epoch": 1})
    path = latest_checkpoint(tmp_path)
    filled = state(0.0)
    load_checkpoint(path, filled)
    assert torch.equal(filled["model"]["weight"], torch.full((3, 2), 4.0))
    assert read_progress(path) == {"epoch": 1}


def test_latest_is_the_furthest(tmp_path):
    assert latest_checkpoint(tmp_path / "absent") is None
    for epoch, batch in [(9, 0), (10, 0), (10, 3), (2, 500)]:
        save_checkpoint(tmp_path, checkpoint_name(epoch, batch), state(0.0), {})
    assert latest_checkpoint(tmp_path).name == checkpoint_name(10, 3)


@pytest.mark.parametrize("stage", ["training.tensor_files.sha256_of", "training.checkpoint.json.dumps", "files.sync"])
def test_death_before_the_rename_leaves_no_checkpoint(tmp_path, monkeypatch, stage):
    save_checkpoint(tmp_path, checkpoint_name(1, 0), state(1.0), {})

    def die(*_, **__):
        raise SystemExit("killed")

    with monkeypatch.context() as patched:
        patched.setattr(f"jfi.{stage}", die)
        with pytest.raises(SystemExit):
            save_checkpoint(tmp_path, checkpoint_name(2, 0), state(2.0), {})
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [f".{checkpoint_name(2, 0)}"]
    assert latest_checkpoint(tmp_path).name == checkpoint_name(1, 0)

    save_checkpoint(tmp_path, checkpoint_name(2, 0), state(3.0), {})  # the torn one is in nobody's way
    filled = state(0.0)
    load_checkpoint(latest_checkpoint(tmp_path), filled)
    assert filled["model"]["weight"][0, 0] == 3.0


def test_keep_removes_the_rest(tmp_path):
    for batch in range(3):
        save_checkpoint(tmp_path, checkpoint_name(0, batch), state(0.0), {})
    (tmp_path / ".epoch-0000-batch-0000009").mkdir()
    keep_checkpoints(tmp_path, {checkpoint_name(0, 0), checkpoint_name(0, 2)})
    assert sorted(p.name for p in tmp_path.iterdir()) == [checkpoint_name(0, 0), checkpoint_name(0, 2)]


def test_a_kill_during_removal_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    for batch in range(2):
        save_checkpoint(tmp_path, checkpoint_name(0, batch), state(0.0), {})

    def die(*_, **__):
        raise SystemExit("killed")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", die)
    with pytest.raises(SystemExit):
        keep_checkpoints(tmp_path, {checkpoint_name(0, 0)})
    assert latest_checkpoint(tmp_path).name == checkpoint_name(0, 0)


def test_a_present_checkpoint_is_not_written_again(tmp_path):
    save_checkpoint(tmp_path, checkpoint_name(1, 0), state(1.0), {})
    before = (tmp_path / checkpoint_name(1, 0)).stat().st_mtime_ns
    save_checkpoint(tmp_path, checkpoint_name(1, 0), state(1.0), {})
    assert (tmp_path / checkpoint_name(1, 0)).stat().st_mtime_ns == before
