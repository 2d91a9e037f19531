"""A training step as one CUDA graph: look-ups, forward, backward and optimizers are launched at once.

A graph has fixed addresses and shapes, while a batch has any number of events. So each batch is copied into buffers
(`jfi.cuda_graphs.static_batch`) whose jagged keys are padded to a capacity: the lengths are the batch's, the capacities
are a few sizes, and a graph is captured for each capacity that comes up. The first steps with a capacity run eagerly on
the same buffers, as warm-up and as real steps; capturing executes nothing, and the batch of that call is the first one
to be replayed.

A batch in pinned memory is copied to the device on a side stream while the step before it runs, into one of two
staging blocks; one copy within the device then moves it to where the graph reads it. Nothing waits for the device.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from jfi.cuda_graphs.capture_check import padding_ids, why_not_captured
from jfi.cuda_graphs.static_batch import Buffers, CapacityBuckets, Described, UnsupportedBatch, describe, to_device
from jfi.tables.fused_tables import FusedTables
from jfi.utils.arguments import MAX_ROWS, check_int, check_module, check_type
from jfi.utils.context import padded_to_capacity

#: Blocks to which batches on the host are copied while the step before them runs.
_STAGING = 2


class StagingBlock:
    """Memory of a batch that a side stream fills and the step's stream copies."""

    def __init__(self, block: Tensor) -> None:
        self.block = block
        #: On a GPU, the events that the block is filled, and that it was copied.
        self.filled: Any = torch.cuda.Event() if block.is_cuda else None
        self.copied: Any = torch.cuda.Event() if block.is_cuda else None


class CapacityBucket:
    """Buffers of one capacity, and its graph once it is captured."""

    def __init__(self, buffers: Any) -> None:
        self.buffers, self.block = buffers, buffers.new_block()
        self.staging: Iterator[StagingBlock] | None = None  # in turn
        self.eager_steps = 0
        self.replay: Callable[[], None] | None = None
        self.outputs: Any = None


class StepGraphs:
    """Runs steps on batches in buffers: the first ones with each capacity eagerly, then as a CUDA graph.

    The first arguments are those of `CapturedStep`.

    Args:
        priority: priority of the steps' stream, as in torch.cuda.Stream: lower numbers first.
    """

    def __init__(
        self, step: Callable[[Any], Any], model: nn.Module, warmup_steps: int, max_graphs: int, priority: int = 0
    ) -> None:
        check_type("step", step, Callable, "a function of a batch")
        check_module("model", model)
        check_int("warmup_steps", warmup_steps, most=MAX_ROWS)
        check_int("max_graphs", max_graphs, most=MAX_ROWS)
        if next(model.parameters(), None) is None:
            raise ValueError("model must have parameters, which determine the step's device, got none")
        self._step, self._model = step, model
        self._warmup_steps, self._max_graphs = warmup_steps, max_graphs
        self._device = next(model.parameters()).device
        self._graphs = CudaGraphs(self._device, priority) if self._device.type == "cuda" else None
        self._fixed_length_keys: frozenset[str] = frozenset()
        self._buckets: dict[tuple[int, ...], CapacityBucket] = {}
        #: Steps that were replayed from a graph.
        self.captured = 0
        #: Steps that ran eagerly, by the reason.
        self.eager: Counter[str] = Counter()

    @property
    def steps(self) -> int:
        """Returns the number of steps so far."""
        return self.captured + self.eager.total()

    def summary(self) -> str:
        """Returns one line: how many steps ran captured, how many eagerly, and why."""
        graphs = sum(bucket.replay is not None for bucket in self._buckets.values())
        line = f"{self.captured} of {self.steps} steps ran captured, in {graphs} CUDA graph{'s' * (graphs != 1)}"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.eager.items())
        return f"{line}; eagerly: {reasons}" if reasons else line

    def reset(self) -> None:
        """Forgets all graphs: the next steps with each capacity warm up and are captured again.

        Call it after a tensor that a graph reads was replaced: by a model's `.to()`, or by an optimizer's
        `load_state_dict()`, which makes new tensors.
        """
        self._buckets.clear()
        if self._graphs is not None:
            self._graphs.reset()

    def _bucket(self, capacities: tuple[int, ...], new_buffers: Callable) -> CapacityBucket:
        # A graph captures dropout and the like as they are in this mode.
        key = self._model.training, *capacities
        if key not in self._buckets:
            self._buckets[key] = CapacityBucket(new_buffers())
        return self._buckets[key]

    def _fused_tables(self) -> list[FusedTables]:
        """Returns the optimizers of the model's fused tables."""
        found = [getattr(module, "fused_optimizer", None) for module in self._model.modules()]
        return [one for one in found if isinstance(one, FusedTables)]

    def _run(self, graphs: "CudaGraphs", bucket: CapacityBucket) -> Any:
        """Runs a step on the batch in the block of a bucket."""

        def step() -> Any:
            with padded_to_capacity(self._fixed_length_keys), ExitStack() as stack:
                for tables in self._fused_tables():
                    stack.enter_context(tables.stepping_beside())
                return self._step(bucket.buffers.batch(bucket.block))

        if bucket.replay is None:
            captured = sum(other.replay is not None for other in self._buckets.values())
            if bucket.eager_steps < self._warmup_steps or captured == self._max_graphs:
                is_warm = bucket.eager_steps >= self._warmup_steps
                outputs = graphs.run(step)
                bucket.eager_steps += 1  # a step that raises does not count
                self.eager[f"beyond {self._max_graphs} graphs" if is_warm else "as warm-up"] += 1
                return outputs
            bucket.replay, bucket.outputs = graphs.capture(step)
        bucket.replay()
        self.captured += 1
        return bucket.outputs

    def _run_eagerly(self, batch: Any, reason: str) -> Any:
        def step() -> Any:
            return self._step(to_device(batch, self._device))

        outputs = step() if self._graphs is None else self._graphs.run(step)
        self.eager[reason] += 1
        return outputs


class CapturedStep(StepGraphs):
    """Runs a training step as CUDA graphs, one for each of a few capacities of the batches.

    Call it with a batch instead of `step`. The results equal those of the step called on the batch itself, up to
    rounding: kernels may split longer tensors differently. They depend on the batch and on the reference alone, not on
    which graphs exist, so that a resumed run has the same bits.

    Batches are trees of dataclasses (such as `jfi.data.Batch`), tuples, lists and dicts with tensors and
    KeyedJaggedTensors. Every batch with the shapes of the reference batch is captured; a key that has one value a
    sample there must have one in each batch, other keys may have 0.3 to 4 times as many values as there. All others run
    eagerly and are counted in `eager`: the last batch of an epoch with fewer samples, a larger one, one beyond
    `max_graphs`, one with a part that cannot be copied to buffers, such as a NumPy array, which also warns once.

    Conditions for the step, in addition to those of `why_not_captured` for the model:

    - it changes only tensors that stay where they are: parameters, an optimizer's state, sums;
    - the host reads no number from the device (`.item()`, `.tolist()`, `print`, `if tensor:`), and the step reads no
      number that the host changes: a learning rate is a tensor, as `torch.optim.Adam(.., capturable=True)` takes it;
    - after a backward pass it reads fused tables by new look-ups alone: their step runs beside what follows, and ends
      with the captured step;
    - values of a key behind those that its lengths count are padding: sum over samples by offsets, not over all rows.

    On a CPU every step runs eagerly.

    Args:
        step: takes a batch on the device and returns a tree of tensors.
        model: the model with the collections that read the batch; steps run on its device.
        reference: the batch that determines shapes and capacities; None for the first one.
        warmup_steps: number of steps with each capacity before it is captured, at least 1.
        max_graphs: the largest number of graphs; at least 1.

    Raises:
        ValueError: at a call, the model cannot be captured with such batches; the message says why.
        RuntimeError: at a call, CUDA refused to capture the step, most often since it waits for the device.

    Example:

        >>> import torch
        >>> from jfi import CapturedStep
        >>> device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        >>> model = torch.nn.Linear(4, 1).to(device)
        >>> rate = torch.tensor(0.1, device=device)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=device.type == "cuda")
        >>> def step(batch):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
        >>> captured = CapturedStep(step, model)
        >>> for _ in range(5):
        ...     loss = captured({"x": torch.rand(32, 4), "y": torch.rand(32)})
        >>> captured.steps
        5
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        model: nn.Module,
        *,
        reference: Any = None,
        warmup_steps: int = 2,
        max_graphs: int = 4,
    ) -> None:
        super().__init__(step, model, warmup_steps, max_graphs)
        self._reference = reference
        self._capacities: CapacityBuckets | None = None

    def __call__(self, batch: Any) -> Any:
        """Makes a step.

        Args:
            batch: in any memory; pinned memory is copied while the step before it runs. A KeyedJaggedTensor on the GPU
                should have its `length_per_key`, since computing it waits for the device. If the first batch is on
                the host, a later one on the GPU runs eagerly, since checking which keys have one value a sample would
                wait for the device.

        Returns:
            The result of the step. Its tensors are valid until the next call, which may overwrite them: clone those
            that you keep.
        """
        graphs, buckets = self._graphs, self._capacities
        if graphs is None:
            return self._run_eagerly(batch, "without a GPU")
        try:
            described = describe(batch)
            buckets = self._begin(batch) if buckets is None else buckets
        except UnsupportedBatch as unsupported:
            reason = str(unsupported)
            if reason not in self.eager:
                warnings.warn(f"steps run eagerly and are not captured: {reason}", stacklevel=2)
            return self._run_eagerly(batch, reason)
        capacities, structure = buckets.fit(described), buckets.structure
        if isinstance(capacities, str):
            return self._run_eagerly(batch, capacities)
        bucket = self._bucket(capacities, lambda: Buffers(structure, capacities, self._padding, self._device))
        graphs.load(bucket, described)
        return self._run(graphs, bucket)

    def _begin(self, first: Any) -> CapacityBuckets:
        reference = first if self._reference is None else self._reference
        buckets, reason = CapacityBuckets(describe(reference)), why_not_captured(self._model, reference)
        if reason is not None:
            raise ValueError(f"the step cannot be captured: {reason}")
        self._capacities, self._padding = buckets, padding_ids(self._model)
        self._fixed_length_keys, self._reference = buckets.fixed_length_keys, None
        return buckets


class CudaGraphs:
    """Streams, copies and graphs of a GPU."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device = device
        # Autograd accumulates gradients on the stream of the first forward pass, so all steps run on the one that the
        # graphs are captured on.
        self._stream, self._copies = torch.cuda.Stream(device, priority=priority), torch.cuda.Stream(device)
        self._captured: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle()

    def reset(self) -> None:
        """Ends all graphs and takes a new memory pool."""
        for graph in self._captured:
            graph.reset()  # NCCL waits at its end for graphs of its collectives, also for those that a cycle refers to
        self._captured.clear()
        # Gradients may still lie in the old pool, to which no further graph can be captured.
        self._pool = torch.cuda.graph_pool_handle()

    def load(self, bucket: CapacityBucket, batch: Described) -> None:
        """Copies a batch to the buffers of a bucket."""
        current = torch.cuda.current_stream(self._device)
        parts = [*batch.tensors, *(ids.values() for ids in batch.jagged)]
        if any(part.is_cuda for part in parts):
            bucket.buffers.fill(bucket.block, batch)
            return
        pinned = Described(batch.structure, [_pin(x) for x in batch.tensors], [_pin(x) for x in batch.jagged])
        if bucket.staging is None:
            bucket.staging = cycle([StagingBlock(bucket.buffers.new_block()) for _ in range(_STAGING)])
            self._copies.wait_stream(current)
        staging = next(bucket.staging)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(staging.copied)
            bucket.buffers.fill(staging.block, pinned)
            staging.filled.record(self._copies)
        current.wait_event(staging.filled)
        bucket.block.copy_(staging.block)
        staging.copied.record(current)

    def run(self, step: Callable[[], Any]) -> Any:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return step()
        finally:  # after an error too: the next batch is copied over what the step still reads
            current.wait_stream(self._stream)

    def capture(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Captures a step; returns its replay and its outputs, which each replay overwrites."""
        graph, fault = torch.cuda.CUDAGraph(), None
        # Other threads may pin memory meanwhile.
        options: dict[str, Any] = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.graph(graph, **options):
                try:
                    outputs = step()
                except Exception as error:
                    fault = error  # ending the capture raises another one
                    raise
        except Exception as error:
            fault = error if fault is None else fault
            if isinstance(fault, torch.OutOfMemoryError):
                raise fault from None
            line = (str(fault).splitlines() or [type(fault).__name__])[0]
            raise RuntimeError(f"the step cannot be captured in a CUDA graph: {line}") from fault
        self._captured.append(graph)
        return graph.replay, outputs


def _pin(part: Any) -> Any:
    values = part if isinstance(part, Tensor) else part.values()
    return part if values.is_pinned() else part.pin_memory()
