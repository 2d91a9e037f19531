"""The manifest of a prepared dataset, the verification of its files, and the config and the schema of a run on it."""

import dataclasses
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jfi.data.config import FILES, DataConfig
from jfi.data.errors import DataError
from jfi.data.io.paths import unnamed_urls
from jfi.data.schema.schema import DataSchema, read_versioned
from jfi.utils.files import verify

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


def verify_dataset(folder: Path) -> None:
    """Verifies the SHA-256 of all files of a complete dataset, as `sha256sum -c SHA256SUMS` does.

    Raises:
        DataError: the folder is not a complete prepared dataset, or a file of it is missing or damaged.
    """
    verify(folder, list(check_sizes(folder)), DataError)


def check_sizes(folder: Path) -> dict[str, int]:
    """Checks the sizes of all files, and returns them with that of the manifest."""
    sizes = DatasetManifest.load(folder).sizes
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise DataError(f"{folder}: damaged, {name} {what}")
    return {MANIFEST: (folder / MANIFEST).stat().st_size, **sizes}


#: Files up to this size are verified before `open_checked` returns.
SMALL = 1 << 24


class Verification:
    """The verification of files by a background thread.

    Args:
        folder: of the files and SHA256SUMS.
        names: of the files.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> _ = (folder / "events.arrow").write_bytes(b"events")
        >>> from jfi.utils.files import write_sums
        >>> write_sums(folder, {"events.arrow": "0" * 64})
        >>> verification = Verification(folder, ["events.arrow"])
        >>> verification.check()
        Traceback (most recent call last):
        jfi.data.errors.DataError: .../events.arrow is damaged: its SHA-256 is not the one in SHA256SUMS
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(folder, names), daemon=True)
        self._thread.start()

    def _run(self, folder: Path, names: Sequence[str]) -> None:
        try:
            verify(folder, names, DataError)
        except Exception as fault:
            self._fault = fault

    def check(self, seconds: float | None = None) -> bool:
        """Raises the fault of the first damaged file that was found.

        Args:
            seconds: to wait until all files are verified; None waits as long as it takes.

        Returns:
            Whether all files are verified.

        Raises:
            DataError: a file is missing or damaged.
            OSError: a file cannot be read.
        """
        self._thread.join(seconds)
        if self._fault is not None:
            raise self._fault
        return not self._thread.is_alive()


def open_checked(folder: Path, sizes: Mapping[str, int]) -> Verification | None:
    """Verifies the small files, and begins to verify the large ones.

    Args:
        folder: of the dataset.
        sizes: the bytes of each file, by name.

    Returns:
        The verification of the large files; None if there are none, or if another process of this host verifies them.

    Raises:
        DataError: a file, or SHA256SUMS, is missing or damaged.
    """
    verify(folder, [name for name, size in sizes.items() if size <= SMALL], DataError)
    large = [name for name, size in sizes.items() if size > SMALL]
    return Verification(folder, large) if large and os.environ.get("LOCAL_RANK", "0") == "0" else None


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
        ("max_history", schema.max_history, max(config.history_lengths().values())),
        ("histories", schema.histories, config.history_lengths()),
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
    if (what := schema.difference(prepared)) is not None:
        advice = "prepare the tables again with `jfi prepare --run`"
        raise DataError(f"{folder} was prepared with other {what} than the run was started with; {advice}")
