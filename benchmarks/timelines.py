"""Kernel time of jagged attention by time: a user's targets attend to the events of one timeline that are older.

    python benchmarks/timelines.py --out benchmarks/results/h200/timelines.json [--commit HASH]

Each shape is measured without times (every target sees the whole timeline), with times, and with times and a bias by
age or by distance, forward alone and both passes, by graph replay on an idle GPU. ``useful_tflops`` counts the pairs
that targets see, two products forward and five more backward. Gaps between events are 1 s to 2 days, log-distributed
with most of them short; targets lie anywhere between the events.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import jfi.ops
from benchmarks import measure, report
from benchmarks.measure import Call
from benchmarks.run import Rates

DEVICE = torch.device("cuda")
BUCKETS = 32
KINDS = ("no times", "older", "older, bias by distance", "older, bias by age")


@dataclass(frozen=True)
class Shape:
    """U users with between the two numbers of events and of targets each, H query heads on one key head."""

    users: int
    events: tuple[int, int]
    targets: tuple[int, int]
    num_heads: int
    width: int
    shared: bool  # value = key

    @property
    def name(self) -> str:
        counts = (f"{low:,}" if low == high else f"{low:,} to {high:,}" for low, high in (self.events, self.targets))
        events, targets = counts
        reads = "one read" if self.shared else "distinct"
        return f"{self.users:,} users, {events} events, {targets} targets, H={self.num_heads} D={self.width}, {reads}"


SHAPES = [
    *(Shape(64, (16384, 16384), (targets, targets), 4, 128, True) for targets in (64, 512)),
    *(Shape(1024, (3686, 4096), (1, targets), 2, 128, False) for targets in (32, 128, 160, 256)),
]


@dataclass
class Timelines:
    """The tensors of one shape; ``pairs``: of a target and an event, all and those that are seen."""

    query_offsets: Tensor
    key_offsets: Tensor
    query_time: Tensor
    key_time: Tensor
    pairs: tuple[int, int]

    @classmethod
    def draw(cls, shape: Shape) -> "Timelines":
        generator = torch.Generator().manual_seed(0)

        def offsets(bounds: tuple[int, int]) -> Tensor:
            counts = torch.randint(bounds[0], bounds[1] + 1, (shape.users,), generator=generator)
            return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])

        keys, queries = offsets(shape.events), offsets(shape.targets)
        gaps = torch.exp(torch.rand(int(keys[-1]), generator=generator) ** 3 * 12).long() + 1
        key_time, times, seen = gaps.cumsum(0), [], 0
        for begin, end, count in zip(keys[:-1].tolist(), keys[1:].tolist(), queries.diff().tolist(), strict=True):
            place = torch.randint(0, end - begin, (count,), generator=generator).sort().values
            times.append(key_time[begin + place] + 1)
            seen += int(torch.searchsorted(key_time[begin:end], times[-1]).sum())
        every = int((queries.diff() * keys.diff()).sum())
        tensors = (queries, keys, torch.cat(times), key_time)
        return cls(*(x.to(DEVICE) for x in tensors), (every, seen))

    def options(self, kind: str, table: Tensor) -> dict[str, Tensor]:
        """Arguments of jagged_attention."""
        if kind == "no times":
            return {}
        bias = {"older, bias by distance": "position_bias", "older, bias by age": "time_bias"}.get(kind)
        times = {"query_time": self.query_time, "key_time": self.key_time}
        return times if bias is None else times | {bias: table}


def calls(shape: Shape, timelines: Timelines, kind: str, is_backward: bool) -> Callable[[], Sequence[Call]]:
    """Builds calls on two sets of inputs."""

    def draw(rows: int, num_heads: int) -> Tensor:
        x = torch.randn(rows, num_heads, shape.width, device=DEVICE, dtype=torch.bfloat16)
        return x.requires_grad_(is_backward)

    def build() -> list[Call]:
        made = []
        for _ in range(2):
            query = draw(len(timelines.query_time), shape.num_heads)
            key, value = draw(len(timelines.key_time), 1), None if shape.shared else draw(len(timelines.key_time), 1)
            table = torch.randn(BUCKETS, shape.num_heads, device=DEVICE, dtype=torch.bfloat16)
            options = timelines.options(kind, table.requires_grad_(is_backward))
            grad = torch.randn_like(query)
            leaves = [x for x in (query, key, value, *options.values()) if x is not None and x.requires_grad]

            def call(query=query, key=key, value=value, options=options, grad=grad, leaves=leaves) -> object:
                offsets = {"query_offsets": timelines.query_offsets, "key_offsets": timelines.key_offsets}
                out = jfi.ops.jagged_attention(query, key, value, **offsets, **options)
                return torch.autograd.grad(out, leaves, grad) if is_backward else out

            made.append(call)
        return made

    return build


def measure_shape(shape: Shape) -> list[dict[str, object]]:
    """A row for each kind."""
    timelines, rows = Timelines.draw(shape), []
    for kind in KINDS:
        pairs = timelines.pairs[kind != "no times"]
        row = asdict(shape) | {"case": shape.name, "kind": kind, "pairs": pairs}
        for name, products in (("forward", 2), ("both", 7)):
            us = measure.kernel_us(calls(shape, timelines, kind, name == "both"))
            row[f"{name}_us"] = round(us, 1)
            row[f"{name}_useful_tflops"] = round(pairs * shape.num_heads * shape.width * 2 * products / us / 1e6, 1)
        print(f"{shape.name}; {kind}: {row['forward_us']} | {row['both_us']} us", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    options = parser.parse_args()
    rates = Rates(measure.copy_bytes_per_second(), measure.matmul_flops_per_second())
    environment = report.environment(DEVICE, rates, options.commit)
    rows = [row for shape in SHAPES for row in measure_shape(shape)]
    options.out.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
