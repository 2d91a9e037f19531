"""A training step of SequenceDLRM whose histories are pooled by the layer, by padded attention, or by their mean.

Look-up, pooling, dense parts, backward and both optimizers: row-wise Adagrad for the tables, in the backward, which
runs on the calling thread as `jfi.training` has it, and Adam.  Ids are uniform, labels random.  A model is trained

- eagerly, with its tables where TorchRec puts them on a single GPU: DistributedModelParallel with one process;
- eagerly, with jfi's fused collections, from which attention reads its rows by id, and torch's fused Adam;
- the same captured by `jfi.CapturedStep`.  Padded attention then has jfi's fused collections too, and pads to N, the
  longest history that there may be: finding the longest of a batch would wait for the device.  (Every batch here has
  one of N events, so that it pads as much eagerly.)

Eager steps find their batches on the device, between events.  Captured steps are given batches in pinned memory, and
the time is the wall time of steps that follow each other, copies included.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
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
from benchmarks.problem import DTYPES, Shape, log_normal, order, valid
from benchmarks.run import TOLERANCE, summary
from jfi import (
    CapturedStep,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    JaggedFeatureInteraction,
    SequenceFeatureConfig,
)
from jfi.data import Batch
from jfi.models import AttentionPooling, SequenceDLRM

BATCHES = 4
PROFILED_STEPS, HEAVIEST = 5, 10
#: How the profiler's entries end that are waiting, not kernels.
WAITING = (" Sync", " Wait Event")
JFI, PADDED, MEAN = "jfi", "padded SDPA", "mean pooling"
POOLINGS = (JFI, PADDED, MEAN)
#: Of the tables, as `jfi.training` has them; fbgemm's own eps is that.
TABLE_OPTIONS = {"lr": 0.01, "eps": 1e-8}
CHECKED_STEPS = 4  # of which the first two are the warm-up of a captured step


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Args:
        pooling: one of POOLINGS.
        by_id: with jfi's fused collections in the place of TorchRec's sharded ones.
        captured: as CUDA graphs.
    """

    pooling: str
    by_id: bool = False
    captured: bool = False

    @property
    def name(self) -> str:
        if self.captured and self.pooling != JFI:
            return f"{self.pooling}, captured"
        return self.pooling + ", tables by id" * self.by_id + ", captured" * self.captured


EAGER = tuple(Way(pooling) for pooling in POOLINGS)
BY_ID, CAPTURED, PADDED_CAPTURED = Way(JFI, True), Way(JFI, True, True), Way(PADDED, True, True)
WAYS = (*EAGER, BY_ID, CAPTURED, PADDED_CAPTURED)
#: What every way is compared with, by the name in the columns.
PEERS = {"padded": PADDED, "mean": MEAN, "jfi": JFI, "padded_captured": PADDED_CAPTURED.name}


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
    """Stands in for a JaggedFeatureInteraction of one feature: pads, then SDPA.

    It pads to the batch's longest history, or to `longest`, which needs no number from the device.
    """

    def __init__(
        self,
        feature: SequenceFeatureConfig,
        embedding_dim: int,
        num_heads: int,
        device: torch.device,
        longest: int | None = None,
    ) -> None:
        super().__init__(embedding_dim, num_heads, 1, device)
        self.feature, self.embedding_dim, self.longest = feature, embedding_dim, longest

    def forward(self, sequences: dict[str, JaggedTensor], targets: dict[str, Tensor], *times: None) -> KeyedTensor:
        """`times`: what a JaggedFeatureInteraction gets for batches by user, in others None."""
        events = sequences[self.feature.sequence_keys[0]]
        history = events.to_padded_dense(self.longest)
        query = self.query(targets[self.feature.target_keys[0]]).unflatten(1, (1, *self.heads))
        key, value = (projection(history).unflatten(2, self.heads) for projection in (self.key, self.value))
        # An empty sample sees one row of padding, whose value is 0.
        seen = valid(events.lengths().clamp(min=1), history.shape[1])[:, None, None]
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), seen)
        return KeyedTensor([self.feature.name], [self.embedding_dim], self.output(out.transpose(1, 2).flatten(1)))


def feature_of(shape: StepShape) -> SequenceFeatureConfig:
    return SequenceFeatureConfig("taste", ["history_item"], ["item"], max_seqlen=shape.N)


def build_model(
    pooling: str,
    shape: StepShape,
    device: torch.device,
    tables: torch.device,
    by_id: bool = False,
    one_collection: bool = False,
) -> SequenceDLRM:
    """A model with one of POOLINGS, with its tables on a device of their own.

    by_id: in jfi's fused collections. one_collection: all in one EmbeddingCollection; the model computes the same.
    """
    bags = [
        EmbeddingBagConfig(name=key, embedding_dim=shape.D, num_embeddings=size, feature_names=[key])
        for key, size in {"category": shape.categories, "user": shape.users}.items()
    ]
    items = EmbeddingConfig(
        name="item", embedding_dim=shape.D, num_embeddings=shape.items, feature_names=["item", "history_item"]
    )
    if by_id:
        own = {"output_dtype": DTYPES[shape.dtype], "device": tables}
        collections = (
            FusedEmbeddingBagCollection(bags, RowWiseAdagrad, TABLE_OPTIONS, **own),
            FusedEmbeddingCollection([items], RowWiseAdagrad, TABLE_OPTIONS, **own),
        )
    elif one_collection:
        singles = [
            EmbeddingConfig(
                name=bag.name,
                embedding_dim=shape.D,
                num_embeddings=bag.num_embeddings,
                feature_names=bag.feature_names,
            )
            for bag in bags
        ]
        collections = None, EmbeddingCollection(tables=[items, *singles], device=tables)
    else:
        collections = (
            EmbeddingBagCollection(tables=bags, device=tables),
            EmbeddingCollection(tables=[items], device=tables),
        )
    with device:
        model = SequenceDLRM(
            *collections,
            [feature_of(shape)],
            shape.dense_features,
            [*shape.dense_layers, shape.D],
            [*shape.over_layers, 1],
            pooling="mean" if pooling == MEAN else AttentionPooling(shape.H),
        )
    if pooling == PADDED:
        longest = shape.N if by_id else None
        model.sequence_arch.pooling = PaddedAttention(feature_of(shape), shape.D, shape.H, device, longest)
    return model


def shard(
    model: SequenceDLRM,
    shape: StepShape,
    device: torch.device,
    placement: ParameterShardingGenerator | None = None,
    dense: type[Optimizer] = Adam,
    sharder: EmbeddingCollectionSharder | None = None,
    data_parallel: bool = True,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model as TorchRec trains it, and its optimizers; by default all tables are on the first rank.

    `sharder` is that of the table of histories, if not TorchRec's. data_parallel: with DistributedDataParallel.
    """
    looked_up = {"output_dtype": DataType.BF16 if shape.dtype == "bfloat16" else DataType.FP32}
    bag_sharder, sharder = EmbeddingBagCollectionSharder(looked_up), sharder or EmbeddingCollectionSharder(looked_up)
    placement = placement or table_wise(rank=0, compute_kernel=EmbeddingComputeKernel.FUSED.value)
    size = dist.get_world_size()
    plan = {}
    for key, its_sharder in (("embedding_bag_collection", bag_sharder), ("embedding_collection", sharder)):
        collection = getattr(model, key)
        if collection is None:
            continue
        tables = [name.split(".")[1] for name, _ in collection.named_parameters()]
        apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), dict(TABLE_OPTIONS))
        plan[key] = construct_module_sharding_plan(
            collection, dict.fromkeys(tables, placement), its_sharder, size, size, device.type
        )
    sharders = [bag_sharder, sharder]
    sharded = DistributedModelParallel(
        model, device=device, plan=ShardingPlan(plan), sharders=sharders, init_data_parallel=data_parallel
    )
    rest = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(sharded.named_parameters())), dense)
    return sharded, CombinedOptimizer([sharded.fused_optimizer, rest])


@contextlib.contextmanager
def one_process(device: torch.device) -> Iterator[None]:
    """A process group of this process alone, on a free port."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch, autocast: bool = True) -> Tensor:
    """Returns the loss.  Gradients are dropped at the end, so that none is held between steps."""
    with torch.autocast(batch.labels.device.type, torch.bfloat16, enabled=autocast):
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
    padded.load(layer.attention[feature_of(shape).name].state_dict())
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


def profiled_kernels(step: Callable[[], object], device: torch.device) -> list[dict]:
    """The kernels of a step by their names, those that take most first; on a CPU, operators instead of kernels."""
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
        {"name": event.key, "us": time / PROFILED_STEPS, "calls": event.count / PROFILED_STEPS} for time, event in spent
    ]


def heaviest_kernels(step: Callable[[], object], device: torch.device) -> list[dict]:
    """What takes most of a step."""
    return profiled_kernels(step, device)[:HEAVIEST]


class Training:
    """A model that is trained in some way.

    Attributes:
        model, optimizer: the optimizer of everything that the backward does not step.
        step: makes a step on a batch; of a captured way the `CapturedStep`.

    Args:
        way: how.
        shape: of the model and the batches.
        device: of the model.
        reference: the batch that capacities follow from.
        autocast: whether the dense parts are bfloat16.
    """

    def __init__(
        self, way: Way, shape: StepShape, device: torch.device, reference: Batch, autocast: bool = True
    ) -> None:
        torch.manual_seed(0)
        if way.by_id:
            self.model = build_model(way.pooling, shape, device, device, by_id=True)
            dense = [x for name, x in self.model.named_parameters() if not name.startswith("embedding_")]
            # What a graph reads is on its device, the learning rate too.
            rate = torch.tensor(1e-3, device=device)
            if autocast:
                self.optimizer = Adam(dense, lr=rate, fused=True, capturable=device.type == "cuda")
            else:
                self.optimizer = SGD(dense, lr=rate, fused=True)
        else:
            model = build_model(way.pooling, shape, device, torch.device("meta"))
            self.model, self.optimizer = shard(model, shape, device, dense=Adam if autocast else SGD)
        self.step: Callable[[Batch], Tensor] = lambda batch: train_step(self.model, self.optimizer, batch, autocast)
        if way.captured:
            self.step = CapturedStep(self.step, self.model, reference=reference)

    def weights(self) -> dict[str, Tensor]:
        """Copies of all parameters by name."""
        return {name: _local(x).detach().clone() for name, x in self.model.state_dict().items()}

    def load(self, weights: dict[str, Tensor]) -> None:
        for name, x in self.model.state_dict().items():
            _local(x).detach().copy_(weights[name])

    def state_bytes(self) -> int:
        """Of the optimizer of the dense parts, which its first step makes."""
        states = self.optimizer.state.values()
        return sum(x.nbytes for state in states for x in state.values() if isinstance(x, Tensor))

    def replay(self) -> Callable[[], None] | None:
        """Of the graph of a captured way: its kernels without the copies of the batch."""
        found = [bucket.replay for bucket in self.step._buckets.values() if bucket.replay is not None]
        return found[0] if found else None


def _local(x: Tensor) -> Tensor:
    """This process's part, the whole here, of what `state_dict` has for a sharded table."""
    return x.local_shards()[0].tensor if hasattr(x, "local_shards") else x


def changes(training: Training, weights: dict[str, Tensor], batches: list[Batch]) -> dict[str, Tensor]:
    """How the tables differ from `weights`, the model's first ones, after CHECKED_STEPS, and the losses."""
    training.load(weights)
    losses = [training.step(batches[i % len(batches)]).float().clone() for i in range(CHECKED_STEPS)]
    tables = {name: x - weights[name] for name, x in training.weights().items() if name.startswith("embedding_")}
    return tables | {"losses": torch.stack(losses)}


def training_error(way: Way, shape: StepShape, batches: list[Batch], device: torch.device) -> float:
    """Relative error of what a way's steps change, against those of TorchRec's tables with the same pooling.

    In float32 without TF32, since a rounding that turns a ReLU's unit on changes gradients by more than itself, and
    with SGD for the dense parts, since Adam makes a whole step of a rounding error where a gradient is zero.
    """
    shape, found, weights = replace(shape, dtype="float32"), [], None
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for one in (Way(way.pooling), way):
            training = Training(one, shape, device, batches[0], autocast=False)
            weights = training.weights() if weights is None else weights
            found.append(changes(training, weights, batches))
            if one.captured and device.type == "cuda" and training.replay() is None:
                raise RuntimeError(f"nothing was captured: {training.step.summary()}")
            del training
            release(device)
    finally:
        torch.set_float32_matmul_precision(precision)
    truth, own = found
    wrong = [float((own[name] - x).norm() / x.norm()) for name, x in truth.items()]
    return max(wrong, key=lambda x: (x != x, x))


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_model(
    row: dict, way: Way, shape: StepShape, batches: list[Batch], device: torch.device, seconds: float
) -> None:
    """Fills in a row; `batches` are on the device."""
    if way.pooling != MEAN:
        check = training_error(way, shape, batches, device) if way.by_id else disagreement(shape, batches[0], device)
        row["error"] = check
        if not row["error"] <= TOLERANCE["float32"]:
            others = "TorchRec's tables" if way.by_id else "jfi and padded"
            row |= {"status": "wrong", "note": f"{others} differ by {row['error']:.1e}"}
            return
    gpu = device.type == "cuda"
    if way.captured:
        batches = [batch.to(torch.device("cpu")) for batch in batches]
        batches = [batch.pin_memory() for batch in batches] if gpu else batches
    training = Training(way, shape, device, batches[0])
    steps = [lambda batch=batch: training.step(batch) for batch in batches]
    if way.captured:
        row["peak_mb"] = measure.first_peak_mb(lambda: [step() for step in steps], training.state_bytes)
        step_us = measure.wall_us(steps, seconds)
        row["summary"] = training.step.summary()
        if gpu and training.replay() is None:
            raise RuntimeError(f"nothing was captured: {row['summary']}")
    else:
        step_us = measure.eager_us(steps, seconds)
        row["peak_mb"] = measure.peak_mb(steps[0])
    row["loss"] = float(steps[0]())
    if not math.isfinite(row["loss"]):
        row |= {"status": "wrong", "note": f"a loss of {row['loss']}"}
        return
    row |= {"status": "ok", "step_us": step_us, "queries_per_second": shape.B / step_us * 1e6}
    kernels = profiled_kernels((way.captured and training.replay()) or steps[0], device)
    row["kernel_count"], row["kernels_us"] = (sum(kernel[key] for kernel in kernels) for key in ("calls", "us"))
    row["step_over_kernels"] = step_us / row["kernels_us"]
    if row["ours"]:
        row["kernels"] = kernels[:HEAVIEST]


def run(case: StepCase, device: torch.device, seconds: float) -> Iterator[dict]:
    """One row a way, with its ratios to the others."""
    shape, rows = case.shape, {}
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())  # as TorchRec names it
    batches = [make_batch(shape, seed, device) for seed in range(BATCHES)]
    columns = {"B": shape.B, "N": shape.N, "D": shape.D, "H": shape.H, "dtype": shape.dtype, "mean": shape.mean}
    columns["S"] = batches[0].sparse_features["history_item"].values().shape[0]
    with one_process(device), torch.autograd.set_multithreading_enabled(False):
        for way in WAYS:
            row = {"case": case.name, "implementation": way.name, "ours": way.pooling == JFI, "headline": True}
            row |= columns
            rows[way.name] = row
            try:
                measure_model(row, way, shape, batches, device, seconds)
            except Exception as error:
                row |= {"status": "failed", "note": summary(error)}
            release(device)
    for row in rows.values():
        for peer, name in PEERS.items():
            if row["status"] == rows[name]["status"] == "ok":
                row[f"speed_over_{peer}"] = rows[name]["step_us"] / row["step_us"]
                row[f"memory_over_{peer}"] = row["peak_mb"] / rows[name]["peak_mb"]
        yield row


def cases(quick: bool) -> list[StepCase]:
    shape = {"B": 1024 if quick else 4096, "N": 1024, "D": 64, "H": 4}
    shapes = [StepShape(**shape, dtype=dtype) for dtype in (["bfloat16"] if quick else ["float32", "bfloat16"])]
    return [StepCase(shape) for shape in shapes]
