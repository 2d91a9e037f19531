"""An artifact's own statistics: requests get what `jfi predict` computes for rows right after the same log."""

import contextlib
import dataclasses
import io
import shutil
from datetime import UTC, datetime

import commands
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator
from safetensors.numpy import load_file, save_file

import jfi
from jfi.data import DataConfig, FeatureConfig, load_dataset
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.events.groups import GROUPS
from jfi.serving.artifact import MODEL, PAST, PAST_IDS, ArtifactError
from jfi.serving.counters import LogCounters, RequestStatistics
from jfi.serving.dataset_schema import read_counters, schema_of
from jfi.serving.requests import BadRequestError, RequestReader
from jfi.serving.schema import Limits
from jfi.serving.scorer import Scorer
from jfi.serving.server.live import check
from jfi.training import Config, ConfigError, ModelConfig, TrainingConfig, train

from .conftest import rewriting

#: The ids of columns of a candidate without a value.
NONE = {"tags": np.zeros((1, 2), np.int64), "brand": np.zeros((1, 1), np.int64)}


def export(*arguments) -> str:
    """Runs `jfi export`, and returns what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        commands.run("export", *arguments)
    return output.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A log in time order with repeated items and lists of tags, a run on it, and its artifact."""
    folder, rng = tmp_path_factory.mktemp("past"), np.random.default_rng(0)
    count, items = 1500, 40
    tags = [[f"t{tag}" for tag in rng.choice(6, rng.integers(0, 4), replace=False)] for _ in range(items)]
    item, time = rng.integers(0, items, count), np.sort(rng.integers(0, 200_000, count)) * 10
    log = {"user_id": [f"u{user}" for user in rng.integers(0, 25, count)], "item_id": item, "timestamp": time}
    log |= {"rating": rng.integers(1, 6, count), "tags": [tags[one] for one in item]}
    log |= {"brand": [f"b{one % 5}" for one in item]}
    pq.write_table(pa.table(log), folder / "log.parquet")
    features = [FeatureConfig("tags", "item"), FeatureConfig("brand", "item"), FeatureConfig("rating", "event")]
    data = DataConfig(
        interactions=str(folder / "log.parquet"),
        label="rating >= 4",
        features=features,
        statistics=list(GROUPS),
        max_history=20,
        max_slots=2,
    )
    model = ModelConfig(8, num_heads=2, dense_arch=[8], over_arch=[8], cross_layers=0)
    training = TrainingConfig(str(folder / "run"), epochs=1, device="cpu", batch_size=256)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_curves", "draw_attention"):
            patch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
        train(Config(data, model, training=training))
    shown = export("--run", folder / "run")
    until = datetime.fromtimestamp(time[-1], UTC).isoformat(timespec="seconds")
    assert f"data.statistics of requests are those of the log as of {until}" in shown
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return jfi.load_run(folder / "run")


@pytest.fixture(scope="module")
def past_scorer(folder):
    return Scorer(folder / "run/artifact")


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


@pytest.mark.parametrize(("user", "later"), [("u3", 0.5), ("u7", 900), ("u11", 10**6), ("a new one", 60)])
def test_a_request_gets_what_predict_computes_right_after_the_log(folder, run, past_scorer, tmp_path, user, later):
    log = pq.read_table(folder / "log.parquet")
    now = float(log["timestamp"].to_pylist()[-1] + later)
    rows = rows_after(log, user, now)
    table = pa.Table.from_pylist(rows, log.schema.set(2, pa.field("timestamp", pa.float64())))
    request = past_scorer.reader(request_of(log, user, rows, now))
    sources, config = Sources(table, log), run.config.data.resolved()
    scoring = ScoringRows(sources, tmp_path, run.schema, config)
    (batch,) = scoring.dataset.batches("rows", 1000)
    order = scoring.rows[batch.samples.numpy()]
    expected = np.empty_like(batch.dense_features.numpy())
    expected[order] = batch.dense_features.numpy()
    np.testing.assert_array_equal(request.dense, expected)
    if later > 900:  # of items that training saw at most some days ago
        place = run.schema.dense_names.index("past_item_age")
        assert np.ptp(expected[:, place][:-1]) == 0 < later
    predicted = run.predict(table, history=log)["score"].to_numpy()
    np.testing.assert_allclose(past_scorer.score([request])[0], predicted, atol=2e-6)


def test_a_request_may_have_the_statistics_itself(folder, past_scorer):
    log, reader = pq.read_table(folder / "log.parquet"), past_scorer.reader
    now = float(log["timestamp"].to_pylist()[-1] + 60)
    request = request_of(log, "u3", rows_after(log, "u3", now), now)
    names = reader.schema.past.names
    counters = LogCounters.load(folder / "run/artifact", reader.schema.past)
    ids = {column.key: np.zeros((41, 2), np.int64) for column in counters.fields.columns.values()}
    values = RequestStatistics(counters)("u3", [str(one["item_id"]) for one in request["candidates"]], ids, now)
    for i, one in enumerate(request["candidates"]):
        one |= {name: None if np.isnan(values[name][i]) else float(values[name][i]) for name in names}
    given, own = reader(request), reader(without(request, names))
    same = [not name.startswith(("past_user_tags", "past_user_brand", "past_session_")) for name in names]
    np.testing.assert_array_equal(given.dense[:, same], own.dense[:, same])
    by_columns = {name: [one[name] for one in request["candidates"]] for name in request["candidates"][0]}
    np.testing.assert_array_equal(reader(request | {"candidates": by_columns}).dense, given.dense)
    bare = [{key: value for key, value in one.items() if key != "item_id"} for one in request["candidates"]]
    assert "item_id" in reader.fields["candidates"]  # the model reads it
    with pytest.raises(BadRequestError, match=r"candidates\[0\] lacks the field 'item_id'"):
        reader(request | {"candidates": bare})
    np.testing.assert_array_equal(reader(request | {"user": {}}).dense, given.dense)  # only look-ups read the user's id
    some = [request["candidates"][0], *without(request, names)["candidates"][1:]]
    for rows in (some, some[::-1]):
        with pytest.raises(
            BadRequestError, match=r"candidates\[\d+\] lacks the field 'past_.*; send all \d+ statistics of"
        ):
            reader(request | {"candidates": rows})
    del request["candidates"][3][names[2]]
    with pytest.raises(BadRequestError, match=rf"candidates\[3\] lacks the field '{names[2]}'"):
        reader(request)


def without(request: dict, names: list[str]) -> dict:
    rows = [{name: value for name, value in one.items() if name not in names} for one in request["candidates"]]
    return request | {"candidates": rows}


def test_the_schema_of_requests_takes_both_forms(folder, past_scorer):
    log, reader = pq.read_table(folder / "log.parquet"), past_scorer.reader
    now = float(log["timestamp"].to_pylist()[-1])
    request, names = request_of(log, "u3", rows_after(log, "u3", now), now), reader.schema.past.names
    check = Draft202012Validator(reader.json_schema())
    carrying = request | {"candidates": [one | dict.fromkeys(names, 0.5) for one in request["candidates"]]}
    for one in (request, carrying):
        assert not list(check.iter_errors(one))
        reader(one)
    partly = request | {"candidates": [one | {names[0]: 0.5} for one in request["candidates"]]}
    assert list(check.iter_errors(partly))
    del request["time"]
    assert not list(check.iter_errors(request))
    reader(request)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time": "now"}, "time must be a number of seconds since 1970, got 'now'"),
        ({"time": True}, "time must be a number"),
        ({"time": 1e300}, "time must be a number"),
        ({"time": 1767225600000}, "time must be a number of seconds since 1970, got 1767225600000"),
        ({"user": {}}, "user lacks the field 'user_id'"),
        ({"user": {"user_id": ["u1"]}}, "user.user_id must be a string, a number or a boolean, or null"),
    ],
)
def test_faults_of_requests_are_named(folder, past_scorer, change, message):
    log = pq.read_table(folder / "log.parquet")
    request = request_of(log, "u3", rows_after(log, "u3", 1e7), 1e7) | change
    with pytest.raises(BadRequestError, match=message):
        past_scorer.reader(request)


def test_a_user_of_null_is_new_and_a_time_before_the_end_is_right_after_it(folder, past_scorer):
    log, reader = pq.read_table(folder / "log.parquet"), past_scorer.reader
    rows, end = rows_after(log, "u3", 0.0), float(log["timestamp"].to_pylist()[-1])
    new = reader(request_of(log, "nobody", rows, end + 60))
    null = reader(request_of(log, "nobody", rows, end + 60) | {"user": {"user_id": None}})
    np.testing.assert_array_equal(null.dense, new.dense)
    request = request_of(log, "u3", rows, end)
    early, late = (reader(request | {"time": time}) for time in (5.0, end))
    np.testing.assert_array_equal(early.dense, late.dense)


def test_others_may_read_the_counters(folder):
    modes = {file.name: file.stat().st_mode for file in (folder / "run/artifact").iterdir()}
    assert modes[PAST] == modes["artifact.json"]


def test_damaged_counters_are_refused(folder, tmp_path):
    with rewriting(tmp_path / "ids", folder / "run/artifact") as copy:
        (copy / PAST_IDS).write_text('{"users": []}')
    with pytest.raises(ArtifactError, match=r"past.json is damaged"):
        Scorer(tmp_path / "ids")
    with rewriting(tmp_path / "counters", folder / "run/artifact") as copy:
        arrays = load_file(copy / PAST)
        del arrays["times"]
        save_file(arrays, copy / PAST)
    with pytest.raises(ArtifactError, match=r"past.safetensors lacks what item, user, .* need"):
        Scorer(tmp_path / "counters")
    with rewriting(tmp_path / "missing", folder / "run/artifact") as copy:
        (copy / PAST).unlink()
    with pytest.raises(ArtifactError, match=r"does not list past.safetensors"):
        Scorer(tmp_path / "missing")


def test_a_newer_log_counts_its_rows(folder, run, tmp_path):
    log = pq.read_table(folder / "log.parquet")
    more = pa.concat_tables([log, log.slice(0, 300).set_column(2, "timestamp", pa.array(np.arange(300) + 10**7))])
    pq.write_table(more, tmp_path / "more.parquet")
    config = dataclasses.replace(run.config.data, interactions=str(tmp_path / "more.parquet"))
    old, new = (read_counters(one, run.schema) for one in (run.config.data, config))
    assert new.fields.until == 10**7 + 299 > old.fields.until
    reader = RequestReader(
        dataclasses.replace(Scorer(folder / "run/artifact").reader.schema, past=new.fields),
        Scorer(folder / "run/artifact").reader.limits,
        past=RequestStatistics(new),
    )
    rows = rows_after(log, "u3", 0.0)
    assert reader(request_of(log, "u3", rows, 2e7)).num_candidates == 41


def test_export_without_a_log(folder, tmp_path, run, monkeypatch):
    """The compiled model is that of the first export."""
    package = folder / "run/artifact" / MODEL
    monkeypatch.setattr("jfi.serving.export.write_package", lambda program, path, metadata: shutil.copy(package, path))
    shown = export("--run", folder / "run", "--out", tmp_path / "none", "--history", "none")
    assert "data.statistics" not in shown
    assert not (tmp_path / "none" / PAST).exists()
    bare, own = Scorer(tmp_path / "none"), Scorer(folder / "run/artifact")
    assert "this model does not read" in bare.reader.json_schema()["properties"]["time"]["description"]
    own.reader.fields = bare.reader.fields  # as if the model read both ids
    with pytest.raises(ArtifactError, match="has no statistics of the past of its own, which requests may leave out"):
        check(bare, own)
    check(own, bare)
    moved = tmp_path / "log.parquet"
    shutil.move(folder / "log.parquet", moved)
    try:
        with pytest.raises(ConfigError, match=r"of which statistics are made, cannot be read: .*--history FILE"):
            export("--run", folder / "run", "--out", tmp_path / "moved")
        shown = export("--run", folder / "run", "--out", tmp_path / "named", "--history", moved)
        assert "requests should have a `time` near it" in shown  # the log ends in 1970
    finally:
        shutil.move(moved, folder / "log.parquet")
    milliseconds = pq.read_table(folder / "log.parquet")
    later = pa.array([float(one) * 1e12 for one in milliseconds["timestamp"].to_pylist()])
    pq.write_table(milliseconds.set_column(2, "timestamp", later), tmp_path / "far.parquet")
    config = dataclasses.replace(run.config.data, interactions=str(tmp_path / "far.parquet"))
    assert read_counters(config, run.schema).fields.date().endswith(" seconds")


def test_a_log_without_an_event_of_histories_can_be_served(folder, run, tmp_path):
    config = dataclasses.replace(run.config.data, history="rating >= 3")
    log = pq.read_table(folder / "log.parquet")
    low = pa.array(np.minimum(log["rating"].to_numpy(), 2))
    pq.write_table(log.set_column(3, "rating", low), tmp_path / "log.parquet")
    config = dataclasses.replace(config, interactions=str(tmp_path / "log.parquet"))
    values = RequestStatistics(read_counters(config, run.schema))("u3", ["1"], NONE)
    assert values["past_session_count"][0] == 0 and values["past_user_count"][0] > 0


@pytest.mark.parametrize(
    "change",
    [
        {"features": [FeatureConfig("tags", "item", hash_buckets=7), FeatureConfig("brand", "item", default="b1")]},
        {"features": [FeatureConfig("item_id", "item", hash_buckets=11), FeatureConfig("user_id", "user")]},
        {"label": None, "statistics": "auto"},
        {"history": "rating >= 3"},
    ],
    ids=["hashed tags, a default", "hashed ids", "no label", "events by a rule"],
)
def test_requests_of_other_configs_get_what_predict_computes(folder, tmp_path, change):
    log = pq.read_table(folder / "log.parquet")
    base = DataConfig(interactions=str(folder / "log.parquet"), label="rating >= 4", max_history=20, max_slots=2)
    config = dataclasses.replace(base, **change).resolved()
    schema, now = load_dataset(config).schema, float(log["timestamp"].to_pylist()[-1] + 60)
    rows = rows_after(log, "u3", now)
    table = pa.Table.from_pylist(rows, log.schema.set(2, pa.field("timestamp", pa.float64())))
    counters = read_counters(config, schema)
    fields = dataclasses.replace(schema_of(config, schema, False, False), past=counters.fields)
    reader = RequestReader(fields, Limits(100, 20), past=RequestStatistics(counters))
    names = [name for name in reader.fields["candidates"] if name not in counters.fields.names]
    user = {name: "u3" for name in reader.fields["user"]}
    request = {"user": user, "candidates": [{name: row[name] for name in names} for row in rows], "time": now}
    scoring = ScoringRows(Sources(table, log), tmp_path, schema, config.resolved())
    (batch,) = scoring.dataset.batches("rows", 1000)
    order = scoring.rows[batch.samples.numpy()]
    np.testing.assert_array_equal(reader(request).dense[order], batch.dense_features.numpy())
