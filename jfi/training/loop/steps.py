"""Runs the model on the batches of a split: training steps, and outputs of held-out samples.

Batches are a pure function of (seed, epoch, number), so a killed run continues with the same bits. Under torchrun every
process runs its part of each batch.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.optimizers import in_backward_optimizer_filter

from jfi.cuda_graphs.captured_step import CapturedStep
from jfi.data import Batch, InteractionDataset
from jfi.data.batches.dataset import Batches
from jfi.data.batches.prefetch import loader_threads, prefetch
from jfi.distributed import CapturedShardedStep, average_gradients
from jfi.training.config import Config, ConfigError
from jfi.training.distributed.processes import World
from jfi.training.loop.captured_steps import capture
from jfi.training.loop.gradient_accumulation import NoSteps, run_parts
from jfi.training.loop.learning_rates import LearningRates
from jfi.training.loop.objective import Objective
from jfi.training.metrics.label_metrics import Predictions
from jfi.training.model.growing_rows import admit_ids
from jfi.training.run.state import RunState
from jfi.utils.display import Display

Item = TypeVar("Item")
#: Outputs and labels, [B] or of L labels [B, L], and users [B], of a batch or of a rank's part of it.
Output = tuple[Tensor, Tensor, Tensor]


class Steps(RunState):
    """The state of a run, and its steps on batches.

    Its arguments are those of `RunState`, and `clock`, which returns seconds that only grow.
    """

    def __init__(
        self,
        config: Config,
        dataset: InteractionDataset,
        world: World,
        warm: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(config, dataset, world, warm)
        config, dataset = self.config, self.dataset
        self.clock = clock
        self._num_steps = config.training.epochs * -(-dataset.num_samples("train") // config.training.batch_size)
        self._rates = LearningRates(config.optimizer, self.optimizer, self._num_steps)
        self._labels = dataset.schema.labels
        self._objective = Objective.of(config.data, self._labels)
        self.pipeline: TrainPipelineSparseDist | None = None
        if world.launched and self.device.type == "cuda":
            self.pipeline = self._make_pipeline()
        self._captured: CapturedStep | CapturedShardedStep | None = None
        #: Whose gradients a step averages over the processes itself.
        self._averaged: list[nn.Parameter] = []
        if world.launched and config.training.cuda_graph == "always":
            self._averaged = list(dict(in_backward_optimizer_filter(self.model.named_parameters())).values())
        #: Mean loss of the last line of the log, to be shown.
        self.loss = math.nan

    def capture_steps(self) -> str | None:
        """Launches training steps as CUDA graphs from now on where `training.cuda_graph` asks for it; or says why not.

        Raises:
            ConfigError: `training.cuda_graph` is always and the steps cannot be captured.
        """
        wanted = self.config.training.cuda_graph
        if wanted == "never" or (wanted == "auto" and self.device.type != "cuda"):
            return None
        found = capture(self._step, self.model, self.optimizer, self.config, self.dataset, self.world)
        if isinstance(found, str):
            return f"training steps run eagerly, not as CUDA graphs: {found}"
        self._captured = found
        if isinstance(found, CapturedShardedStep):
            self.pipeline = None  # it sends the next batch ahead itself
        return None

    def _make_pipeline(self) -> TrainPipelineSparseDist:
        optimizer = self.optimizer if self.config.training.gradient_accumulation_steps == 1 else NoSteps()
        return TrainPipelineSparseDist(self.model, optimizer, self.device, custom_model_fwd=self._forward)

    def _outputs(self, split: str, size: int, label: str, start: int = 0, end: int | None = None) -> Iterator[Output]:
        """Runs the model on batches of a split from `start` to `end`; in training mode an optimizer step follows each.

        No later batch is in flight at the end, so that another split can follow.
        """
        with closing(self._batches(split, size, label, start, end)) as batches:
            yield from self._run(batches)

    def _run(self, batches: Iterator[Batch | list[Batch]]) -> Iterator[Output]:
        """Runs the model on batches that are on the device, but for those that a pipeline or a graph copies there.

        In training a list has the parts of a batch.
        """
        progress = None
        if self.pipeline is not None:
            in_parts = self.model.training and self.config.training.gradient_accumulation_steps > 1
            batches = chain.from_iterable(batches) if in_parts else batches
            progress = self._step_in_parts if in_parts else self.pipeline.progress
        elif self.model.training and isinstance(self._captured, CapturedShardedStep):
            progress = self._captured.progress
        if progress is not None:
            with suppress(StopIteration):
                while True:
                    self._set_rates()
                    yield progress(batches)
            return
        for batch in batches:
            self._set_rates()
            if self.model.training:
                yield self._step(batch) if self._captured is None else self._captured(batch)
            else:
                yield self._forward(batch)[1]

    def _steps(self, split: str, label: str, start: int = 0, end: int | None = None) -> Iterator[None]:
        """Makes a training step of each batch of a split from `start` to `end`, and yields after it."""
        progress, average = self.progress, self.modules.get("average")
        self.model.train()
        with closing(self._outputs(split, self.config.training.batch_size, label, start, end)) as outputs:
            for _ in outputs:
                if average is not None:
                    average.update()
                progress.batch += 1
                progress.step += 1
                if self.growing is not None and self.growing.is_due(progress.step):
                    self.admit()
                yield

    def _flush_average(self) -> None:
        if "average" in self.modules:
            self.modules["average"].flush()

    @torch.no_grad()
    def _predict(self, split: str, check: Callable[[], None]) -> Predictions:
        """The predictions of a split; of this process's part of it in all but the first."""
        self.model.eval()
        self.evaluated.eval()
        predictions = Predictions()
        with closing(self._outputs(split, self.config.training.eval_batch_size, split)) as outputs:
            for output in outputs:
                predictions.add(*output)
                check()
        return predictions.on_cpu(self.world.gather_rows)

    def admit(self) -> None:
        """Gives rows to the new ids of the steps since the last admission, in tables that grow.

        Raises:
            ConfigError: a batch has more distinct values than a `capacity` of `data.features`.
        """
        if self.growing is None:
            return
        try:
            admit_ids(self.model, self.optimizer, self._table_configs)
        except ValueError as fault:
            raise ConfigError(f"data.features: {fault}") from None

    def _step(self, batch: Batch | list[Batch]) -> Output:
        # Before the forward pass, in which fbgemm's fused optimizers read the rate that this hands on.
        self.optimizer.zero_grad()
        if isinstance(batch, list):
            parts = iter(batch)
            output = run_parts(self.model, lambda: self._backward(next(parts)), len(batch))
        else:
            output = self._backward(batch)
        if self._averaged:
            average_gradients(self._averaged)
        self.optimizer.step()
        return output

    def _backward(self, batch: Batch) -> Output:
        loss, output = self._forward(batch)
        loss.backward()
        return output

    def _step_in_parts(self, parts: Iterator[Batch]) -> Output:
        """A step of the next parts, which the pipeline runs; StopIteration if there are none."""
        self.optimizer.zero_grad()
        output = run_parts(
            self.model, lambda: self.pipeline.progress(parts), self.config.training.gradient_accumulation_steps
        )
        self.optimizer.step()
        return output

    def _set_rates(self) -> None:
        if self.model.training:
            self._rates.set(self.progress.step, self._num_steps)

    def _forward(self, batch: Batch) -> tuple[Tensor | None, Output]:
        """The loss in training, else None, and the output. Train pipelines call it as well."""
        training = self.model.training
        labels = batch.labels if training else self._predicted(batch.labels)
        model = self.model if training else self.evaluated
        if training and self.growing is not None:
            self.growing.train(len(labels) > 0)  # else the ids are those of a sample that does not count
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.training.precision == "bfloat16"):
            logits = model(batch.dense_features, batch.sparse_features, batch.timelines)
        logits = logits.float()[: len(labels)]
        logits = logits.squeeze(-1) if labels.dim() == 1 else logits
        output = logits.detach(), labels, batch.users
        if not training:
            return None, output
        total, plain = self._objective(logits, labels, batch.weights)
        # DDP averages gradients over the ranks, so a rank divides its sum by the mean of their parts.
        loss = total * (self.world.size / batch.total)
        first = labels if labels.dim() == 1 else labels[:, 0]
        self.window += torch.stack([plain, first.sum(), labels.new_full((), len(labels))])
        return loss, output

    def _predicted(self, labels: Tensor) -> Tensor:
        """Without auxiliary ones, for which a model has no outputs in evaluation mode."""
        if not self.config.data.auxiliary_labels():
            return labels
        return labels[:, 0] if len(self._labels) == 1 else labels[:, : len(self._labels)]

    def _batches(self, split: str, size: int, label: str, start: int, end: int | None) -> Iterator[Batch | list[Batch]]:
        parts = self._parts(split, size)

        def assemble(number: int) -> Batch | list[Batch]:
            return self._assemble(parts, number)

        batches = self._load(assemble, range(start, len(parts[0]) if end is None else end))
        done = parts[0].order.samples_before(start) if start else 0
        with self._display(label, self.dataset.num_samples(split), done) as display, closing(batches):
            for batch in batches:
                yield batch
                total = batch[0].total if isinstance(batch, list) else batch.total
                display.update(total, self._details if split == "train" else None)

    def _assemble(self, parts: list[Batches], number: int) -> Batch | list[Batch]:
        if len(parts) == 1:
            return parts[0][number]
        # One process leaves out parts without samples; several make as many passes as each other.
        return [one for part in parts if len((one := part[number]).labels) or self.world.launched]

    def _parts(self, split: str, size: int) -> list[Batches]:
        """Returns this process's batches of a split, by part of a step.

        A batch is divided into parts as it is over processes. Held-out splits have the same order and the same sampled
        negatives in every run.
        """
        options, count = {"pin_memory": self.device.type == "cuda"}, 1
        if split == "train":
            options |= {"shuffle": True, "seed": self.config.training.seed, "epoch": self.progress.epoch}
            count = self.config.training.gradient_accumulation_steps
        rank, ranks = self.world.rank, self.world.size
        parts = [{"rank": rank + part * ranks, "world_size": count * ranks} for part in range(count)]
        return [self.dataset.batches(split, size, **part, **options) for part in parts]

    def _load(
        self, assemble: Callable[[Item], Batch | list[Batch]], items: Iterable[Item]
    ) -> Iterator[Batch | list[Batch]]:
        """Batches that are assembled ahead; on the device but for those that a pipeline or a graph copies there."""
        copies = self.pipeline is None and (self._captured is None or not self.model.training)
        return prefetch(assemble, items, self.device if copies else None, loader_threads(self.device))

    def _display(self, label: str, total: int, done: int) -> Display:
        return Display(label, total, done, silent=not self.world.is_first)

    def _details(self) -> dict[str, int | float]:
        """The step, and this process's mean loss since the last line of the log."""
        total, _, samples = self.window.tolist()
        loss = total / samples if samples else self.loss
        return {"step": self.progress.step, "loss": loss}
