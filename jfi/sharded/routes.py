"""The ids of a batch on their way to the ranks that own their rows, and what these ranks get.

Sequences that are sent together form a route: the histories of sequence features alike, whose events bring along what
the attention reads beside the row (ids of small tables, the bucket of a bias, a weight), or all other keys, which bring
their ids alone. An event is a row of int32 columns, and all events of a route travel in one all-to-all,
sorted by owner, of equal owners in the order of the batch. So an owner's events of a sample keep their order, and
samples without an event there have a length of 0.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from jfi.modules import KeyBias, PositionBias, SequenceFeatureConfig, lookups
from jfi.modules.events import position_buckets
from jfi.modules.id_counts import OutsideIds
from jfi.modules.validation import require_keys
from jfi.ops.gather_rows import bound_ids, check_indices
from jfi.sharded.exchange import Exchange, Transport
from jfi.sharded.ownership import Owners
from jfi.utils.padding import padding_state


@dataclass(frozen=True, eq=False)
class Route:
    """Sequences of ids that travel together.

    Attributes:
        keys: of each sequence the key of these ids.
        tables: of each sequence the table of its rows.
        owners: of each sequence those of its table; the same for all if attention reads them.
        features: of each sequence its feature, if attention reads it; else empty.
        places: of each feature its place in its group, where the learned bias tables lie one below the other.
        fields: of each sequence the keys of ids that its events bring along.
        field_tables: the tables of these ids, which every rank can read.
        field_rows: their numbers of rows.
        dedup: whether a row is sent once to each rank, however many of its events have it; of rows that are fetched.
        outside: counts of this rank's ids outside of the tables, by sequence; those of fields are counted where every
            rank reads these tables itself.
    """

    keys: tuple[str, ...]
    tables: tuple[str, ...]
    owners: tuple[Owners, ...]
    features: tuple[SequenceFeatureConfig, ...] = ()
    places: tuple[int, ...] = ()
    fields: tuple[tuple[str, ...], ...] = ()
    field_tables: tuple[str, ...] = ()
    field_rows: tuple[int, ...] = ()
    dedup: bool = False
    outside: OutsideIds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outside", OutsideIds(self.tables))

    @property
    def ranks(self) -> list[int]:
        """The ranks that queries of the features go to, ascending."""
        return sorted(self.owners[0].ranks)

    def to_owners(self, group: dist.ProcessGroup, samples: list[int], transport: Transport | None = None) -> Exchange:
        """What every rank sends and receives of its features' samples, which go to all owners.

        Args:
            group: all ranks.
            samples: batch size of each rank.
            transport: of the exchange.
        """
        ranks, count = set(self.ranks), len(self.keys)
        own = samples[group.rank()] * count
        sent = [own if rank in ranks else 0 for rank in range(group.size())]
        received = [count * one if group.rank() in ranks else 0 for one in samples]
        return Exchange(group, sent, received, transport)

    @property
    def brings_bucket(self) -> bool:
        """Whether events bring a row of the learned bias tables."""
        return bool(self.features) and isinstance(self.features[0].bias, PositionBias | KeyBias)

    @property
    def brings_weight(self) -> bool:
        """Whether events bring a weight."""
        return bool(self.features) and self.features[0].reads_weights


class Sent(NamedTuple):
    """A route's events of this rank, sorted by owner."""

    columns: Tensor  # [S, K] int32: the row's place in the owner's memory, then what the events bring along
    sums: Tensor  # [W] int64, events for each owner
    counts: Tensor | None  # [W, sequences * B] int32, events of each sample for each owner, if attention reads them
    ranks: Tensor | None  # [S] int64: the owners, ascending, W of padding; None if the first sums[0] are for one rank
    order: Tensor | None  # [S] int64: where a sent event was in the batch; None: where it is
    sizes: list[int]  # events of each sequence, with room if there is any
    positions: list[Tensor] | None = None  # with `dedup`, see `unique_by_table`


@dataclass
class Arrived(Multistreamable):
    """A route's events at their owner, and what this rank has to know of its own.

    Attributes:
        route: whose they are.
        events: what was sent and received of events; None if their rows cannot be fetched.
        queries: what is sent and received of what samples have: every owner gets that of all samples of all ranks.
        columns: [R] int32 each, what arrived, by rank, then sequence, then sample.
        offsets: [n + 1] int32, of its events by rank, sequence and sample; None if attention does not read them.
        sizes: events of each sequence.
        order: as in `Sent`.
        slots: [S] int64, where an event of the batch is among those that were sent, -1 is padding; if that is not found
            from `order`.
        positions: with `dedup`, of each sequence [S] int64: which of its table's rows each event has.
    """

    route: Route
    events: Exchange | None
    queries: Exchange
    columns: tuple[Tensor, ...]
    offsets: Tensor | None
    sizes: list[int]
    order: Tensor | None = None
    slots: Tensor | None = None
    positions: list[Tensor] | None = None

    def places(self) -> Tensor | None:
        """[S] int64: where an event of the batch is among those that were sent; None: where it is."""
        if self.slots is not None or self.order is None:
            return self.slots
        places = torch.arange(self.order.size(0), device=self.order.device)
        return torch.empty_like(self.order).index_copy_(0, self.order, places)

    @property
    def rows(self) -> Tensor:
        """[R] int32: places of the rows in the owner's memory."""
        return self.columns[0]

    def field_ids(self, place: int) -> Tensor:
        """[R] int32: ids of the table `route.field_tables[place]`."""
        return self.columns[1 + place]

    @property
    def buckets(self) -> Tensor | None:
        """[R] int32: rows of the learned bias tables."""
        return self.field_ids(len(self.route.field_tables)) if self.route.brings_bucket else None

    @property
    def weights(self) -> Tensor | None:
        """[R] float32."""
        return self.columns[-1].view(torch.float32) if self.route.brings_weight else None

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (*self.columns, self.offsets, self.order, self.slots, *(self.positions or ())):
            if tensor is not None:
                tensor.record_stream(stream)


@dataclass
class ArrivedIds(Multistreamable):
    """All routes of a batch, and the batch's own ids by key."""

    routes: list[Arrived]
    by_key: dict[str, JaggedTensor]

    def record_stream(self, stream: torch.Stream) -> None:
        for one in (*self.routes, *self.by_key.values()):
            one.record_stream(stream)


class IdsRequest(Awaitable[Awaitable[ArrivedIds]]):
    """Sorts the ids of a batch by owner and tells every owner how many it gets; waiting for it sends them."""

    def __init__(self, routes: list[Route], ids: KeyedJaggedTensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        lookups.allow_no_samples(ids)
        self._routes, self._group, self._by_key = routes, group, ids.to_dict()
        size = group.size()
        for route in routes:
            check_route(route, self._by_key)
        self._sent = [sort_by_owner(route, self._by_key, size) for route in routes]
        batch = torch.full((size,), ids.stride(), device=ids.device())
        self._counts = torch.stack([batch, *[one.sums for one in self._sent]], 1)  # [W, 1 + routes]
        self._arriving, self._work = Exchange(group, [1] * size, [1] * size).start(self._counts)

    def _wait_impl(self) -> "_IdsOnTheirWay":
        if self._work is not None:
            self._work.wait()
        # One synchronization, while the batch before computes.
        counts, others = torch.stack([self._counts, self._arriving]).cpu().transpose(1, 2).tolist()
        samples, arriving = others[0], []
        for route, sent, to, of in zip(self._routes, self._sent, counts[1:], others[1:], strict=True):
            events, queries = Exchange(self._group, to, of), route.to_owners(self._group, samples)
            lengths = None, None
            if sent.counts is not None:
                lengths = queries.start(counts_for(route, sent.counts))
            arriving.append((route, events, queries, sent, events.start(sent.columns), lengths))
        return _IdsOnTheirWay(arriving, self._by_key)


class _IdsOnTheirWay(Awaitable[ArrivedIds]):
    def __init__(self, arriving: list[tuple], by_key: dict[str, JaggedTensor]) -> None:
        super().__init__()
        self._arriving, self._by_key = arriving, by_key

    def _wait_impl(self) -> ArrivedIds:
        arrived = []
        for route, events, queries, sent, (columns, first), (lengths, second) in self._arriving:
            for work in (first, second):
                if work is not None:
                    work.wait()
            columns = tuple([columns[:, place].contiguous() for place in range(columns.size(1))])
            offsets = None if lengths is None else pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            arrived.append(
                Arrived(route, events, queries, columns, offsets, sent.sizes, sent.order, None, sent.positions)
            )
        return ArrivedIds(arrived, self._by_key)


def counts_for(route: Route, counts: Tensor) -> Tensor:
    """[owners * sequences * B] int32, of counts [W, sequences * B], those of the ranks that own rows of the route."""
    owners = route.ranks
    return (counts if len(owners) == counts.size(0) else torch.stack([counts[rank] for rank in owners])).flatten()


def check_route(route: Route, by_key: dict[str, JaggedTensor]) -> None:
    """Raises a ValueError that names the key which a batch lacks or which does not fit."""
    require_keys("features", by_key, route.keys)
    for place, feature in enumerate(route.features):
        key = route.keys[place]
        aligned = list(route.fields[place]) + ([] if feature.bias_key is None else [feature.bias_key])
        require_keys("features", by_key, aligned)
        count = by_key[key].values().size(0)
        for other in aligned:
            if (got := by_key[other].values().size(0)) != count:
                raise ValueError(f"features['{other}'] must have as many events as '{key}', {count}, got {got}")
        if feature.reads_weights and by_key[key].weights_or_none() is None:
            raise ValueError(f"features['{key}'] must have weights, which feature '{feature.name}' reads, got none")


@torch.no_grad()
def sort_by_owner(route: Route, by_key: dict[str, JaggedTensor], num_ranks: int, counts: bool = True) -> Sent:
    """A route's events of this rank, sorted by the rank that owns their rows. Nothing synchronizes with a GPU.

    Where jagged tensors may have room (`jfi.utils.padding`), what is behind a key's own values comes last.

    Args:
        route: what to send.
        by_key: ids, bucket ids and weights.
        num_ranks: W.
        counts: whether ids outside of their tables are counted.
    """
    sequences = [by_key[key] for key in route.keys]
    check_route_ids(route, by_key)
    with_room = padding_state.is_padded and not padding_state.fixed_length_keys.issuperset(route.keys)
    outside = route.outside.on(sequences[0].values().device) if counts else None
    bounded = bound_ids([one.values() for one in sequences], [one.num_rows for one in route.owners], outside)
    positions, located = None, []
    if route.dedup:
        bounded, positions = unique_by_table(bounded, route.tables)
    sizes = [ids.size(0) for ids in bounded]
    for ids, owners, one in zip(bounded, route.owners, sequences, strict=True):
        ranks, rows = owners.locate(ids)
        if with_room and (num_ranks > 1 or len(sequences) > 1):
            place = torch.arange(ids.size(0), device=ids.device)
            kind = torch.uint8 if num_ranks < 256 else torch.int16
            ranks = torch.where(place < one.offsets()[-1], ranks.to(kind), num_ranks)
        located.append((ranks, rows))
    ranks, rows = (_joined(list(parts)) for parts in zip(*located, strict=True))
    columns = torch.stack([rows, *brought_along(route, by_key, sequences)], 1)
    lengths = _joined([one.lengths() for one in sequences]) if route.features else None
    if num_ranks == 1 and not (with_room and len(sequences) > 1):
        sums = sequences[0].offsets()[-1:].long() if with_room else torch.full((1,), rows.size(0), device=rows.device)
        counts = None if lengths is None else lengths.to(torch.int32).unsqueeze(0)
        return Sent(columns, sums, counts, None, None, sizes, positions)
    ranks, order = torch.sort(ranks, stable=True)
    columns, ranks = columns.index_select(0, order), ranks.long()
    if lengths is None:
        return Sent(columns, _run_lengths(ranks, num_ranks), None, ranks, order, sizes, positions)
    # Ascending, since events are sorted by owner and come by sample.
    samples = _samples(sequences, lengths, with_room).index_select(0, order)
    counts = _run_lengths(ranks * lengths.size(0) + samples, num_ranks * lengths.size(0)).view(num_ranks, -1)
    return Sent(columns, counts.sum(1), counts.to(torch.int32), ranks, order, sizes)


def unique_by_table(ids: list[Tensor], tables: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns each id once by table: the first sequence of a table has its unique ids, the others none.

    Args:
        ids: [S] each, of the sequences.
        tables: of each sequence its table.

    Returns:
        The ids, and of each sequence which of its table's unique ids each event has, [S] int64.

    Example:
        >>> unique_by_table([torch.tensor([4, 7]), torch.tensor([7, 4, 4])], ("item", "item"))
        ([tensor([4, 7]), tensor([], dtype=torch.int64)], [tensor([0, 1]), tensor([1, 0, 0])])
    """
    unique, positions = list(ids), list(ids)
    for table in dict.fromkeys(tables):
        members = [place for place, other in enumerate(tables) if other == table]
        rows, index = torch.unique(_joined([ids[place] for place in members]), return_inverse=True)
        for place, part in zip(members, index.split([ids[place].size(0) for place in members]), strict=True):
            unique[place], positions[place] = rows, part
            rows = rows[:0]
    return unique, positions


def _samples(sequences: list[JaggedTensor], lengths: Tensor, with_room: bool) -> Tensor:
    """[S] int64: the sample of each event, numbered through all sequences; of padding any number."""
    if not with_room:
        samples = torch.arange(lengths.size(0), device=lengths.device)
        count = sum([one.values().size(0) for one in sequences])
        return torch.repeat_interleave(samples, lengths, output_size=count)
    found, first = [], 0
    for one in sequences:
        place = torch.arange(one.values().size(0), device=lengths.device, dtype=one.offsets().dtype)
        found.append(torch.searchsorted(one.offsets()[1:].contiguous(), place, right=True) + first)
        first += one.lengths().size(0)
    return _joined(found)


def _run_lengths(ascending: Tensor, count: int) -> Tensor:
    """[count]: how often each number from 0 to count - 1 occurs in ascending numbers."""
    return torch.searchsorted(ascending, torch.arange(count + 1, device=ascending.device)).diff()


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def check_route_ids(route: Route, by_key: dict[str, JaggedTensor]) -> None:
    """Checks the ids that a route sends, where they may be read.

    Raises:
        ValueError: an id is outside of its table, or of the buckets of its feature's bias.
    """
    for key, table, owners in zip(route.keys, route.tables, route.owners, strict=True):
        one = by_key[key]
        check_indices(f"features['{key}']", one.values(), owners.num_rows, f"table '{table}'", one.lengths())
    for keys in route.fields:
        for key, table, rows in zip(keys, route.field_tables, route.field_rows, strict=True):
            one = by_key[key]
            check_indices(f"features['{key}']", one.values(), rows, f"table '{table}'", one.lengths())
    for feature in route.features:
        if isinstance(feature.bias, KeyBias):
            ids, bias = by_key[feature.bias_key].values(), f"the bias of feature '{feature.name}'"
            check_indices(f"features['{feature.bias_key}']", ids, feature.num_buckets, bias, padded=False)


def brought_along(route: Route, by_key: dict[str, JaggedTensor], sequences: list[JaggedTensor]) -> list[Tensor]:
    """What a route's events bring along, [S] int32 each; -1 for ids outside of their tables and buckets."""
    brought = []
    for place, rows in enumerate(route.field_rows):
        ids = bound_ids([by_key[keys[place]].values() for keys in route.fields], [rows] * len(sequences))
        brought.append(_joined(ids).to(torch.int32))
    if route.brings_bucket:
        buckets = []
        for place, feature, one in zip(route.places, route.features, sequences, strict=True):
            if isinstance(feature.bias, PositionBias):
                count = one.values().size(0)
                own = position_buckets(one.offsets(), count, feature.num_buckets, padding_state.is_padded)
            else:
                (own,) = bound_ids([by_key[feature.bias_key].values()], [feature.num_buckets])
            first = place * feature.num_buckets
            buckets.append(torch.where(own < 0, -1, own + first) if first else own)
        brought.append(_joined(buckets).to(torch.int32))
    if route.brings_weight:
        weights = _joined([one.weights() for one in sequences]).to(torch.float32)
        brought.append(weights.view(torch.int32))
    return brought
