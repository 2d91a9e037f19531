"""Launched runs whose attention goes to the rows that each process owns, compared with one process."""

import dataclasses
import operator
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launched import assert_same_metrics, free_port, in_two_processes, job, tiny, write_tables
from worker import without_pictures

from jfi.data import DataSchema, load_dataset
from jfi.training import Config, ConfigError, ShardingConfig, train
from jfi.training.config import EncoderConfig
from jfi.training.defaults import resolve_defaults, resolved_as
from jfi.training.distributed.processes import World
from jfi.training.distributed.sharding import check_sharded, with_exchange
from jfi.training.loop.captured_steps import check_graphs
from jfi.training.model_config import PretrainedConfig
from jfi.training.run.recorder import read_metrics
from jfi.training.run.run_position import config_changes
from jfi.training.run.saved_run import load_run

LOG_EVERY, REPLICATE_BELOW = 1, 10

STEPS, STOP_AT = 21, 7
#: The items' table has some 40 rows and is spread, that of ratings has 2 and is read whole.
REMOTE = {"exchange": "attention"}
RUNS = {
    "row_wise": REMOTE,
    "table_wise": REMOTE | {"type": "table_wise"},
    "table_row_wise": REMOTE | {"type": "table_row_wise"},
    "whole": {"exchange": "auto"},
    "halves": REMOTE | {"communication": "bfloat16"},
    "stopped": REMOTE,
    "switched": {"exchange": "rows"},
    "groups": REMOTE | {"group_size": 1},
    "attention in parts": REMOTE,
}
#: Of a batch of each run; the last batch has one sample.
PARTS = {name: 3 for name in RUNS if name.endswith("in parts")}


def configured(folder: Path, name: str, decays: bool = True, **sharding: object) -> Config:
    """A run whose tables decay if attention goes to the rows and there are no groups, or as it says."""
    config = tiny(folder, name, "rowwise_adagrad", "row_wise", epochs=1, gradient_accumulation_steps=PARTS.get(name, 1))
    config = dataclasses.replace(config, sharding=dataclasses.replace(config.sharding, **sharding))
    if decays and config.sharding.exchange != "rows" and config.sharding.group_size is None:
        config.optimizer.embeddings = dataclasses.replace(config.optimizer.embeddings, weight_decay=0.01)
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("exchange")
    write_tables(path)
    with without_pictures():
        train(configured(path, "alone", **REMOTE))
        train(configured(path, "without decay"))
        train(configured(path, "warm alone", **REMOTE).with_training(warm_start=str(path / "alone"), rows_after=None))
    return path


@pytest.fixture(scope="module")
def outcomes(folder):
    """By job what both ranks say of it."""
    jobs = {name: job(folder, configured(folder, name, **settings)) for name, settings in RUNS.items()}
    for name in ("stopped", "switched"):
        jobs[name]["stop_at"] = STOP_AT
        jobs[f"{name}, resumed"] = {"port": free_port(), "resume": str(folder / name)}
    captured = configured(folder, "captured", **REMOTE).with_training(cuda_graph="always")
    jobs["captured"] = job(folder, captured, stand_in=True)
    warm = configured(folder, "warm", **REMOTE).with_training(warm_start=str(folder / "alone"), rows_after=None)
    jobs["warm"] = job(folder, warm)
    jobs["switched, resumed"]["change"] = ["exchange: rows", "exchange: attention"]
    return dict(zip(jobs, zip(*in_two_processes(folder, list(jobs.values())), strict=True), strict=True))


@pytest.mark.parametrize("name", ["row_wise", "table_wise", "table_row_wise", "whole", *PARTS])
def test_attention_at_the_rows_has_the_losses_of_one_process(folder, outcomes, name):
    assert_same_metrics(folder / name, folder / "alone", steps=STEPS)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_attend_at_the_rows(folder):
    """The losses of one GPU over 63 steps, and the same bits on two runs."""

    def on_gpu(name: str, **sharding: object) -> Config:
        return configured(folder, f"gpu-{name}", **sharding).with_training(device="cuda", epochs=3)

    train(on_gpu("alone", **REMOTE))
    names = ("row_wise", "table_wise", "table_row_wise", "whole")
    configs = [on_gpu(name, **RUNS[name]) for name in names] + [on_gpu("again", **REMOTE)]
    graphs = [on_gpu(name, **REMOTE).with_training(cuda_graph="always") for name in ("captured", "captured-again")]
    in_two_processes(folder, [job(folder, config) for config in configs + graphs])
    for name in (*names, "captured"):
        assert_same_metrics(folder / f"gpu-{name}", folder / "gpu-alone", rounding=5e-5, steps=63)
    assert losses(folder, "gpu-again") == losses(folder, "gpu-row_wise")
    assert losses(folder, "gpu-captured-again") == losses(folder, "gpu-captured")


def test_captured_steps_have_the_losses_of_one_process(folder, outcomes):
    assert_same_metrics(folder / "captured", folder / "alone", steps=STEPS)
    line = "16 of 21 steps ran captured, in 2 CUDA graphs; eagerly: 4 as warm-up, 1 another number of samples"
    assert outcomes["captured"][0]["captured"].startswith(line)


def test_captured_steps_are_refused_where_they_cannot_be(folder):
    on = configured(folder, "refused", **REMOTE).with_training(cuda_graph="always")
    with pytest.raises(ConfigError, match=r"got 'always', must be auto or never, since there is no GPU"):
        train(on)
    assert not (folder / "refused").exists()
    world = SimpleNamespace(launched=True, device=torch.device("cuda"), size=2)
    check_graphs(on, world)
    for sharding, training, reason in (
        ({"group_size": 1}, {}, "sharding.group_size is set"),
        ({}, {"batch_size": 41}, "training.batch_size, 41, is no multiple of the number of processes, 2"),
        ({}, {"gradient_accumulation_steps": 2}, "training.gradient_accumulation_steps is 2"),
    ):
        changed = configured(folder, "refused", **REMOTE | sharding).with_training(cuda_graph="always", **training)
        with pytest.raises(ConfigError, match=re.escape(reason)):
            check_graphs(changed, world)


def losses(folder: Path, name: str) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / name / "metrics.jsonl") if line["split"] == "train"]


@pytest.mark.slow
def test_losses_over_63_steps(folder):
    """Row-wise, table-wise, table-row-wise, rows, and captured steps, against one process."""

    def long(name: str, sharding: dict, **training: object) -> Config:
        return configured(folder, f"long-{name}", decays=False, **sharding).with_training(epochs=3, **training)

    train(long("alone", {}))
    ways = {"row_wise": REMOTE, "table_wise": RUNS["table_wise"], "table_row_wise": RUNS["table_row_wise"]}
    ways |= {"rows": {}, "rows-table_wise": {"type": "table_wise"}}
    jobs = [job(folder, long(name, sharding)) for name, sharding in ways.items()]
    jobs.append(job(folder, long("captured", REMOTE, cuda_graph="always"), stand_in=True))
    in_two_processes(folder, jobs)
    for name in (*ways, "captured"):
        assert_same_metrics(folder / f"long-{name}", folder / "long-alone", rounding=5e-6, steps=63)


def test_queries_in_bfloat16(folder, outcomes):
    plain, halves = losses(folder, "alone"), losses(folder, "halves")
    assert 0 < max(abs(one - other) for one, other in zip(plain, halves, strict=True)) < 0.02


def test_groups_send_queries_to_their_own_processes(folder, outcomes):
    plain, grouped = losses(folder, "alone"), losses(folder, "groups")
    assert grouped[0] == pytest.approx(plain[0], abs=1e-6) and grouped == pytest.approx(plain, abs=0.1)
    first, second = (outcome["sums"] for outcome in outcomes["groups"])
    assert first == second and all(value != 0 for value in first.values())


def test_a_stopped_run_goes_on_and_two_runs_have_the_same_bits(folder, outcomes):
    assert [outcome["begun_at"] for outcome in outcomes["stopped, resumed"]] == [STOP_AT] * 2
    assert losses(folder, "stopped") == losses(folder, "row_wise")


def test_attention_goes_on_from_a_checkpoint_of_the_exchange_of_rows(folder, outcomes):
    assert "exchange: attention" in (folder / "switched/config.yaml").read_text()
    assert [outcome["begun_at"] for outcome in outcomes["switched, resumed"]] == [STOP_AT] * 2
    assert_same_metrics(folder / "switched", folder / "without decay", steps=STEPS)
    assert losses(folder, "without decay") != losses(folder, "alone")


def test_a_warm_start_has_the_losses_of_one_process(folder, outcomes):
    assert_same_metrics(folder / "warm", folder / "warm alone", steps=STEPS)


def test_one_process_reads_the_run(folder, outcomes):
    own, other = (load_run(folder / name).model.state_dict() for name in ("row_wise", "alone"))
    assert own.keys() == other.keys()
    for name, value in own.items():
        torch.testing.assert_close(value, other[name], atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def schema(folder) -> DataSchema:
    return load_dataset(tiny(folder, "schema").data).schema


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"type": "column_wise"}, "sharding.type is 'column_wise'"),
        ({"compute_kernel": "fused_uvm_caching"}, "device memory"),
    ],
)
def test_what_attention_cannot_do_is_refused_by_its_key(folder, schema, change, reason):
    config = configured(folder, "refused", **{"exchange": "attention", **change})
    with pytest.raises(ConfigError, match=rf"sharding\.exchange: got 'attention', must be .*{re.escape(reason)}"):
        with_exchange(config, schema)


def test_events_of_several_large_tables_are_refused(folder, schema, monkeypatch):
    monkeypatch.setattr(ShardingConfig, "replicate_below", 0)
    with pytest.raises(ConfigError, match=r"the events of feature 'history' lie in \['item_id', 'rating'\]$"):
        with_exchange(configured(folder, "refused", exchange="attention"), schema)


@pytest.mark.parametrize("exchange", ["auto", "rows"])
@pytest.mark.parametrize(
    ("setting", "must"),
    [
        ({"sharding.type": "table_row_wise"}, "another type"),
        ({"optimizer.embeddings.weight_decay": 0.1}, "0 or auto"),
        ({"training.gradient_accumulation_steps": 2}, "1"),
        ({"training.cuda_graph": "always"}, "auto or never"),
        ({"model.pretrained.item_id.frozen": True}, "False"),
    ],
)
def test_what_needs_attention_is_refused_where_rows_are_exchanged(folder, schema, exchange, setting, must):
    ((key, value),) = setting.items()
    config = configured(folder, "refused", decays=False, exchange=exchange)
    config = dataclasses.replace(config, encoder=EncoderConfig(num_layers=1))
    section, name = key.rsplit(".", 1)
    if section.startswith("model"):
        config.model.pretrained = {"item_id": PretrainedConfig("items.parquet", frozen=value)}
    else:
        setattr(operator.attrgetter(section)(config), name, value)
    why = "encoder.num_layers is above 0" if exchange == "auto" else "sharding.exchange is rows"
    error = f"{key}: got {value!r}, must be {must} under torchrun where processes exchange rows of histories: {why}"
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}"):
        check_sharded(config, World())
        with_exchange(config, schema)


def test_an_encoder_or_another_pooling_takes_rows(folder, schema):
    config = configured(folder, "settled", decays=False, exchange="auto")
    encoded = dataclasses.replace(config, encoder=EncoderConfig(num_layers=1))
    pooled = dataclasses.replace(config, model=dataclasses.replace(config.model, pooling="mean", bias=None))
    found = [with_exchange(one, schema) for one in (config, encoded, pooled)]
    assert [one.sharding.exchange for one, _ in found] == ["attention", "rows", "rows"]
    reasons = [None, "encoder.num_layers is above 0, and an encoder reads whole histories", "model.pooling is 'mean'"]
    assert [why for _, why in found] == reasons


def test_the_line_of_the_defaults_says_which_exchange(folder, schema):
    """And `weight_decay: auto` is that of one process, or of the run to start from; with rows 0."""
    dataset, world = load_dataset(tiny(folder, "settled").data), World(launched=True)
    config = configured(folder, "settled", decays=False, exchange="auto")
    config.optimizer.embeddings = dataclasses.replace(config.optimizer.embeddings, weight_decay="auto")
    alone, decay = resolve_defaults(config, dataset, World())[0], 25 / dataset.num_samples("train")
    assert alone.sharding.exchange == "auto" and alone.optimizer.embeddings.decay == pytest.approx(decay, rel=1e-2)
    settled, line = resolve_defaults(config, dataset, world)
    assert settled.optimizer.embeddings == alone.optimizer.embeddings and settled.sharding.exchange == "attention"
    assert "sharding.exchange: attention" in line
    assert resolve_defaults(config, dataset, world, 0.25)[0].optimizer.embeddings.decay == 0.25
    assert resolved_as(config, settled) == settled
    changes = [name for name, _ in config_changes(dataclasses.asdict(config), settled)]
    assert "optimizer.embeddings.weight_decay" in changes and "sharding.exchange" not in changes
    sharding = dataclasses.replace(config.sharding, group_size=1)
    grouped = resolve_defaults(dataclasses.replace(config, sharding=sharding), dataset, world)[0]
    assert grouped.sharding.exchange == "attention" and grouped.optimizer.embeddings.weight_decay == 0
    pooled = dataclasses.replace(config, model=dataclasses.replace(config.model, pooling="mean", bias=None))
    for given in (None, 0.25):
        settled, line = resolve_defaults(pooled, dataset, world, given)
        assert settled.optimizer.embeddings.weight_decay == 0
        assert "sharding.exchange: rows (model.pooling is 'mean')" in line
