"""A run with crosses of event columns, hash buckets, groups and impressions, from the table to the server."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from data_configs import data_config

import jfi
from jfi.serving.dataset_schema import schema_of
from jfi.serving.export import Export
from jfi.serving.schema import Limits
from jfi.serving.scorer import Scorer
from jfi.training import Config, ModelConfig, TrainingConfig, train

#: Events of a history that both take.
MAX_HISTORY = 6


def row(i: int) -> dict:
    """Row i: two rows of an impression have one time; the genre is the item's and the region the user's."""
    item, user, impression = i * 7 % 11, i // 2 % 5, i // 2
    return {
        "user": f"用户{user}",
        "item": f"i{item}",
        "time": 1_700_000_000 + 97 * impression * (impression % 3 + 1),
        "impression": f"r{impression}",
        "clicked": (i + item) % 3 % 2,
        "action": ["view", "buy", "cart"][i % 3],
        "genre": f"g{item % 4}",
        "region": f"land {user % 3}",
        "device": ["tv", "web", None][i * i % 7 % 3],
        "slot": f"s{i % 4}",
        "price": None if i % 5 == 0 else i * 13 % 30,
    }


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return [row(i) for i in range(240)]


@pytest.fixture(scope="module")
def run(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    pa.csv.write_csv(pa.Table.from_pylist(rows), folder / "log.csv")
    data = data_config(
        interactions=str(folder / "log.csv"),
        user="user",
        item="item",
        timestamp="time",
        label="clicked",
        request_id="impression",
        user_categorical=["region"],
        item_categorical=["genre"],
        event_categorical=["action", "device"],
        context_categorical=["slot", "device"],
        context_dense=["price"],
        event_crosses=[["item", "action"]],
        hash_buckets={"genre": 3, "region": 50, "item_x_action": 9, "slot": 6},
        max_history=MAX_HISTORY,
    )
    model = ModelConfig(8, num_heads=2, bias="history_age", dense_arch=[8], over_arch=[8], cross_layers=0, dropout=0.0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_curves", "draw_attention"):
            patch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
        train(Config(data, model, training=TrainingConfig(str(folder / "run"), epochs=2, device="cpu", batch_size=32)))
    return jfi.load_run(folder / "run")


def request_of(rows: list[dict], target: dict) -> dict | None:
    """The request for a row of the table, or None where it has no history."""
    before = [one for one in rows if one["user"] == target["user"] and one["time"] < target["time"]]
    history = [
        {**{name: one[name] for name in ("item", "genre", "action", "device")}, "age": target["time"] - one["time"]}
        for one in sorted(before, key=lambda one: (one["time"], one["item"]))
    ]
    candidate = {name: target[name] for name in ("item", "genre", "slot", "device", "price")}
    return {"user": {"region": target["region"]}, "history": history, "candidates": [candidate]} if history else None


@pytest.mark.slow  # compiling takes half a minute
def test_the_server_scores_rows_as_predict_does(run, rows, tmp_path):
    table = pa.Table.from_pylist(rows)
    wanted = run.predict(table).column("score").to_numpy()
    schema = schema_of(run.config.data, run.schema, reads_history=True, reads_age=True)
    Export(run.model, schema, Limits(10, MAX_HISTORY)).write(tmp_path / "artifact")
    scorer = Scorer(tmp_path / "artifact")
    fields = list(scorer.reader.fields["history"])
    assert fields == ["item", "genre", "action", "device", "age"]  # not the cross, not the group
    assert list(scorer.reader.fields["candidates"]) == ["item", "genre", "slot", "device", "price"]
    found = answers(scorer, [request for one in rows if (request := request_of(rows, one))])
    has_history = np.array([request_of(rows, one) is not None for one in rows])
    assert has_history.sum() > 200 and np.std(wanted) > 0.01
    np.testing.assert_allclose(found, wanted[has_history], atol=1e-5)
    # Values that training has not seen, in the target and in the events, have buckets or are unknown.
    new = [{**rows[200], "action": "gift", "item": "i new", "genre": "g new", "region": "nowhere", "device": "car"}]
    history = [{**one, "action": "gift", "region": "nowhere"} for one in rows]
    scores = run.predict(pa.Table.from_pylist(new), history=pa.Table.from_pylist(history)).column("score").to_numpy()
    np.testing.assert_allclose(answers(scorer, [request_of(history, new[0])]), scores, atol=1e-5)


def answers(scorer: Scorer, requests: list[dict]) -> list[float]:
    return [scores[0] for scores in scorer.score([scorer.reader(one) for one in requests])]
