"""The training loop: epochs, evaluation, early stopping, checkpoints, the test of the best epoch, plots.

A checkpoint has everything that the next step depends on: parameters, optimizer, random generators, running sums, and
in `Progress` the position in the epoch, the best epoch and the length of metrics.jsonl. Batches are a pure function of
(seed, epoch, number), so a killed run continues with the same bits.

Under torchrun every process runs this loop on its part of each batch, and all make the same decisions: those that
depend on a file, a signal or all predictions are made by one process and broadcast.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import KeyedOptimizerWrapper
from tqdm import tqdm

from jfi.data import Batch, InteractionDataset
from jfi.display import Display
from jfi.training.build import build_model, build_optimizer, draw_tables, table_configs
from jfi.training.checkpoint import (
    DamagedCheckpointError,
    checkpoint_name,
    keep_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from jfi.training.config import Config, ConfigError
from jfi.training.distributed import World
from jfi.training.interrupt import Interrupted, StopRequest, stop_on_signals
from jfi.training.metrics import Predictions, normalized_entropy
from jfi.training.plots import draw_attention, draw_curves
from jfi.training.pretrained import keep_rows, read_pretrained
from jfi.training.progress import Progress, last_progress
from jfi.training.ranking import rank_positives, ranking_metrics
from jfi.training.recorder import Recorder, SilentRecorder, read_metrics
from jfi.training.run_folder import RunFolder
from jfi.training.sharding import check_sharded, shard_model
from jfi.training.warm_start import warm_start

#: Logits, labels and users, [B] each, of a batch or of a rank's part of it.
Output = tuple[Tensor, Tensor, Tensor]


@dataclass
class Result:
    """The result of a run: metrics of the best epoch on both held-out splits, and the time spent in training steps."""

    run_dir: str
    best_epoch: int
    epochs: int
    validation: dict[str, float]
    test: dict[str, float]
    train_seconds: float


class Trainer:
    """The model, the optimizer and the progress of one run.

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
        self.config = config
        self.dataset = dataset
        self.world = world
        self.clock = clock
        self.device = world.device
        self.progress = Progress(world_size=world.size if world.launched else 0)
        torch.manual_seed(config.training.seed)
        model = build_model(config.model, config.encoder, dataset.schema, table_device=torch.device("meta"))
        tables = table_configs(model)
        self.pipeline: TrainPipelineSparseDist | None = None
        if world.launched:
            check_sharded(config, self.device)
            self.model, self.optimizer = shard_model(model, config, world)
            self._reseed()
            if self.device.type == "cuda":
                self.pipeline = self._make_pipeline()
        else:
            for module in (model.embedding_bag_collection, model.embedding_collection):
                if module is not None:
                    module.to_empty(device=self.device)
            self.model = model.to(self.device)
            self.optimizer = build_optimizer(config.optimizer, self.model)
        draw_tables(self.model.state_dict(), tables, config.training.seed)
        if warm is not None:
            copied = warm_start(warm, self.model.state_dict(), tables, dataset.schema)
            rows = ", ".join(f"{table.name} {copied[table.name]}/{table.num_embeddings}" for table in tables.values())
            if world.is_first:
                tqdm.write(f"warm start from {warm}: rows of known ids: {rows}")
        self._tables = {table.name: name for name, table in tables.items()}
        # By table with frozen rows which ones, `[rows]` bool.
        self.frozen: dict[str, Tensor] = {}
        for column, pretrained in config.model.pretrained.items():
            if pretrained.frozen and column in self._tables:
                weight = dict(self.model.named_parameters())[self._tables[column]]
                self.frozen[column] = torch.zeros(len(weight), dtype=torch.bool, device=self.device)
                keep_rows(weight, self.frozen[column])
        self.modules: dict[str, nn.Module] = {"model": self.model}
        if config.optimizer.average is not None:
            average = get_ema_multi_avg_fn(config.optimizer.average)
            self.modules["average"] = AveragedModel(self.model, multi_avg_fn=average)
        # Summed loss, summed label and number of the samples since the last line of the log.
        self.window = torch.zeros(3, dtype=torch.float64, device=self.device)
        # Of the last line of the log, and samples a second of the last epoch, to be shown.
        self.loss = self.speed = math.nan

    def load_pretrained(self) -> None:
        """Fills the tables of a new run with the embeddings of `model.pretrained`.

        Raises:
            ConfigError: a file is missing or malformed, or its column has no table.
        """
        for column, pretrained in self.config.model.pretrained.items():
            width = self.config.model.embedding_dim
            rows, vectors = read_pretrained(column, pretrained, self.dataset.schema, width)
            if column not in self._tables:
                raise ConfigError(f"model.pretrained.{column}: the model has no table of this column")
            weight = dict(self.model.named_parameters())[self._tables[column]]
            with torch.no_grad():
                weight[rows.to(self.device)] = vectors.to(self.device)
            if column in self.frozen:
                self.frozen[column][rows.to(self.device)] = True

    def restore(self, run: RunFolder) -> None:
        """Loads the last complete checkpoint of `run`, if there is one.

        Raises:
            ConfigError: progress.json or the tensors are missing or damaged, metrics.jsonl is shorter than at the
                checkpoint, or only one of this process and the run was started by torchrun.
        """
        path, progress = self.world.on_first(lambda: last_progress(run))
        if path is None:
            return
        if bool(progress.world_size) != self.world.launched:
            how = "with" if progress.world_size else "without"
            raise ConfigError(f"--resume {run.path}: the run was started {how} torchrun; resume it {how} torchrun")
        for _, optimizer in self.optimizer.optimizers:
            if isinstance(optimizer, KeyedOptimizerWrapper):  # the fused optimizer always has its state
                optimizer.init_state()  # a step with zero gradients, which allocates the state
                optimizer.zero_grad(set_to_none=True)
        same_world = progress.world_size == self.progress.world_size
        self.progress = dataclasses.replace(progress, world_size=self.progress.world_size)
        state = self._state()
        if not same_world:
            del state["random"]
        try:
            load_checkpoint(path, state, self.world)
        except DamagedCheckpointError as fault:
            raise ConfigError(f"--resume {run.path}: {fault}; remove that checkpoint to continue without it") from None
        best = run.checkpoints / checkpoint_name(progress.best_epoch, 0)
        if progress.best_epoch and best != path:
            verify_checkpoint(best, self.world)  # now, rather than at the end of the training
        self._load_modules(state)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.world.is_first:
            self.window = state["window"]
        if not same_world:
            self._reseed()
            return
        random = state["random"][str(self.world.rank)]
        torch.set_rng_state(random["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], self.device)

    def fit(self, run: RunFolder) -> Result:
        """Trains to the end, tests the best epoch and draws the plots."""
        progress, world = self.progress, self.world
        # Run the backward on this thread. Waking autograd's thread and waiting for it in every step costs the host more
        # than launching the kernels for short histories.
        with (
            self._recorder(run) as recorder,
            stop_on_signals() as stop,
            torch.autograd.set_multithreading_enabled(False),
            # torch's Adagrad makes a sparse tensor of a sparse gradient. Its indices are valid, so they are not
            # checked; said here, since torch warns where nobody says it.
            torch.sparse.check_sparse_tensor_invariants(enable=False),
        ):
            try:
                while not self._finished():
                    self._train_epoch(run, recorder, stop)
                    self._end_epoch(*self._evaluate("validation", run, stop), run, recorder)
            except Interrupted:
                if progress.step > 0:
                    self._save(run, recorder)
                raise
            best = self._module_state()
            load_checkpoint(run.checkpoints / checkpoint_name(progress.best_epoch, 0), best, world)
            self._load_modules(best)
            test, speed = self._evaluate("test", run, stop)
            recorder.metrics("test", progress.best_epoch, progress.step, test, speed)
        log = world.on_first(lambda: read_metrics(run.metrics))
        world.on_first(lambda: draw_curves(log, self.config.training.monitor, run.curves))
        if self.config.model.pooling == "attention":
            if self.pipeline is not None:
                self.pipeline.detach()
            model = self.model.module if world.launched else self._evaluated
            draw_attention(model, self.dataset, self.device, run.attention if world.is_first else None)
        validation = next(r for r in log if r["split"] == "validation" and r["epoch"] == progress.best_epoch)
        validation = {name: math.nan if validation[name] is None else validation[name] for name in test}
        return Result(str(run.path), progress.best_epoch, progress.epoch, validation, test, progress.train_seconds)

    def _recorder(self, run: RunFolder) -> Recorder | SilentRecorder:
        if not self.world.is_first:
            return SilentRecorder()
        return Recorder(run, self.progress.log_length, self.progress.step)

    def _make_pipeline(self) -> TrainPipelineSparseDist:
        return TrainPipelineSparseDist(self.model, self.optimizer, self.device, custom_model_fwd=self._forward)

    def _reseed(self) -> None:
        """Seeds the random generator of this rank, by the step where it starts."""
        origin = self.config.training.seed, self.world.rank, self.progress.step
        torch.manual_seed(int(np.random.SeedSequence(origin).generate_state(1)[0]))

    def _finished(self) -> bool:
        progress, training = self.progress, self.config.training
        stale = progress.epoch - progress.best_epoch
        return progress.epoch >= training.epochs or (training.patience is not None and stale >= training.patience)

    def _train_epoch(self, run: RunFolder, recorder: Recorder, stop: StopRequest) -> None:
        progress, training = self.progress, self.config.training
        batches = self.dataset.num_batches("train", training.batch_size)
        self.model.train()
        seconds, first = progress.train_seconds, self._samples_done()
        started = logged = self.clock()
        logged_samples = first
        for _ in self._outputs("train", training.batch_size, progress.position, f"epoch {progress.epoch + 1}"):
            if "average" in self.modules:
                self.modules["average"].update_parameters(self.model)
            progress.batch += 1
            progress.step += 1
            now = self.clock()
            progress.train_seconds += now - started
            started = now
            if progress.step % training.log_every == 0 or progress.position == batches:
                self._log_window(recorder, (self._samples_done() - logged_samples) / max(now - logged, 1e-9))
                logged, logged_samples = now, self._samples_done()
            due = training.checkpoint_every and progress.step % training.checkpoint_every == 0
            if due and progress.position < batches:
                self._save(run, recorder)
                saved = self.clock()
                started, logged = saved, logged + saved - started
            stop.check(run.path, self.world)
        self.speed = (self._samples_done() - first) / max(progress.train_seconds - seconds, 1e-9)

    def _samples_done(self) -> int:
        """Samples of the epoch that the steps so far have seen, on all ranks."""
        return min(self.progress.position * self.config.training.batch_size, self.dataset.num_samples("train"))

    def _outputs(self, split: str, size: int, start: int, label: str) -> Iterator[Output]:
        """Runs the model on the batches of a split; in training mode an optimizer step follows each."""
        yield from self._run(self._batches(split, size, start, label))

    def _run(self, batches: Iterator[Batch]) -> Iterator[Output]:
        """Runs the model on batches that are on the device, or pinned for a pipeline."""
        if self.pipeline is not None:
            with suppress(StopIteration):
                while True:
                    yield self.pipeline.progress(batches)
            return
        for batch in batches:
            loss, output = self._forward(batch)
            if self.model.training:
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            yield output

    def _forward(self, batch: Batch) -> tuple[Tensor | None, Output]:
        """The loss in training, else None, and the output. Train pipelines call it as well."""
        training, labels = self.model.training, batch.labels
        model = self.model if training else self._evaluated
        logits = model(batch.dense_features, batch.sparse_features).squeeze(-1)
        output = logits.detach(), labels, batch.users
        if not training:
            return None, output
        size = labels.new_full((), labels.numel())
        if self.world.launched:
            # DDP averages gradients over the ranks, so a rank divides the sum over its samples by batch size / ranks.
            batch_size = self.config.training.batch_size
            rest = self.dataset.num_samples("train") - self.progress.position * batch_size
            mean_part = min(batch_size, rest) / self.world.size
            total = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
            loss = total / mean_part
        else:
            loss = binary_cross_entropy_with_logits(logits, labels)
            total = loss * size
        self.window += torch.stack([total.detach(), labels.sum(), size])
        return loss, output

    def _log_window(self, recorder: Recorder | SilentRecorder, speed: float) -> None:
        """Records the mean loss since the last line of the log, and the samples a second."""
        loss, labels, samples = self.world.sum(self.window).tolist()
        self.window.zero_()
        loss, mean_label = loss / samples, labels / samples
        step = self.progress.step
        self._check_finite(loss)
        metrics = {"loss": loss, "ne": normalized_entropy(loss, mean_label)}
        self.loss = loss
        recorder.metrics("train", self.progress.epoch + 1, step, metrics, speed)

    @torch.no_grad()
    def _evaluate(self, split: str, run: RunFolder, stop: StopRequest) -> tuple[dict[str, float], float]:
        """The metrics of a split, and the samples a second."""
        self.model.eval()
        self._evaluated.eval()
        predictions, begin = Predictions(), self.clock()
        for output in self._outputs(split, self.config.training.eval_batch_size, 0, split):
            predictions.add(*output)
            stop.check(run.path, self.world)
        parts = self.world.gather(predictions.on_cpu())
        speed = self.dataset.num_samples(split) / max(self.clock() - begin, 1e-9)
        metrics = self.world.on_first(lambda: Predictions.join(parts).metrics())
        return metrics | self._rank(split, run, stop), speed

    def _rank(self, split: str, run: RunFolder, stop: StopRequest) -> dict[str, float]:
        """HR@k and NDCG@k of a split, for implicit feedback."""
        training, metrics = self.config.training, {}
        kinds = {"none": [], "sampled": ["sampled"], "full": ["sampled", "full"]}[training.ranking]
        for kind in kinds if self.dataset.is_implicit else []:
            candidates = self.dataset.candidates(
                split, kind, training.ranking_positives, self.config.data.eval_negatives
            )
            total, size = len(candidates.rows) + len(candidates), training.eval_batch_size
            with self._display(f"{split}, ranking ({kind})", total, 0) as display:

                def score(batches: Iterable[Batch], display: Display = display) -> Iterator[Tensor]:
                    for logits, labels, _ in self._run(map(self._ready, batches)):
                        stop.check(run.path, self.world)
                        yield logits
                        display.update(labels.numel() * self.world.size)

                ranks = rank_positives(self.dataset, candidates, size, score, self.world)
            metrics |= ranking_metrics(ranks, training.ranking_k, "_full" if kind == "full" else "")
        return metrics

    def _end_epoch(self, metrics: dict[str, float], speed: float, run: RunFolder, recorder: Recorder) -> None:
        progress, monitor = self.progress, self.config.training.monitor
        progress.epoch, progress.batch, progress.first_batch = progress.epoch + 1, 0, 0
        score = metrics[monitor] if monitor == "auc" else -metrics[monitor]
        if progress.epoch == 1 or score > progress.best:
            progress.best, progress.best_epoch = score, progress.epoch
        recorder.metrics("validation", progress.epoch, progress.step, metrics, speed)
        if self.world.is_first:
            shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            tqdm.write(f"epoch {progress.epoch}: validation {shown}; trained {self.speed:,.0f} samples/s")
            sys.stdout.flush()
        self._save(run, recorder)

    def _batches(self, split: str, size: int, start: int, label: str) -> Iterator[Batch]:
        order = {"rank": self.world.rank, "world_size": self.world.size}
        if split == "train":  # held-out splits have the same order and the same sampled negatives in every run
            order |= {"shuffle": True, "seed": self.config.training.seed, "epoch": self.progress.epoch}
        batches = self.dataset.batches(split, size, start_batch=start, **order)
        with self._display(label, self.dataset.num_samples(split), start * size) as display:
            for batch in batches:
                yield self._ready(batch)
                display.update(batch.labels.numel() * self.world.size, self._details if split == "train" else None)

    def _display(self, label: str, total: int, done: int) -> Display:
        return Display(label, total, done, clock=self.clock, silent=not self.world.is_first)

    def _ready(self, batch: Batch) -> Batch:
        # A pipeline copies batches to the device itself, concurrently if the memory is pinned.
        return batch.pin_memory() if self.pipeline is not None else batch.to(self.device, non_blocking=True)

    def _details(self) -> dict[str, int | float]:
        """The step, and this process's mean loss since the last line of the log."""
        total, _, samples = self.window.tolist()
        loss = total / samples if samples else self.loss
        return {"step": self.progress.step, "loss": loss}

    @property
    def _evaluated(self) -> nn.Module:
        return self.modules["average"].module if "average" in self.modules else self.model

    def _module_state(self) -> dict:
        return {name: module.state_dict() for name, module in self.modules.items()}

    def _load_modules(self, state: dict) -> None:
        for name, module in self.modules.items():
            module.load_state_dict(state[name])

    def _state(self) -> dict:
        random = {"cpu": torch.get_rng_state()}  # of this rank; other tensors are shards or equal on all ranks
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            **self._module_state(),
            "optimizer": self.optimizer.state_dict(),
            "random": {str(self.world.rank): random},
            "window": self.world.sum(self.window),
            **({"frozen": self.frozen} if self.frozen else {}),
        }

    def _check_finite(self, loss: float, fault: str = "") -> None:
        """Raises FloatingPointError if training has diverged."""
        if fault or not math.isfinite(loss):
            raise FloatingPointError(
                f"{fault or f'the loss is {loss}'} at step {self.progress.step}; lower the learning rates "
                "(optimizer.*.learning_rate)"
            )

    def _save(self, run: RunFolder, recorder: Recorder) -> None:
        progress, state = self.progress, self._state()
        self._check_finite(state["window"][0].item())
        progress.log_length, progress.log_sha256 = recorder.length(), recorder.sha256()
        progress.config = asdict(self.config)
        name = checkpoint_name(progress.epoch, progress.batch)
        try:
            save_checkpoint(run.checkpoints, name, state, asdict(progress), self.world)
        except FloatingPointError as fault:  # the last step's update, which no loss has shown yet
            self._check_finite(math.nan, str(fault))
        best = checkpoint_name(progress.best_epoch, 0)
        self.world.on_first(lambda: keep_checkpoints(run.checkpoints, {name, best}))
