"""A training step on long histories: as semantic IDs whose digits attention reads, as dense digits, as rows by id.

    python -m benchmarks.sid_step --out FILE

The model is small, so that the histories decide: look-ups, a JaggedFeatureInteraction of one feature, a linear layer on
target and pooled history, the loss, backward, and the optimizers: Adam, and row-wise Adagrad for tables. It runs under
autocast to bfloat16; embeddings that are looked up are bfloat16 too. Ways:

- *digits in registers*: `SemanticIDEmbedding(read="digits")`, which the layer attends to by itself;
- *dense digits*: the same, with its embeddings made before the layer sees them;
- *rows by id*: a FusedEmbeddingCollection of a million items, in float32 or bfloat16.

A row has `eager_us` (between events on the device), `graph_us` (of CUDA graph replays of the same steps; None with a
note where they cannot be captured), `memory_mb` (the allocator's peak above what it held before a step) and
`batch_bytes` (values and lengths of all keys). `error` is that of *digits in registers* against *dense digits* in
float32, on the first samples: the larger of output and gradient of the digits' projection, in the Frobenius norm. A
batch rotates with others. Where a way fails the others go on, and none begins after `--limit` seconds.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingConfig
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from benchmarks import measure, report
from benchmarks.run import Rates, summary
from jfi import FusedEmbeddingCollection, JaggedFeatureInteraction, SemanticIDEmbedding, SequenceFeatureConfig
from jfi.semantic_ids import DiscretePCA, Layout

REGISTERS, DENSE = "digits in registers", "dense digits"
BY_ID = {"rows by id, float32": DataType.FP32, "rows by id, bfloat16": DataType.BF16}
WAYS = (REGISTERS, DENSE, *BY_ID)
KEYS = ["item", "history"]
BATCHES, CHECKED = 3, 8
#: Of the worst of output and gradient in bfloat16.
TOLERANCE = 3e-2


@dataclass(frozen=True)
class SidShape:
    """B histories of N / 2 to 3 N / 2 events, N in the mean; D wide, H heads; L ternary digits of an ID."""

    B: int
    N: int
    D: int = 128
    H: int = 4
    digits: int = 25
    items: int = 1_000_000

    @property
    def name(self) -> str:
        return f"B={self.B} N={self.N} D={self.D} H={self.H}, {self.digits} digits, {self.items:,} items"


SHAPES = (SidShape(1024, 2000), SidShape(128, 20_000))


class DenseDigits(SemanticIDEmbedding):
    """Its embeddings are made before anybody reads them."""

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        found = super().forward(features)
        return {key: JaggedTensor(one.values(), lengths=one.lengths()) for key, one in found.items()}


class Model(nn.Module):
    def __init__(self, embeddings: nn.Module, shape: SidShape, device: torch.device) -> None:
        super().__init__()
        self.embeddings = embeddings
        feature = SequenceFeatureConfig("taste", ["history"], ["item"])
        self.layer = JaggedFeatureInteraction([feature], shape.D, shape.H, device=device)
        self.over = nn.Linear(2 * shape.D, 1, device=device)

    def pool(self, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        found = self.embeddings(ids)
        target = found["item"].values()
        return target, self.layer({"history": found["history"]}, {"item": target}).values()

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.over(torch.cat(self.pool(ids), dim=1)).squeeze(1)


@dataclass
class Batch:
    ids: KeyedJaggedTensor
    labels: Tensor

    @property
    def nbytes(self) -> int:
        return self.ids.values().nbytes + self.ids.lengths().nbytes


def make_batch(shape: SidShape, catalogue: Tensor | None, seed: int, device: torch.device) -> Batch:
    """The same items for all ways, as IDs of the catalogue [items] or, without one, as numbers of rows."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(shape.N / 2, 3 * shape.N / 2, shape.B).round().long()
    lengths = lengths[torch.randperm(shape.B, generator=draw)]
    items = torch.randint(shape.items, (shape.B + int(lengths.sum()),), generator=draw).to(device)
    counts = torch.cat([torch.ones_like(lengths), lengths]).to(device)
    labels = torch.randint(2, (shape.B,), generator=draw).float().to(device)
    ids = KeyedJaggedTensor(KEYS, items if catalogue is None else catalogue[items], lengths=counts)
    ids.to_dict()  # finds offsets once, as a data loader does
    return Batch(ids, labels)


def embeddings_of(way: str, shape: SidShape, device: torch.device) -> nn.Module:
    if way in BY_ID:
        table = EmbeddingConfig(
            name="item",
            embedding_dim=shape.D,
            num_embeddings=shape.items,
            feature_names=KEYS,
            data_type=BY_ID[way],
        )
        options = {"output_dtype": torch.bfloat16, "device": device}
        return FusedEmbeddingCollection([table], RowWiseAdagrad, {"lr": 0.01, "eps": 1e-8}, **options)
    codec = DiscretePCA(shape.digits).fit(torch.randn(500, 16, generator=torch.Generator().manual_seed(0)))
    return (SemanticIDEmbedding if way == REGISTERS else DenseDigits)(codec, shape.D, KEYS, device=device)


def build(way: str, shape: SidShape, device: torch.device) -> Model:
    torch.manual_seed(0)
    return Model(embeddings_of(way, shape, device), shape, device)


def stepper(way: str, shape: SidShape, device: torch.device) -> Callable[[Batch], Tensor]:
    """Trains a new model on a batch; returns the loss."""
    model, tables = build(way, shape, device), way in BY_ID
    own = [x for name, x in model.named_parameters() if not (tables and name.startswith("embeddings."))]
    optimizer = torch.optim.Adam(own, fused=True, capturable=device.type == "cuda")

    def step(batch: Batch) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(batch.ids)
        loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def error(shape: SidShape, catalogue: Tensor, device: torch.device) -> float:
    batch = make_batch(replace(shape, B=min(shape.B, CHECKED)), catalogue, 99, device)
    found = []
    for way, half in ((REGISTERS, True), (DENSE, False)):
        model = build(way, shape, device)
        with torch.no_grad():
            model.embeddings.projection.weight.mul_(3)  # so that the softmax is not flat
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            _, pooled = model.pool(batch.ids)
        pooled.float().square().sum().backward()
        found.append((pooled.detach().double(), model.embeddings.projection.weight.grad.double()))
    return max(float((x - y).norm() / y.norm()) for x, y in zip(*found, strict=True))


def eager_us(calls: list[measure.Call], seconds: float, device: torch.device) -> float:
    if device.type == "cuda":
        return measure.eager_us(calls, seconds)
    times = measure.interleaved_us({"step": lambda: [call() for call in calls]}, seconds)["step"]
    return statistics.median(times) / len(calls)


def measured(way: str, shape: SidShape, catalogue: Tensor, seconds: float, device: torch.device) -> dict:
    """A row; a failure is a note."""
    row = {"case": shape.name, "implementation": way, "B": shape.B, "N": shape.N, "D": shape.D, "H": shape.H}
    row |= {"digits": shape.digits, "items": shape.items, "status": "ok", "graph_us": None}
    try:
        if way == REGISTERS:
            row["error"] = error(shape, catalogue, device)
            if not row["error"] <= TOLERANCE:
                return row | {"status": "wrong", "note": f"differs from dense digits in float32 by {row['error']:.1e}"}
        chosen = None if way in BY_ID else catalogue
        batches = [make_batch(shape, chosen, seed, device) for seed in range(BATCHES)]
        row |= {"events": len(batches[0].ids.values()) - shape.B, "batch_bytes": batches[0].nbytes}
        step = stepper(way, shape, device)
        calls = [lambda batch=batch: step(batch) for batch in batches]
        row["loss"] = float(calls[0]())
        row["eager_us"] = eager_us(calls, seconds, device)
        on_gpu = device.type == "cuda"
        row["memory_mb"] = measure.peak_mb(calls[0]) if on_gpu else measure.cpu_peak_mb(calls[0])
        if on_gpu:
            try:
                row["graph_us"] = measure.kernel_us(lambda: calls)
            except Exception as failure:
                row["note"] = f"not captured: {summary(failure)}"
    except Exception as failure:
        row |= {"status": "failed", "note": summary(failure)}
    return row


def line(row: dict) -> str:
    if "eager_us" not in row:
        return f"  {row['implementation']:22s} {row['status']}: {row['note']}"
    graph = "-" if row["graph_us"] is None else f"{row['graph_us'] / 1e3:.2f}"
    text = f"  {row['implementation']:22s} {row['eager_us'] / 1e3:8.2f} ms eager, {graph} captured,"
    text += f" {row['memory_mb']:,.0f} MB, batch {row['batch_bytes'] / 1e6:.1f} MB"
    return text + (f" ({row['note']})" if "note" in row else "")


def run(shapes: tuple[SidShape, ...], out: Path, seconds: float, limit: float, device: torch.device) -> list[dict]:
    """Measures every way of every shape, and writes the file after each."""
    began, rows = time.monotonic(), []
    where = report.environment(device, Rates(), None)
    for shape in shapes:
        print(shape.name, flush=True)
        digits = torch.randint(-1, 2, (shape.items, shape.digits), generator=torch.Generator().manual_seed(1))
        catalogue = Layout(shape.digits).pack(digits.to(device))
        for way in WAYS:
            if time.monotonic() - began > limit:
                row = {"case": shape.name, "implementation": way, "status": "skipped", "note": f"after {limit:.0f} s"}
            else:
                with torch.autograd.set_multithreading_enabled(False):  # as `jfi.training` trains
                    row = measured(way, shape, catalogue, seconds, device)
            rows.append(row | {"suite": "sid_step", "seconds": round(time.monotonic() - began, 1)})
            print(line(rows[-1]), flush=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--seconds", type=float, default=0.4, help="on the eager steps of a way")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no way begins (default: 600)")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(arguments)
    run(SHAPES, given.out, given.seconds, given.limit, torch.device(given.device))


if __name__ == "__main__":
    main()
