"""Dwell times and surfaces of events, which a history policy reads in addition to the model's inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.config import DataConfig
from jfi.data.config_checks import check_data_config
from jfi.data.errors import DataError
from jfi.data.prepared.arrange import sort_and_split
from jfi.data.prepared.source import Columns, RawColumns, column_settings, read_tables
from jfi.data.schema.coded import CodedColumn, blocks
from jfi.data.schema.columns import is_multi_valued
from jfi.data.schema.labels import label_columns, read_labels
from jfi.history import EventLog
from jfi.history.log import MOST_SURFACES
from jfi.utils.encoding import LARGEST_NUMBER

#: Gives an array for a name and a type.
NewColumn = Callable[[str, type], np.ndarray]
#: The name of the only surface where `data.surface` is not set, and of a policy's for events without a surface.
ONLY_SURFACE, UNKNOWN_SURFACE = "all", "unknown"
#: Seconds by `data.dwell_unit`.
SECONDS = {"s": 1.0, "ms": 1e-3}


@dataclass(frozen=True)
class Engagement:
    """Aligned fields of E events that no model reads. The arrays may be maps of files.

    Conversions are no part of it: they are needed for fitting a policy alone, see `training_log`.

    Args:
        dwell: `[E]` float32 seconds, NaN where missing.
        surface: `[E]` integers, indices of `surfaces`, -1 where missing.
        surfaces: the names of the surfaces.
        session: `[E]` int64, equal for the events of a session of a user, or None without a column of it.
    """

    dwell: np.ndarray
    surface: np.ndarray
    surfaces: list[str]
    session: np.ndarray | None = None

    def on_surfaces(self, surfaces: Sequence[str]) -> "Engagement":
        """The same with other names of surfaces; an event on a surface that is not among them has none.

        An event without a surface has `unknown`, if that is a name.
        """
        places = {name: place for place, name in enumerate(surfaces)}
        place = np.array([places.get(name, -1) for name in (*self.surfaces, UNKNOWN_SURFACE)], np.int32)
        return replace(self, surface=place[self.surface], surfaces=list(surfaces))

    def log(self, user: np.ndarray, time: np.ndarray, rows: np.ndarray | None = None) -> EventLog:
        """The events as `jfi.history` takes them.

        Args:
            user, time: `[E]`.
            rows: `[N]` the events to take, or None for all.
        """
        rows = slice(None) if rows is None else rows
        session = None if self.session is None else np.asarray(self.session[rows])
        parts = (np.asarray(one[rows]) for one in (user, time, self.surface, self.dwell))
        return EventLog(*parts, surfaces=self.surfaces, session=session)


def read_engagement(columns: RawColumns, config: DataConfig, new_column: NewColumn | None = None) -> Engagement | None:
    """The fields of all events, in the order of the rows; None where the config names neither dwell nor surface.

    Args:
        columns: the raw columns.
        config: the section `data`.
        new_column: by name and type an array `[E]` to write to, where these are too long for memory.

    Raises:
        DataError: a column is missing or holds something else than numbers (dwell) or single values (the others).
    """
    if config.dwell is None and config.surface is None:
        return None
    count = columns.count("event")
    new_column = new_column or (lambda name, kind: np.empty(count, kind))
    dwell, surface = new_column("dwell", np.float32), new_column("surface", np.int32)
    numbers = None if config.dwell is None else columns.numbers(config.dwell, "event")
    for begin, end in blocks(count):
        part = np.nan if numbers is None else np.asarray(numbers[begin:end]) * SECONDS[config.dwell_unit]
        dwell[begin:end] = np.clip(part, -LARGEST_NUMBER, LARGEST_NUMBER)
    surface[:], names = 0, [ONLY_SURFACE]
    if config.surface is not None:
        names = _fill_codes(columns, config.surface, "surface", surface)
    session = None
    if config.session is not None:
        session = new_column("session", np.int64)
        _fill_codes(columns, config.session, "session", session)
        for begin, end in blocks(count):
            alone = begin + np.flatnonzero(session[begin:end] < 0)
            session[alone] = -1 - alone  # an event without a session is one of its own
    return Engagement(dwell, surface, names, session)


def training_log(config: DataConfig) -> tuple[EventLog, np.ndarray]:
    """The events of the training rows, and whether each is a conversion `[N]` bool: what a policy is fitted to.

    They are the rows of histories (`data.history`) in the training split, whether they have a label or not. A
    conversion is what `data.conversion` says, or `data.label` where it is not set; a row that leaves it open is none.

    Raises:
        DataError: a fault in the config or the tables, as one line that names it; or the config names neither dwell nor
            surface, or neither a conversion nor a label.

    Example:
        >>> from jfi.data import DataConfig, SyntheticConfig
        >>> config = DataConfig(source="synthetic", synthetic=SyntheticConfig(kind="dwell", num_users=50))
        >>> log, conversion = training_log(config)
        >>> log.surfaces, len(log) == len(conversion)
        (['autoplay', 'feed', 'search'], True)
    """
    check_data_config(config)
    if config.prepared is not None:
        raise DataError("data.prepared is set; a policy is fitted to tables, since a prepared one has no conversions")
    config = column_settings(replace(config, statistics=[], policy=None))
    if config.dwell is None and config.surface is None:
        raise DataError("neither data.dwell nor data.surface is set; a policy needs one of them")
    rule = config.conversion or (config.label if config.task == "binary" else None)
    if rule is None:
        raise DataError("data.conversion is not set, and there is no data.label; it must say which events are to count")
    tables = read_tables(config, label_columns(rule))
    rows = sort_and_split(tables.interactions, config, tables.given_split)
    engagement = read_engagement(Columns(tables, rows, config), config)
    chosen = np.flatnonzero(rows.train if rows.event is None else rows.train & rows.event)
    if not 1 <= len(engagement.surfaces) <= MOST_SURFACES:
        count = f"has {len(engagement.surfaces):,} values; it must have 1 to {MOST_SURFACES}"
        raise DataError(f"data.surface is '{config.surface}', which {count}, so put rare ones together")
    conversion = read_labels(tables.interactions, rule)[rows.order[chosen]] == 1
    return engagement.log(rows.user, rows.time, chosen), conversion


def _fill_codes(columns: RawColumns, name: str, setting: str, out: np.ndarray) -> list[str]:
    """Writes the indices of a column's values, sorted, to `out [E]`, -1 where one is missing; returns the values."""
    column = columns.categories(name, "event")
    if is_multi_valued(column):
        raise DataError(f"data.{setting} is '{name}', whose rows are lists; it must have one value a row")
    if isinstance(column, CodedColumn):
        values, codes = column.values, column.codes
    else:
        encoded = column.dictionary_encode()
        values, codes = encoded.dictionary, pc.fill_null(encoded.indices, -1).to_numpy()
    order = pc.array_sort_indices(values.cast(pa.large_string())).to_numpy()
    rank = np.full(len(order) + 1, -1, out.dtype)  # the last is that of code -1
    rank[order] = np.arange(len(order))
    for begin, end in blocks(len(codes)):
        out[begin:end] = rank[codes[begin:end]]
    return values.take(pa.array(order)).to_pylist() if setting == "surface" else []
