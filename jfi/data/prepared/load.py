"""Tables -> rows, sorted and split -> a schema, learnt from the training rows -> ids and numbers -> the dataset.

Each stage is a file: `source` reads the tables, `arrange` sorts and splits, `learn` makes the schema, `encode` applies
it, and `dataset` makes batches.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from jfi.data.batches.choose_events import load_policy
from jfi.data.batches.dataset import InteractionDataset
from jfi.data.batches.engagement import read_engagement
from jfi.data.batches.events import Events, order_by_item
from jfi.data.batches.negatives import NegativeSampler
from jfi.data.config import DataConfig
from jfi.data.config_checks import check_data_config
from jfi.data.errors import DataError
from jfi.data.features.statistics import with_statistics
from jfi.data.prepared import splits
from jfi.data.prepared.arrange import Rows, members, sort_and_split
from jfi.data.prepared.manifest import resolve
from jfi.data.prepared.open_dataset import known_items, open_prepared
from jfi.data.prepared.samples import choose_samples
from jfi.data.prepared.source import Columns, column_settings, read_tables
from jfi.data.prepared.summarize import summarize
from jfi.data.schema.encode import encode_dense, encode_features
from jfi.data.schema.labels import absent_values
from jfi.data.schema.learn import learn_schema
from jfi.data.schema.schema import DataSchema
from jfi.history import Policy
from jfi.utils.display import Display


def load_dataset(config: DataConfig, schema: DataSchema | None = None) -> InteractionDataset:
    """Reads the tables that a config names and makes samples with histories of their rows.

    Vocabularies, quantiles and means come from the training rows only, or from `schema`. A history holds the user's
    events strictly before the sample, whichever split those rows belong to, since they are known by then.

    Without a label, negatives are drawn from the items of the training split. Held-out positives whose item is not in
    the training split are dropped, since an unseen id would reveal the label; the count is logged. They remain in the
    histories.

    Args:
        config: the tables and their columns.
        schema: of a run with these columns. With it nothing is learnt from the tables, and a value that it does not
            know gets id 0.

    Raises:
        DataError: a fault in the files or in the config, as one line that names the place, or a config that does not
            fit the schema.

    Example::

        >>> from jfi.data import DataConfig, load_dataset
        >>> dataset = load_dataset(DataConfig(source="synthetic"))
        >>> [spec.key for spec in dataset.features]
        ['item', 'category', 'history_item', 'history_category', 'history_rating', 'history_age']
        >>> load_dataset(DataConfig(source="synthetic"), dataset.schema).schema is dataset.schema
        True
    """
    if config.prepared is not None:
        config = resolve(config)
        check_data_config(config)
        dataset = open_prepared(config)
        if schema is not None:
            check_equal(schema, dataset.schema, config.prepared)
        return dataset
    check_data_config(config)
    if schema is not None:
        check_fits(schema, column_settings(config))
    with Display("read the tables", None, ticking=True):
        tables = read_tables(config)
    config = column_settings(config)
    if schema is not None and tables.sids is not None:
        tables.sids.check_codec(schema.codec, "the run")
    with Display("sort and encode the rows", None, ticking=True):
        rows = sort_and_split(tables.interactions, config, tables.given_split)
        if config.statistics:
            tables = replace(tables, interactions=with_statistics(tables.interactions, rows, config))
        columns = Columns(tables, rows, config)
        if schema is None:
            schema = learn_schema(columns, rows, config)
        dataset = build_dataset(columns, rows, schema, config)
    absent = absent_values(tables.interactions, config.rules())
    dataset.summary.warnings.extend(one.describe(lambda: [tables.interactions]) for one in absent)
    return dataset


def build_dataset(columns: Columns, rows: Rows, schema: DataSchema, config: DataConfig) -> InteractionDataset:
    """The samples of the splits of `rows`, with their histories.

    Raises:
        DataError: a split is empty, or all its labels are equal.
    """
    ids, events = encode_features(columns, schema), _events(rows)
    items = known_items(schema, ids, events)
    samples = _samples(events, members(items, len(rows.item_ids)), config)
    dataset = InteractionDataset(
        events=events,
        schema=schema,
        columns=ids,
        dense=encode_dense(columns, schema, config),
        samples=samples,
        negatives=None
        if config.label is not None
        else NegativeSampler(events, order_by_item(events), items, config.negatives),
        unknown_share=config.unknown_share,
        batching=config.batching,
        max_timeline=config.longest_timeline,
        engagement=read_engagement(columns, config),
        policy=load_policy(config),
    )
    dataset.summary = summarize(dataset, config, columns)
    return dataset


def build_scoring(
    columns: Columns,
    rows: Rows,
    chosen: np.ndarray,
    schema: DataSchema,
    config: DataConfig,
    policy: Policy | None = None,
) -> InteractionDataset:
    """A dataset whose only split, "rows", has the rows `chosen [B]`, in their order, whatever their labels are.

    Of an event on a surface that the policy does not know, as of any value that training has not seen, nothing is
    known: it stays.
    """
    engagement = None if policy is None else read_engagement(columns, config)
    if engagement is not None:
        engagement = engagement.on_surfaces(policy.surfaces)
    return InteractionDataset(
        events=_events(rows),
        schema=schema,
        columns=encode_features(columns, schema),
        dense=encode_dense(columns, schema, config),
        samples={"rows": chosen},
        negatives=None,
        batching=config.batching,
        max_timeline=config.longest_timeline,
        engagement=engagement,
        policy=policy,
    )


def _events(rows: Rows) -> Events:
    histories = None if rows.event is None else np.flatnonzero(rows.event)
    return Events(rows.user, rows.item, rows.time, rows.label, rows.split, histories, rows.targets)


def check_fits(schema: DataSchema, config: DataConfig) -> None:
    """Checks that the config has the columns and the history that the schema was learnt with.

    Raises:
        DataError: it has not, as one line that names the setting.
    """
    roles = ("user", "item", "context", "history")
    keys = {role: {s.column for s in schema.features if s.role == role and not s.semantic} for role in roles}
    items = {config.item, *config.names("item", "category")}
    moments = [*config.names("user", "number"), *config.names("item", "number"), *config.names("context", "number")]
    events = {*config.names("event"), *config.crosses()}
    wanted_buckets = {one.name: one.hash_buckets for one in config.features if one.hash_buckets is not None}
    buckets = {name: known.num_buckets for name, known in schema.encodings.buckets.items()}
    if (schema.codec is None) != (config.semantic_ids is None):
        which = "without" if schema.codec is None else "with"
        raise DataError(f"data.semantic_ids: got {config.semantic_ids!r}, but the run was started {which} semantic IDs")
    for name, learnt, wanted in (
        ("item", schema.item_key, config.item),
        ("features of user", keys["user"], set(config.names("user", "category"))),
        ("features of item", keys["item"] - {schema.item_key}, items - {config.item}),
        ("features of event", keys["history"] - keys["item"], events),
        ("features of event and type number", set(schema.encodings.edges), set(config.names("event", "number"))),
        ("features of context", keys["context"], set(config.names("context", "category"))),
        ("features of type number", schema.dense_names, moments),
        ("features with hash_buckets", buckets, wanted_buckets),
        ("features with default", schema.encodings.defaults, config.defaults()),
        ("max_history", schema.max_history, config.max_history),
        ("num_age_buckets", schema.num_age_buckets, config.num_age_buckets),
        ("labels", [(one.name, one.task) for one in schema.labels], [(one.name, one.task) for one in config.targets()]),
        ("auxiliary_labels", schema.num_auxiliary, len(config.auxiliary_labels)),
    ):
        if learnt != wanted:
            learnt, wanted = (sorted(x) if isinstance(x, set) else x for x in (learnt, wanted))
            raise DataError(f"data.{name}: got {wanted!r}, but the run was started with {learnt!r}")


def check_equal(schema: DataSchema, prepared: DataSchema, folder: str) -> None:
    """Checks that a dataset was prepared with the schema of a run.

    Raises:
        DataError: it was not, as one line that names a difference.
    """
    for what, learnt, now in _pairs(schema, prepared):
        if learnt != now:
            advice = "prepare the tables again with examples/prepare_data.py --run"
            raise DataError(f"{folder} was prepared with other {what} than the run was started with; {advice}")


def _pairs(schema: DataSchema, prepared: DataSchema) -> Iterator[tuple[str, object, object]]:
    """Returns what is compared, and both values of it; each only makes sense where those before are equal."""
    yield "semantic IDs", *(None if one.codec is None else one.codec.fingerprint for one in (schema, prepared))
    ours, theirs = schema.encodings, prepared.encodings
    yield "keys", schema.features, prepared.features
    yield "dense columns", schema.dense_names, prepared.dense_names
    buckets = [{name: known.num_buckets for name, known in one.buckets.items()} for one in (ours, theirs)]
    yield "hash buckets", *buckets
    yield "defaults", ours.defaults, theirs.defaults
    for name, known in ours.vocabularies.items():
        yield f"values of '{name}'", known.values, theirs.vocabularies[name].values
    for name, edges in ours.edges.items():
        yield f"quantiles of '{name}'", list(edges), list(theirs.edges.get(name, []))
    yield "means and deviations", ours.moments, theirs.moments
    yield "labels", schema.labels, prepared.labels
    yield "auxiliary labels", schema.num_auxiliary, prepared.num_auxiliary


def _samples(events: Events, known: np.ndarray, config: DataConfig) -> dict[str, np.ndarray]:
    parts: dict[str, list[np.ndarray]] = {name: [] for name in splits.SPLITS}
    order = splits.time_order(events.user, events.time, events.item)
    choose_samples(events, order, known, config, lambda name, rows: parts[name].append(rows))
    return {name: np.concatenate(rows) for name, rows in parts.items()}
