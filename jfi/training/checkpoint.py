"""Checkpoints with torch.distributed.checkpoint that are complete or absent.

A checkpoint is a folder such as `epoch-0003-batch-0000120`: three finished epochs and 120 batches of the fourth. It is
written under a name that begins with `.`, flushed to the disk, and then renamed, so a process that is killed at any
time leaves either the folder or a hidden one that is ignored. It holds the tensors and `progress.json`, the progress of
the loop. The processes of a run under torchrun write and read a checkpoint together, each its shards, and any number of
processes can read a checkpoint of any other number.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from jfi.training.distributed import World


class DamagedCheckpointError(Exception):
    """A checkpoint that cannot be read; the message is one line."""


ALONE = World()
_NAME = re.compile(r"epoch-\d+-batch-\d+")


def checkpoint_name(epoch: int, batch: int) -> str:
    """The name of a checkpoint's folder; names sort by progress."""
    return f"epoch-{epoch:04d}-batch-{batch:07d}"


def save_checkpoint(folder: Path, name: str, state: dict, progress: dict, world: World = ALONE) -> None:
    """Writes `folder/name` completely or not at all; an existing checkpoint of that name is left unchanged.

    Args:
        folder: of all checkpoints of a run; created if it is missing. All processes of `world` must share it.
        name: the result of `checkpoint_name`.
        state: nested dict of tensors.
        progress: a dict that JSON can represent.
        world: the processes that call this together.
    """
    unfinished = folder / f".{name}"
    if not world.on_first(lambda: _begin(unfinished, folder / name)):
        return
    with _quietly():
        writer = dcp.FileSystemWriter(unfinished, sync_files=True)
        dcp.save(state, storage_writer=writer, process_group=world.control, no_dist=not world.launched)
    world.on_first(lambda: _finish(unfinished, folder / name, progress))


def _begin(unfinished: Path, final: Path) -> bool:
    """Makes an empty folder to write to and returns True, unless the checkpoint exists."""
    if final.exists():
        return False
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return True


def _finish(unfinished: Path, final: Path, progress: dict) -> None:
    with open(unfinished / "progress.json", "w") as file:
        json.dump(progress, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(unfinished)
    unfinished.rename(final)
    _sync_folder(final.parent)


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the most progress, or None."""
    return max(_complete(folder), key=lambda path: path.name, default=None)


def read_progress(path: Path) -> dict:
    """The `progress` given to `save_checkpoint`."""
    return json.loads((path / "progress.json").read_text())


def load_checkpoint(path: Path, state: dict, world: World = ALONE) -> None:
    """Fills the tensors of `state` in place; its keys may be a subset of the saved ones.

    The processes of `world` call it together, each with its shards.

    Raises:
        DamagedCheckpointError: a file is missing or damaged, or a tensor of `state` is not in the checkpoint.
    """
    try:
        with _quietly():
            reader = dcp.FileSystemReader(path)
            dcp.load(state, storage_reader=reader, process_group=world.control, no_dist=not world.launched)
    except (
        CheckpointException,
        Exception,
    ) as error:  # CheckpointException is a BaseException
        raise DamagedCheckpointError(f"the tensors in {path} are missing or damaged") from error


def keep_checkpoints(folder: Path, names: set[str]) -> None:
    """Removes all other checkpoints and unfinished ones of killed processes."""
    for path in [*_complete(folder), *folder.glob(".epoch-*")]:
        if path.name not in names:
            # Renamed first, so that a kill during the removal cannot leave an incomplete checkpoint.
            doomed = path if path.name.startswith(".") else path.rename(folder / f".{path.name}")
            shutil.rmtree(doomed)


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppresses the warnings that there is no process group and that ShardedTensor is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def _complete(folder: Path) -> list[Path]:
    return [path for path in folder.glob("epoch-*") if _NAME.fullmatch(path.name)]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
