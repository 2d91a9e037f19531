"""Reads configs from YAML files and command lines, and writes them; a fault is one line.

The values of a YAML node become those of the settings' types by msgspec. `jfi.utils.exit_codes` has the exit codes.
"""

import argparse
import dataclasses
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from jfi.data.config import FILES
from jfi.data.errors import DataError
from jfi.data.setting_types import describe, fields
from jfi.training.config import Config, ConfigError
from jfi.training.config_yaml import read_yaml
from jfi.utils.errors import shorten, suggest
from jfi.utils.files import is_storage_fault, write_file

#: Version of the settings' meaning; a config of another one is refused. Version 6 has fewer settings than 5.
VERSION = 6
_TEXT = "tag:yaml.org,2002:str"
#: By tag of YAML the type of its values; those of other tags are texts.
_TYPES = {"null": types.NoneType, "bool": bool, "int": int, "float": float}
#: The settings that may hold URLs.
_WITH_URLS = tuple(f"data.{name}" for name in FILES)


def parse_config(
    arguments: Sequence[str], parser: argparse.ArgumentParser | None = None
) -> tuple[Config, argparse.Namespace]:
    """The config from `--config FILE` and overrides such as `--model.pooling mean`, and a command's own options.

    An override takes precedence over the file, in any order.

    Args:
        arguments: the command line without the program's name.
        parser: of the command's own options.

    Returns:
        The config, and the command's own options, with all `arguments` under this name, and the options that they name
        as `named`.

    Raises:
        ConfigError: an unknown key, a wrong value or an unreadable file.

    Example:
        >>> parse_config(["--model.num_heads", "8", "--encoder.dropout=.1"])[0].model.num_heads
        8
    """
    others = [] if parser is None else [option for one in parser._actions for option in one.option_strings]
    # Settings are taken out first: argparse takes --data.label='a == 1' for a value of --seeds, since it has a space.
    left, given, rest = [*arguments], [], []
    while left:
        option, is_joined, value = left.pop(0).partition("=")
        if not option.startswith("--") or option in others:
            rest.append(option + is_joined + value)
            continue
        hint = _type_of(option, others)
        if not is_joined and (not left or left[0].startswith("--")):
            raise ConfigError(f"{option}: expected one argument")
        given.append((option, value if is_joined else left.pop(0), hint))
    own, unknown = (argparse.Namespace(), rest) if parser is None else parser.parse_known_args(rest)
    if unknown:
        raise ConfigError(f"unknown argument {unknown[0].partition('=')[0]}")
    tree, lines = Config().as_dict(), _Lines()
    for option, value, _ in given:
        if option == "--config":
            _read_file(tree, value, lines)
    for option, value, hint in given:
        if option != "--config":
            _override(tree, option, value, hint, lines)
    if tree["data"]["prepared"] is not None:
        from jfi.data.prepared.manifest import RUN_SETTINGS, prepared_config

        # What the arguments leave open is as the dataset was prepared; one that cannot be read is named later.
        with suppress(DataError):
            made = prepared_config(tree["data"]["prepared"])
            tree["data"] |= {name: getattr(made, name) for name in RUN_SETTINGS if f"data.{name}" not in lines}
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:  # of values that are each of their types, so one of a section's own checks
        raise ConfigError(lines.located(str(error.__cause__ or error))) from None
    own.arguments = list(arguments)
    own.named = [one.partition("=")[0] for one in arguments if one.startswith("--")]
    return config, own


def load_config(path: str | Path) -> Config:
    """Reads the config from a YAML file that `save_config` wrote.

    Raises:
        ConfigError: another version of jfi wrote it, or a key or a value is wrong.
    """
    _read_file({}, str(path), _Lines(), needs_version=True)
    return parse_config(["--config", str(path)])[0]


def save_config(config: Config, path: str | Path) -> None:
    """Writes all fields, including defaults, as YAML; whole or not at all."""
    tree = {"version": VERSION, **config.as_dict()}
    write_file(Path(path), yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


class _Dumper(yaml.SafeDumper):
    """Quotes texts that would be read otherwise: numbers such as 1e5, and line breaks that YAML folds."""


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    try:
        float(text)
        style = '"'
    except ValueError:
        style = '"' if "\x85" in text else None
    return dumper.represent_scalar(_TEXT, text, style=style)


_Dumper.add_representer(str, _text)


def describe_settings(names: Iterable[str] | None = None) -> str:
    """Returns the help of settings, of their docstrings and defaults; of all settings where no names are given."""
    settings = {key: (section, default) for key, section, default in _leaves(Config, "", Config())}
    lines = []
    for key in settings if names is None else names:
        section, default = settings[key]
        meaning = docstring(section)[1][key.rpartition(".")[2]]
        if names is not None:
            meaning = meaning.partition("; ")[0].partition(". ")[0].removesuffix(".")
        shown = yaml.safe_dump(default, default_flow_style=True, width=10**9).removesuffix("...\n").strip()
        head, text = f"  --{key:34s}", f"{meaning} (default: {shown})"
        lines.append(textwrap.fill(text, 120, initial_indent=f"{head.rstrip():36s}  ", subsequent_indent=" " * 38))
    return "\n".join(lines)


def docstring(section: type) -> tuple[str, dict[str, str]]:
    """Returns the docstring of a dataclass before `Args:`, and by field its meaning in one line."""
    intro, _, arguments = inspect.getdoc(section).partition("\nArgs:\n")
    arguments = re.split(r"\n(?:Example|Raises|Returns)s?:", arguments)[0]
    meanings: dict[str, str] = {}
    for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n        .*)*)", arguments, re.MULTILINE):
        meanings |= dict.fromkeys(names.split(", "), re.sub(r"\bNone\b", "null", " ".join(text.split())))
    return "\n\n".join(textwrap.fill(part, 120) for part in intro.split("\n\n")), meanings


class _Lines(dict):
    """Maps a setting to the line of the file that gives it, "" for the command line."""

    def located(self, message: str) -> str:
        """Returns a message that begins with a setting behind the line of the setting, or of what it is in."""
        key = re.match(r"[\w.\[\]]*", message)[0]
        while key and key not in self:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return f"{self[key]}: {message}" if self.get(key) else message


@dataclass(frozen=True)
class _Source:
    """A file with settings, or an option of the command line."""

    name: str
    is_file: bool
    lines: _Lines

    def line(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def fault(self, node: yaml.Node, key: str, what: str) -> ConfigError:
        where = f"{self.line(node)}: {key or 'the file'}" if self.is_file else f"--{key}"
        return ConfigError(shorten(f"{where}{what}"))


def _type_of(option: str, others: list[str]) -> object:
    """Returns the type of the setting that an option of the command line sets."""
    hint: object = Config
    for part in [] if option == "--config" else option[2:].split("."):
        if typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        elif dataclasses.is_dataclass(hint) and part in fields(hint):
            hint = fields(hint)[part]
        else:
            known = [f"--{key}" for key, *_ in _leaves(Config, "")]
            near = suggest(option, [*known, "--config", "--help", *others], cutoff=0.0)
            raise ConfigError(f"unknown option {option}; {near}")
    return hint


def _override(tree: dict, option: str, value: str, hint: object, lines: _Lines) -> None:
    """Sets the value of an option in the tree of settings."""
    kinds, root = _kinds(hint), None
    try:
        root = read_yaml(value, option)
    except yaml.YAMLError as error:
        if str not in kinds and any(typing.get_origin(kind) in (list, dict) for kind in kinds):
            why = getattr(error, "problem", error)
            raise ConfigError(shorten(f"{option}: got {value!r}, which is not YAML: {why}")) from None
    if isinstance(root, yaml.ScalarNode) and root.style not in ("'", '"'):
        is_text = root.tag.rpartition(":")[2] not in _TYPES or root.value != value.strip()
    else:  # a text may look like a block, as "::" does; one in brackets is what the setting takes
        is_value = isinstance(root, yaml.SequenceNode) and list in map(typing.get_origin, kinds)
        is_value |= (
            isinstance(root, yaml.MappingNode) and root.value != [] and any(map(dataclasses.is_dataclass, kinds))
        )
        is_block = isinstance(root, yaml.CollectionNode) and not (is_value and root.flow_style)
        is_text = root is None or (is_block and str in kinds)
    if is_text:
        root = yaml.ScalarNode(_TEXT, value)  # as it is written: a command line has no comments, blocks or anchors
    for given in [one for one in lines if one.startswith(option[2:])]:
        del lines[given]
    *folders, name = option[2:].split(".")
    for part in folders:
        tree = tree.setdefault(part, {})
    tree[name] = _read(tree.get(name), root, hint, option[2:], _Source(option, False, lines))


def _read_file(tree: dict, path: str, lines: _Lines, needs_version: bool = False) -> None:
    """Adds the settings of a file to the tree."""
    try:
        root = read_yaml(Path(path).read_text(encoding="utf-8"), path)
    except OSError as error:
        if is_storage_fault(error):
            raise
        hint = _copy_hint(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"--config {path}: {error.strerror or error}{hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', error)}") from None
    root = yaml.ScalarNode("tag:yaml.org,2002:null", "", yaml.Mark(path, 0, 0, 0, "", 0)) if root is None else root
    if isinstance(root, yaml.MappingNode):
        found = [_plain(value, int) for key, value in root.value if key.value == "version"]
        version = found[0] if found else None if needs_version else VERSION
        if version != VERSION:
            found = "there is no version" if version is None else f"version is {version!r}"
            what = (
                f"{found}, must be {VERSION}: an earlier version of jfi, whose settings mean something else, wrote it"
            )
            raise ConfigError(f"{path}: {what}")
        root.value = [pair for pair in root.value if pair[0].value != "version"]
    tree |= _read(tree, root, Config, "", _Source(path, True, lines))


def _copy_hint(path: str) -> str:
    """Advice for a file that is absent, if it has the name of a bundled config; else ""."""
    name = path.removeprefix("configs/").removesuffix(".yaml")
    known = (Path(__file__).parents[1] / "configs" / f"{name}.yaml").is_file()
    return f"; there is a bundled config of this name: jfi config copy {name}" if known else ""


def _read(old: object, node: yaml.Node, hint: typing.Any, key: str, source: _Source) -> typing.Any:
    """Returns the value of a setting; of a dataclass the given settings, by name, in addition to the `old` ones."""
    source.lines[key] = source.line(node) if source.is_file else ""
    if isinstance(node, yaml.MappingNode):
        hint = next((one for one in _kinds(hint) if dataclasses.is_dataclass(one)), hint)
    if dataclasses.is_dataclass(hint):
        known, tree = fields(hint), dict(old if isinstance(old, dict) else {})  # type: ignore[call-overload]
        for name, value in _pairs(node, key, source).items():
            inner = f"{key}.{name}" if key else name
            if name not in known:
                near = suggest(name, known, cutoff=0.0, prefix=f"{key}." if key else "")
                raise ConfigError(
                    f"{source.line(value) if source.is_file else source.name}: unknown key {inner}; {near}"
                )
            tree[name] = _read(tree.get(name), value, known[name], inner, source)
        required = [one.name for one in dataclasses.fields(hint) if one.default is one.default_factory]  # both missing
        if lacking := [name for name in required if name not in tree]:
            raise ConfigError(source.lines.located(f"{key} lacks {', '.join(lacking)}"))
        return tree
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        pairs = _pairs(node, key, source)
        return {name: _read(None, value, parts[1], f"{key}.{name}", source) for name, value in pairs.items()}
    if origin is list and dataclasses.is_dataclass(parts[0]) and isinstance(node, yaml.SequenceNode):
        return [_read(None, one, parts[0], f"{key}[{i}]", source) for i, one in enumerate(node.value)]
    value = _plain(node, hint)
    try:
        value = msgspec.convert(value, hint)
    except msgspec.ValidationError:
        is_scalar = isinstance(node, yaml.ScalarNode)
        quoted = " in quotes" if is_scalar and node.style in ("'", '"') else ""
        got = node.value if is_scalar else value
        raise source.fault(node, key, f": got {got!r}{quoted}, must be {describe(hint)}") from None
    if source.is_file and "://" in str(value) and key.startswith(_WITH_URLS):
        from jfi.data.io.paths import unnamed_urls

        return unnamed_urls(value)
    return value


def _pairs(node: yaml.Node, key: str, source: _Source) -> dict[str, yaml.Node]:
    """Returns the values of a mapping by their keys."""
    if not isinstance(node, yaml.MappingNode):
        raise source.fault(node, key, f" must be a mapping of keys, got {_plain(node, object)!r}")
    try:
        yaml.constructor.SafeConstructor().flatten_mapping(node)
    except yaml.YAMLError as error:
        raise source.fault(node, key, f": {error.problem}") from None
    return {str(name.value): value for name, value in node.value}


def _kinds(hint: object) -> tuple:
    """The types that a union lists, without their bounds."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(typing.get_args(one)[0] if typing.get_origin(one) is typing.Annotated else one for one in kinds)


def _plain(node: yaml.Node, hint: object) -> typing.Any:
    """Returns the value of a YAML tree; a value whose type takes no other kind is the text that is written."""
    kinds = _kinds(hint)
    if isinstance(node, yaml.SequenceNode):
        inner = next((typing.get_args(one)[0] for one in kinds if typing.get_origin(one) is list), object)
        return [_plain(one, inner) for one in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(name.value): _plain(value, object) for name, value in node.value}
    found = _TYPES.get(node.tag.rpartition(":")[2], str)
    if found is str and node.style is None and float in kinds:  # 1e-3, which YAML takes for a text
        with suppress(ValueError):
            if math.isfinite(number := float(node.value)) or str not in kinds:
                return number
    if str in kinds and (found is str or (found not in kinds and not (found is int and float in kinds))):
        return node.value
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):  # an unknown tag, a value that is not its kind
        return node.value


def _leaves(section: type, prefix: str, default: object = None) -> Iterator[tuple[str, type, object]]:
    """Yields each setting that is no section, with the dataclass that has it and its default."""
    for name, hint in fields(section).items():
        own = getattr(default, name, None)
        if dataclasses.is_dataclass(hint):
            yield from _leaves(hint, f"{prefix}{name}.", own)
        else:
            yield prefix + name, section, own
