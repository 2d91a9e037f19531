"""The manifest: what a prepared dataset was made with, and the config of a run on it."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from jfi.data.config import FILES, DataConfig, FeatureConfig
from jfi.data.errors import DataError
from jfi.data.io.paths import unnamed_urls
from jfi.data.schema.versioned_json import read_versioned

FORMAT = "jfi prepared dataset 6"
MANIFEST = "manifest.json"
#: Settings that a run may override, since they change no file of a prepared dataset.
RUN_SETTINGS = ("max_history", "batching", "negatives", "policy")


@dataclass(frozen=True)
class Manifest:
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
    def load(cls, folder: str | Path) -> "Manifest":
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
    return dataclasses.replace(Manifest.load(folder).data, prepared=str(folder), **choices)


def with_statistics_features(config: DataConfig, made: list[str]) -> DataConfig:
    """The config whose features include the dense features of the context that statistics make, by their names."""
    known = config.names("context", "number")
    made = [FeatureConfig(name, "context", "number") for name in made if name not in known]
    return dataclasses.replace(config, features=[*config.features, *made]) if made else config


def resolve(config: DataConfig) -> DataConfig:
    """The config of a run: with `config.prepared`, the settings that the dataset was prepared with.

    `RUN_SETTINGS` are the run's own. The names of the tables are the dataset's. Any other field with its default counts
    as not set, so that the dataset's own holds.

    Raises:
        DataError: there is no prepared dataset, or the config sets a field otherwise.
    """
    if config.prepared is None:
        return config
    made, settings, default = Manifest.load(config.prepared).data, {}, DataConfig()
    # The dataset's features have those that its statistics made.
    if config.features:
        config = with_statistics_features(config, made.statistics_columns())
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
