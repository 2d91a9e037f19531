"""Logs of events without samples: what a history policy is fitted to, and what statistics of the past are made of."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from jfi.data.config import DataConfig, LabelConfig
from jfi.data.config_checks import check_data_config
from jfi.data.errors import DataError
from jfi.data.prepared.prepare import Stages, read_and_sort, sorted_events
from jfi.data.prepared.stages.columns import Columns, read_engagement
from jfi.data.prepared.stages.encode_columns import encode_features
from jfi.data.prepared.stages.read import SourceTables, open_tables
from jfi.data.prepared.stages.statistics import compute_statistics
from jfi.data.schema.schema import DataSchema
from jfi.events.groups import BY_CATEGORY, SESSIONS
from jfi.events.statistics import Statistics
from jfi.history_policies import EventLog
from jfi.history_policies.log import MOST_SURFACES
from jfi.utils.files import temporary_folder


def training_log(config: DataConfig, conversion: str | None = None) -> tuple[EventLog, np.ndarray]:
    """The events of the training rows, and whether each is a conversion `[N]` bool: what a policy is fitted to.

    They are the rows of histories (`data.history`) in the training split, whether they have a label or not.

    Args:
        config: names the tables and the columns.
        conversion: a column of 0 and 1 or a rule, None for the label; a row that leaves it open is none.

    Raises:
        DataError: a fault in the config or the tables, as one line that names it; or the config names neither dwell nor
            surface, or neither a conversion nor a label.

    Example:
        >>> import pyarrow as pa
        >>> rows = {"user_id": [1, 2] * 20, "item_id": [*range(10)] * 4, "timestamp": [*range(40)], "like": [1, 0] * 20}
        >>> rows |= {"page": ["feed", "search", "feed", "feed"] * 10}
        >>> log, conversion = training_log(DataConfig(interactions=pa.table(rows), label="like", surface="page"))
        >>> log.surfaces, len(log) == len(conversion)
        (['feed', 'search'], True)
    """
    check_data_config(config)
    if config.prepared is not None:
        raise DataError("data.prepared is set; a policy is fitted to tables, since a prepared one has no conversions")
    config = replace(config, statistics=[], policy=None)
    settings = config.resolved()
    if settings.dwell is None and settings.surface is None:
        raise DataError("neither data.dwell nor data.surface is set; a policy needs one of them")
    rule = conversion or (settings.targets()[0].label if settings.task == "binary" else None)
    if rule is None:
        raise DataError("there is no binary label; a conversion must say which events count")
    # The conversion is read like a further label, or as the label of a config that has none.
    labels = [*config.labels, LabelConfig("-conversion", rule, "auxiliary")]
    given = open_tables(replace(config, label=rule) if config.is_implicit else replace(config, labels=labels))
    config = given.config
    with temporary_folder("jfi-log-") as folder:
        read_and_sort(given, Stages(folder, durable=False), check=False)
        events = sorted_events(config, folder)
        columns = Columns(given, folder, events)
        engagement, train = read_engagement(columns), columns.train
        chosen = np.flatnonzero(train) if events.rows is None else events.rows[train[events.rows]]
        if not 1 <= len(engagement.surfaces) <= MOST_SURFACES:
            count = f"has {len(engagement.surfaces):,} values; it must have 1 to {MOST_SURFACES}"
            raise DataError(f"data.surface is '{config.surface}', which {count}, so put rare ones together")
        converts = np.array(config.labels_of(events.label, events.targets)[-1][chosen] == 1)
        return engagement.log(events.user, events.time, chosen), converts


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
        read_and_sort(given, Stages(folder, durable=False), check=False)
        columns = Columns(given, folder, sorted_events(given.config, folder))
        names = {"item": {given.config.item, *given.config.names("item", "category")}}
        names["event"] = {*given.config.names("event")}
        features = [
            one for one in schema.encoded if one.column in names.get(one.of, ()) and one.role in ("item", "history")
        ]
        schema = replace(schema, features=[*features, *schema.features[len(schema.encoded) :]])
        ids = encode_features(columns, schema)
        yield compute_statistics(columns, schema, ids, rows=np.zeros(0, np.int64)).statistics, columns


def _tables(config: DataConfig) -> SourceTables:
    """The tables with the settings and the columns that statistics need."""
    config = config.resolved()
    groups, (label, *_) = {*config.statistics_groups()}, config.targets()
    read = {"item": config.names("item", "category")} if {*BY_CATEGORY} & groups else {}
    read |= {"event": config.names("event")} if "event_values" in groups else {}
    return open_tables(
        replace(
            config,
            features=[one for one in config.features if one.name in read.get(one.of, ())],
            users=None,
            items=config.items if read.get("item") else None,
            semantic_ids=None,
            label=label.label,
            labels=[],
            weight=None,
            title=None,
            split="files" if config.split == "files" else "time",
            split_column=None,
            request_id=None,
            dwell=None,
            surface=None,
            session=config.session if {*SESSIONS} & groups else None,
            policy=None,
        )
    )
