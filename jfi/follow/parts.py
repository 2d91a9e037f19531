"""The parts of a log, in their order: an append-only folder of Parquet files that others write by atomic renames."""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jfi.data import DataError
from jfi.data.io.paths import find_layout
from jfi.state.deletions import Deletion, read_deletions, users_without
from jfi.utils.files import naming, sha256_of

_log = logging.getLogger(__name__)
_SUFFIX = ".parquet"


class RefusedPart(DataError):
    """A fault in a part, which has changed nothing.

    Args:
        fault: the message, as one line that names the path.
    """

    def __init__(self, path: Path, fault: object) -> None:
        super().__init__(str(fault))
        self.path = path


@dataclass(frozen=True)
class Part:
    """A part of a log.

    Args:
        name: of the file; parts are trained in the order of their names.
        modified: its time of modification, in nanoseconds.
        sha256: of its content; "" until it is read.
        deletions: of its folder: users whose rows do not count, in this part or another one.
    """

    name: str
    path: Path
    size: int
    modified: int
    sha256: str = ""
    deletions: Sequence[Deletion] = ()

    @property
    def may_differ(self) -> bool:
        """Returns whether it may have been written anew, without the rows of users who were deleted."""
        return bool(users_without(self.deletions, self.name))


class Parts(Protocol):
    """A source of parts."""

    def check(self, trained: Iterable[Part]) -> None:
        """Takes the parts that were trained on, once before the first call of `next`; some may be gone.

        Raises:
            DataError: a part was changed after it was trained on.
        """

    def next(self, last: str) -> str | None:
        """Returns the name of the part that follows the last one that was trained on, None if there is none yet.

        Args:
            last: name of that one, or "".

        Raises:
            RefusedPart: a part sorts before the last one, and was not trained on.
        """

    def part(self, name: str) -> Part:
        """Returns a part with its SHA-256.

        Raises:
            DataError: it is not there.
        """


class PartFolder:
    """The files `*.parquet` of a folder; names that begin with `.` or `_` are those of files that are being written.

    Args:
        option: that names it, for messages.

    Raises:
        DataError: there is no such folder.
    """

    def __init__(self, folder: Path, option: str = "--follow") -> None:
        if not folder.is_dir():
            raise DataError(f"{option} {folder}: no such folder")
        self.folder = folder
        #: Names of files in the folder that were trained on.
        self._trained: set[str] = set()
        #: Kinds of files that a warning has named: suffixes, and "" for folders.
        self._warned: set[str] = set()

    def check(self, trained: Iterable[Part]) -> None:
        """See Parts."""
        names, deletions = self._names(), read_deletions(self.folder)
        for part in trained:
            if part.name in names:
                self._trained.add(part.name)
                if not users_without(deletions, part.name):
                    self._compare(part)

    def next(self, last: str) -> str | None:
        """See Parts."""
        names = self._names()
        self._trained = {*self._trained, last} & names
        found = min(names - self._trained, default=None)
        if found is not None and found < last:
            what = f"sorts before {last}, which was trained on; give later parts later names"
            raise RefusedPart(self.folder / found, f"{self.folder / found}: its name {what}")
        return found

    def skip_to(self, last: str, count: int) -> None:
        """Takes the parts up to one as trained on, without a look at them; a DataError says that there are more.

        Args:
            last: name of the last one.
            count: how many there were, see `count`; 0 if that is not known.
        """
        found = {name for name in self._names() if name <= last}
        if 0 < count < len(found):
            what = f"{len(found)} parts up to {last}, of which {count} were there when that was added"
            raise DataError(f"{self.folder}: has {what}; give later parts later names")
        self._trained |= found

    def count(self, name: str) -> int:
        """Returns how many parts there are up to one."""
        return len(self._trained | {name})

    def part(self, name: str) -> Part:
        """See Parts."""
        path = self.folder / name
        try:
            status = path.stat()
        except FileNotFoundError:
            raise DataError(f"{path}: no such file; the state of the run needs it once more") from None
        found = status.st_size, status.st_mtime_ns, sha256_of(path)
        return Part(name, path, *found, read_deletions(self.folder))

    def _names(self) -> set[str]:
        found = set()
        with naming(self.folder), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith((".", "_")):
                    continue
                if not entry.name.endswith(_SUFFIX):
                    self._warn(entry)
                    continue
                if not entry.is_file():
                    raise RefusedPart(Path(entry.path), f"{entry.path}: not a regular file")
                found.add(entry.name)
        return found

    def _warn(self, entry: os.DirEntry) -> None:
        """Names the first of the subfolders, and the first file of each suffix of a table, that are no parts."""
        kind = "" if entry.is_dir() else Path(entry.name).suffix
        if kind not in self._warned and (not kind or find_layout(entry.name) is not None):
            self._warned.add(kind)
            what = "files whose names end in .parquet, in this folder and not in its subfolders"
            _log.warning("%s: not read; parts are %s", entry.path, what)

    def _compare(self, was: Part) -> None:
        """Compares the content of a part with what was trained on, where its size or time tells that it may differ."""
        path = self.folder / was.name
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) == (was.size, was.modified):
            return
        if status.st_size != was.size or sha256_of(path) != was.sha256:
            raise DataError(f"{path}: was changed after it was trained on; restore it, or remove it")
