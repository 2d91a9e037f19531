"""Ids of sequences by owner rank, in a buffer with equally many slots for each rank: Triton alone.

The formulas are those of `jfi.distributed.input_dist`, with a stable sort by rank, at 4 times the kernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from jfi.utils import operands


class OwnedIds(NamedTuple):
    """The ids of a sequence and the owners of their rows.

    Attributes:
        ids: [S], int64 or int32.
        offsets: [B + 1], from 0; ids behind the last one are padding.
        boundaries: [P - 1] int64: the first row of each of P shards but the first, ascending.
        ranks: [P]: the rank of each shard.
        shifts: [P] int64: the difference of its row's position in its owner's memory and an id.
        num_rows: of the table; the position of an id outside of it is -1.
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
    """Returns whether the kernels take these sequences: few ranks and shards, ids on a GPU."""
    shards = max([num_ranks, *[sequence.ranks.size(0) for sequence in sequences]])
    blocks = sum([sequence.ids.size(0) // operands.PARTITIONED_IDS + 1 for sequence in sequences])
    return sequences[0].ids.is_cuda and shards <= operands.MAX_SHARDS and blocks <= operands.MAX_PARTITIONS


def partition_ids(
    sequences: list[OwnedIds], payload: Tensor | None, num_ranks: int, num_slots: int, padding: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Writes each id to the next slot of its owner.

    Args:
        sequences: of ids, one behind the other.
        payload: [S of all, K - 1] int32, of each id.
        num_ranks: W.
        num_slots: N; ids beyond them are left out.
        padding: [1, K] int32, written to empty slots: then the slots of the ids are returned too.

    Returns:
        The buffer [W · N, K] int32, whose column 0 is the row's position in its owner's memory. With `padding`, the
        slot of each id [S of all] int64, -1 for padding and ids that are left out. The ids of each rank, [W] int64.
    """
    from jfi.kernels.exchange.partition import partition

    device, columns = sequences[0].ids.device, 1 if payload is None else 1 + payload.size(1)
    buffer, slots = torch.empty(num_ranks * num_slots, columns, dtype=torch.int32, device=device), None
    if padding is not None:
        buffer.copy_(padding.expand_as(buffer))
        slots = torch.empty(sum([sequence.ids.size(0) for sequence in sequences]), dtype=torch.int64, device=device)
    counts = partition([tuple(sequence) for sequence in sequences], payload, num_ranks, num_slots, buffer, slots)
    return buffer, slots, counts.sum(1)


def count_samples(sequences: list[OwnedIds], num_ranks: int) -> Tensor:
    """Counts the ids of each sample that every rank owns, [W, samples of all sequences] int32."""
    from jfi.kernels.exchange.partition import count_samples

    return count_samples([tuple(sequence) for sequence in sequences], num_ranks)


def collect(arrived: Tensor, ends: Tensor, padding: Tensor, num_slots: int, capacity: int) -> Tensor:
    """Moves the events of all ranks together, followed by `padding`: [K, capacity] int32.

    Args:
        arrived: [W · N, K] int32, contiguous: the events of each rank, in its first slots.
        ends: [W] int64: the number of events of the ranks up to each.
        padding: [K] int32.
        num_slots: N.
        capacity: of the result.
    """
    from jfi.kernels.exchange.partition import collect

    return collect(arrived, ends, padding, num_slots, capacity)
