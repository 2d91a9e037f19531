"""One process at a time writes a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jfi.training.config import ConfigError
from jfi.training.distributed.processes import World
from jfi.utils.writer_lock import LockedError, acquire, release

#: Seconds that a restarted process waits for the one that it replaces to be gone.
_PATIENCE = 30.0


@contextmanager
def writing_run(path: Path, world: World) -> Iterator[None]:
    """Makes the folder `path` and holds its lock; under torchrun the first process holds it for all.

    Raises:
        ConfigError: another process holds it; the message names the process and the host.
    """
    held: list[int] = []
    world.on_first(lambda: held.append(_acquire(path)))
    try:
        yield
    finally:
        for descriptor in held:
            release(descriptor)


def _acquire(path: Path) -> int:
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    try:
        return acquire(path, _PATIENCE if restarted else 0.0)
    except LockedError as holder:
        raise ConfigError(f"{path}: {holder} is writing this run") from None
