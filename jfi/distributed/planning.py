"""The path of each embedding's ids, from the features and a TorchRec sharding plan.

Sequences of ids that are sent together form a table group: the histories of features alike, whose events carry what
attention reads beside the row as payload (ids of small tables, the bucket of a bias, a weight), or all other keys,
whose rows are fetched.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from jfi.distributed.exchange import Exchange, PeerMemory
from jfi.distributed.row_sharding import RowSharding, row_shardings
from jfi.modules import KeyBias, PositionBias, SequenceFeatureConfig
from jfi.modules.id_counts import OutsideIds
from jfi.modules.sequence_configs import group_features


@dataclass(frozen=True, eq=False)
class TableGroup:
    """Sequences of ids that travel together.

    Attributes:
        keys: of each sequence the key of its ids.
        tables: of each sequence the table of its rows.
        shardings: of each sequence that of its table; the same for all if attention reads them.
        embeddings: of each sequence the name of its embedding.
        features: of each sequence its feature, if attention reads it; else empty.
        feature_indices: of each feature its index in its `FeatureGroup`, by which learned bias tables are stacked.
        fields: of each sequence the keys of the ids that are payload of its events.
        field_tables: the tables of these ids, which every rank can read.
        field_rows: their numbers of rows.
        dedup: whether a fetched row is sent once to each rank, however many of its events have it.
        outside: counts of this rank's ids outside of the tables, by sequence; those of fields are counted where every
            rank reads these tables itself.
    """

    keys: tuple[str, ...]
    tables: tuple[str, ...]
    shardings: tuple[RowSharding, ...]
    embeddings: tuple[str, ...] = ()
    features: tuple[SequenceFeatureConfig, ...] = ()
    feature_indices: tuple[int, ...] = ()
    fields: tuple[tuple[str, ...], ...] = ()
    field_tables: tuple[str, ...] = ()
    field_rows: tuple[int, ...] = ()
    dedup: bool = False
    outside: OutsideIds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outside", OutsideIds(self.tables))

    @property
    def owner_ranks(self) -> list[int]:
        """The ranks that queries of the features go to, ascending."""
        return sorted(self.shardings[0].ranks)

    def to_owners(self, pg: dist.ProcessGroup, samples: list[int], peers: PeerMemory | None = None) -> Exchange:
        """Returns the exchange of one row for each sample of each feature, which goes to all owner ranks.

        Args:
            pg: all ranks.
            samples: batch size of each rank.
            peers: of the exchange.
        """
        owners, count = set(self.owner_ranks), len(self.keys)
        sent = [samples[pg.rank()] * count if rank in owners else 0 for rank in range(pg.size())]
        received = [count * size if pg.rank() in owners else 0 for size in samples]
        return Exchange(pg, sent, received, peers)

    @property
    def has_bucket(self) -> bool:
        """Whether the payload has a row of the learned bias tables."""
        return bool(self.features) and isinstance(self.features[0].bias, PositionBias | KeyBias)

    @property
    def has_weight(self) -> bool:
        """Whether the payload has a weight."""
        return bool(self.features) and self.features[0].reads_weights

    @property
    def padding(self) -> list[int]:
        """The columns of an event without a row: its position, then the payload."""
        return [-1] * (1 + len(self.field_tables)) + [0] * (self.has_bucket + self.has_weight)


class TablePlan(NamedTuple):
    """The path of each embedding of a sharded collection.

    Attributes:
        shardings: by table.
        groups: sequences of ids that go to owner ranks.
        replicated: the tables that every rank reads whole.
        local: embeddings of replicated tables: name, key of the ids, and table.
    """

    shardings: dict[str, RowSharding]
    groups: list[TableGroup]
    replicated: list[str]
    local: list[tuple[str, str, str]]


def plan_tables(
    configs: list[EmbeddingConfig] | list[EmbeddingBagConfig],
    plan: dict[str, ParameterSharding],
    features: list[SequenceFeatureConfig],
    replicate_below: int,
    first_rank: int = 0,
    dedup: bool = False,
) -> TablePlan:
    """Returns the path of each embedding.

    Args:
        configs: of the collection's tables.
        plan: by table its sharding, by rows.
        features: sequence features whose histories the collection looks up.
        replicate_below: tables of at most so many rows are read whole by every rank.
        first_rank: of all processes, the first one of the group that the plan is for.
        dedup: whether a row that is fetched travels once to each rank.

    Raises:
        ValueError: a feature whose rows attention cannot read at their owner ranks.
    """
    shardings = row_shardings({config.name: config.num_embeddings for config in configs}, plan, first_rank)
    replicated = [config.name for config in configs if config.num_embeddings <= replicate_below]
    #: By embedding the key of its ids and its table.
    sources = {
        embedding: (key, config.name)
        for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
        for embedding, key in zip(names, config.feature_names, strict=True)
    }
    groups: list[TableGroup] = []
    for feature_group in group_features(features, configs[0].embedding_dim):
        alike: dict[tuple, list[int]] = {}
        for index, feature in enumerate(feature_group.features):
            remote = remote_field(feature, {e: t for e, (_, t) in sources.items()}, replicated)
            if remote is not None:
                tables = tuple([sources[embedding][1] for embedding in feature.sequence_keys])
                alike.setdefault((remote, tables), []).append(index)
        for (remote, tables), indices in alike.items():
            members = [feature_group.features[index] for index in indices]
            names = tuple([feature.sequence_keys[remote] for feature in members])
            others = [[e for k, e in enumerate(feature.sequence_keys) if k != remote] for feature in members]
            field_tables = tuple([table for k, table in enumerate(tables) if k != remote])
            groups.append(
                TableGroup(
                    keys=tuple([sources[name][0] for name in names]),
                    tables=(tables[remote],) * len(members),
                    shardings=(shardings[tables[remote]],) * len(members),
                    embeddings=names,
                    features=tuple(members),
                    feature_indices=tuple(indices),
                    fields=tuple([tuple([sources[e][0] for e in fields]) for fields in others]),
                    field_tables=field_tables,
                    field_rows=tuple([shardings[table].num_rows for table in field_tables]),
                )
            )
    histories = {name for group in groups for name in group.embeddings}
    fetched = [e for e, (_, table) in sources.items() if table not in replicated and e not in histories]
    if fetched:
        keys, tables = zip(*[sources[e] for e in fetched], strict=True)
        parts = tuple([shardings[table] for table in tables])
        groups.append(TableGroup(keys, tables, parts, tuple(fetched), dedup=dedup))
    local = [(embedding, key, table) for embedding, (key, table) in sources.items() if table in replicated]
    return TablePlan(shardings, groups, replicated, local)


def remote_field(feature: SequenceFeatureConfig, tables: dict[str, str], replicated: list[str]) -> int | None:
    """Returns the index of a feature's sequence key whose table is not replicated; None if all are.

    Args:
        feature: a sequence feature.
        tables: by sequence key its table.
        replicated: tables that every rank reads whole.

    Raises:
        ValueError: several are not, or the rows of several fields are concatenated.
    """
    remote = [index for index, key in enumerate(feature.sequence_keys) if tables[key] not in replicated]
    if not remote:
        return None
    if len(remote) > 1:
        found = sorted({tables[feature.sequence_keys[index]] for index in remote})
        raise ValueError(
            f"attention goes to the rows of one table, but the events of feature '{feature.name}' lie in {found}: "
            "raise replicate_below above the rows of all but one, or exchange rows"
        )
    if feature.combine == "concat" and len(feature.sequence_keys) > 1:
        raise ValueError(
            f"attention goes to rows that are summed, but feature '{feature.name}' has combine='concat': use 'sum', or "
            "exchange rows"
        )
    return remote[0]
