"""Training steps of a sharded model as CUDA graphs, and the ids of the next batches on their way meanwhile."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardedModule

from jfi.cuda_graphs.capture_check import why_module_not
from jfi.cuda_graphs.captured_step import CudaGraphs, StepGraphs
from jfi.cuda_graphs.static_batch import OTHER_STRUCTURE, describe
from jfi.sharded.averages import captured_averages
from jfi.sharded.fixed_shapes import AHEAD, FixedSender, Sending
from jfi.sharded.peer_memory import PeerMemory, are_peers
from jfi.sharded.routed import RoutedCollection
from jfi.sharded.send_ahead import SENDING, STEP, SendAhead
from jfi.sharded.sent_batch import SentBatch, ids_of

#: Batches whose capacities the next ones are sent with: the largest of so many.
_RECENT = 16


class CapturedShardedStep(StepGraphs):
    """Runs the training step of a model whose attention goes to the rows as CUDA graphs.

    It is to `jfi.CapturedStep` what TorchRec's train pipeline is to a loop over batches: it takes an iterator, and
    sends the ids of a batch to the owners of their rows while the two steps before it run, as a CUDA graph of its own
    (`jfi.sharded.fixed_shapes`). All ranks take the same decision for a batch: to replay a graph of the same
    capacities, or to run the step eagerly since the batch of one of them does not fit. Where the GPUs of all ranks are
    on one host and reach each other, what a step sends is written to their memory (`jfi.sharded.peer_memory`).

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
        warmup_steps: steps with each capacity before it is captured, at least 1, or 2 with peer memory.
        max_graphs: the largest number of graphs; at least 1.
        peer_memory: False sends everything through the process group.

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
        max_graphs: int = 4,
        peer_memory: bool = True,
    ) -> None:
        super().__init__(self._compute, model, warmup_steps, max_graphs, staging=0, priority=STEP)
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ValueError("model must be a DistributedModelParallel with init_data_parallel=False")
        self._own_step, self._collections = step, routed_collections(model)
        self._group = self._collections[0].ranks
        if self._group.size() != dist.get_world_size():
            raise ValueError(f"all {dist.get_world_size()} processes must share the tables, got {self._group.size()}")
        self._ahead = SendAhead(self._collections, dist.new_group(), self._device)
        self._senders: dict[tuple[int, ...], FixedSender] = {}
        self._sender_graphs = None if self._graphs is None else CudaGraphs(self._device, staging=0, priority=SENDING)
        self._peers: PeerMemory | None = None
        if peer_memory and self._graphs is not None and self._group.size() > 1 and are_peers(self._group, self._device):
            self._peers = PeerMemory(self._group, self._device)
            self._warmup_steps = max(warmup_steps, 2)  # the second step has its exchanges in the order of the others
        self._tables = [x for collection in self._collections for x in collection.parameters()]
        self._fused = model.fused_optimizer
        #: Batches on their way, and the capacities that the last ones needed.
        self._sent: deque[Sending] = deque()
        self._recent: deque[tuple[int, ...]] = deque(maxlen=_RECENT)
        self._checked = False
        _copy_from_first(model, self._collections)
        if reference is not None:
            self._refer(reference)

    def reset(self) -> None:
        """As `StepGraphs.reset`, and forgets batches that were sent ahead.

        Needed at the end, and if an iterator is left before its end.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the memory of batches and graphs is used again
        super().reset()
        self._sent.clear()
        self._senders.clear()  # NCCL would wait for their graphs at its end
        if self._sender_graphs is not None:
            self._sender_graphs.reset()
        if self._peers is not None:
            self._peers.forget()

    def summary(self) -> str:
        """As `StepGraphs.summary`, and how rows travel."""
        return super().summary() + "; rows travel through peer memory" * (self._peers is not None)

    def _refer(self, batch: Any) -> None:
        """Takes the capacities from a batch."""
        self._recent.append(self._ahead.refer(batch))
        self._check()

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
        """Makes a step on the next batch, and sends the second one after it ahead.

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
        if self._graphs is None:
            return self._progress_eagerly(next(batches), "without a GPU")
        self._send_next(batches)
        if not self._sent:
            raise StopIteration
        sending = self._sent.popleft()
        capacities = OTHER_STRUCTURE if self._is_uneven else self._ahead.agree(sending.numbers())
        while not isinstance(capacities, str) and not sending.sender.holds(capacities):
            # A rank whose batch was too large to send has counted none of its ids, so the counts may grow once more.
            sending = self._sender(capacities).send(sending.batch)
            capacities = self._ahead.agree(sending.numbers())
        if isinstance(capacities, str):
            outputs = self._progress_eagerly(sending.batch, capacities)
        else:
            self._recent.append(capacities)
            self._begin_step()
            level = self._level(sending.sender.structure, capacities)
            sending.load(capacities, level.buffers, level.block)
            outputs = self._run(level)
        self._send_next(batches)
        return outputs

    @property
    def _is_uneven(self) -> bool:
        """Whether the ranks have other numbers of samples in the batch that capacities follow from."""
        return len(set(self._ahead.samples)) > 1

    def _progress_eagerly(self, batch: Any, reason: str) -> Any:
        """Makes a step whose forward pass sends the ids."""
        self._begin_step()
        return self._run_eagerly(batch, reason)

    def _send_next(self, batches: Iterator[Any]) -> None:
        """Sends batches until AHEAD of them are on their way, if there are any."""
        while len(self._sent) < AHEAD:
            batch = next(batches, None)
            if batch is None:
                return
            if not self._checked:
                self._refer(batch)
            if self._is_uneven:
                self._sent.append(Sending(batch, None, None))
                continue
            capacities = tuple(map(max, *self._recent)) if len(self._recent) > 1 else self._recent[0]
            self._sent.append(self._sender(capacities).send(batch))

    def _sender(self, capacities: tuple[int, ...]) -> FixedSender:
        if capacities not in self._senders:
            self._senders[capacities] = FixedSender(self._ahead, capacities, self._sender_graphs)
        return self._senders[capacities]

    def _begin_step(self) -> None:
        self._fused.zero_grad()  # hands its learning rate on to fbgemm
        for collection in self._collections:
            collection.follow_rate()

    def _compute(self, sent: Any) -> Any:
        if not isinstance(sent, SentBatch):
            with captured_averages(self._group, None, self._tables):
                return self._own_step(sent)
        ids, peers = ids_of(describe(sent.batch)), self._peers
        arrived = sent.arrived(self._collections, self._group, peers)
        with ExitStack() as stack:
            if peers is not None:
                stack.enter_context(peers.step())
            for collection, of_collection in zip(self._collections, arrived, strict=True):
                stack.enter_context(collection.given(ids, of_collection))
            stack.enter_context(captured_averages(self._group, peers, self._tables))
            return self._own_step(sent.batch)


def routed_collections(model: nn.Module) -> list[RoutedCollection]:
    """The sharded collections of a model.

    Raises:
        ValueError: it has none, another sharded module, or one whose sharder has `dedup`.
    """
    sharded = [module for module in model.modules() if isinstance(module, ShardedModule)]
    if not sharded or not all(isinstance(module, RoutedCollection) for module in sharded):
        names = ", ".join(sorted({type(module).__name__ for module in sharded})) or "none"
        raise ValueError(
            "the sharded modules of model must be of AttentionCollectionSharder and FetchedBagsSharder, got " + names
        )
    if any(route.dedup for collection in sharded for route in collection.routes):
        raise ValueError("the sharders of model must have dedup=False for captured steps, whose shapes are fixed")
    return sharded


def _outside(model: nn.Module, collections: list[RoutedCollection]) -> list[Tensor]:
    """The parameters and buffers that are not of the collections."""
    own = {id(x) for one in collections for x in (*one.parameters(), *one.buffers())}
    return [x for x in (*model.parameters(), *model.buffers()) if id(x) not in own]


@torch.no_grad()
def _copy_from_first(model: nn.Module, collections: list[RoutedCollection]) -> None:
    """Gives all ranks the first one's parameters and buffers that are not of the collections."""
    group = collections[0].ranks
    if group.size() > 1:
        for x in _outside(model, collections):
            dist.broadcast(x, dist.get_global_rank(group, 0), group=group)
