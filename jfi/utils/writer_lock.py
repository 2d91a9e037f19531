"""The lock of a folder that one process at a time writes, in a file that names the process."""

import os
import socket
from contextlib import suppress
from pathlib import Path

from jfi.utils.files import lock

LOCK = ".lock"


class LockedError(Exception):
    """Another process holds the lock; the message names the process and the host."""


def acquire(folder: Path, patience: float = 0.0) -> int:
    """Makes a folder and takes its lock; returns the descriptor for `release`.

    The kernel releases the lock when the process ends, however it ends. Readers need no lock.

    Args:
        folder: that is written.
        patience: seconds to wait for another process.

    Raises:
        LockedError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not lock(descriptor, folder, patience):
            raise LockedError(os.pread(descriptor, 200, 0).decode(errors="replace") or "another process")
    except BaseException:
        os.close(descriptor)
        raise
    with suppress(OSError):  # on a full disk the lock has no name of its holder
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def release(descriptor: int) -> None:
    """Releases the lock of `acquire`."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
