"""The training loop: epochs, evaluation, early stopping, checkpoints, the test of the best parameters, plots.

`jfi.training.loop.steps` runs the model on batches, and `jfi.training.run.state` has what the next step depends on, and
its checkpoints.

Under torchrun every process runs this loop on its part of each batch, and all make the same decisions: those that
depend on a file, a signal or all predictions are made by one process and broadcast.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext

import numpy as np
import torch
from torch import Tensor

from jfi.data import Batch
from jfi.tables.id_counts import all_outside_ids
from jfi.training.distributed.processes import Interrupted, stop_on_signals
from jfi.training.loop.steps import Steps
from jfi.training.metrics.calibration import describe, fit_calibration
from jfi.training.metrics.label_metrics import Result, normalized_entropy
from jfi.training.metrics.ranking import rank_split
from jfi.training.metrics.unknown_values import OutsideCounts
from jfi.training.run.recorder import Logger, Recorder, Tracker, describe_earlier, read_metrics
from jfi.training.run.run_data import name_data
from jfi.training.run.run_folder import RunFolder


class Trainer(Steps):
    """The state of a run and the loop that goes on from it; its arguments are those of `Steps`."""

    def fit(self, run: RunFolder, logger: Logger | None = None) -> Result:
        """Trains to the end, tests the best parameters and draws the plots; `logger` is as of `jfi.training.train`."""
        # Imported now, since only pictures need matplotlib and a missing package should fail before the training.
        from jfi.training.run.plots import draw_attention, draw_curves

        progress, world, training = self.progress, self.world, self.config.training
        #: Counts ids outside of tables, and samples a second since the last evaluation, to be shown.
        self._outside, self._speed = OutsideCounts(), math.nan
        data = world.on_first(lambda: name_data(run))
        log = world.on_first(lambda: read_metrics(run.metrics, progress.log_length))
        if progress.epoch < training.epochs:
            world.say(progress.forget_best(log, data, self.config))
        if finished := progress.finished(training):
            world.say(f"nothing to train: {finished} in {run.config} and use --config-changed accept")
        else:
            world.say(describe_earlier(log, data))
            if self.dataset.policy is not None and world.is_first:
                share = self.dataset.removed_share(self.config.training.batch_size)
                world.say(f"data.policy removes {share:.1%} of the events of the histories in a batch")
            if world.size > 1 and world.is_first:
                busiest = self._parts("train", training.batch_size)[0].order.imbalance(world.size)
                world.say(
                    f"the busiest of {world.size} processes has {busiest:.3f} times the mean work (events x targets)"
                )
            world.say(self.capture_steps())
        # Run the backward on this thread. Waking autograd's thread and waiting for it in every step costs the host more
        # than launching the kernels for short histories.
        with (
            self._record(run, data, logger) as recorder,
            stop_on_signals(run.path, world) as check,
            torch.autograd.set_multithreading_enabled(False),
        ):
            try:
                if self.warm and progress.step == 0:
                    start = {split: self._evaluate(split, check) for split in ("validation", "test")}
                    progress.start = {split: metrics for split, (metrics, _) in start.items()}
                    if recorder is not None:
                        recorder.metrics("validation", 0, 0, *start["validation"])
                while not progress.finished(training):
                    epoch = self._train(run, recorder, check)
                    self._end_evaluation(epoch, *self._evaluate("validation", check), run, recorder, check)
            except Interrupted:
                if progress.step > 0:
                    self.save(run, recorder)
                raise
            finally:
                if self._captured is not None:
                    self._captured.reset()  # NCCL would wait at its end for graphs of its collectives
            self.load_best(run, check)
            test, speed = self._evaluate("test", check)
            if recorder is not None:
                recorder.metrics("test", progress.best_epoch, progress.step, test, speed)
        log = world.on_first(lambda: read_metrics(run.metrics))
        world.say(describe_earlier(log, data))
        world.on_first(lambda: draw_curves(log, self.config.monitor, run.curves))
        if self.config.model.pooling == "attention":
            if self.pipeline is not None:
                self.pipeline.detach()
            model = self.model.module if world.launched else self.evaluated
            world.say(draw_attention(model, self.dataset, self.device, run.attention if world.is_first else None))
        validation = next(r for r in log if r["split"] == "validation" and r["step"] == progress.best_step)
        validation = {name: math.nan if validation[name] is None else validation[name] for name in test}
        doubts = progress.warn_of_best_epoch(validation, self.config.monitor, self.dataset.is_implicit)
        world.say(*doubts, *progress.warn_of_opposite_metrics(log, data, self.config.monitor))
        best = progress.best_epoch, progress.evaluated_epoch
        return Result(str(run.path), *best, validation, test, progress.train_seconds, progress.start)

    def _record(self, run: RunFolder, data: str, logger: Logger | None) -> AbstractContextManager[Recorder | None]:
        """Opens what records the metrics, in the process that writes."""
        if not self.world.is_first:
            return nullcontext()
        tracker = Tracker(self.config.training, self.config.as_dict(), logger)
        return Recorder(run, self.progress.log_length, self.progress.step, data, tracker)

    def _train(self, run: RunFolder, recorder: Recorder | None, check: Callable[[], None]) -> float:
        """Trains up to the next evaluation, and returns the number of epochs trained so far, such as 1.25."""
        progress, training = self.progress, self.config.training
        order = self._parts("train", training.batch_size)[0].order
        # The end of the run, as if all epochs to come had as many batches as this one: by user some have one fewer.
        self._num_steps = progress.step - progress.position + (training.epochs - progress.epoch) * order.num_batches
        end = progress.next_evaluation(training.eval_every, order.num_batches)
        seconds, first = progress.train_seconds, order.samples_before(progress.position)
        started = logged = self.clock()
        logged_samples = done = first
        label = f"epoch {progress.epoch + 1}"
        with closing(self._steps("train", label, progress.position, end)) as steps:
            for _ in steps:
                if progress.step % self.config.sharding.average_every == 0 or progress.position == end:
                    self.groups.average(progress.step)
                done = order.samples_before(progress.position)
                now = self.clock()
                progress.train_seconds += now - started
                started = now
                if progress.step % training.log_every == 0 or progress.position == order.num_batches:
                    self._log_window(recorder, (done - logged_samples) / max(now - logged, 1e-9))
                    logged, logged_samples = now, done
                due = training.checkpoint_every and progress.step % training.checkpoint_every == 0
                if due and progress.position < end:
                    self.save(run, recorder, check)
                    saved = self.clock()
                    started, logged = saved, logged + saved - started
                check()
        self.admit()
        self._flush_average()
        self._speed = (done - first) / max(progress.train_seconds - seconds, 1e-9)
        return progress.epochs_at(end, order.num_batches)

    def _log_window(self, recorder: Recorder | None, speed: float) -> None:
        """Records the mean loss since the last line of the log, and samples a second; reports ids outside of tables."""
        self.check_data()
        step, outside = self.progress.step, all_outside_ids(self.model)
        counts = [one.on(self.device).double() for one in outside]
        loss, labels, samples, *counts = self.world.sum(torch.cat([self.window, *counts])).tolist()
        self.window.zero_()
        found = self._outside.describe_new([table for one in outside for table in one.tables], counts)
        if found:
            self.world.say(f"step {step}: ids outside of their tables, which count as missing: {found}")
        loss, mean_label = loss / samples, labels / samples
        self.check_finite(loss)
        metrics = {"loss": loss}
        if [label.task for label in self._labels] == ["binary"]:
            metrics["ne"] = normalized_entropy(loss, mean_label)
        self.loss = loss
        if recorder is not None:
            recorder.metrics("train", self.progress.epoch + 1, step, metrics, speed)

    @torch.no_grad()
    def _evaluate(self, split: str, check: Callable[[], None]) -> tuple[dict[str, float], float]:
        """The metrics of a split, and the samples a second."""
        begin = self.clock()
        predictions = self._predict(split, check)
        speed = self.dataset.num_samples(split) / max(self.clock() - begin, 1e-9)
        weights = [one.weight for one in self.config.data.targets()]
        metrics = self.world.on_first(lambda: predictions.metrics(self._labels, weights))
        if split == "validation":
            self._calibration = self.world.on_first(lambda: fit_calibration(predictions, self._labels))
        elif self.world.is_first:
            self.world.say(*describe(predictions, self._labels, self.progress.calibration))
        if not self.dataset.is_implicit:
            return metrics, speed

        def score(assemble: Callable[[np.ndarray], Batch], items: Iterable[np.ndarray]) -> Iterator[Tensor]:
            with closing(self._load(assemble, items)) as batches:
                for logits, _, _ in self._run(batches):
                    check()
                    yield logits

        return metrics | rank_split(self.dataset, split, self.config, score, self.world, self._display), speed

    def _end_evaluation(
        self,
        epoch: float,
        metrics: dict[str, float],
        speed: float,
        run: RunFolder,
        recorder: Recorder | None,
        check: Callable[[], None],
    ) -> None:
        progress = self.progress
        progress.end_evaluation(epoch, metrics, self.config.monitor, self._calibration)
        if recorder is not None:
            recorder.metrics("validation", epoch, progress.step, metrics, speed)
            shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            trained = f"; trained {self._speed:,.0f} samples/s" if self._speed else ""
            captured = "" if self._captured is None else f"; {self._captured.summary()}"
            self.world.say(f"epoch {epoch:.4g}: validation {shown}{trained}{captured}")
        self.save(run, recorder, check)
