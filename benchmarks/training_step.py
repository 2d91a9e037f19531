"""A training step of SequenceDLRM whose histories are pooled by the layer, by padded attention, or by their mean.

Look-up, pooling, dense parts, backward and both optimizers.  Tables are where TorchRec puts them on a single GPU:
DistributedModelParallel with one process, fused row-wise Adagrad in the backward, which runs on the calling thread as
`jfi.training` has it.  Ids are uniform, labels random.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.profiler import ProfilerActivity, profile
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    construct_module_sharding_plan,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from benchmarks import measure
from benchmarks.layer import Projections
from benchmarks.problem import Shape, log_normal, order, valid
from benchmarks.run import TOLERANCE, summary
from jfi import JaggedFeatureInteraction, SequenceFeatureConfig
from jfi.data import Batch
from jfi.models import SequenceDLRM

BATCHES = 4
PROFILED_STEPS, HEAVIEST = 5, 10
#: How the profiler's entries end that are waiting, not kernels.
WAITING = (" Sync", " Wait Event")
JFI, PADDED, MEAN = "jfi", "padded SDPA", "mean pooling"
MODELS = (JFI, PADDED, MEAN)


@dataclass(frozen=True)
class StepShape(Shape):
    """Histories are log-normal with that mean, cut at N; dtype is that of the embeddings that are looked up.

    The tables are float32, the dense parts bfloat16 through autocast.
    """

    mean: int = 200
    items: int = 1_000_000
    categories: int = 10_000
    users: int = 1_000_000
    dense_features: int = 13
    dense_layers: tuple[int, ...] = (512, 256)
    over_layers: tuple[int, ...] = (1024, 512, 256)

    @property
    def name(self) -> str:
        return f"B={self.B} N={self.N} D={self.D} H={self.H}, histories of mean {self.mean}, {self.dtype} embeddings"


@dataclass(frozen=True)
class StepCase:
    shape: StepShape

    @property
    def name(self) -> str:
        return self.shape.name


def make_batch(shape: StepShape, seed: int, device: torch.device) -> Batch:
    """Another seed gives the same lengths in another order, and other ids."""
    lengths = log_normal(shape.B, shape.N, shape.mean * shape.B, torch.Generator().manual_seed(0))
    lengths = lengths[order(shape.B, seed)]
    generator = torch.Generator().manual_seed(seed)
    sizes = {"item": shape.items, "category": shape.categories, "user": shape.users}
    ids = [torch.randint(size, (shape.B,), generator=generator) for size in sizes.values()]
    users = ids[-1]
    ids.append(torch.randint(shape.items, (int(lengths.sum()),), generator=generator))
    return Batch(
        torch.randn(shape.B, shape.dense_features, generator=generator).to(device),
        KeyedJaggedTensor.from_lengths_sync(
            [*sizes, "history_item"],
            torch.cat(ids).to(device),
            torch.cat([*(torch.ones_like(lengths) for _ in sizes), lengths]).to(device),
        ),
        torch.randint(2, (shape.B,), generator=generator).float().to(device),
        users.to(device),
        torch.arange(shape.B, device=device),
        total=shape.B,
    )


class PaddedAttention(Projections):
    """Stands in for a JaggedFeatureInteraction of one feature: pads to the batch's longest history, then SDPA."""

    def __init__(self, feature: SequenceFeatureConfig, embedding_dim: int, num_heads: int, device: torch.device):
        super().__init__(embedding_dim, num_heads, 1, device)
        self.feature, self.embedding_dim = feature, embedding_dim

    def forward(self, sequences: dict[str, JaggedTensor], targets: dict[str, Tensor], *times: None) -> KeyedTensor:
        """`times`: what a JaggedFeatureInteraction gets for batches by user, in others None."""
        events = sequences[self.feature.sequence_keys[0]]
        history = events.to_padded_dense()
        query = self.query(targets[self.feature.target_keys[0]]).unflatten(1, (1, *self.heads))
        key, value = (projection(history).unflatten(2, self.heads) for projection in (self.key, self.value))
        # An empty sample sees one row of padding, whose value is 0.
        seen = valid(events.lengths().clamp(min=1), history.shape[1])[:, None, None]
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), seen)
        return KeyedTensor([self.feature.name], [self.embedding_dim], self.output(out.transpose(1, 2).flatten(1)))


def feature_of(shape: StepShape) -> SequenceFeatureConfig:
    return SequenceFeatureConfig("taste", ["history_item"], ["item"], max_seqlen=shape.N)


def build_model(name: str, shape: StepShape, device: torch.device, tables: torch.device) -> SequenceDLRM:
    """One of MODELS, with its tables on a device of their own."""
    bags = [
        EmbeddingBagConfig(name=key, embedding_dim=shape.D, num_embeddings=size, feature_names=[key])
        for key, size in {"category": shape.categories, "user": shape.users}.items()
    ]
    items = EmbeddingConfig(
        name="item", embedding_dim=shape.D, num_embeddings=shape.items, feature_names=["item", "history_item"]
    )
    model = SequenceDLRM(
        EmbeddingBagCollection(tables=bags, device=tables),
        EmbeddingCollection(tables=[items], device=tables),
        [feature_of(shape)],
        shape.dense_features,
        [*shape.dense_layers, shape.D],
        [*shape.over_layers, 1],
        pooling="mean" if name == MEAN else "attention",
        num_heads=shape.H,
        dense_device=device,
    )
    if name == PADDED:
        model.sequence_arch.pooling = PaddedAttention(feature_of(shape), shape.D, shape.H, device)
    return model


def shard(
    model: SequenceDLRM, shape: StepShape, device: torch.device, placement: ParameterShardingGenerator | None = None
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model as TorchRec trains it, and its optimizers; by default all tables are on the first rank."""
    looked_up = {"output_dtype": DataType.BF16 if shape.dtype == "bfloat16" else DataType.FP32}
    bag_sharder, sharder = EmbeddingBagCollectionSharder(looked_up), EmbeddingCollectionSharder(looked_up)
    placement = placement or table_wise(rank=0, compute_kernel=EmbeddingComputeKernel.FUSED.value)
    size = dist.get_world_size()
    plan = {}
    for key, tables, its_sharder in (
        ("embedding_bag_collection", ("category", "user"), bag_sharder),
        ("embedding_collection", ("item",), sharder),
    ):
        collection = model.get_submodule(key)
        apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01})
        plan[key] = construct_module_sharding_plan(
            collection, dict.fromkeys(tables, placement), its_sharder, size, size, device.type
        )
    sharded = DistributedModelParallel(model, device=device, plan=ShardingPlan(plan), sharders=[bag_sharder, sharder])
    dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(sharded.named_parameters())), Adam)
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])


@contextlib.contextmanager
def one_process(device: torch.device) -> Iterator[None]:
    """A process group of this process alone, on a free port."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
    """Returns the loss.  Gradients are dropped at the end, so that none is held between steps."""
    with torch.autocast(batch.labels.device.type, torch.bfloat16):
        logits = model(batch.dense_features, batch.sparse_features).squeeze(-1)
    loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def disagreement(shape: StepShape, batch: Batch, device: torch.device) -> float:
    """Relative error of the padded pooling against the layer with its weights: output or gradient of the history."""
    torch.manual_seed(0)
    layer = JaggedFeatureInteraction([feature_of(shape)], shape.D, shape.H, device=device)
    padded = PaddedAttention(feature_of(shape), shape.D, shape.H, device)
    padded.load({name.removeprefix("attention.0."): x for name, x in layer.named_parameters()}, 0)
    events = batch.sparse_features["history_item"]
    targets = {"item": torch.randn(shape.B, shape.D, device=device)}
    values = torch.randn(events.values().shape[0], shape.D, device=device, requires_grad=True)
    history = JaggedTensor(values, lengths=events.lengths(), offsets=events.offsets())
    found = []
    for pooling in (layer, padded):
        out = pooling({"history_item": history}, targets).values()
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), values)))
    wrong = [float((x - y).norm() / x.norm()) for x, y in zip(*found, strict=True)]
    return max(wrong, key=lambda x: (x != x, x))  # a NaN is greater than nothing, so it is looked for first


def heaviest_kernels(step: Callable[[], object], device: torch.device) -> list[dict]:
    """What takes most of a step; on a CPU, operators instead of kernels."""
    gpu = device.type == "cuda"
    step()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        if gpu:
            torch.cuda.synchronize()
    spent = [
        (event.self_device_time_total if gpu else event.self_cpu_time_total, event)
        for event in profiler.key_averages()
        # Ranges that TorchRec names span the kernels in them.
        if not event.is_user_annotation and not event.key.endswith(WAITING)
    ]
    spent.sort(key=lambda pair: -pair[0])
    return [
        {"name": event.key, "us": time / PROFILED_STEPS, "calls": event.count / PROFILED_STEPS}
        for time, event in spent[:HEAVIEST]
    ]


def measure_model(row: dict, shape: StepShape, batches: list[Batch], device: torch.device, seconds: float) -> None:
    if row["implementation"] != MEAN:
        row["error"] = disagreement(shape, batches[0], device)
        if not row["error"] <= TOLERANCE["float32"]:
            row |= {"status": "wrong", "note": f"jfi and padded differ by {row['error']:.1e}"}
            return
    torch.manual_seed(0)
    model, optimizer = shard(build_model(row["implementation"], shape, device, torch.device("meta")), shape, device)
    steps = [lambda batch=batch: train_step(model, optimizer, batch) for batch in batches]
    step_us = measure.eager_us(steps, seconds)
    row["peak_mb"] = measure.peak_mb(steps[0])
    row["loss"] = float(steps[0]())
    if not math.isfinite(row["loss"]):
        row |= {"status": "wrong", "note": f"a loss of {row['loss']}"}
        return
    row |= {"status": "ok", "step_us": step_us, "queries_per_second": shape.B / step_us * 1e6}
    if row["ours"]:
        row["kernels"] = heaviest_kernels(steps[0], device)


def run(case: StepCase, device: torch.device, seconds: float) -> Iterator[dict]:
    """One row a model, with its ratios to the others."""
    shape, rows = case.shape, {}
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())  # as TorchRec names it
    batches = [make_batch(shape, seed, device) for seed in range(BATCHES)]
    columns = {"B": shape.B, "N": shape.N, "D": shape.D, "H": shape.H, "dtype": shape.dtype, "mean": shape.mean}
    columns["S"] = batches[0].sparse_features["history_item"].values().shape[0]
    with one_process(device), torch.autograd.set_multithreading_enabled(False):
        for name in MODELS:
            row = {"case": case.name, "implementation": name, "ours": name == JFI, "headline": True, **columns}
            rows[name] = row
            try:
                measure_model(row, shape, batches, device, seconds)
            except Exception as error:
                row |= {"status": "failed", "note": summary(error)}
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for row in rows.values():
        for peer, name in {"padded": PADDED, "mean": MEAN}.items():
            if row["status"] == rows[name]["status"] == "ok":
                row[f"speed_over_{peer}"] = rows[name]["step_us"] / row["step_us"]
                row[f"memory_over_{peer}"] = row["peak_mb"] / rows[name]["peak_mb"]
        yield row


def cases(quick: bool) -> list[StepCase]:
    shape = {"B": 1024 if quick else 4096, "N": 1024, "D": 64, "H": 4}
    shapes = [StepShape(**shape, dtype=dtype) for dtype in (["bfloat16"] if quick else ["float32", "bfloat16"])]
    return [StepCase(shape) for shape in shapes]
