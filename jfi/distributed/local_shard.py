"""The rows that this rank owns, in TorchRec's memory: their optimizer's steps, and how they reach other ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from jfi.distributed.exchange import gradient_scale
from jfi.distributed.input_dist import GroupInput
from jfi.distributed.planning import RowSharding
from jfi.tables.fused_tables import FusedTables
from jfi.tables.gather_rows import gather_bounded
from jfi.tables.step_rows import rounding_seed
from jfi.utils.context import once_differentiable

_OPTIMIZERS = {
    EmbOptimType.EXACT_SGD: torch.optim.SGD,
    EmbOptimType.EXACT_ADAGRAD: torch.optim.Adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowWiseAdagrad,
}


class LocalShard(FusedTables):
    """All rows that this rank owns, in one block [M, D], and the optimizer's steps of those that a batch has read.

    FBGEMM holds the rows and the optimizer's states, except `stepped_at`; TorchRec saves and loads all of them. jfi
    makes the steps, `jfi.tables.step_rows`, and rounds rows in half precision as `stochastic_rounding` of FBGEMM says.

    Args:
        lookups: TorchRec's of a collection.
        tables: the names of its tables in the order of `row_shardings`.
        steps: [] int64, where the steps are counted.
        stepped_at: of `add_stepped_at`, with weight decay; None without.

    Raises:
        ValueError: tables of several data types, optimizers or poolings, or with an optimizer, or options of it, that
            `jfi.tables.step_rows` has not.
    """

    def __init__(self, lookups: list[nn.Module], tables: list[str], steps: Tensor, stepped_at: Tensor | None) -> None:
        kernels = [kernel for lookup in lookups for kernel in lookup._emb_modules]
        shards = [table for kernel in kernels for table in kernel.config.embedding_tables]
        names = [shard.name for shard in shards]
        if len(kernels) != 1:
            raise ValueError(
                f"tables of a collection must have one data type, one optimizer and one pooling, got those of {names}"
            )
        if names != tables:
            raise RuntimeError(f"TorchRec's tables must lie in the order {tables}, got {names}")
        batched: SplitTableBatchedEmbeddingBagsCodegen = kernels[0].emb_module
        if batched.optimizer not in _OPTIMIZERS:
            known = ", ".join(optimizer.value for optimizer in _OPTIMIZERS)
            raise ValueError(
                f"the optimizer of tables whose rows jfi steps must be one of {known}, got {batched.optimizer.value}"
            )
        options = batched.optimizer_args
        for name, neutral in (("weight_decay_mode", 0), ("gradient_clipping", False), ("max_norm", 0.0)):
            if getattr(options, name, neutral) != neutral:
                got = getattr(options, name)
                raise ValueError(f"{name} of tables whose rows jfi steps must be {neutral}, got {got}")
        self._batched = batched
        weights = batched.split_embedding_weights()
        states = [] if batched.optimizer is EmbOptimType.EXACT_SGD else batched.split_optimizer_states()
        states = [_joined([state[0] for state in states])] if states else []
        if stepped_at is not None:
            states.append(stepped_at)
        memory = _joined(weights)
        if not memory.size(0):  # this rank owns nothing: one unused row
            memory = memory.new_zeros(1, memory.size(1))
            states = [state.new_zeros(1, *state.shape[1:]) for state in states]
        rows = nn.Module()
        rows.weight = nn.Parameter(memory)
        row_options = {"lr": batched.get_learning_rate(), "weight_decay": options.weight_decay}
        if batched.optimizer is not EmbOptimType.EXACT_SGD:
            row_options["eps"] = options.eps
        optimizer = _OPTIMIZERS[batched.optimizer]
        states_of, stochastic = {"rows": tuple(states)}, batched.stochastic_rounding
        super().__init__(nn.ModuleDict({"rows": rows}), optimizer, row_options, None, states_of, "", stochastic)
        self.memory, self.steps = memory.detach(), steps
        seeds = [rounding_seed(shard.name, shard.local_metadata.shard_offsets[0]) for shard in shards]
        self._seeds = list(zip(accumulate([0, *map(len, weights[:-1])]), seeds, strict=True))

    def _rounding_seeds(self, tables: dict[str, nn.Parameter]) -> list[tuple[int, int]]:
        return self._seeds

    def sync_learning_rate(self) -> None:
        """Takes the learning rate that TorchRec's optimizer has set."""
        rate = self._batched.get_learning_rate()
        if rate != self.group["lr"]:
            self.group["lr"] = rate

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Makes one step at the end of the block, by the gradients of all backward passes within."""
        with super().deferring():
            yield
        if not self._deferring:  # else a block around this one makes it
            self.step()

    def handles(self, requested: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        """Returns `gradient_handles` of positions [S] in `memory` each."""
        self.sync_learning_rate()
        return self.gradient_handles(self.weights, [("rows", rows) for rows in requested], dtype)


def add_stepped_at(kernel: nn.Module, group: dist.ProcessGroup) -> Tensor:
    """Returns the step [M] int32 at which each of a kernel's rows was last stepped, from now on its optimizer's state.

    Args:
        kernel: TorchRec's of some tables.
        group: the ranks that share the tables.
    """
    tables = kernel.config.embedding_tables
    counts = [table.local_rows for table in tables]
    stepped_at = torch.zeros(sum(counts), dtype=torch.int32, device=kernel.emb_module.current_device)
    states = kernel.fused_optimizer.state.values()
    for table, part, state in zip(tables, stepped_at.split(counts), states, strict=True):
        shards = table.global_metadata.shards_metadata
        rows = [ShardMetadata(one.shard_offsets[:1], one.shard_sizes[:1], one.placement) for one in shards]
        whole = ShardedTensorMetadata(rows, torch.Size([table.num_embeddings]), TensorProperties(dtype=torch.int32))
        own = Shard(part, rows[shards.index(table.local_metadata)])
        state[f"{table.name}.stepped_at"] = ShardedTensor._init_from_local_shards_and_global_metadata(
            [own], sharded_tensor_metadata=whole, process_group=group
        )
    return stepped_at


def _joined(parts: list[Tensor]) -> Tensor:
    """Returns tensors that are adjacent in memory as one."""
    whole = torch.as_strided(parts[0], (sum([x.size(0) for x in parts]), *parts[0].shape[1:]), parts[0].stride())
    end = whole.data_ptr()
    for part in parts:
        if part.numel() and part.data_ptr() != end:
            raise RuntimeError("FBGEMM's tables do not lie one below the other in memory")
        end += part.numel() * part.element_size()
    return whole


def fetch_rows(handle: Tensor, memory: Tensor, arrived: GroupInput) -> list[Tensor]:
    """Returns the rows [S, D] of each sequence of a table group; all ranks call it together.

    Args:
        handle: [R, D], a zero-stride placeholder of the dtype that is sent; its gradient is that of the owner's rows.
        memory: [M, D], the rows that this rank owns.
        arrived: the rows that are requested of this rank.
    """
    return list(_Fetch.apply(handle, memory, arrived).split(arrived.sizes))


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handle: Tensor, memory: Tensor, arrived: GroupInput) -> Tensor:
        ctx.arrived = arrived
        rows = gather_bounded((memory,), (arrived.columns[0],), handle.dtype)
        return arrived.events.back.send(rows).index_select(0, arrived.slots.clamp(min=0))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        events = ctx.arrived.events
        grad, count = grad * gradient_scale(events.pg), sum(events.sent)
        sent = grad.new_zeros(count + 1, grad.size(1))  # the last row is for padding, whose slot is -1
        sent.index_copy_(0, ctx.arrived.slots.remainder(count + 1), grad)
        return events.send(sent[:count]), None, None


def copy_tables(
    memory: Tensor, pg: dist.ProcessGroup, shardings: list[RowSharding], ids: list[tuple[RowSharding, Tensor]]
) -> tuple[list[Tensor], Tensor]:
    """Returns whole tables [N, D] on every rank, and [r] bool, True for rows of this rank that some rank reads.

    Rows and marks travel in one all-reduce. The r rows are those that this rank owns, table by table.

    Args:
        memory: [M, D], the rows that this rank owns.
        pg: all ranks.
        shardings: of the tables.
        ids: the ids [S] that this rank reads, each tensor with the sharding of its table; -1 is no row.
    """
    sizes, width = [sharding.num_rows for sharding in shardings], memory.size(1)
    count = sum(sizes) * width
    buffer = memory.new_zeros(count + sum(sizes) + len(sizes))  # the last mark of a table is for ids of -1
    tables = list(buffer[:count].view(-1, width).split(sizes))
    marks = dict(zip(shardings, buffer[count:].split([size + 1 for size in sizes]), strict=True))
    owned = [sharding.owned_by(pg.rank()) for sharding in shardings]
    for table, (rows, positions) in zip(tables, owned, strict=True):
        table[rows.start : rows.stop] = memory[positions.start : positions.stop]
    for sharding, requested in ids:
        marks[sharding].index_fill_(0, requested.long(), 1)
    if pg.size() > 1:
        dist.all_reduce(buffer, group=pg)
    counts = [mark[rows.start : rows.stop] for mark, (rows, _) in zip(marks.values(), owned, strict=True)]
    return tables, torch.cat(counts) > 0


class Replicate(torch.autograd.Function):
    """Gives whole tables of `copy_tables` their gradients, the sums of all ranks'.

    They travel in one all-reduce, whose order of summation is fixed, as is that of each rank's gradients. These have
    the scale of tables already, see `scaled`, and the tables' dtype, in which they are summed.

    Args:
        handle: [r, D], a zero-stride placeholder of the tables' rows that this rank owns, table by table.
        pg: all ranks.
        shardings: of the tables.
        tables: [N, D] each.
    """

    @staticmethod
    def forward(
        ctx, handle: Tensor, pg: dist.ProcessGroup, shardings: list[RowSharding], *tables: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pg, ctx.sizes, ctx.dtype = pg, [len(table) for table in tables], handle.dtype
        ctx.rows = [sharding.owned_by(pg.rank())[0] for sharding in shardings]
        ctx.set_materialize_grads(False)
        return tuple([table.view_as(table) for table in tables])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        like = next(grad for grad in grads if grad is not None)
        whole = [like.new_zeros(n, like.size(1)) if g is None else g for g, n in zip(grads, ctx.sizes, strict=True)]
        whole = torch.cat(whole)
        if ctx.pg.size() > 1:
            dist.all_reduce(whole, group=ctx.pg)
        owned = [grad[rows.start : rows.stop] for grad, rows in zip(whole.split(ctx.sizes), ctx.rows, strict=True)]
        return torch.cat(owned).to(ctx.dtype), None, None, *([None] * len(grads))


def scaled(table: Tensor, pg: dist.ProcessGroup) -> Tensor:
    """Returns a replicated table for this rank's own samples, whose gradients get the scale of tables.

    Owner ranks read the table without it: attention gives them gradients that have the scale.
    """
    table, scale = table.view_as(table), gradient_scale(pg)
    if table.requires_grad:
        table.register_hook(lambda grad: grad * scale)
    return table
