"""One process at a time writes a run."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jfi.training.config import ConfigError
from jfi.training.distributed.processes import World
from jfi.utils.files import lock

LOCK = ".lock"
#: Seconds that a restarted process waits for the one that it replaces to be gone.
_PATIENCE = 30.0


@contextmanager
def writing_run(path: Path, world: World) -> Iterator[None]:
    """Makes the folder `path` and holds its lock; under torchrun the first process holds it for all.

    The kernel releases the lock when the process ends, however it ends. Readers need no lock.

    Raises:
        ConfigError: another process holds it; the message names the process and the host.
    """
    held: list[int] = []
    world.on_first(lambda: held.append(_acquire(path)))
    try:
        yield
    finally:
        for descriptor in held:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def _acquire(path: Path) -> int:
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _wait(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    with suppress(OSError):  # on a full disk the lock has no name of its holder
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _wait(path: Path, descriptor: int) -> None:
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not lock(descriptor, path, _PATIENCE if restarted else 0.0):
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        raise ConfigError(f"{path}: {holder} is writing this run")
