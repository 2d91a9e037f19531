"""Statistics of the past of a part's rows, from counters that each row is added to after it was answered."""

from dataclasses import replace

import numpy as np

from jfi.data import DataSchema
from jfi.data.prepared.stages.columns import Columns
from jfi.data.prepared.stages.statistics import past_index
from jfi.data.schema.columns import Categorical
from jfi.events.live_index import LiveRows
from jfi.follow.state import Overlay
from jfi.state.counters import StateCounters
from jfi.state.layout import hashes


class CountedRows:
    """Makes the statistics of rows in the order of their times, and counts them.

    Rows of one time do not see each other, as in training.

    Args:
        overlay: has the counters' records.
        counters: of the run.
        schema: of the run.
        is_counted: `[N]` bool, the rows of the part that were counted as events, without a label.
    """

    def __init__(self, overlay: Overlay, counters: StateCounters, schema: DataSchema, is_counted: np.ndarray) -> None:
        self._overlay, self._counters, self._schema, self._is_counted = overlay, counters, schema, is_counted

    def __call__(
        self, raw: Columns, ids: list[Categorical], rows: np.ndarray, of_part: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Returns the columns `[E]` of statistics, as `jfi.data.prepared.scoring` takes them.

        Args:
            raw: the columns of the part and of the events of its users before it.
            ids: of the features.
            rows: `[N]` the rows of the part, by user and time.
            of_part: `[N]` their indices in the part.
        """
        rows = rows.astype(np.int64)
        events = replace(self._events(raw, ids, rows), is_counted=self._is_counted[of_part])
        order = events.by_time()
        rows, events = rows[order], events.take(order)
        found, changes = self._counters.live.compute_and_add(self._overlay.get, events)
        self._overlay.update(lambda get: changes)
        columns = {}
        for number, (name, values) in enumerate(found.items()):
            columns[name] = raw.new(f"statistics-{number}", np.float64, len(raw.events))
            columns[name][rows] = values
        return columns

    def _events(self, raw: Columns, ids: list[Categorical], rows: np.ndarray) -> LiveRows:
        """Returns rows as the counters take them."""
        config, events, counters, sessions = raw.config, raw.events, self._counters, None
        settings = counters.settings
        users, items = (
            raw.categories(key, of).values.to_pylist() for key, of in ((config.user, "user"), (config.item, "item"))
        )
        if settings.session is not None:
            column = raw.categories(settings.session, "event")
            sessions = hashes([*column.values.to_pylist(), None])[column.codes[rows]]  # the code of none is -1
        user, item = events.user[rows], events.item[rows]
        index = past_index(events, self._schema, ids, settings.is_implicit)
        columns = index.item_columns
        return LiveRows(
            hashes(users)[user],
            hashes(items)[item],
            events.time[rows],
            {name: counters.digests(name, columns[f"column {name}"].ids[item]) for name in settings.columns},
            events.label[rows],
            np.ones(len(rows), bool) if events.rows is None else np.isin(rows, events.rows),
            counters.orders(items)[item],
            sessions,
            {name: of(rows) for name, of in index.values.items()},
        )
