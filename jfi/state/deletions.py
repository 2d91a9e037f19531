"""Users who were deleted from a log of parts: a list beside the parts, by which rows are left out.

A line has the BLAKE2b digest of a user's id, and the end of the parts that may have rows of theirs that do not count:
for the parts of a server, whose names are positions, the position of the log at the deletion. Lines stay when the parts
have been written anew: copies of these may be read, and states that have their rows. A state gets a line in the
transaction that removes the user, and the list right after it, or once a server runs again.
"""

import errno
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from jfi.state.counters import StateCounters
from jfi.state.layout import digest
from jfi.state.retention import USER_KEYS
from jfi.state.stores import Store, finding_damage
from jfi.utils.files import naming

#: The name of the list in the folder of the parts; names with this begin are none of parts.
LIST = "_deleted.jsonl"
#: The key of a state's lines that the list still gets.
DELETIONS = b"x"
#: The key of the metadata of a server's part.
METADATA = b"jfi"
_POSITIONS = re.compile(r"([0-9]{20})-[0-9]{20}\.parquet")


class PartInfo(msgspec.Struct, frozen=True):
    """The metadata of a part.

    Args:
        state: the id of the state that has accepted the rows.
        bodies: by transaction the rows of each body, of users who were deleted too.
        removed: indices of the rows of users who were deleted, which the part has no longer.
    """

    state: str
    bodies: list[list[int]]
    removed: list[int] = []

    @property
    def num_rows(self) -> int:
        """Returns the number of rows, with those that were removed."""
        return sum(map(sum, self.bodies))

    def rows(self) -> np.ndarray:
        """Returns the indices `[N]` int64 that the rows which are left had among all."""
        return np.delete(np.arange(self.num_rows), self.removed)


class Deletion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The deletion of a user.

    Args:
        user: digest of the id in hexadecimal, see `jfi.state.layout.digest`.
        before: parts whose names sort before it may have rows of the user that do not count.
    """

    user: str
    before: str


def info_of(path: Path) -> PartInfo | None:
    """Returns the metadata of a part; None for one that no server has written."""
    import pyarrow.parquet as pq

    given = (pq.read_schema(path).metadata or {}).get(METADATA)
    with finding_damage(f"the metadata of {path}"):
        return None if given is None else msgspec.json.decode(given, type=PartInfo)


def deletion_of(folder: Path, user: str, position: int | None) -> bytes:
    """Returns the line of a deletion.

    Args:
        position: of the log, whose later rows of the user count; None for all parts that are there now.
    """
    before = f"{max((path.name for path in folder.glob('*.parquet')), default='')}~"
    line = Deletion(digest(user).hex(), before if position is None else f"{position:020d}")
    return msgspec.json.encode(line) + b"\n"


def append_deletions(folder: Path, lines: bytes) -> None:
    """Appends lines of `deletion_of` to the list of a folder; they are on the disk when this returns."""
    with naming(folder / LIST), (folder / LIST).open("a+b", buffering=0) as file:  # several processes may append
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":  # a full disk has left a part of a line
            lines = b"\n" + lines
        if file.write(lines) < len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())


def write_deletions(store: Store, folder: Path) -> None:
    """Moves lines that a state has got with its deletions to the list of a folder.

    After a kill between the two a line is in both places; a second one of it in the list changes nothing.
    """
    (lines,) = store.get([DELETIONS])
    if lines is not None:
        append_deletions(folder, lines)
        store.update(lambda get: {DELETIONS: (get([DELETIONS])[0] or b"").removeprefix(lines) or None})


def read_deletions(folder: Path) -> list[Deletion]:
    """Returns the deletions of a folder of parts, in their order."""
    try:
        content = (folder / LIST).read_bytes()
    except FileNotFoundError:
        return []
    with finding_damage(f"the list of deleted users {folder / LIST}"):
        lines = (line for line in content.splitlines() if line.endswith(b"}"))  # others are parts of lines
        return [msgspec.json.decode(line, type=Deletion) for line in lines]


def users_without(deletions: Collection[Deletion], part: str) -> dict[bytes, float]:
    """Returns by digest of a user the row of a part before which the user's rows do not count."""
    found, named = {}, _POSITIONS.fullmatch(part)
    for one in deletions:
        if part < one.before:
            end = int(one.before) - int(named[1]) if named and one.before.isdecimal() else np.inf
            user = bytes.fromhex(one.user)
            found[user] = max(end, found.get(user, 0))
    return found


def rows_that_count(path: Path, users: Sequence[str], deletions: Collection[Deletion]) -> np.ndarray:
    """Returns which rows of a part are none that were deleted `[N]` bool."""
    if not (without := users_without(deletions, path.name)):
        return np.ones(len(users), bool)
    info = info_of(path)
    return rows_left(users, np.arange(len(users)) if info is None else info.rows(), without)


def rows_left(users: Sequence[str], rows: np.ndarray, without: Mapping[bytes, float]) -> np.ndarray:
    """Returns which rows of a part count `[N]` bool.

    Args:
        rows: `[N]` int64, the indices of the rows in the part as it was written first.
    """
    if not without:
        return np.ones(len(users), bool)
    ends = {user: without.get(digest(user), 0) for user in {*users}}
    return rows >= np.array([ends[user] for user in users])


def keys_of_users(
    pages: Callable[[Sequence[bytes]], Iterator[list[tuple[bytes, bytes]]]],
    users: Collection[bytes],
    counters: StateCounters | None,
) -> list[bytes]:
    """Finds the keys of users, by the digests of their ids, in a state, of which all users are read."""
    kinds = [key("") for key in USER_KEYS] + [b"U"]  # rows, quotas and columns
    found = [key for page in pages(kinds) for key, _ in page if digest(key[1:].decode()) in users]
    for user in users if counters is not None else ():
        found += [key for page in pages(counters.live.prefixes_of(user)) for key, _ in page]
    return found
