"""An artifact of a run of several labels, with auxiliary ones in its training, from the table to the scores."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from data_configs import data_config
from statistics_columns import with_statistics

import jfi
from jfi.data.config import LabelConfig
from jfi.serving.dataset_schema import schema_of
from jfi.serving.export import Export
from jfi.serving.schema import Limits
from jfi.serving.scorer import Scorer
from jfi.training import Config, ModelConfig, TrainingConfig, train

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LABELS = [LabelConfig("clicked", "clicked"), LabelConfig("seconds", "seconds", "regression")]


def row(i: int) -> dict:
    """Row i of 5 users and 11 items."""
    item, user = i * 7 % 11, i % 5
    return {
        "user": f"u{user}",
        "item": f"i{item}",
        "time": 1_700_000_000 + 97 * i,
        "clicked": (i + item) % 3 % 2,
        "seconds": i % 50,
        "action": ["view", "buy", "cart"][i % 3],
        "genre": f"g{item % 4}",
        "region": f"land {user % 3}",
        "slot": f"s{i % 4}",
    }


def request_of(rows: list[dict], target: dict) -> dict | None:
    """The request for a row of the table, or None where it has no history."""
    before = [one for one in rows if one["user"] == target["user"] and one["time"] < target["time"]]
    history = [
        {"item": one["item"], "genre": one["genre"], "action": one["action"], "age": target["time"] - one["time"]}
        for one in before
    ]
    candidate = {name: target[name] for name in target if name in ("item", "genre", "slot") or name.startswith("past_")}
    return {"user": {"region": target["region"]}, "history": history, "candidates": [candidate]} if history else None


@pytest.mark.slow  # compiling takes half a minute
def test_its_scores_are_those_of_the_run(tmp_path):
    """By label, on a GPU where there is one; the auxiliary label has no score, and its tower is not in the package.

    The run has the statistics of the defaults, which requests carry.
    """
    rows = [row(i) for i in range(240)]
    pa.csv.write_csv(pa.Table.from_pylist(rows), tmp_path / "log.csv")
    data = data_config(
        interactions=str(tmp_path / "log.csv"),
        user="user",
        item="item",
        timestamp="time",
        labels=[*LABELS, LabelConfig("long", "seconds >= 25", "auxiliary")],
        user_categorical=["region"],
        item_categorical=["genre"],
        event_categorical=["action"],
        context_categorical=["slot"],
        max_history=6,
        statistics="auto",
    )
    model = ModelConfig(
        8, num_heads=2, bias="history_age", dense_arch=[8], over_arch=[16, 8], cross_layers=0, dropout=0.0
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_curves", "draw_attention"):
            patch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
        train(Config(data, model, training=TrainingConfig(str(tmp_path / "run"), epochs=2, batch_size=32)))
    run = jfi.load_run(tmp_path / "run")
    table = pa.Table.from_pylist(rows)
    wanted = run.predict(table)

    rows = with_statistics(table, run.config.data, run.schema).to_pylist()
    rows = [{name: None if value != value else value for name, value in one.items()} for one in rows]  # NaN is no JSON
    schema = schema_of(run.config.data, run.schema, reads_history=True, reads_age=True)
    Export(run.model, schema, Limits(10, 6), device=DEVICE).write(tmp_path / "artifact")
    scorer = Scorer(tmp_path / "artifact")
    requests = {place: request for place, one in enumerate(rows) if (request := request_of(rows, one)) is not None}
    found = scorer.score([scorer.reader(one) for one in requests.values()])
    assert len(found) > 200 and set(found[0]) == {"clicked", "seconds"}
    for label, column in (("clicked", "score_clicked"), ("seconds", "prediction_seconds")):
        expected = wanted.column(column).to_numpy()[list(requests)]
        assert np.std(expected) > 1e-3
        np.testing.assert_allclose([one[label][0] for one in found], expected, atol=1e-4 * np.abs(expected).max())
