"""One process of several whose attention goes to the rows: `work`.

Each case is a model, a way to shard its tables and the parts of each batch; a file gets the losses of its steps, what
the processes sent, and their last gradients. `train_alone` does the same in one process.
"""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from interpreter import make_faster
from random_layers import differences
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor

from benchmarks.sent_bytes import SentBytes
from jfi import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    JaggedFeatureInteraction,
    KeyBias,
    PositionBias,
    SequenceDLRM,
    SequenceFeatureConfig,
    WeightBias,
)
from jfi.cuda_graphs.captured_step import CapacityBucket
from jfi.cuda_graphs.static_batch import Described
from jfi.distributed import (
    AttentionCollectionSharder,
    CapturedShardedStep,
    FetchedBagsSharder,
    average_gradients,
    remote_attention,
)
from jfi.distributed.fixed_input_dist import DistributedBuffers, FixedInputDist
from jfi.distributed.sharded_tables import ShardedTables
from jfi.models import AttentionPooling
from jfi.modules import outside_ids, validation
from jfi.ops.partial_target_attention import attend_to_part, part_gradients
from jfi.tables.table_rows import RemoteRows
from jfi.utils import context
from jfi.utils.operands import TargetAttentionInputs

#: Rows of the tables of bags.
BAGS = {"user": 40, "tag": 25, "city": 7}
#: Seeds of the random layers that two processes compare.
RANDOM = range(20, 40)
STEPS, SAMPLES, ITEMS, OTHERS = 4, 8, 50, 30
RATE, EPS = 0.1, 1e-10
#: The state that has the step at which each row was last stepped.
AT = "stepped_at"
ROWWISE = "rowwise_adagrad"
FUSED = FusedEmbeddingBagCollection, FusedEmbeddingCollection
OPTIMIZERS = {"adagrad": torch.optim.Adagrad, ROWWISE: RowWiseAdagrad, "sgd": torch.optim.SGD}
#: First samples of each rank, and the end.
UNEVEN, EMPTY = (0, 2, SAMPLES), (0, 0, SAMPLES)


@dataclass
class Case:
    """What is trained.

    Args:
        features: by name their options; both read items and ratings, of the table `other` or the ratings first where
            they say so.
        placement: of the table of items: "row_wise", or "table_wise" on the last rank.
        replicate_below: rows of tables that every rank reads whole.
        parts: first samples of each rank of two.
        optimizer: of the tables.
        ids: "any"; "low": all items lie in the first half of the table, on one rank; "one tag": samples of the first
            rank have one in the first batch, all others any number; "outside": of each key some are outside of their
            table or the buckets of their bias.
        num_queries: of the layers of an `OwnModel`.
        bags: "sum" or "mean" of users, with one id a sample, tags, with any number, and cities, a small table; or "".
        own: whether the model is an `OwnModel`, else a SequenceDLRM.
        decay: weight decay of the tables, which only jfi's tables have, so one process trains those.
    """

    features: dict[str, dict] = field(default_factory=lambda: {"taste": {}})
    placement: str = "row_wise"
    replicate_below: int = 10
    parts: tuple[int, ...] = UNEVEN
    optimizer: str = "adagrad"
    ids: str = "any"
    num_queries: int = 1
    bags: str = ""
    own: bool = False
    decay: float = 0.0


#: The case whose tables are all replicated, whose attention on a CPU takes no padding.
LOCAL = "small tables"
#: The case of a layer without a collection that reads weights.
OWN = "weights, own layer"
CASES = {
    "plain": Case(),
    "position, two features": Case({"taste": {"bias": PositionBias(8)}, "recent": {"bias": PositionBias(8)}}),
    "two tables": Case({"taste": {}, "recent": {"table": "other"}}),
    "weights": Case(
        {"taste": {"bias": WeightBias()}, "recent": {"weighted_values": True, "first": "rating"}}, optimizer=ROWWISE
    ),
    OWN: Case(
        {"taste": {"bias": WeightBias()}, "recent": {"weighted_values": True, "first": "rating"}},
        optimizer=ROWWISE,
        own=True,
    ),
    "key bias, own layers": Case(
        {name: {"bias": KeyBias(f"{name}_age", 5), "weighted_values": True} for name in ("taste", "recent")},
        num_queries=2,
        own=True,
    ),
    "key bias, whole table": Case(
        {"taste": {"bias": KeyBias("taste_age", 5)}}, placement="table_wise", optimizer="sgd", decay=0.1
    ),
    "a rank without samples": Case(parts=EMPTY),
    "all rows on one rank": Case(ids="low"),
    "bags": Case(bags="sum", decay=0.1),
    "a key with one id a sample on one rank alone": Case(bags="sum", ids="one tag"),
    "ids outside of their tables": Case(
        {"taste": {"bias": KeyBias("taste_age", 5)}, "recent": {"bias": KeyBias("recent_age", 5)}},
        optimizer="sgd",
        ids="outside",
        bags="sum",
    ),
    "means, a rank without samples": Case(bags="mean", parts=EMPTY, optimizer="rowwise_adagrad", decay=0.1),
    LOCAL: Case(replicate_below=1000, decay=0.1),
}


def features_of(case: Case) -> list[SequenceFeatureConfig]:
    built = []
    for name, options in case.features.items():
        own = {key: value for key, value in options.items() if key not in ("table", "first")}
        keys = [f"{name}_item", f"{name}_rating"][:: -1 if "first" in options else 1]
        built.append(SequenceFeatureConfig(name, keys, ["item"], **own))
    return built


class OwnModel(nn.Module):
    """A layer a feature without a collection, whose targets and events share tables that one outside of them has.

    The layers read weights and bucket ids of the batch's ids; with `rebuilds` the events are built again with them.
    """

    def __init__(self, collection: EmbeddingCollection, case: Case) -> None:
        super().__init__()
        self.embedding_bag_collection, self.embedding_collection = None, collection
        layers = (JaggedFeatureInteraction([feature], 8, 2, case.num_queries) for feature in features_of(case))
        self.layers = nn.ModuleList(layers)
        self.over = nn.Linear(8 * len(self.layers) + 8 + 3, 1)
        self.rebuilds = False

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        events = self.embedding_collection(ids)
        targets = {"item": events["item"].values()}
        if self.rebuilds:
            rebuilt = {key: one for key, one in ids.to_dict().items() if key.endswith("_age")}
            for key, one in events.items():
                rebuilt[key] = JaggedTensor(one.values(), lengths=one.lengths(), weights=ids[key].weights())
            pooled = [layer(rebuilt, targets).values() for layer in self.layers]
        else:
            pooled = [layer(events, targets, ids=ids).values() for layer in self.layers]
            unread = [one.is_read for key, one in events.items() if isinstance(one, RemoteRows)]
            assert not any(unread), "a history was read"
        return self.over(torch.cat([dense, targets["item"], *pooled], dim=1))


def build(case: Case, fused: bool = False) -> SequenceDLRM | OwnModel:
    torch.manual_seed(0)
    of_bags, of_rows = EmbeddingBagCollection, EmbeddingCollection
    if fused:
        own = OPTIMIZERS[case.optimizer], options_of(case)
        of_bags, of_rows = (partial(one, optimizer_type=own[0], optimizer_kwargs=own[1]) for one in FUSED)
    keys = {"item": ["item"], "other": [], "rating": []}
    for name, options in case.features.items():
        keys[options.get("table", "item")].append(f"{name}_item")
        keys["rating"].append(f"{name}_rating")
    sizes = {"item": ITEMS, "other": OTHERS, "rating": 6}
    tables = [EmbeddingConfig(sizes[name], 8, name=name, feature_names=own) for name, own in keys.items() if own]
    pooling = PoolingType.MEAN if case.bags == "mean" else PoolingType.SUM
    bags = [EmbeddingBagConfig(size, 8, name=key, feature_names=[key], pooling=pooling) for key, size in BAGS.items()]
    if case.own:
        return OwnModel(of_rows(tables=tables), case)
    return SequenceDLRM(
        of_bags(tables=bags) if case.bags else None,
        of_rows(tables=tables),
        features_of(case),
        dense_in_features=3,
        dense_arch_layer_sizes=[8],
        over_arch_layer_sizes=[8, 1],
        pooling=AttentionPooling(2),
    )


def make_batch(case: Case, seed: int) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor, Tensor]], Tensor]:
    """Dense features, by key ids, weights and lengths, and labels. The first sample has no events."""
    draw = torch.Generator().manual_seed(seed)
    highest = {"item": ITEMS // 2 if case.ids == "low" else ITEMS, "rating": 6, "age": 5}
    sequences = {"item": torch.ones(SAMPLES, dtype=torch.int64)}
    for name in case.features:
        lengths = torch.randint(0, 9, (SAMPLES,), generator=draw)
        lengths[0] = 0
        sequences |= dict.fromkeys([f"{name}_item", f"{name}_rating", f"{name}_age"], lengths)
    columns = {}
    if case.bags:
        sequences |= {"user": sequences["item"], "tag": torch.randint(0, 4, (SAMPLES,), generator=draw)}
        sequences["city"] = sequences["item"]
        if case.ids == "one tag" and seed == 0:
            sequences["tag"][: SAMPLES // 2] = 1
        highest |= BAGS
    for key, lengths in sequences.items():
        name, kind = key.rsplit("_", 1) if "_" in key else ("", key)
        above = OTHERS if kind == "item" and case.features.get(name, {}).get("table") else highest[kind]
        count = int(lengths.sum())
        weights = torch.rand(count, generator=draw) + 0.5
        ids = torch.randint(above, (count,), generator=draw)
        if case.ids == "outside":
            far = torch.tensor([above, -5, 10**9, 2**40 + 1])
            ids[1::5] = far.repeat(count)[: len(ids[1::5])]
        columns[key] = ids, weights, lengths
    dense = torch.rand(SAMPLES, 3, generator=draw)
    return dense, columns, torch.randint(2, (SAMPLES,), generator=draw).float()


def part_of(batch: tuple, first: int, end: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    dense, columns, labels = batch
    values, weights, lengths = [], [], []
    for ids, own_weights, counts in columns.values():
        rows = torch.arange(SAMPLES).repeat_interleave(counts)
        kept = (rows >= first) & (rows < end)
        values.append(ids[kept])
        weights.append(own_weights[kept])
        lengths.append(counts[first:end])
    ids = KeyedJaggedTensor(list(columns), torch.cat(values), torch.cat(weights), lengths=torch.cat(lengths))
    return dense[first:end], ids, labels[first:end]


def options_of(case: Case) -> dict:
    options = {"lr": RATE, "weight_decay": case.decay}
    return options if case.optimizer == "sgd" else options | {"eps": EPS}


@contextmanager
def unchecked(case: Case) -> Iterator[None]:
    """On a CPU ids are used without a check, as on a GPU, where the case has ids that a CPU refuses."""
    if case.ids != "outside":
        yield
        return
    with (
        mock.patch.object(context, "_READABLE", ()),
        mock.patch.object(validation, "may_read", lambda x: False),
    ):
        yield


def with_missing_rows(model: SequenceDLRM) -> None:
    """Gives every table a row of zeros behind its own, which has no gradient."""
    for tables in (model.embedding_bag_collection.embedding_bags, model.embedding_collection.embeddings):
        for table in tables.values():
            rows = nn.functional.pad(table.weight.detach(), (0, 0, 0, 1))
            table.weight = nn.Parameter(rows)
            table.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor(len(grad) - 1), 0.0))


def missing_of(case: Case, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The ids with those outside of their tables as the row behind them."""
    model, values = build(case), []
    sizes = {
        key: table.num_embeddings
        for tables in (
            model.embedding_bag_collection.embedding_bag_configs(),
            model.embedding_collection.embedding_configs(),
        )
        for table in tables
        for key in table.feature_names
    }
    for key, jagged in ids.to_dict().items():
        own, rows = jagged.values(), sizes.get(key)
        values.append(own if rows is None else torch.where((own < 0) | (own >= rows), rows, own))
    return KeyedJaggedTensor(ids.keys(), torch.cat(values), ids.weights(), lengths=ids.lengths())


def count_outside(case: Case) -> dict[str, int]:
    """By table the ids outside of it in all steps."""
    found: Counter[str] = Counter()
    tables = {"item": "item", "rating": "rating"} | {key: key for key in BAGS}
    sizes = {"item": ITEMS, "rating": 6} | BAGS
    for step in range(STEPS):
        for key, (ids, *_) in make_batch(case, step)[1].items():
            table = tables.get(key.rsplit("_", 1)[-1])
            if table is not None:
                found[table] += int(((ids < 0) | (ids >= sizes[table])).sum())
    return dict(found)


def train_alone(case: Case) -> tuple[list[float], dict[str, float]]:
    """The losses, and by table the sums of its optimizer's states."""
    model, losses = build(case, fused=case.decay > 0), []
    model.rebuilds = True
    if case.ids == "outside":
        with_missing_rows(model)
    tables = {name: x for name, x in model.named_parameters() if name.startswith("embedding_")}
    rest = [x for name, x in model.named_parameters() if name not in tables]
    collections = [module for module in model.modules() if isinstance(module, FUSED)]
    steps = [torch.optim.SGD(rest, lr=RATE)]
    if not collections:
        steps.append(OPTIMIZERS[case.optimizer](list(tables.values()), **options_of(case)))
    for step in range(STEPS):
        dense, ids, labels = part_of(make_batch(case, step), 0, SAMPLES)
        ids = missing_of(case, ids) if case.ids == "outside" else ids
        with unchecked(case):
            loss = binary_cross_entropy_with_logits(model(dense, ids).squeeze(1), labels)
        model.zero_grad()
        loss.backward()
        for optimizer in steps:
            optimizer.step()
        losses.append(loss.item())
    found = {}
    for optimizer in [one.fused_optimizer for one in collections] or steps[1:]:
        for name, table in tables.items():
            state = optimizer.state.get(table, {})
            found |= {name.split(".")[2] + AT * (key == AT): x for key, x in state.items() if key in ("sum", AT)}
    return losses, {name: state.sum().item() for name, state in found.items()}


def shard(model: nn.Module, case: Case, data_parallel: bool = True, by_torchrec: bool = False) -> nn.Module:
    """The model with its tables on all ranks, stepped in the backward pass."""
    size, plan = dist.get_world_size(), {}
    sharders = [
        FetchedBagsSharder(replicate_below=case.replicate_below),
        AttentionCollectionSharder(model, replicate_below=case.replicate_below),
    ]
    if by_torchrec:
        sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    large = row_wise() if case.placement == "row_wise" else table_wise(rank=size - 1)
    for name, sharder in zip(("embedding_bag_collection", "embedding_collection"), sharders, strict=True):
        collection = getattr(model, name)
        if collection is not None:
            apply_optimizer_in_backward(OPTIMIZERS[case.optimizer], collection.parameters(), options_of(case))
            tables = [parameter.split(".")[1] for parameter, _ in collection.named_parameters()]
            kinds = {table: table_wise(rank=0) if table in ("rating", "city") else large for table in tables}
            plan[name] = construct_module_sharding_plan(collection, kinds, sharder, size, size, "cpu")
    weights = {name: x.detach().clone() for name, x in model.named_parameters() if name.startswith("embedding_")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharded = DistributedModelParallel(
            model,
            device=torch.device("cpu"),
            plan=ShardingPlan(plan),
            sharders=sharders,
            init_data_parallel=data_parallel,
        )
    # On a CPU TorchRec does not take over those of bags.
    for name, value in sharded.state_dict().items():
        for part in value.local_shards() if name in weights else []:
            first, count = part.metadata.shard_offsets[0], part.metadata.shard_sizes[0]
            part.tensor.copy_(weights[name][first : first + count])
    return sharded


class StandInGraphs:
    """Runs the step on padded buffers, at a replay as before it."""

    def reset(self) -> None: ...

    def load(self, bucket: CapacityBucket, batch: Described) -> None:
        bucket.buffers.fill(bucket.block, batch)

    def run(self, step: Callable) -> object:
        return step()

    def capture(self, step: Callable) -> tuple[Callable, object]:
        outputs = []
        return lambda: outputs.__setitem__(slice(None), [step()]), outputs


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Nobody reads that there is room behind offsets[-1], and gradients of events there are anything."""

    def trimmed(inputs: TargetAttentionInputs) -> TargetAttentionInputs:
        count = int(inputs.offsets[-1])

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:count]

        bias = inputs.bias if inputs.bias_index is not None else cut(inputs.bias)
        own = {"key": cut(inputs.key), "value": cut(inputs.value), "bias": bias, "bias_index": cut(inputs.bias_index)}
        indices = [cut(index) for index in inputs.indices]
        return inputs._replace(**own, value_scale=cut(inputs.value_scale), indices=indices)

    def gradients(
        grad: Tensor, out: Tensor, lse: Tensor, needed: tuple, inputs: TargetAttentionInputs, impl: str
    ) -> list:
        room = inputs.key.size(0)
        found = part_gradients(grad, out, lse, needed, trimmed(inputs), impl)
        # Beyond kernels a bias by bucket is one by event, whose gradients there are 0, as CapturedStep asks for.
        by_event = [None, torch.nan, torch.nan, 0.0 if inputs.bias_index is None else None]
        return [
            x if x is None or value is None else pad(x, (0, 0) * (x.dim() - 1) + (0, room - x.size(0)), value=value)
            for value, x in zip(by_event, found, strict=True)
        ]

    def attend(inputs: TargetAttentionInputs, impl: str) -> tuple[Tensor, Tensor]:
        return attend_to_part(trimmed(inputs), impl)

    with (
        mock.patch.object(context, "_READABLE", ()),
        mock.patch.object(validation, "may_read", lambda x: False),
        mock.patch.multiple(remote_attention, attend_to_part=attend, part_gradients=gradients),
    ):
        yield


class StandInPeers:
    """Counts what a step would send through peer memory, and sends it through all ranks' group."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forget(self) -> None: ...

    def send(self, rows: Tensor, sent: list[int], received: list[int], shared: bool) -> None:
        self.calls["send"] += 1


def use_stand_ins(captured: CapturedShardedStep) -> None:
    """Its steps run on buffers with room; needs `as_on_a_gpu`."""
    captured._graphs = StandInGraphs()
    captured._peers = StandInPeers() if dist.get_world_size() > 1 else None


def train_together(case: Case, way: str = "eager") -> dict:
    """The losses of all ranks' samples, sums of the optimizer's states, and what this rank sent in the last step.

    `way` is "eager", "rows" (of TorchRec's sharders), "without a GPU" (a CapturedShardedStep that makes eager steps),
    "buffers" (ids are sent before the step, which reads padded buffers), "levels" (of which many sizes come up) or
    "uneven" (ranks have other numbers of samples).
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    is_eager = way in ("eager", "rows")
    model, losses = shard(build(case), case, is_eager, way == "rows"), []
    dense_parameters = list(dict(in_backward_optimizer_filter(model.named_parameters())).values())
    rest = torch.optim.SGD(dense_parameters, lr=RATE)
    parts = case.parts if size == 2 else (0, SAMPLES)
    in_buffers = way in ("buffers", "levels", "uneven")
    if way in ("buffers", "levels") and size == 2:
        parts = (0, SAMPLES // 2, SAMPLES)
    batches = [part_of(make_batch(case, step), parts[rank], parts[rank + 1]) for step in range(STEPS)]

    def step(batch: tuple) -> Tensor:
        dense, ids, labels = batch
        loss = binary_cross_entropy_with_logits(model(dense, ids).squeeze(1), labels, reduction="sum")
        rest.zero_grad()
        (loss * size / SAMPLES).backward()
        if not is_eager:
            average_gradients(dense_parameters)
        rest.step()
        return loss.detach() / SAMPLES

    captured, given = None, iter(batches)
    if not is_eager:
        for parameter in dense_parameters if rank else []:
            parameter.data += 1  # which the first rank's take the place of
        captured = CapturedShardedStep(step, model, warmup_steps=1)
        if in_buffers:
            use_stand_ins(captured)
    sizes = mock.patch("jfi.cuda_graphs.static_batch._MULTIPLE", 1 if way == "levels" else 64)
    narrowed, sent_again = 0, -STEPS
    for number in range(STEPS):
        with SentBytes() as sent, sizes, as_on_a_gpu() if in_buffers else unchecked(case):
            own, sender = DistributedBuffers, FixedInputDist
            with (
                mock.patch.object(own, "narrow", autospec=True, side_effect=own.narrow) as narrow,
                mock.patch.object(sender, "send", autospec=True, side_effect=sender.send) as again,
            ):
                loss = step(batches[number]) if captured is None else captured.progress(given)
            narrowed, sent_again = narrowed + narrow.call_count, sent_again + again.call_count
        loss = (loss[0] if isinstance(loss, list) else loss).clone()
        dist.all_reduce(loss)
        losses.append(loss.item())
    states = {}
    steps = [int(one.steps) for one in model.modules() if isinstance(one, ShardedTables)]
    assert steps == [STEPS] * len(steps), "a rank has counted other steps"
    for name, state in ({} if way == "rows" else model.fused_optimizer.state_dict()["state"]).items():
        for key, value in state.items():
            total = sum(
                (shard.tensor.double().sum() for shard in value.local_shards()), torch.zeros((), dtype=torch.float64)
            )
            dist.all_reduce(total)
            states[name.split(".")[-2] + AT * key.endswith(AT)] = total.item()
    weights = {name: type(value).__name__ for name, value in model.state_dict().items() if "embeddings" in name}
    made = {"sent": dict(sent.sent), "calls": dict(sent.calls), "weights": weights}
    made |= {"narrowed": narrowed, "sent again": sent_again, "outside": outside_ids(model)}
    if in_buffers and captured._peers is not None:
        made["peers"] = dict(captured._peers.calls)
    return made | {"losses": losses, "states": states, "summary": captured and captured.summary()}


def averages(rank: int) -> list[list[float] | None]:
    """Gradients that both ranks, the first one and none had, then of a step in which both had all."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    found = []
    for given in ((True, rank == 0, False), (True, True, True)):
        for parameter, has in zip(parameters, given, strict=True):
            parameter.grad = torch.full((2,), rank + 1.0) if has else None
        average_gradients(parameters)
        found += [None if one.grad is None else one.grad.tolist() for one in parameters]
    return found


def work(rank: int, folder: Path) -> None:
    """What one of two processes does."""
    torch.set_num_threads(1)
    make_faster()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    found = {
        way: {name: train_together(case, way) for name, case in CASES.items()} for way in ("eager", "without a GPU")
    }
    for way in ("buffers", "levels"):
        found[way] = {name: train_together(case, way) for name, case in CASES.items() if name != LOCAL}
    found["uneven"] = {name: train_together(CASES[name], "uneven") for name in ("plain", "a rank without samples")}
    found["rows"] = {OWN: train_together(CASES[OWN], "rows")}
    found["random"] = [text for seed in RANDOM for text in differences(seed)]
    found["averages"] = averages(rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
