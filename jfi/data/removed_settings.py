"""Refuses the settings that `data.features` has replaced, with the entries to write in their place."""

import functools
from collections.abc import Mapping
from typing import TypeVar

import yaml

from jfi.data.errors import DataError

Section = TypeVar("Section", bound=type)

#: By name of a list of columns what has them, and their type.
_LISTS = {
    "user_categorical": {"of": "user"},
    "user_dense": {"of": "user", "type": "number"},
    "item_categorical": {"of": "item"},
    "item_dense": {"of": "item", "type": "number"},
    "event_categorical": {"of": "event"},
    "event_dense": {"of": "event", "type": "number"},
    "impression_categorical": {"of": "context"},
    "impression_dense": {"of": "context", "type": "number"},
}
#: By name of a mapping from columns the setting of an entry.
_MAPPINGS = {"separators": "separator", "min_count": "min_count", "hash_buckets": "hash_buckets"}
REMOVED = (*_LISTS, "event_crosses", *_MAPPINGS)


def check_removed(data: Mapping[str, object], where: str = "") -> None:
    """Raises DataError if settings of the section `data` are of those that entries of `features` have replaced.

    Args:
        data: the settings.
        where: before the message, such as a file.

    >>> check_removed({"item_categorical": ["genres"], "separators": {"genres": "|"}})
    Traceback (most recent call last):
    jfi.data.errors.DataError: data.item_categorical is no setting any more; declare each feature: data.features: \
[{name: genres, of: item, separator: '|'}]
    """
    first = next((name for name in data if name in REMOVED), None)
    if first is not None:
        entries = feature_entries(data)
        shown = yaml.safe_dump(entries, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)
        raise DataError(
            f"{where}data.{first} is no setting any more; declare each feature: data.features: {shown.strip()}"
        )


def refuse_removed(section: Section) -> Section:
    """Makes `check_removed` of the keyword arguments of a dataclass."""
    init = section.__init__

    @functools.wraps(init)
    def checked(self: object, *args: object, **settings: object) -> None:
        check_removed(settings)
        init(self, *args, **settings)

    section.__init__ = checked
    return section


def feature_entries(data: Mapping[str, object]) -> list[dict[str, object]]:
    """Returns the entries of `data.features` that stand for removed settings."""
    entries: list[dict[str, object]] = []
    for setting, kind in _LISTS.items():
        names = data.get(setting) or []
        entries += [{"name": str(name), **kind} for name in (names if isinstance(names, list | tuple) else [names])]
    crosses = data.get("event_crosses") or []
    for columns in crosses if isinstance(crosses, list | tuple) else []:
        columns = [str(name) for name in (columns if isinstance(columns, list | tuple) else [columns])]
        entries.append({"name": "_x_".join(columns), "of": "event", "cross": columns})
    for setting, key in _MAPPINGS.items():
        values = data.get(setting) or {}
        for name, value in values.items() if isinstance(values, Mapping) else ():
            found = [entry for entry in entries if entry["name"] == name]
            if not found:
                entries.append({"name": str(name), "of": "item", key: value})
            for entry in found:
                entry[key] = value
    return entries
