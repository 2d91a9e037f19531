"""The tables that a config names."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jfi.data.config import DataConfig
from jfi.data.features.semantic_ids import SemanticIDs
from jfi.data.io.blocks import iterate_tables, name_of, read_table
from jfi.data.io.table import Table
from jfi.data.prepared.manifest import with_statistics_features


@dataclass(frozen=True)
class SourceTables:
    """The tables of a config.

    Args:
        name: of the interactions, for messages; None for rows to score.
        users, items: None where their columns are in the interactions.
        sids: the semantic IDs of the items, or None.
        config: the config with the meaning of the columns, see `column_settings`.
        parts: interactions that are in memory, in blocks of rows, or None for those of the config's files.
    """

    name: str | None
    users: Table | None
    items: Table | None
    sids: SemanticIDs | None
    config: DataConfig
    parts: list[Table] | None = None

    def interactions(self) -> Iterator[tuple[int, Table]]:
        """The interactions in blocks of rows, each after the number of its split with `split: files`, else 0."""
        return iterate_tables(self.config) if self.parts is None else ((0, table) for table in self.parts)

    def blocks(self) -> Iterable[Table]:
        """The interactions in blocks of rows."""
        return (table for _, table in self.interactions())


def open_tables(config: DataConfig) -> SourceTables:
    """Reads the tables of users and items that a config names; the interactions are read when they are asked for.

    Raises:
        DataError: a file cannot be read.
    """
    settings = column_settings(config)
    sids = None if config.semantic_ids is None else SemanticIDs.read(config.semantic_ids, settings.item)
    wanted = config.columns()
    users, items = (
        None if paths is None else read_table(paths, wanted, config, f"data.{of}")
        for of, paths in (("users", config.users), ("items", config.items))
    )
    return SourceTables(name_of(config), users, items, sids, settings)


def column_settings(config: DataConfig) -> DataConfig:
    """The config with the groups that `statistics: auto` stands for, and their columns as features of the context."""
    config = config.with_statistics()
    return with_statistics_features(config, config.statistics_columns())
