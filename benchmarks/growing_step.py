"""A captured training step whose item table grows, beside one with a fixed number of rows.

python -m benchmarks.growing_step

The model and the batches are those of `benchmarks.training_step`: 4,096 samples, histories of mean 200, a million
items. In the growing table's batches one event in a hundred has an item that is new, each of which occurs ten times in
its batch, and an admission follows every 100 steps. Both ways copy their batches from pinned memory, and the time is
wall time with the admissions. Results go to `benchmarks/results/<device>/growing_step.json`.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks import report
from benchmarks.run import Rates
from benchmarks.training_step import (
    CAPTURED,
    StepShape,
    Training,
    make_batch,
    profiled_kernels,
    release,
    train_step,
)
from jfi import CapturedStep
from jfi.data import Batch
from jfi.models import SequenceDLRM
from jfi.modules import GrowingIds, GrowingTable

ROOT = Path(__file__).parents[1]
STEPS, EVERY, PASSES, NEW, REPEATED = 100, 100, 3, 0.01, 10
#: Multiplies an item's number: raw ids are spread over 62 bits.
SPREAD = 4_000_000_000_037


class Growing(Training):
    """As `Training`, with a table of items that grows."""

    def __init__(self, shape: StepShape, device: torch.device, reference: Batch) -> None:
        super().__init__(replace(CAPTURED, captured=False), shape, device, reference)
        table = GrowingTable("item", shape.items, ["item", "history_item"])
        self.model.growing_ids = GrowingIds([table], EVERY, device)
        self.step = CapturedStep(
            lambda batch: train_step(self.model, self.optimizer, batch), self.model, reference=reference
        )


class Admissions:
    """Admits new ids of a model; how many rows the last one gave, and the time of each."""

    def __init__(self, model: SequenceDLRM) -> None:
        self.model, self.seconds, self.admitted = model, [], 0

    def __call__(self) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.admitted = len(self.model.admit_ids().get("item", ()))
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)


def pinned(shape: StepShape, seed: int) -> Batch:
    return make_batch(shape, seed, torch.device("cpu")).pin_memory()


def as_raw(batch: Batch, shape: StepShape, seed: int) -> list[torch.Tensor]:
    """Makes the items of a batch raw ids, in place; returns those that are new in this batch, to be changed."""
    generator, parts = torch.Generator().manual_seed(seed), []
    for key in ("item", "history_item"):
        values = batch.sparse_features[key].values()
        values.copy_((values + 1) * SPREAD)
        if key == "history_item":
            is_new = torch.rand(len(values), generator=generator) < NEW
            count = int(is_new.sum())
            values[is_new] = -(seed * 1_000_000 + torch.arange(count) // REPEATED + 2)
            parts.append((values, is_new))
    return parts


def measured(step: object, batches: list[Batch], after: object = None) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for batch in batches:
        step(batch)
    if after is not None:
        after()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / len(batches) * 1e6


def run(dtype: str, device: torch.device, steps: int) -> list[dict]:
    shape, rows = StepShape(4096, 1024, 64, H=4, dtype=dtype), []
    # As many rows as known items, those that are new between two admissions, and the shared one.
    grown = replace(shape, items=shape.items + int(2 * EVERY * NEW / REPEATED * shape.B * shape.mean) + 1)
    for name in ("fixed", "growing"):
        batches = [pinned(shape, seed) for seed in range(steps)]
        found: list[float] = []
        if name == "fixed":
            training = Training(CAPTURED, shape, device, batches[0])
            for _ in range(PASSES + 1):
                found.append(measured(training.step, batches))
        else:
            new = [as_raw(batch, shape, seed) for seed, batch in enumerate(batches, 1)]
            training = Growing(grown, device, batches[0])
            model = training.model
            known = torch.arange(1, shape.items + 1, device=device) * SPREAD  # all items of the log so far
            for part in known.split(2**19):
                lengths = torch.tensor([len(part), 0], device=device)
                model.growing_ids(KeyedJaggedTensor(["item", "history_item"], part, lengths=lengths))
                model.admit_ids()
            admissions = Admissions(model)
            for number in range(PASSES + 1):
                for parts in new:
                    for values, is_new in parts:
                        values[is_new] -= number * 1_000_000_000
                found.append(measured(training.step, batches, admissions))
        rows.append({"case": shape.name, "implementation": name, "status": "ok", "step_us": min(found[1:])})
        rows[-1] |= {"all_us": found, "summary": training.step.summary()}
        if name == "growing":
            kernels = profiled_kernels(training.replay(), device)
            rows[-1]["kernels"] = [one for one in kernels if one["us"] > 4]
            rows[-1]["map_us"] = sum(one["us"] for one in kernels if "map_ids" in one["name"])
            times = {"admission_ms": min(admissions.seconds[1:]) * 1e3}
            rows[-1] |= times | {"admitted": admissions.admitted, "capacity": grown.items}
        del training, batches
        release(device)
    rows[-1]["rate"] = rows[0]["step_us"] / rows[1]["step_us"]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.growing_step", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    options = parser.parse_args()
    device = torch.device("cuda")
    rows = [row for dtype in ("float32", "bfloat16") for row in run(dtype, device, options.steps)]
    out = options.out or ROOT / "benchmarks/results" / report.folder_name(device)
    report.write(out, "growing_step", report.environment(device, Rates(), options.commit), rows)
    for row in rows:
        print({name: value for name, value in row.items() if name not in ("all_us", "kernels")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
