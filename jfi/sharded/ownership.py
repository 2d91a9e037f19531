"""Which rank owns which rows of which table, and where in its memory: read from a TorchRec sharding plan."""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingType


class Owners:
    """The ranks that own the rows of one table.

    An owner has the rows of all its tables in one block of memory, [M, D].

    Args:
        num_rows: rows of the table.
        first_rows: of each shard that holds rows its first row, ascending from 0.
        ranks: of each of these shards the rank that owns it.
        places: of each of these shards the place of its first row in its owner's memory.

    Example:
        >>> owners = Owners(10, [0, 6], [2, 0], [100, 0])
        >>> owners.locate(torch.tensor([7, 1, 6]))
        (tensor([0, 2, 0], dtype=torch.uint8), tensor([  1, 101,   0], dtype=torch.int32))
        >>> owners.rows_of(0), owners.rows_of(1)
        (range(6, 10), range(0, 0))
    """

    def __init__(self, num_rows: int, first_rows: list[int], ranks: list[int], places: list[int]) -> None:
        self.num_rows, self.first_rows, self.ranks, self.places = num_rows, first_rows, ranks, places
        self._shifts = [place - first for place, first in zip(places, first_rows, strict=True)]
        #: By device the boundaries between shards, their ranks and shifts: no copy from the host in a step.
        self._tensors: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def rows_of(self, rank: int) -> range:
        """The rows of the table that a rank owns."""
        if rank not in self.ranks:
            return range(0)
        shard = self.ranks.index(rank)
        return range(self.first_rows[shard], [*self.first_rows[1:], self.num_rows][shard])

    def memory_of(self, rank: int) -> range:
        """The places of these rows in the rank's memory."""
        rows = self.rows_of(rank)
        first = self.places[self.ranks.index(rank)] if rows else 0
        return range(first, first + len(rows))

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The owners' ranks [S], uint8, and the places of the rows in their memories [S], int32, of ids [S]."""
        if len(self.ranks) == 1:
            return torch.full_like(ids, self.ranks[0], dtype=torch.uint8), (ids + self._shifts[0]).to(torch.int32)
        if ids.device not in self._tensors:
            boundaries = torch.tensor(self.first_rows[1:], device=ids.device)
            ranks = torch.tensor(self.ranks, dtype=torch.uint8, device=ids.device)
            self._tensors[ids.device] = boundaries, ranks, torch.tensor(self._shifts, device=ids.device)
        boundaries, ranks, shifts = self._tensors[ids.device]
        shard = torch.bucketize(ids, boundaries, right=True, out_int32=True)
        return ranks[shard], (ids + shifts[shard]).to(torch.int32)


def all_owners(sizes: Mapping[str, int], plan: Mapping[str, ParameterSharding]) -> dict[str, Owners]:
    """The owners of every table of a plan by rows, in whose order the tables lie in each rank's memory.

    Args:
        sizes: by table the number of its rows.
        plan: by table its sharding, as `by_rows` gives it.
    """
    owners, used = {}, {}
    for table, num_rows in sizes.items():
        held = [shard for shard in plan[table].sharding_spec.shards if shard.shard_sizes[0] > 0]
        ranks = [shard.placement.rank() for shard in held]
        firsts, places = [shard.shard_offsets[0] for shard in held], [used.get(rank, 0) for rank in ranks]
        for shard, rank, place in zip(held, ranks, places, strict=True):
            used[rank] = place + shard.shard_sizes[0]
        owners[table] = Owners(num_rows, firsts, ranks, places)
    return owners


def by_rows(table: str, sharding: ParameterSharding, world_size: int) -> ParameterSharding:
    """The same shards as TorchRec's row-wise sharding has them: one a rank, most of them empty for a whole table.

    Raises:
        ValueError: the plan divides the table's columns or replicates it.
    """
    shards = {} if sharding.sharding_spec is None else {s.placement.rank(): s for s in sharding.sharding_spec.shards}
    if not shards or any(shard.shard_offsets[1] != 0 for shard in sharding.sharding_spec.shards):
        raise ValueError(
            f"the plan of table '{table}' must shard it by rows or leave it whole, got {sharding.sharding_type}"
        )
    device = next(iter(shards.values())).placement.device()
    counts = [shards[rank].shard_sizes[0] if rank in shards else 0 for rank in range(world_size)]
    width = next(iter(shards.values())).shard_sizes[1]
    places = [str(shards[rank].placement) if rank in shards else f"rank:{rank}/{device}" for rank in range(world_size)]
    return in_rows(counts, width, places, sharding.compute_kernel)


def in_rows(counts: list[int], width: int, places: list[str], compute_kernel: str) -> ParameterSharding:
    """TorchRec's row-wise sharding of a table, with so many rows for each rank, in the order of the ranks.

    Args:
        counts: rows of each rank.
        width: of a row.
        places: of each rank its device, as TorchRec writes it, such as "rank:0/cuda:0".
        compute_kernel: of the table.
    """
    firsts, total = [0, *accumulate(counts)], sum(counts)
    # An empty shard begins at the end: checkpoints take two shards that begin at one row for copies of each other.
    offsets = [first if count else total for first, count in zip(firsts, counts, strict=False)]
    spec = EnumerableShardingSpec(
        [
            ShardMetadata(shard_offsets=[offset, 0], shard_sizes=[count, width], placement=place)
            for offset, count, place in zip(offsets, counts, places, strict=True)
        ]
    )
    return ParameterSharding(ShardingType.ROW_WISE.value, compute_kernel, list(range(len(counts))), spec)
