"""Launched runs with sharded tables: real processes over gloo, compared with one process that shards nothing."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from data_configs import replace_data
from launched import (
    ROUNDING,
    assert_same_metrics,
    environment,
    free_port,
    in_two_processes,
    job,
    tiny,
    write_tables,
)
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.types import EmbeddingModuleShardingPlan
from worker import do, without_pictures

from jfi.data import Batch, FeatureConfig, load_dataset
from jfi.data.schema.schema import CODEC
from jfi.data.schema.semantic_ids import codec_folder, write_sids
from jfi.semantic_ids import DiscretePCA
from jfi.training import (
    Config,
    ConfigError,
    OptimizerConfig,
    OptimizerGroup,
    ShardingConfig,
    resume,
    train,
)
from jfi.training.checkpoints.checkpoint import latest_checkpoint, load_checkpoint
from jfi.training.config_parser import load_config
from jfi.training.distributed.processes import World, _init_process_group, join_world
from jfi.training.distributed.sharding import _plan, check_sharded, sharders_of
from jfi.training.loop.trainer import Trainer
from jfi.training.model_config import PretrainedConfig
from jfi.training.run.recorder import read_metrics
from jfi.training.run.run_data import load_shared, save_data
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.saved_run import load_run

LOG_EVERY, REPLICATE_BELOW = 1, 10

STOP_AT = 17
#: Where sums over a batch are taken in another order each time.
GPU_ROUNDING = 5e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("distributed")
    write_tables(path)
    return path


@pytest.fixture
def one_launched(monkeypatch):
    """As if torchrun had launched this very process, alone."""
    for name, value in environment(0, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


@pytest.fixture(scope="module")
def alone(folder):
    """The run folder of a run in one process, not launched, by optimizer."""
    with without_pictures():
        for optimizer in ("adagrad", "rowwise_adagrad"):
            train(tiny(folder, f"alone-{optimizer}", optimizer))
    return {optimizer: folder / f"alone-{optimizer}" for optimizer in ("adagrad", "rowwise_adagrad")}


def by_user(folder: Path, name: str, **training: object) -> Config:
    """With timelines, cut at eight events, whose batches are about as large."""
    config = tiny(folder, name, "rowwise_adagrad", "row_wise", **training)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, batching="user", max_history=2))


def scheduled(folder: Path, name: str) -> Config:
    """With a warm-up, a cosine and clipped gradients, for an epoch."""
    config = tiny(folder, name, "rowwise_adagrad", "row_wise", epochs=1, max_grad_norm=0.05)
    config.optimizer = dataclasses.replace(config.optimizer, schedule="cosine", warmup_steps=7)
    return config


def semantic(folder: Path, name: str) -> Config:
    """With semantic IDs of items 0 to 35 beside their ids, decoded, for an epoch."""
    path = folder / "sids.parquet"
    if not path.exists():
        content = torch.randn(36, 5, generator=torch.Generator().manual_seed(0))
        codec = DiscretePCA(6).fit(content)
        codec_folder(path).mkdir()
        codec.save(codec_folder(path) / CODEC)
        write_sids(path, "item_id", pa.array(map(str, range(36))), codec.encode(content), codec)
    config = tiny(folder, name, "rowwise_adagrad", "row_wise", epochs=1)
    config.data.semantic_ids, config.model.semantic_ids = str(path), "decode"
    return config


KINDS = {"table_wise": "rowwise_adagrad", "row_wise": "rowwise_adagrad", "column_wise": "adagrad"}


def warm(folder: Path, name: str, old: Path, optimizer: str, sharding: str = "auto") -> Config:
    """A short run that starts from the run `old`, on a table whose ids have moved."""
    config = tiny(folder, name, optimizer, sharding, epochs=1, checkpoint_every=0, warm_start=str(old), rows_after=None)
    config.data.interactions = str(folder / "grown.csv")
    return config


def given(folder: Path, name: str, old: Path, optimizer: str, sharding: str = "auto") -> Config:
    """As `warm`, with vectors of a file: for 25 items, of which -1 is new, and for countries.

    Those of items are frozen, but for `adagrad`, whose tables are divided by columns, so that FBGEMM steps them.
    """
    draw = np.random.default_rng(0)
    for column, ids in (("item_id", [-1, *range(12, 36)]), ("country", ["A", "c"])):
        vectors = pa.table({"id": list(map(str, ids)), "vector": list(draw.normal(size=(len(ids), 8)))})
        pa.parquet.write_table(vectors, folder / f"{column}.parquet")
    config = warm(folder, name, old, optimizer, sharding)
    is_frozen = optimizer != "adagrad"
    config.model.pretrained = {
        column: PretrainedConfig(str(folder / f"{column}.parquet"), frozen=is_frozen and column == "item_id")
        for column in ("item_id", "country")
    }
    if is_frozen:
        config.sharding.exchange = "attention"
    return config


@pytest.fixture(scope="module")
def launched(folder, alone):
    """Outcomes by rank of what two processes did, and of the one that ends what they began."""
    one_then_two, two_then_one = (
        job(folder, tiny(folder, name, "rowwise_adagrad", "row_wise"), stop_at=STOP_AT) for name in ("1to2", "2to1")
    )
    with mock.patch.dict(os.environ, environment(0, 1)):
        do(one_then_two)
    jobs = [job(folder, tiny(folder, kind, optimizer, kind)) for kind, optimizer in KINDS.items()]
    jobs += [job(folder, warm(folder, f"warm-{kind}", alone[name], name, kind)) for kind, name in KINDS.items()]
    jobs += [two_then_one, {"port": free_port(), "resume": str(folder / "1to2")}]
    files = {kind: given(folder, f"given-{kind}", alone[name], name, kind) for kind, name in KINDS.items()}
    stops = {"row_wise": {"stop_at": STOP_AT}}  # a run that goes on keeps the frozen rows too
    jobs += [job(folder, config, **stops.get(kind, {})) for kind, config in files.items()]
    jobs.append({"port": free_port(), "resume": str(folder / "given-row_wise")})
    jobs.append(job(folder, by_user(folder, "by_user")))
    jobs.append(job(folder, scheduled(folder, "scheduled")))
    jobs.append(job(folder, semantic(folder, "semantic")))
    outcomes = in_two_processes(folder, jobs)
    with mock.patch.dict(os.environ, environment(0, 1)):
        return [*outcomes, do({"port": free_port(), "resume": str(folder / "2to1")})]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_have_the_losses_of_one(folder, alone, launched, kind):
    assert_same_metrics(folder / kind, alone[KINDS[kind]])


def test_two_processes_share_timelines_as_one_does(folder, launched):
    with without_pictures():
        train(by_user(folder, "by_user-alone"))
    steps = read_metrics(folder / "by_user-alone" / "metrics.jsonl")[-1]["step"]
    assert_same_metrics(folder / "by_user", folder / "by_user-alone", steps=steps)


def test_semantic_ids_have_the_losses_of_one_process(folder, launched, one_launched, monkeypatch):
    with without_pictures(), pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE")
        train(semantic(folder, "semantic-alone"))
    assert_same_metrics(folder / "semantic", folder / "semantic-alone", steps=21)
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: batch)
    pipelined = train_pipelined(semantic(folder, "semantic-pipelined"))
    assert pipelined == {"embedding_bag_collection", "embedding_collection"}
    assert_same_metrics(folder / "semantic-pipelined", folder / "semantic-alone", steps=21)


def test_rates_and_clipping_are_those_of_one_process(folder, alone, launched):
    with without_pictures():
        train(scheduled(folder, "scheduled-alone"))
    assert_same_metrics(folder / "scheduled", folder / "scheduled-alone", steps=21)
    plain, other = (read_metrics(run / "metrics.jsonl") for run in (alone["rowwise_adagrad"], folder / "scheduled"))
    assert abs(plain[20]["loss"] - other[20]["loss"]) > 100 * ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_tables_start_warm_as_whole_ones(folder, alone, launched, kind):
    optimizer = KINDS[kind]
    with without_pictures():
        if not (folder / f"warm-{optimizer}").exists():
            train(warm(folder, f"warm-{optimizer}", alone[optimizer], optimizer))
    assert_same_metrics(folder / f"warm-{kind}", folder / f"warm-{optimizer}", steps=21)
    # A cold start has other losses.
    logs = (read_metrics(path / "metrics.jsonl") for path in (alone[optimizer], folder / f"warm-{kind}"))
    cold, begun = (next(line for line in log if line["split"] == "train") for log in logs)
    assert abs(cold["loss"] - begun["loss"]) > 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_tables_are_filled_from_a_file_and_keep_frozen_rows(folder, alone, launched, kind):
    optimizer, run = KINDS[kind], folder / f"given-{kind}"
    with without_pictures():
        if not (folder / f"given-{optimizer}").exists():
            train(given(folder, f"given-{optimizer}", alone[optimizer], optimizer))
    assert_same_metrics(run, folder / f"given-{optimizer}", steps=21)
    found, before = (rows_of(path, "item_id") for path in (run, alone[optimizer]))
    vectors = vectors_of(folder / "item_id.parquet")
    assert "-1" in found and "-1" not in before
    for item, row in found.items():
        # What the old run knew begins as it was there, and stays so where the file has it.
        start = before.get(item, vectors.get(item))
        assert torch.equal(row, start) == (item in vectors and optimizer != "adagrad"), item
    new, start = rows_of(run, "country")["A"], vectors_of(folder / "country.parquet")["A"]
    assert 0 < (new - start).abs().max() < 1


def rows_of(run: Path, column: str) -> dict[str, torch.Tensor]:
    """By value its row in the table of a run."""
    saved = load_run(run)
    (table,) = (table for name, table in saved.model.state_dict().items() if f".{column}.weight" in name)
    return dict(zip(saved.schema.encodings.vocabularies[column].values, table[1:], strict=True))


def vectors_of(path: Path) -> dict[str, torch.Tensor]:
    return {line["id"]: torch.tensor(line["vector"]) for line in pa.parquet.read_table(path).to_pylist()}


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_sharded_as_the_config_says(launched, kind):
    bags = "table_wise" if kind == "row_wise" else kind  # gloo has no collective that sums bags over ranks
    for outcomes in launched[:2]:
        types = outcomes[list(KINDS).index(kind)]["types"]
        assert types == {"item_id": kind, "rating": kind, "country": bags, "user_id": bags}


def test_one_process_of_a_host_reads_the_tables_and_all_map_the_result(folder, launched):
    for rank, outcomes in enumerate(launched[:2]):
        assert [(outcome["reads"], outcome["mapped"]) for outcome in outcomes] == [(1 - rank, True)] * 15
    assert not list((folder / "scratch").glob("jfi-*"))


@pytest.mark.parametrize(
    "settings",
    [{"request_id": "timestamp"}, {"history": "rating == 1"}, {"event_crosses": [["item_id", "rating"]]}],
    ids=lambda settings: next(iter(settings)),
)
def test_groups_histories_and_crosses_are_shared_too(folder, one_launched, settings):
    config = replace_data(tiny(folder, "shared").data, **settings)
    with join_world("cpu") as world:
        dataset = load_shared(config, world)
    assert not dataset.arrays().events.time.flags.owndata
    ours, theirs = (one.batches("test", 50)[0].sparse_features for one in (dataset, load_dataset(config)))
    assert torch.equal(ours.values(), theirs.values())
    assert torch.equal(ours.lengths(), theirs.lengths())


def test_a_shared_dataset_keeps_the_summary_of_the_tables(folder, one_launched):
    config = tiny(folder, "summed").data
    with join_world("cpu") as world:
        dataset = load_shared(config, world)
    assert not dataset.arrays().events.time.flags.owndata
    assert dataset.summary == load_dataset(config).summary


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_have_the_losses_of_one(folder):
    alone = {name: tiny(folder, f"gpu-{name}", name, device="cuda") for name in ("adagrad", "rowwise_adagrad")}
    for config in alone.values():
        train(config)
    sharded = {kind: tiny(folder, f"gpus-{kind}", KINDS[kind], kind, device="cuda") for kind in KINDS}
    outcomes = in_two_processes(folder, [job(folder, config) for config in sharded.values()])
    for rank in outcomes:
        assert [set(outcome["types"].values()) for outcome in rank] == [{kind} for kind in KINDS]
    for kind, config in sharded.items():
        one = Path(alone[KINDS[kind]].training.run_dir)
        assert_same_metrics(Path(config.training.run_dir), one, rounding=GPU_ROUNDING)


def test_a_signal_to_one_process_stops_all(folder, launched):
    line = "stopped by SIGTERM; continue with --resume"
    *ranks, last = launched
    ends = ["done"] * 2 * len(KINDS) + [f"{line} {folder / '2to1'}", "done"]
    ends += ["done", f"{line} {folder / 'given-row_wise'}", *["done"] * 5]
    assert [[outcome["end"] for outcome in rank] for rank in ranks] == [ends] * 2
    assert last["end"] == "done"


@pytest.mark.parametrize("name", ["1to2", "2to1"])
def test_a_checkpoint_is_read_by_another_number_of_processes(folder, alone, launched, name):
    *ranks, last = launched
    resumed = [last] if name == "2to1" else [rank[2 * len(KINDS) + 1] for rank in ranks]
    assert {outcome["begun_at"] for outcome in resumed} == {STOP_AT}  # one that began again would end with the same
    assert_same_metrics(folder / name, alone["rowwise_adagrad"])


def test_one_process_reads_the_parameters_of_two(folder, alone, launched):
    config = tiny(folder, "table_wise", "rowwise_adagrad", epochs=1)
    states = []
    for run in (folder / "table_wise", alone["rowwise_adagrad"]):
        state = Trainer(config, load_dataset(config.data), World())._module_state()
        for tensor in state["model"].values():
            tensor.fill_(torch.nan)  # what is not read equals nothing
        load_checkpoint(latest_checkpoint(run / "checkpoints"), state)
        states.append(dict(state["model"]))
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)


def test_a_launched_run_is_loaded_with_the_parameters_of_one_process(folder, alone, launched):
    models = [load_run(run).model for run in (folder / "row_wise", alone["rowwise_adagrad"])]
    torch.testing.assert_close(*(model.state_dict() for model in models), rtol=1e-3, atol=1e-4)


def test_a_launched_run_is_not_resumed_without_torchrun(folder, launched):
    with pytest.raises(ConfigError, match=r"^--resume \S+: the run was started with torchrun; resume it with"):
        resume(folder / "table_wise")


def test_a_run_is_not_resumed_under_torchrun(alone, one_launched):
    with pytest.raises(ConfigError, match=r"^--resume \S+: the run was started without torchrun; resume it without"):
        resume(alone["adagrad"])
    torch.distributed.destroy_process_group()


def train_pipelined(config: Config) -> set[str]:
    """The names of the modules that the train pipeline has found."""
    with join_world("cpu") as world:
        dataset, run = load_dataset(config.data), RunFolder.create(config)
        save_data(run, dataset)
        trainer = Trainer(config, dataset, world)
        trainer.pipeline = trainer._make_pipeline()
        with without_pictures():
            trainer.fit(run)
        names = {id(module): name for name, module in trainer.model.module.named_modules()}
        return {names[id(module)] for module in trainer.pipeline._pipelined_modules}


def test_both_collections_are_pipelined_and_the_losses_stay(folder, alone, one_launched, monkeypatch):
    """The train pipeline of GPUs, which runs on a CPU too, without its streams."""
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: batch)
    assert train_pipelined(tiny(folder, "pipelined")) == {"embedding_bag_collection", "embedding_collection"}
    assert_same_metrics(folder / "pipelined", alone["adagrad"])


def test_parts_of_a_batch_are_pipelined_and_the_losses_stay(folder, alone, one_launched, monkeypatch):
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: batch)
    config = tiny(folder, "in parts", "rowwise_adagrad", "row_wise", epochs=1, gradient_accumulation_steps=3)
    config.sharding = dataclasses.replace(config.sharding, exchange="attention")
    assert train_pipelined(config) == {"embedding_bag_collection", "embedding_collection"}
    ours, theirs = (
        read_metrics(run / "metrics.jsonl") for run in (folder / config.training.run_dir, alone["rowwise_adagrad"])
    )
    assert len(ours) == 23
    assert [r["loss"] for r in ours[:22]] == pytest.approx([r["loss"] for r in theirs[:22]], abs=ROUNDING)


def test_tables_of_several_widths_are_sharded_and_the_losses_stay(folder, one_launched, monkeypatch):
    """Events have a width, and country and user_id each their own."""
    widths = {"item_id": 12, "rating": 12, "country": 4, "user_id": 16}
    configs = [tiny(folder, f"widths-{name}", sharding="row_wise", epochs=1) for name in ("launched", "alone")]
    for config in configs:
        config.data.features.append(FeatureConfig("item_id", "item"))
        for one in config.data.features:
            one.width = widths.get(one.name)
    with without_pictures():
        train(configs[0])
    refused = dataclasses.replace(configs[1], sharding=dataclasses.replace(configs[1].sharding, exchange="attention"))
    with pytest.raises(
        ConfigError,
        match=r"sharding.exchange: got 'attention', must be auto or rows, since bags whose rows are fetched must have",
    ):
        train(refused)
    torch.distributed.destroy_process_group()
    for name in environment(0, 1):
        monkeypatch.delenv(name)
    with without_pictures():
        train(configs[1].with_training(run_dir=str(folder / "widths-one")))
    assert_same_metrics(folder / "widths-launched", folder / "widths-one", steps=21)


def test_a_launched_run_does_not_take_up_another(alone, one_launched):
    config = load_config(alone["adagrad"] / "config.yaml")
    with pytest.raises(ConfigError, match="is not empty"):
        train(config.with_training(seed=7))
    torch.distributed.destroy_process_group()


def test_timelines_are_pipelined_and_the_losses_stay(folder, launched, one_launched, monkeypatch):
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: batch)
    pipelined = train_pipelined(by_user(folder, "by_user-pipelined", epochs=1))
    assert pipelined == {"embedding_bag_collection", "embedding_collection"}
    ours, theirs = (
        [r for r in read_metrics(folder / name / "metrics.jsonl") if r["split"] == "train"]
        for name in ("by_user-pipelined", "by_user")
    )
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs[: len(ours)]], abs=ROUNDING)


def test_a_run_that_may_be_restarted_needs_a_folder(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigError, match=r"^training\.run_dir must be set when torchrun runs with --max_restarts$"):
        check_sharded(Config(), World())


@pytest.mark.parametrize(
    ("optimizer", "sharding", "message"),
    [
        ({"ema_decay": 0.9}, {}, r"optimizer\.ema_decay: got 0\.9, must be null under torchrun"),
        (
            {"embeddings": OptimizerGroup(name="adam")},
            {},
            r"optimizer\.embeddings\.name: got 'adam', must be adagrad or rowwise_adagrad under torchrun",
        ),
        (
            {"embeddings": OptimizerGroup(name="adagrad", weight_decay=0.1)},
            {"group_size": 2},
            r"optimizer\.embeddings\.weight_decay: got 0\.1, must be 0 or auto with sharding\.group_size, .*",
        ),
        (
            {},
            {"compute_kernel": "fused_uvm_caching"},
            r"sharding\.compute_kernel: got 'fused_uvm_caching', must be auto or fused without a GPU",
        ),
        ({}, {"group_size": 3}, r"sharding\.group_size: got 3, must be a divisor of the number of processes, 4"),
    ],
)
def test_what_a_launched_run_cannot_do_is_refused(optimizer, sharding, message):
    config = Config(optimizer=OptimizerConfig(**optimizer), sharding=ShardingConfig(**sharding))
    with pytest.raises(ConfigError, match=f"^{message}$"):
        check_sharded(config, World(size=4))


def test_restarts_over_several_hosts_need_a_store_for_each(one_launched, monkeypatch):
    for name, value in {"MAX_RESTARTS": "3", "USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with (
        pytest.raises(ConfigError, match=r"^torchrun --max_restarts .* needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1$"),
        join_world("cpu"),
    ):
        pass


@pytest.mark.parametrize("restarts", [None, "0", "1"])
def test_a_run_that_torchrun_restarts_needs_a_name(monkeypatch, restarts):
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    if restarts is not None:
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    if restarts == "1":
        with pytest.raises(ConfigError, match=r"^training\.run_dir must be set"):
            check_sharded(Config(), World())
        check_sharded(Config().with_training(run_dir="run"), World())
    else:
        check_sharded(Config(), World())


def test_tables_that_do_not_fit_are_reported_in_one_line(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    table = EmbeddingConfig(name="item", num_embeddings=10**11, embedding_dim=64, feature_names=["item"])
    model = torch.nn.ModuleDict({"tables": EmbeddingCollection([table], device=torch.device("meta"))})
    with pytest.raises(ConfigError, match=r"^sharding: TorchRec's planner found no plan: .*insufficient storage\.\s*$"):
        config = Config().with_training(batch_size=1024)
        _plan(model, [table], config, World(launched=True), sharders_of(config.sharding))


@pytest.fixture
def plan_for_gpus(monkeypatch):
    """A function: by table, its part of the plan for two GPUs of 1 GiB, on one of which alone `small` fits."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=2**30))
    pages = {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**22}  # 16 GiB
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    tables = [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=64, feature_names=[name])
        for name, rows in {"small": 10**5, "large": 10**7}.items()
    ]
    model = torch.nn.ModuleDict({"tables": EmbeddingCollection(tables, device=torch.device("meta"))})
    world = World(torch.device("cuda", 0), size=2, launched=True)

    def plan(**sharding: object) -> EmbeddingModuleShardingPlan:
        config = Config(sharding=ShardingConfig(**sharding)).with_training(batch_size=1024)
        return _plan(model, tables, config, world, sharders_of(config.sharding)).plan["tables"]

    return plan


@pytest.mark.parametrize("kind", ["auto", *KINDS])
def test_the_size_of_the_cache_reaches_the_plan(plan_for_gpus, kind):
    plan = plan_for_gpus(type=kind, compute_kernel="fused_uvm_caching")
    cached = {name: (table.compute_kernel, table.cache_params.load_factor) for name, table in plan.items()}
    assert cached == dict.fromkeys(["small", "large"], ("fused_uvm_caching", 0.2))


def test_a_table_that_does_not_fit_the_gpus_is_cached(plan_for_gpus):
    plan = plan_for_gpus(compute_kernel="auto")
    kernels = {name: table.compute_kernel for name, table in plan.items()}
    assert kernels == {"small": "fused", "large": "fused_uvm_caching"}
    assert plan["large"].cache_params.load_factor == 0.2
    with pytest.raises(ConfigError, match=r"^sharding: TorchRec's planner found no plan"):
        plan_for_gpus(compute_kernel="fused")


def test_dropout_differs_by_rank_and_by_step(folder):
    config = tiny(folder, "seeds")
    trainer = Trainer(config, load_dataset(config.data), World())
    seeds = set()
    for rank in range(3):
        trainer.world = dataclasses.replace(trainer.world, rank=rank)
        for trainer.progress.step in (0, 10):
            trainer._reseed()
            seeds.add(torch.initial_seed())
    assert len(seeds) == 6


def test_each_group_of_a_process_has_its_own_keys_in_the_store(monkeypatch):
    """Else a second training in a launched process meets the addresses of the first one's sockets."""
    store, stores = torch.distributed.HashStore(), []
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda _: iter([(store, 0, 1)]))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, store, **__: stores.append(store))
    for _ in range(2):
        _init_process_group("gloo")
    stores[0].set("address", "old")
    assert stores[0].check(["address"]) and not stores[1].check(["address"])
