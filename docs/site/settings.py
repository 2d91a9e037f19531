"""Writes docs/settings.md, the reference of a run's settings, from the dataclasses: python docs/site/settings.py."""

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path

import yaml

from jfi.data.setting_types import describe, fields
from jfi.training import Config
from jfi.training.config_parser import docstring

PAGE = Path(__file__).parents[1] / "settings.md"
HEAD = """# Settings

<!-- Written by docs/site/settings.py from the docstrings of the dataclasses; do not edit. -->

A config has the sections below. A YAML file sets any part of it, and the command line overrides any field, such as
`--training.epochs 3` or `--data.features "[{name: action, of: event}]"`. An unknown key is refused with the nearest
known one.
"""


def page() -> str:
    """Returns the text of docs/settings.md."""
    parts, shown = [HEAD], set()
    for field in dataclasses.fields(Config):
        parts += _section(shown, field.name, typing.get_type_hints(Config)[field.name], field.default_factory())
    return "\n".join(parts)


def _section(shown: set[type], path: str, section: type, defaults: object = None, use: str = "") -> Iterator[str]:
    """Yields the section of a dataclass, and behind it those of the dataclasses in its fields.

    `shown` has the dataclasses that have a section, which entries of lists do not get again. `defaults` is the instance
    that a config has by default; None for entries of a list or a mapping. `use` says what the field with the dataclass
    is for.
    """
    intro, meanings = docstring(section)
    shown.add(section)
    yield f"## {path}\n\n{use}{intro}\n\n| setting | value | default | meaning |\n|---|---|---|---|"
    inner, hints = [], fields(section)
    for field in dataclasses.fields(section):
        kind, meaning = hints[field.name], meanings[field.name].replace("|", "\\|")
        found = next(filter(dataclasses.is_dataclass, _parts(kind)), None)
        own = getattr(defaults, field.name, None)
        if found is not None:
            name = f"{path}.{field.name}{'.NAME' if typing.get_origin(kind) is dict else ''}"
            is_section = dataclasses.is_dataclass(kind)  # which is no setting of its own
            inner.append((name, found, own, f"{meaning[0].upper()}{meaning[1:]} ") if is_section else (name, found))
            if is_section:
                continue
        default = _default(field) if defaults is None else _shown(own)
        yield f"| `{field.name}` | {describe(kind)} | {default} | {meaning[0].upper()}{meaning[1:]} |"
    yield ""
    for one in inner:
        if len(one) > 2 or one[1] not in shown:
            yield from _section(shown, *one)


def _parts(kind: object) -> Iterator[object]:
    """Yields a type and the types in it."""
    yield kind
    for one in typing.get_args(kind):
        yield from _parts(one)


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return _shown(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else _shown(field.default_factory())


def _shown(value: object) -> str:
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix('...' + chr(10)).strip()}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
