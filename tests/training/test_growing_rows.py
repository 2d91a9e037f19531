"""Growing tables of two processes against those of one: the same map, the same rows, the same optimizer's states."""

import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import in_processes
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from jfi import FusedEmbeddingBagCollection, FusedEmbeddingCollection, SequenceDLRM, SequenceFeatureConfig
from jfi.distributed import AttentionCollectionSharder, CapturedShardedStep, FetchedBagsSharder
from jfi.modules import GrowingIds, GrowingTable
from jfi.tables.growing_ids import initial_rows
from jfi.training.model.build_model import draw_tables, shards_of, table_configs
from jfi.training.model.ema import ModelAverage
from jfi.training.model.growing_rows import admit_ids

SIZE, STEPS, SAMPLES, WIDTH = 2, 24, 8, 8
CAPACITY = {"item": 30, "user": 14}
KEYS = ["item", "history_item", "user"]
OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
FEATURES = [SequenceFeatureConfig("taste", ["history_item"], ["item"])]
#: By name the exchange, the sharding of events and the optimizer.
CASES = {
    "attention, rows": ("attention", row_wise(), "adagrad"),
    "attention, tables": ("attention", table_wise(rank=1), "rowwise_adagrad"),
    "rows, rows": ("rows", row_wise(), "rowwise_adagrad"),
    "rows, columns": ("rows", column_wise([0, 1]), "adagrad"),
}


def build(bags: type = EmbeddingBagCollection, events: type = EmbeddingCollection, *options: object) -> SequenceDLRM:
    torch.manual_seed(0)
    user = EmbeddingBagConfig(name="user", embedding_dim=WIDTH, num_embeddings=CAPACITY["user"], feature_names=["user"])
    item = EmbeddingConfig(
        name="item", embedding_dim=WIDTH, num_embeddings=CAPACITY["item"], feature_names=["item", "history_item"]
    )
    tables = [
        GrowingTable("item", CAPACITY["item"], ["item", "history_item"], min_count=2),
        GrowingTable("user", CAPACITY["user"], ["user"]),
    ]
    return SequenceDLRM(
        bags([user], *options),
        events([item], *options),
        FEATURES,
        dense_in_features=2,
        dense_arch_layer_sizes=[WIDTH],
        over_arch_layer_sizes=[8, 1],
        growing_ids=GrowingIds(tables, every=5),
    )


def make_batch(step: int) -> tuple[torch.Tensor, list[list[list[int]]], torch.Tensor]:
    """Dense features, by key the ids of each sample, and labels; the ids drift, so that rows get other owners."""
    draw = torch.Generator().manual_seed(step)

    def ids(count: int, spread: float, speed: int) -> list[int]:
        drawn = (torch.randn(count, generator=draw) * spread).long() + step * speed
        return (drawn * 2**40 + 7).tolist()

    lengths = torch.randint(0, 5, (SAMPLES,), generator=draw).tolist()
    columns = [[ids(1, 3, 3) for _ in lengths], [ids(n, 3, 3) for n in lengths], [ids(1, 3, 1) for _ in lengths]]
    labels = torch.randint(2, (SAMPLES,), generator=draw).float()
    return torch.rand(SAMPLES, 2, generator=draw), columns, labels


def part_of(step: int, first: int, end: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    dense, columns, labels = make_batch(step)
    samples = [sample for column in columns for sample in column[first:end]]
    values = torch.tensor([id for sample in samples for id in sample])
    ids = KeyedJaggedTensor(KEYS, values, lengths=torch.tensor([len(sample) for sample in samples]))
    return dense[first:end], ids, labels[first:end]


def train(model, optimizer, tables, first: int, end: int, processes: int) -> dict:
    """Trains on samples of each batch; returns losses, and by step the rows with a new owner."""
    inner = next(one for one in model.modules() if isinstance(one, SequenceDLRM))
    losses, admitted = [], []
    for step in range(STEPS):
        dense, ids, labels = part_of(step, first, end)
        optimizer.zero_grad()
        logits = model(dense, ids).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / SAMPLES
        (loss * processes).backward()
        optimizer.step()
        losses.append(loss.item())
        if inner.growing_ids.is_due(step + 1):
            admitted.append({name: rows.tolist() for name, rows in admit_ids(model, optimizer, tables).items()})
    return {"losses": losses, "admitted": admitted, "ids": {name: inner.growing_ids.ids(name) for name in CAPACITY}}


def train_alone(kind: str) -> dict:
    model = build(FusedEmbeddingBagCollection, FusedEmbeddingCollection, OPTIMIZERS[kind], {"lr": 0.1})
    tables = table_configs(model)
    draw_tables(model.state_dict(), tables, 1)
    own = [
        (name, module.fused_optimizer)
        for name, module in model.named_children()
        if isinstance(module, FusedEmbeddingBagCollection | FusedEmbeddingCollection)
    ]
    dense = {name: p for name, p in model.named_parameters() if name not in tables}
    sgd = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, 0.1))
    optimizer = CombinedOptimizer([*own, ("", sgd)])
    found = train(model, optimizer, tables, 0, SAMPLES, 1)
    weights = {name: model.state_dict()[name].clone() for name in tables}
    states = optimizer.state_dict()["state"]
    return found | {
        "weights": weights,
        "sums": {name: states[name]["sum"].view(len(weights[name]), -1) for name in tables},
    }


def shard(model: SequenceDLRM, case: str, data_parallel: bool = True) -> DistributedModelParallel:
    exchange, way, kind = CASES[case]
    tables = table_configs(model)
    sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    if exchange == "attention":
        options = {"replicate_below": 0}
        sharders = [FetchedBagsSharder(**options), AttentionCollectionSharder(model, **options)]
    parameters = dict(model.named_parameters())
    apply_optimizer_in_backward(OPTIMIZERS[kind], [parameters[name] for name in tables], {"lr": 0.1, "eps": 1e-10})
    plan = {}
    for name, table, sharder in zip(
        ("embedding_bag_collection", "embedding_collection"), ("user", "item"), sharders, strict=True
    ):
        ways = {table: table_wise(rank=0) if table == "user" else way}
        plan[name] = construct_module_sharding_plan(getattr(model, name), ways, sharder, SIZE, SIZE, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DistributedModelParallel(
            model,
            device=torch.device("cpu"),
            plan=ShardingPlan(plan),
            sharders=sharders,
            init_data_parallel=data_parallel,
        )


def train_together(case: str, rank: int) -> dict:
    model = build()
    tables = table_configs(model)
    model = shard(model, case)
    draw_tables(model.state_dict(), tables, 1)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    sgd = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, 0.1))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("", sgd)])
    half = SAMPLES // SIZE
    found = train(model, optimizer, tables, rank * half, (rank + 1) * half, SIZE)
    state, states = model.state_dict(), optimizer.state_dict()["state"]
    shards = {name: [(one.clone(), row, column) for one, row, column in shards_of(state[name])] for name in tables}
    sums = {
        name: [one.clone() for one, *_ in shards_of(next(iter(states[name].values())))] if parts else []
        for name, parts in shards.items()
    }
    return found | {"shards": shards, "sums": sums}


def run(rank: int, folder: str) -> None:
    """What a process does; it maps ids as on a CPU, and the process that trains alone by the kernel."""
    mock.patch("jfi.tables.map_ids.interprets", lambda: False).start()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", SIZE), rank=rank, world_size=SIZE)
    found = {case: train_together(case, rank) for case in CASES}
    growing = build().growing_ids
    many = torch.arange(1, CAPACITY["user"] + 1)
    ids = torch.cat([torch.zeros(2 * len(many), dtype=torch.int64), many])
    too_many = KeyedJaggedTensor(KEYS, ids, lengths=torch.ones(len(ids), dtype=torch.int64))
    growing(part_of(0, 0, 1)[1] if rank == 0 else too_many)
    try:
        growing.admit()
    except ValueError as error:
        found["error"] = str(error)
    try:
        sharded = shard(build(), "attention, rows", data_parallel=False)
        CapturedShardedStep(lambda one: {}, sharded, reference=part_of(0, 0, SAMPLES))
    except ValueError as error:
        found["captured"] = str(error)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("processes")
    in_processes(run, str(folder))
    return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(SIZE)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_map_and_the_rows_of_one(case, found):
    alone, both = train_alone(CASES[case][2]), [rank[case] for rank in found]
    for one in both:
        assert one["admitted"] == alone["admitted"]
        assert all(torch.equal(one["ids"][name], ids) for name, ids in alone["ids"].items())
        for name, parts in one["shards"].items():
            for (weight, row, column), sums in zip(parts, one["sums"][name], strict=True):
                rows, columns = slice(row, row + len(weight)), slice(column, column + weight.shape[1])
                torch.testing.assert_close(weight, alone["weights"][name][rows, columns], rtol=0, atol=5e-5)
                expected = (
                    alone["sums"][name][rows, columns] if sums.shape == weight.shape else alone["sums"][name][rows]
                )
                torch.testing.assert_close(sums.view(expected.shape), expected, rtol=1e-3, atol=1e-7)
    assert sum(both[0]["losses"][-1:] + both[1]["losses"][-1:]) == pytest.approx(alone["losses"][-1], abs=2e-5)
    # Rows had several owners.
    given = [row for step in alone["admitted"] for row in step["item"]]
    assert len(given) > 1.5 * CAPACITY["item"]


def test_all_processes_refuse_a_batch_that_one_of_them_has(found):
    assert found[0]["error"] == found[1]["error"]
    assert "must be above the number of distinct ids of a batch, at least 14, got 14" in found[0]["error"]


def test_sharded_steps_with_growing_ids_are_not_captured(found):
    assert found[0]["captured"] == "the step cannot be captured: its GrowingIds map ids, which are sent ahead of it"


def test_the_moving_average_has_the_same_map_and_its_rows_begin_with_the_weights():
    options = torch.optim.Adagrad, {"lr": 0.1}
    model = build(
        partial(FusedEmbeddingBagCollection, ema_decay=0.9), partial(FusedEmbeddingCollection, ema_decay=0.9), *options
    )
    average = ModelAverage(model, 0.9)
    tables = table_configs(model)
    for step in range(10):  # rows are admitted after the last one
        dense, ids, _ = part_of(step, 0, SAMPLES)
        model(dense, ids).sum().backward()
        average.update()
        if model.growing_ids.is_due(step + 1):
            admitted = admit_ids(model, CombinedOptimizer([]), tables)
    average.flush()
    new, config = admitted["item"], tables["embedding_collection.embeddings.item.weight"]
    rows = average.module.embedding_collection.embeddings["item"].weight[new]
    assert len(new) and torch.equal(rows, initial_rows(model.growing_ids.ids("item")[new], config))
    dense, ids, _ = part_of(10, 0, SAMPLES)
    average.module.eval()
    with torch.no_grad():
        mapped = average.module.growing_ids(ids)
        assert torch.equal(mapped.values(), model.growing_ids(ids).values()) and mapped.values().any()
        assert average.module(dense, ids).isfinite().all()


def test_a_model_whose_tables_do_not_grow_admits_nothing():
    model = build()
    model.growing_ids = None
    assert admit_ids(model, CombinedOptimizer([]), table_configs(model)) == {}
