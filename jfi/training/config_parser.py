"""Reads configs from YAML files and command lines, and writes them; a fault is one line.

`jfi.utils.exit_codes` has the exit codes.
"""

import argparse
import dataclasses
import re
import types
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import yaml

from jfi.data import DataError
from jfi.data.config import FILES
from jfi.data.io.paths import unnamed_urls
from jfi.data.prepared.manifest import CHOICES, prepared_config
from jfi.data.removed_settings import REMOVED, check_removed, describe_renamed
from jfi.training.config import Config, ConfigError
from jfi.training.config_yaml import StandIns, read_yaml, scalars
from jfi.utils.errors import suggest
from jfi.utils.exit_codes import EXIT_CODES, shorten
from jfi.utils.files import is_storage_fault, write_file

if TYPE_CHECKING:
    import jsonargparse

_SECTIONS = {f.name: f.type for f in dataclasses.fields(Config)}
#: Version of the settings' meaning; a config of another one is refused. Version 3 declares features by entries,
#: `data.fractions` are of the labelled rows, and has defaults that follow from the table.
VERSION = 3


def parse_config(
    arguments: Sequence[str], description: str, options: Mapping[str, dict] | None = None
) -> tuple[Config, SimpleNamespace]:
    """The config from `--config FILE` and overrides such as `--model.pooling mean`, and a script's own options.

    An override takes precedence over the file, in any order. `--help` prints all fields and exits.

    Args:
        arguments: the command line without the program's name.
        description: one line for `--help`.
        options: the script's own options, each with the arguments of `add_argument`.

    Returns:
        The config, and the values of the script's own options.

    Raises:
        ConfigError: an unknown key, a wrong value or an unreadable file.

    Example:
        >>> config, own = parse_config(["--model.num_heads", "8", "--fast", "3"], "Example.", {"--fast": {"type": int}})
        >>> config.model.num_heads, own.fast
        (8, 3)
    """
    options, stand_ins = options or {}, StandIns()
    file_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    file_parser.add_argument("--config")
    try:
        file, overrides = file_parser.parse_known_args(arguments)
        option = "a value"
        removed: dict[str, object] = {}
        named: set[str] = set()  # texts of the command line
        for index, argument in enumerate(overrides):
            if argument.startswith("--"):
                option, _, value = argument.partition("=")
            else:
                value = argument
            named.add(value)
            with suppress(yaml.YAMLError):  # jsonargparse names the option of what is not YAML
                root = read_yaml(value, option)
                named |= scalars(root)
                _collect_removed(removed, option, value)
                _check_entries(option, value)
                if value:
                    text = _stand_in(stand_ins, root, option, value)
                    overrides[index] = f"{option}={text}" if argument.startswith("--") else text
            if argument.startswith("--") and not _removed(option):
                _check_option(argument.split("=")[0].removesuffix("+"), ["--config", "--help", *options])
        check_removed(removed)
        text = "{}" if file.config is None else _read_file(file.config, stand_ins)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parse(text, overrides, description, options, {})
            if (prepared := stand_ins.restore(parsed.data.prepared)) is not None:
                # What the arguments leave open is as the dataset was prepared; one that cannot be read is named later.
                with suppress(DataError):
                    made = dataclasses.asdict(prepared_config(prepared))
                    parsed = _parse(text, overrides, description, options, {name: made[name] for name in CHOICES})
    except (argparse.ArgumentError, TypeError, ValueError) as error:
        causes = (error, error.__cause__, error.__context__)
        fault = next((cause for cause in causes if isinstance(cause, (ConfigError, DataError))), None)
        raise ConfigError(stand_ins.restore(str(fault) if fault else _tidy(str(error)))) from None
    config = Config(**{name: stand_ins.restore(getattr(parsed, name)) for name in _SECTIONS})
    if file.config is not None:
        config = _mark_urls(config, named)
    own = {name.removeprefix("--").replace("-", "_") for name in options}
    return config, SimpleNamespace(**{name: getattr(parsed, name) for name in own})


def _parse(
    text: str, arguments: list[str], description: str, options: Mapping[str, dict], data: dict
) -> "jsonargparse.Namespace":
    """The sections and options of a config's text and a command line; `data` are defaults of the section `data`."""
    import jsonargparse

    settings = {
        "prog": "jfi COMMAND",
        "description": description,
        "epilog": EXIT_CODES,
        "exit_on_error": False,
        "allow_abbrev": False,
    }
    of_file, parser = (jsonargparse.ArgumentParser(**settings) for _ in range(2))
    parser.add_argument("--config", action="config", help="YAML file with any of the fields below")
    for name, own in options.items():
        parser.add_argument(name, **own)
    for name, section in _SECTIONS.items():
        for one in (of_file, parser):
            one.add_argument(f"--{name}", type=section, default=section(**data) if name == "data" else section())
    for one in (of_file, parser):
        one.add_argument("--version", type=int, default=VERSION, help=argparse.SUPPRESS)
    # Its text, since jsonargparse would read the file in the encoding of the locale.
    return parser.instantiate(parser.parse_args(arguments, of_file.parse_string(text, defaults=False)))


def load_config(path: str | Path) -> Config:
    """Reads the config from a YAML file that `save_config` wrote.

    Raises:
        ConfigError: another version of jfi wrote it, or a key or a value is wrong.
    """
    _read_file(str(path), StandIns(), needs_version=True)
    return parse_config(["--config", str(path)], "")[0]


def save_config(config: Config, path: str | Path) -> None:
    """Writes all fields, including defaults, as YAML; whole or not at all."""
    tree = {"version": VERSION, **config.as_dict()}
    write_file(Path(path), yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def _mark_urls(config: Config, named: set[str]) -> Config:
    """The config with those URLs marked that its file names and the command line does not."""
    tables = {name: unnamed_urls(getattr(config.data, name), named) for name in FILES}
    options = {name: unnamed_urls(value, named) for name, value in config.training.logger_options.items()}
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **tables))
    return config.with_training(logger_options=options)


def _stand_in(stand_ins: StandIns, root: yaml.Node | None, option: str, value: str) -> str:
    """The value of an option with stand-ins for texts that jsonargparse would read otherwise."""
    hint: object = Config
    for part in option.removeprefix("--").removesuffix("+").split("."):
        section = _dataclass_of(hint)[0]
        if typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        else:
            hint = None if section is None else _fields(section).get(part)
    if root is None:  # a comment of YAML, which a command line has not
        return stand_ins.add(value) if str in (hint, *typing.get_args(hint)) else value
    before = yaml.serialize(root)
    stand_ins.replace(root, hint)
    if yaml.serialize(root) == before:
        return value
    return root.value if isinstance(root, yaml.ScalarNode) else yaml.serialize(root)


def _read_file(path: str, stand_ins: StandIns, needs_version: bool = False) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
        root, tree = read_yaml(text, path), yaml.safe_load(text)
    except OSError as error:
        if is_storage_fault(error):
            raise
        hint = _copy_hint(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"--config {path}: {error.strerror or error}{hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise ConfigError(f"{place}: not YAML: {getattr(error, 'problem', error)}") from None
    if isinstance(tree, dict):
        version = tree.pop("version", None if needs_version else VERSION)
        if version != VERSION:
            found = "there is no version" if version is None else f"version is {version!r}"
            what = (
                f"{found}, must be {VERSION}: an earlier version of jfi, whose settings mean something else, wrote it"
            )
            raise ConfigError(f"{path}: {what}")
        if isinstance(tree.get("data"), dict):
            check_removed(tree["data"], f"{path}: ")
    _check_keys(tree, Config, path, "")
    stand_ins.replace(root, Config)
    return yaml.serialize(root)


def _removed(option: str) -> str | None:
    """The setting of earlier versions that an option names, such as separators of --data.separators.genres."""
    section, _, name = option.removeprefix("--").removesuffix("+").partition(".")
    return name.split(".")[0] if section == "data" and name.split(".")[0] in REMOVED else None


def _collect_removed(settings: dict[str, object], option: str, value: str) -> None:
    """Adds the value of an option to the settings if it is of those that `data.features` has replaced."""
    if (name := _removed(option)) is None:
        return
    column = option.removeprefix(f"--data.{name}").removesuffix("+").removeprefix(".")
    if column:
        settings.setdefault(name, {})[column] = int(value) if value.isdecimal() else value
    else:
        settings[name] = yaml.safe_load(value) if value else settings.get(name)


def _check_keys(tree: object, section: type, path: str, prefix: str) -> None:
    """Raises ConfigError for a key that the dataclass `section` lacks and for a null that it forbids, at any depth."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: {prefix.rstrip('.') or 'the file'} must be a mapping of keys, got {tree!r}")
    known = _fields(section)
    for key, value in tree.items():
        if key not in known:
            if line := describe_renamed(f"{prefix}{key}"):
                raise ConfigError(f"{path}: {line}")
            hint = suggest(str(key), known, cutoff=0.0, prefix=prefix)
            raise ConfigError(f"{path}: unknown key {prefix}{key}; {hint}")
        inner, optional = _dataclass_of(known[key])
        if inner is None and value is None and not optional:
            raise ConfigError(f"{path}: {prefix}{key} must not be null")
        if inner is not None and not (optional and value is None):
            elements = value if isinstance(value, list) else [value]
            for element in elements:
                _check_keys(element, inner, path, f"{prefix}{key}.")
        values = typing.get_args(known[key])[1:] if typing.get_origin(known[key]) is dict else ()
        if values and dataclasses.is_dataclass(values[0]):
            # In the place of a dataclass jsonargparse takes the name of a class, whose module it imports.
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: {prefix}{key} must be a mapping of keys, got {value!r}")
            for name, element in value.items():
                _check_keys(element, values[0], path, f"{prefix}{key}.{name}.")


def _check_entries(option: str, value: str) -> None:
    """Raises ConfigError for a list whose entries are no mappings or have unknown keys, as `_check_keys` of a file."""
    section, _, name = option.removeprefix("--").removesuffix("+").partition(".")
    hint = _fields(_fields(Config)[section]).get(name) if section in _SECTIONS else None
    if typing.get_origin(hint) is list and _dataclass_of(hint)[0] is not None and value:
        _check_keys({section: {name: yaml.safe_load(value)}}, Config, option, "")


def _check_option(option: str, others: list[str]) -> None:
    """Raises ConfigError for an option that is neither a field of the config nor in `others`."""
    section: type | None = Config
    for part in option.removeprefix("--").split("."):
        known = {} if section is None else _fields(section)
        if section is not None and part not in known and option not in others:
            if line := describe_renamed(option.removeprefix("--")):
                raise ConfigError(f"{option}: {line}")
            options = [f"--{leaf}" for leaf in _leaves(Config)] + others
            raise ConfigError(f"unknown option {option}; {suggest(option, options, cutoff=0.0)}")
        section = _dataclass_of(known[part])[0] if part in known else None  # None inside a free mapping


def _fields(section: type) -> dict[str, object]:
    hints = typing.get_type_hints(section)
    return {f.name: hints[f.name] for f in dataclasses.fields(section)}


def _dataclass_of(hint: object) -> tuple[type | None, bool]:
    """The dataclass in the type hint `X`, `X | None` or `list[X]`, or None, and whether null is allowed."""
    inner = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType, list) else (hint,)
    found = [kind for kind in inner if dataclasses.is_dataclass(kind)]
    return (found[0] if found else None), type(None) in inner


def _leaves(section: type, prefix: str = "") -> Iterator[str]:
    for name, hint in _fields(section).items():
        inner = _dataclass_of(hint)[0]
        if inner is None:
            yield prefix + name
        else:
            yield from _leaves(inner, f"{prefix}{name}.")


def _copy_hint(path: str) -> str:
    """Advice for a file that is absent, if it has the name of a bundled config; else ""."""
    name = path.removeprefix("configs/").removesuffix(".yaml")
    known = (Path(__file__).parents[1] / "configs" / f"{name}.yaml").is_file()
    return f"; there is a bundled config of this name: jfi config copy {name}" if known else ""


def _must_be_one_of(found: re.Match) -> str:
    return f"got '{found[2]}', must be one of {found[1].replace(chr(39), '')}"


#: Python's types in the words of docs/settings.md.
_KINDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text", "NoneType": "null"}


def _must_be_of_type(found: re.Match) -> str:
    return f"got '{found[2]}', must be {_KINDS.get(found[1], found[1])}"


#: jsonargparse's message about a value that may be of several types.
_UNION = re.compile(
    r'"([\w.]+)":\s+Does not validate against any of the Union subtypes\s+Subtypes: \[(.*?)\]\s+Errors:.*'
    r"Given value: (.*)$",
    re.DOTALL,
)


#: jsonargparse's message about a value of an entry in a list.
_ENTRY = re.compile(r"""^"([\w.]+)":\s+Problem with given class_path '[\w.]+':\s+(?:"(\w+)":\s+)?(.*)$""", re.DOTALL)


def _tidy(message: str) -> str:
    message = re.sub(r"<class '(\w+)'>", r"\1", message).replace("Parser key ", "").replace("typing.", "")
    if found := _ENTRY.match(message):
        name, field, what = found.groups()
        message = f"{name}: an entry's {field}: {what}" if field else f"{name}: an entry: {what}"
    message = re.sub(r"an entry: the following arguments are required: (.*)$", r"an entry lacks: \1", message)
    message = re.sub(r"Expected an? (\w+)\.\s+Got value: (.*)$", _must_be_of_type, message)
    message = re.sub(r"Expected a Literal\[(.*?)\]\.\s+Got value: (.*)$", _must_be_one_of, message)
    if found := _UNION.match(message):
        name, kinds, value = found.groups()
        kinds = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace("'", ""), kinds)
        kinds = re.sub(r"\b(int|float|bool|str|NoneType)\b", lambda found: _KINDS[found[1]], kinds)
        kinds = re.sub(r"list\[(.*?)\]", r"a list of (\1)", kinds)
        got = {"None": "null"}.get(value, value if value.startswith("[") else f"'{value}'")
        return shorten(f"{name}: got {got}, must be {' or '.join(kinds.rsplit(', ', 1))}")
    return shorten(re.sub(r"^argument (--\S+):", r"\1:", message))
