"""Feeds the state of a server from the parts of a log that others write, read as training reads them."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path

import msgspec
import numpy as np

from jfi.data import DataConfig, DataError
from jfi.data.io.blocks import read_table
from jfi.follow.parts import PartFolder
from jfi.serving.server.live import Live
from jfi.serving.server.metrics import Metrics
from jfi.state.deletions import Deletion, info_of, keys_of_users, read_deletions, rows_that_count, write_deletions
from jfi.state.events import EventReader
from jfi.state.layout import CURSOR, TIME
from jfi.state.outbox import Cursor
from jfi.state.state import Added, UserState
from jfi.state.stores import finding_damage
from jfi.state.table_rows import TableReader
from jfi.state.user_rows import LogRows

#: Rows that are added together; so are rows of one time, and those of a transaction of the server that accepted them.
_AT_ONCE = 5000
#: Seconds between two looks at the folder, and after a fault until the same part is read again.
POLL_SECONDS, _PAUSE = 0.5, 60.0
_log = logging.getLogger("jfi.serving")


class Feed:
    """Adds the parts of a folder to the state of a server, in the order of their names. Of several servers one does.

    Args:
        clock: seconds that only grow.

    Raises:
        DataError: there is no such folder.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts, self._clock = PartFolder(folder, "--feed"), clock
        self._is_first = True
        #: Name, size and time of the part that cannot be added, and until when it is not read again as it is.
        self._stopped: tuple[str, int, int] | None = None
        self._until = -np.inf

    async def run(self, live: Live, metrics: Metrics) -> None:
        """Adds parts as they appear, until it is cancelled."""
        said = None
        while True:
            is_added, now = False, live.now.scorer
            try:
                is_added = await asyncio.to_thread(self.step, now.state, now.events, metrics.fed)
                metrics.feed_stopped.set(self._stopped is not None)
                said = said if self._stopped is not None else None
            except Exception as error:  # a damaged part or state, a storage or a store that does not answer
                metrics.feed_stopped.set(1)
                if said != (said := str(error)):
                    _log.error("--feed %s: stopped, and goes on once this is mended: %s", self._parts.folder, error)
            if not is_added:
                await asyncio.sleep(POLL_SECONDS)

    def step(self, state: UserState, events: EventReader, told: Callable[[Added], None] = lambda added: None) -> bool:
        """Adds the next part; returns whether there was one.

        Args:
            told: is called with what became of rows that were added together.

        Raises:
            DataError: the part is damaged, or sorts before one that was added.
            StoreUnavailableError: the store does not answer.
            StateError: the state is damaged.
        """
        if not state.store.hold("feed"):
            self._is_first = True
            return False
        write_deletions(state.store, self._parts.folder)  # those of a server that was killed
        (found,) = state.store.get([CURSOR])
        with finding_damage("what it was fed last"):
            cursor = Cursor("") if found is None else msgspec.json.decode(found, type=Cursor)
        if self._is_first:
            self._parts.skip_to(cursor.part, cursor.parts)
            self._is_first = False
        deletions = read_deletions(self._parts.folder)
        if len(deletions) > cursor.deletions:
            self._forget(deletions, found, cursor, state)
            return True
        name = cursor.part if cursor.at is not None else self._parts.next(cursor.part)
        was, self._stopped = self._stopped, None
        if name is None:
            return False
        status = (self._parts.folder / name).stat()
        file = name, status.st_size, status.st_mtime_ns
        if file == was and self._clock() < self._until:
            self._stopped = was
            return False
        try:
            return self._add(name, found, cursor, state, events, told)
        except DataError:
            self._stopped, self._until = file, self._clock() + _PAUSE
            raise

    def _forget(self, deletions: list[Deletion], found: bytes | None, cursor: Cursor, state: UserState) -> None:
        """Removes from the state users who were deleted from the log since the last time."""
        new = {bytes.fromhex(one.user) for one in deletions[cursor.deletions :]}
        keys = keys_of_users(state.store.pages, new, state.counters)
        after = msgspec.structs.replace(cursor, deletions=len(deletions))
        changes = dict.fromkeys(keys) | {CURSOR: msgspec.json.encode(after)}
        state.store.update(lambda get: changes if get([CURSOR]) == [found] else {})

    def _add(
        self,
        name: str,
        found: bytes | None,
        cursor: Cursor,
        state: UserState,
        events: EventReader,
        told: Callable[[Added], None],
    ) -> bool:
        """Adds the rows of a part after the cursor, in transactions of bounded size, each with the place of its end."""
        steps: list[Sequence[LogRows]] = []
        count = self._parts.count(name) if cursor.at is None else cursor.parts
        parts = list(transactions(self._parts.folder / name, events, -np.inf if cursor.at is None else cursor.at))
        for number, (at, bodies) in enumerate([*parts, (None, [])]):
            is_last = number == len(parts)
            steps += [bodies] if bodies else []
            if is_last or sum(map(len, chain.from_iterable(steps))) >= _AT_ONCE:
                after = msgspec.json.encode(Cursor(name, at, cursor.deletions, count))
                added = state.feed(steps, (found, after))
                if added is None:
                    return True  # another server has added them
                told(added)
                found, steps = after, []
        return True


def transactions(path: Path, events: EventReader, after: float = -np.inf) -> Iterator[tuple[float, Sequence[LogRows]]]:
    """Yields the rows of a part as they are added together, in bodies, each with the place where it ends.

    Those of a server's part are added as the server has added them, and a place is the number that the last row has had
    among all; other rows in the order of time, and a place is the time of the last row. So a deletion that removes
    rows from the part moves no place.

    Args:
        after: place after which the rows are yielded.

    Raises:
        DataError: it is damaged, or a row is, such as one of the future.
    """
    log, reader = events.layout.log, TableReader(events)
    own = {"missing_values": log.missing_values, "null_ids": log.null_ids}
    config = DataConfig(user=log.user, item=log.item, timestamp=log.time, timestamp_unit=log.unit, **own)
    rows = reader(read_table(str(path), reader.wanted, config, "--feed"))
    info, begin = info_of(path), 0
    places = rows.records[TIME] if info is None else info.rows()
    if len(places) != len(rows):
        raise DataError(f"{path}: has {len(rows)} rows, and its metadata says {len(places)}")
    left = rows_that_count(path, rows.users, read_deletions(path.parent)) & (places > after)
    rows, places = rows.take(np.flatnonzero(left)), places[left]
    if info is None:
        rows = rows.take(np.argsort(places, kind="stable"))
        times = rows.records[TIME]
        while begin < len(rows):
            end = min(begin + _AT_ONCE, len(rows))
            end = int(times.searchsorted(times[end - 1], "right"))
            yield float(times[end - 1]), [rows.take(np.arange(begin, end))]
            begin = end
        return
    for bodies in info.bodies:
        ends = list(accumulate(bodies, initial=begin))
        cuts = pairwise(places.searchsorted(ends).tolist())
        begin = ends[-1]
        yield begin - 1, [rows.take(np.arange(one, end)) for one, end in cuts if end > one]
