"""Files that are written whole or not at all, and folders whose files are verified by SHA-256; standard library."""

import errno
import fcntl
import glob
import hashlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

#: The checksums of the other files of a folder, in the layout of `sha256sum`, whose `-c` verifies it.
SUMS = "SHA256SUMS"
#: In a folder that one process at a time writes, the file that it holds locked, see `locking`.
LOCK = ".lock"
#: What opening a path raises that is no file.
NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_WRONG_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}
#: EBADF is what NFS says of a folder.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
#: In a temporary folder, the file that its process holds locked, and the folder of what it writes.
_WRITER, _FILES = ".jfi-writer", "files"
_LINE = re.compile(r"([0-9a-f]{64})  (\w[\w.-]*)")


class DamagedFileError(ValueError):
    """A file that is missing or is not what was written; the message is one line that names it."""


def by_number(path: str | Path) -> tuple[list[str | int], str]:
    """Returns the key that sorts paths by name, with a number in a name by its value.

    Example:
        >>> sorted(["part-10", "part-9", "part-100000", "part-99999"], key=by_number)
        ['part-9', 'part-10', 'part-99999', 'part-100000']
    """
    text = str(path)
    parts = re.split("([0-9]+)", text)  # text and digits alternate
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], text


@contextmanager
def writing_file(path: Path) -> Iterator[Path]:
    """Yields a path of the same name to write to; when the block ends the file is flushed and replaces `path`.

    If the block raises, `path` is as before. Of several processes that write a path, each has a file of its own; the
    last one that ends replaces it.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> with writing_file(folder / "result.json") as unfinished:
        ...     _ = unfinished.write_text("{}")
        >>> [path.name for path in folder.iterdir()]
        ['result.json']
    """
    with temporary_folder(_prefix(path), path.parent, path) as folder:
        unfinished = folder / path.name
        with naming(path):
            yield unfinished
            sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)


@contextmanager
def writing_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder on the disk of `folder`; when the block ends its files are flushed and it gets the name.

    Raises:
        FileExistsError: `folder` exists.
        OSError: another process is writing it.
    """
    if folder.exists():
        raise FileExistsError(errno.EEXIST, "file exists", str(folder))
    if not folder.parent.exists():
        folder.parent.mkdir(parents=True)
        sync(folder.parent.parent)
    if _remove_left(_prefix(folder), folder.parent):
        raise OSError(errno.EBUSY, "another process is writing it", str(folder))
    with temporary_folder(_prefix(folder), folder.parent, folder) as unfinished:
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        unfinished.rename(folder)
        sync(folder.parent)


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None, name: Path | None = None) -> Iterator[Path]:
    """Yields an empty folder below a new one in `parent`, None for that of the system; both are removed afterwards.

    Signals whose handlers raise, such as Ctrl-C, do not leave it behind. One that a killed process has left is removed
    with the next folder of the same prefix and parent on this machine: it holds a file that says which machine wrote
    it, whose lock ends with the process.

    Args:
        prefix: of the new folder's name.
        parent: of the new folder.
        name: what an error says where the folder cannot be made; None for the folder itself.
    """
    parent = Path(tempfile.gettempdir() if parent is None else parent)
    made: list[Path] = []
    descriptor = None
    try:
        with _postponed_signals():
            try:
                _remove_left(prefix, parent)
                made.append(Path(tempfile.mkdtemp(prefix=prefix, dir=parent)))
                descriptor = os.open(made[0] / _WRITER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                try_lock(descriptor)
                os.write(descriptor, _machine())  # last: before, nobody takes the folder for one that was left
                (made[0] / _FILES).mkdir()
            except OSError as error:
                error.filename = str(name or error.filename or parent)
                raise
        yield made[0] / _FILES
    finally:
        with _postponed_signals():
            for folder in made:
                _remove(folder)
            if descriptor is not None:
                os.close(descriptor)


def _prefix(path: Path) -> str:
    return f"{unfinished_name(path).name}-"


def _machine() -> bytes:
    """The machine since it was started: another one may not see the locks of this one, or be seen by it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return socket.gethostname().encode()


def _remove(folder: Path) -> None:
    for path in (folder / _FILES, folder):  # killed in between, the folder is still known as one that was left
        shutil.rmtree(path, ignore_errors=True)


def _remove_left(prefix: str, parent: Path) -> bool:
    """Removes temporary folders of processes of this machine that were killed; returns whether one's process lives."""
    lives = False
    for path in parent.glob(f"{glob.escape(prefix)}*/{_WRITER}"):
        with suppress(OSError):  # not ours, or gone
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.read(descriptor, 100) == _machine() and not path.parent.is_symlink():
                    locked = try_lock(descriptor)
                    lives |= locked is False
                    if locked:
                        _remove(path.parent)
            finally:
                os.close(descriptor)
    return lives


@contextmanager
def _postponed_signals() -> Iterator[None]:
    """Handles SIGINT and SIGTERM after the block. Python handles signals in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    numbers = signal.SIGINT, signal.SIGTERM
    previous = [signal.signal(number, lambda signum, _: caught.append(signum)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
        for number in caught:
            signal.raise_signal(number)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an OSError that names no file the name `path`: a write to a full disk says only that there is no space."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def reading_file(path: str | Path, fault: type[Exception]) -> Iterator[None]:
    """Turns an OSError that says that `path` is no file into a `fault`; one of the storage stays and gets the name.

    Example:
        >>> with reading_file("gone.csv", ValueError):
        ...     open("gone.csv")
        Traceback (most recent call last):
        ValueError: gone.csv: no such file or directory
    """
    try:
        with naming(Path(path)):
            yield
    except OSError as error:
        if is_storage_fault(error):
            raise
        raise fault(f"{path}: {(error.strerror or 'cannot be read').lower()}") from error


def is_storage_fault(error: Exception) -> bool:
    """Returns whether the storage is at fault (no rights, an I/O error), and not the path or what the file holds."""
    # Libraries that find a file damaged raise an OSError without a number.
    return isinstance(error, OSError) and error.errno is not None and error.errno not in _WRONG_PATH


def write_file(path: Path, content: bytes | str) -> None:
    """Writes `path` whole or not at all: a process that is killed at any time leaves the old file or the new one."""
    with writing_file(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


def unfinished_name(path: Path) -> Path:
    """Returns the beginning of the name under which `path` is written; a killed process may leave it behind."""
    return path.with_name(f".{path.name}.unfinished")


def absolute_path(path: str) -> str:
    """The path from the root on, of a home folder too; an empty path stays empty."""
    return os.path.abspath(os.path.expanduser(path)) if path else path


def sync(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path, sums: Mapping[str, str], name: str = SUMS) -> None:
    """Writes `folder/SHA256SUMS`, which ends with its own checksum in a comment.

    Args:
        folder: of the files.
        sums: SHA-256 by name of file, without folders.
        name: of the file that is written.
    """
    lines = "".join(f"{sums[one]}  {one}\n" for one in sorted(sums))
    write_file(folder / name, f"{lines}# {_digest(lines)}\n")


def read_sums(folder: Path, name: str = SUMS) -> dict[str, str]:
    """Returns what `write_sums` wrote.

    Raises:
        DamagedFileError: it is missing or damaged.
    """
    path = folder / name
    try:
        return parse_sums(path, path.read_bytes())
    except NO_FILE:
        raise DamagedFileError(f"{path} is missing") from None


def parse_sums(path: Path, content: bytes) -> dict[str, str]:
    """Returns what `write_sums` wrote, from the content of the file `path`.

    Raises:
        DamagedFileError: it is damaged.
    """
    lines, comment, end = content.decode("ascii", "replace").rpartition("# ")
    found = [_LINE.fullmatch(line) for line in lines.split("\n")[:-1]]
    if not comment or end != f"{_digest(lines)}\n" or not all(found):
        raise DamagedFileError(f"{path} is damaged")
    return {match[2]: match[1] for match in found}


def check_sum(folder: Path, name: str, sums: Mapping[str, str]) -> None:
    """Raises DamagedFileError unless `folder/name` exists and has the SHA-256 in `sums`."""
    path = folder / name
    if name not in sums:
        raise DamagedFileError(f"{folder / SUMS} does not list {name}")
    try:
        matches = sha256_of(path) == sums[name]
    except NO_FILE:
        raise DamagedFileError(f"{path} is missing") from None
    if not matches:
        raise DamagedFileError(f"{path} is damaged: its SHA-256 is not the one in {SUMS}")


def verify(folder: Path, names: Iterable[str] | None, fault: type[Exception]) -> dict[str, str]:
    """Verifies the SHA-256 of files, as `sha256sum -c SHA256SUMS` does, and returns all of SHA256SUMS.

    Args:
        folder: of the files and SHA256SUMS.
        names: of the files; None for all that SHA256SUMS lists.
        fault: raised where a file, or SHA256SUMS, is missing or damaged.
    """
    try:
        sums = read_sums(folder)
        for name in sums if names is None else names:
            with reading_file(folder / name, fault):
                check_sum(folder, name, sums)
        return sums
    except DamagedFileError as error:
        raise fault(str(error)) from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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


@contextmanager
def locking(path: Path, fault: Callable[[str], Exception], patience: float = 0.0) -> Iterator[None]:
    """Holds the lock of an existing folder, in which nothing is written, or of a file that names its holder.

    The kernel releases the lock when the process ends, however it ends. Readers need none. On a file system without
    locks a warning is printed.

    Args:
        path: the folder, or the file, which is made.
        fault: makes the error where another process holds the lock, which it gets the name of.
        patience: seconds to wait for another process.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> with locking(folder / ".lock", ValueError), locking(folder / ".lock", ValueError):  # doctest: +ELLIPSIS
        ...     pass
        Traceback (most recent call last):
        ValueError: process ... on ...
    """
    is_file = not path.is_dir()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT if is_file else os.O_RDONLY, 0o644)
    try:
        deadline = time.monotonic() + patience
        while (locked := try_lock(descriptor)) is False and time.monotonic() < deadline:
            time.sleep(0.1)
        if locked is None:
            print(f"warning: {path} is on a file system without locks; start no other process on it", file=sys.stderr)
        if locked is False:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") if is_file else ""
            raise fault(holder or "another process")
        with suppress(OSError):  # on a full disk the lock has no name of its holder
            if is_file:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        try:
            yield
        finally:
            with suppress(OSError):
                if is_file:
                    os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
