"""Files and folders that are written whole or not at all."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder beside `folder`; when the block ends its files are flushed and it gets the name.

    Raises:
        FileExistsError: `folder` exists.
    """
    if folder.exists():
        raise FileExistsError(17, "file exists", str(folder))
    unfinished = folder.parent / f".{folder.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for path in unfinished.iterdir():
            sync(path)
        sync(unfinished)
        unfinished.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def writing_file(path: Path) -> Iterator[Path]:
    """Yields a path beside `path` to write to; when the block ends the file is flushed and replaces `path`."""
    unfinished = path.parent / f".{path.name}.unfinished"
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal; reads a block at a time."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
