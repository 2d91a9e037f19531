"""Locks of files and folders that the kernel releases when their process ends, however it ends."""

import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: EBADF is what NFS says of a folder.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


def try_lock(descriptor: int) -> bool | None:
    """Locks an open file or folder; False if another process holds it, None on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def lock(descriptor: int, path: Path, patience: float = 0.0) -> bool:
    """Locks an open file or folder; False if another process holds it.

    On a file system without locks it prints a warning.

    Args:
        descriptor: of the open file or folder; closing it releases the lock.
        path: its name for the warning.
        patience: seconds to wait for another process.
    """
    deadline = time.monotonic() + patience
    while (locked := try_lock(descriptor)) is False and time.monotonic() < deadline:
        time.sleep(0.1)
    if locked is None:
        print(f"warning: {path} is on a file system without locks; start no other process on it", file=sys.stderr)
    return locked is not False


@contextmanager
def locking_folder(folder: Path) -> Iterator[bool]:
    """Holds the lock of an existing folder, in which nothing is written; yields False if another process holds it.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> with locking_folder(folder) as first, locking_folder(folder) as second:
        ...     first, second
        (True, False)
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield lock(descriptor, folder)
    finally:
        os.close(descriptor)
