"""The manifest of a prepared dataset, the config of a run on it, and whether both go with the schema of a run."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from jfi.data.config import FILES, DataConfig
from jfi.data.errors import DataError
from jfi.data.io.paths import unnamed_urls
from jfi.data.schema.schema import DataSchema, read_versioned

FORMAT = "jfi prepared dataset 6"
MANIFEST = "manifest.json"
#: Settings that a run may override, since they change no file of a prepared dataset.
RUN_SETTINGS = ("max_history", "batching", "negatives", "policy")


@dataclass(frozen=True)
class DatasetManifest:
    """The content of manifest.json.

    Args:
        data: the settings of the tables, columns, labels and splits.
        sizes: the bytes of each file.
    """

    data: DataConfig
    sizes: dict[str, int]

    def save(self, folder: Path) -> None:
        """Writes the file into the folder of a dataset."""
        data = dataclasses.asdict(self.data.without_tables())
        del data["prepared"]
        tree = {"format": FORMAT, "sizes": self.sizes, "data": data}
        (folder / MANIFEST).write_text(json.dumps(tree, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "DatasetManifest":
        """The manifest of a prepared dataset.

        Raises:
            DataError: `folder` is none, or one of another version, or the file is damaged or missing in SHA256SUMS.
        """
        path = Path(folder) / MANIFEST
        if not path.is_file():
            what = "it is no folder" if Path(folder).is_file() else f"{MANIFEST} is missing"
            raise DataError(f"{folder}: not a prepared dataset, {what}")
        made = read_versioned(path, cls, FORMAT, "prepare the tables again")
        tables = {name: unnamed_urls(getattr(made.data, name)) for name in FILES}
        return dataclasses.replace(made, data=dataclasses.replace(made.data, **tables))


def prepared_config(folder: str | Path, **choices: float | str | None) -> DataConfig:
    """The config of a run on a prepared dataset, with the settings that it was prepared with.

    Args:
        folder: of the dataset.
        choices: other values of `RUN_SETTINGS`.

    Raises:
        DataError: there is no prepared dataset.
    """
    return dataclasses.replace(DatasetManifest.load(folder).data, prepared=str(folder), **choices)


def resolve(config: DataConfig) -> DataConfig:
    """The config of a run: with `config.prepared`, the settings that the dataset was prepared with.

    `RUN_SETTINGS` are the run's own. The names of the tables are the dataset's. Any other field with its default counts
    as not set, so that the dataset's own holds.

    Raises:
        DataError: there is no prepared dataset, or the config sets a field otherwise.
    """
    if config.prepared is None:
        return config
    made, settings, default = DatasetManifest.load(config.prepared).data, {}, DataConfig()
    # The dataset's features have those that its statistics made.
    if config.features:
        config = config.with_context_numbers(made.statistics_columns())
    for one in dataclasses.fields(DataConfig):
        name, own, theirs = one.name, getattr(config, one.name), getattr(made, one.name)
        if name == "prepared" or name in RUN_SETTINGS:
            settings[name] = own
        elif name in FILES or own in (getattr(default, name), theirs):
            settings[name] = theirs
        else:
            if isinstance(own, list) and isinstance(theirs, list):
                own, theirs = ([x for x in one if x not in other] for one, other in ((own, theirs), (theirs, own)))
            raise DataError(f"data.{name} is {own!r}, but {config.prepared} was prepared with {theirs!r}")
    return DataConfig(**settings)


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
