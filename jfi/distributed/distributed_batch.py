"""A batch whose ids are at the owner ranks of their rows, as a captured step reads it.

It is a tree that `jfi.cuda_graphs.static_batch` takes apart. Its keys are numbered by table group, through all
collections.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jfi.cuda_graphs.static_batch import Described, UnsupportedBatch, describe
from jfi.distributed.exchange import Exchange
from jfi.distributed.input_dist import GroupInput, InputDistOutput
from jfi.distributed.peer_memory import PeerMemory
from jfi.distributed.planning import TableGroup
from jfi.distributed.sharded_tables import ShardedTables
from jfi.modules import lookups


@dataclass
class DistributedBatch:
    """A batch whose ids are at the owner ranks of their rows.

    Attributes:
        batch: this rank's.
        samples: of every rank.
        events: of each table group that attention reads, the events that arrived here: a key for each column, the
            lengths are those by rank, sequence and sample.
        requested: of each other group, the rows that every rank requests here, in as many slots each; -1 is padding.
        slots: of each other group by its keys, the slot in which the row of an id comes back; -1 is padding.
    """

    batch: Any
    samples: tuple[int, ...]
    events: list[KeyedJaggedTensor]
    requested: list[KeyedJaggedTensor]
    slots: list[KeyedJaggedTensor]

    def outputs(
        self, collections: list[ShardedTables], pg: dist.ProcessGroup, peers: PeerMemory | None
    ) -> list[InputDistOutput]:
        """Returns what each collection reads.

        Args:
            collections: of the model.
            pg: all ranks, for what the step sends.
            peers: memory through which the step sends, if not through the process group.
        """
        ids = ids_of(describe(self.batch))
        lookups.allow_no_samples(ids)
        by_key, found = ids.to_dict(), []
        events, requested, slots = iter(self.events), iter(self.requested), iter(self.slots)
        for group in groups_of(collections):
            queries = group.to_owners(pg, list(self.samples), peers)
            if group.features:
                arrived = next(events)
                columns = arrived.values().view(len(arrived.keys()), -1).unbind(0)
                offsets = arrived.lengths().new_zeros(1)
                if arrived.stride():  # TorchRec cannot divide what has no samples
                    offsets = arrived.to_dict()[arrived.keys()[0]].offsets()  # of every column
                sizes = [by_key[key].values().size(0) for key in group.keys]
                found.append(GroupInput(group, None, queries, columns, offsets, sizes))
                continue
            rows, where = next(requested).values(), next(slots)
            counts = [rows.size(0) // pg.size()] * pg.size()
            fetch = Exchange(pg, counts, counts, peers)
            rows, sizes = rows[: sum(counts)], where.length_per_key()
            found.append(GroupInput(group, fetch, queries, (rows,), None, sizes, slots=where.values()))
        rest = iter(found)
        return [InputDistOutput([next(rest) for _ in collection.groups], by_key) for collection in collections]


def groups_of(collections: list[ShardedTables]) -> list[TableGroup]:
    """Returns the table groups of all collections, in the order of a `DistributedBatch`."""
    return [group for collection in collections for group in collection.groups]


def ids_of(batch: Described) -> KeyedJaggedTensor:
    """Returns the ids of a batch.

    Raises:
        UnsupportedBatch: it has none, or several KeyedJaggedTensors.
    """
    if len(batch.jagged) != 1:
        raise UnsupportedBatch(f"the batch has {len(batch.jagged)} KeyedJaggedTensors, and must have one")
    return batch.jagged[0]


def padding_of(collections: list[ShardedTables]) -> dict[str, int]:
    """Returns the padding id of each key of a `DistributedBatch`; that of others is 0."""
    found = {key: -1 for collection in collections for key in collection.local_keys}
    for number, group in enumerate(groups_of(collections)):
        if group.features:
            found |= dict.fromkeys(column_keys(number, group)[: 1 + len(group.field_tables)], -1)
        else:
            found |= dict.fromkeys([requested_key(number), *slot_keys(number, group)], -1)
    return found


def column_keys(number: int, group: TableGroup) -> list[str]:
    """Returns the keys of a group's columns: the row, then the payload, see `payload_of`."""
    names = ["row", *group.field_tables]
    names += ["bucket"] * group.has_bucket + ["weight"] * group.has_weight
    return [f"{number}.{index}.{name}" for index, name in enumerate(names)]


def requested_key(number: int) -> str:
    """Returns the key of the rows that are requested of a group."""
    return f"{number}.requested"


def sent_key(number: int) -> str:
    """Returns the name of the number of events that a rank has for another one."""
    return f"{number}.sent"


def slot_keys(number: int, group: TableGroup) -> list[str]:
    """Returns the keys of the slots in which rows of a group come back."""
    return [f"{number}.slot.{key}" for key in group.keys]


def jagged(keys: list[str], values: Tensor, lengths: Tensor, counts: list[int]) -> KeyedJaggedTensor:
    """Returns a KeyedJaggedTensor whose numbers of values by key the host knows."""
    return KeyedJaggedTensor(
        keys=keys,
        values=values,
        lengths=lengths,
        stride=lengths.size(0) // len(keys),
        length_per_key=counts,
        offset_per_key=[0, *accumulate(counts)],
    )
