"""Refuses settings of earlier versions: those that `data.features` has replaced, and those with another name now."""

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
#: By former name of a setting, in any section, its name now.
_RENAMED = {
    "data.group": "data.request_id",
    "optimizer.average": "optimizer.ema_decay",
    "training.accumulate": "training.gradient_accumulation_steps",
}


def describe_renamed(setting: str) -> str | None:
    """Returns a line with the name that a setting of earlier versions has now; None for any other setting.

    >>> describe_renamed("data.group")
    'data.group is no setting any more; it is data.request_id now'
    """
    return f"{setting} is no setting any more; it is {_RENAMED[setting]} now" if setting in _RENAMED else None


def check_removed(data: Mapping[str, object], where: str = "") -> None:
    """Raises DataError if settings of the section `data` are of earlier versions.

    Args:
        data: the settings.
        where: before the message, such as a file.

    >>> check_removed({"item_categorical": ["genres"], "separators": {"genres": "|"}})
    Traceback (most recent call last):
    jfi.data.errors.DataError: data.item_categorical is no setting any more; declare each feature: data.features: \
[{name: genres, of: item, separator: '|'}]
    """
    if line := next(filter(None, (describe_renamed(f"data.{name}") for name in data)), None):
        raise DataError(f"{where}{line}")
    first = next((name for name in data if name in REMOVED), None)
    if first is None:
        return
    entries = [{"name": str(name), **kind} for key, kind in _LISTS.items() for name in _listed(data.get(key))]
    for cross in _listed(data.get("event_crosses")):
        columns = [str(name) for name in _listed(cross)]
        entries.append({"name": "_x_".join(columns), "of": "event", "cross": columns})
    for setting, key in _MAPPINGS.items():
        values = data.get(setting)
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if not any(entry["name"] == name for entry in entries):
                entries.append({"name": str(name), "of": "item"})
            for entry in entries:
                entry.update({key: value} if entry["name"] == name else {})
    shown = yaml.safe_dump(entries, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True).strip()
    raise DataError(f"{where}data.{first} is no setting any more; declare each feature: data.features: {shown}")


def _listed(value: object) -> list:
    return list(value) if isinstance(value, list | tuple) else [value] if value else []


def refuse_removed(section: Section) -> Section:
    """Makes `check_removed` of the keyword arguments of a dataclass."""
    init = section.__init__

    @functools.wraps(init)
    def checked(self: object, *args: object, **settings: object) -> None:
        check_removed(settings)
        init(self, *args, **settings)

    section.__init__ = checked
    return section
