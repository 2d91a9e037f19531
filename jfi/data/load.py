from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data import splits, synthetic
from jfi.data.config import AGE, HISTORY, DataConfig
from jfi.data.dataset import Events, Feature, FeatureSpec, InteractionDataset
from jfi.data.encode import Categorical, bucketize, encode, sort_ids, standardise
from jfi.data.errors import DataError
from jfi.data.labels import read_labels
from jfi.data.negatives import NegativeSampler
from jfi.data.readers import read_table
from jfi.data.table import Table


def load_dataset(config: DataConfig) -> InteractionDataset:
    """Reads the tables a config names and makes samples with histories of them.

    Vocabularies, quantiles and means are of the training rows alone. A history holds what its user did strictly before the
    sample, whatever the split of those rows: at that moment it is known.

    Raises:
        DataError: a fault of the files or of the config, in one line that names the place.

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
    return _build(
        read_table(config.interactions),
        None if config.users is None else read_table(config.users),
        None if config.items is None else read_table(config.items),
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
    events = Events(user, item, time, label, *splits.history_ranges(user, time, config.max_history))

    labelled = ~np.isnan(label)
    if config.split == "time":
        split = splits.split_by_time(user, time, item, config.fractions)
    else:
        split = splits.leave_one_out(user, labelled)
    samples = _samples(events, split, labelled, config)

    train = split == 0
    train_users, train_items = _members(user[train], len(user_ids)), _members(item[train], len(item_ids))
    of_user = _Side(interactions, users, config.user, user_ids, user, time, order)
    of_item = _Side(interactions, items, config.item, item_ids, item, time, order)

    target = encode(item_ids, train_items)
    features = [_feature(c, "user", of_user.encode(c, train_users, config), "user") for c in config.user_categorical]
    columns = {config.item: target} | {c: of_item.encode(c, train_items, config) for c in config.item_categorical}
    features += [_feature(c, "item", ids, "item") for c, ids in columns.items()]
    for name, ids in columns.items():
        features += _history(name, ids, "item", config.max_slots)
    for name in config.event_categorical:
        ids = encode(interactions.strings(name).take(pa.array(order)), train, _separator(interactions, name, config))
        features += _history(name, ids, "event", config.max_slots)
    for name in config.event_dense:
        ids = bucketize(interactions.numbers(name)[order], train, config.num_quantiles)
        features += _history(name, ids, "event", config.max_slots)

    return InteractionDataset(
        events=events,
        features=features,
        age=FeatureSpec(HISTORY + AGE, "bucket", config.timestamp, "", config.num_age_buckets),
        dense=(of_user.dense(config.user_dense, user[train]), of_item.dense(config.item_dense, item[train])),
        dense_names=[*config.user_dense, *config.item_dense],
        samples=samples,
        negatives=None
        if config.label is not None
        else NegativeSampler(user, item, time, np.flatnonzero(train_items), config.negatives),
        item_key=config.item,
        titles=None if config.title is None else of_item.titles(config.title, target),
    )


def _samples(events: Events, split: np.ndarray, labelled: np.ndarray, config: DataConfig) -> dict[str, np.ndarray]:
    if not labelled.any():
        raise DataError(f"label '{config.label}' is empty in every row")
    order = splits.time_order(events.user, events.time, events.item)
    samples = {name: order[(labelled & (split == i))[order]] for i, name in enumerate(splits.SPLITS)}
    for name, rows in samples.items():
        if not len(rows):
            how = (
                f"fractions {config.fractions}" if config.split == "time" else "users with three labelled rows or more"
            )
            raise DataError(f"the {name} split is empty: {labelled.sum()} labelled rows, split by {how}")
        labels = events.label[rows]
        if config.label is not None and labels.min() == labels.max():
            what = f"all {len(rows)} labels of the {name} split are {labels[0]:g}; there is nothing to tell apart"
            raise DataError(f"label '{config.label}': {what}")
    return samples


class _Side:
    """The columns of users or of items, a row each.

    Their table gives them, or, without one, the first event of each in time.
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
        self._table = interactions if table is None else table
        if table is None:
            by_time = np.argsort(time, kind="stable")
            self._rows = pa.array(order[by_time][np.unique(index[by_time], return_index=True)[1]])
            return
        known = table.ids(key)
        first = pc.index_in(known, value_set=known).to_numpy()
        again = first != np.arange(len(first))
        if again.any():
            row = int(again.argmax())
            raise table.fault(row, f"'{key}' {known[row].as_py()} again; line {table.line(first[row])} has it already")
        self._rows = pc.index_in(ids, value_set=known)

    def encode(self, name: str, train: np.ndarray, config: DataConfig) -> Categorical:
        return encode(self._table.strings(name).take(self._rows), train, _separator(self._table, name, config))

    def dense(self, names: list[str], train_rows: np.ndarray) -> np.ndarray:
        rows = pc.fill_null(self._rows, -1).to_numpy(zero_copy_only=False)
        dense = np.zeros((len(rows), len(names)), np.float32)
        for i, name in enumerate(names):
            # Row -1, of an id the table lacks, is the appended NaN.
            dense[:, i] = standardise(np.append(self._table.numbers(name), np.nan)[rows], train_rows)
        return dense

    def titles(self, name: str, target: Categorical) -> list[str]:
        titles = np.full(target.num_embeddings, "unseen", object)
        titles[target.ids] = pc.fill_null(self._table.strings(name).take(self._rows), "untitled").to_pylist()
        titles[0] = "unseen"
        return titles.tolist()


def _separator(table: Table, name: str, config: DataConfig) -> str | None:
    return config.separators.get(name, table.separators.get(name))


def _members(index: np.ndarray, count: int) -> np.ndarray:
    members = np.zeros(count, bool)
    members[index] = True
    return members


def _feature(column: str, role: str, ids: Categorical, of: str, key: str | None = None) -> Feature:
    multi_valued = ids.offsets is not None
    return Feature(FeatureSpec(key or column, role, column, column, ids.num_embeddings, multi_valued), ids, of)


def _history(column: str, ids: Categorical, of: str, max_slots: int) -> list[Feature]:
    if ids.offsets is None:
        return [_feature(column, "history", ids, of, HISTORY + column)]
    slots = enumerate(ids.slots(max_slots))
    return [_feature(column, "history", slot, of, f"{HISTORY}{column}_{i}") for i, slot in slots]
