"""A raw log of views, carts and purchases, from training to scores."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from commands import run

from jfi import load_run
from jfi.cli.state import make_state
from jfi.state.stores import StateError
from jfi.training import ConfigError

START = 1_700_000_000


def stream(seed: int = 0) -> pa.Table:
    """Views in sessions of five, of which some lead to a cart and a purchase within minutes."""
    rng = np.random.default_rng(seed)
    liked, rows = rng.uniform(0.05, 0.6, 30), []
    for user in range(300):
        for day in rng.integers(0, 20, 3):
            seconds = START + 86_400 * int(day) + int(rng.integers(0, 40_000))
            for item in rng.choice(30, 5, replace=False):
                rows.append((f"u{user}", int(item), seconds, "view"))
                if rng.random() < liked[item]:
                    rows += [
                        (f"u{user}", int(item), seconds + 60, "cart"),
                        (f"u{user}", int(item), seconds + 150, "buy"),
                    ]
                seconds += 300
    rows.sort(key=lambda row: row[2])
    return pa.table(dict(zip(("user_id", "item_id", "timestamp", "event"), zip(*rows, strict=True), strict=True)))


def test_views_are_samples_and_later_purchases_their_label(tmp_path, capsys):
    table, path, folder = stream(), tmp_path / "log.parquet", tmp_path / "run"
    pq.write_table(table, path)
    run(
        *("train", "--data.interactions", path, "--data.samples", "event == view", "--training.epochs", 2),
        *("--data.label", "{event: event == buy, within: 1 h, of: item}", "--training.run_dir", folder),
        *("--data.features", "[{name: event, of: event}]", "--training.device", "cpu"),
        *("--training.batch_size", 128),
    )
    views = np.array([one == "view" for one in table["event"].to_pylist()])
    rate = pc.sum(pc.equal(table["event"], "buy")).as_py() / views.sum()

    # Scores of all rows, with the log up to each of them; those of views have the rate of a sale.
    run(
        "predict",
        "--run",
        folder,
        "--interactions",
        path,
        "--history",
        path,
        "--out",
        tmp_path / "scores.parquet",
        "--output",
        "calibrated",
    )
    scores = pq.read_table(tmp_path / "scores.parquet")["probability"].to_numpy()
    newest = views & (np.arange(len(table)) >= 0.9 * len(table))
    assert scores[views].mean() == pytest.approx(rate, rel=0.1)
    test = table.filter(pa.array(np.arange(len(table)) >= 0.9 * len(table)))
    pq.write_table(test, tmp_path / "test.parquet")
    run(
        *("evaluate", "--run", folder, "--interactions", tmp_path / "test.parquet", "--history", path),
        *("--out", tmp_path / "metrics.json"),
    )
    time = table["timestamp"].to_numpy()
    is_over = np.count_nonzero(newest & (time + 3600 <= time.max()))
    assert json.loads((tmp_path / "metrics.json").read_text())["labeled"] == is_over > 0

    with pytest.raises(StateError, match=r"labels with a window \(within\) are of tables; a state has no"):
        run("state", "load", "--run", folder, "--state", tmp_path / "state")
    make_state(str(tmp_path / "state"), load_run(folder), folder)  # as on export
    said = capsys.readouterr().out.splitlines()[-1]
    assert "a state has no statistics of them; score tables by `jfi predict`, or train with" in said
    assert "jfi state load" not in said and not (tmp_path / "state").exists()
    (parts := tmp_path / "parts").mkdir()
    with pytest.raises(ConfigError, match=r"labels with a window \(within\) are of tables; --follow makes"):
        run("train", "--resume", folder, "--follow", parts)


def test_a_label_that_is_the_kind_of_a_row_is_warned_of(tmp_path):
    from jfi.data import DataConfig, load_dataset

    rows = stream(1).filter(pc.not_equal(pc.field("event"), "cart"))
    trap = load_dataset(DataConfig(interactions=rows, label="event == buy"))
    (said,) = (one for one in trap.summary.warnings if "come within 10 minutes" in one)
    assert "make the views the samples, such as data.samples: event == view" in said
