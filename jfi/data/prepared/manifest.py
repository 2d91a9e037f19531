"""The manifest: what a prepared dataset was made with, and the config of a run on it."""

import dataclasses
import json
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path

from jfi.data.config import FILES, DataConfig, FeatureConfig, LabelConfig, SyntheticConfig
from jfi.data.errors import DataError
from jfi.utils.files import reading_file
from jfi.utils.suggest import suggest

FORMAT = "jfi prepared dataset 2"
MANIFEST = "manifest.json"
#: Settings that are a run's own, since they change no file of a prepared dataset.
CHOICES = (
    "max_history",
    "max_timeline",
    "batching",
    "negatives",
    "eval_negatives",
    "unknown_share",
    "policy",
    "auxiliary_weight",
)


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    Args:
        data: the settings of the tables, columns, labels and splits.
        sizes: the bytes of each file.
    """

    data: DataConfig
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    def text(self) -> str:
        """Returns the text of its JSON file."""
        data = dataclasses.asdict(self.data.without_tables())
        del data["prepared"]
        tree = {"format": FORMAT, "sizes": self.sizes, "data": data}
        return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """The manifest of a prepared dataset. Relative names of tables are below its folder; URLs are kept.

        Raises:
            DataError: `folder` is none, or one of another version, or a value is of a wrong type.
        """
        path = Path(folder) / MANIFEST
        if not path.is_file():
            what = "it is no folder" if Path(folder).is_file() else f"{MANIFEST} is missing"
            raise DataError(f"{folder}: not a prepared dataset, {what}")
        with reading_file(path, DataError):
            content = path.read_bytes()
        try:
            tree = json.loads(content)
        except (ValueError, RecursionError):
            raise DataError(f"{path}: not JSON") from None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            found = tree.get("format") if isinstance(tree, dict) else None
            raise DataError(f"{path}: not a manifest of this version of jfi: 'format' is {found!r}, must be '{FORMAT}'")
        for name, kind in (("data", dict), ("sizes", dict[str, int])):
            _check(path, name, tree.get(name), kind)
        data = dict(tree["data"])
        _check_fields(path, "data", data, DataConfig)
        if "synthetic" in data:
            data["synthetic"] = SyntheticConfig(**data["synthetic"])
        data["features"] = [FeatureConfig(**one) for one in data.get("features", [])]
        data["labels"] = [LabelConfig(**one) for one in data.get("labels", [])]
        data |= {name: _below(path.parent, data[name]) for name in FILES if name in data}
        return cls(DataConfig(**data), tree["sizes"])


def prepared_config(folder: str | Path, **choices: float | str | None) -> DataConfig:
    """The config of a run on a prepared dataset, with the settings that it was prepared with.

    Args:
        folder: of the dataset.
        choices: other values of `CHOICES`.

    Raises:
        DataError: there is no prepared dataset.
    """
    return dataclasses.replace(Manifest.load(folder).data, prepared=str(folder), **choices)


def resolve(config: DataConfig) -> DataConfig:
    """The config of a run: with `config.prepared`, the settings that the dataset was prepared with.

    `CHOICES` are the run's own. The names of the tables are the dataset's. Any other field with its default counts as
    not set, so that the dataset's own holds.

    Raises:
        DataError: there is no prepared dataset, or the config sets a field otherwise.
    """
    if config.prepared is None:
        return config
    made, settings, default = Manifest.load(config.prepared).data, {}, DataConfig()
    for one in dataclasses.fields(DataConfig):
        name, own, theirs = one.name, getattr(config, one.name), getattr(made, one.name)
        if name == "prepared" or name in CHOICES:
            settings[name] = own
        elif name in FILES or own in (getattr(default, name), theirs):
            settings[name] = theirs
        else:
            raise DataError(f"data.{name} is {own!r}, but {config.prepared} was prepared with {theirs!r}")
    return DataConfig(**settings)


def _below(folder: Path, names: str | list[str] | None) -> str | list[str] | None:
    if isinstance(names, list):
        return [_below(folder, name) for name in names]
    return names if not names or "://" in names else os.path.join(os.path.abspath(folder), os.path.expanduser(names))


def _check_fields(path: Path, prefix: str, values: dict, kind: type) -> None:
    kinds = typing.get_type_hints(kind)
    for name, value in values.items():
        if name not in kinds or name == "prepared":
            raise DataError(f"{path}: {prefix} has no field '{name}'; {suggest(name, kinds)}")
        inner = next(iter(typing.get_args(kinds[name])), None)
        if dataclasses.is_dataclass(inner) and isinstance(value, list):
            for place, one in enumerate(value):
                key = f"{prefix}.{name}[{place}]"
                _check(path, key, one, dict)
                _check_fields(path, key, one, inner)
                needed = {one.name for one in dataclasses.fields(inner) if one.default is one.default_factory}
                if lacking := needed - one.keys():
                    raise DataError(f"{path}: {key} has no field '{min(lacking)}'")
        elif dataclasses.is_dataclass(kinds[name]):
            _check(path, f"{prefix}.{name}", value, dict)
            _check_fields(path, f"{prefix}.{name}", value, kinds[name])
        else:
            _check(path, f"{prefix}.{name}", value, kinds[name])


def _check(path: Path, name: str, value: object, kind: object) -> None:
    if not _fits(value, kind):
        raise DataError(f"{path}: {name} is {json.dumps(value, ensure_ascii=False)[:80]}, must be {_shown(kind)}")


def _fits(value: object, kind: object) -> bool:
    """Returns whether a value of JSON has the type of a config's field."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return isinstance(value, str) and value in parts
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, parts[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, parts[1]) for one in value.values())
    return type(value) in ((int, float) if kind is float else (kind,))


def _shown(kind: object) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", dict: "an object"}
    return names.get(kind) or str(kind).replace("NoneType", "None")
