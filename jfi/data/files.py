"""Files and folders that are written whole or not at all, and JSON that carries its own SHA-256."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jfi.data.errors import DataError


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


def checked_json(kind: str, content: dict) -> str:
    """The text of a JSON file of some kind that `read_checked_json` reads."""
    tree = {"format": kind, "sha256": _digest(content), "content": content}
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"


def read_checked_json(path: Path, kind: str) -> dict:
    """The content of a file of the text of `checked_json`.

    Raises:
        DataError: it is missing, damaged or of another kind, as one line that names it.
    """
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path}: damaged, it is not JSON") from None
    if not isinstance(tree, dict) or tree.get("format") != kind:
        raise DataError(f"{path}: not a file of this version of jfi (its 'format' must be '{kind}')")
    if not isinstance(tree.get("content"), dict) or tree.get("sha256") != _digest(tree["content"]):
        raise DataError(f"{path}: damaged, the content does not match its SHA-256")
    return tree["content"]


def _digest(content: dict) -> str:
    # JSON writes all digits of a float, so the text is the same after a round trip.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
