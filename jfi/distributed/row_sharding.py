"""The rows of each table by owner rank, and their positions in its memory, from a TorchRec sharding plan."""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingType

from jfi import reference


class RowSharding:
    """The ranks that own the rows of one table.

    An owner rank has the rows of all its tables in one block of memory, [M, D].

    Args:
        num_rows: rows of the table.
        first_rows: of each shard that holds rows its first row, ascending from 0.
        ranks: of each of these shards the rank that owns it.
        positions: of each of these shards the position of its first row in its owner's memory.

    Example:
        >>> sharding = RowSharding(10, [0, 6], [2, 0], [100, 0])
        >>> sharding.locate(torch.tensor([7, 1, 6]))
        (tensor([0, 2, 0], dtype=torch.uint8), tensor([  1, 101,   0], dtype=torch.int32))
        >>> sharding.rows_of(0), sharding.rows_of(1)
        (range(6, 10), range(0, 0))
    """

    def __init__(self, num_rows: int, first_rows: list[int], ranks: list[int], positions: list[int]) -> None:
        self.num_rows, self.first_rows, self.ranks, self.positions = num_rows, first_rows, ranks, positions
        # A dtype of few bits, by which sorting is fast.
        self._rank_dtype = torch.uint8 if max(ranks, default=0) < 256 else torch.int16
        self._shifts = [position - first for position, first in zip(positions, first_rows, strict=True)]
        #: By device what `tensors` returns: no copy from the host in a step.
        self._tensors: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def rows_of(self, rank: int) -> range:
        """Returns the rows of the table that a rank owns."""
        if rank not in self.ranks:
            return range(0)
        shard = self.ranks.index(rank)
        return range(self.first_rows[shard], [*self.first_rows[1:], self.num_rows][shard])

    def positions_of(self, rank: int) -> range:
        """Returns the positions of these rows in the rank's memory."""
        rows = self.rows_of(rank)
        first = self.positions[self.ranks.index(rank)] if rows else 0
        return range(first, first + len(rows))

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the first row of each shard but the first, their ranks, and the shifts from rows to positions."""
        if device not in self._tensors:
            boundaries = torch.tensor(self.first_rows[1:], dtype=torch.int64, device=device)
            ranks = torch.tensor(self.ranks, dtype=self._rank_dtype, device=device)
            self._tensors[device] = boundaries, ranks, torch.tensor(self._shifts, dtype=torch.int64, device=device)
        return self._tensors[device]

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the owner ranks [S] of ids [S], uint8 or int16, and the rows' positions in their memory [S], int32.

        An id outside of the table belongs to the first shard's owner, at position -1, which is a missing row there.
        """
        ids = reference.bound_ids(ids, self.num_rows).long()
        if len(self.ranks) == 1:
            ranks, positions = torch.full_like(ids, self.ranks[0], dtype=self._rank_dtype), ids + self._shifts[0]
        else:
            boundaries, ranks, shifts = self.tensors(ids.device)
            shard = torch.bucketize(ids, boundaries, right=True, out_int32=True)
            ranks, positions = ranks[shard], ids + shifts[shard]
        return ranks, torch.where(ids < 0, -1, positions).to(torch.int32)


def row_shardings(
    sizes: Mapping[str, int], plan: Mapping[str, ParameterSharding], first_rank: int = 0
) -> dict[str, RowSharding]:
    """Returns the row sharding of every table of a plan, in whose order the tables lie in each rank's memory.

    Args:
        sizes: by table the number of its rows.
        plan: by table its sharding, as `row_wise_shards` gives it.
        first_rank: of all processes, the first one of the group that the plan is for.

    Raises:
        ValueError: a rank would own 2**31 rows or more.
    """
    shardings, used = {}, {}
    for table, num_rows in sizes.items():
        held = [shard for shard in plan[table].sharding_spec.shards if shard.shard_sizes[0] > 0]
        ranks = [shard.placement.rank() - first_rank for shard in held]
        firsts, positions = [shard.shard_offsets[0] for shard in held], [used.get(rank, 0) for rank in ranks]
        for shard, rank, position in zip(held, ranks, positions, strict=True):
            used[rank] = position + shard.shard_sizes[0]
        shardings[table] = RowSharding(num_rows, firsts, ranks, positions)
    for rank, count in used.items():
        if count >= 2**31:  # positions travel as int32
            raise ValueError(f"plan must give a rank fewer than 2**31 rows, got {count} on rank {first_rank + rank}")
    return shardings


def row_wise_shards(
    table: str, sharding: ParameterSharding, size: int, first_rank: int = 0, local_size: int = 1
) -> ParameterSharding:
    """Returns the same shards in the form of TorchRec's row-wise sharding: one a rank, empty ones included.

    Args:
        table: for messages.
        sharding: of the table.
        size: ranks of the group that shards it.
        first_rank: of all processes, the first one of the group.
        local_size: processes of a host.

    Raises:
        ValueError: the plan divides the table's columns, replicates it, or keeps it elsewhere than in device memory.
    """
    spec = [] if sharding.sharding_spec is None else sharding.sharding_spec.shards
    if not spec or any(shard.shard_offsets[1] != 0 for shard in spec):
        raise ValueError(
            f"the plan of table '{table}' must shard it by rows or leave it whole, got {sharding.sharding_type}"
        )
    if sharding.compute_kernel != EmbeddingComputeKernel.FUSED.value:
        raise ValueError(
            f"the plan of table '{table}' must have compute_kernel 'fused', an optimizer in the backward pass and rows "
            f"in device memory, got '{sharding.compute_kernel}'"
        )
    rows = {shard.placement.rank() - first_rank: shard.shard_sizes[0] for shard in spec}
    counts = [rows.get(rank, 0) for rank in range(size)]
    device = spec[0].placement.device().type
    return in_rows(counts, spec[0].shard_sizes[1], device, sharding.compute_kernel, first_rank, local_size)


def in_rows(
    counts: list[int], width: int, device: str, compute_kernel: str, first_rank: int = 0, local_size: int = 1
) -> ParameterSharding:
    """Returns TorchRec's row-wise sharding of a table with `counts[r]` rows on rank r.

    Args:
        counts: rows of each rank.
        width: of a row.
        device: type of the ranks' devices.
        compute_kernel: of the table.
        first_rank: of all processes, the first one of the group.
        local_size: processes of a host, which have a GPU each.
    """
    firsts, total = [0, *accumulate(counts)], sum(counts)
    ranks = [first_rank + rank for rank in range(len(counts))]
    indices = [f":{rank % local_size}" if device == "cuda" else "" for rank in ranks]
    # An empty shard begins at the end: checkpoints take two shards that begin at one row for copies of each other.
    shards = [
        ShardMetadata(
            shard_offsets=[first if count else total, 0],
            shard_sizes=[count, width],
            placement=f"rank:{rank}/{device}{index}",
        )
        for first, count, rank, index in zip(firsts, counts, ranks, indices, strict=False)
    ]
    return ParameterSharding(ShardingType.ROW_WISE.value, compute_kernel, ranks, EnumerableShardingSpec(shards))
