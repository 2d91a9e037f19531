"""The input dist: the ids of a batch go to the ranks that own their rows.

An event is a row of int32 columns: its row's position in the owner's memory, then its payload. All events of a table
group travel in one all-to-all, sorted by owner rank, of equal owners in the order of the batch. So an owner's events of
a sample keep their order, and samples without an event there have a length of 0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from jfi.distributed.exchange import Exchange
from jfi.distributed.planning import TableGroup
from jfi.modules import KeyBias, PositionBias, lookups
from jfi.modules.events import position_buckets
from jfi.modules.validation import require_keys
from jfi.ops.gather_rows import bound_ids, check_indices
from jfi.utils.context import padding_state


class SortedIds(NamedTuple):
    """The events of a table group on this rank, sorted by owner rank."""

    columns: Tensor  # [S, K] int32: the row's position in the owner's memory, then the payload
    sums: Tensor  # [W] int64, events for each owner
    counts: Tensor | None  # [W, sequences * B] int32, events of each sample for each owner, if attention reads them
    ranks: Tensor | None  # [S] int64: the owners, ascending, W of padding; None if the first sums[0] are for one rank
    order: Tensor | None  # [S] int64: the index in the batch of each sorted event; None: its own
    sizes: list[int]  # events of each sequence, with padding if there is any


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
        order: see `SortedIds`.
        slots: of a batch of fixed shapes, [S] int64, where an event is among those that were sent; -1 is padding.
    """

    group: TableGroup
    events: Exchange | None
    queries: Exchange | None
    columns: tuple[Tensor, ...]
    offsets: Tensor | None
    sizes: list[int]
    order: Tensor | None = None
    slots: Tensor | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (*self.columns, self.offsets, self.order, self.slots):
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
    """Sorts the ids of a batch by owner and sends every owner its number of them; waiting for it sends the ids."""

    def __init__(self, groups: list[TableGroup], ids: KeyedJaggedTensor, pg: dist.ProcessGroup) -> None:
        super().__init__()
        lookups.allow_no_samples(ids)
        self._groups, self._pg, self._by_key = groups, pg, ids.to_dict()
        size = pg.size()
        for group in groups:
            check_keys(group, self._by_key)
        self._sorted = [sort_by_owner(group, self._by_key, size) for group in groups]
        batch = torch.full((size,), ids.stride(), device=ids.device())
        self._counts = torch.stack([batch, *[ids.sums for ids in self._sorted]], 1)  # [W, 1 + groups]
        self._arriving, self._work = Exchange(pg, [1] * size, [1] * size).start(self._counts)

    def _wait_impl(self) -> "_InFlightIds":
        if self._work is not None:
            self._work.wait()
        # One synchronization, while the batch before computes.
        counts, others = torch.stack([self._counts, self._arriving]).cpu().transpose(1, 2).tolist()
        samples, arriving = others[0], []
        for group, ids, sent, received in zip(self._groups, self._sorted, counts[1:], others[1:], strict=True):
            events, queries, lengths = Exchange(self._pg, sent, received), None, (None, None)
            if group.features:
                queries = group.to_owners(self._pg, samples)
                lengths = queries.start(counts_for_owners(group, ids.counts))
            arriving.append((group, events, queries, ids, events.start(ids.columns), lengths))
        return _InFlightIds(arriving, self._by_key)


class _InFlightIds(Awaitable[InputDistOutput]):
    def __init__(self, arriving: list[tuple], by_key: dict[str, JaggedTensor]) -> None:
        super().__init__()
        self._arriving, self._by_key = arriving, by_key

    def _wait_impl(self) -> InputDistOutput:
        groups = []
        for group, events, queries, ids, (columns, first), (lengths, second) in self._arriving:
            for work in (first, second):
                if work is not None:
                    work.wait()
            columns = tuple([columns[:, index].contiguous() for index in range(columns.size(1))])
            offsets = None if lengths is None else pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            groups.append(GroupInput(group, events, queries, columns, offsets, ids.sizes, ids.order))
        return InputDistOutput(groups, self._by_key)


def counts_for_owners(group: TableGroup, counts: Tensor) -> Tensor:
    """Returns the counts [owners * sequences * B] int32 of the group's owner ranks, of counts [W, sequences * B]."""
    owners = group.owner_ranks
    return (counts if len(owners) == counts.size(0) else torch.stack([counts[rank] for rank in owners])).flatten()


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
def sort_by_owner(group: TableGroup, by_key: dict[str, JaggedTensor], num_ranks: int) -> SortedIds:
    """Sorts the events of a table group on this rank by owner rank. Nothing synchronizes with a GPU.

    Where jagged tensors may be padded (`jfi.utils.context`), the padding comes last.
    """
    sequences = [by_key[key] for key in group.keys]
    is_padded = padding_state.is_padded and not padding_state.fixed_length_keys.issuperset(group.keys)
    ids_of, located = bounded_ids(group, by_key), []
    sizes = [ids.size(0) for ids in ids_of]
    for ids, sharding, sequence in zip(ids_of, group.shardings, sequences, strict=True):
        ranks, rows = sharding.locate(ids)
        if is_padded and (num_ranks > 1 or len(sequences) > 1):
            index = torch.arange(ids.size(0), device=ids.device)
            dtype = torch.uint8 if num_ranks < 256 else torch.int16
            ranks = torch.where(index < sequence.offsets()[-1], ranks.to(dtype), num_ranks)
        located.append((ranks, rows))
    ranks, rows = (_joined(list(parts)) for parts in zip(*located, strict=True))
    columns = torch.stack([rows, *payload_of(group, by_key, sequences)], 1)
    lengths = _joined([x.lengths() for x in sequences]) if group.features else None
    if num_ranks == 1 and not (is_padded and len(sequences) > 1):
        sums = sequences[0].offsets()[-1:].long() if is_padded else torch.full((1,), rows.size(0), device=rows.device)
        counts = None if lengths is None else lengths.to(torch.int32).unsqueeze(0)
        return SortedIds(columns, sums, counts, None, None, sizes)
    ranks, order = torch.sort(ranks, stable=True)
    columns, ranks = columns.index_select(0, order), ranks.long()
    if lengths is None:
        return SortedIds(columns, _run_lengths(ranks, num_ranks), None, ranks, order, sizes)
    # Ascending, since events are sorted by owner and come by sample.
    samples = _samples(sequences, lengths, is_padded).index_select(0, order)
    counts = _run_lengths(ranks * lengths.size(0) + samples, num_ranks * lengths.size(0)).view(num_ranks, -1)
    return SortedIds(columns, counts.sum(1), counts.to(torch.int32), ranks, order, sizes)


def _samples(sequences: list[JaggedTensor], lengths: Tensor, is_padded: bool) -> Tensor:
    """Returns the sample of each event [S] int64, numbered through all sequences; of padding any number."""
    if not is_padded:
        samples = torch.arange(lengths.size(0), device=lengths.device)
        count = sum([x.values().size(0) for x in sequences])
        return torch.repeat_interleave(samples, lengths, output_size=count)
    found, first = [], 0
    for sequence in sequences:
        offsets = sequence.offsets()
        index = torch.arange(sequence.values().size(0), device=lengths.device, dtype=offsets.dtype)
        found.append(torch.searchsorted(offsets[1:].contiguous(), index, right=True) + first)
        first += sequence.lengths().size(0)
    return _joined(found)


def _run_lengths(ascending: Tensor, count: int) -> Tensor:
    """Counts how often each number from 0 to count - 1 occurs in ascending numbers: [count]."""
    return torch.searchsorted(ascending, torch.arange(count + 1, device=ascending.device)).diff()


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
        lengths = ids.lengths() if is_padded else None
        check_indices(f"features['{key}']", ids.values(), sharding.num_rows, rows_of, lengths, padded=False)
    for feature in group.features:
        if isinstance(feature.bias, KeyBias):
            ids, bias = by_key[feature.bias_key].values(), f"the bias of feature '{feature.name}'"
            check_indices(f"features['{feature.bias_key}']", ids, feature.num_buckets, bias, padded=False)


def bounded_ids(group: TableGroup, by_key: dict[str, JaggedTensor]) -> list[Tensor]:
    """Returns the checked ids of each sequence, with -1 for those outside of their tables, which are counted."""
    check_ids(group, by_key)
    ids = [by_key[key].values() for key in group.keys]
    return bound_ids(ids, [sharding.num_rows for sharding in group.shardings], group.outside.on(ids[0].device))


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
