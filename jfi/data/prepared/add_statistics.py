"""Statistics of the past for a table of interactions alone, with no features, splits or samples."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.io.blocks import describe_left_out, name_of, read_blocks, read_table
from jfi.data.io.table import Table, join_tables
from jfi.data.prepared.prepare import Stages, read_and_sort, sorted_events
from jfi.data.prepared.sources import Tables, column_settings
from jfi.data.prepared.stages.column_files import read_columns
from jfi.data.prepared.stages.columns import Columns
from jfi.data.prepared.stages.encode_columns import encode_features
from jfi.data.prepared.stages.fit_schema import learn_schema
from jfi.data.prepared.stages.sort import ROW
from jfi.data.prepared.stages.statistics import compute_statistics
from jfi.data.schema.schema import DataSchema
from jfi.events.groups import BY_CATEGORY, SESSIONS
from jfi.events.statistics import DenseStatistics, Statistics
from jfi.utils.files import temporary_folder

_log = logging.getLogger(__name__)


def add_statistics(table: pa.Table | Iterable[Table], config: DataConfig, schema: DataSchema | None = None) -> pa.Table:
    """The table of interactions with the columns of `config.statistics`, as features of the context or for scoring.

    Args:
        table: with the columns that `config` names for the user, the item, the time, the label, the history, the
            session and categories of the item, unless `config.items` has these; or parts of it, which have the names of
            files and lines for messages.
        config: the section `data`.
        schema: of a run that is to score the table; None learns one from it.

    Raises:
        DataError: a column is missing or malformed, there are no groups to add, or there is such a column already.

    Example:
        >>> config = DataConfig(label="liked", statistics=["item"])
        >>> rows = {"user_id": [1, 2, 3], "item_id": [7, 7, 7], "timestamp": [0, 5, 5], "liked": [1, 0, 1]}
        >>> add_statistics(pa.table(rows), config)["past_item_count"].to_pylist() == [0.0, np.log(2), np.log(2)]
        True
    """
    config = config.with_statistics()
    if not config.statistics:
        raise DataError("data.statistics has no groups; it must name statistics to add")
    parts = list(read_blocks(table, table.column_names, config) if isinstance(table, pa.Table) else table)
    name = parts[0].name if parts else "the table"
    for line in describe_left_out(name, sum(map(len, parts)), sum(part.left_out for part in parts)):
        _log.warning("%s", line)
    given = _tables(replace(config, interactions=None), name, parts)
    with temporary_folder("jfi-statistics-") as folder:
        columns, _ = _sorted_log(given, folder, schema)
        row, data = read_columns(folder / "rows")[ROW], join_tables(parts).data
        for name, values in columns.computed.items():
            column = np.empty(len(values))
            column[row] = values
            data = data.append_column(name, pa.array(column))
        return data


@contextmanager
def read_log(config: DataConfig, schema: DataSchema) -> Iterator[tuple[Statistics, Columns]]:
    """Yields what makes statistics of a log, and its columns; all is gone afterwards.

    Args:
        config: the section `data` of a run, whose interactions are the log.
        schema: of the run.

    Raises:
        DataError: a column is missing or malformed.
    """
    given = _tables(config, name_of(config), None)
    with temporary_folder("jfi-log-") as folder:
        columns, made = _sorted_log(given, folder, schema, np.zeros(0, np.int64))
        yield made.statistics, columns


def _tables(config: DataConfig, name: str, parts: list[Table] | None) -> Tables:
    """The tables with the settings and the columns that statistics need."""
    config = config.with_statistics()
    names = "user item timestamp timestamp_unit label history statistics max_history max_slots interactions"
    names = f"{names} num_quantiles encoding quoting delimiter header missing_values null_ids".split()
    names += ["split", "validation", "test"] if parts is None and config.split == "files" else []
    own = {name: getattr(config, name) for name in names}
    groups = {*config.statistics_groups()}
    categories = {*config.names("item", "category")} if {*BY_CATEGORY} & groups else set()
    of_events = {name for names in config.event_values() for name in names} if "event_values" in groups else set()
    features = [one for one in config.features if one.name in {"item": categories, "event": of_events}.get(one.of, ())]
    session = config.session if {*SESSIONS} & groups else None
    settings = column_settings(DataConfig(**own, features=features, session=session, items=config.items))
    items = read_table(config.items, config.columns(), config, "data.items") if categories and config.items else None
    return Tables(name, None, items, None, settings, parts)


def _sorted_log(
    given: Tables, folder: Path, schema: DataSchema | None, rows: np.ndarray | None = None
) -> tuple[Columns, DenseStatistics]:
    """Sorts the interactions, and computes the statistics of rows `[N]` int64, of all if None."""
    read_and_sort(given, folder, Stages(folder, durable=False), check=rows is None)
    columns = Columns(given, folder, sorted_events(given.config, folder))
    if schema is None:
        schema = learn_schema(columns)
    else:
        names = {"item": {given.config.item, *given.config.names("item", "category")}}
        names["event"] = {*given.config.names("event")}
        features = [
            one
            for one in schema.features[:-1]
            if one.column in names.get(one.of, ()) and one.role in ("item", "history")
        ]
        schema = replace(schema, features=[*features, schema.features[-1]])
    return columns, compute_statistics(columns, schema, encode_features(columns, schema), rows=rows)
