"""The schema of requests to a model, from the data that it was trained on."""

from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING

from jfi.data import DataConfig, DataSchema
from jfi.data.config import AGE, HISTORY, NUM_AGE_BUCKETS
from jfi.events.groups import NUM_VALUES, SESSIONS, ItemColumn, StatisticsSettings
from jfi.serving.artifact import ArtifactError
from jfi.serving.schema import Field, PolicyFields, Schema
from jfi.utils.encoding import PER_SECOND

if TYPE_CHECKING:
    from jfi.models import SequenceDLRM


def schema_of_model(
    config: DataConfig, data: DataSchema, model: "SequenceDLRM", reads_history: bool, reads_item: bool
) -> Schema:
    """Returns the schema of the requests to a run's model.

    Raises:
        ArtifactError: the model reads several histories, and a request has one.
    """
    if len(data.histories) > 1:
        what = "data.histories has several, and requests and a state of users have one"
        raise ArtifactError(f"{what}; score tables by `jfi predict`, or train with data.history for a server")
    reads_age = any(feature.bias_key is not None for feature in model.sequence_arch.features)
    schema = schema_of(config, data, reads_history, reads_age, reads_item)
    if not config.statistics_columns():
        return schema
    settings = statistics_settings(config, data)
    if reads_history:
        return replace(schema, statistics=settings)
    whole = schema_of(config, data, True, False, reads_item)
    counted = [one for one in whole.event if one.name in {**settings.columns, **settings.numbers, **settings.values}]
    return replace(schema, statistics=settings, counted=counted, vocabularies=whole.vocabularies)


def schema_of(
    config: DataConfig, data: DataSchema, reads_history: bool, reads_age: bool, reads_item: bool = True
) -> Schema:
    """The fields of requests to a model of `data`."""
    config, policy = config.resolved(), None
    if config.policy is not None and reads_history:
        policy = PolicyFields(config.dwell, config.surface, config.session, PER_SECOND[config.dwell_unit])
    if not reads_item:
        data = replace(data, features=[spec for spec in data.features if spec.column != data.item_key])
    events, shown = [], config.names("context", "category")
    if reads_history:
        crosses = config.crosses()
        events = [
            replace(one, kind="cross", columns=crosses[one.name]) if one.name in crosses else one
            for one in _categories(data, "history")
        ]
        for name in config.names("event", "number"):
            keys = [spec.key for spec in data.features if spec.role == "history" and spec.column == name]
            edges, default = data.encodings.edges[name].tolist(), data.encodings.defaults.get(name)
            events.append(Field(name, "quantile", keys, edges=edges, default=default))
        if reads_age or policy is not None:
            events.append(Field(AGE, "age", num_buckets=NUM_AGE_BUCKETS))
    items, numbers = _categories(data, "item"), config.names("item", "number")
    return Schema(
        _categories(data, "user") + _numbers(data, config.names("user", "number")),
        items + _categories(data, "context") + _numbers(data, numbers + config.names("context", "number")),
        events,
        {
            name: list(vocabulary.values)
            for name, vocabulary in data.encodings.vocabularies.items()
            if (reads_history or name not in {*config.names("event", "category"), *config.crosses()} - {*shown})
            and (reads_item or name != data.item_key)
        },
        policy,
        None if data.codec is None else data.codec.fingerprint,
        [label.name for label in data.labels] if len(data.labels) > 1 else [],
        [label.task for label in data.labels],
        user_id=config.user,
        item_id=config.item,
        item_columns=[one.name for one in items if one.name != config.item] + numbers,
        label=None if config.is_implicit else str(config.targets()[0].label),
        history=config.history,
    )


def statistics_settings(config: DataConfig, schema: DataSchema) -> StatisticsSettings:
    """Returns the statistics of the past of a run."""
    config = config.resolved()
    item = next(one for one in schema.features if one.key == schema.item_key)
    slots: dict[str, list] = {}
    for one in schema.features:
        is_of_item = one.role == "history" and one.of == "item" and one.column != schema.item_key
        if is_of_item and not one.semantic and not one.raw:  # nothing counts by raw ids
            slots.setdefault(one.column, []).append(one)
    columns = {
        name: ItemColumn(
            next(one.key for one in schema.features if one.role == "item" and one.column == name),
            own[0].num_embeddings,
            len(own),
        )
        for name, own in slots.items()
    }
    groups, encodings = config.statistics_groups(), schema.encodings
    numbers, values = config.event_values() if "event_values" in groups else ([], [])
    return StatisticsSettings(
        user=config.user,
        item=config.item,
        groups=list(groups),
        window=schema.encodings.window,
        half_lives=list(schema.encodings.half_lives),
        is_implicit=config.is_implicit,
        num_known=item.num_embeddings,
        categories=config.names("item", "category"),
        columns=columns,
        session=config.session if {*SESSIONS} & {*groups} else None,
        numbers={name: encodings.edges[name].tolist() for name in numbers},
        values={
            name: [*islice(encodings.vocabularies[name].values, NUM_VALUES)] if name in encodings.vocabularies else []
            for name in values
        },
    )


def _categories(data: DataSchema, role: str) -> list[Field]:
    """The fields of a role's columns that have a vocabulary, and of semantic IDs."""
    by_column: dict[str, list] = {}
    fields = []
    for spec in data.features:
        if spec.role == role and spec.semantic:
            fields.append(Field(spec.column, "sid", [spec.key], layout=asdict(data.codec.layout)))
            continue
        is_quantile = role == "history" and spec.column in data.encodings.edges
        if spec.role == role and not is_quantile:
            by_column.setdefault(spec.column, []).append(spec)
    for column, specs in by_column.items():
        # The slots of a multi-valued column of events have numbered keys.
        if role == "history" and specs[0].key != f"{HISTORY}_{column}":
            kind = "slots"
        else:
            kind = "categories" if specs[0].multi_valued else "category"
        buckets = data.encodings.buckets
        num_buckets = buckets[column].num_buckets if column in buckets else 0
        hashed = {"num_buckets": num_buckets, "capacity": specs[0].num_embeddings if specs[0].raw else 0}
        default = data.encodings.defaults.get(column)
        fields.append(Field(column, kind, [spec.key for spec in specs], default=default, **hashed))
    return fields


def _numbers(data: DataSchema, names: list[str]) -> list[Field]:
    scales = {name: data.encodings.scale(name) for name in names}
    return [
        Field(name, "number", mean=mean, deviation=deviation, default=default, bounds=bounds)
        for name, (mean, deviation, default, bounds) in scales.items()
    ]
