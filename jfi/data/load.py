"""Reads the tables that a config names and builds the dataset."""

import logging
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data import splits, synthetic
from jfi.data.columns import Categorical, Encodings, cut_at_quantiles, encode, moments, sort_ids
from jfi.data.config import AGE, HISTORY, DataConfig
from jfi.data.dataset import Entity, Feature, FeatureSpec, InteractionDataset, Role
from jfi.data.errors import DataError
from jfi.data.events import Events, order_by_item
from jfi.data.labels import read_labels
from jfi.data.negatives import NegativeSampler
from jfi.data.readers import read_table
from jfi.data.table import Table
from jfi.encoding import standardize

_log = logging.getLogger(__name__)


def load_dataset(config: DataConfig) -> InteractionDataset:
    """Reads the tables that a config names and makes samples with histories of their rows.

    Vocabularies, quantiles and means come from the training rows only. A history holds the user's events strictly
    before the sample, whichever split those rows belong to, since they are known by then.

    Without a label, negatives are drawn from the items of the training split. Held-out positives whose item is not in
    the training split are dropped, since an unseen id would reveal the label; the count is logged. They remain in the
    histories.

    Raises:
        DataError: a fault in the files or in the config, as one line that names the place.

    Example::

        >>> from jfi.data import DataConfig, load_dataset
        >>> dataset = load_dataset(DataConfig(source="synthetic"))
        >>> [spec.key for spec in dataset.features]
        ['item', 'category', 'history_item', 'history_category', 'history_rating', 'history_age']
    """
    config.check()
    if config.source == "synthetic":
        interactions, items = synthetic.make_tables(config.synthetic)
        return _build(interactions, None, items, replace(config, **synthetic.COLUMNS))
    wanted = config.columns()
    return _build(
        read_table(config.interactions, wanted),
        None if config.users is None else read_table(config.users, wanted),
        None if config.items is None else read_table(config.items, wanted),
        config,
    )


def _build(interactions: Table, users: Table | None, items: Table | None, config: DataConfig) -> InteractionDataset:
    if not len(interactions):
        raise DataError(f"{interactions.name}: no rows")
    user_ids, user = sort_ids(interactions.ids(config.user))
    item_ids, item = sort_ids(interactions.ids(config.item))
    time = interactions.times(config.timestamp, config.timestamp_unit)
    label = read_labels(interactions, config.label)

    order = np.lexsort((item, time, user))
    user, item, time, label = user[order], item[order], time[order], label[order]
    events = Events(user, item, time, label)
    if config.split == "time":
        split = splits.split_by_time(user, time, item, config.fractions)
    else:
        split = splits.leave_one_out(user, ~np.isnan(label))
    train = split == splits.SPLITS.index("train")
    user_columns = _EntityColumns(interactions, users, config.user, user_ids, user, time, order)
    item_columns = _EntityColumns(interactions, items, config.item, item_ids, item, time, order)
    train_items = _members(item[train], len(item_ids))
    samples = _samples(events, split, train_items, config)

    features, encodings = [], Encodings()
    for name in config.user_categorical:
        ids = encode(user_columns.categories(name, config.separators), _members(user[train], len(user_ids)))
        features.append(_feature(name, "user", ids, of="user"))
        encodings.vocabularies[name] = ids.vocabulary
    fields = {config.item: (encode(item_ids, train_items), "item")}
    for name in config.item_categorical:
        fields[name] = encode(item_columns.categories(name, config.separators), train_items), "item"
    features += [_feature(name, "item", ids, of) for name, (ids, of) in fields.items()]
    for name in config.event_categorical:
        column = interactions.categories(name, config.separators).take(pa.array(order))
        fields[name] = encode(column, train), "event"
    for name in config.event_dense:
        fields[name] = cut_at_quantiles(interactions.numbers(name)[order], train, config.num_quantiles), "event"
    for name, (ids, of) in fields.items():
        features += _history(name, ids, of, config.max_slots)
        if ids.edges is None:
            encodings.vocabularies[name] = ids.vocabulary
        else:
            encodings.edges[name] = ids.edges
    age = FeatureSpec(HISTORY + AGE, "bucket", config.timestamp, "", config.num_age_buckets)
    _check_keys([*(feature.spec for feature in features), age])

    return InteractionDataset(
        events=events,
        features=features,
        age=age,
        dense=(
            user_columns.dense(config.user_dense, user[train], encodings),
            item_columns.dense(config.item_dense, item[train], encodings),
        ),
        dense_names=[*config.user_dense, *config.item_dense],
        samples=samples,
        negatives=None
        if config.label is not None
        else NegativeSampler(events, order_by_item(events), np.flatnonzero(train_items), config.negatives),
        item_key=config.item,
        titles=None if config.title is None else ["unseen", *item_columns.titles(config.title, train_items)],
        encodings=encodings,
        max_history=config.max_history,
    )


def _check_keys(specs: list[FeatureSpec]) -> None:
    column_of: dict[str, str] = {}
    for spec in specs:
        if spec.key in column_of:
            columns = f"'{column_of[spec.key]}' and '{spec.column}'"
            raise DataError(f"the columns {columns} both need the key '{spec.key}'; rename one of them")
        column_of[spec.key] = spec.column


def _samples(events: Events, split: np.ndarray, train_items: np.ndarray, config: DataConfig) -> dict[str, np.ndarray]:
    labeled = ~np.isnan(events.label)
    if not labeled.any():
        raise DataError(f"label '{config.label}' is empty in every row")
    order = splits.time_order(events.user, events.time, events.item)
    samples = {name: order[(labeled & (split == i))[order]] for i, name in enumerate(splits.SPLITS)}
    for name, rows in samples.items():
        if not len(rows):
            how = (
                f"data.fractions {config.fractions}" if config.split == "time" else "users with 3 labeled rows or more"
            )
            raise DataError(f"the {name} split is empty: {labeled.sum()} labeled rows, split by {how}")
        if config.label is None:
            # Negatives are items of the training split, so the id of an unseen item would reveal a positive.
            samples[name] = seen = rows[train_items[events.item[rows]]]
            dropped = f"dropped {len(rows) - len(seen)} of {len(rows)} positives of the {name} split"
            if not len(seen):
                raise DataError(f"the {name} split is empty: {dropped}, whose items are not in the training split")
            if len(seen) < len(rows):
                _log.warning("%s, whose items are not in the training split", dropped)
            continue
        labels = events.label[rows]
        if labels.min() == labels.max():
            raise DataError(f"label '{config.label}': all {len(rows)} labels of the {name} split are {labels[0]:g}")
    return samples


class _EntityColumns:
    """The columns of users or of items, with one row for each.

    They come from the entity's own table or, without one, from the first event of each user or item.

    Args:
        interactions: the table of interactions.
        table: the table of users or of items, or None.
        key: name of the id column.
        ids: the distinct ids, in the order of the rows to make.
        index: `[E]`, the row of each event's user or item.
        time, order: `[E]`, each event's time, and its row in `interactions`.
    """

    def __init__(
        self,
        interactions: Table,
        table: Table | None,
        key: str,
        ids: pa.Array,
        index: np.ndarray,
        time: np.ndarray,
        order: np.ndarray,
    ) -> None:
        self._key, self._ids = key, ids
        if table is None:
            self._table = interactions
            by_time = np.argsort(time, kind="stable")
            first = np.unique(index[by_time], return_index=True)[1]
            self._rows = pa.array(order[by_time[first]])
            return
        self._table = table
        known = table.ids(key)
        first = pc.index_in(known, value_set=known).to_numpy()
        again = first != np.arange(len(first))
        if again.any():
            row = int(again.argmax())
            raise table.fault(row, f"'{key}' {known[row]} is already on line {table.line(int(first[row]))}")
        self._rows = pc.index_in(ids, value_set=known)
        if self._rows.null_count == len(ids):
            raise DataError(f"{table.name}: column '{key}' has none of the ids of {interactions.name}")

    def categories(self, name: str, separators: dict[str, str]) -> pa.Array:
        # The table may lack some of the ids.
        return self._ids if name == self._key else self._table.categories(name, separators).take(self._rows)

    def dense(self, names: list[str], train_rows: np.ndarray, encodings: Encodings) -> np.ndarray:
        # An id that the table lacks reads the NaN that is appended to the column.
        rows, columns = pc.fill_null(self._rows, -1).to_numpy(), []
        for name in names:
            values = np.append(self._table.numbers(name), np.nan)[rows]
            encodings.moments[name] = moments(values[train_rows])
            columns.append(standardize(values, *encodings.moments[name]))
        return np.stack(columns, axis=1) if columns else np.zeros((len(rows), 0), np.float32)

    def titles(self, name: str, train: np.ndarray) -> list[str]:
        titles = self._table.strings(name).take(self._rows).filter(pa.array(train))
        return pc.fill_null(titles, "untitled").to_pylist()


def _members(index: np.ndarray, count: int) -> np.ndarray:
    """`[count]` bool, true at the values of `index`."""
    members = np.zeros(count, bool)
    members[index] = True
    return members


def _feature(column: str, role: Role, ids: Categorical, of: Entity, key: str | None = None) -> Feature:
    return Feature(
        FeatureSpec(key or column, role, column, column, ids.num_embeddings, ids.offsets is not None), ids, of
    )


def _history(column: str, ids: Categorical, of: Entity, max_slots: int) -> list[Feature]:
    if ids.offsets is None:
        return [_feature(column, "history", ids, of, HISTORY + column)]
    slots = enumerate(ids.slots(max_slots))
    return [_feature(column, "history", slot, of, f"{HISTORY}{column}_{i}") for i, slot in slots]
