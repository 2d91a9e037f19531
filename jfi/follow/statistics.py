"""Statistics of the past of a part's rows, from counters that each row is added to after it was answered."""

from collections.abc import Iterator

import numpy as np

from jfi.data import DataSchema
from jfi.data.prepared.stages.columns import Columns
from jfi.data.schema.columns import Categorical
from jfi.follow.state import Overlay
from jfi.serving.user_state.counters import StateCounters
from jfi.serving.user_state.events import Events
from jfi.serving.user_state.layout import TIME, EventLayout, hashes
from jfi.serving.user_state.stored_history import StoredHistory


class CountedRows:
    """Makes the statistics of rows in the order of their times, and counts them.

    Rows of one time do not see each other, as in training.

    Args:
        overlay: has the counters' records.
        counters: of the run.
        layout: of the records that the counters read.
        schema: of the run.
    """

    def __init__(self, overlay: Overlay, counters: StateCounters, layout: EventLayout, schema: DataSchema) -> None:
        self._overlay, self._counters, self._layout, self._schema = overlay, counters, layout, schema

    def __call__(self, raw: Columns, ids: list[Categorical], rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the columns `[E]` of statistics, as `jfi.data.prepared.scoring` takes them.

        Args:
            raw: the columns of the part and of the events of its users before it.
            ids: of the features.
            rows: `[N]` the rows of the part, by user and time.
        """
        time = raw.events.time
        rows = rows[np.argsort(time[rows], kind="stable")].astype(np.int64)
        events, keys = self._read(raw, ids, rows)
        columns = {
            name: raw.new(f"statistics-{number}", np.float64, len(raw.events))
            for number, name in enumerate(self._counters.past.names)
        }
        for begin, end in _equal_times(events.records[TIME]):
            part = range(begin, end)
            answers = self._counters.answers(self._overlay.get, [self._question(events, keys, row) for row in part])
            for row, answer in zip(part, answers, strict=True):
                for name, column in columns.items():
                    column[rows[row]] = answer[name][0]
            changes = self._counters.changes(self._overlay.get, events, events.records, part)
            self._overlay.put(changes.items())
        return columns

    def _read(self, raw: Columns, ids: list[Categorical], rows: np.ndarray) -> tuple[Events, dict[str, np.ndarray]]:
        """Returns the rows as events of a state, and by key of an item's column the ids `[N, slots]`."""
        config, events, past = raw.config, raw.events, self._counters.past
        users, items = (raw.categories(key, of).values for key, of in ((config.user, "user"), (config.item, "item")))
        user, item = events.user[rows], events.item[rows].astype(np.int64)
        in_history = np.ones(len(rows), bool) if events.rows is None else np.isin(rows, events.rows)
        sessions = np.zeros(len(rows), np.uint64)
        if past.session is not None:
            column = raw.categories(past.session, "event")
            names = np.array([*column.values.to_pylist(), None], object)[column.codes[rows]].tolist()
            # An event without a session is one of its own, with an id that no other event has.
            alone = zip(users.take(user).to_pylist(), items.take(item).to_pylist(), events.time[rows], strict=True)
            sessions = hashes([repr(own) if name is None else name for name, own in zip(names, alone, strict=True)])
        records, keys = np.zeros(len(rows), self._layout.dtype), {}
        records[TIME] = events.time[rows]
        of_key = {spec.key: (spec, one) for spec, one in zip(self._schema.features, ids, strict=False)}
        for name, column in past.columns.items():
            own = [one.name for one in self._layout.columns if one.field.name == name and one.role is None]
            matrix = np.zeros((len(rows), len(own)), np.int64)
            for slot, key in enumerate(own):
                spec, one = of_key[key]
                found = np.empty(len(rows), np.int64)
                one.fill(rows if spec.of == "event" else item, found)
                records[key] = matrix[:, slot] = found
            keys[column.key] = matrix
        return Events(
            users.take(user).to_pylist(),
            records,
            items=items.take(item).to_pylist(),
            labels=np.array(events.label[rows], np.float32),
            in_history=in_history,
            sessions=sessions,
        ), keys

    @staticmethod
    def _question(events: Events, keys: dict[str, np.ndarray], row: int) -> StoredHistory:
        ids = {key: matrix[row : row + 1] for key, matrix in keys.items()}
        now = float(events.records[TIME][row])
        return StoredHistory(events.users[row], now, items=[events.items[row]], column_ids=ids)


def _equal_times(time: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the ranges of equal times."""
    first = np.flatnonzero(np.diff(time, prepend=np.nan) != 0)
    yield from zip(first.tolist(), np.append(first[1:], len(time)).tolist(), strict=True)
