"""The input dist: the ids of a batch go to the ranks that own their rows.

An event is a row of int32 columns: its row's position in the owner's memory, then its payload. All ranks gather how
many events each has for each owner; then the events of a table group travel in one all-to-all, with equally many slots
for every pair of ranks. At its owner, what has arrived is moved together, as if the exact numbers had been sent. So an
owner's events of a sample keep their order, and samples without an event there have a length of 0.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from jfi.distributed.exchange import Exchange, gather
from jfi.distributed.planning import TableGroup
from jfi.modules import KeyBias, PositionBias
from jfi.modules.events import position_buckets
from jfi.modules.validation import allow_no_samples, require_keys
from jfi.ops import partition_ids as kernels
from jfi.tables.gather_rows import bound_ids, check_indices
from jfi.utils.context import may_read, padding_state
from jfi.utils.operands import MAX_SHARDS

#: The columns of events begin at multiples of so many int32, as kernels load them best.
_ALIGNMENT = 64


@dataclass
class GroupInput(Multistreamable):
    """The events of a table group at their owner, and what this rank has to know of those that it sent.

    Attributes:
        group: the table group.
        events: the exchange of the events; None if their rows cannot be fetched.
        queries: the exchange of one row for each sample: every owner gets those of all samples of all ranks; None if
            attention does not read the events.
        columns: [R] int32 each, what arrived, by rank, then sequence, then sample: positions of the rows in the owner's
            memory, then the payload.
        offsets: [n + 1] int32, of its events by rank, sequence and sample; None if attention does not read them.
        sizes: events of each sequence.
        slots: [S] int64, where each event of the batch is among those that `events` sends; -1 is padding. None if their
            rows cannot be fetched.
    """

    group: TableGroup
    events: Exchange | None
    queries: Exchange | None
    columns: tuple[Tensor, ...]
    offsets: Tensor | None
    sizes: list[int]
    slots: Tensor | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (*self.columns, self.offsets, self.slots):
            if tensor is not None:
                tensor.record_stream(stream)


@dataclass
class InputDistOutput(Multistreamable):
    """The events of all table groups of a batch at their owners, and the batch's own ids by key."""

    groups: list[GroupInput]
    by_key: dict[str, JaggedTensor]

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (*self.groups, *self.by_key.values()):
            part.record_stream(stream)


class InputDist(Awaitable[Awaitable[InputDistOutput]]):
    """Gathers how many ids of a batch each rank has for each owner; waiting for it sends the ids."""

    def __init__(self, groups: list[TableGroup], ids: KeyedJaggedTensor, pg: dist.ProcessGroup) -> None:
        super().__init__()
        allow_no_samples(ids)
        self._groups, self._pg, self._by_key = groups, pg, ids.to_dict()
        for group in groups:
            check_keys(group, self._by_key)
        self._counts = [count_samples(group, self._by_key, pg.size()) for group in groups]
        batch = torch.full((1,), ids.stride(), device=ids.device())
        self._gathered = gather(torch.cat([batch, *[counts.sum(1) for counts in self._counts]]), pg)

    def _wait_impl(self) -> NoWait[InputDistOutput]:
        by_key, pg, rank, size, inputs = self._by_key, self._pg, self._pg.rank(), self._pg.size(), []
        shapes = self._gathered.cpu().tolist()  # one synchronization, while the batch before computes
        samples = [row[0] for row in shapes]
        for number, (group, counts) in enumerate(zip(self._groups, self._counts, strict=True)):
            columns = slice(1 + number * size, 1 + (number + 1) * size)
            to_rank, sums = [row[columns] for row in shapes], self._gathered[:, columns]
            slots, padding = max(1, *map(max, to_rank)), counts.new_full((1, len(group.padding)), -1)
            buffer, _, index = partition(group, by_key, size, slots, padding, group.outside.on(counts.device))
            # Rows travel without empty slots.
            starts = sums[rank].cumsum(0) - sums[rank]
            index = torch.where(index < 0, -1, index % slots + starts[index // slots])
            events = Exchange(pg, to_rank[rank], [row[rank] for row in to_rank])
            arrived, lengths = send_events(group, buffer, slots, counts, samples, pg)
            count = sum(events.received)
            collected = collect(arrived, sums[:, rank], padding, size, -(-count // _ALIGNMENT) * _ALIGNMENT)
            queries, offsets = None, None
            if lengths is not None:
                queries, offsets = group.to_owners(pg, samples), offsets_of(lengths)
            sizes = [by_key[key].values().size(0) for key in group.keys]
            inputs.append(GroupInput(group, events, queries, collected[:, :count].unbind(0), offsets, sizes, index))
        return NoWait(InputDistOutput(inputs, by_key))


def send_events(
    group: TableGroup, buffer: Tensor, slots: int, counts: Tensor, samples: list[int], pg: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    """Sends a group's events to their owner ranks, and to those of histories how many each sample has.

    Args:
        buffer: [W · slots, K] int32, of `partition`.
        counts: [W, sequences · B] int32, of `count_samples`; unused if attention does not read the group.
        samples: of every rank.

    Returns:
        What arrives, [W · slots, K] int32, or [0, K] on a rank that owns none of the rows; then the counts [n] int32
        that arrive, by rank, sequence and sample, or None.
    """
    size = pg.size()
    owners = group.owner_ranks if group.features else range(size)
    if len(owners) < size:
        buffer = torch.cat([buffer[rank * slots : (rank + 1) * slots] for rank in owners])
        counts = torch.stack([counts[rank] for rank in owners])
    sent, received = [slots if rank in owners else 0 for rank in range(size)], slots if pg.rank() in owners else 0
    arrived = Exchange(pg, sent, [received] * size).send(buffer)
    return arrived, group.to_owners(pg, samples).send(counts.flatten()) if group.features else None


def offsets_of(lengths: Tensor) -> Tensor:
    """Returns the offsets [n + 1] int32 of lengths [n]."""
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def check_keys(group: TableGroup, by_key: dict[str, JaggedTensor]) -> None:
    """Raises a ValueError that names the key which a batch lacks or which does not fit."""
    require_keys("features", by_key, group.keys)
    for index, feature in enumerate(group.features):
        key = group.keys[index]
        aligned = list(group.fields[index]) + ([] if feature.bias_key is None else [feature.bias_key])
        require_keys("features", by_key, aligned)
        count = by_key[key].values().size(0)
        for other in aligned:
            if (got := by_key[other].values().size(0)) != count:
                raise ValueError(f"features['{other}'] must have as many events as '{key}', {count}, got {got}")
        key = group.weight_keys[index]
        weights, must = by_key[key].weights_or_none(), f"features['{key}'] must have weights"
        if feature.reads_weights and weights is None:
            raise ValueError(f"{must}, which feature '{feature.name}' reads, got none")
        if feature.reads_weights and weights.requires_grad:
            got = "some that require one: exchange rows instead"
            raise ValueError(f"{must} without a gradient, since attention goes to the rows, got {got}")


@torch.no_grad()
def partition(
    group: TableGroup,
    by_key: dict[str, JaggedTensor],
    num_ranks: int,
    slots: int,
    padding: Tensor | None,
    outside: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Puts the events of a table group, which may be padded, into equally many slots for each of W owner ranks.

    Nothing synchronizes with a GPU. Empty slots are `padding` [1, K] int32, or anything without it. The counts
    `outside` [sequences] int64 grow by the ids outside of their tables.

    Returns:
        By owner the events in the order of the batch, [W · slots, K] int32. The number of events for each owner, [W]
        int64, more than its slots if they do not hold them. With `padding`, the slot of each event of the batch, [S]
        int64, -1 for padding.
    """
    sequences = [by_key[key] for key in group.keys]
    owned = _owned_ids(group, by_key, outside)
    if kernels.takes_ids(owned, num_ranks):
        check_ids(group, by_key)
        payload = payload_of(group, by_key, sequences)
        stacked = torch.stack(payload, 1) if payload else None
        buffer, where, sums = kernels.partition_ids(owned, stacked, num_ranks, slots, padding)
        return buffer, sums, where
    ranks, rows = _located(group, by_key, bounded_ids(group, by_key, outside), num_ranks)
    columns, end = torch.stack([rows, *payload_of(group, by_key, sequences)], 1), num_ranks * slots
    ascending, order = torch.sort(ranks.short(), stable=True)  # of few bits, by which sorting is fast
    starts = torch.searchsorted(ascending, torch.arange(num_ranks + 1, dtype=torch.int16, device=ranks.device))
    within = torch.arange(ranks.size(0), device=ranks.device) - starts[ascending.long()]
    within = torch.empty_like(within).index_copy_(0, order, within)
    is_sent = (ranks < num_ranks) & (within < slots)
    where = torch.where(is_sent, ranks * slots + within, end)  # the last slot is for all that are not sent
    buffer = columns.new_zeros(end + 1, columns.size(1)) if padding is None else padding.repeat(end + 1, 1)
    buffer = buffer.index_copy_(0, where, columns)[:-1]
    return buffer, starts.diff(), None if padding is None else torch.where(is_sent, where, -1)


@torch.no_grad()
def count_samples(group: TableGroup, by_key: dict[str, JaggedTensor], num_ranks: int) -> Tensor:
    """Counts the events of each sample for each of W owner ranks, [W, sequences · B] int32."""
    owned = _owned_ids(group, by_key, None)
    if kernels.takes_ids(owned, num_ranks):
        return kernels.count_samples(owned, num_ranks)
    ranks, _ = _located(group, by_key, [sequence.ids for sequence in owned], num_ranks)
    samples, first = [], 0
    for sequence in owned:
        index = torch.arange(sequence.ids.size(0), dtype=sequence.offsets.dtype, device=ranks.device)
        samples.append(torch.searchsorted(sequence.offsets[1:].contiguous(), index, right=True) + first)
        first += sequence.offsets.size(0) - 1
    where = torch.where(ranks < num_ranks, ranks * first + _joined(samples), num_ranks * first)
    counts = torch.zeros(num_ranks * first + 1, dtype=torch.int32, device=ranks.device)
    return counts.index_add_(0, where, torch.ones_like(where, dtype=torch.int32))[:-1].view(num_ranks, first)


def collect(arrived: Tensor, counts: Tensor, padding: Tensor, num_ranks: int, capacity: int) -> Tensor:
    """Moves the events of W ranks together, followed by `padding` [1, K]: [K, capacity] int32.

    Args:
        arrived: [W · slots, K] int32: those of each rank in its first slots.
        counts: [W · n]: the numbers of events, by rank.
    """
    slots = arrived.size(0) // num_ranks
    if not slots:
        return padding.view(-1, 1).expand(-1, capacity)
    ends = counts.view(num_ranks, -1).sum(1).cumsum(0)
    if arrived.is_cuda and num_ranks <= MAX_SHARDS:
        return kernels.collect(arrived, ends, padding, slots, capacity)
    index = torch.arange(capacity, device=ends.device)
    source = torch.searchsorted(ends, index, right=True).clamp_(max=num_ranks - 1)
    within = index - pad(ends[:-1], (1, 0))[source]
    columns = arrived.index_select(0, (source * slots + within).clamp_(0, num_ranks * slots - 1))
    return torch.where((index < ends[-1]).unsqueeze(1), columns, padding).t().contiguous()


def _owned_ids(group: TableGroup, by_key: dict[str, JaggedTensor], outside: Tensor | None) -> list[kernels.OwnedIds]:
    """Returns the ids of each sequence; those outside of their tables are counted in `outside`, if it is given."""
    owned = []
    for number, (key, sharding) in enumerate(zip(group.keys, group.shardings, strict=True)):
        ids, counts = by_key[key].values(), None if outside is None else outside[number:]
        tables = sharding.tensors(ids.device)
        owned.append(kernels.OwnedIds(ids, by_key[key].offsets(), *tables, sharding.num_rows, counts))
    return owned


def _located(
    group: TableGroup, by_key: dict[str, JaggedTensor], ids_of: list[Tensor], num_ranks: int
) -> tuple[Tensor, Tensor]:
    """Returns the owner rank of each event [S] int64, W of padding, and its row's position there [S] int32."""
    located = []
    for key, sharding, ids in zip(group.keys, group.shardings, ids_of, strict=True):
        ranks, rows = sharding.locate(ids)
        is_event = torch.arange(ids.size(0), device=ids.device) < by_key[key].offsets()[-1]
        located.append((torch.where(is_event, ranks.long(), num_ranks), rows))
    ranks, rows = (_joined(list(parts)) for parts in zip(*located, strict=True))
    return ranks, rows


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def check_ids(group: TableGroup, by_key: dict[str, JaggedTensor]) -> None:
    """Checks the ids that a table group sends, where they may be read.

    Raises:
        ValueError: an id is outside of its table, or of the buckets of its feature's bias.
    """
    tables, is_padded = list(zip(group.keys, group.shardings, strict=True)), padding_state.is_padded
    for keys in group.fields:
        tables += zip(keys, group.field_shardings, strict=True)
    for key, sharding in tables:
        ids, rows_of = by_key[key], f"table '{sharding.table}'"
        count = int(ids.lengths().sum()) if is_padded and may_read(ids.lengths()) else None
        check_indices(f"features['{key}']", ids.values(), sharding.num_rows, rows_of, count, padded=False)
    for feature in group.features:
        if isinstance(feature.bias, KeyBias):
            ids, bias = by_key[feature.bias_key].values(), f"the bias of feature '{feature.name}'"
            check_indices(f"features['{feature.bias_key}']", ids, feature.num_buckets, bias, padded=False)


def bounded_ids(group: TableGroup, by_key: dict[str, JaggedTensor], outside: Tensor) -> list[Tensor]:
    """Returns the checked ids of each sequence, with -1 for those outside of their tables, counted in `outside`."""
    check_ids(group, by_key)
    ids = [by_key[key].values() for key in group.keys]
    return bound_ids(ids, [sharding.num_rows for sharding in group.shardings], outside)


def payload_of(group: TableGroup, by_key: dict[str, JaggedTensor], sequences: list[JaggedTensor]) -> list[Tensor]:
    """Returns the payload of a group's events, [S] int32 each; -1 for ids outside of their tables and buckets."""
    payload = []
    for index, sharding in enumerate(group.field_shardings):
        sizes = [sharding.num_rows] * len(sequences)
        ids = bound_ids([by_key[keys[index]].values() for keys in group.fields], sizes)
        payload.append(_joined(ids).to(torch.int32))
    if group.has_bucket:
        stacked = []
        for index, (feature, sequence) in enumerate(zip(group.features, sequences, strict=True)):
            if isinstance(feature.bias, PositionBias):
                count = sequence.values().size(0)
                buckets = position_buckets(sequence.offsets(), count, feature.bias, padding_state.is_padded)
            else:
                (buckets,) = bound_ids([by_key[feature.bias_key].values()], [feature.num_buckets])
            first = index * feature.num_buckets
            stacked.append(torch.where(buckets < 0, -1, buckets + first) if first else buckets)
        payload.append(_joined(stacked).to(torch.int32))
    if group.has_weight:
        weights = _joined([by_key[key].weights() for key in group.weight_keys]).to(torch.float32)
        payload.append(weights.view(torch.int32))
    return payload
