"""Data configs by lists of columns, of which a test replaces one and keeps the others."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from jfi.data import DataConfig, FeatureConfig, LabelConfig
from jfi.data.io.blocks import find_table, read_files
from jfi.data.io.table import SourceRows

LISTS = {
    "user_categorical": ("user", "category"),
    "user_dense": ("user", "number"),
    "item_categorical": ("item", "category"),
    "item_dense": ("item", "number"),
    "event_categorical": ("event", "category"),
    "event_dense": ("event", "number"),
    "context_categorical": ("context", "category"),
    "context_dense": ("context", "number"),
}
#: By name of a mapping from columns the setting of their entries.
MAPPINGS = {"separators": "separator", **{n: n for n in ("min_count", "max_values", "hash_buckets", "capacity")}}


def regression(column: str) -> list[LabelConfig]:
    """Returns `data.labels` of one label, the numbers of a column."""
    return [LabelConfig("label", column, "regression")]


def read_blocks(paths: Any, wanted: Collection[str]) -> Iterator[SourceRows]:
    """Yields the tables of `read_files` of what `data.interactions` names, with default settings."""
    config = DataConfig()
    return (table for _, table in read_files(find_table(paths, "data.interactions", config), wanted, config))


def data_config(**settings) -> DataConfig:
    """Returns a config whose `features` are given by `LISTS`, `MAPPINGS` and `event_crosses`, lists of columns.

    It has no statistics unless `settings` have some.
    """
    return replace_data(DataConfig(statistics=[]), **settings)


def replace_data(config: DataConfig, **settings) -> DataConfig:
    """Returns a copy of the config with other settings; a list of columns that is not given stays as it is.

    Args:
        config: the config.
        settings: `LISTS`, `MAPPINGS`, `event_crosses`, `features` for entries behind those, and any other field.
    """
    given = {name: settings.pop(name) for name in (*LISTS, *MAPPINGS, "event_crosses") if name in settings}
    if given:
        settings["features"] = [*features(**lists_of(config) | given), *settings.get("features", [])]
    return replace(config, **settings)


def features(**lists) -> list[FeatureConfig]:
    """Returns the entries of lists of columns and of mappings; a column that only a mapping has is of the item."""
    entries = []
    for kind, (of, type) in LISTS.items():
        entries += [FeatureConfig(name, of, type) for name in lists.get(kind, [])]
    entries += [FeatureConfig("_x_".join(cross), "event", cross=cross) for cross in lists.get("event_crosses", [])]
    for kind, setting in MAPPINGS.items():
        for name, value in lists.get(kind, {}).items():
            if all(entry.name != name for entry in entries):
                entries.append(FeatureConfig(name, "item"))
            entries = [replace(entry, **{setting: value}) if entry.name == name else entry for entry in entries]
    return entries


def lists_of(config: DataConfig) -> dict:
    """Returns the lists and mappings whose entries `config.features` are."""
    entries = [one for one in config.features if not one.cross]
    lists = {kind: [one.name for one in entries if (one.of, one.type) == LISTS[kind]] for kind in LISTS}
    for kind, setting in MAPPINGS.items():
        default = getattr(FeatureConfig("", "item"), setting)
        values = {one.name: getattr(one, setting) for one in config.features}
        lists[kind] = {name: value for name, value in values.items() if value != default}
    return lists | {"event_crosses": list(config.crosses().values())}


def line_of(table: SourceRows, row: int) -> int:
    """The line of a row in its file."""
    return int(table.location(row).rpartition(":")[2])
