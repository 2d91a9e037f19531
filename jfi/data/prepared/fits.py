"""Checks that a config, or a prepared dataset, goes with the schema of a run."""

from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.schema.schema import DataSchema


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
    capacities = {one.name: (one.capacity, one.min_count) for one in config.features if one.capacity is not None}
    known_capacities = {name: (one.capacity, one.min_count) for name, one in schema.encodings.capacities.items()}
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
        ("features with capacity", known_capacities, capacities),
        ("features with default", schema.encodings.defaults, config.defaults()),
        ("max_history", schema.max_history, config.max_history),
        ("labels", [(one.name, one.task) for one in schema.labels], [(one.name, one.task) for one in config.targets()]),
        ("labels, auxiliary ones", schema.num_auxiliary, len(config.auxiliary_labels())),
    ):
        if learnt != wanted:
            learnt, wanted = (sorted(x) if isinstance(x, set) else x for x in (learnt, wanted))
            raise DataError(f"data.{name}: got {wanted!r}, but the run was started with {learnt!r}")


def check_equal(schema: DataSchema, prepared: DataSchema, folder: str | None) -> None:
    """Checks that a dataset was prepared with the schema of a run.

    Raises:
        DataError: it was not, as one line that names a difference.
    """
    ours, theirs = (_parts(one) for one in (schema, prepared))
    for what, learnt in ours.items():
        if learnt != theirs.get(what):
            advice = "prepare the tables again with `jfi prepare --run`"
            raise DataError(f"{folder} was prepared with other {what} than the run was started with; {advice}")


def _parts(schema: DataSchema) -> dict[str, object]:
    known = schema.encodings
    return {
        "semantic IDs": None if schema.codec is None else schema.codec.fingerprint,
        "keys": schema.features,
        "dense columns": schema.dense_names,
        "hash buckets": {name: buckets.num_buckets for name, buckets in known.buckets.items()},
        "capacities": known.capacities,
        "defaults": known.defaults,
        **{f"values of '{name}'": vocabulary.values for name, vocabulary in known.vocabularies.items()},
        **{f"quantiles of '{name}'": list(edges) for name, edges in known.edges.items()},
        "means and deviations": known.moments,
        "bounds of statistics": known.bounds,
        "half-lives of statistics": known.half_lives,
        "newest events of statistics": known.window,
        "labels": schema.labels,
        "auxiliary labels": schema.num_auxiliary,
    }
