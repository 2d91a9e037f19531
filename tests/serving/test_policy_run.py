"""A run with a policy of its histories: training, prediction and requests read the same events."""

import contextlib
import io
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import commands
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from data_configs import replace_data
from msgspec import structs
from synthetic_data import files, synthetic_data

import jfi
from examples import synthetic_tables
from jfi.data import DataError, load_dataset
from jfi.data.prepared.event_logs import training_log
from jfi.history_policies import Policy, fit
from jfi.models import SequenceDLRM
from jfi.modules import SequenceFeatureConfig
from jfi.serving.artifact import POLICY, ArtifactError
from jfi.serving.dataset_schema import schema_of
from jfi.serving.export import Export, inputs_of, tables_of
from jfi.serving.history_policy import RequestPolicy
from jfi.serving.model import ScoringModel
from jfi.serving.requests import BadRequestError, RequestReader
from jfi.serving.schema import Limits, PolicyFields, Schema
from jfi.serving.scorer import Scorer, _limits, batch_inputs
from jfi.serving.tables import FloatTables
from jfi.training import Config, ConfigError, EncoderConfig, ModelConfig, TrainingConfig, resume, train
from jfi.training.model.build_model import build_model
from jfi.utils.files import read_sums, sha256_of, write_sums

from .conftest import logits

MAX_HISTORY = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tables of the synthetic log as files, and a run on them; its policy's file is gone."""
    folder = tmp_path_factory.mktemp("policy")
    table = {"num_users": 30, "num_items": 12, "num_categories": 3, "mean_length": 40, "labeled": 10}
    log, items = synthetic_tables.dwell(**table)
    milliseconds = pa.compute.multiply(log["dwell"], 1000.0)
    log = log.set_column(log.column_names.index("dwell"), "dwell", milliseconds)
    synthetic_tables.write(folder, (log, items))
    data = synthetic_data("dwell", max_history=MAX_HISTORY, dwell_unit="ms", **files(folder))
    data = replace_data(data, event_dense=[])
    policy = fit(*training_log(data), remove=0.5, newest=2, caps={"active": 15})
    policy.save(folder / "policy.json")
    data = replace(data, policy=str(folder / "policy.json"))
    model = ModelConfig(8, num_heads=2, bias="history_age", dense_arch=[8], over_arch=[8], cross_layers=0, dropout=0.0)
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        for name in ("draw_curves", "draw_attention"):
            patch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
        train(Config(data, model, training=TrainingConfig(str(folder / "run"), epochs=1, device="cpu", batch_size=64)))
    (folder / "policy.json").rename(folder / "moved.json")
    (folder / "output.txt").write_text(output.getvalue())
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return jfi.load_run(folder / "run")


@pytest.fixture(scope="module")
def dataset(folder, run):
    return load_dataset(replace(run.config.data, policy=str(folder / "moved.json")), run.schema)


def test_a_run_keeps_its_policy(folder, run):
    assert run.policy == Policy.load(folder / "moved.json")
    assert not run.policy.keeps_all


def test_prediction_reads_the_events_that_training_reads(folder, run, dataset):
    scores = run.predict(str(folder / "interactions.parquet"))["score"].to_numpy()
    arrays = dataset.arrays()
    order = np.lexsort((arrays.events.item, arrays.events.time, arrays.events.user))
    assert np.array_equal(order, np.arange(len(order)))
    log = pa.parquet.read_table(folder / "interactions.parquet")
    place = np.lexsort((log["item"].to_numpy(), log["timestamp"].to_numpy(), log["user"].to_numpy()))
    batch = dataset.batches("test", 10_000)[0]
    with torch.no_grad():
        wanted = run.model(batch.dense_features, batch.sparse_features).squeeze(-1).numpy()
    np.testing.assert_allclose(scores[place[arrays.samples["test"]]], wanted, atol=1e-5)
    plain = replace(run, policy=None).predict(str(folder / "interactions.parquet"))["score"].to_numpy()
    assert np.abs(plain - scores).max() > 1e-3


def request_of(log: list[dict], target: dict) -> dict:
    """The request for a row of the table, with the events that training chooses among."""
    before = [one for one in log if one["user"] == target["user"] and one["timestamp"] < target["timestamp"]]
    before.sort(key=lambda one: (one["timestamp"], one["item"]))
    names = ("item", "category", "surface", "dwell", "session")
    history = [{name: one[name] for name in names} | {"age": target["timestamp"] - one["timestamp"]} for one in before]
    return {"user": {}, "history": history, "candidates": [{name: target[name] for name in ("item", "category")}]}


@pytest.fixture(scope="module")
def reader(run):
    schema = schema_of(run.config.data, run.schema, reads_history=True, reads_age=False)
    return RequestReader(schema, Limits(3, MAX_HISTORY), RequestPolicy(run.policy, schema.policy))


@pytest.fixture(scope="module")
def log(folder) -> list[dict]:
    """The rows of the table in the order of the dataset's, with the categories of their items."""
    items = pa.parquet.read_table(folder / "items.parquet").to_pylist()
    categories = {one["item"]: one["category"] for one in items}
    log = pa.parquet.read_table(folder / "interactions.parquet").to_pylist()
    log = [one | {"category": categories[one["item"]]} for one in log]
    return sorted(log, key=lambda one: (one["user"], one["timestamp"], one["item"]))


def test_a_request_reads_the_events_that_training_reads(log, dataset, reader):
    batch = dataset.batches("test", 10_000)[0]
    sparse, rows = batch.sparse_features, dataset.arrays().samples["test"]
    for key in ("history_item", "history_category", "history_surface", "history_age"):
        parts = sparse[key].values().split(sparse[key].lengths().tolist())
        removed = 0
        for row, part in zip(rows, parts, strict=True):
            request = request_of(log, log[row])
            found = reader(request)
            ids = found.ages if key == "history_age" else found.ids[key]
            assert ids.tolist() == part.tolist()
            removed += min(MAX_HISTORY, len(request["history"])) - found.num_events
        assert removed > 100


def test_a_request_names_what_the_policy_reads(reader):
    fields = ["item", "category", "surface", "age", "dwell", "session"]
    assert list(reader.fields["history"]) == fields
    event = {"item": 1, "category": 1, "surface": "feed", "age": 5.0, "dwell": 3000, "session": 1}
    request = {"user": {}, "history": [event], "candidates": [{"item": 1, "category": 1}]}
    assert reader(request).num_events == 1
    for change, message in (
        ({"dwell": "long"}, r"^history\[0\]\.dwell must be float \| null, got str"),
        ({"surface": [1.5]}, r"^history\[0\]\.surface must be bool"),
        ({"age": -1}, r"^history\[0\]\.age must be"),
    ):
        with pytest.raises(BadRequestError, match=message):
            reader({**request, "history": [event | change]})
    with pytest.raises(BadRequestError, match=r"^history\[0\] lacks the field 'dwell'"):
        reader({**request, "history": [{name: event[name] for name in event if name != "dwell"}]})
    unseen = event | {"surface": "a new one", "dwell": None, "session": None}
    assert reader({**request, "history": [unseen]}).num_events == 1


def test_a_run_says_how_many_events_its_policy_removes(folder):
    (share,) = re.findall(
        r"^data\.policy removes ([\d.]+)% of the events of the histories in a batch$",
        (folder / "output.txt").read_text(),
        flags=re.MULTILINE,
    )
    assert 5 < float(share) < 60


def test_a_policy_that_was_edited_is_noticed(folder, run, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "run")
    assert resume(tmp_path / "run").test is not None
    path = tmp_path / "run/data/policy.json"
    structs.replace(run.policy, newest=3).save(path)
    warm = run.config.with_training(run_dir=str(tmp_path / "warm"), warm_start=str(tmp_path / "run"), rows_after=None)
    warm = replace(warm, data=replace(warm.data, policy=str(folder / "moved.json")))
    given, log = ["--run", tmp_path / "run"], folder / "interactions.parquet"
    for command in (
        lambda: resume(tmp_path / "run"),
        lambda: resume(tmp_path / "run", data_changed="accept"),
        lambda: jfi.load_run(tmp_path / "run"),
        lambda: train(warm),
        lambda: commands.run("predict", *given, "--interactions", log, "--out", tmp_path / "out.csv"),
        lambda: commands.run("export", *given, "--out", tmp_path / "out"),
        lambda: commands.run("prepare", *given, "--out", tmp_path / "out"),
    ):
        with pytest.raises(DataError, match=f"{path} is damaged"):
            command()
    sums = read_sums(path.parent)
    write_sums(path.parent, sums | {path.name: sha256_of(path)})
    with pytest.raises(ConfigError, match=f"{path} has changed since the checkpoint; restore it"):
        jfi.load_run(tmp_path / "run")
    write_sums(path.parent, sums)
    path.unlink()
    with pytest.raises(DataError, match=f"{path} is missing"):
        jfi.load_run(tmp_path / "run")
    assert {one.name for one in tmp_path.iterdir()} == {"run"}


def test_weights_need_a_model_that_reads_them(folder, run, tmp_path):
    data = replace(run.config.data, policy=str(tmp_path / "p.json"))
    boosted = fit(*training_log(data), boost=["active"])
    boosted.save(tmp_path / "p.json")
    config = Config(data, replace(run.config.model, bias="weights"), training=TrainingConfig(str(tmp_path / "run")))
    with pytest.raises(ConfigError, match=r"^data\.policy has weights of events; set model\.bias: weights"):
        train(replace(config, model=run.config.model))
    with pytest.raises(ConfigError, match=r"^model\.bias: weights are those of data\.policy"):
        train(replace(config, data=replace(data, policy=None)))
    assert not (tmp_path / "run").exists()
    schema, reads = schema_of(data, run.schema, True, False), build_model(config.model, EncoderConfig(), run.schema)
    for model, policy, message in (
        (run.model, boosted, r"^the policy has weights of events, but no feature of the model reads weights$"),
        (reads, run.policy, r"^feature 'history' reads weights of events, .* have: this policy has none$"),
        (reads, None, r"^feature 'history' reads weights of events, .* have: a policy of histories gives weights$"),
        (run.model, structs.replace(run.policy, newest=0), r"^data\.policy has newest 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Export(model, schema, Limits(3, MAX_HISTORY), policy=policy).write(tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


@pytest.fixture(scope="module")
def boosted(folder, run, log, tmp_path_factory) -> SimpleNamespace:
    """A policy with weights, the batch of test samples that it makes, and the requests for them."""
    path = tmp_path_factory.mktemp("boosted") / "policy.json"
    policy = fit(*training_log(run.config.data), remove=0.5, newest=2, boost=["active", "passive"])
    policy.save(path)
    data = replace(run.config.data, policy=str(path))
    dataset = load_dataset(data, run.schema)
    batch, rows = dataset.batches("test", 10_000)[0], dataset.arrays().samples["test"]
    weights = batch.sparse_features["history_item"].weights()
    assert weights.min() < 0.8 and weights.max() > 1.2
    schema = schema_of(data, run.schema, reads_history=True, reads_age=False)
    requests = [request_of(log, log[row]) for row in rows]
    return SimpleNamespace(policy=policy, batch=batch, schema=schema, requests=requests)


def drawn_model(run, model: ModelConfig, encoder: EncoderConfig) -> SequenceDLRM:
    """A model of the run's data with parameters that tell the order and the number of events."""
    torch.manual_seed(0)
    drawn = build_model(replace(run.config.model, **model), encoder, run.schema).eval()
    for parameter in drawn.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return drawn


@pytest.mark.parametrize(
    ("model", "encoder", "weighted_values"),
    [
        ({"bias": "weights"}, {}, False),
        ({"bias": ["weights", "history_age"]}, {}, False),
        ({"bias": "weights"}, {"num_layers": 1}, False),
        ({"bias": "position"}, {}, True),
        ({"bias": "weights"}, {}, True),
    ],
    ids=str,
)
def test_a_request_has_the_weights_of_training(run, boosted, model, encoder, weighted_values, monkeypatch):
    if weighted_values:  # no setting of a run
        monkeypatch.setattr(
            "jfi.training.model.build_model.SequenceFeatureConfig", partial(SequenceFeatureConfig, weighted_values=True)
        )
    trained = drawn_model(run, model, EncoderConfig(**encoder))
    scoring = ScoringModel(trained, [])
    inputs, schema = inputs_of(scoring), boosted.schema
    read = RequestReader(schema, Limits(3, MAX_HISTORY), RequestPolicy(boosted.policy, schema.policy))
    encoded = [read(one) for one in boosted.requests]
    tables = FloatTables(*tables_of(trained, inputs.keys))
    with torch.no_grad():
        found = scoring(*batch_inputs(encoded, inputs, tables, torch.device("cpu")))
        unweighted = scoring(
            *batch_inputs([replace(one, weights=None) for one in encoded], inputs, tables, torch.device("cpu"))
        )
        wanted = logits(trained, boosted.batch)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert (found - unweighted).abs().max() > 0.05


@pytest.mark.slow
def test_an_artifact_scores_with_the_weights_of_its_policy(run, boosted, tmp_path):
    model = drawn_model(run, {"bias": "weights"}, EncoderConfig())
    Export(model, boosted.schema, Limits(3, MAX_HISTORY), policy=boosted.policy).write(tmp_path / "artifact")
    scorer = Scorer(tmp_path / "artifact")
    assert Policy.load(tmp_path / "artifact" / POLICY) == boosted.policy
    with torch.no_grad():
        wanted = logits(model, boosted.batch)
    together = scorer.score([scorer.reader(json.loads(json.dumps(one))) for one in boosted.requests])
    torch.testing.assert_close(torch.tensor(together)[:, 0], wanted, atol=1e-4, rtol=1e-4)


def test_a_server_reads_no_longer_histories_than_training():
    info = SimpleNamespace(limits=Limits(10, 50), schema=Schema([], [], []))
    assert _limits(Path("artifact"), info, None, 80).max_history == 80
    info.schema = replace(info.schema, policy=PolicyFields(None, None, None))
    assert _limits(Path("artifact"), info, 5, 20) == Limits(5, 20)
    with pytest.raises(ArtifactError, match=r"^artifact: max_history is 51, must be at most 50; its"):
        _limits(Path("artifact"), info, None, 51)
