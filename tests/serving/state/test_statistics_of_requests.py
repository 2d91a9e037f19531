"""Requests to a model with statistics of the past get what `jfi predict` computes for rows right after the same log."""

import contextlib
import dataclasses
import shutil

import commands
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator

import jfi
from jfi.cli.audit import audit_of
from jfi.cli.state import schema_of_run
from jfi.data import DataConfig, FeatureConfig
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.events.groups import GROUPS
from jfi.serving.artifact import ArtifactError
from jfi.serving.requests import BadRequestError, RequestReader
from jfi.serving.schema import Limits
from jfi.serving.scorer import Scorer, StateSettings
from jfi.state.events import EventReader
from jfi.state.layout import layout_of
from jfi.state.load import fill
from jfi.state.state import UserState, write_layout
from jfi.state.stores import LmdbStore, StateError, StoreUnavailableError
from jfi.training import Config, ModelConfig, TrainingConfig, train

from .test_audit import Server


def train_on(folder, name: str, **model) -> None:
    features = [FeatureConfig("tags", "item"), FeatureConfig("brand", "item"), FeatureConfig("rating", "event")]
    data = DataConfig(
        interactions=str(folder / "log.parquet"),
        label="rating >= 4",
        features=features,
        statistics=list(GROUPS),
        max_history=20,
        max_slots=2,
    )
    model = ModelConfig(8, num_heads=2, dense_arch=[8], over_arch=[8], cross_layers=0, **model)
    training = TrainingConfig(str(folder / name), epochs=1, device="cpu", batch_size=256)
    with pytest.MonkeyPatch.context() as patch:
        for plot in ("draw_curves", "draw_attention"):
            patch.setattr(f"jfi.training.run.plots.{plot}", lambda *_: None)
        train(Config(data, model, training=training))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A log in time order with repeated items and lists of tags, a run on it, its artifact and its state."""
    folder, rng = tmp_path_factory.mktemp("past"), np.random.default_rng(0)
    count, items = 1500, 40
    tags = [[f"t{tag}" for tag in rng.choice(6, rng.integers(0, 4), replace=False)] for _ in range(items)]
    item, time = rng.integers(0, items, count), np.sort(rng.integers(0, 200_000, count)) * 10
    log = {"user_id": [f"u{user}" for user in rng.integers(0, 25, count)], "item_id": item, "timestamp": time}
    log |= {"rating": rng.integers(1, 6, count), "tags": [tags[one] for one in item]}
    log |= {"brand": [f"b{one % 5}" for one in item]}
    pq.write_table(pa.table(log), folder / "log.parquet")
    train_on(folder, "run")
    commands.run("export", "--run", folder / "run", "--state", folder / "users")
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return jfi.load_run(folder / "run")


@pytest.fixture(scope="module")
def store(folder):
    with contextlib.closing(LmdbStore(folder / "users")) as store:
        yield store


@pytest.fixture(scope="module")
def past_scorer(folder, store):
    return Scorer(folder / "run/artifact", state=StateSettings(store))


def request_of(log: pa.Table, user: str, rows: list[dict], now: float) -> dict:
    """The request for the candidates of `rows`, with the user's history in the log."""
    own = [row for row in log.to_pylist() if row["user_id"] == user]
    keep = ("item_id", "tags", "brand", "rating")
    history = [{name: row[name] for name in keep} | {"age": now - row["timestamp"]} for row in own]
    candidates = [{name: row[name] for name in ("item_id", "tags", "brand")} for row in rows]
    return {"user": {"user_id": user}, "history": history, "candidates": candidates, "time": now}


def rows_after(log: pa.Table, user: str, now: float) -> list[dict]:
    """Rows of a user with all items of the log, a new one, and one with other tags than in the log."""
    by_item = {row["item_id"]: row for row in log.to_pylist()}
    items = [by_item[item] for item in sorted(by_item)]
    items += [items[0] | {"item_id": 1000, "tags": ["t1", "t2", "t3"]}]
    return [row | {"user_id": user, "timestamp": now, "rating": None} for row in items]


def predicted(run, log: pa.Table, rows: list[dict], folder) -> tuple[np.ndarray, np.ndarray]:
    """The dense features and the scores of `jfi predict` for rows after the log."""
    table = pa.Table.from_pylist(rows, log.schema.set(2, pa.field("timestamp", pa.float64())))
    scoring = ScoringRows(Sources(table, log), folder, run.schema, run.config.data.resolved())
    (batch,) = scoring.dataset.batches("rows", 1000)
    dense = np.empty_like(batch.dense_features.numpy())
    dense[scoring.rows[batch.samples.numpy()]] = batch.dense_features.numpy()
    return dense, run.predict(table, history=log)["score"].to_numpy()


@pytest.mark.parametrize(("user", "later"), [("u3", 0.5), ("u7", 900), ("u11", 10**6), ("a new one", 60)])
def test_a_request_gets_what_predict_computes_right_after_the_log(folder, run, past_scorer, tmp_path, user, later):
    """With a history of its own, and with that of the state."""
    log = pq.read_table(folder / "log.parquet")
    now = float(log["timestamp"].to_pylist()[-1] + later)
    rows = rows_after(log, user, now)
    request, (dense, scores) = request_of(log, user, rows, now), predicted(run, log, rows, tmp_path)
    without_history = {name: part for name, part in request.items() if name != "history"}
    assert "user_id" not in {one.name for one in past_scorer.reader.schema.user}  # the model does not read it
    for body in (request, request | {"user": user}, without_history):
        (filled,) = past_scorer.state.fill([past_scorer.reader(body)])
        np.testing.assert_array_equal(filled.dense, dense)
        np.testing.assert_allclose(past_scorer.score([past_scorer.reader(body)])[0], scores, atol=2e-6)
    if later > 900:  # of items that training saw at most some days ago
        position = run.schema.dense_names.index("past_item_age")
        assert np.ptp(dense[:, position][:-1]) == 0 < later


@pytest.mark.parametrize("item_id", [True, False])
@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_a_model_without_history_reads_statistics_of_a_state(folder, tmp_path, new_store, item_id):
    train_on(folder, f"none-{item_id}", pooling="none", item_id=item_id)
    run, log, store = jfi.load_run(folder / f"none-{item_id}"), pq.read_table(folder / "log.parquet"), new_store()
    schema = schema_of_run(run)
    assert not schema.event and {one.name for one in schema.counted} == {"tags", "brand", "rating"}
    fill(store, schema, run.config.data, run.schema, None)
    reader = RequestReader(schema, Limits(100, 20), state=layout_of(schema, 20).info)
    state, newest = UserState(store, reader), float(log["timestamp"].to_pylist()[-1])
    more = log.slice(0, 30).set_column(2, "timestamp", pa.array(np.arange(30) + newest + 1.0)).to_pylist()
    names = ("user_id", "timestamp", "item_id", "tags", "brand", "rating")
    state.add([EventReader(state.layout)([{name: row[name] for name in names} for row in more])])
    rows, log = rows_after(log, "u3", newest + 100), pa.concat_tables([log, pa.Table.from_pylist(more, log.schema)])
    request = request_of(log, "u3", rows, newest + 100)
    with pytest.raises(BadRequestError, match="history"):
        reader(request)
    del request["history"]
    (filled,) = state.fill([reader(request)])
    np.testing.assert_array_equal(filled.dense, predicted(run, log, rows, tmp_path)[0])


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_a_server_without_the_statistics_is_refused_with_advice(folder, store, new_store):
    path = folder / "run/artifact"
    make = "serve it with --state FOLDER, made by `jfi state load --run run --state FOLDER`"
    with pytest.raises(ArtifactError, match=make):
        Scorer(path)
    other, schema = new_store(), Scorer(path, state=StateSettings(store)).info.schema
    write_layout(other, layout_of(dataclasses.replace(schema, statistics=None), 20))
    with pytest.raises(ArtifactError, match=r"the state of users has no statistics of the past.*`jfi state load`"):
        Scorer(path, state=StateSettings(other))


def test_statistics_are_never_those_of_the_caller(folder, past_scorer):
    log, reader = pq.read_table(folder / "log.parquet"), past_scorer.reader
    now = float(log["timestamp"].to_pylist()[-1] + 60)
    request = request_of(log, "u3", rows_after(log, "u3", now), now)
    assert not set(reader.schema.statistics.names) & reader.fields["candidates"].keys()
    given = [one | {"past_item_count": 0.5} for one in request["candidates"]]
    with pytest.raises(BadRequestError, match=r"candidates\[0\] has an unknown field 'past_item_count'"):
        reader(request | {"candidates": given})


def test_the_schema_of_requests_is_that_of_the_reader(folder, past_scorer):
    log, reader = pq.read_table(folder / "log.parquet"), past_scorer.reader
    now = float(log["timestamp"].to_pylist()[-1])
    request = request_of(log, "u3", rows_after(log, "u3", now), now)
    check, history = Draft202012Validator(reader.json_schema()), request.pop("history")
    taken = [request, request | {"history": history}, request | {"user": "u3"}]
    taken += [request | {"history": history, "user": user} for user in (None, "u3", {"user_id": None})]
    taken += [{name: part for name, part in request.items() if name != "time"}]
    for body in taken:
        assert not list(check.iter_errors(body))
        reader(body)
    refused = [request | {"user": user} for user in (None, {"user_id": None}, {})]
    refused += [request | {"history": history, "user": {}}]
    refused += [request | {"candidates": [{"tags": None, "brand": None}]}]
    for body in refused:  # what is needed of what the state may have is not said by the schema
        with pytest.raises(BadRequestError, match=r"lacks the field|must be the id of"):
            reader(body)
    wrong = request | {"candidates": [{"item_id": {}}]}
    with pytest.raises(BadRequestError, match=r"^candidates\[0\].item_id must be"):
        reader(wrong)
    assert list(check.iter_errors(wrong))


def test_a_user_of_null_is_a_new_one(folder, past_scorer):
    log, reader, state = pq.read_table(folder / "log.parquet"), past_scorer.reader, past_scorer.state
    now = float(log["timestamp"].to_pylist()[-1] + 60)
    request = request_of(log, "nobody", rows_after(log, "u3", now), now)
    new, null = state.fill([reader(request), reader(request | {"user": None})])
    np.testing.assert_array_equal(null.dense, new.dense)


def test_a_store_that_does_not_answer_gives_the_means(folder, past_scorer, monkeypatch):
    """As for values that are null, where requests may be scored without the state."""
    log, reader = pq.read_table(folder / "log.parquet"), past_scorer.reader
    now = float(log["timestamp"].to_pylist()[-1] + 60)
    request = request_of(log, "u3", rows_after(log, "u3", now), now)

    def fail(*_):
        raise StoreUnavailableError("away")

    monkeypatch.setattr(past_scorer.state.store, "snapshot", fail)
    read = reader(request)
    with pytest.raises(StoreUnavailableError):
        past_scorer.score([read])
    cold = dataclasses.replace(past_scorer._settings, cold_if_unavailable=True)
    monkeypatch.setattr(past_scorer, "_settings", cold)
    (scores,) = past_scorer.score([read])
    assert not read.stored.is_available and not read.dense[:, -len(reader.schema.statistics.names) :].any()
    without_state = dataclasses.replace(read, stored=None)
    assert past_scorer.score([without_state])[0] == scores


def test_an_artifact_with_statistics_has_no_counters(folder):
    names = {file.name for file in (folder / "run/artifact").iterdir()}
    assert names == {"artifact.json", "vocabularies.json", "tables.safetensors", "model.pt2", "SHA256SUMS"}


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_a_log_without_an_event_of_histories_can_be_loaded(folder, run, tmp_path, new_store):
    log, store = pq.read_table(folder / "log.parquet"), new_store()
    low = pa.array(np.minimum(log["rating"].to_numpy(), 2))
    pq.write_table(log.set_column(3, "rating", low), tmp_path / "log.parquet")
    config = dataclasses.replace(run.config.data, history="rating >= 3")
    schema = dataclasses.replace(schema_of_run(run), history="rating >= 3")
    fill(store, schema, config, run.schema, str(tmp_path / "log.parquet"))
    state = UserState(store, RequestReader(schema, Limits(100, 20), state=layout_of(schema, 20).info))
    (found,) = state.fill([state.reader({"user": "u3", "candidates": [{"item_id": 1, "tags": None, "brand": None}]})])
    (values,) = state.counters.read(store.get, [found.stored])
    assert values["past_session_count"][0] == 0 and values["past_user_count"][0] > 0


def test_a_log_that_has_moved_is_named_and_can_be_given(folder, tmp_path):
    moved = tmp_path / "log.parquet"
    shutil.move(folder / "log.parquet", moved)
    try:
        with pytest.raises(StateError, match=r"its log cannot be read: .*; name a log by --interactions FILE"):
            commands.run("state", "load", "--run", folder / "run", "--state", tmp_path / "no")
        commands.run("state", "load", "--run", folder / "run", "--state", tmp_path / "yes", "--interactions", moved)
    finally:
        shutil.move(moved, folder / "log.parquet")


def test_an_audit_rebuilds_statistics(folder, run, tmp_path):
    """A label that comes late changes statistics of an item alone; those at the request's position are equal."""
    shutil.copytree(folder / "users", tmp_path / "state")
    newest, parts, draw = 2_000_000.0, [], np.random.default_rng(1)
    rows = pq.read_table(folder / "log.parquet").to_pylist()
    items = {row["item_id"]: row for row in rows}

    def event(number: int, **change) -> dict:
        item = items[int(draw.integers(0, 40))]
        change = {"user_id": f"u{draw.integers(0, 27)}", "timestamp": newest + number * 10.0, "rating": 5} | change
        return item | change

    with contextlib.closing(LmdbStore(tmp_path / "state")) as store:
        server = Server(Scorer(folder / "run/artifact", state=StateSettings(store)), tmp_path / "requests")
        for number in range(40):
            parts.append([event(number)])
            server.add(parts[-1])
            asked = {
                "user": f"u{number % 27}",
                "candidates": [number % 40, 39, 1000],
                "time": newest + number * 10 + 1.0,
            }
            server.score(asked)
        late = event(20, timestamp=newest + 205.0, item_id=39, user_id="u26")
        server.add([late])
        parts.append([late])
        server.close()
    schema = pq.read_schema(folder / "log.parquet").set(2, pa.field("timestamp", pa.float64()))
    (tmp_path / "log").mkdir()
    for number, part in enumerate(parts):
        pq.write_table(pa.Table.from_pylist(part, schema), tmp_path / f"log/part-{number}.parquet")
    report = audit_of(run, [str(tmp_path / "log")], examples=40)(tmp_path / "requests")
    causes = {name: one.causes.most_common(1)[0][0] for name, one in report.features.items()}
    assert report.compared == 40 and 0 < report.differing == report.late < 25 and report.is_clean, report
    assert {*causes.values()} == {"late event"} and {*causes} & {*run.schema.dense_names}
    report = audit_of(run, [str(tmp_path / "log")], examples=1)(tmp_path / "requests")
    assert not report.is_clean and report.late == 1  # statistics of one alone were tried
