"""Weak scaling of the sharded training step: the same batch per GPU on more GPUs, 20 million rows split among them.

    torchrun --standalone --nproc_per_node 2 -m benchmarks.scaling --out benchmarks/results/h200

Each number of processes adds its line to scaling.json; the efficiency is the queries a second and process over those of
one process in the same file.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from benchmarks import report
from benchmarks.run import Rates
from benchmarks.training_step import BATCHES, JFI, StepShape, build_model, heaviest_kernels, make_batch, shard
from jfi.data import Batch

SHAPE = StepShape(B=4096, N=1024, D=64, H=4, dtype="float32", items=20_000_000)
TINY = replace(SHAPE, B=16, N=20, mean=8, items=1000, users=100, categories=10)
WARM_UP, STEPS = 10, 40


def forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    with torch.autocast(batch.labels.device.type, torch.bfloat16):
        logits = model(batch.dense_features, batch.sparse_features).squeeze(-1)
    loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels)
    return loss, loss.detach()


def measure_step(shape: StepShape, device: torch.device, steps: int) -> dict:
    """Microseconds of a pipelined step, all ranks together, and the kernels that take most of it on this one."""
    torch.manual_seed(0)
    model = build_model(JFI, shape, device, torch.device("meta"))
    model, optimizer = shard(model, shape, device, row_wise(compute_kernel=EmbeddingComputeKernel.FUSED.value))
    # Every rank has other samples; batches come from the host's memory, as they would from a reader.
    batches = [make_batch(shape, BATCHES * dist.get_rank() + i, torch.device("cpu")) for i in range(BATCHES)]
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]  # else the pipeline would wait for its copies
    pipeline = None
    if device.type == "cuda":
        pipeline = TrainPipelineSparseDist(
            model, optimizer, device, custom_model_fwd=lambda batch: forward(model, batch)
        )
    source = cycle(batches)

    def step() -> Tensor:
        if pipeline is not None:
            return pipeline.progress(source)
        loss, value = forward(model, next(source))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return value

    def run(count: int) -> float:
        synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronize(device)
        dist.barrier()
        return time.perf_counter() - start

    run(min(WARM_UP, steps))
    spent = run(steps)
    return {"step_us": spent / steps * 1e6, "loss": float(step()), "kernels": heaviest_kernels(step, device)}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def record(path: Path, row: dict, environment: dict) -> list[dict]:
    """Puts the row among those of other numbers of processes, with their efficiencies."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = sorted([*(r for r in rows if r["processes"] != row["processes"]), row], key=lambda r: r["processes"])
    alone = next((r for r in rows if r["processes"] == 1), None)
    for one in rows:
        rate = one["queries_per_second"] / one["processes"]
        one["efficiency"] = rate / alone["queries_per_second"] if alone else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.scaling", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    parser.add_argument("--tiny", action="store_true", help="to see that it runs")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    shape = TINY if options.tiny else SHAPE
    with torch.autograd.set_multithreading_enabled(False):  # as `jfi.training` trains
        measured = measure_step(shape, device, 4 if options.tiny else STEPS)
    row = {"processes": dist.get_world_size(), **measured}
    row["queries_per_second"] = row["processes"] * shape.B / row["step_us"] * 1e6
    if dist.get_rank() == 0:
        environment = report.environment(device, Rates(), options.commit)
        for one in record(options.out / "scaling.json", {**row, "case": shape.name}, environment):
            efficiency = "-" if one["efficiency"] is None else f"{one['efficiency']:.2f}"
            print(f"{one['processes']} processes: {one['step_us'] / 1e3:.2f} ms a step, ", end="")
            print(f"{one['queries_per_second']:,.0f} queries/s, efficiency {efficiency}")
        for kernel in row["kernels"]:
            print(f"  {kernel['us']:8.0f} us {kernel['calls']:6.1f} calls  {kernel['name'][:100]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
