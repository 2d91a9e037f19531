"""Checkpoints that are complete or absent, and verified before anything is loaded.

A checkpoint is a folder such as `epoch-0003-batch-0000120`: three finished epochs and 120 batches of the fourth. It is
written under a name that begins with `.`, flushed to the disk, and then renamed, so a process that is killed at any
time leaves either the folder or a hidden one that is ignored. It holds the tensors (see
`jfi.training.checkpoints.tensor_files`), `progress.json`, the progress of the loop, and `SHA256SUMS`, the checksum of
every file. Nothing in it is a pickle. The processes of a run under torchrun write, verify and read a checkpoint
together, each its part, and any number of processes can read a checkpoint of any other number.
"""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from jfi.training.checkpoints.tensor_files import (
    INDEX,
    MismatchedCheckpointError,
    TensorLoadPlanner,
    TensorReader,
    TensorWriter,
)
from jfi.training.config import ConfigError
from jfi.training.distributed.processes import World
from jfi.utils.files import (
    DamagedFileError,
    by_number,
    check_sum,
    naming,
    read_sums,
    sha256_of,
    verify,
    write_sums,
    writing_folder,
)

T = TypeVar("T")
PROGRESS = "progress.json"
ALONE = World()
_NAME = re.compile(r"epoch-\d+-batch-\d+")


class DamagedCheckpointError(ConfigError):
    """A checkpoint with a file that is missing or damaged; the message is one line that names it."""


def checkpoint_name(epoch: int, batch: int) -> str:
    """The name of a checkpoint's folder; `by_number` sorts names by progress."""
    return f"epoch-{epoch:04d}-batch-{batch:07d}"


def save_checkpoint(folder: Path, name: str, state: dict, progress: dict, world: World = ALONE) -> None:
    """Writes `folder/name` completely or not at all; an existing checkpoint of that name is left unchanged.

    Args:
        folder: of all checkpoints of a run; created if it is missing. All processes of `world` must share it.
        name: the result of `checkpoint_name`.
        state: nested dict of tensors.
        progress: a dict that JSON can represent.
        world: the processes that call this together.

    Raises:
        FloatingPointError: a tensor has a value that is not finite; nothing is written.
        OSError: the storage is full or refuses; nothing is written.
    """
    final = folder / name
    with ExitStack() as stack:  # of the first process

        def begin() -> Path | None:
            return None if final.exists() else stack.enter_context(writing_folder(final))

        if (unfinished := world.on_first(begin)) is None:
            return
        writer = TensorWriter(unfinished)
        with naming(final), _plainly():
            dcp.save(state, storage_writer=writer, process_group=world.control, no_dist=not world.launched)

        def finish() -> None:
            with naming(final / PROGRESS):
                (unfinished / PROGRESS).write_text(json.dumps(progress, indent=1), encoding="utf-8")
            write_sums(unfinished, {**writer.sums, PROGRESS: sha256_of(unfinished / PROGRESS)})
            stack.close()

        world.on_first(finish)


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the most progress, or None."""
    return max(_complete(folder), key=by_number, default=None)


def read_progress(path: Path, kind: type[T] = dict) -> T:
    """The `progress` given to `save_checkpoint`, as a value of a type.

    Raises:
        DamagedCheckpointError: the file is missing or damaged.
    """
    verify(path, [PROGRESS], DamagedCheckpointError)
    try:  # with Infinity, which msgspec's JSON lacks
        return msgspec.convert(json.loads((path / PROGRESS).read_text(encoding="utf-8")), kind)
    except (ValueError, RecursionError) as fault:
        raise DamagedCheckpointError(f"{path / PROGRESS} is damaged: {fault}") from None


def verify_checkpoint(path: Path, world: World = ALONE) -> None:
    """Checks the SHA-256 of every file; the processes of `world` call it together and check a part each.

    Raises:
        DamagedCheckpointError: a file is missing or damaged.
    """

    def check() -> None:
        sums = read_sums(path)
        for name in (INDEX, PROGRESS, *sorted(sums.keys() - {INDEX, PROGRESS}))[world.rank :: world.size]:
            check_sum(path, name, sums)

    try:
        world.on_all(check)
    except DamagedFileError as fault:
        raise DamagedCheckpointError(str(fault)) from None


def load_checkpoint(path: Path, state: dict, world: World = ALONE) -> None:
    """Fills the tensors of `state` in place, after every file is verified; its keys may be a subset of the saved ones.

    The processes of `world` call it together, each with its shards. From the states of a run that has begun without
    weight decay `stepped_at` is removed: the optimizer then knows that no row has a penalty to come.

    Raises:
        DamagedCheckpointError: a file is missing or damaged.
        MismatchedCheckpointError: a tensor of `state` is not in the checkpoint, or has another shape there.
    """
    verify_checkpoint(path, world)
    try:
        reader, planner = TensorReader(path), TensorLoadPlanner()
        for table, states in state.get("optimizer", {}).get("state", {}).items():
            if not any(name.endswith(f".{table}.stepped_at") for name in reader.metadata.state_dict_metadata):
                states.pop("stepped_at", None)
        with _plainly():
            dcp.load(
                state, storage_reader=reader, planner=planner, process_group=world.control, no_dist=not world.launched
            )
    except MismatchedCheckpointError as fault:
        raise MismatchedCheckpointError(f"{path}: {fault}") from None
    except DamagedFileError as fault:
        raise DamagedCheckpointError(str(fault)) from None


def keep_checkpoints(folder: Path, names: set[str]) -> None:
    """Removes all other checkpoints and unfinished ones of killed processes."""
    for path in [*_complete(folder), *folder.glob(".epoch-*")]:
        if path.name not in names:
            # Renamed first, so that a kill during the removal cannot leave an incomplete checkpoint.
            doomed = path if path.name.startswith(".") else path.rename(folder / f".{path.name}")
            shutil.rmtree(doomed)


@contextmanager
def _plainly() -> Iterator[None]:
    """Raises the error of the first process that failed instead of DCP's CheckpointException.

    Suppresses the warnings that there is no process group and that ShardedTensor is deprecated.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning)
        try:
            yield
        except CheckpointException as failed:  # a BaseException
            error, _ = failed.failures[min(failed.failures)]
            raise error from None


def _complete(folder: Path) -> list[Path]:
    return [path for path in folder.glob("epoch-*") if _NAME.fullmatch(path.name)]
