"""How the values of a training table became ids and numbers, learnt again from the same rows.

An InteractionDataset keeps the ids and not what they were made of, so the columns are read once more and treated as
`jfi.data.load` and `jfi.data.encode` treat them.
"""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data import DataConfig, InteractionDataset, splits, synthetic
from jfi.data.config import AGE, HISTORY
from jfi.data.encode import sort_ids
from jfi.data.labels import read_labels
from jfi.data.load import _EntityColumns, _members
from jfi.data.readers import read_table
from jfi.data.table import Table
from jfi.serving.fields import Field, Fields


def learn_fields(config: DataConfig, dataset: InteractionDataset, reads_history: bool, reads_age: bool) -> Fields:
    """The fields of requests to a model of `dataset`.

    Args:
        config: that `dataset` was loaded with.
        dataset: whose keys the fields fill.
        reads_history: whether the model reads events, and
        reads_age: the bucket of their age.

    Raises:
        DataError: the table can no longer be read.
    """
    config, interactions, users, items = _tables(config)
    user_ids, user = sort_ids(interactions.ids(config.user))
    item_ids, item = sort_ids(interactions.ids(config.item))
    time = interactions.times(config.timestamp, config.timestamp_unit)
    order = np.lexsort((item, time, user))
    user, item, time = user[order], item[order], time[order]
    if config.split == "time":
        split = splits.split_by_time(user, time, item, config.fractions)
    else:
        split = splits.leave_one_out(user, ~np.isnan(read_labels(interactions, config.label)[order]))
    train = split == splits.SPLITS.index("train")
    user_columns = _EntityColumns(interactions, users, config.user, user_ids, user, time, order)
    item_columns = _EntityColumns(interactions, items, config.item, item_ids, item, time, order)
    train_users, train_items = _members(user[train], len(user_ids)), _members(item[train], len(item_ids))

    vocabularies = {}
    for name in config.user_categorical:
        vocabularies[name] = _vocabulary(user_columns.categories(name, config.separators), train_users)
    for name in (config.item, *config.item_categorical):
        vocabularies[name] = _vocabulary(item_columns.categories(name, config.separators), train_items)
    event_fields = []
    if reads_history:
        for name in config.event_categorical:
            column = interactions.categories(name, config.separators).take(pa.array(order))
            vocabularies[name] = _vocabulary(column, train)
        event_fields = _categories(dataset, "history", config.event_dense)
        for name in config.event_dense:
            edges = _edges(interactions.numbers(name)[order], train, config.num_quantiles)
            keys = [spec.key for spec in dataset.features if spec.role == "history" and spec.column == name]
            event_fields.append(Field(name, "quantile", keys, edges=edges))
        if reads_age:
            event_fields.append(Field(AGE, "age", num_buckets=config.num_age_buckets))
    return Fields(
        _categories(dataset, "user") + _numbers(user_columns, config.user_dense, user[train]),
        _categories(dataset, "item") + _numbers(item_columns, config.item_dense, item[train]),
        event_fields,
        vocabularies,
    )


def _tables(config: DataConfig) -> tuple[DataConfig, Table, Table | None, Table | None]:
    if config.source == "synthetic":
        interactions, items = synthetic.make_tables(config.synthetic)
        return replace(config, **synthetic.COLUMNS), interactions, None, items
    wanted = config.columns()
    users, items = (None if name is None else read_table(name, wanted) for name in (config.users, config.items))
    return config, read_table(config.interactions, wanted), users, items


def _categories(dataset: InteractionDataset, role: str, other: list[str] | None = None) -> list[Field]:
    """The fields of a role's categorical columns, those in `other` aside."""
    by_column: dict[str, list] = {}
    for spec in dataset.features:
        if spec.role == role and spec.column not in (other or []):
            by_column.setdefault(spec.column, []).append(spec)
    fields = []
    for column, specs in by_column.items():
        several = "categories" if specs[0].multi_valued else "category"
        # Events have slots, whose keys are numbered.
        slots = role == "history" and specs[0].key != HISTORY + column
        fields.append(Field(column, "slots" if slots else several, [spec.key for spec in specs]))
    return fields


def _numbers(columns: _EntityColumns, names: list[str], train_rows: np.ndarray) -> list[Field]:
    fields = []
    for name in names:
        # An id that the table lacks takes the NaN appended to the column.
        rows = pc.fill_null(columns._rows, -1).to_numpy()
        known = np.append(columns._table.numbers(name), np.nan)[rows][train_rows]
        known = known[np.isfinite(known)]
        mean, deviation = (known.mean(), known.std()) if len(known) else (0.0, 1.0)
        fields.append(Field(name, "number", mean=float(mean), deviation=float(deviation or 1.0)))
    return fields


def _vocabulary(column: pa.Array, train: np.ndarray) -> list[str]:
    if pa.types.is_list(column.type):
        train = np.repeat(train, pc.fill_null(pc.list_value_length(column), 0).to_numpy())
        column = column.flatten()
        present = pc.fill_null(pc.not_equal(column, ""), False)
        column, train = column.filter(present), train[present.to_numpy(zero_copy_only=False)]
    return sort_ids(column.filter(pa.array(train)).drop_null())[0].to_pylist()


def _edges(values: np.ndarray, train: np.ndarray, num_quantiles: int) -> list[float]:
    known = values[train & np.isfinite(values)]
    inner = np.linspace(0, 1, num_quantiles + 1)[1:-1]
    return np.unique(np.quantile(known, inner)).tolist() if len(known) else []
