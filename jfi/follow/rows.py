"""The rows of a part as a dataset: which of them count, and their histories and statistics of the past."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data import DataConfig, DataError, DataSchema, InteractionDataset
from jfi.data.io.arrays import TEXT
from jfi.data.io.blocks import DROP, read_table
from jfi.data.io.paths import IN_MEMORY
from jfi.data.io.table import SourceRows
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.data.prepared.stages.columns import Columns
from jfi.data.prepared.stages.statistics import past_index
from jfi.data.schema.columns import Categorical
from jfi.events.live_index import LiveRows
from jfi.follow.parts import Part, RefusedPart
from jfi.follow.state import ANY, LogState, contents
from jfi.history_policies import Policy
from jfi.state.columns import ColumnLayout, with_columns
from jfi.state.deletions import info_of, rows_that_count
from jfi.state.dictionaries import Dictionaries
from jfi.state.export import as_arrow
from jfi.state.layout import TIME, hashes
from jfi.state.user_rows import Chosen, LogRows, UserRows

#: The column that tells whether a row is an event of histories.
_IN_HISTORY = "jfi: in history"
#: The split of a part's samples, which are scored, and then trained on.
SAMPLES = "train"


@dataclass
class Counts:
    """The rows of a part.

    Args:
        rows: of the file, but for those that `data.null_ids: drop` leaves out.
        repeated: left out, since they were there, see `jfi.state.user_rows`.
        too_old: left out, since they are further behind their user's newest row before the part than is allowed.
        late: older than the newest row of the parts before, and trained on.
        late_labels: labels of rows that were there without one; these rows are trained on.
        labeled: the samples.
    """

    rows: int = 0
    repeated: int = 0
    too_old: int = 0
    late: int = 0
    late_labels: int = 0
    labeled: int = 0


@dataclass(frozen=True)
class Reading:
    """Settings by which the rows of parts are read.

    Args:
        config: the section `data` of the run, with the meaning of its columns.
        late_seconds: a row that is further behind its user's newest row before its part is left out.
    """

    config: DataConfig
    schema: DataSchema
    policy: Policy | None
    late_seconds: float


class PartRows:
    """Reads a part into a dataset, and changes the records of its users, items and statistics.

    Args:
        folder: an empty folder for the files of the dataset.

    Raises:
        RefusedPart: a fault in the part, as one line that names it; the state is as it was.
        DataError: a fault in a table of users or items, or in the semantic IDs; the state is as it was.
    """

    def __init__(self, part: Part, state: LogState, reading: Reading, folder: Path) -> None:
        self._reading, self._state = reading, state
        self.counts = Counts()
        #: Its splits have the labeled rows, in the order of time; None if there are none.
        self.dataset: InteractionDataset | None = None
        try:
            self._table = _left(
                part, read_table(str(part.path), state.reader.wanted, reading.config, "--follow"), reading
            )
            rows = state.reader(self._table)
            _check_types(part, contents(self._table, reading.config), state.place.types)
        except DataError as fault:
            raise RefusedPart(part.path, fault) from fault
        state.forget(part.deletions)
        names = Dictionaries(state.get, state.cache)
        users = UserRows(state.layout, state.get, list(dict.fromkeys(rows.users)))
        chosen = users.choose(rows, reading.late_seconds)
        times = rows.records[TIME][chosen.kept]
        #: Time of the oldest and of the newest row that counts.
        self.oldest, self.newest = float(times.min(initial=np.inf)), float(times.max(initial=-np.inf))
        counts, replaced = self.counts, chosen.replaced
        counts.rows, counts.repeated, counts.too_old = len(rows), chosen.repeated, len(chosen.late)
        counts.late_labels = int((replaced >= 0).sum())
        counts.late = int(((replaced < 0) & (times < state.place.newest)).sum())
        try:
            rows, new = with_columns(rows, chosen.kept, state.layout, state.tables, state.get, names)
            state.update(new)
            if len(chosen.kept):
                self._read(rows, users, chosen, names, folder)
            users.add(rows, chosen, rows.numbered(names, chosen.kept), partial(names.texts, state.layout.log.item))
        except DataError as fault:
            state.drop_part()
            if not str(fault).startswith(IN_MEMORY):
                raise
            raise RefusedPart(part.path, f"{part.path}: {fault}") from fault
        state.update(users.changes() | names.changes())
        state.cache.keep(names.new)

    def _read(self, rows: LogRows, users: UserRows, chosen: Chosen, names: Dictionaries, folder: Path) -> None:
        reading, state, past = self._reading, self._state, None
        config = replace(reading.config, timestamp_unit="s", batching="sample")
        if config.history is not None:
            config = replace(config, history=f"'{_IN_HISTORY}' == 1")
        part, history = self._part(rows, chosen), self._history(users, chosen, names)
        tables = {"item": config.items, "user": config.users}
        for of, layout in state.tables.items():
            if tables[of] is None and layout.columns:
                tables[of] = self._columns(layout, part, history, names)
        if state.counters is not None:
            past = partial(self._count, chosen.was_event)
        sources = Sources(part, history, tables["user"], tables["item"], config.semantic_ids)
        options: dict[str, object] = {"policy": reading.policy, "trains": True, "past": past}
        found = ScoringRows(sources, folder, reading.schema, config, **options)
        arrays = found.dataset.arrays()
        samples = arrays.samples["rows"]
        samples = samples[~np.isnan(arrays.events.label[samples])]
        samples = samples[np.argsort(arrays.events.time[samples], kind="stable")]
        self.counts.labeled = len(samples)
        if len(samples):
            arrays = replace(arrays, samples={SAMPLES: samples})
            self.dataset = InteractionDataset(arrays, reading.schema, policy=reading.policy)

    def _part(self, rows: LogRows, chosen: Chosen) -> pa.Table:
        """Returns the rows that count, with times in seconds and whether they are events of histories."""
        config, kept = self._reading.config, chosen.kept
        table = self._table.data.take(pa.array(kept))
        changed = {config.timestamp: pa.array(rows.records[TIME][kept])}
        changed[_IN_HISTORY] = pa.array(rows.in_history[kept].astype(np.int8))
        for name, one in self._state.layout.columns.items():
            if one.kind == "session":  # those of stored events are hashes
                changed[name] = as_arrow(one, rows.records[name][kept], lambda *_: [])
        table = table.drop_columns([name for name in changed if name in table.column_names])
        for name, values in changed.items():
            table = table.append_column(name, values)
        return table

    def _history(self, users: UserRows, chosen: Chosen, names: Dictionaries) -> pa.Table:
        """Returns the events of histories before the part that no row of it takes the place of."""
        config, layout = self._reading.config, self._state.layout
        counts = np.fromiter(map(len, users.events), np.int64, len(users.users))
        stays = chosen.stays[: counts.sum()]
        events = np.concatenate([np.zeros(0, layout.dtype), *users.events])[stays]
        user = pa.array(users.users, TEXT).take(pa.array(np.repeat(np.arange(len(counts)), counts)[stays]))
        columns = {config.user: user, config.timestamp: pa.array(events[TIME])}
        columns[_IN_HISTORY] = pa.array(np.ones(len(events), np.int8))
        columns |= {name: as_arrow(one, events[name], names.texts) for name, one in layout.columns.items()}
        if config.weight is not None:  # no sample reads it
            columns.setdefault(config.weight, pa.array(np.ones(len(events))))
        for name in {config.session, config.surface, config.dwell} - {None, *columns}:  # without a policy
            columns[name] = pa.nulls(len(events))
        return pa.table(columns)

    def _columns(self, layout: ColumnLayout, part: pa.Table, history: pa.Table, names: Dictionaries) -> pa.Table:
        """Returns the table of the items or the users of rows, which have none of their own, of the state."""
        config = self._reading.config
        key = config.item if layout.of == "item" else config.user
        own = replace(self._table, data=part).ids(key)
        ids = pc.unique(pa.chunked_array([*history[key].cast(TEXT).chunks, own], TEXT))
        found = layout.decode(self._state.get(list(map(layout.key, ids.to_pylist()))))
        columns = {name: as_arrow(one, found[name], names.texts) for name, one in layout.columns.items()}
        return pa.table({key: ids} | columns)

    def _count(
        self, was_event: np.ndarray, raw: Columns, ids: list[Categorical], rows: np.ndarray, of_part: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Counts rows in the order of their times; returns the columns `[E]` of their statistics, for ScoringRows.

        Rows of one time do not see each other, as in training.

        Args:
            was_event: `[K]` bool, the rows of the part that were counted as events, without a label.
            raw: the columns of the part and of the events of its users before it.
            rows: `[N]` the rows of the part, by user and time.
            of_part: `[N]` their indices in the part.
        """
        rows = rows.astype(np.int64)
        events = replace(self._live_rows(raw, ids, rows), is_counted=was_event[of_part])
        order = events.by_time()
        rows, events = rows[order], events.take(order)
        found, changes = self._state.counters.live.compute_and_add(self._state.get, events)
        self._state.update(changes)
        columns = {}
        for number, (name, values) in enumerate(found.items()):
            columns[name] = raw.new(f"statistics-{number}", np.float64, len(raw.events))
            columns[name][rows] = values
        return columns

    def _live_rows(self, raw: Columns, ids: list[Categorical], rows: np.ndarray) -> LiveRows:
        """Returns rows as the counters take them."""
        config, events, counters, sessions = raw.config, raw.events, self._state.counters, None
        settings = counters.settings
        users, items = (
            raw.categories(key, of).values.to_pylist() for key, of in ((config.user, "user"), (config.item, "item"))
        )
        if settings.session is not None:
            column = raw.categories(settings.session, "event")
            sessions = hashes([*column.values.to_pylist(), None])[column.codes[rows]]  # the code of none is -1
        user, item = events.user[rows], events.item[rows]
        index = past_index(events, self._reading.schema, ids, settings.is_implicit)
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

    def times(self) -> np.ndarray:
        """`[N]` float64, those of the samples, ascending."""
        arrays = self.dataset.arrays()
        return arrays.events.time[arrays.samples[SAMPLES]]


def _left(part: Part, table: SourceRows, reading: Reading) -> SourceRows:
    """Returns the rows of a part without those of users who were deleted."""
    if not part.may_differ:
        return table
    users = table.ids(reading.config.user, DROP).to_pylist()
    rows = np.flatnonzero(rows_that_count(part.path, users, part.deletions))
    return replace(table, data=table.data.take(pa.array(rows)), parts=(), line=lambda row: table.line(int(rows[row])))


def _check_types(part: Part, found: dict[str, str], types: dict[str, str]) -> None:
    """Raises DataError if a column holds something else than in the run's own interactions, but for a server's part."""
    if info_of(part.path) is not None:  # of which all ids and categories are texts
        return
    for name, what in found.items():
        if types.get(name, ANY) not in (ANY, what):
            raise DataError(f"{part.path}: column '{name}' holds {what}, but {types[name]} in the run's interactions")
