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

from jfi.captured_step import StepGraphs
from jfi.sharded.routed import RoutedCollection
from jfi.sharded.send_ahead import Ready, SendAhead, SentBatch
from jfi.static_batch import describe


class CapturedShardedStep(StepGraphs):
    """Runs the training step of a model whose attention goes to the rows as CUDA graphs.

    It is to `jfi.CapturedStep` what TorchRec's train pipeline is to a loop over batches: it takes an iterator, and
    sends the ids of a batch to the owners of their rows while the step before it runs. All ranks take the same
    decision for a batch: to replay a graph of the same capacities, or to run the step eagerly since the batch of one of
    them does not fit.

    What the step must keep to is what `jfi.CapturedStep` says, and it averages the gradients of the dense parameters
    itself, by `average_gradients`, before the optimizer's step: DistributedDataParallel keeps to a stream of its own,
    which cannot be captured.

    Args:
        step: takes a batch on the device and returns a tree of tensors.
        model: whose sharded collections are of `AttentionCollectionSharder` and `FetchedBagsSharder`, built with
            `init_data_parallel=False`.
        reference: the batch that capacities follow from; None for the first one.
        warmup_steps: steps with each capacity before it is captured, at least 1.
        most_graphs: the most graphs; at least 1.

    Raises:
        ValueError: the model has another sharded module, or none, or is in a DistributedDataParallel.
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
        super().__init__(self._compute, model, warmup_steps, most_graphs)
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ValueError("model must be a DistributedModelParallel with init_data_parallel=False")
        self._own_step, self._collections, self._reference = step, routed_collections(model), reference
        self._group = self._collections[0].ranks
        own = dist.new_group(dist.get_process_group_ranks(self._group))
        self._ahead = SendAhead(self._collections, own, self._device, self._graphs is not None)
        self._fused = model.fused_optimizer
        self._ready: Ready | None = None

    def progress(self, batches: Iterator[Any]) -> Any:
        """Makes a step on the next batch, and sends the one after it ahead.

        Args:
            batches: this rank's part of each batch, on the host; best in pinned memory. All ranks have as many.

        Returns:
            What the step returned; its tensors are valid until the next call.

        Raises:
            StopIteration: there is no further batch.
        """
        if self._ready is None:
            if self._reference is not None:
                reference, self._reference = self._reference, None
                self._ahead.refer(reference)
            self._ready = self._ahead.send(next(batches))
            self._singles, self._padding = self._ahead.singles, self._ahead.padding
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
        with ExitStack() as stack:
            for collection, arrived in zip(self._collections, self._ahead.arrived(sent, self._group), strict=True):
                stack.enter_context(collection.given(arrived))
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


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Puts the mean over ranks in the place of each gradient, in one all-reduce of each dtype.

    Args:
        parameters: the same ones on every rank; one without a gradient counts as 0.
        group: the ranks; None for all.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for one in parameters:
        by_dtype.setdefault(one.dtype, []).append(one)
    for own in by_dtype.values():
        grads = [one.new_zeros(one.shape) if one.grad is None else one.grad for one in own]
        flat: Tensor = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        flat /= size
        for one, grad in zip(own, flat.split([one.numel() for one in own]), strict=True):
            one.grad = grad.view_as(one)
