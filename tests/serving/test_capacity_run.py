"""A run whose tables grow, from the table to the server: raw ids in requests, artifact and state of users."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from data_configs import data_config

import jfi
from jfi.serving.artifact import ArtifactError
from jfi.serving.dataset_schema import schema_of
from jfi.serving.export import Export
from jfi.serving.published import Change
from jfi.serving.requests import RequestReader
from jfi.serving.schema import Limits, Schema, Table
from jfi.serving.scorer import Scorer, StateSettings
from jfi.serving.tables import FLOAT, INT8, RowsOfIds, load_tables, save_tables
from jfi.state.export import export_events
from jfi.state.layout import layout_of
from jfi.state.load import fill
from jfi.state.state import UserState
from jfi.state.stores import open_store
from jfi.state.user_rows import scan_records
from jfi.training import Config, ModelConfig, TrainingConfig, train
from jfi.utils.encoding import HashedIds

MAX_HISTORY = 6
CAPACITY = {"item": 8, "user": 9, "genre": 8, "device": 9, "slot": 5}


def row(i: int) -> dict:
    item, user = i * 7 % 23, i * 5 % 11
    return {
        "user": f"用户{user}",
        "item": f"i{item}",
        "time": 1_700_000_000 + 97 * i,
        "clicked": (i + item) % 3 % 2,
        "genre": f"g{item % 4}|g{item % 7}",
        "device": ["tv", "web", None][i * i % 7 % 3],
        "slot": f"s{i % 4}",
        "price": None if i % 5 == 0 else i * 13 % 30,
    }


ROWS = [row(i) for i in range(240)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("growing")
    pa.csv.write_csv(pa.Table.from_pylist(ROWS), folder / "log.csv")
    data = data_config(
        interactions=str(folder / "log.csv"),
        user="user",
        item="item",
        timestamp="time",
        label="clicked",
        user_categorical=["user"],
        item_categorical=["genre"],
        event_categorical=["device"],
        context_categorical=["slot", "device"],
        context_dense=["price"],
        separators={"genre": "|"},
        capacity=CAPACITY,
        max_history=MAX_HISTORY,
        max_slots=2,
    )
    model = ModelConfig(8, num_heads=2, bias="history_age", dense_arch=[8], over_arch=[8], cross_layers=0, dropout=0.0)
    training = TrainingConfig(str(folder / "run"), epochs=2, device="cpu", batch_size=1, eval_batch_size=64)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_curves", "draw_attention"):
            patch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
        train(Config(data, model, training=training))
    return jfi.load_run(folder / "run")


def request_of(rows: list[dict], target: dict) -> dict:
    before = [one for one in rows if one["user"] == target["user"] and one["time"] < target["time"]]
    history = [
        {"item": one["item"], "genre": one["genre"].split("|"), "device": one["device"]}
        | {"age": target["time"] - one["time"]}
        for one in before
    ]
    return {"user": {"user": target["user"]}, "history": history, "candidates": [candidate(target)]}


def candidate(one: dict) -> dict:
    return {name: one[name] for name in ("item", "slot", "device", "price")} | {"genre": one["genre"].split("|")}


def schema(run) -> Schema:
    return schema_of(run.config.data, run.schema, reads_history=True, reads_age=True)


def answers(scorer: Scorer, requests: list[dict]) -> np.ndarray:
    return np.array([scores[0] for scores in scorer.score([scorer.reader(one) for one in requests])])


def test_requests_get_the_raw_ids_of_training(run):
    from jfi.data import load_dataset

    dataset = load_dataset(run.config.data, run.schema)
    read, fields = RequestReader(schema(run), Limits(10, MAX_HISTORY)), {s.key: s for s in run.schema.features}
    assert {spec.column for spec in fields.values() if spec.raw} == CAPACITY.keys()
    (batch,) = dataset.batches("test", 1000)
    for number, target in enumerate(ROWS[-len(batch.labels) :]):
        request = read(request_of(ROWS, target))
        for key, values in batch.sparse_features.to_dict().items():
            if key != "history_age":
                assert request.ids[key].tolist() == values.to_dense()[number].tolist(), key
    wanted = HashedIds(8).ids([ROWS[-1]["item"]]).tolist()
    assert request.ids["item"].tolist() == wanted and wanted[0] > 2**40


@pytest.mark.slow  # compiling takes half a minute
def test_the_server_scores_rows_as_predict_does(run, tmp_path):
    for kind, tolerance in ((FLOAT, 1e-5), (INT8, 0.05)):
        Export(run.model, schema(run), Limits(10, MAX_HISTORY), tables=kind).write(tmp_path / kind)
        scorer = Scorer(tmp_path / kind)
        wanted = run.predict(pa.Table.from_pylist(ROWS)).column("score").to_numpy()
        assert np.std(wanted) > 0.01
        np.testing.assert_allclose(answers(scorer, [request_of(ROWS, one) for one in ROWS]), wanted, atol=tolerance)
        new = [ROWS[-1] | {"item": "i new", "user": "nobody", "genre": "g1|new", "time": ROWS[-1]["time"] + 1}]
        history = pa.Table.from_pylist(ROWS)
        wanted = run.predict(pa.Table.from_pylist(new), history=history).column("score").to_numpy()
        np.testing.assert_allclose(answers(scorer, [request_of(ROWS, new[0])]), wanted, atol=tolerance)


@pytest.mark.slow
def test_a_server_that_knows_the_users_scores_as_predict_does(run, tmp_path):
    Export(run.model, schema(run), Limits(10, MAX_HISTORY)).write(tmp_path / "artifact")
    store = open_store(str(tmp_path / "state"), create=True)
    known = tmp_path / "known.csv"
    pa.csv.write_csv(pa.Table.from_pylist(ROWS[:200]), known)
    fill(store, schema(run), run.config.data, run.schema, str(known))
    scorer = Scorer(tmp_path / "artifact", state=StateSettings(store))
    names = ("user", "time", "item", "device")
    events = [{name: one[name] for name in names} | {"genre": one["genre"].split("|")} for one in ROWS[200:230]]
    (added,) = scorer.state.add([scorer.events(events)])
    assert added.added == 30
    now = ROWS[229]["time"] + 1
    targets = [one | {"time": now} for one in ROWS[:60]]
    history = pa.Table.from_pylist(ROWS[:230])
    for target in targets:
        request = {"user": {"user": target["user"]}, "candidates": [candidate(target)], "time": now}
        (score,) = answers(scorer, [request])
        wanted = run.predict(pa.Table.from_pylist([target]), history=history).column("score").to_numpy()
        np.testing.assert_allclose(score, wanted[0], atol=1e-5)


def test_the_state_of_users_keeps_texts_whatever_the_capacity(run, tmp_path):
    log = tmp_path / "log.csv"
    pa.csv.write_csv(pa.Table.from_pylist(ROWS), log)
    store, requests = open_store(str(tmp_path / "state"), create=True), schema(run)
    assert fill(store, requests, run.config.data, run.schema, str(log)) == (11, 240)
    assert export_events(store, tmp_path / "events.parquet") == (11, 240)
    by_time = {one["time"]: one for one in pa.parquet.read_table(tmp_path / "events.parquet").to_pylist()}
    for one in ROWS:
        own = by_time[one["time"]]
        assert (own["user"], own["item"], own["device"]) == (one["user"], one["item"], one["device"])
    # A run with other capacities reads the same records.
    fields = [dataclasses.replace(one, capacity=one.capacity and 77) for one in requests.event]
    for event in (requests.event, fields):
        own = dataclasses.replace(requests, event=event)
        reader = RequestReader(own, Limits(10, MAX_HISTORY), state=layout_of(own, MAX_HISTORY).info)
        state = UserState(store, reader)
        for user, records in scan_records(store, state.layout):
            wanted = HashedIds(8).ids(state.texts("item", records["item"].tolist()))
            assert np.array_equal(state._ids(records)["history_item"], wanted), user


@pytest.mark.parametrize("kind", [FLOAT, INT8])
def test_tables_that_grow_are_read_by_raw_ids(tmp_path, kind):
    weights = {"item": torch.randn(5, 4), "slot": torch.randn(3, 4)}
    tables = {"item": Table(5, 4, ["item", "history_item"], True), "slot": Table(3, 4, ["slot"])}
    ids = torch.tensor([0, 2**62, 0, 17, 2**63 - 2])
    save_tables(tmp_path / "tables.safetensors", kind, weights, tables, {"item": ids})
    loaded = load_tables(tmp_path / "tables.safetensors", kind, tables, torch.device("cpu"))
    asked = torch.tensor([17, 5, 0, 2**63 - 2, 2**62, 2**62 + 1])
    found = loaded({"item": asked, "history_item": asked[:0], "slot": torch.tensor([2])})
    wanted = weights["item"][torch.tensor([3, 0, 0, 4, 1, 0])]
    torch.testing.assert_close(found["item"], wanted, atol=1e-6 if kind == FLOAT else 0.05, rtol=0)
    torch.testing.assert_close(found["slot"], weights["slot"][2:], atol=1e-6 if kind == FLOAT else 0.05, rtol=0)
    assert found["history_item"].shape == (0, 4)


@pytest.mark.parametrize(
    ("ids", "message"), [(None, "'item.ids' is None"), (torch.ones(5).long(), "row 0 of a table that grows has an id")]
)
def test_tables_that_grow_without_their_ids_are_refused(tmp_path, ids, message):
    tables = {"item": Table(5, 4, ["item"], True)}
    save_tables(tmp_path / "t", FLOAT, {"item": torch.randn(5, 4)}, tables, {} if ids is None else {"item": ids})
    with pytest.raises(ArtifactError, match=message):
        load_tables(tmp_path / "t", FLOAT, tables, torch.device("cpu"))


def test_rows_of_ids_follow_other_ids():
    first = RowsOfIds(torch.tensor([0, 8, 3, 0, 5]))
    rows = first.changed(torch.tensor([1, 3, 4]), torch.tensor([9, 8, 0]))
    assert first.ids.tolist() == [0, 8, 3, 0, 5] and first(torch.tensor([8, 9])).tolist() == [1, 0]
    assert rows.ids.tolist() == [0, 9, 3, 8, 0]
    assert rows(torch.tensor([8, 9, 3, 0, 4, 5])).tolist() == [3, 1, 2, 0, 0, 0]


def test_ids_that_have_not_moved_are_not_sorted_again():
    rows = RowsOfIds(torch.tensor([0, 8, 3, 0, 5]))
    assert rows.changed(torch.tensor([4, 1, 3]), torch.tensor([5, 8, 0])) is rows


def test_ids_are_sorted_before_a_change_is_applied(run, tmp_path, monkeypatch):
    Export(run.model, schema(run), Limits(10, MAX_HISTORY)).write(tmp_path / "artifact")
    scorer = Scorer(tmp_path / "artifact")
    table = next(iter(scorer.tables.rows))
    width = scorer.tables.tensors[table].shape[1]
    change = Change(2, {table: (torch.tensor([1, 2]), torch.zeros(2, width), torch.tensor([2**61, 2**61 + 1]))})
    before = scorer.tables.rows[table]
    apply = scorer.prepare(change)
    assert scorer.tables.rows[table] is before and scorer.version is None
    with monkeypatch.context() as patch:
        patch.setattr(RowsOfIds, "__init__", lambda *_: pytest.fail("sorts between two calls"))
        apply()
    assert scorer.version == 2 and scorer.tables.rows[table](torch.tensor([2**61 + 1, 2**61])).tolist() == [2, 1]
    found = scorer.tables({scorer.info.tables[table].keys[0]: torch.tensor([2**61 + 1])})
    assert not any(one.any() for one in found.values())
