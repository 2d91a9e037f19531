"""Samples a second of a training step with full histories and with policies, captured and eager, on one log.

    python -m benchmarks.policy_step --out policy_step.json

The log is that of `configs/dwell.yaml`. Arms take turns; each figure is the median over the rounds of the mean over
held batches. The step is forward, backward and optimizers; on a GPU rows are read by id. The loader's time a batch, on
the host, is beside it.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from benchmarks.dwell import ARMS, Seed
from benchmarks.model_parts import StepTrainer
from jfi.cuda_graphs.captured_step import CapturedStep
from jfi.data import Batch
from jfi.training.distributed.processes import World
from jfi.training.loop.captured_steps import capture

DEFAULT_ARMS = ("full", "policy-30", "policy-50", "weights for the active")


@dataclass
class Way:
    """An arm, eager or captured.

    Args:
        trainer: keeps the model.
        step: makes a step on a batch.
        batches: held, where the step takes them.
        events: mean number of events a batch.
        loader_us: of a batch.
        seconds: of a step, a figure a round.
    """

    trainer: StepTrainer
    step: Callable[[Batch], object]
    batches: list[Batch]
    events: float
    loader_us: float
    seconds: list[float] = field(default_factory=list)

    def time(self) -> float:
        """Mean seconds of a step."""
        synchronize()
        begin = time.perf_counter()
        for batch in self.batches:
            self.step(batch)
        synchronize()
        return (time.perf_counter() - begin) / len(self.batches)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ways_of(arm: str, seed: Seed, options: argparse.Namespace, device: torch.device) -> dict[tuple[str, str], Way]:
    dataset, begin = seed.dataset(ARMS[arm]), time.perf_counter()
    batches = list(itertools.islice(dataset.batches("train", options.batch, shuffle=True), options.held))
    loader_us = 1e6 * (time.perf_counter() - begin) / len(batches)
    batches = [one for one in batches if len(one.labels) == options.batch]
    events = sum(int(one.sparse_features["history_item"].lengths().sum()) for one in batches) / len(batches)
    trainer = StepTrainer(seed.config, dataset, World(device))
    known = (events, loader_us)
    ways = {(arm, "eager"): Way(trainer, trainer._step, [one.to(device) for one in batches], *known)}
    if device.type == "cuda":
        found = capture(trainer._step, trainer.model, trainer.optimizer, seed.config, dataset, World(device))
        if isinstance(found, CapturedStep):
            ways[arm, "captured"] = Way(trainer, found, [one.pin_memory() for one in batches], *known)
        else:
            print(f"{arm} is not captured: {found}", file=sys.stderr)
    return ways


def rows_of(ways: dict[tuple[str, str], Way], batch: int) -> list[dict]:
    """A line for each way: its rate, the events that its arm removes, and what it gains on the full histories."""
    rows = []
    for (arm, kind), way in ways.items():
        seconds = median(way.seconds)
        row = {"arm": arm, "way": kind, "events": way.events, "step_us": 1e6 * seconds, "loader_us": way.loader_us}
        row["samples_per_second"] = batch / seconds
        full = ways.get(("full", kind))
        if full is not None:
            row["events_removed"] = 1 - way.events / full.events
            row["gain"] = median(a / b for a, b in zip(full.seconds, way.seconds, strict=True)) - 1
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--history", type=int, default=500, help="most events of a history")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--held", type=int, default=6, help="batches")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(DEFAULT_ARMS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = [
        f"--data.max_history={options.history}",
        f"--model.embedding_dim={options.width}",
        "--model.num_heads=4",
        "--data.batching=sample",
        f"--training.batch_size={options.batch}",
        f"--training.device={device.type}",
    ]
    table = {"mean_length": 0.8 * options.history, "num_users": options.users}
    more = {None: [], "weights": ["--model.bias=weights"]}
    seeds = {bias: Seed(0, [*settings, *own], **table) for bias, own in more.items()}
    ways: dict[tuple[str, str], Way] = {}
    with torch.autograd.set_multithreading_enabled(False):  # as `jfi.training` trains
        for arm in options.arms:
            ways |= ways_of(arm, seeds["weights" if ARMS[arm].bias == "weights" else None], options, device)
        for way in ways.values():
            for _ in range(3):  # compiles, captures
                way.time()
        for _ in range(options.rounds):
            for way in ways.values():
                way.seconds.append(way.time())
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    rows = rows_of(ways, options.batch)
    result = {"device": name, "torch": torch.__version__, "options": {**vars(options), "out": None}, "rows": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
