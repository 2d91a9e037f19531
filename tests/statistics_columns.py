"""The statistics of the past of a table's rows, as preparing computes them, before they are scaled."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data import DataConfig, DataSchema
from jfi.data.prepared.prepare import Stages, read_and_sort, sorted_events
from jfi.data.prepared.stages.column_files import read_columns
from jfi.data.prepared.stages.columns import Columns
from jfi.data.prepared.stages.encode_columns import encode_features, learn_schema
from jfi.data.prepared.stages.read import open_tables
from jfi.data.prepared.stages.sort import ROW
from jfi.data.prepared.stages.statistics import compute_statistics


def with_statistics(table: pa.Table, config: DataConfig, schema: DataSchema | None = None) -> pa.Table:
    """The table of interactions with the columns that `config.statistics` stands for, in the order of its rows.

    Args:
        table: with the columns that `config` names.
        config: the section `data`.
        schema: of a run; None learns one from the table.
    """
    given = open_tables(replace(config, interactions=table, split="time", request_id=None))
    with tempfile.TemporaryDirectory() as folder:
        read_and_sort(given, Stages(Path(folder), durable=False), check=False)
        columns = Columns(given, Path(folder), sorted_events(given.config, Path(folder)))
        schema = learn_schema(columns) if schema is None else schema
        compute_statistics(columns, schema, encode_features(columns, schema))
        row = np.array(read_columns(Path(folder) / "rows")[ROW])
        for name in given.config.statistics_columns():
            column = np.empty(len(row))
            column[row] = columns.computed[name]
            table = table.append_column(name, pa.array(column))
    return table
