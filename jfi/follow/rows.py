"""The rows of a part as a dataset: which of them count, and their histories and statistics of the past."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data import DataConfig, DataError, DataSchema, InteractionDataset
from jfi.data.io.blocks import read_table
from jfi.data.io.paths import IN_MEMORY
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.follow.parts import Part, RefusedPart
from jfi.follow.records import ANY, IN_HISTORY, number_users
from jfi.follow.state import LogState
from jfi.follow.statistics import CountedRows
from jfi.history_policies import Policy
from jfi.state.outbox import info_of

#: The split of a part's samples, which are scored, and then trained on.
SAMPLES = "train"


@dataclass
class Counts:
    """The rows of a part.

    Args:
        rows: of the file, but for those that `data.null_ids: drop` leaves out.
        repeated: left out, since a row with the same user, item and time was there.
        too_old: left out, since they are further behind the newest row before the part than is allowed.
        late: older than that row, and trained on.
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
        schema: of the run.
        policy: of the run, or None.
        late_seconds: a row that is further behind the newest row before its part is left out.
    """

    config: DataConfig
    schema: DataSchema
    policy: Policy | None
    late_seconds: float


class PartRows:
    """Reads a part into a dataset, and changes the records of its users and the counters.

    Args:
        part: of the log.
        state: of the log before the part.
        reading: settings.
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
        config, wanted = reading.config, state.records.wanted
        try:
            table = read_table(str(part.path), wanted, config, "--follow")
            for name in sorted(wanted):
                table.require(name)
            users, rows = state.records.read(table)
            _check_types(part, state.records.contents(table), state.place.types)
        except DataError as fault:
            raise RefusedPart(part.path, fault) from fault
        self.counts.rows = len(rows)
        user, names = number_users(users)
        old = state.records.of(state.overlay.get, names)
        kept, replaced = self._choose(old, (user, rows), config.timestamp)
        was_event = np.append(old[1][IN_HISTORY].to_numpy() == 1, False)[replaced]  # -1 is False
        stays = np.delete(np.arange(len(old[0])), replaced[replaced >= 0])
        old = old[0][stays], old[1].take(pa.array(stays))
        new = user[kept], rows.take(pa.array(kept))
        time = new[1][config.timestamp].to_numpy()
        #: Time of the oldest and of the newest row that counts.
        self.oldest, self.newest = float(time.min(initial=np.inf)), float(time.max(initial=-np.inf))
        if len(kept):
            data = _with_times(table.data.take(pa.array(kept)), config, new[1])
            try:
                self._read(data, _history(config, names, old), was_event, folder)
            except DataError as fault:
                state.overlay.drop_part()
                if not str(fault).startswith(IN_MEMORY):
                    raise
                raise RefusedPart(part.path, f"{part.path}: {fault}") from fault
        state.overlay.put(state.records.merged(names, old, new))

    def _choose(
        self, old: tuple[np.ndarray, pa.Table], new: tuple[np.ndarray, pa.Table], time: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows that count `[N]` int64, and the old rows that they replace, of Records.match."""
        times, newest = new[1][time].to_numpy(), self._state.place.newest
        fresh = np.flatnonzero(times >= newest - self._reading.late_seconds)
        repeated, replaced = self._state.records.match(old, (new[0][fresh], new[1].take(pa.array(fresh))))
        kept, replaced, counts = fresh[~repeated], replaced[~repeated], self.counts
        counts.too_old, counts.repeated = len(times) - len(fresh), int(repeated.sum())
        counts.late_labels = int((replaced >= 0).sum())
        counts.late = int(((replaced < 0) & (times[kept] < newest)).sum())
        return kept, replaced

    def _read(self, rows: pa.Table, history: pa.Table, was_event: np.ndarray, folder: Path) -> None:
        reading, state, past = self._reading, self._state, None
        config = replace(reading.config, timestamp_unit="s", batching="sample")
        if config.history is not None:
            config = replace(config, history=f"'{IN_HISTORY}' == 1")
        if state.counters is not None:
            past = CountedRows(state.overlay, state.counters, reading.schema, was_event)
        sources = Sources(rows, history, config.users, config.items, config.semantic_ids)
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

    def times(self) -> np.ndarray:
        """`[N]` float64, those of the samples, ascending."""
        arrays = self.dataset.arrays()
        return arrays.events.time[arrays.samples[SAMPLES]]


def _check_types(part: Part, found: dict[str, str], types: dict[str, str]) -> None:
    """Raises DataError if a column holds something else than in the run's own interactions, but for a server's part."""
    if info_of(part.path) is not None:  # of which all ids and categories are texts
        return
    for name, what in found.items():
        if types.get(name, ANY) not in (ANY, what):
            raise DataError(f"{part.path}: column '{name}' holds {what}, but {types[name]} in the run's interactions")


def _with_times(rows: pa.Table, config: DataConfig, kept: pa.Table) -> pa.Table:
    """Returns rows with times in seconds, and with the column that tells which are events of histories."""
    rows = rows.drop_columns([config.timestamp])
    for name in (config.timestamp, IN_HISTORY):
        rows = rows.append_column(name, kept[name])
    return rows


def _history(config: DataConfig, users: Sequence[str], old: tuple[np.ndarray, pa.Table]) -> pa.Table:
    """Returns the events of histories before the part, with the columns of the log."""
    user, rows = old
    events = np.flatnonzero(rows[IN_HISTORY].to_numpy() == 1)
    rows = rows.take(pa.array(events))
    names = pa.array(users, pa.large_string()).take(pa.array(user[events]))
    rows = rows.append_column(config.user, names) if config.user not in rows.column_names else rows
    if config.weight is not None and config.weight not in rows.column_names:  # no sample reads it
        rows = rows.append_column(config.weight, pa.array(np.ones(len(rows))))
    return rows
