"""Training by user beside training by sample, from the table to the optimizer, and jagged attention by time.

The rows of a training case are ways of making batches: `batching` and a number of samples. All train the same model on
the same dataset, in turn, with the steps of `jfi.training`: batches assembled by the dataset, copied to the device,
forward, loss, backward, both optimizers. At the end both ways must give the same predictions of the validation split.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks import measure, timeline_attention
from benchmarks.run import CPU_TOLERANCE, TOLERANCE, Case, summary
from benchmarks.timeline_tables import GPU_TABLE, MOVIELENS_SIZE, movielens_config, write_table
from jfi.data import Batch, load_dataset
from jfi.data.config import Batching
from jfi.training import Config, ModelConfig, OptimizerConfig
from jfi.training.distributed.processes import World
from jfi.training.loop.trainer import Trainer

T = TypeVar("T")
WARM_UP = 3  # steps
REPEATS, QUICK_REPEATS = 5, 2
HELD = 2  # batches that are on the device already, for the step without data loading


@dataclass(frozen=True)
class Way:
    """How batches are made, and the steps of a repeat."""

    batching: Batching
    batch_size: int
    steps: int

    @property
    def name(self) -> str:
        return f"by {self.batching}, {self.batch_size:,}"


CPU_WAYS = (Way("sample", 1024, 4), Way("user", 1024, 8), Way("user", 4096, 4), Way("user", 8192, 2))
GPU_WAYS = (
    Way("sample", 1024, 60),
    Way("sample", 8192, 40),
    Way("user", 4096, 100),
    Way("user", 16384, 60),
    Way("user", 65536, 40),
)


@dataclass(frozen=True)
class TrainingCase:
    """A table and a model, and the ways to train it.

    Args:
        title: of the table.
        config: makes the config; it is given an empty folder for a table of its own.
        max_history: replaces that of the config.
        ways: by sample and by user.
        repeats: of each way's steps.
    """

    title: str
    config: Callable[[Path], Config]
    max_history: int
    ways: Sequence[Way]
    repeats: int = REPEATS

    @property
    def name(self) -> str:
        return f"{self.title}, max_history {self.max_history:,}"


class StepTrainer(Trainer):
    """A Trainer that is given its batches, and keeps no files."""

    def train_on(self, batches: Iterator[Batch]) -> None:
        """A step for each batch, which is on the device, as in an epoch."""
        self.model.train()
        for _ in self._run(batches):
            if "average" in self.modules:
                self.modules["average"].update()

    def load(self, assemble: Callable[[T], Batch], items: Iterable[T]) -> Iterator[Batch]:
        """Batches on the device, assembled ahead as in an epoch."""
        return self._load(assemble, items)

    @torch.no_grad()
    def predictions(self, batching: Batching, batch_size: int) -> Tensor:
        """`[N]`: the logits of the validation split, by the places of the samples."""
        if "average" in self.modules:
            self.modules["average"].flush()
        self.evaluated.eval()
        out = torch.full((self.dataset.num_samples("validation"),), torch.nan)
        for batch in self.dataset.batches("validation", batch_size, batching=batching):
            ready = batch.to(self.device)
            logits = self.evaluated(ready.dense_features, ready.sparse_features, ready.timelines)
            out[batch.samples] = logits.squeeze(-1).cpu()
        return out


@dataclass
class Counts:
    """Sums over the batches of a repeat."""

    samples: int = 0
    loading_seconds: float = 0.0
    events: int = 0
    ids: int = 0
    copied_bytes: int = 0


def batch_bytes(batch: Batch) -> int:
    """What a copy of a batch to the device moves."""
    tensors = [batch.dense_features, batch.labels, batch.users, batch.samples]
    tensors += [batch.sparse_features.values(), batch.sparse_features.lengths()]
    if batch.timelines is not None:
        tensors += [batch.timelines.row_offsets, batch.timelines.target_times, batch.timelines.event_times]
    return sum(x.nbytes for x in tensors)


@dataclass
class Run:
    """One way of training: its stream of batches, which begins an epoch after another, and what was measured."""

    way: Way
    trainer: StepTrainer
    gpu: bool
    seconds: list[float] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    peak_mb: float | None = None

    def __post_init__(self) -> None:
        # The keys whose ids index a table; "bucket" is the age.
        features = self.trainer.dataset.features
        self._embedded = [spec.role != "bucket" for spec in features]
        self._history = [spec.role == "history" for spec in features].index(True)

    def _numbered(self) -> Iterator[tuple[Callable[[int], Batch], int]]:
        """The batches of an epoch after another, each as the function that assembles it and its argument."""
        for epoch in itertools.count():
            options = {"shuffle": True, "epoch": epoch, "batching": self.way.batching}
            options["pin_memory"] = self.trainer.device.type == "cuda"
            batches = self.trainer.dataset.batches("train", self.way.batch_size, **options)
            yield from ((batches.__getitem__, number) for number in range(len(batches)))

    def batches(self) -> closing:
        """Batches from the first epoch on that are assembled ahead, to be closed."""
        return closing(self.trainer.load(lambda one: one[0](one[1]), self._numbered()))

    def counted(self, batches: Iterator[Batch], steps: int, counts: Counts) -> Iterator[Batch]:
        """The next batches; adds the time in which a step waits for them."""
        for _ in range(steps):
            start = time.perf_counter()
            batch = next(batches)
            counts.loading_seconds += time.perf_counter() - start
            per_key = batch.sparse_features.length_per_key()
            counts.samples += len(batch.labels)
            counts.events += per_key[self._history]
            counts.ids += sum(itertools.compress(per_key, self._embedded))
            counts.copied_bytes += batch_bytes(batch)
            yield batch

    def warm_up(self) -> None:
        with self.batches() as batches:
            self.trainer.train_on(itertools.islice(batches, WARM_UP))

    def repeat(self) -> None:
        """Measures the steps of a repeat, after some that fill the queue of batches."""
        for parameter in self.trainer.model.parameters():
            parameter.grad = None  # of another way
        counts = Counts()
        with self.batches() as batches:
            self.trainer.train_on(itertools.islice(batches, WARM_UP))
            if self.gpu:
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            self.trainer.train_on(self.counted(batches, self.way.steps, counts))
            if self.gpu:
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - start)
        self.counts.append(counts)
        if self.gpu:
            self.peak_mb = max(self.peak_mb or 0.0, (torch.cuda.max_memory_allocated() - before) / 1e6)

    def step_us(self, seconds: float) -> float:
        """Median time of a step whose batch is on the device."""
        with self.batches() as batches:
            held = list(itertools.islice(batches, HELD))
        return measure.eager_us([lambda one=one: self.trainer.train_on(iter([one])) for one in held], seconds)

    def figures(self) -> dict[str, object]:
        """The row's columns: speeds of the repeats, and what all of them together took."""
        rates = [counts.samples / seconds for counts, seconds in zip(self.counts, self.seconds, strict=True)]
        total = Counts(*(sum(column) for column in zip(*map(astuple, self.counts), strict=True)))
        return {
            "samples_per_second": statistics.median(rates),
            "samples_per_second_least": min(rates),
            "samples_per_second_most": max(rates),
            "loading_share": total.loading_seconds / sum(self.seconds),
            "events_per_sample": total.events / total.samples,
            "ids_per_sample": total.ids / total.samples,
            "copied_bytes_per_sample": total.copied_bytes / total.samples,
            "peak_mb": self.peak_mb,
        }


def disagreement(trainer: StepTrainer, ways: Sequence[Way]) -> float:
    """Relative error of the predictions by user against those by sample, of their deviations from the mean.

    Without TF32, whose rounding depends on the shape of a product.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    smallest = {way.batching: way.batch_size for way in sorted(ways, key=lambda way: -way.batch_size)}
    try:
        by_sample, by_user = (trainer.predictions(way, smallest[way]).double() for way in ("sample", "user"))
    finally:
        torch.set_float32_matmul_precision(precision)
    return float((by_user - by_sample).norm() / (by_sample - by_sample.mean()).norm())


def config_of(case: TrainingCase, folder: Path) -> Config:
    config = case.config(folder)
    return replace(config, data=replace(config.data, max_history=case.max_history))


def run(case: TrainingCase, device: torch.device, seconds: float) -> Iterator[dict]:
    """A row for each way, with its speed over that of the fastest by sample."""
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    with (
        tempfile.TemporaryDirectory() as folder,
        # As `jfi.training` trains.
        torch.autograd.set_multithreading_enabled(False),
        torch.sparse.check_sparse_tensor_invariants(enable=False),
    ):
        config = config_of(case, Path(folder))
        dataset = load_dataset(config.data)
        trainer = StepTrainer(config, dataset, World(device))
        columns = {"max_history": case.max_history, "D": config.model.embedding_dim, "H": config.model.num_heads}
        columns |= {"training_samples": dataset.num_samples("train"), "repeats": case.repeats}
        rows, runs = {}, {}
        for way in case.ways:
            rows[way] = {"case": case.name, "implementation": way.name, "ours": way.batching == "user"}
            rows[way] |= {"headline": True, "batching": way.batching, "batch_size": way.batch_size, **columns}
            runs[way] = Run(way, trainer, device.type == "cuda")
        _measure(runs, rows, case.repeats, seconds)
        measured = [way for way in case.ways if rows[way]["status"] == "ok"]
        _check(rows, measured, trainer)
    by_sample = [row for row in rows.values() if row["batching"] == "sample" and row["status"] == "ok"]
    for row in rows.values():
        if by_sample and row["status"] == "ok":
            row["speed_over_sample"] = row["samples_per_second"] / max(x["samples_per_second"] for x in by_sample)
        yield row


def _measure(runs: dict[Way, Run], rows: dict[Way, dict], repeats: int, seconds: float) -> None:
    """Fills the rows; the ways take turns, so that busy spells of the machine hit them alike."""
    for round_ in range(repeats + 2):
        for way, one in runs.items():
            if rows[way].get("status") == "failed":
                continue
            try:
                if round_ == 0:
                    one.warm_up()
                elif round_ <= repeats:
                    one.repeat()
                else:
                    rows[way] |= {"status": "ok", **one.figures()}
                    if one.gpu:
                        rows[way]["step_us"] = one.step_us(seconds)
            except Exception as error:
                rows[way] |= {"status": "failed", "note": summary(error)}


def _check(rows: dict[Way, dict], measured: list[Way], trainer: StepTrainer) -> None:
    """Takes back the speed of ways that do not predict the same; one way alone has none to compare with."""
    if {way.batching for way in measured} != {"sample", "user"}:
        return
    error = disagreement(trainer, measured)
    tolerance = CPU_TOLERANCE if trainer.device.type == "cpu" else TOLERANCE["float32"]
    for way in measured:
        rows[way]["error"] = error
        if not error <= tolerance:
            rows[way] |= {"status": "wrong", "note": f"predictions by user and by sample differ by {error:.1e}"}
            for name in ("samples_per_second", "samples_per_second_least", "samples_per_second_most", "step_us"):
                rows[way].pop(name, None)


def gpu_config(folder: Path) -> Config:
    model = ModelConfig(embedding_dim=64, num_heads=4, bias="history_age", cross_layers=0, dropout=0.0)
    return Config(write_table(GPU_TABLE, folder), model, optimizer=OptimizerConfig(ema_decay=None))


def cases(quick: bool, movielens: Path | None = None) -> list[TrainingCase | Case]:
    """With a GPU its table and jagged attention by time, else MovieLens-100K, or a table of its size.

    Args:
        quick: fewer repeats.
        movielens: folder of ml-100k.inter and ml-100k.item; None for the synthetic table.
    """
    repeats = QUICK_REPEATS if quick else REPEATS
    if torch.cuda.is_available():
        training = TrainingCase(GPU_TABLE.name, gpu_config, GPU_TABLE.mean_length, GPU_WAYS, repeats)
        return [training, *timeline_attention.cases(quick)]

    def config(folder: Path) -> Config:
        return movielens_config(folder, movielens)

    title = MOVIELENS_SIZE.name if movielens is None else "MovieLens-100K"
    return [TrainingCase(title, config, longest, CPU_WAYS, repeats) for longest in (200, 1000)]
