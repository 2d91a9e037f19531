"""Runs whose tables grow and forget: training, resuming, scoring tables."""

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from data_configs import replace_data
from launched import assert_same_metrics, free_port, in_two_processes, job, tiny, write_tables
from own_table import config_of, row, write_table
from synthetic_data import synthetic_data
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from worker import without_pictures

import jfi
from jfi.data import FeatureConfig
from jfi.training import (
    Config,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    OptimizerGroup,
    TrainingConfig,
    resume,
    train,
)
from jfi.training.checkpoints.checkpoint import latest_checkpoint
from jfi.training.distributed.processes import Interrupted
from jfi.training.loop.trainer import Trainer
from jfi.training.model.build_model import draw_tables
from jfi.training.run.recorder import read_metrics
from jfi.utils.context import interprets
from jfi.utils.encoding import UNKNOWN, HashedIds

LOG_EVERY = 1

#: More rows than items, users and tags, and fewer.
LARGE, SMALL = {"item_id": 80, "user_id": 40, "tags": 10}, {"item_id": 31, "user_id": 16, "tags": 3}
ITEMS, USERS = 61, 30


@pytest.fixture(scope="module", autouse=True)
def _without_pictures():
    with without_pictures():
        yield


@pytest.fixture(autouse=True)
def plain_maps(monkeypatch):
    """Ids are mapped as on a CPU: tests/tables compare the kernel, which the interpreter runs for long."""
    monkeypatch.setattr("jfi.tables.map_ids.interprets", lambda: False)


@pytest.fixture
def table(tmp_path) -> Path:
    rows = [[f"u{i * 13 % USERS}", f"i{i * 7 % ITEMS}", *row(i)[2:]] for i in range(400)]
    rows = [[user, item, time, clicked, genre, ITEMS, *more] for user, item, time, clicked, genre, _, *more in rows]
    write_table(tmp_path / "table.csv", rows)
    return tmp_path / "table.csv"


def config(table: Path, run: Path, capacity: dict[str, int] = LARGE, ema: float | None = None, **training) -> Config:
    made = config_of(table, run, **{"epochs": 2, "admit_every": 3, "batch_size": 8, **training})
    data = replace_data(made.data, capacity=capacity, max_history=2)
    optimizer = dataclasses.replace(made.optimizer, ema_decay=ema)
    return dataclasses.replace(made, data=data, optimizer=optimizer)


def tensors(run: Path) -> dict[str, bytes]:
    """The files with tensors of a run's last checkpoint."""
    last = latest_checkpoint(run / "checkpoints")
    return {path.name: path.read_bytes() for path in last.iterdir() if path.suffix == ".safetensors"}


def metrics(run: Path) -> list[dict]:
    """What the run has recorded, but for its speed and the name of its data."""
    other = ("samples_per_second", "data")
    log = read_metrics(run / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in other} for line in log]


def scores(run: Path, table: Path) -> np.ndarray:
    return jfi.load_run(run).predict(table).column("score").to_numpy()


@pytest.mark.parametrize(("capacity", "by_kernel"), [(LARGE, False), (SMALL, True)])
def test_a_run_whose_tables_grow_has_rows_of_the_values_that_it_has_seen(
    table, tmp_path, capacity, by_kernel, monkeypatch
):
    monkeypatch.setattr("jfi.tables.map_ids.interprets", lambda: by_kernel and interprets())
    result = train(config(table, tmp_path / "run", capacity))
    assert math.isfinite(result.test["auc"])
    run = jfi.load_run(tmp_path / "run")
    owners = {name: run.model.growing_ids.ids(name) for name in capacity}
    assert {name: len(ids) for name, ids in owners.items()} == capacity
    known = {
        "item_id": HashedIds(1).ids([f"i{item}" for item in range(ITEMS)]),
        "user_id": HashedIds(1).ids([f"u{user}" for user in range(USERS)]),
        "tags": HashedIds(1).ids(["a", "b"]),
    }
    for name, ids in owners.items():
        assert ids[0] == UNKNOWN
        found = set(ids.tolist()) - {UNKNOWN}
        assert found <= set(known[name].tolist())
        assert len(found) == min(len(known[name]), capacity[name] - 1)
    assert not run.schema.encodings.vocabularies.keys() & capacity.keys()


@pytest.mark.parametrize(
    ("ema", "every"),
    [
        (0.9, {"checkpoint_every": 9}),
        pytest.param(None, {"eval_every": 10, "gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_ends_at_each_checkpoint_goes_on_to_the_same_bits(table, tmp_path, monkeypatch, ema, every):
    """The ids of the steps between an admission and a checkpoint are not lost."""
    made = config(table, tmp_path / "whole", SMALL, ema, **every, admit_every=7)
    train(made)
    broken = made.with_training(run_dir=str(tmp_path / "broken"))
    saved = Trainer.save

    def save_and_end(self, *arguments):
        saved(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "save", save_and_end)
    ends = 0
    for begin in range(40):
        try:
            train(broken) if begin == 0 else resume(tmp_path / "broken")
            break
        except KeyboardInterrupt:
            ends += 1
    assert 4 <= ends < 40
    assert tensors(tmp_path / "broken") == tensors(tmp_path / "whole")
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_that_a_signal_ends_at_any_step_goes_on_to_the_same_bits(table, tmp_path, monkeypatch):
    made = config(table, tmp_path / "whole", SMALL, 0.9, admit_every=4)
    train(made)
    checks = 0

    def check():
        nonlocal checks
        checks += 1
        if checks % 11 == 0:
            raise Interrupted(15, tmp_path / "broken")

    monkeypatch.setattr("jfi.training.loop.trainer.stop_on_signals", lambda *_: nullcontext(check))
    begin, broken = 0, made.with_training(run_dir=str(tmp_path / "broken"))
    while True:
        try:
            train(broken) if begin == 0 else resume(tmp_path / "broken")
            break
        except Interrupted:
            begin += 1
            assert begin < 40
    assert begin > 4
    assert tensors(tmp_path / "broken") == tensors(tmp_path / "whole")


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_run_with_a_row_for_each_value_is_that_of_a_vocabulary(table, tmp_path, monkeypatch, ema):
    """Bit for bit, where values get their rows before the first step, with the same initial values."""
    capacity = {"item_id": ITEMS + 1, "user_id": USERS + 1, "tags": 3}
    plain = config(table, tmp_path / "plain", {}, ema)
    train(plain)
    schema = jfi.load_run(tmp_path / "plain").schema
    known = schema.encodings.vocabularies
    assert {name: len(known[name].values) + 1 for name in capacity} == capacity

    def same_rows(ids: torch.Tensor, config: BaseEmbeddingConfig) -> torch.Tensor:
        weight = torch.empty(config.num_embeddings, config.embedding_dim)
        draw_tables({"": weight}, {"": config}, plain.training.seed)
        by_id = dict(zip(HashedIds(1).ids(list(known[config.name].values)).tolist(), weight[1:], strict=True))
        return torch.stack([by_id[one] for one in ids.tolist()])

    def admit_all(self: Trainer) -> None:
        if not self.progress.step:
            self.growing.train()
            for batch in self.dataset.batches("train", 8):
                self.growing(batch.sparse_features)
            assert {name: len(rows) + 1 for name, rows in self.model.admit_ids().items()} == capacity

    monkeypatch.setattr("jfi.tables.fused_embedding_collections.initial_rows", same_rows)
    restored = Trainer.load_pretrained  # of a new run alone, before its first step
    monkeypatch.setattr(Trainer, "load_pretrained", lambda self: (restored(self), admit_all(self)))
    train(config(table, tmp_path / "growing", capacity, ema))
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "growing")
    np.testing.assert_array_equal(scores(tmp_path / "plain", table), scores(tmp_path / "growing", table))


def test_evaluation_and_prediction_change_no_map(table, tmp_path):
    train(config(table, tmp_path / "run", SMALL))
    run = jfi.load_run(tmp_path / "run")
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    new = pa.csv.read_csv(table)
    new = new.set_column(1, "item_id", pa.array([f"new {i}" for i in range(len(new))]))
    first = run.predict(new).column("score").to_numpy()
    np.testing.assert_array_equal(run.predict(new).column("score").to_numpy(), first)
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    np.testing.assert_array_equal(scores(tmp_path / "run", table), scores(tmp_path / "run", table))


def test_a_warm_start_takes_the_rows_and_their_owners(table, tmp_path):
    train(config(table, tmp_path / "first"))
    train(config(table, tmp_path / "second", warm_start=str(tmp_path / "first"), rows_after=None, epochs=1))
    first, second = (jfi.load_run(tmp_path / name).model.growing_ids for name in ("first", "second"))
    assert torch.equal(first.ids("item_id"), second.ids("item_id"))
    with pytest.raises(ConfigError, match=r"training\.warm_start: 'item_id' has a capacity that it has not in"):
        train(
            config(
                table, tmp_path / "third", LARGE | {"item_id": 90}, warm_start=str(tmp_path / "first"), rows_after=None
            )
        )


def test_a_capacity_below_the_values_of_a_batch_is_named(table, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.features: capacity of table 'item_id' must be above the number of d"):
        train(config(table, tmp_path / "run", {"item_id": 9}))


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path):
    """With both exchanges, and resumed after a signal between two admissions."""
    write_tables(tmp_path)

    def launched(name: str, exchange: str = "auto", sharding: str = "row_wise") -> Config:
        made = tiny(tmp_path, name, "rowwise_adagrad", sharding, admit_every=7)
        data = replace_data(made.data, capacity={"item_id": 60, "user_id": 70}, min_count={"user_id": 4})
        return dataclasses.replace(made, data=data, sharding=dataclasses.replace(made.sharding, exchange=exchange))

    train(launched("alone"))
    jobs = []
    for exchange in ("attention", "rows"):
        jobs.append(job(tmp_path, launched(exchange, exchange), stop_at=17))
        jobs.append({"port": free_port(), "resume": str(tmp_path / exchange)})
    in_two_processes(tmp_path, jobs)
    for exchange in ("attention", "rows"):
        assert_same_metrics(tmp_path / exchange, tmp_path / "alone")
        maps = [jfi.load_run(tmp_path / name).model.growing_ids for name in (exchange, "alone")]
        for name in ("item_id", "user_id"):
            assert torch.equal(*(one.ids(name) for one in maps)) and (maps[0].ids(name) > 0).sum() > 30


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "batch_size", "max_history", "rate"), [(600, 512, 50, 0.1), (250, 64, 8, 0.02)])
def test_tables_that_grow_learn_what_a_vocabulary_learns(tmp_path, capacity, batch_size, max_history, rate):
    """The synthetic table of 500 items by Zipf's law: with a row for each of them, and for half of them."""
    found = {}
    for name, (items, categories) in {"vocabulary": (None, None), "growing": (capacity, 20)}.items():
        data = synthetic_data(
            features=[
                FeatureConfig("item", "item", capacity=items),
                FeatureConfig("category", "item", capacity=categories),
                FeatureConfig("rating", "event"),
            ],
            max_history=max_history,
        )
        groups = {"dense": OptimizerGroup(learning_rate=rate / 10), "embeddings": OptimizerGroup(learning_rate=rate)}
        model = ModelConfig(32, num_heads=4, bias="history_age", cross_layers=0, dropout=0.0)
        training = TrainingConfig(str(tmp_path / name), epochs=2, batch_size=batch_size, device="cpu")
        found[name] = train(Config(data, model, optimizer=OptimizerConfig(**groups), training=training)).test["auc"]
    assert found["vocabulary"] > 0.75
    assert found["growing"] > found["vocabulary"] - 0.01  # runs of other seeds differ by up to 0.008


@pytest.mark.parametrize("change", [{"batching": "user"}, {"label": None, "negatives": 1}])
def test_timelines_and_implicit_feedback_train_and_evaluate(table, tmp_path, change):
    made = config(table, tmp_path / "run", LARGE, epochs=1)
    made = dataclasses.replace(made, data=replace_data(made.data, **change))
    train(made)
    run = jfi.load_run(tmp_path / "run")
    assert (run.model.growing_ids.ids("item_id") > 0).sum() == ITEMS
    found = run.evaluate(table, history=table)["overall"]
    assert math.isfinite(found["auc"]) and found["samples"] >= 400
