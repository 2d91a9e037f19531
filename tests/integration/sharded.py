"""Sharded training on gloo: the page's models, batches that a rule labels, and what a launched process does.

Run as a script it is one process of several: python sharded.py RANK WORLD_SIZE STORE OUT
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from integration import page
from jfi import SequenceDLRM, SequenceFeatureConfig
from jfi.data import Batch
from jfi.models import AttentionPooling, table_parameters

CPU = torch.device("cpu")
#: Of torch.optim.Adagrad; that of fbgemm is 1e-8.
RATE, EPS = 0.05, 1e-10
SAMPLES, STEPS = 8, 6


@contextmanager
def process_group(rank: int = 0, size: int = 1, store: dist.Store | None = None) -> Iterator[None]:
    dist.init_process_group("gloo", store=store or dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(name: str) -> nn.Module:
    """A model with forward(dense_features, sparse_features): those of the page, or SequenceDLRM."""
    torch.manual_seed(0)
    names = page.run(before="The optimizer in backward")
    if name == "own tables":
        return names.model
    if name == "shared table":
        return names.shared
    return SequenceDLRM(
        names.bag_tables("user"),
        names.EmbeddingCollection(tables=[names.items]),
        [SequenceFeatureConfig("taste", ["history_item"], ["item"])],
        names.DENSE,
        [8, names.D],
        [8, 1],
        pooling=AttentionPooling(2),
    )


def make_batch(seed: int = 0, rank: int = 0, size: int = 1, samples: int = SAMPLES) -> Batch:
    """This rank's part of a batch. The label is whether the target's id is even; the second history is empty."""
    draw = torch.Generator().manual_seed(seed)
    history = torch.randint(1, 6, (samples,), generator=draw)
    history[1:2] = 0
    user, item = torch.randint(20, (2, samples), generator=draw)
    events = torch.randint(20, (2, int(history.sum())), generator=draw)
    dense = torch.rand(samples, 4, generator=draw)
    part = slice(rank * samples // size, (rank + 1) * samples // size)
    kept = torch.zeros(samples, dtype=torch.bool)
    kept[part] = True
    rows = events[:, kept.repeat_interleave(history)]
    lengths, ones = history[part], torch.ones_like(history[part])
    ids = KeyedJaggedTensor(
        keys=["user", "item", "history_item", "history_rating"],
        values=torch.cat([user[part], item[part], rows[0], rows[1]]),
        lengths=torch.cat([ones, ones, lengths, lengths]),
    )
    return Batch(dense[part], ids, (item[part] % 2).float(), user[part], torch.arange(samples)[part], samples)


def shard(model: nn.Module, kind: str = "table_wise") -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model as TorchRec trains it; the tables keep the optimizers in backward that they have."""
    kinds = {}
    for path, _ in model.named_parameters():
        if ".embedding_bags." in path:
            kinds[path.split(".")[-2]] = ["table_wise"]  # gloo has no collective for bags cut by rows
        elif "embeddings." in path:
            kinds[path.split(".")[-2]] = [kind]
    constraints = {name: ParameterConstraints(sharding_types=types) for name, types in kinds.items()}
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=get_default_sharders())
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    adam = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, adam])


@torch.no_grad()
def fill_tables(model: nn.Module) -> None:
    """Gives every table values of its own, sharded or not: TorchRec draws a table anew when it shards it."""

    def fill(tensor: torch.Tensor, name: str, row: int = 0, column: int = 0) -> None:
        rows, columns = (torch.arange(size) + start for size, start in zip(tensor.shape, (row, column), strict=True))
        tensor.copy_(0.2 * torch.sin(7.1 * rows[:, None] + 1.3 * columns + len(name)))

    for name, value in model.state_dict().items():
        if "embeddings." not in name and ".embedding_bags." not in name:
            continue
        table = name.split(".")[-2]
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                fill(shard.tensor, table, *shard.metadata.shard_offsets)
        else:
            fill(value, table)


def train(name: str, kind: str, rank: int = 0, size: int = 1) -> tuple[list[float], set[str]]:
    """Losses of this rank's samples over a few pipelined steps, and the names of the modules that were pipelined."""
    model = page.run(before="The optimizer in backward").DLRMTrain(build(name))
    apply_optimizer_in_backward(torch.optim.Adagrad, table_parameters(model), {"lr": RATE, "eps": EPS})
    sharded, optimizer = shard(model, kind)
    fill_tables(sharded)
    pipeline = TrainPipelineSparseDist(sharded, optimizer, CPU)
    batches = iter([make_batch(step, rank, size) for step in range(STEPS)])
    losses = [pipeline.progress(batches)[0].item() for _ in range(STEPS)]
    names = {id(module): path for path, module in sharded.module.named_modules()}
    return losses, {names[id(module)] for module in pipeline._pipelined_modules}


if __name__ == "__main__":
    rank, size, path, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    results = {}
    with process_group(rank, size, dist.FileStore(path, size)):
        for name in ("own tables", "shared table", "SequenceDLRM"):
            losses, _ = train(name, "row_wise", rank, size)
            mean = torch.tensor(losses)
            dist.all_reduce(mean)
            results[name] = (mean / size).tolist()
    out.write_text(json.dumps(results))
