"""The rows that this rank owns, in TorchRec's memory, and their optimizer's steps."""

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

from jfi.tables.fused_tables import FusedTables
from jfi.tables.step_rows import rounding_seed

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
