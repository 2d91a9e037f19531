"""Ids of sequences by the rank that owns their rows, in a buffer with as many places for each rank: Triton alone.

The formulas are those of `jfi.sharded.routes`, with a stable sort by rank, at 4 times the kernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from jfi import plan


class OwnedIds(NamedTuple):
    """The ids of a sequence and who owns their rows.

    Attributes:
        ids: [S], int64 or int32.
        offsets: [B + 1], from 0; ids behind the last one are padding.
        boundaries: [P - 1] int64: of each of P shards but the first its first row, ascending.
        ranks: [P]: the rank of each shard.
        shifts: [P] int64: what to add to an id for its row's place in its owner's memory.
        num_rows: of the table; the place of an id outside of it is -1.
        outside: [1] int64: grows by the number of such ids, -1 excepted; None to count none.
    """

    ids: Tensor
    offsets: Tensor
    boundaries: Tensor
    ranks: Tensor
    shifts: Tensor
    num_rows: int
    outside: Tensor | None = None


def takes_ids(sequences: list[OwnedIds], num_ranks: int) -> bool:
    """Whether the kernels take these sequences: few ranks and shards, ids on a GPU."""
    shards = max([num_ranks, *[one.ranks.size(0) for one in sequences]])
    blocks = sum([one.ids.size(0) // plan.PARTITIONED_IDS + 1 for one in sequences])
    return sequences[0].ids.is_cuda and shards <= plan.MOST_SHARDS and blocks <= plan.MOST_PARTITIONS


def partition_ids(
    sequences: list[OwnedIds], brought: Tensor | None, num_ranks: int, most: int, blank: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Writes each id to the next place of its owner.

    Args:
        sequences: of ids, one behind the other.
        brought: [S of all, K - 1] int32: what each id brings along.
        num_ranks: W.
        most: places for each rank; ids beyond them are left out.
        blank: [1, 1] int32, of places left, if anybody reads them, where K is 1: then the ids' places come back too.

    Returns:
        The buffer [W · most, K] int32, whose column 0 is the row's place in its owner's memory. With `blank`, where an
        id is in it, [S of all] int64, -1 for padding and what is left out. How many ids each rank has, [W] int64.
    """
    from jfi.kernels.exchange.partition import partition

    device, columns = sequences[0].ids.device, 1 if brought is None else 1 + brought.size(1)
    buffer, slots = torch.empty(num_ranks * most, columns, dtype=torch.int32, device=device), None
    if blank is not None:
        buffer.copy_(blank.expand_as(buffer))
        slots = torch.empty(sum([one.ids.size(0) for one in sequences]), dtype=torch.int64, device=device)
    counts = partition([tuple(one) for one in sequences], brought, num_ranks, most, buffer, slots)
    return buffer, slots, counts.sum(1)


def count_samples(sequences: list[OwnedIds], num_ranks: int) -> Tensor:
    """[W, samples of all sequences] int32: how many ids of each sample every rank owns."""
    from jfi.kernels.exchange.partition import count_samples

    return count_samples([tuple(one) for one in sequences], num_ranks)


def collect(arrived: Tensor, ends: Tensor, blank: Tensor, most: int, room: int) -> Tensor:
    """[K, room] int32: what has arrived of all ranks, one behind the other, then what is blank.

    Args:
        arrived: [W · most, K] int32, contiguous: what came from each rank, in its first places.
        ends: [W] int64: how many came from the ranks up to each.
        blank: [K] int32.
        most: places of each rank.
        room: of the result.
    """
    from jfi.kernels.exchange.partition import collect

    return collect(arrived, ends, blank, most, room)
