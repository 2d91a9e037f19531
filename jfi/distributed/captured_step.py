"""Training steps of a sharded model as CUDA graphs, and the ids of the next batches on their way meanwhile."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardedModule

from jfi.cuda_graphs.capture_check import why_module_not
from jfi.cuda_graphs.captured_step import CudaGraphs, StepGraphs
from jfi.cuda_graphs.static_batch import OTHER_STRUCTURE
from jfi.distributed.exchange import PeerMemory, are_peers
from jfi.distributed.fixed_input_dist import (
    AHEAD,
    INPUT_DIST,
    STEP,
    DistributedBatch,
    DistributedBuffers,
    FixedInputDist,
    FixedShapes,
)
from jfi.distributed.sharded_tables import ShardedTables
from jfi.modules import GrowingIds
from jfi.tables.fused_tables import FusedTables
from jfi.utils.arguments import check_type

#: Batches whose capacities the next ones are sent with: the largest of so many.
_RECENT = 16
#: Bytes of gradients that each rank sends whole to all others; more of them are summed on their way, by an all-reduce.
_TO_ALL_PEERS = 2**23
#: By the parameters without a gradient on this rank, those of them that no rank has one of.
Absent = dict[tuple[nn.Parameter, ...], list[nn.Parameter]]
#: Of the captured step that runs: the parameters of its tables, what eager steps found, and the memory of peers.
_step: ContextVar[tuple[set[nn.Parameter], Absent, PeerMemory | None] | None] = ContextVar("step", default=None)


class CapturedShardedStep(StepGraphs):
    """Runs the training step of a model whose attention goes to the rows as CUDA graphs.

    It is to `jfi.CapturedStep` what TorchRec's train pipeline is to a loop over batches: it takes an iterator, and
    sends the ids of a batch to the owners of their rows while the two steps before it run, as a CUDA graph of its own
    (`jfi.distributed.fixed_input_dist`). All ranks take the same decision for a batch: to replay a graph of the same
    capacities, or to run the step eagerly since the batch of one of them does not fit. Where the GPUs of all ranks are
    on one host and reach each other, rows, queries and outputs of attention are written to their memory
    (`jfi.distributed.exchange`).

    The conditions for the step are those of `jfi.CapturedStep`, and it averages the gradients of the dense parameters
    itself, by `average_gradients`, before the optimizer's step: DistributedDataParallel keeps to a stream of its own,
    which cannot be captured. The collections are called with the ids of the batch and no others. The construction gives
    all ranks the first one's parameters and buffers, tables excepted. NCCL ends only after the graphs of its
    collectives: call `reset()` before `torch.distributed.destroy_process_group()`.

    Args:
        step: takes a batch on the device and returns a tree of tensors.
        model: whose sharded collections are of `AttentionCollectionSharder` and `FetchedBagsSharder`, built with
            `init_data_parallel=False`.
        reference: the batch that capacities follow from; None for the first one.
        warmup_steps: steps with each capacity before it is captured, at least 1, or 2 with peer memory.
        max_graphs: the largest number of graphs; at least 1.
        peer_memory: False sends everything through the process group.

    Raises:
        ValueError: the model has another sharded module, or none, or is in a DistributedDataParallel; its tables are
            shared by groups of processes; with `reference`, or else at the first step, the model cannot be captured
            with such batches, or has GrowingIds.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        model: DistributedModelParallel,
        *,
        reference: Any = None,
        warmup_steps: int = 2,
        max_graphs: int = 4,
        peer_memory: bool = True,
    ) -> None:
        check_type("step", step, Callable, "a function of a batch")
        super().__init__(self._compute, model, warmup_steps, max_graphs, priority=STEP)
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ValueError("model must be a DistributedModelParallel with init_data_parallel=False")
        sharded = [module for module in model.modules() if isinstance(module, ShardedModule)]
        if not sharded or not all(isinstance(module, ShardedTables) for module in sharded):
            names = ", ".join(sorted({type(module).__name__ for module in sharded})) or "none"
            must = "of AttentionCollectionSharder and FetchedBagsSharder"
            raise ValueError(f"the sharded modules of model must be {must}, got {names}")
        self._step_on_batch, self._collections = step, sharded
        self._pg = self._collections[0].pg
        if self._pg.size() != dist.get_world_size():
            raise ValueError(f"all {dist.get_world_size()} processes must share the tables, got {self._pg.size()}")
        self._ids_pg = dist.new_group()
        self._shapes: FixedShapes | None = None
        self._input_dists: dict[tuple[int, ...], FixedInputDist] = {}
        on_gpu = self._graphs is not None
        self._input_graphs = CudaGraphs(self._device, priority=INPUT_DIST) if on_gpu else None
        self._peers: PeerMemory | None = None
        if peer_memory and on_gpu and self._pg.size() > 1 and are_peers(self._pg, self._device):
            self._peers = PeerMemory(self._pg, self._device)
            self._warmup_steps = max(warmup_steps, 2)  # in the first step the memory is too small
        self._tables = {x for collection in self._collections for x in collection.parameters()}
        self._absent: Absent = {}
        self._fused = model.fused_optimizer
        #: Batches on their way with their MemorySlot, or None if they are not sent ahead; capacities of the last ones.
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._recent: deque[tuple[int, ...]] = deque(maxlen=_RECENT)
        self._copy_dense_from_first()
        if reference is not None:
            self._set_reference(reference)

    @torch.no_grad()
    def _copy_dense_from_first(self) -> None:
        """Gives all ranks the first one's parameters and buffers that are not of the collections."""
        sharded = {x for module in self._collections for x in (*module.parameters(), *module.buffers())}
        for x in (*self._model.parameters(), *self._model.buffers()):
            if x not in sharded and self._pg.size() > 1:
                dist.broadcast(x, dist.get_global_rank(self._pg, 0), group=self._pg)

    def reset(self) -> None:
        """Resets all graphs, see `StepGraphs.reset`, and drops batches that were sent ahead.

        Needed at the end, and if an iterator is left before its end.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the memory of batches and graphs is used again
        super().reset()
        self._in_flight.clear()
        self._input_dists.clear()  # NCCL would wait for their graphs at its end
        if self._input_graphs is not None:
            self._input_graphs.reset()
        if self._peers is not None:
            self._peers.forget()

    def summary(self) -> str:
        """Returns the summary of `StepGraphs`, and how rows travel."""
        return super().summary() + "; rows travel through peer memory" * (self._peers is not None)

    def _set_reference(self, batch: Any) -> FixedShapes:
        """Takes the capacities from a batch."""
        shapes = FixedShapes(self._collections, self._ids_pg, self._device, batch)
        sharded = {part for collection in self._collections for part in collection.modules()}
        remote = frozenset(feature.name for group in shapes.groups for feature in group.features)
        for part in self._model.modules():
            if isinstance(part, GrowingIds):
                raise ValueError("the step cannot be captured: its GrowingIds map ids, which are sent ahead of it")
            reason = None if part in sharded else why_module_not(part, shapes.buckets.padded_keys, remote)
            if reason is not None:
                raise ValueError(f"the step cannot be captured: {reason}")
        self._shapes, self._fixed_length_keys = shapes, shapes.buckets.fixed_length_keys
        self._recent.append(shapes.smallest)
        return shapes

    def progress(self, batches: Iterator[Any]) -> Any:
        """Makes a step on the next batch, and sends the second one after it ahead.

        Args:
            batches: this rank's part of each batch, on the host; best in pinned memory. All ranks have as many.

        Returns:
            The output of the step; its tensors are valid until the next call.

        Raises:
            StopIteration: there is no further batch.
            UnsupportedBatch: this one is no tree of tensors and constants with one KeyedJaggedTensor; the other ranks
                wait for this one.
            ValueError: features that do not fit the collections, likewise.
        """
        self._fused.zero_grad()  # gives FBGEMM its learning rate
        for collection in self._collections:
            collection.local_shard.sync_learning_rate()
        graphs = self._graphs
        if graphs is None:
            return self._run_eagerly(next(batches), "without a GPU")
        self._send_next(batches)
        shapes = self._shapes
        if shapes is None or not self._in_flight:
            raise StopIteration
        batch, slot = self._in_flight.popleft()
        capacities = OTHER_STRUCTURE if slot is None else shapes.agree(slot.wait())
        while not isinstance(capacities, str) and not slot.sender.holds(capacities):
            # A rank whose batch was too large to send has counted none of its ids, so the counts may grow once more.
            slot = self._input_dist(shapes, capacities).send(batch)
            capacities = shapes.agree(slot.wait())
        if isinstance(capacities, str):
            outputs = self._run_eagerly(batch, capacities)
        else:
            self._recent.append(capacities)
            bucket = self._bucket(capacities, lambda: DistributedBuffers(shapes, capacities))
            slot.sender.load(slot, bucket.buffers, bucket.block)
            outputs = self._run(graphs, bucket)
        self._send_next(batches)
        return outputs

    def _send_next(self, batches: Iterator[Any]) -> None:
        """Sends batches until AHEAD of them are on their way, if there are any."""
        while len(self._in_flight) < AHEAD and (batch := next(batches, None)) is not None:
            shapes = self._set_reference(batch) if self._shapes is None else self._shapes
            slot = None
            if len(set(shapes.samples)) == 1:  # else no two ranks' shapes would agree
                slot = self._input_dist(shapes, max(self._recent)).send(batch)
            self._in_flight.append((batch, slot))

    def _input_dist(self, shapes: FixedShapes, capacities: tuple[int, ...]) -> FixedInputDist:
        if capacities not in self._input_dists:
            self._input_dists[capacities] = FixedInputDist(shapes, capacities, self._input_graphs)
        return self._input_dists[capacities]

    def _fused_tables(self) -> list[FusedTables]:
        return [*super()._fused_tables(), *(collection.local_shard for collection in self._collections)]

    def _compute(self, batch: Any) -> Any:
        """Runs the step on a `DistributedBatch`, or on a batch whose ids the forward pass sends."""
        shapes = self._shapes if isinstance(batch, DistributedBatch) else None
        with captured_averages(self._tables, self._absent, None if shapes is None else self._peers):
            if shapes is None:
                return self._step_on_batch(batch)
            exchanges = nullcontext() if self._peers is None else self._peers.step()
            with exchanges, shapes.given(batch, self._pg, self._peers):
                return self._step_on_batch(batch.batch)


@contextmanager
def captured_averages(tables: set[nn.Parameter], absent: Absent, peers: PeerMemory | None = None) -> Iterator[None]:
    """Makes `average_gradients` refuse the tables within the block, and send through the memory of peers, if any.

    A capture, which must not read what the ranks send, takes `absent` from the eager step before it.
    """
    token = _step.set((tables, absent, peers))
    try:
        yield
    finally:
        _step.reset(token)


def _mean(numbers: Tensor, peers: PeerMemory | None) -> Tensor:
    """Returns the mean over the ranks of numbers [n], the same bits on each."""
    size = dist.get_world_size()
    if peers is not None and numbers.nbytes <= _TO_ALL_PEERS:
        counts = [numbers.size(0)] * size
        arrived = peers.send(numbers, counts, counts, shared=True)
        if arrived is not None:
            return arrived.view(size, -1).mean(0)
    dist.all_reduce(numbers)
    return numbers / size


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replaces each gradient by its mean over all ranks, in one exchange of each dtype.

    Args:
        parameters: the same ones on every rank. One without a gradient counts as 0 where another rank has one, and is
            left without one where none has, as DistributedDataParallel leaves it. A rank that lacks a gradient waits
            for the device to learn which.

    Raises:
        ValueError: within the step of a `CapturedShardedStep`, a parameter is a sharded table's.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    tables, known, peers = _step.get() or (set(), {}, None)
    if not tables.isdisjoint(parameters):
        raise ValueError(
            "parameters must not have those of the sharded tables, which are stepped where they lie: take those of "
            "in_backward_optimizer_filter(model.named_parameters())"
        )
    if dist.get_world_size() == 1:
        return
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for alike in by_dtype.values():
        grads = [x.new_zeros(x.shape) if x.grad is None else x.grad for x in alike]
        lacking = [index for index, parameter in enumerate(alike) if parameter.grad is None]
        has = grads[0].new_ones(len(alike))  # sent along: ranks that lack none need not look
        for index in lacking:
            has[index].zero_()
        grads.append(has)
        means = _mean(torch.cat([grad.reshape(-1) for grad in grads]), peers)
        *by_parameter, has = means.split([grad.numel() for grad in grads])
        for parameter, mean in zip(alike, by_parameter, strict=True):
            parameter.grad = mean.view_as(parameter)
        if not lacking:
            continue
        key = tuple([alike[index] for index in lacking])
        if key not in known or not torch.cuda.is_current_stream_capturing():
            shares = has.tolist()
            known[key] = [alike[index] for index in lacking if not shares[index]]
        for parameter in known[key]:
            parameter.grad = None
