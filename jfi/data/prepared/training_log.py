"""The log of events that a history policy is fitted to."""

from dataclasses import replace

import numpy as np

from jfi.data.config import DataConfig, LabelConfig
from jfi.data.config_checks import check_data_config
from jfi.data.errors import DataError
from jfi.data.prepared.prepare import Stages, read_and_sort, sorted_events
from jfi.data.prepared.sources import column_settings, open_tables
from jfi.data.prepared.stages.columns import Columns
from jfi.data.prepared.stages.engagement import read_engagement
from jfi.data.schema.labels import labels_of
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
    settings = column_settings(config)
    if settings.dwell is None and settings.surface is None:
        raise DataError("neither data.dwell nor data.surface is set; a policy needs one of them")
    rule = conversion or (settings.targets()[0].label if settings.task == "binary" else None)
    if rule is None:
        raise DataError("there is no binary label; a conversion must say which events count")
    # The conversion is read like a further label.
    given = open_tables(replace(config, labels=[*config.labels, LabelConfig("-conversion", rule, "auxiliary")]))
    config = given.config
    with temporary_folder("jfi-log-") as folder:
        read_and_sort(given, folder, Stages(folder, durable=False), check=False)
        events = sorted_events(config, folder)
        columns = Columns(given, folder, events)
        engagement, train = read_engagement(columns), columns.train
        chosen = np.flatnonzero(train) if events.rows is None else events.rows[train[events.rows]]
        if not 1 <= len(engagement.surfaces) <= MOST_SURFACES:
            count = f"has {len(engagement.surfaces):,} values; it must have 1 to {MOST_SURFACES}"
            raise DataError(f"data.surface is '{config.surface}', which {count}, so put rare ones together")
        converts = np.array(labels_of(config, events.label, events.targets)[-1][chosen] == 1)
        return engagement.log(events.user, events.time, chosen), converts
