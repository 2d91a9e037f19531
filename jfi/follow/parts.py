"""The parts of a log, in their order: an append-only folder of Parquet files that others write by atomic renames."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jfi.data import DataError
from jfi.utils.files import naming, sha256_of

_SUFFIX = ".parquet"


@dataclass(frozen=True)
class Part:
    """A part of a log.

    Args:
        name: of the file; parts are trained in the order of their names.
        path: of the file.
        size: its bytes.
        modified: its time of modification, in nanoseconds.
        sha256: of its content; "" until it is read.
    """

    name: str
    path: Path
    size: int
    modified: int
    sha256: str = ""


class Parts(Protocol):
    """A source of parts."""

    def following(self, known: Mapping[str, Part], last: str) -> list[Part]:
        """Returns the parts behind the place in the log, in their order.

        Args:
            known: by name the parts that were trained on.
            last: name of the last one, or "".

        Raises:
            DataError: a part was changed after it was trained on, or sorts before the place and was not trained on.
        """

    def part(self, name: str) -> Part:
        """Returns a part with its SHA-256.

        Raises:
            DataError: it is not there.
        """


class PartFolder:
    """The files `*.parquet` of a folder; names that begin with `.` or `_` are those of files that are being written.

    Args:
        folder: of the parts.

    Raises:
        DataError: there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(f"--follow {folder}: no such folder")
        self.folder = folder

    def following(self, known: Mapping[str, Part], last: str) -> list[Part]:
        """See Parts; a file that was trained on may be gone, since nothing reads it again."""
        found = []
        with naming(self.folder), os.scandir(self.folder) as entries:
            for entry in entries:
                name = entry.name
                if not name.endswith(_SUFFIX) or name.startswith((".", "_")):
                    continue
                if not entry.is_file():
                    raise DataError(f"{entry.path}: not a regular file")
                status = entry.stat()
                found.append(Part(name, Path(entry.path), status.st_size, status.st_mtime_ns))
        found.sort(key=lambda part: part.name)
        for part in found:
            if part.name in known:
                self._check(part, known[part.name])
            elif part.name <= last:
                what = f"sorts before {last}, which was trained on; give later parts later names"
                raise DataError(f"{part.path}: its name {what}")
        return [part for part in found if part.name > last]

    def part(self, name: str) -> Part:
        """See Parts."""
        path = self.folder / name
        try:
            status = path.stat()
        except FileNotFoundError:
            raise DataError(f"{path}: no such file; the state of the run needs it once more") from None
        return Part(name, path, status.st_size, status.st_mtime_ns, sha256_of(path))

    def _check(self, part: Part, was: Part) -> None:
        """Compares the content of a part with what was trained on, where its size or time tells that it may differ."""
        if (part.size, part.modified) == (was.size, was.modified):
            return
        if part.size != was.size or sha256_of(part.path) != was.sha256:
            raise DataError(f"{part.path}: was changed after it was trained on; restore it, or remove it")
