"""The outbox of a state: rows that it has accepted, in its own store until a writer has made Parquet parts of them.

A value has the rows of one transaction, and its key the position of the first of them. A part has whole transactions,
but where a column changes its type between two bodies, and its name has the positions of its first and its last row:
after a kill between the rename of a part and the removal of its rows, the newest name tells which rows are written. Its
metadata has the state's id, and how many rows the bodies of each transaction had: rows that are added by the same steps
give the same state, bit for bit.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from jfi.state.columns import ColumnLayout, Entity, log_columns
from jfi.state.deletions import METADATA, PartInfo, info_of, read_deletions, rows_left, users_without, write_deletions
from jfi.state.layout import CURSOR, POSITION, EventLayout, integer
from jfi.state.model_ids import Texts
from jfi.state.stores import Changes, Get, StateError, Store, finding_damage
from jfi.state.user_rows import Given, LogRows
from jfi.utils.encoding import text_of
from jfi.utils.files import try_lock, write_file, writing_file

if TYPE_CHECKING:
    import pyarrow as pa

_OUTBOX = b"o"
#: Name of the file with the number of deletions that all parts have been written without.
_REWRITTEN = "_rewritten"
_NAME = re.compile(r"([0-9]{20})-([0-9]{20})\.parquet")
#: Seconds between two lines of the log about failures.
_PAUSE = 60.0
_log = logging.getLogger("jfi.serving")
#: A body of the outbox: by column of the log its values, times as numbers of the log's unit or whole microseconds.
Body = dict[str, list]


class Cursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes what a state was fed last.

    Args:
        part: name of the part, "" before the first one.
        at: place of the last row that was added, see `jfi.follow.feed.transactions`; None once all are.
        deletions: how many lines of the folder's list of deleted users have been applied.
        parts: how many parts the folder had up to this one.
    """

    part: str
    at: float | None = None
    deletions: int = 0
    parts: int = 0


def entry(
    begin: int,
    layout: EventLayout,
    tables: Mapping[Entity, ColumnLayout],
    bodies: Sequence[tuple[LogRows, np.ndarray]],
    get: Get,
    texts: Texts,
) -> Changes:
    """Returns what a transaction adds to the outbox.

    Args:
        begin: position of its first row.
        tables: what the rows do not carry of the items and the users, as of the transaction.
        bodies: rows, with the indices of those that were accepted.
    """
    log, found = layout.log, []
    names = [*layout.columns, *(one.name for one in log.others), *([log.event_id] if log.event_id else [])]
    for rows, kept in bodies:
        if not len(kept):
            continue
        columns = {name: _plain(values, kept) for name, values in {**rows.given, **rows.raw}.items()}
        columns[log.user] = users = [rows.users[row] for row in kept]
        items = [rows.texts[log.item][row] for row in kept]
        lacking = [name for name in names if name not in columns]
        own = log_columns(tables, {"item": items, "user": users}, lacking, get, texts)
        columns |= {name: _plain(values, np.arange(len(kept))) for name, values in own.items()}
        found.append(columns | {name: [None] * len(kept) for name in lacking if name not in own})
    return {_key(begin): msgspec.msgpack.encode(found)}


def _key(position: int) -> bytes:
    return _OUTBOX + position.to_bytes(8, "big")


def _plain(values: Given, kept: np.ndarray) -> list:
    """The values of rows as a list, of lists where the column has lists."""
    if isinstance(values, tuple):
        flat, ends = values[0], np.cumsum(values[1])
        begins = (ends - values[1])[kept].tolist()
        return [flat[begin:end] for begin, end in zip(begins, ends[kept].tolist(), strict=True)]
    if isinstance(values, np.ndarray):
        return (values.astype(np.int64) if values.dtype.kind == "M" else values)[kept].tolist()
    own = [values[row] for row in kept] if len(kept) < len(values) else values
    # Integers that no float64 has are texts: a part may join them with fractions, and the outbox has 64 bits of them.
    return [text_of(one) if type(one) is int and abs(one) > 2**53 else one for one in own]


class PartWriter:
    """Writes the rows of an outbox to a folder of parts. One process at a time does, and the others wait for its end.

    Args:
        rows: after so many rows a part is written.
        seconds: so long a row waits at most.
        clock: seconds that only grow.

    Raises:
        StateError: there is no such folder, or it has parts of another state that this one was not fed to their end,
            or of later rows than the state has.
    """

    def __init__(
        self,
        store: Store,
        layout: EventLayout,
        folder: Path,
        rows: int = 100_000,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._layout, self._folder = store, layout, folder
        self._rows, self._seconds, self._clock = rows, seconds, clock
        #: Called with the number of rows of each part, and for each failure.
        self.wrote: Callable[[int], object] = lambda rows: None
        self.failed: Callable[[], object] = lambda: None
        self._said, self._stepping = -np.inf, threading.Lock()
        #: Rows that are in no part yet, as of the last step.
        self.waiting = 0
        self._since: float | None = None
        #: The lock of the folder while this process writes, the position of the next row, and the key that it is in.
        self._lock: int | None = None
        self._next = self._at = 0
        #: Keys of transactions that are in parts.
        self._done: list[int] = []
        if not folder.is_dir():
            raise StateError(f"--log {folder}: no such folder")
        self._check(integer(store.get([POSITION])[0]))

    def step(self) -> None:
        """Writes the parts that are due; a failure is logged once a minute, and the rows stay in the outbox."""
        with self._stepping:
            self._step()

    def _step(self) -> None:
        try:
            write_deletions(self._store, self._folder)  # those of a server that was killed
            position = integer(self._store.get([POSITION])[0])
            if not self._is_writer(position):
                self.waiting = position - _newest(self._folder)[1]
                return
            self.waiting = position - self._next
            if not self.waiting:
                self._since = None
            elif self._since is None:
                self._since = self._clock()
            # Rows that come meanwhile may be written too, which makes it negative.
            while self.waiting > 0 and (self.waiting >= self._rows or self._clock() - self._since >= self._seconds):
                self._write(position)
                self.waiting, self._since = position - self._next, self._clock()
            self._delete()
        except Exception as error:  # a full disk, a folder that is gone, a store that does not answer
            self.failed()
            if self._clock() - self._said >= _PAUSE:
                self._said = self._clock()
                _log.error("--log %s: %d rows wait in the state: %s", self._folder, self.waiting, error)

    def flush(self) -> None:
        """Writes all rows that wait."""
        self._seconds = 0.0
        self.step()
        self.step()

    def close(self) -> None:
        """Lets another process write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _is_writer(self, position: int) -> bool:
        """Returns whether this process writes now; it takes the place of one that has ended."""
        if not self._store.hold("log"):
            self.close()
            return False
        if self._lock is None:
            lock = os.open(self._folder, os.O_RDONLY)
            if try_lock(lock) is False:  # None, on a file system without locks: the store's lock alone holds
                os.close(lock)
                return False
            self._lock = lock
            try:
                self._begin(position)
            except BaseException:
                self.close()
                raise
        return True

    def _begin(self, position: int) -> None:
        """Finds the rows that are in no part yet, and removes the others from the outbox."""
        self._next = self._check(position)
        found = sorted((_position(key), _count(value)) for key, value in self._store.scan(_OUTBOX))
        self._done = [key for key, count in found if key + count <= self._next]
        self._remove()
        self._at = next((key for key, count in found if key + count > self._next), position)
        self._skip_gap()

    def _check(self, position: int) -> int:
        """Returns the position after the newest part."""
        name, end = _newest(self._folder)
        if not end:
            return 0
        info, fed = info_of(self._folder / name), self._store.get([CURSOR])[0]
        is_own = info is not None and info.state == self._layout.info.id
        cursor = Cursor("") if fed is None else msgspec.json.decode(fed, type=Cursor)
        if end > position or not (is_own or (cursor.part, cursor.at) == (name, None)):
            what = f"{name} has rows of another state, or of one that was newer; name another folder"
            raise StateError(f"--log {self._folder}: {what}")
        return end

    def _skip_gap(self) -> None:
        if self._at > self._next:
            if self._next or _newest(self._folder)[1]:
                rows = f"{self._next} to {self._at - 1}"
                _log.warning("--log %s: rows %s were accepted by a server without --log", self._folder, rows)
            self._next = self._at

    def _pending(self) -> Iterator[tuple[int, int, Body]]:
        """Yields the bodies that are in no part yet, each with the key of its transaction and of the next one."""
        at, position = self._at, self._next
        while (value := self._store.get([_key(at)])[0]) is not None:
            bodies = _decoded(value)
            ends = np.cumsum([at, *(len(one[self._layout.log.user]) for one in bodies)]).tolist()
            for begin, body in zip(ends[:-1], bodies, strict=True):
                if begin >= position:
                    yield at, ends[-1], body
            at = ends[-1]

    def _write(self, position: int) -> None:
        import pyarrow as pa

        tables: list[pa.Table] = []
        counts: list[tuple[int, int]] = []
        done, at, end, schema = [], self._at, self._next, None
        for key, after, body in self._pending():
            table = _table(self._layout, body)
            try:
                schema = pa.unify_schemas([schema or table.schema, table.schema], promote_options="permissive")
            except pa.ArrowException:  # a column of another type begins another part
                break
            tables.append(table)
            counts.append((key, len(table)))
            end += len(table)
            at = after if end == after else key
            done += [key] if end == after else []
            if end == after and end - self._next >= self._rows:
                break
        if not tables:  # a server without --log has accepted rows meanwhile
            found = (_position(key) for key, _ in self._store.scan(_OUTBOX))
            self._at = min((key for key in found if key >= self._next), default=position)
            return self._skip_gap()
        bodies = [[count for _, count in own] for _, own in groupby(counts, key=lambda one: one[0])]
        made = pa.concat_tables(tables, promote_options="permissive")
        for number, one in enumerate(made.schema):
            if pa.types.is_null(one.type):  # no row has a value
                made = made.set_column(number, one.name, made.column(number).cast(pa.string()))
        self._put(f"{self._next:020d}-{end - 1:020d}.parquet", made, PartInfo(self._layout.info.id, bodies))
        self._next, self._at, self._done = end, at, self._done + done
        self.wrote(len(made))
        self._remove()

    def _put(self, name: str, rows: "pa.Table", info: PartInfo) -> None:
        """Writes a part, without rows of users who were deleted."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        left = self._left(name, rows, info)
        kept, all_rows = info.rows()[left], np.arange(sum(map(sum, info.bodies)))
        info = PartInfo(info.state, info.bodies, np.setdiff1d(all_rows, kept).tolist())
        rows = rows.filter(pa.array(left)).replace_schema_metadata({METADATA: msgspec.json.encode(info)})
        with writing_file(self._folder / name) as path:
            pq.write_table(rows, path)

    def _left(self, name: str, rows: "pa.Table", info: PartInfo) -> np.ndarray:
        """Returns which rows of a part are none of users who were deleted `[N]` bool."""
        without = users_without(read_deletions(self._folder), name)
        return rows_left(rows[self._layout.log.user].to_pylist(), info.rows(), without)

    def _delete(self) -> None:
        """Writes the parts anew that have rows of users who were deleted since the last time."""
        import pyarrow.parquet as pq

        found, done = read_deletions(self._folder), self._folder / _REWRITTEN
        known = int(done.read_text()) if done.is_file() else 0
        for name in sorted(os.listdir(self._folder)) if len(found) > known else ():
            if _NAME.fullmatch(name) and users_without(found[known:], name):
                info = info_of(self._folder / name)
                users = pq.read_table(self._folder / name, columns=[self._layout.log.user])
                if not self._left(name, users, info).all():
                    self._put(name, pq.read_table(self._folder / name), info)
        if len(found) > known:
            write_file(done, str(len(found)))

    def _remove(self) -> None:
        """Removes from the outbox what is in parts."""
        if self._done:
            self._store.update(lambda get: {_key(key): None for key in self._done})
            self._done.clear()


def _decoded(value: bytes) -> list[Body]:
    with finding_damage("its outbox"):
        return msgspec.msgpack.decode(value, type=list[Body])


def _count(value: bytes) -> int:
    return sum(len(next(iter(body.values()))) for body in _decoded(value))


def _position(key: bytes) -> int:
    return int.from_bytes(key[len(_OUTBOX) :], "big")


def _newest(folder: Path) -> tuple[str, int]:
    """The name of the newest part, and the position after it; "" and 0 without one."""
    found = [match for one in os.scandir(folder) if (match := _NAME.fullmatch(one.name))]
    newest = max(found, key=lambda match: match[2], default=None)
    return ("", 0) if newest is None else (newest[0], int(newest[2]) + 1)


def _table(layout: EventLayout, body: Body):
    """The rows of a body with the columns of the log: ids and categories as texts, others as they were sent."""
    import pyarrow as pa

    from jfi.state.meaning import array_of

    kinds = {one.name: one.kind for one in (*layout.log.others, *layout.columns.values())}
    arrays = {}
    for name, values in body.items():
        if name == layout.log.time:
            is_number = isinstance(values[0], float)
            arrays[name] = pa.array(values, pa.float64() if is_number else pa.timestamp("us", "UTC"))
        elif kinds.get(name) == "texts":
            arrays[name] = pa.array(values, pa.list_(pa.string()))
        elif kinds.get(name) == "number":
            arrays[name] = pa.array(np.array(values, np.float64), from_pandas=True)
        elif kinds.get(name) == "sid":
            arrays[name] = pa.array([None if value == -1 else value for value in values], pa.int64())
        else:
            arrays[name] = array_of(values)
    return pa.table(arrays)
