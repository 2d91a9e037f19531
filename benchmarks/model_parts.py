"""A training step of `jfi.training` with each optional part of the model: what the part costs, and attention's share.

The parts are those of docs/quality.md; each is added to the row before, but for the statistics, which stand beside the
cross network.  All have the same rows of a synthetic table, sampled one target at a time.  On a GPU steps are captured
and the time is the wall time of steps that follow each other, copies of the batch included; the kernels are those of
a replay.  On a CPU the parts take turns, step by step, the time is the least CPU time of the process, and attention's
share is left out, since a profile there has wall time.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from benchmarks import measure
from benchmarks.quality.models import OURS
from benchmarks.synthetic_data import synthetic_config
from benchmarks.timeline import StepTrainer
from benchmarks.training_step import HEAVIEST, profiled_kernels, release
from jfi import CapturedStep
from jfi.data import Batch, load_dataset
from jfi.training import Config, ModelConfig, OptimizerConfig, OptimizerGroup
from jfi.training.distributed.processes import World
from jfi.training.loop.captured_steps import capture

HELD = 4  # batches, whose steps rotate
LEAST_STEPS = 3 * HELD
#: Of `benchmarks.quality.models.OURS`.
PARTS = (
    "no history",
    "mean pooling",
    "target attention",
    "+ heads by position",
    "+ cross network",
    "+ statistics",
)
#: What every part is compared with.
REFERENCE = "target attention"


@dataclass(frozen=True)
class PartsCase:
    """The table and the batches.

    Args:
        batch_size: samples.
        max_history: `data.max_history`.
        width: `model.embedding_dim`, with 4 heads.
        table: arguments of the synthetic table.
    """

    batch_size: int
    max_history: int
    width: int
    table: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"B={self.batch_size:,} D={self.width} H=4, histories of at most {self.max_history}"


def cases(quick: bool) -> list[PartsCase]:
    if quick:
        return [PartsCase(256, 50, 32, dict(num_users=100, num_items=500, mean_length=80.0))]
    if torch.cuda.is_available():
        return [PartsCase(4096, 500, 64, dict(num_users=3000, num_items=100_000, mean_length=400.0))]
    return [PartsCase(512, 100, 32, dict(num_users=1000, num_items=2000, mean_length=200.0))]


class Part:
    """The trainer of a model with some parts, and batches for it.

    Attributes:
        step: makes a step on a batch.
        batches: on the device, or in pinned memory for a captured step.
        seconds: CPU time of each step so far; for the caller.

    Args:
        name: one of PARTS.
        case: the table and the batches.
        device: of the model.
        datasets: those that are loaded, by their statistics; the part's own is added.
    """

    def __init__(self, name: str, case: PartsCase, device: torch.device, datasets: dict | None = None) -> None:
        settings = {"model.bias": "history_age", "model.cross_layers": 0, "model.dropout": 0.0} | OURS[name]
        statistics = settings.pop("data.statistics", [])
        settings = {key.removeprefix("model."): value for key, value in settings.items()}
        data = synthetic_config("quickstart", **case.table).data
        data = replace(data, max_history=case.max_history, statistics=statistics)
        datasets = {} if datasets is None else datasets
        dataset = datasets.get(tuple(statistics)) or datasets.setdefault(tuple(statistics), load_dataset(data))
        model = ModelConfig(embedding_dim=case.width, num_heads=4, **settings)
        optimizer = OptimizerConfig(OptimizerGroup("adam", 1e-3), OptimizerGroup("adagrad", 0.02), None)
        config = Config(data=data, model=model, optimizer=optimizer)
        config = config.with_training(device=device.type, batch_size=case.batch_size)
        world = World(device)
        self.trainer = StepTrainer(config, dataset, world)
        self.batches = list(itertools.islice(dataset.batches("train", case.batch_size, shuffle=True), HELD))
        self.seconds: list[float] = []
        self.step: Callable[[Batch], object] = self.trainer._step
        self.captured: CapturedStep | None = None
        if device.type == "cuda":
            found = capture(self.trainer._step, self.trainer.model, self.trainer.optimizer, config, dataset, world)
            if not isinstance(found, CapturedStep):
                raise RuntimeError(f"{name} is not captured: {found}")
            self.step = self.captured = found
            self.batches = [batch.pin_memory() for batch in self.batches]

    def calls(self) -> list[Callable[[], object]]:
        return [lambda batch=batch: self.step(batch) for batch in self.batches]

    def kernels(self, device: torch.device) -> list[dict]:
        """The kernels of a replay."""
        replay = next(bucket.replay for bucket in self.captured._buckets.values() if bucket.replay is not None)
        return profiled_kernels(replay, device)


def attention_share(kernels: list[dict]) -> float:
    """The part of the time of all kernels that those of attention take."""
    return sum(one["us"] for one in kernels if "attention" in one["name"]) / sum(one["us"] for one in kernels)


def run(case: PartsCase, device: torch.device, seconds: float) -> Iterator[dict]:
    """A row for each part."""
    with torch.autograd.set_multithreading_enabled(False):
        measured = (_on_gpu if device.type == "cuda" else _on_cpu)(case, device, seconds)
    for name, found in measured.items():
        yield {
            "case": case.name,
            "implementation": name,
            "status": "ok",
            "headline": True,
            "rows_per_second": case.batch_size / found["part_step_us"] * 1e6,
            "over_target_attention": found["part_step_us"] / measured[REFERENCE]["part_step_us"],
        } | found


def _events(part: Part) -> float:
    """Mean history of a sample."""
    lengths = [batch.sparse_features["history_item"].lengths().float().mean() for batch in part.batches]
    return float(torch.stack(lengths).mean())


def _on_gpu(case: PartsCase, device: torch.device, seconds: float) -> dict[str, dict]:
    measured, datasets = {}, {}
    for name in PARTS:
        part = Part(name, case, device, datasets)
        found = {"events_per_sample": _events(part), "part_step_us": measure.wall_us(part.calls(), seconds)}
        kernels = part.kernels(device)
        found |= {"kernel_count": sum(one["calls"] for one in kernels), "kernels_us": sum(one["us"] for one in kernels)}
        measured[name] = found | {"attention_share": attention_share(kernels), "kernels": kernels[:HEAVIEST]}
        del part
        release(device)
    return measured


def _on_cpu(case: PartsCase, device: torch.device, seconds: float) -> dict[str, dict]:
    datasets: dict = {}
    parts = {name: Part(name, case, device, datasets) for name in PARTS}
    begun = time.process_time()
    for turn in itertools.count():
        for part in parts.values():
            start = time.process_time()
            part.step(part.batches[turn % HELD])
            part.seconds.append(time.process_time() - start)
        # Every batch has had as many turns.
        spent = time.process_time() - begun
        if (turn + 1) % HELD == 0 and turn >= LEAST_STEPS and spent > seconds * len(parts):
            break
    return {
        name: {
            "events_per_sample": _events(part),
            "part_step_us": sum(min(part.seconds[i::HELD]) for i in range(HELD)) / HELD * 1e6,
        }
        for name, part in parts.items()
    }
