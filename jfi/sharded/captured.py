"""Training steps of a sharded model as CUDA graphs, and the ids of the next batch on their way meanwhile."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardedModule

from jfi.capturable import why_module_not
from jfi.captured_step import StepGraphs
from jfi.sharded.routed import RoutedCollection
from jfi.sharded.send_ahead import Ready, SendAhead, SentBatch, ids_of
from jfi.static_batch import describe


class CapturedShardedStep(StepGraphs):
    """Runs the training step of a model whose attention goes to the rows as CUDA graphs.

    It is to `jfi.CapturedStep` what TorchRec's train pipeline is to a loop over batches: it takes an iterator, and
    sends the ids of a batch to the owners of their rows while the step before it runs. All ranks take the same
    decision for a batch: to replay a graph of the same capacities, or to run the step eagerly since the batch of one of
    them does not fit.

    What the step must keep to is what `jfi.CapturedStep` says, and it averages the gradients of the dense parameters
    itself, by `average_gradients`, before the optimizer's step: DistributedDataParallel keeps to a stream of its own,
    which cannot be captured. The collections are called with the ids of the batch and no others. Parameters and buffers
    beside the tables become those of the first rank at the construction. NCCL ends only after the graphs of its
    collectives: call `reset()` before `torch.distributed.destroy_process_group()`.

    Args:
        step: takes a batch on the device and returns a tree of tensors.
        model: whose sharded collections are of `AttentionCollectionSharder` and `FetchedBagsSharder`, built with
            `init_data_parallel=False`.
        reference: the batch that capacities follow from; None for the first one.
        warmup_steps: steps with each capacity before it is captured, at least 1.
        most_graphs: the most graphs; at least 1.

    Raises:
        ValueError: the model has another sharded module, or none, or is in a DistributedDataParallel; its tables are
            shared by groups of processes; with `reference`, or else at the first step, the model cannot be captured
            with such batches.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        model: DistributedModelParallel,
        *,
        reference: Any = None,
        warmup_steps: int = 2,
        most_graphs: int = 4,
    ) -> None:
        super().__init__(self._compute, model, warmup_steps, most_graphs, staging=0)
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ValueError("model must be a DistributedModelParallel with init_data_parallel=False")
        self._own_step, self._collections = step, routed_collections(model)
        self._group = self._collections[0].ranks
        if self._group.size() != dist.get_world_size():
            raise ValueError(f"all {dist.get_world_size()} processes must share the tables, got {self._group.size()}")
        self._ahead = SendAhead(self._collections, dist.new_group(), self._device, self._graphs is not None)
        self._fused = model.fused_optimizer
        self._ready: Ready | None = None
        self._checked = False
        _copy_from_first(model, self._collections)
        if reference is not None:
            self._ahead.refer(reference)
            self._check()

    def reset(self) -> None:
        """As `StepGraphs.reset`, and forgets a batch that was sent ahead: needed before another iterator, too."""
        super().reset()
        self._ready = None

    def _check(self) -> None:
        """Takes what the ranks agreed on at the first batch."""
        self._checked = True
        self._singles, self._padding = self._ahead.singles, self._ahead.padding
        own = {id(part) for one in self._collections for part in one.modules()}
        parts = [part for part in self._model.modules() if id(part) not in own]
        spread = frozenset(f.name for one in self._collections for route in one.routes for f in route.features)
        reasons = (why_module_not(part, self._ahead.with_room, spread) for part in parts)
        reason = next(filter(None, reasons), None)
        if reason is not None:
            raise ValueError(f"the step cannot be captured: {reason}")

    def progress(self, batches: Iterator[Any]) -> Any:
        """Makes a step on the next batch, and sends the one after it ahead.

        Args:
            batches: this rank's part of each batch, on the host; best in pinned memory. All ranks have as many.

        Returns:
            What the step returned; its tensors are valid until the next call.

        Raises:
            StopIteration: there is no further batch.
            UnsupportedBatch: this one is no tree of tensors and constants with one KeyedJaggedTensor; the other ranks
                wait for this one.
            ValueError: features that do not fit the collections, likewise.
        """
        if self._ready is None:
            self._ready = self._ahead.send(next(batches))
            if not self._checked:
                self._check()
        ready, self._ready = self._ready, None
        self._fused.zero_grad()  # hands its learning rate on to fbgemm
        for collection in self._collections:
            collection.follow_rate()
        self._ahead.wait(ready)
        if isinstance(ready.capacities, str):
            outputs = self._run_eagerly(ready.sent, ready.capacities)
        else:
            outputs = self._run_in_buffers(describe(ready.sent), ready.capacities)
        following = next(batches, None)
        if following is not None:
            self._ready = self._ahead.send(following)
        return outputs

    def _compute(self, sent: SentBatch) -> Any:
        ids = ids_of(describe(sent.batch))
        with ExitStack() as stack:
            for collection, arrived in zip(self._collections, self._ahead.arrived(sent, self._group), strict=True):
                stack.enter_context(collection.given(ids, arrived))
            return self._own_step(sent.batch)


def routed_collections(model: nn.Module) -> list[RoutedCollection]:
    """The sharded collections of a model.

    Raises:
        ValueError: it has none, or another sharded module.
    """
    sharded = [module for module in model.modules() if isinstance(module, ShardedModule)]
    if not sharded or not all(isinstance(module, RoutedCollection) for module in sharded):
        names = ", ".join(sorted({type(module).__name__ for module in sharded})) or "none"
        raise ValueError(
            "the sharded modules of model must be of AttentionCollectionSharder and FetchedBagsSharder, got " + names
        )
    return sharded


@torch.no_grad()
def _copy_from_first(model: nn.Module, collections: list[RoutedCollection]) -> None:
    """Gives all ranks the first one's parameters and buffers that are not of the collections."""
    own = {id(x) for one in collections for x in (*one.parameters(), *one.buffers())}
    group = collections[0].ranks
    for x in (*model.parameters(), *model.buffers()):
        if group.size() > 1 and id(x) not in own:
            dist.broadcast(x, dist.get_global_rank(group, 0), group=group)


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Puts the mean over ranks in the place of each gradient, in one all-reduce of each dtype.

    Args:
        parameters: the same ones on every rank; of those that require a gradient one without counts as 0.
        group: the ranks; None for all.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for one in filter(lambda x: x.requires_grad, parameters):
        by_dtype.setdefault(one.dtype, []).append(one)
    for own in by_dtype.values():
        grads = [one.new_zeros(one.shape) if one.grad is None else one.grad for one in own]
        flat: Tensor = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        flat /= size
        for one, grad in zip(own, flat.split([one.numel() for one in own]), strict=True):
            one.grad = grad.view_as(one)
