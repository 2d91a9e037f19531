"""Weak scaling of the sharded training step: the same batch per GPU on more GPUs, 20 million rows split among them.

    torchrun --standalone --nproc_per_node 2 -m benchmarks.scaling --out benchmarks/results/h200

Each number of processes adds its lines to scaling.json; the efficiency is the queries a second and process over those
of one process in the same file. Bytes are those that leave a process through collectives that Python code calls: the
all-reduce of the dense parameters is not among them.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks import report
from benchmarks.run import Rates
from benchmarks.sent_bytes import SentBytes
from benchmarks.training_step import (
    BATCHES,
    JFI,
    StepShape,
    build_model,
    heaviest_kernels,
    make_batch,
    shard,
)
from jfi.data import Batch
from jfi.distributed import AttentionCollectionSharder, CapturedShardedStep, average_gradients

SHORT = StepShape(B=4096, N=1024, D=64, H=4, dtype="float32", items=20_000_000)
LONG = replace(SHORT, B=1024, N=8192, D=128, mean=1500)
SHAPES = {"short": SHORT, "long": LONG}
TINY = {
    name: replace(
        one,
        B=16,
        N=20,
        mean=one.mean // 150,
        items=1000,
        users=100,
        categories=10,
        D=8,
        dense_layers=(16,),
        over_layers=(16,),
    )
    for name, one in SHAPES.items()
}
WARM_UP, STEPS, RUNS = 10, 40, 3
#: The histories' rows as TorchRec exchanges them; unique rows in bfloat16; attention at the owners of the rows; the
#: same with the step as a CUDA graph.
ROWS, FEWER_BYTES, ATTENTION, CAPTURED = "rows", "unique rows in bfloat16", "attention", "attention, captured"
EXCHANGES = (ROWS, FEWER_BYTES, ATTENTION, CAPTURED)


@dataclass(frozen=True)
class Row:
    """A line of scaling.json; times in microseconds, bytes of one process a step and sample."""

    case: str
    exchange: str
    processes: int
    step_us: float
    fastest_us: float
    slowest_us: float
    queries_per_second: float
    sent_bytes: float
    loss: float
    kernels: list[dict]


def sharder_of(exchange: str, model: nn.Module, fused_params: dict) -> EmbeddingCollectionSharder:
    """Of the table of histories."""
    if exchange in (ATTENTION, CAPTURED):
        return AttentionCollectionSharder(model, fused_params, replicate_below=0, dtype=torch.bfloat16)
    if exchange == ROWS:
        return EmbeddingCollectionSharder(fused_params)
    codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16))
    # fbgemm finds unique ids on GPUs alone.
    return EmbeddingCollectionSharder(fused_params, codecs, use_index_dedup=torch.cuda.is_available())


def forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    with torch.autocast(batch.labels.device.type, torch.bfloat16):
        logits = model(batch.dense_features, batch.sparse_features).squeeze(-1)
    loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels)
    return loss, loss.detach()


class ScaledTraining:
    """A model sharded over all processes, and its steps, each on the next of this process's batches."""

    def __init__(self, shape: StepShape, exchange: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, one = device, exchange in (ATTENTION, CAPTURED)
        model = build_model(JFI, shape, device, torch.device("meta"), one_collection=one)
        placement = row_wise(compute_kernel=EmbeddingComputeKernel.FUSED.value)
        options = {}
        if exchange == CAPTURED and device.type == "cuda":
            options = {"lr": torch.tensor(1e-3, device=device), "fused": True, "capturable": True}
        sharder = sharder_of(exchange, model, {})
        self.model, self.optimizer = shard(
            model, shape, device, placement, partial(Adam, **options), sharder, data_parallel=exchange != CAPTURED
        )
        # Every rank has other samples; batches come from the host's memory, as they would from a reader.
        batches = [make_batch(shape, BATCHES * dist.get_rank() + i, torch.device("cpu")) for i in range(BATCHES)]
        self.pipeline = self.captured = None
        if device.type == "cuda":
            batches = [batch.pin_memory() for batch in batches]  # else the pipeline would wait for its copies
        if exchange == CAPTURED:
            self.dense = list(dict(in_backward_optimizer_filter(self.model.named_parameters())).values())
            self.captured = CapturedShardedStep(self._step_captured, self.model)
        elif device.type == "cuda":
            self.pipeline = TrainPipelineSparseDist(
                self.model, self.optimizer, device, custom_model_fwd=lambda batch: forward(self.model, batch)
            )
        self.batches: Iterator[Batch] = cycle(batches)

    def _step_captured(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss, value = forward(self.model.module, batch)
        loss.backward()
        average_gradients(self.dense)
        self.optimizer.step()
        return value

    def step(self) -> Tensor:
        if self.captured is not None:
            return self.captured.progress(self.batches)
        if self.pipeline is not None:
            return self.pipeline.progress(self.batches)
        loss, value = forward(self.model, next(self.batches))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return value

    def sent_bytes(self) -> float:
        """That this process sends in a step, the mean of some; of captured steps those of one that is launched."""
        self.seconds(BATCHES)  # which also sends the ids of the batches that follow
        if self.captured is None or self.device.type != "cuda":
            return self._counted(BATCHES) / BATCHES
        # A replay calls no Python. After a reset the first call sends the ids of several batches and makes a step; the
        # second one makes the other warm-up step, and captures what sends the ids of one batch.
        self.captured.reset()
        self.seconds(1)
        return self._counted(1)

    def _counted(self, steps: int) -> int:
        with SentBytes() as counted:
            self.seconds(steps)
        # Without the dense parameters' gradients, which DistributedDataParallel sends without Python.
        return counted.total - counted.sent.get("all_reduce", 0)

    def seconds(self, steps: int) -> float:
        """Of so many steps, all ranks together."""
        synchronize(self.device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self.device)
        dist.barrier()
        return time.perf_counter() - start


def measure(shape: StepShape, exchange: str, device: torch.device, steps: int) -> Row:
    """The median of RUNS runs of so many steps."""
    training, size = ScaledTraining(shape, exchange, device), dist.get_world_size()
    gc.collect()
    gc.freeze()  # what the models before this one have left is not looked through in every collection
    sent = training.sent_bytes()
    training.seconds(min(WARM_UP, steps))
    spent = sorted(training.seconds(steps) / steps * 1e6 for _ in range(RUNS))
    middle = spent[RUNS // 2]
    loss, kernels = float(training.step()), heaviest_kernels(training.step, device)
    if training.captured is not None:
        training.captured.reset()  # NCCL would wait at its end for graphs of its collectives
    return Row(
        shape.name,
        exchange,
        size,
        middle,
        spent[0],
        spent[-1],
        size * shape.B / middle * 1e6,
        sent / shape.B,
        loss,
        kernels,
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def record(path: Path, found: list[dict], environment: dict) -> list[dict]:
    """Puts lines among those of other cases and numbers of processes, with their efficiencies."""

    def key(row: dict) -> tuple:
        return row["case"], row["exchange"], row["processes"]

    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {key(row) for row in found}
    rows = sorted([*(row for row in rows if key(row) not in new), *found], key=key)
    alone = {key(row)[:2]: row["queries_per_second"] for row in rows if row["processes"] == 1}
    for one in rows:
        rate, of_one = one["queries_per_second"] / one["processes"], alone.get(key(one)[:2])
        one["efficiency"] = rate / of_one if of_one else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.scaling", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--exchanges", nargs="+", choices=EXCHANGES, default=list(EXCHANGES))
    parser.add_argument("--samples", type=int, help="of a process, to count bytes where a step would take too long")
    parser.add_argument("--items", type=int, help="rows of the table of items, likewise")
    parser.add_argument("--tiny", action="store_true", help="to see that it runs")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    found = []
    for shape in options.shapes:
        for exchange in options.exchanges:
            case = (TINY if options.tiny else SHAPES)[shape]
            case = replace(case, B=options.samples or case.B, items=options.items or case.items)
            with torch.autograd.set_multithreading_enabled(False):  # as `jfi.training` trains
                row = measure(case, exchange, device, STEPS if device.type == "cuda" else BATCHES)
            found.append(asdict(row))
            if dist.get_rank() == 0:
                print(f"{shape}, {exchange}: {row.step_us / 1e3:.2f} ms a step ({row.fastest_us / 1e3:.2f} to ", end="")
                print(f"{row.slowest_us / 1e3:.2f}), {row.queries_per_second:,.0f} queries/s, ", end="")
                print(f"{row.sent_bytes:,.0f} bytes a sample, loss {row.loss:.4f}", flush=True)
                for kernel in row.kernels[:5]:
                    print(f"  {kernel['us']:8.0f} us {kernel['calls']:6.1f} calls  {kernel['name'][:90]}")
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        record(options.out / "scaling.json", found, report.environment(device, Rates(), options.commit))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
