"""The log of events that statistics of the past are made of, with no features, splits or samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from jfi.data.config import DataConfig
from jfi.data.io.blocks import name_of, read_table
from jfi.data.prepared.prepare import Stages, read_and_sort, sorted_events
from jfi.data.prepared.sources import SourceTables, column_settings
from jfi.data.prepared.stages.columns import Columns
from jfi.data.prepared.stages.encode_columns import encode_features
from jfi.data.prepared.stages.statistics import compute_statistics
from jfi.data.schema.schema import DataSchema
from jfi.events.groups import BY_CATEGORY, SESSIONS
from jfi.events.statistics import Statistics
from jfi.utils.files import temporary_folder


@contextmanager
def read_log(config: DataConfig, schema: DataSchema) -> Iterator[tuple[Statistics, Columns]]:
    """Yields what makes statistics of a log, and its columns; all is gone afterwards.

    Args:
        config: the section `data` of a run, whose interactions are the log.
        schema: of the run.

    Raises:
        DataError: a column is missing or malformed.
    """
    given = _tables(config)
    with temporary_folder("jfi-log-") as folder:
        read_and_sort(given, folder, Stages(folder, durable=False), check=False)
        columns = Columns(given, folder, sorted_events(given.config, folder))
        names = {"item": {given.config.item, *given.config.names("item", "category")}}
        names["event"] = {*given.config.names("event")}
        features = [
            one
            for one in schema.features[:-1]
            if one.column in names.get(one.of, ()) and one.role in ("item", "history")
        ]
        schema = replace(schema, features=[*features, schema.features[-1]])
        ids = encode_features(columns, schema)
        yield compute_statistics(columns, schema, ids, rows=np.zeros(0, np.int64)).statistics, columns


def _tables(config: DataConfig) -> SourceTables:
    """The tables with the settings and the columns that statistics need."""
    config = config.with_statistics()
    names = "user item timestamp timestamp_unit label history statistics max_history max_slots interactions"
    names = f"{names} encoding quoting delimiter header missing_values null_ids".split()
    names += ["split", "validation", "test"] if config.split == "files" else []
    own = {name: getattr(config, name) for name in names}
    groups = {*config.statistics_groups()}
    categories = {*config.names("item", "category")} if {*BY_CATEGORY} & groups else set()
    of_events = {name for names in config.event_values() for name in names} if "event_values" in groups else set()
    features = [one for one in config.features if one.name in {"item": categories, "event": of_events}.get(one.of, ())]
    session = config.session if {*SESSIONS} & groups else None
    settings = column_settings(DataConfig(**own, features=features, session=session, items=config.items))
    items = read_table(config.items, config.columns(), config, "data.items") if categories and config.items else None
    return SourceTables(name_of(config), None, items, None, settings)
