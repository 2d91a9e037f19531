"""Checkpoints through torch.distributed.checkpoint that are whole or absent.

A checkpoint is a folder `epoch-0003-batch-0000120`: three epochs done and 120 batches of the fourth. It is written
under a name beginning with `.`, flushed to the disk, and only then renamed; a process killed at any moment leaves
either the folder or rubbish that nobody takes for one. Beside the tensors lies `progress.json`, what the loop has to
know. The processes of a launched run write and read a checkpoint together, each its shards; any number of them reads
what any other number wrote.
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
    """A checkpoint that cannot be read."""


ALONE = World()
_NAME = re.compile(r"epoch-\d+-batch-\d+")


def checkpoint_name(epoch: int, batch: int) -> str:
    """The folder's name; names sort by progress."""
    return f"epoch-{epoch:04d}-batch-{batch:07d}"


def save_checkpoint(folder: Path, name: str, state: dict, progress: dict, world: World = ALONE) -> None:
    """Writes `folder/name` whole or not at all; one that is there already is left as it is.

    Args:
        folder: of all checkpoints of a run; made if it is not there. All processes of `world` must see the same one.
        name: of `checkpoint_name`.
        state: nested dict of tensors.
        progress: what JSON can hold.
        world: the processes that call this together.
    """
    torn = folder / f".{name}"
    if not world.on_first(lambda: _begin(torn, folder / name)):
        return
    with _quietly():
        writer = dcp.FileSystemWriter(torn, sync_files=True)
        dcp.save(state, storage_writer=writer, process_group=world.control, no_dist=not world.launched)
    world.on_first(lambda: _finish(torn, folder / name, progress))


def _begin(torn: Path, whole: Path) -> bool:
    """Makes an empty folder to write into, unless the checkpoint is there."""
    if whole.exists():
        return False
    shutil.rmtree(torn, ignore_errors=True)
    torn.mkdir(parents=True)
    return True


def _finish(torn: Path, whole: Path, progress: dict) -> None:
    with open(torn / "progress.json", "w") as file:
        json.dump(progress, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(torn)
    torn.rename(whole)
    _sync_folder(whole.parent)


def latest_checkpoint(folder: Path) -> Path | None:
    """The whole checkpoint that has come furthest, or None."""
    return max(_whole(folder), key=lambda path: path.name, default=None)


def read_progress(path: Path) -> dict:
    """The `progress` given to `save_checkpoint`."""
    return json.loads((path / "progress.json").read_text())


def load_checkpoint(path: Path, state: dict, world: World = ALONE) -> None:
    """Fills the tensors of `state` in place; its keys may be a part of those saved.

    The processes of `world` call it together, each with its shards.

    Raises:
        DamagedCheckpointError: a file is missing, cut off or no checkpoint's, or a tensor is not in it.
    """
    try:
        with _quietly():
            reader = dcp.FileSystemReader(path)
            dcp.load(state, storage_reader=reader, process_group=world.control, no_dist=not world.launched)
    except (CheckpointException, Exception) as error:  # the first is a BaseException, and wraps whatever went wrong
        raise DamagedCheckpointError(f"the tensors in {path} are missing or damaged") from error


def keep_checkpoints(folder: Path, names: set[str]) -> None:
    """Removes every other checkpoint and what a killed process left half-written."""
    for path in [*_whole(folder), *folder.glob(".epoch-*")]:
        if path.name not in names:
            # Renamed first, so that a kill in the middle of the removal cannot leave a torn folder under a whole name.
            doomed = path if path.name.startswith(".") else path.rename(folder / f".{path.name}")
            shutil.rmtree(doomed)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the warnings that there is no process group, which is meant, and that TorchRec's ShardedTensor is old."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def _whole(folder: Path) -> list[Path]:
    return [path for path in folder.glob("epoch-*") if _NAME.fullmatch(path.name)]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
