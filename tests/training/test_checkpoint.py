import json
import math
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from jfi.training.checkpoints import checkpoint
from jfi.training.checkpoints.checkpoint import (
    DamagedCheckpointError,
    MismatchedCheckpointError,
    checkpoint_name,
    keep_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    read_progress,
    save_checkpoint,
)
from jfi.utils.files import sha256_of, write_sums


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


def test_one_process_of_a_distributed_program_saves_and_loads_alone(tmp_path, monkeypatch):
    """It does not wait for the others."""

    def wait(*_, **__):
        raise AssertionError("a collective")

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for name in ("gather_object", "scatter_object_list", "all_gather_object", "broadcast_object_list"):
            monkeypatch.setattr(torch.distributed, name, wait)
        save_checkpoint(tmp_path, checkpoint_name(1, 0), state(4.0), {})
        filled = state(0.0)
        load_checkpoint(latest_checkpoint(tmp_path), filled)
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(filled["model"]["weight"], torch.full((3, 2), 4.0))


def test_saving_and_loading_warn_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path, checkpoint_name(1, 0), state(4.0), {})
        load_checkpoint(latest_checkpoint(tmp_path), state(0.0))


def test_latest_is_the_furthest(tmp_path):
    assert latest_checkpoint(tmp_path / "absent") is None
    for epoch, batch in [(9, 0), (10, 0), (10, 3), (2, 500)]:
        save_checkpoint(tmp_path, checkpoint_name(epoch, batch), state(0.0), {})
    assert latest_checkpoint(tmp_path).name == checkpoint_name(10, 3)
    # With more digits than a name is padded to.
    for epoch, batch in [(10, 9_999_999), (10, 10_000_000), (9_999, 99_999_999), (10_000, 0), (10_000, 123_456_789)]:
        save_checkpoint(tmp_path, checkpoint_name(epoch, batch), state(0.0), {})
        assert latest_checkpoint(tmp_path).name == checkpoint_name(epoch, batch)


@pytest.mark.parametrize(
    "stage",
    ["training.checkpoints.tensor_files.sha256_of", "training.checkpoints.checkpoint.json.dumps", "utils.files.sync"],
)
def test_death_before_the_rename_leaves_no_checkpoint(tmp_path, monkeypatch, stage):
    save_checkpoint(tmp_path, checkpoint_name(1, 0), state(1.0), {})

    def die(*_, **__):
        raise SystemExit("killed")

    with monkeypatch.context() as patched:
        patched.setattr(f"jfi.{stage}", die)
        with pytest.raises(SystemExit):
            save_checkpoint(tmp_path, checkpoint_name(2, 0), state(2.0), {})
    assert latest_checkpoint(tmp_path).name == checkpoint_name(1, 0)

    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(1, 0)]

    save_checkpoint(tmp_path, checkpoint_name(2, 0), state(3.0), {})
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


def test_tensors_of_every_type_and_shape_are_as_they_were(tmp_path):
    saved = {
        "bfloat16": torch.randn(3, 5).bfloat16(),
        "half": torch.randn(7).half(),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.tensor(2**62 + 1),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "float64": torch.randn(2, 3, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 3).T,
        "nested": {"name": torch.randn(1)},
    }
    save_checkpoint(tmp_path, checkpoint_name(1, 0), saved, {})
    filled = {name: torch.zeros_like(tensor) for name, tensor in saved.items() if name != "nested"}
    filled["nested"] = {"name": torch.zeros(1)}
    load_checkpoint(tmp_path / checkpoint_name(1, 0), filled)
    for name, tensor in saved.items():
        if name != "nested":
            assert torch.equal(filled[name], tensor) and filled[name].dtype == tensor.dtype
    assert torch.equal(filled["nested"]["name"], saved["nested"]["name"])


def test_the_tensors_are_safetensors_files(tmp_path):
    """Read here by what the format's description says: no gaps, aligned, all bytes in use."""
    save_checkpoint(tmp_path, checkpoint_name(1, 0), {**state(4.0), "half": torch.ones(3).half()}, {})
    content = (tmp_path / checkpoint_name(1, 0) / "rank-0.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    assert length % 8 == 0
    weight = header["model.weight"]
    assert (weight["dtype"], weight["shape"]) == ("F32", [3, 2])
    begin, end = weight["data_offsets"]
    assert torch.equal(torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32), torch.full((6,), 4.0))
    spans = sorted(tensor["data_offsets"] for tensor in header.values())
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])] and spans[-1][1] == len(data)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_tensor_that_is_not_finite_is_never_saved(tmp_path, value):
    save_checkpoint(tmp_path, checkpoint_name(1, 0), state(1.0), {})
    diverged = state(2.0)
    diverged["model"]["weight"][1, 1] = value
    with pytest.raises(FloatingPointError, match=r"^model\.weight is not finite$"):
        save_checkpoint(tmp_path, checkpoint_name(2, 0), diverged, {})
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(1, 0)]


def test_a_model_of_another_shape_is_not_called_damage(tmp_path):
    save_checkpoint(tmp_path, checkpoint_name(1, 0), state(1.0), {})
    path = latest_checkpoint(tmp_path)
    other = state(0.0)
    other["model"]["weight"] = torch.zeros(4, 2)
    with pytest.raises(
        MismatchedCheckpointError, match=r"model\.weight has the shape \(3, 2\) in the checkpoint and \(4, 2\)"
    ):
        load_checkpoint(path, other)
    with pytest.raises(MismatchedCheckpointError, match=r"the checkpoint has no tensor model\.bias"):
        load_checkpoint(path, {"model": {"bias": torch.zeros(3)}})


def test_what_is_no_tensor_is_refused(tmp_path):
    with pytest.raises(TypeError, match="tensors only; model is none"):
        save_checkpoint(tmp_path, checkpoint_name(1, 0), {"model": "a text"}, {})
    assert list(tmp_path.iterdir()) == []


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def forge(folder: Path, **files: bytes) -> None:
    """Writes files into a checkpoint with the checksums that they need."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_sums(folder, {path.name: sha256_of(path) for path in folder.iterdir() if path.name[0] not in ".S"})


def test_a_checkpoint_of_torch_with_code_in_its_metadata_is_refused_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / checkpoint_name(1, 0)
    dcp.save(state(1.0), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    forge(path, **{".metadata": pickle.dumps(Evil()), "progress.json": b"{}"})
    with pytest.raises(DamagedCheckpointError, match=r"SHA256SUMS does not list tensors\.json"):
        load_checkpoint(path, state(0.0))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(state(0.0), storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert (tmp_path / "ran").exists()  # torch's reader runs it


@pytest.mark.parametrize("name", ["tensors.json", "progress.json", "rank-0.safetensors", ".metadata"])
def test_code_in_any_file_with_a_matching_checksum_does_not_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path, checkpoint_name(1, 0), state(1.0), {})
    path = latest_checkpoint(tmp_path)
    forge(path, **{name: pickle.dumps(Evil())})
    if name == ".metadata":  # a file that nobody reads
        load_checkpoint(path, state(0.0))
    else:
        with pytest.raises(DamagedCheckpointError, match=r"(json|rank-0\.safetensors) is damaged"):
            read_progress(path)
            load_checkpoint(path, state(0.0))
    assert not (tmp_path / "ran").exists()


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, checkpoint_name(1, 0), state(1.0), {"epoch": 1})

    def refuse(*_, **__):
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    filled = state(0.0)
    load_checkpoint(latest_checkpoint(tmp_path), filled)
    assert read_progress(latest_checkpoint(tmp_path)) == {"epoch": 1}
    assert filled["model"]["weight"][0, 0] == 1.0


CHUNK = {"offsets": [0, 0], "shape": [3, 2], "file": "rank-0.safetensors"}


@pytest.mark.parametrize(
    "tensor",
    [
        {"chunks": [{**CHUNK, "file": "../rank-0.safetensors"}]},
        {"chunks": [{**CHUNK, "file": "/etc/passwd"}]},
        {"chunks": [{**CHUNK, "begin": 8}]},
        {"chunks": [{**CHUNK, "offsets": [-1, 0]}]},
        {"chunks": [{**CHUNK, "offsets": [True, 0]}]},
        {"chunks": [{**CHUNK, "offsets": [1, 0]}]},
        {"chunks": [{**CHUNK, "shape": [2, 2]}]},
        {"chunks": []},
        {"dtype": "object"},
        {"shape": [3, 2, 1]},
        {"shape": [10**30]},
    ],
)
def test_an_index_that_was_forged_is_refused(tmp_path, tensor):
    save_checkpoint(tmp_path, checkpoint_name(1, 0), state(1.0), {})
    path = latest_checkpoint(tmp_path)
    index = json.loads((path / "tensors.json").read_text())
    index["model.weight"] = {**index["model.weight"], **tensor}
    forge(path, **{"tensors.json": json.dumps(index).encode()})
    with pytest.raises(DamagedCheckpointError, match=r"tensors\.json is damaged: .*"):
        load_checkpoint(path, state(0.0))
