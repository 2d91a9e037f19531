"""The training loop: epochs, evaluation, early stopping, checkpoints, the test with the best epoch, pictures.

Everything the next step depends on is in a checkpoint: parameters, optimiser, random generators, the running sums, and
in `Progress` the place in the epoch, the best epoch and the length of metrics.jsonl. Batches are a pure function of
(seed, epoch, number), so a run that was killed continues to the same bits.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from jfi.data import Batch, InteractionDataset, load_dataset
from jfi.training.build import build_model, build_optimizer
from jfi.training.checkpoint import (
    DamagedCheckpointError,
    checkpoint_name,
    keep_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    read_progress,
    save_checkpoint,
)
from jfi.training.config import Config, ConfigError
from jfi.training.interrupt import Interrupted, StopRequest, stop_on_signals
from jfi.training.metrics import Predictions, normalized_entropy
from jfi.training.pictures import draw_attention, draw_curves
from jfi.training.run import Recorder, RunFolder, check_new, read_metrics


@dataclass
class Progress:
    """Where a run stands: `epoch` epochs are done and `batch` batches of the next one."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    best_epoch: int = 0
    best: float = -math.inf
    log_length: int = 0
    train_seconds: float = 0.0


@dataclass
class Result:
    """What a run ends with: metrics of the best epoch on both held-out parts, and the time spent in training steps."""

    run_dir: str
    best_epoch: int
    epochs: int
    validation: dict[str, float]
    test: dict[str, float]
    train_seconds: float


def train(config: Config, dataset: InteractionDataset | None = None) -> Result:
    """Trains a new run in `config.training.run_dir`.

    Args:
        config: the whole configuration.
        dataset: of `config.data`, where the caller has loaded it already.

    Raises:
        ConfigError, DataError: faults of the configuration or the data; nothing has been written then.
        FloatingPointError: the loss is no longer a number.
        Interrupted: SIGINT or SIGTERM; the state is saved.
    """
    if config.training.run_dir is not None:
        check_new(Path(config.training.run_dir))
    trainer = Trainer(config, load_dataset(config.data) if dataset is None else dataset)
    return trainer.run(RunFolder.create(config))


def resume(run_dir: str | Path) -> Result:
    """Continues the run in `run_dir` from its last whole checkpoint, or from the start where there is none.

    Raises:
        As `train`; ConfigError also where the folder is no run, or a damaged one.
    """
    run, config = RunFolder.open(run_dir)
    trainer = Trainer(config, load_dataset(config.data))
    trainer.restore(run)
    return trainer.run(run)


class Trainer:
    """Model, optimiser and progress of one run."""

    def __init__(self, config: Config, dataset: InteractionDataset):
        self.config = config
        self.dataset = dataset
        self.device = _device(config.training.device)
        torch.manual_seed(config.training.seed)
        self.model = build_model(config.model, config.encoder, dataset).to(self.device)
        self.optimizer = build_optimizer(config.optimizer, self.model)
        self.modules: dict[str, nn.Module] = {"model": self.model}
        if config.optimizer.average is not None:
            average = get_ema_multi_avg_fn(config.optimizer.average)
            self.modules["average"] = AveragedModel(self.model, multi_avg_fn=average)
        self.progress = Progress()
        # Of the samples since the last line of the log: summed loss, summed label, number.
        self.window = torch.zeros(3, dtype=torch.float64, device=self.device)

    def restore(self, run: RunFolder) -> None:
        """Takes up the last whole checkpoint of `run`, if there is one.

        Raises:
            ConfigError: its progress.json or tensors are missing or damaged, or metrics.jsonl is shorter than it says.
        """
        path = latest_checkpoint(run.checkpoints)
        if path is None:
            return
        try:
            self.progress = Progress(**read_progress(path))
        except (OSError, TypeError, ValueError):
            fault = f"{path / 'progress.json'} is missing or damaged; remove that checkpoint to continue without it"
            raise ConfigError(f"--resume {run.path}: {fault}") from None
        run.check_metrics(self.progress.log_length)
        self.optimizer.init_state()  # a step with zero gradients, so that there is state to load into
        state = self._state()
        try:
            load_checkpoint(path, state)
        except DamagedCheckpointError as fault:
            raise ConfigError(f"--resume {run.path}: {fault}; remove that checkpoint to continue without it") from fault
        self._load_modules(state)
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"]["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)

    def run(self, run: RunFolder) -> Result:
        """Trains to the end, tests the best epoch and draws the pictures."""
        progress = self.progress
        with Recorder(run, progress.log_length, progress.step) as recorder, stop_on_signals() as stop:
            try:
                while not self._finished():
                    self._train_epoch(run, recorder, stop)
                    self._end_epoch(self._evaluate("validation", run, stop), run, recorder)
            except Interrupted:
                if progress.step > 0:
                    self._save(run, recorder)
                raise
            best = self._module_state()
            load_checkpoint(run.checkpoints / checkpoint_name(progress.best_epoch, 0), best)
            self._load_modules(best)
            test = self._evaluate("test", run, stop)
            recorder.metrics("test", progress.best_epoch, progress.step, test)
        log = read_metrics(run.metrics)
        draw_curves(log, self.config.training.monitor, run.curves)
        if self.config.model.pooling == "attention":
            draw_attention(self._evaluated, self.dataset, self.device, run.attention)
        validation = next(r for r in log if r["split"] == "validation" and r["epoch"] == progress.best_epoch)
        validation = {name: math.nan if validation[name] is None else validation[name] for name in test}
        return Result(str(run.path), progress.best_epoch, progress.epoch, validation, test, progress.train_seconds)

    def _finished(self) -> bool:
        progress, training = self.progress, self.config.training
        stale = progress.epoch - progress.best_epoch
        return progress.epoch >= training.epochs or (training.patience is not None and stale >= training.patience)

    def _train_epoch(self, run: RunFolder, recorder: Recorder, stop: StopRequest) -> None:
        progress, training = self.progress, self.config.training
        batches = self.dataset.num_batches("train", training.batch_size)
        self.model.train()
        started = logged = time.perf_counter()
        for batch in self._batches("train", training.batch_size, progress.batch, f"epoch {progress.epoch + 1}"):
            logits = self.model(batch)
            loss = binary_cross_entropy_with_logits(logits, batch.labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if "average" in self.modules:
                self.modules["average"].update_parameters(self.model)

            size = batch.labels.new_full((), batch.labels.numel())
            self.window += torch.stack([loss.detach() * size, batch.labels.sum(), size])
            progress.batch += 1
            progress.step += 1
            now = time.perf_counter()
            progress.train_seconds += now - started
            started = now
            if progress.step % training.log_every == 0 or progress.batch == batches:
                samples = self._log_window(recorder)
                recorder.speed(samples / (now - logged), progress.step)
                logged = now
            due = training.checkpoint_every and progress.step % training.checkpoint_every == 0
            if due and progress.batch < batches:
                self._save(run, recorder)
                started = time.perf_counter()
            stop.check(run.path)

    def _log_window(self, recorder: Recorder) -> float:
        loss, labels, samples = self.window.tolist()
        self.window.zero_()
        loss, mean_label = loss / samples, labels / samples
        step = self.progress.step
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {step}; lower optimizer.*.learning_rate")
        metrics = {"loss": loss, "ne": normalized_entropy(loss, mean_label)}
        recorder.metrics("train", self.progress.epoch + 1, step, metrics)
        return samples

    @torch.no_grad()
    def _evaluate(self, split: str, run: RunFolder, stop: StopRequest) -> dict[str, float]:
        model = self._evaluated.eval()
        predictions = Predictions()
        for batch in self._batches(split, self.config.training.eval_batch_size, 0, split):
            predictions.add(model(batch), batch.labels, batch.users)
            stop.check(run.path)
        return predictions.metrics()

    def _end_epoch(self, metrics: dict[str, float], run: RunFolder, recorder: Recorder) -> None:
        progress, monitor = self.progress, self.config.training.monitor
        progress.epoch, progress.batch = progress.epoch + 1, 0
        score = metrics[monitor] if monitor == "auc" else -metrics[monitor]
        if progress.epoch == 1 or score > progress.best:
            progress.best, progress.best_epoch = score, progress.epoch
        recorder.metrics("validation", progress.epoch, progress.step, metrics)
        tqdm.write(f"epoch {progress.epoch}: validation " + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items()))
        self._save(run, recorder)

    def _batches(self, split: str, size: int, start: int, label: str) -> Iterator[Batch]:
        order = {}
        if split == "train":  # the held-out parts have the same order and the same sampled negatives in every run
            order = {"shuffle": True, "seed": self.config.training.seed, "epoch": self.progress.epoch}
        batches = self.dataset.batches(split, size, start_batch=start, **order)
        samples = self.dataset.num_samples(split)
        # No bar where nobody watches: disable=None looks whether stderr is a terminal.
        with tqdm(
            total=samples, initial=start * size, desc=label, unit=" samples", unit_scale=True, disable=None, leave=False
        ) as bar:
            for batch in batches:
                yield batch.to(self.device, non_blocking=True)
                bar.update(batch.labels.numel())

    @property
    def _evaluated(self) -> nn.Module:
        return self.modules["average"].module if "average" in self.modules else self.model

    def _module_state(self) -> dict:
        return {name: module.state_dict() for name, module in self.modules.items()}

    def _load_modules(self, state: dict) -> None:
        for name, module in self.modules.items():
            module.load_state_dict(state[name])

    def _state(self) -> dict:
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            **self._module_state(),
            "optimizer": self.optimizer.state_dict(),
            "random": random,
            "window": self.window,
        }

    def _save(self, run: RunFolder, recorder: Recorder) -> None:
        progress = self.progress
        progress.log_length = recorder.length()
        name = checkpoint_name(progress.epoch, progress.batch)
        save_checkpoint(run.checkpoints, name, self._state(), asdict(progress))
        keep_checkpoints(run.checkpoints, {name, checkpoint_name(progress.best_epoch, 0)})


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("training.device: got 'cuda', must be 'cpu' or 'auto' where there is no GPU")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
