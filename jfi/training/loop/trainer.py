"""The training loop: epochs, evaluation, early stopping, checkpoints, the test of the best epoch, plots.

`jfi.training.run.state` has what the next step depends on, and its checkpoints. Batches are a pure function of (seed,
epoch, number), so a killed run continues with the same bits.

Under torchrun every process runs this loop on its part of each batch, and all make the same decisions: those that
depend on a file, a signal or all predictions are made by one process and broadcast.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm

from jfi.cuda_graphs.captured_step import CapturedStep
from jfi.data import Batch, InteractionDataset
from jfi.data.batches.dataset import Batches
from jfi.data.batches.prefetch import loader_threads, prefetch
from jfi.distributed import CapturedShardedStep, average_gradients
from jfi.modules.id_counts import all_outside_ids
from jfi.training.config import Config
from jfi.training.distributed.processes import World
from jfi.training.loop.captured_steps import capture, captures_shards
from jfi.training.loop.gradient_accumulation import NoSteps, run_parts
from jfi.training.loop.learning_rates import LearningRates
from jfi.training.loop.objective import Objective
from jfi.training.metrics.calibration import Calibration, describe, fit_calibration
from jfi.training.metrics.label_metrics import Predictions, Result, normalized_entropy
from jfi.training.metrics.ranking import rank_split
from jfi.training.metrics.unknown_values import OutsideCounts
from jfi.training.run.interrupt import Interrupted, StopRequest, stop_on_signals
from jfi.training.run.logger import Logger
from jfi.training.run.recorder import Recorder, SilentRecorder, describe_earlier, open_recorder, read_metrics
from jfi.training.run.run_data import name_data
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.state import RunState
from jfi.utils.display import Display

Item = TypeVar("Item")
#: Outputs and labels, [B] or of L labels [B, L], and users [B], of a batch or of a rank's part of it.
Output = tuple[Tensor, Tensor, Tensor]


class Trainer(RunState):
    """The state of a run and the loop that goes on from it.

    Args:
        config: the whole config.
        dataset: the dataset of `config.data`.
        world: the processes of the run.
        warm: the run to start from, `training.warm_start` of a new run.
        clock: seconds that only grow; another one in tests.

    Raises:
        ConfigError: the config does not fit the dataset, the processes or the run to start from.
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
        config = self.config
        self.clock = clock
        self._num_steps = config.training.epochs * -(-dataset.num_samples("train") // config.training.batch_size)
        self._rates = LearningRates(config.optimizer, self.optimizer, self._num_steps)
        self._labels = dataset.schema.labels
        self._objective = Objective.of(config.data, self._labels, config.training.positive_weight)
        self.pipeline: TrainPipelineSparseDist | None = None
        if world.launched and self.device.type == "cuda":
            self.pipeline = self._make_pipeline()
        self._captured: CapturedStep | CapturedShardedStep | None = None
        #: Of the last evaluation on the validation split.
        self._calibration: Calibration = {}
        #: Whose gradients a step averages over the processes itself.
        self._averaged: list[nn.Parameter] = []
        if world.launched and captures_shards(config):
            self._averaged = list(dict(in_backward_optimizer_filter(self.model.named_parameters())).values())
        self._outside = OutsideCounts()
        # Of the last line of the log, and samples a second of the last epoch, to be shown.
        self.loss = self.speed = math.nan

    def fit(self, run: RunFolder, logger: Logger | None = None) -> Result:
        """Trains to the end, tests the best epoch and draws the plots; `logger` is as of `jfi.training.train`."""
        # Imported now, since only pictures need matplotlib and a missing package should fail before the training.
        from jfi.training.run.plots import draw_attention, draw_curves

        progress, world = self.progress, self.world
        data = world.on_first(lambda: name_data(run))
        if finished := progress.finished(self.config.training):
            self._say(f"nothing to train: {finished} in {run.config} and use --config-changed accept")
        else:
            log = world.on_first(lambda: read_metrics(run.metrics, progress.log_length))
            self._say(describe_earlier(log, data))
            if world.size > 1 and world.is_first:
                order = self._parts("train", self.config.training.batch_size)[0].order
                busiest = order.imbalance(world.size)
                self._say(
                    f"the busiest of {world.size} processes has {busiest:.3f} times the mean work (events x targets)"
                )
            wanted = self.config.training.cuda_graph
            if wanted == "always" or (wanted == "auto" and self.device.type == "cuda"):
                found = capture(self._step, self.model, self.optimizer, self.config, self.dataset, world)
                if isinstance(found, str):
                    self._say(f"training steps run eagerly, not as CUDA graphs: {found}")
                else:
                    self._captured = found
                if isinstance(found, CapturedShardedStep):
                    self.pipeline = None  # it sends the next batch ahead itself
        # Run the backward on this thread. Waking autograd's thread and waiting for it in every step costs the host more
        # than launching the kernels for short histories.
        with (
            open_recorder(
                run, data, self.config, progress.log_length, progress.step, logger, world.is_first
            ) as recorder,
            stop_on_signals() as stop,
            torch.autograd.set_multithreading_enabled(False),
        ):
            try:
                while not progress.finished(self.config.training):
                    self._train_epoch(run, recorder, stop)
                    self._end_epoch(*self._evaluate("validation", run, stop), run, recorder)
            except Interrupted:
                if progress.step > 0:
                    self.save(run, recorder)
                raise
            finally:
                if self._captured is not None:
                    self._captured.reset()  # NCCL would wait at its end for graphs of its collectives
            self.load_best(run)
            test, speed = self._evaluate("test", run, stop)
            recorder.metrics("test", progress.best_epoch, progress.step, test, speed)
        log = world.on_first(lambda: read_metrics(run.metrics))
        self._say(describe_earlier(log, data))
        world.on_first(lambda: draw_curves(log, self.config.monitor, run.curves))
        if self.config.model.pooling == "attention":
            if self.pipeline is not None:
                self.pipeline.detach()
            model = self.model.module if world.launched else self._evaluated
            self._say(draw_attention(model, self.dataset, self.device, run.attention if world.is_first else None))
        validation = next(r for r in log if r["split"] == "validation" and r["epoch"] == progress.best_epoch)
        validation = {name: math.nan if validation[name] is None else validation[name] for name in test}
        for line in progress.warn_of_best_epoch(validation, self.config.monitor):
            self._say(line)
        return Result(str(run.path), progress.best_epoch, progress.epoch, validation, test, progress.train_seconds)

    def _say(self, line: str | None) -> None:
        if line is not None and self.world.is_first:
            print(line, flush=True)

    def _make_pipeline(self) -> TrainPipelineSparseDist:
        optimizer = self.optimizer if self.config.training.gradient_accumulation_steps == 1 else NoSteps()
        return TrainPipelineSparseDist(self.model, optimizer, self.device, custom_model_fwd=self._forward)

    def _train_epoch(self, run: RunFolder, recorder: Recorder | SilentRecorder, stop: StopRequest) -> None:
        progress, training = self.progress, self.config.training
        order = self._parts("train", training.batch_size)[0].order
        # The end of the run, as if all epochs to come had as many batches as this one: by user some have one fewer.
        self._num_steps = progress.step - progress.position + (training.epochs - progress.epoch) * order.num_batches
        average = self.modules.get("average")
        self.model.train()
        seconds, first = progress.train_seconds, order.samples_before(progress.position)
        started = logged = self.clock()
        logged_samples = done = first
        outputs = self._outputs("train", training.batch_size, progress.position, f"epoch {progress.epoch + 1}")
        with closing(outputs):
            for _ in outputs:
                if average is not None:
                    average.update()
                progress.batch += 1
                progress.step += 1
                if progress.step % self.config.sharding.sync_every == 0 or progress.position == order.num_batches:
                    self.groups.average(progress.step)
                done = order.samples_before(progress.position)
                now = self.clock()
                progress.train_seconds += now - started
                started = now
                if progress.step % training.log_every == 0 or progress.position == order.num_batches:
                    self._log_window(recorder, (done - logged_samples) / max(now - logged, 1e-9))
                    logged, logged_samples = now, done
                due = training.checkpoint_every and progress.step % training.checkpoint_every == 0
                if due and progress.position < order.num_batches:
                    self.save(run, recorder)
                    saved = self.clock()
                    started, logged = saved, logged + saved - started
                stop.check(run.path, self.world)
        if average is not None:
            average.flush()
        self.speed = (done - first) / max(progress.train_seconds - seconds, 1e-9)

    def _outputs(self, split: str, size: int, start: int, label: str) -> Iterator[Output]:
        """Runs the model on the batches of a split; in training mode an optimizer step follows each."""
        with closing(self._batches(split, size, start, label)) as batches:
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
        model = self.model if training else self._evaluated
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
        """Without those of `data.auxiliary_labels`, for which a model has no outputs in evaluation mode."""
        if not self.config.data.auxiliary_labels:
            return labels
        return labels[:, 0] if len(self._labels) == 1 else labels[:, : len(self._labels)]

    def _log_window(self, recorder: Recorder | SilentRecorder, speed: float) -> None:
        """Records the mean loss since the last line of the log, and samples a second; reports ids outside of tables."""
        self.check_data(wait=False)
        step, outside = self.progress.step, all_outside_ids(self.model)
        counts = [one.on(self.device).double() for one in outside]
        loss, labels, samples, *counts = self.world.sum(torch.cat([self.window, *counts])).tolist()
        self.window.zero_()
        found = self._outside.describe_new([table for one in outside for table in one.tables], counts)
        if found and self.world.is_first:
            tqdm.write(f"step {step}: ids outside of their tables, which count as missing: {found}")
            sys.stdout.flush()
        loss, mean_label = loss / samples, labels / samples
        self.check_finite(loss)
        metrics = {"loss": loss}
        if [label.task for label in self._labels] == ["binary"]:
            metrics["ne"] = normalized_entropy(loss, mean_label)
        self.loss = loss
        recorder.metrics("train", self.progress.epoch + 1, step, metrics, speed)

    @torch.no_grad()
    def _evaluate(self, split: str, run: RunFolder, stop: StopRequest) -> tuple[dict[str, float], float]:
        """The metrics of a split, and the samples a second."""
        begin = self.clock()
        parts = self.world.gather(self._predict(split, run, stop))
        speed = self.dataset.num_samples(split) / max(self.clock() - begin, 1e-9)
        weights = [one.weight for one in self.config.data.targets()]
        metrics = self.world.on_first(lambda: Predictions.join(parts).metrics(self._labels, weights))
        if split == "validation":
            self._calibration = self.world.on_first(lambda: fit_calibration(Predictions.join(parts), self._labels))
        elif self.world.is_first:
            for line in describe(Predictions.join(parts), self._labels, self.progress.calibration):
                self._say(line)
        if not self.dataset.is_implicit:
            return metrics, speed

        def score(assemble: Callable[[np.ndarray], Batch], items: Iterable[np.ndarray]) -> Iterator[Tensor]:
            with closing(self._load(assemble, items)) as batches:
                for logits, _, _ in self._run(batches):
                    stop.check(run.path, self.world)
                    yield logits

        return metrics | rank_split(self.dataset, split, self.config, score, self.world, self._display), speed

    @torch.no_grad()
    def _predict(self, split: str, run: RunFolder, stop: StopRequest) -> Predictions:
        """The predictions of this process's part of a split."""
        self.model.eval()
        self._evaluated.eval()
        predictions = Predictions()
        with closing(self._outputs(split, self.config.training.eval_batch_size, 0, split)) as outputs:
            for output in outputs:
                predictions.add(*output)
                stop.check(run.path, self.world)
        return predictions.on_cpu()

    def _end_epoch(self, metrics: dict[str, float], speed: float, run: RunFolder, recorder: Recorder) -> None:
        progress = self.progress
        progress.end_epoch(metrics, self.config.monitor, self._calibration)
        recorder.metrics("validation", progress.epoch, progress.step, metrics, speed)
        if self.world.is_first:
            shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            captured = "" if self._captured is None else f"; {self._captured.summary()}"
            tqdm.write(f"epoch {progress.epoch}: validation {shown}; trained {self.speed:,.0f} samples/s{captured}")
            sys.stdout.flush()
        self.save(run, recorder)

    def _batches(self, split: str, size: int, start: int, label: str) -> Iterator[Batch | list[Batch]]:
        parts = self._parts(split, size)

        def assemble(number: int) -> Batch | list[Batch]:
            if len(parts) == 1:
                return parts[0][number]
            # One process leaves out parts without samples; several make as many passes as each other.
            return [one for part in parts if len((one := part[number]).labels) or self.world.launched]

        batches = self._load(assemble, range(start, len(parts[0])))
        done = parts[0].order.samples_before(start) if start else 0
        with self._display(label, self.dataset.num_samples(split), done) as display, closing(batches):
            for batch in batches:
                yield batch
                total = batch[0].total if isinstance(batch, list) else batch.total
                display.update(total, self._details if split == "train" else None)

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
        places = [{"rank": rank + part * ranks, "world_size": count * ranks} for part in range(count)]
        return [self.dataset.batches(split, size, **place, **options) for place in places]

    def _load(
        self, assemble: Callable[[Item], Batch | list[Batch]], items: Iterable[Item]
    ) -> Iterator[Batch | list[Batch]]:
        """Batches that are assembled ahead; on the device but for those that a pipeline or a graph copies there."""
        copies = self.pipeline is None and (self._captured is None or not self.model.training)
        return prefetch(assemble, items, self.device if copies else None, loader_threads(self.device))

    def _display(self, label: str, total: int, done: int) -> Display:
        return Display(label, total, done, clock=self.clock, silent=not self.world.is_first)

    def _details(self) -> dict[str, int | float]:
        """The step, and this process's mean loss since the last line of the log."""
        total, _, samples = self.window.tolist()
        loss = total / samples if samples else self.loss
        return {"step": self.progress.step, "loss": loss}
