"""The ranks that own the rows of each table, and the path of each embedding's ids, from a TorchRec sharding plan.

Sequences of ids that are sent together form a table group: the histories of features alike, whose events carry what
attention reads besides the row as payload (ids of small tables, the bucket of a bias, a weight), or all other keys,
whose rows are fetched.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from jfi import reference
from jfi.distributed.exchange import Exchange, PeerMemory
from jfi.modules import KeyBias, PositionBias, SequenceFeatureConfig
from jfi.modules.sequence_configs import FeatureGroup
from jfi.tables.id_counts import OutsideIds


class RowSharding:
    """The ranks that own the rows of one table: each a range of them, in the order of the ranks.

    An owner rank has the rows of all its tables in one block of memory, [M, D].

    Args:
        table: the name of the table.
        counts: by rank the number of its rows.
        positions: by rank the position of its first row in its memory.

    Example:
        >>> sharding = RowSharding("item", [6, 0, 4], [100, 0, 0])
        >>> sharding.locate(torch.tensor([7, 1, 6]))
        (tensor([2, 0, 2], dtype=torch.int16), tensor([  1, 101,   0], dtype=torch.int32))
        >>> sharding.owned_by(0), sharding.owned_by(1)
        ((range(0, 6), range(100, 106)), (range(6, 6), range(0, 0)))
    """

    def __init__(self, table: str, counts: list[int], positions: list[int]) -> None:
        self.table, self.num_rows = table, sum(counts)
        firsts = [0, *accumulate(counts)]
        parts = list(zip(firsts, counts, positions, strict=False))
        self._owned = [(range(first, first + count), range(at, at + count)) for first, count, at in parts]
        self.ranks = [rank for rank, count in enumerate(counts) if count]
        self._first_rows = [firsts[rank] for rank in self.ranks]
        self._shifts = [positions[rank] - firsts[rank] for rank in self.ranks]
        #: By device what `tensors` returns: no copy from the host in a step.
        self._tensors: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def owned_by(self, rank: int) -> tuple[range, range]:
        """Returns the rows of the table that a rank owns, and their positions in its memory."""
        return self._owned[rank]

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the first row of each shard but the first, their ranks, and the shifts from rows to positions."""
        if device not in self._tensors:
            boundaries = torch.tensor(self._first_rows[1:], dtype=torch.int64, device=device)
            ranks = torch.tensor(self.ranks, dtype=torch.int16, device=device)
            self._tensors[device] = boundaries, ranks, torch.tensor(self._shifts, dtype=torch.int64, device=device)
        return self._tensors[device]

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the owner ranks [S] of ids [S], int16, and the rows' positions in their memory [S], int32.

        An id outside of the table belongs to the first shard's owner, at position -1, which is a missing row there.
        """
        ids = reference.bound_ids(ids, self.num_rows).long()
        boundaries, ranks, shifts = self.tensors(ids.device)
        shard = torch.bucketize(ids, boundaries, right=True, out_int32=True)
        return ranks[shard], torch.where(ids < 0, -1, ids + shifts[shard]).to(torch.int32)


def row_shardings(counts: Mapping[str, list[int]]) -> dict[str, RowSharding]:
    """Returns the row sharding of every table, in whose order the tables lie in each rank's memory.

    Args:
        counts: by table the number of each rank's rows.

    Raises:
        ValueError: a rank would own 2**31 rows or more.
    """
    shardings, used = {}, [0] * max(map(len, counts.values()))
    for table, own in counts.items():
        shardings[table] = RowSharding(table, own, used)
        used = [at + count for at, count in zip(used, own, strict=True)]
    if max(used) >= 2**31:  # positions travel as int32
        raise ValueError(f"plan must give a rank fewer than 2**31 rows, got {max(used)}")
    return shardings


def rows_by_rank(table: str, sharding: ParameterSharding, size: int, first_rank: int = 0) -> list[int]:
    """Returns the number of a table's rows that each rank of a group owns, of `size` ranks from `first_rank` on.

    Raises:
        ValueError: the plan divides the table's columns, replicates it, or keeps it elsewhere than in device memory.
    """
    spec = [] if sharding.sharding_spec is None else sharding.sharding_spec.shards
    if not spec or any(shard.shard_offsets[1] != 0 for shard in spec):
        raise ValueError(f"plan of table '{table}' must shard it by rows or not at all, got {sharding.sharding_type}")
    if sharding.compute_kernel != EmbeddingComputeKernel.FUSED.value:
        raise ValueError(
            f"the plan of table '{table}' must have compute_kernel 'fused', an optimizer in the backward pass and rows "
            f"in device memory, got '{sharding.compute_kernel}'"
        )
    rows = {shard.placement.rank() - first_rank: shard.shard_sizes[0] for shard in spec}
    return [rows.get(rank, 0) for rank in range(size)]


def in_rows(
    counts: list[int], sharding: ParameterSharding, first_rank: int = 0, local_size: int = 1
) -> ParameterSharding:
    """Returns TorchRec's row-wise sharding of a table, a shard a rank, empty ones included.

    Args:
        counts: rows of each rank of the group that shards the table.
        sharding: another one of the table, by rows or whole.
        first_rank: of all processes, the first one of the group.
        local_size: processes of a host, which have a GPU each.
    """
    like = sharding.sharding_spec.shards[0]
    width, device = like.shard_sizes[1], like.placement.device().type
    firsts, total = [0, *accumulate(counts)], sum(counts)
    ranks = [first_rank + rank for rank in range(len(counts))]
    indices = [f":{rank % local_size}" if device == "cuda" else "" for rank in ranks]
    # An empty shard begins at the end: checkpoints take two shards that begin at one row for copies of each other.
    shards = [
        ShardMetadata([first if count else total, 0], [count, width], f"rank:{rank}/{device}{index}")
        for first, count, rank, index in zip(firsts, counts, ranks, indices, strict=False)
    ]
    return ParameterSharding(
        ShardingType.ROW_WISE.value, sharding.compute_kernel, ranks, EnumerableShardingSpec(shards)
    )


@dataclass(eq=False)
class TableGroup:
    """Sequences of ids that travel together.

    Attributes:
        keys: of each sequence the key of its ids.
        shardings: of each sequence that of its table, the same for all if attention reads them.
        embeddings: of each sequence the name of its embedding.
        features: of each sequence its feature, if attention reads it; else empty. Queries and learned bias tables of
            the group are stacked in this order.
        weight_keys: of each feature the key whose weights it reads, that of its first field.
        fields: of each sequence the keys of the ids that are payload of its events.
        field_shardings: those of the tables of these ids, which every rank can read.
        outside: counts of this rank's ids outside of the tables, by sequence; those of fields are counted where every
            rank reads these tables itself.
    """

    keys: tuple[str, ...]
    shardings: tuple[RowSharding, ...]
    embeddings: tuple[str, ...] = ()
    features: tuple[SequenceFeatureConfig, ...] = ()
    weight_keys: tuple[str, ...] = ()
    fields: tuple[tuple[str, ...], ...] = ()
    field_shardings: tuple[RowSharding, ...] = ()
    outside: OutsideIds = field(init=False)

    def __post_init__(self) -> None:
        self.outside = OutsideIds([sharding.table for sharding in self.shardings])

    @property
    def owner_ranks(self) -> list[int]:
        """The ranks that queries of the features go to, ascending."""
        return self.shardings[0].ranks

    def to_owners(self, pg: dist.ProcessGroup, samples: list[int], peers: PeerMemory | None = None) -> Exchange:
        """Returns the exchange of one row for each sample of each feature, which goes to all owner ranks.

        `samples` are the batch sizes of all ranks `pg`.
        """
        owners, rows = self.owner_ranks, [len(self.keys) * size for size in samples]
        sent = [rows[pg.rank()] if rank in owners else 0 for rank in range(pg.size())]
        received = rows if pg.rank() in owners else [0] * pg.size()
        return Exchange(pg, sent, received, peers)

    @property
    def has_bucket(self) -> bool:
        """True if the payload has a row of the learned bias tables."""
        return bool(self.features) and isinstance(self.features[0].bias, PositionBias | KeyBias)

    @property
    def has_weight(self) -> bool:
        """True if the payload has a weight."""
        return bool(self.features) and self.features[0].reads_weights

    @property
    def padding(self) -> list[int]:
        """The columns of an event without a row: its position, then the payload."""
        return [-1] * (1 + len(self.field_shardings)) + [0] * (self.has_bucket + self.has_weight)


def plan_tables(
    names: list[tuple[str, str, BaseEmbeddingConfig]],
    counts: dict[str, list[int]],
    feature_groups: list[FeatureGroup],
    replicate_below: int,
) -> tuple[list[RowSharding], list[TableGroup], TableGroup]:
    """Returns the path of each embedding of a collection's tables.

    Args:
        names: of each embedding its name, the key of its ids and its table, see `jfi.modules.lookups.names_of`.
        counts: by table the number of each rank's rows.
        feature_groups: those of all layers that read the collection. Features of one name are one feature; those that
            every layer reads together, from the same tables, travel together.
        replicate_below: tables of at most so many rows are replicated, read whole by every rank.

    Returns:
        The sharding of each table, the groups of ids that go to owner ranks, and the ids of replicated tables.

    Raises:
        ValueError: a feature whose rows attention cannot read at their owner ranks, or that layers read differently.
    """
    shardings = row_shardings({table.name: counts[table.name] for _, _, table in names})
    key_of = {name: key for name, key, _ in names}
    table_of = {name: table for name, _, table in names}
    features: dict[str, SequenceFeatureConfig] = {}
    read_in: dict[str, list[int]] = {}  # by feature
    for number, feature_group in enumerate(feature_groups):
        for feature in feature_group.features:
            if not table_of.keys() >= set(feature.sequence_keys):
                continue  # rows of elsewhere, such as an encoder's
            known = features.setdefault(feature.name, feature)
            if known.of_events != feature.of_events:
                must = f"feature '{feature.name}' must read its events alike in all layers of a sharded collection"
                raise ValueError(f"{must}, got {known!r} and {feature!r}: give one of them another name")
            read_in.setdefault(feature.name, []).append(number)
    alike: dict[tuple, list[SequenceFeatureConfig]] = {}
    for name, feature in features.items():
        remote = remote_field(feature, table_of, replicate_below)
        if remote is not None:
            tables = tuple([table_of[embedding].name for embedding in feature.sequence_keys])
            alike.setdefault((tuple(read_in[name]), remote, tables), []).append(feature)
    groups: list[TableGroup] = []
    for (_, remote, tables), members in alike.items():
        keys = [[key_of[embedding] for embedding in feature.sequence_keys] for feature in members]
        groups.append(
            TableGroup(
                keys=tuple([event_keys[remote] for event_keys in keys]),
                shardings=(shardings[tables[remote]],) * len(members),
                embeddings=tuple([feature.sequence_keys[remote] for feature in members]),
                features=tuple(members),
                weight_keys=tuple([event_keys[0] for event_keys in keys]),
                fields=tuple([tuple(event_keys[:remote] + event_keys[remote + 1 :]) for event_keys in keys]),
                field_shardings=tuple([shardings[table] for table in tables[:remote] + tables[remote + 1 :]]),
            )
        )

    def without_features(embeddings: list[str]) -> TableGroup:
        keys = tuple([key_of[embedding] for embedding in embeddings])
        tables = tuple([shardings[table_of[embedding].name] for embedding in embeddings])
        return TableGroup(keys, tables, tuple(embeddings))

    histories = {name for group in groups for name in group.embeddings}
    small = [name for name, table in table_of.items() if table.num_embeddings <= replicate_below]
    fetched = [name for name in table_of if name not in small and name not in histories]
    groups += [without_features(fetched)] if fetched else []
    read_whole = without_features(small)
    return list(shardings.values()), groups, read_whole


def remote_field(
    feature: SequenceFeatureConfig, tables: Mapping[str, BaseEmbeddingConfig], replicate_below: int
) -> int | None:
    """Returns the index of a feature's sequence key whose table, in `tables`, is not replicated; None if all are.

    Raises:
        ValueError: several are not, or the rows of several fields are concatenated.
    """
    keys = feature.sequence_keys
    remote = [index for index, key in enumerate(keys) if tables[key].num_embeddings > replicate_below]
    if not remote:
        return None
    if len(remote) > 1:
        several = sorted({tables[keys[index]].name for index in remote})
        raise ValueError(
            f"attention goes to the rows of one table, but the events of feature '{feature.name}' lie in {several}: "
            "raise replicate_below above the rows of all but one, or exchange rows"
        )
    if feature.combine == "concat" and len(keys) > 1:
        raise ValueError(
            f"attention goes to rows that are summed, but feature '{feature.name}' has combine='concat': use 'sum', or "
            "exchange rows"
        )
    return remote[0]
