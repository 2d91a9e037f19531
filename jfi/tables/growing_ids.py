"""Ids without a vocabulary: rows of a table go to ids as they come, and begin anew for others."""

import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.mc_modules import LRU_EvictionPolicy
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.modules.validation import check_ids, require_keys
from jfi.tables.id_counts import OutsideIds
from jfi.tables.map_ids import map_ids
from jfi.utils.arguments import (
    MAX_ROWS,
    check_device,
    check_int,
    check_keys,
    check_type,
    module_name,
    shown,
)
from jfi.utils.operands import MISSING, NO_ID, IdMap

#: Row of all ids without a row of their own.
SHARED_ROW = 0
#: Occurrences of ids without a row that a table keeps between two admissions: at least, at most, and for each row.
_MIN_NEW, _MAX_NEW, _NEW_PER_ROW = 2**10, 2**20, 16
#: Multipliers and the increment of SplitMix64, as int64: see `jfi.utils.encoding.mix`.
_INCREMENT, _FIRST, _SECOND = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class GrowingTable:
    """A table whose rows are given to ids as they come.

    Attributes:
        name: of the table.
        capacity: rows of the table, the shared row 0 included: `capacity - 1` ids have a row of their own at a time.
        feature_names: keys of its ids.
        min_count: how often an id must occur between two admissions to get a row.
    """

    name: str
    capacity: int
    feature_names: list[str]
    min_count: int = 1

    def __post_init__(self) -> None:
        check_type("name of GrowingTable", self.name, str, "a str")
        of = f" of GrowingTable '{self.name}'"
        check_int("capacity" + of, self.capacity, least=2, most=MAX_ROWS)
        check_keys("feature_names" + of, self.feature_names, may_be_empty=False)
        check_int("min_count" + of, self.min_count, most=MAX_ROWS)


class GrowingIds(nn.Module):
    """Maps raw ids to the rows of tables that grow and forget: any int64 but three, which never get a row.

    These are 0, a missing id, -1, padding, and 2**63 - 1, which is taken as missing and counted by `outside_ids`.

    A vocabulary fixes at the start which ids have a row. Here a table has a capacity, and an id gets a row once it has
    occurred often enough; where the table is full, the rows of ids that have not occurred for the longest time begin
    anew for it. Row 0 is shared by the ids without a row: a missing one, 0, those not admitted, and those evicted.

        #                    raw ids                  rows
        # "item"             [90071]     [0]    ->    [3]       [0]
        # "history_item"  [90071, 515]    []    ->    [3, 0]     []     <- 515 has no row yet

    `forward` maps, and in training mode records which ids occur. `admit` gives rows to new ids by all that was recorded
    since the last admission, after which the rows with a new owner must begin anew
    (`FusedEmbeddingCollection.reset_rows`; `SequenceDLRM.admit_ids` does both). TorchRec's LRU policy decides which ids
    are evicted. Unlike TorchRec's ManagedCollision modules this one does not wait for the device where it maps,
    so that it can be part of a captured step: its buffers stay where they are. Of ids without a row the first
    16 * capacity * min_count occurrences between two admissions are kept, at least 1,024 and at most 2**20, on a GPU in
    no fixed order. A compiler or a tracer records none.

    The map and what was recorded are in the `state_dict`. In a process group every process records its own batches and
    has the same map: all call `admit` together.

    Args:
        tables: the tables; those of other features of a batch need no entry.
        every: steps between two admissions, see `is_due`.
        device: of the maps.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> growing = GrowingIds([GrowingTable("item", 4, ["item", "history_item"], min_count=2)])
        >>> ids = KeyedJaggedTensor(
        ...     keys=["item", "history_item"],
        ...     values=torch.tensor([90071, 0, 90071, 515]),
        ...     lengths=torch.tensor([1, 1, 2, 0]),
        ... )
        >>> growing(ids).values()
        tensor([0, 0, 0, 0])
        >>> growing.admit()
        {'item': tensor([3])}
        >>> growing(ids).values()
        tensor([3, 0, 3, 0])
        >>> growing.ids("item")
        tensor([    0,     0,     0, 90071])
    """

    def __init__(self, tables: list[GrowingTable], every: int = 100, device: torch.device | None = None) -> None:
        super().__init__()
        if not isinstance(tables, list) or not all(isinstance(table, GrowingTable) for table in tables):
            raise TypeError(f"tables must be a list of GrowingTable, got {shown(tables)}")
        if not tables:
            raise ValueError("tables must have at least one GrowingTable, got none")
        check_int("every", every, most=MAX_ROWS)
        check_device("device", device)
        names, keys = ([table.name for table in tables], [key for table in tables for key in table.feature_names])
        for what, given in (("names", names), ("feature_names", keys)):
            if repeated := sorted({one for one in given if given.count(one) > 1}):
                raise ValueError(f"tables must have distinct {what}, got {repeated} more than once")
        self.configs, self.every = list(tables), every
        self._table_of_key = {key: table.name for table in tables for key in table.feature_names}
        self.maps = nn.ModuleDict({module_name(table.name): _Map(table, device) for table in tables})

    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Replaces raw ids by rows, and in training mode records them; nothing waits for a GPU.

        Args:
            ids: keys of growing tables with raw ids, int32 or int64, and any others, which stay as they are. 0 and
                2**63 - 1 are missing ids, and -1 is padding, which stays -1.

        Raises:
            ValueError, TypeError: the batch lacks a key, or its ids are no integers.
        """
        maps = {one.config.name: one.tensors() for one in self.maps.values()}
        return _mapped(ids, self._table_of_key, maps, [one.batches for one in self.maps.values()], self.training)

    @property
    def outside_ids(self) -> tuple[OutsideIds, ...]:
        """Returns how often 2**63 - 1 has occurred in training, by table, for `jfi.modules.outside_ids`."""
        counts = torch.cat([one.num_reserved for one in self.maps.values()])
        return () if counts.is_meta else (OutsideIds([config.name for config in self.configs], counts),)

    def is_due(self, step: int) -> bool:
        """Returns whether an admission is due after this step, counted from 1.

        It is after every `every` steps and after steps 1, 2, 4 and so on below, so that a new run soon has rows.
        """
        return step > 0 and (step % self.every == 0 or (step < self.every and step & (step - 1) == 0))

    @torch.no_grad()
    def admit(self) -> dict[str, Tensor]:
        """Gives rows to the ids that were recorded since the last admission, where they have occurred often enough.

        In a process group it is a collective. The result depends on the recorded ids and not on their order.

        Returns:
            By table the rows [M] with a new owner, ascending, of tables that have any.

        Raises:
            ValueError: the only batch since the last admission, as the first one of a run, had more distinct ids than
                its table has rows; nothing is admitted.
        """
        recorded = [(one, *one.recorded()) for one in self.maps.values()]
        for one, _, _, most in recorded:
            if most >= one.config.capacity:
                raise ValueError(
                    f"capacity of table '{one.config.name}' must be above the number of distinct ids of a batch, at "
                    f"least {most}, got {one.config.capacity}"
                )
        found = {one.config.name: one.admit(ids, counts) for one, ids, counts, _ in recorded}
        return {name: rows for name, rows in found.items() if len(rows)}

    @torch.no_grad()
    def gather_recorded(self) -> None:
        """Gives every process of a group what all have recorded, so that each `state_dict` has all of it.

        All but one must call `forget_recorded` before the next step, since an admission adds up what they have.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            for one in self.maps.values():
                one.gather_recorded()

    @torch.no_grad()
    def forget_recorded(self) -> None:
        """Forgets what was recorded since the last admission."""
        for one in self.maps.values():
            one.forget_recorded()

    def ids(self, table: str) -> Tensor:
        """Returns the raw id [capacity] of each row of a table; 0 for the shared row and rows without an owner."""
        require_keys("tables", [config.name for config in self.configs], [table])
        return self.maps[module_name(table)].ids()

    def reset_parameters(self) -> None:
        """Forgets all ids; needed after `to_empty()`."""
        for one in self.maps.values():
            one.reset_parameters()

    def extra_repr(self) -> str:
        return ", ".join([f"{config.name}={config.capacity}" for config in self.configs] + [f"every={self.every}"])


class _Map(nn.Module):
    """The map of one table, in buffers that stay where they are; N is its capacity.

    The last one of the N ids is always `NO_ID`, whose row is the shared one: TorchRec's policy never evicts the last.
    """

    def __init__(self, config: GrowingTable, device: torch.device | None) -> None:
        super().__init__()
        self.config, self._policy = config, LRU_EvictionPolicy()
        # The ids, ascending, the row of each, and the admission before which it occurred last.
        numbers = dict.fromkeys(("sorted_ids", "rows", "last_seen"), config.capacity) | {"admissions": 1}
        # What was recorded since the last admission.
        most = min(max(_NEW_PER_ROW * config.capacity * config.min_count, _MIN_NEW), _MAX_NEW)
        recorded = {"new_ids": most, "num_new": 1, "batches": 1, "num_reserved": 1}
        for name, size in (numbers | recorded).items():
            memory = torch.empty(size, dtype=torch.int64, device=device)
            self.register_buffer(name, memory, persistent=name != "num_reserved")
        self.register_buffer("is_seen", torch.empty(config.capacity, dtype=torch.bool, device=device))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()
        self.sorted_ids.fill_(NO_ID)
        self.rows.copy_(torch.arange(1, self.config.capacity + 1, device=self.rows.device))
        self.rows[-1] = SHARED_ROW

    def tensors(self) -> IdMap:
        """Returns the ids with their rows, and what was recorded."""
        recorded = self.is_seen, self.new_ids, self.num_new, self.num_reserved
        return IdMap(self.sorted_ids, self.rows, *recorded)

    def forget_recorded(self) -> None:
        for buffer in (self.is_seen, self.new_ids, self.num_new, self.batches):
            buffer.zero_()

    def recorded(self) -> tuple[Tensor, Tensor, int]:
        """Returns the distinct new ids ascending, how often each occurred, and the most distinct ids of a batch.

        The third is 0 unless every process recorded exactly one batch. In a process group it is a
        collective, after which every process has the others' marks of known ids.
        """
        own = torch.unique(self.new_ids[: int(self.num_new)])
        most = (len(own) + self.is_seen.sum()) * (self.batches[0] == 1)
        new = self._gathered()
        if dist.is_initialized():
            dist.all_reduce(most, dist.ReduceOp.MAX)
        return *torch.unique(new, return_counts=True), int(most)

    def gather_recorded(self) -> None:
        """Takes what all processes have recorded, which is no longer of one batch."""
        new = self._gathered()[: len(self.new_ids)]
        dist.all_reduce(self.batches)
        self.new_ids[: len(new)] = new
        self.num_new.fill_(len(new))

    def _gathered(self) -> Tensor:
        """Returns the new ids of all processes, and marks here the known ids that any of them has marked."""
        new = self.new_ids[: int(self.num_new)]
        if not dist.is_initialized():
            return new
        dist.all_reduce(self.is_seen.view(torch.uint8), dist.ReduceOp.MAX)
        counts = new.new_empty(dist.get_world_size())
        dist.all_gather(list(counts.split(1)), new.new_tensor([len(new)]))
        parts = new.new_empty(len(counts), int(counts.amax()))
        dist.all_gather(list(parts.unbind()), nn.functional.pad(new, (0, parts.shape[1] - len(new))))
        return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])

    def admit(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Gives rows to new ids, distinct and ascending, and forgets what was recorded.

        Returns:
            The rows with a new owner, ascending.
        """
        known = self.is_seen.nonzero().squeeze(1)
        if not len(known) and not len(ids):
            return ids
        # The policy prefers the first ones: those with a row, then the most frequent ones.
        frequent = counts >= self.config.min_count
        counts, order = torch.sort(counts[frequent], descending=True, stable=True)
        ids = ids[frequent][order]
        self.admissions += 1
        now, number = int(self.admissions), len(known) + len(ids)
        all_now = torch.full((number,), now, device=ids.device)
        evicted, admitted = self._policy.update_metadata_and_generate_eviction_scores(
            now,
            self.config.capacity,
            torch.arange(number, device=ids.device),
            all_now,  # counts, which it does not read
            torch.arange(number, device=ids.device) < len(known),
            known,
            {"last_access_iter": self.last_seen},
            {"last_access_iter": all_now},
        )
        self.sorted_ids[evicted] = ids[admitted]
        rows = self.rows[evicted].sort().values
        self.sorted_ids.copy_((sort := torch.sort(self.sorted_ids, stable=True)).values)
        for buffer in (self.rows, self.last_seen):
            buffer.copy_(buffer[sort.indices])
        self.forget_recorded()
        return rows

    def ids(self) -> Tensor:
        owners = torch.where(self.sorted_ids == NO_ID, MISSING, self.sorted_ids)
        return torch.zeros_like(owners).scatter_(0, self.rows, owners)


def initial_rows(ids: Tensor, table: BaseEmbeddingConfig) -> Tensor:
    """Returns new rows [M, D] float32 of ids [M], uniform within the bounds of the table's config.

    A value depends only on the table's name, the id and the column, so it is the same in every run and on any device.

    Example:
        >>> from torchrec import EmbeddingConfig
        >>> table = EmbeddingConfig(name="item", embedding_dim=3, num_embeddings=100, feature_names=["item"])
        >>> initial_rows(torch.tensor([90071]), table)
        tensor([[...]])
    """
    columns = torch.arange(table.embedding_dim, device=ids.device)
    seeds = _mix(ids + zlib.crc32(table.name.encode()))
    bits = _mix(seeds.unsqueeze(1) + columns) >> 40 & (2**24 - 1)
    low, high = table.get_weight_init_min(), table.get_weight_init_max()
    return bits.float() / 2**24 * (high - low) + low


def _mix(state: Tensor) -> Tensor:
    """Returns `jfi.utils.encoding.mix` of int64, whose sums and products wrap around as those of uint64."""
    state = state + _INCREMENT
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        state = (state ^ (state >> shift & (2 ** (64 - shift) - 1))) * factor
    return state


@torch.fx.wrap
def _mapped(
    ids: KeyedJaggedTensor,
    table_of_key: dict[str, str],
    maps: dict[str, IdMap],
    batches: list[Tensor],
    records: bool,
) -> KeyedJaggedTensor:
    """Returns the batch with rows instead of raw ids; lengths, offsets and weights are the same tensors."""
    check_ids("ids", ids, list(table_of_key), sharded=True)
    by_key = {}
    for key, own in ids.to_dict().items():
        values = own.values()
        if key in table_of_key:
            values = map_ids(values.long(), maps[table_of_key[key]], records).to(values.dtype)
        by_key[key] = JaggedTensor(values, own.weights_or_none(), own.lengths_or_none(), own.offsets_or_none())
    if records:
        for count in batches:
            count.add_(1)
    varies = ids.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=ids.keys(),
        values=torch.cat([one.values() for one in by_key.values()]),
        weights=ids.weights_or_none(),
        lengths=ids.lengths_or_none(),
        offsets=ids.offsets_or_none(),
        stride=None if varies else ids.stride(),
        stride_per_key_per_rank=ids.stride_per_key_per_rank() if varies else None,
        length_per_key=ids.length_per_key(),
        offset_per_key=ids.offset_per_key(),
        jt_dict=by_key,
        inverse_indices=ids.inverse_indices_or_none(),
    )
