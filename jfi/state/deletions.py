"""Users who were deleted from a log of parts: a list beside the parts, by which their readers leave out rows.

The list has a line for each deletion, with the BLAKE2b digest of the user's id and the name of the newest part that
there was. It stays when the parts have been written anew: copies of them may be read, and states that have their rows.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from threading import Lock

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jfi.data.errors import DataError
from jfi.data.io.arrays import as_text
from jfi.state.counters import StateCounters
from jfi.state.layout import digest
from jfi.utils.files import write_file, writing_file

#: The name of the list in the folder of the parts; a name with this begin is none of a part.
LIST = "_deleted.jsonl"
#: The first bytes of keys that end in a user's id: of rows, columns and quotas.
_KINDS = [b"u", b"i", b"U", b"q"]


class Deletion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The deletion of a user.

    Args:
        user: digest of the id in hexadecimal, see `jfi.state.layout.digest`.
        last: name of the newest part that there was; the user's rows in later parts count.
        is_rewritten: whether all parts up to it have been written without the user's rows.
    """

    user: str
    last: str
    is_rewritten: bool = False


class Deletions:
    """The list of a folder of parts, which one process writes.

    Args:
        folder: of the parts.
        column: of the user's id.
    """

    def __init__(self, folder: Path, column: str) -> None:
        self._folder, self._column, self._lock = folder, column, Lock()

    def add(self, user: str) -> None:
        """Adds a deletion, which is on the disk when this returns."""
        with self._lock:
            own = Deletion(digest(user).hex(), max(self._names(), default=""))
            self._write([*read_deletions(self._folder), own])

    def rewrite(self) -> int:
        """Writes the parts anew that have rows of users who were deleted since the last call; returns how many."""
        if not (pending := [one for one in read_deletions(self._folder) if not one.is_rewritten]):
            return 0
        written = [
            name
            for name in self._names()
            if (users := users_without(pending, name)) and _rewrite(self._folder / name, self._column, users)
        ]
        with self._lock:
            lines = read_deletions(self._folder)
            self._write(
                [msgspec.structs.replace(one, is_rewritten=one.is_rewritten or one in pending) for one in lines]
            )
        return len(written)

    def _names(self) -> list[str]:
        return sorted(path.name for path in self._folder.glob("*.parquet") if path.name[0] not in "._")

    def _write(self, lines: Sequence[Deletion]) -> None:
        write_file(self._folder / LIST, b"".join(msgspec.json.encode(one) + b"\n" for one in lines))


def read_deletions(folder: Path) -> list[Deletion]:
    """Returns the deletions of a folder of parts, in their order.

    Raises:
        DataError: the list is damaged.
    """
    path = folder / LIST
    try:
        return [msgspec.json.decode(line, type=Deletion) for line in path.read_bytes().splitlines()]
    except FileNotFoundError:
        return []
    except msgspec.DecodeError as error:
        raise DataError(f"{path}: the list of deleted users is damaged: {error}") from None


def users_without(deletions: Collection[Deletion], part: str) -> set[bytes]:
    """Returns the digests of users whose rows in a part do not count."""
    return {bytes.fromhex(one.user) for one in deletions if part <= one.last}


def rows_left(ids: pa.Array, users: Collection[bytes]) -> np.ndarray:
    """Returns which rows `[N]` bool are none of users.

    Args:
        ids: `[N]`, the users of the rows, of any type.
        users: digests of ids.
    """
    coded = as_text(ids).dictionary_encode()
    gone = [text is not None and digest(text) in users for text in coded.dictionary.to_pylist()]
    return ~np.append(gone, False)[coded.indices.fill_null(-1).to_numpy()].astype(bool)


def _rewrite(path: Path, column: str, users: Collection[bytes]) -> bool:
    """Writes a part anew without the rows of users; returns whether it had any."""
    with pq.ParquetFile(path) as source:
        if all(rows_left(batch.column(0), users).all() for batch in source.iter_batches(columns=[column])):
            return False
        with writing_file(path) as unfinished, pq.ParquetWriter(unfinished, source.schema_arrow) as writer:
            for group in range(source.num_row_groups):
                rows = source.read_row_group(group).combine_chunks()
                for batch in rows.to_batches():
                    writer.write_batch(batch.filter(pa.array(rows_left(batch.column(column), users))))
    return True


def keys_of_users(
    pages: Callable[[Sequence[bytes]], Iterator[list[tuple[bytes, bytes]]]],
    users: Collection[bytes],
    counters: StateCounters | None,
) -> list[bytes]:
    """Finds the keys of users in a state, of which all users are read.

    Args:
        pages: of the store.
        users: digests of their ids.
        counters: of the state, or None.
    """
    found = [key for page in pages(_KINDS) for key, _ in page if digest(key[1:].decode()) in users]
    for user in users if counters is not None else ():
        found += [key for page in pages(counters.live.prefixes_of(user)) for key, _ in page]
    return found
