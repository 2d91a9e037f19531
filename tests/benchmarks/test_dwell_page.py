"""The table and the picture of docs/dynamic_histories.md, of made-up results."""

import json

import pytest

from benchmarks import dwell_page


def cell(arm: str, seed: int, events: int, ne: float, samples: float, requests: float | None = None) -> dict:
    where = {"commit": "abc", "device": "a CPU", "threads": 4, "torch": "2", "date": "2026-01-02T00:00:00+00:00"}
    given = {"arm": arm, "seed": seed, "overrides": [], "events": events, "test": {"ne": ne}}
    measured = {"samples_per_second": samples} | ({} if requests is None else {"requests_per_second": requests})
    return given | measured | where


CELLS = [
    cell("full", 0, 1000, 0.50, 100.0, 50.0),
    cell("full", 1, 2000, 0.60, 100.0),
    cell("policy-30", 0, 700, 0.51, 120.0, 55.0),
    cell("policy-30", 1, 1500, 0.63, 130.0),
    cell("random-30", 1, 1500, 0.70, 90.0),
    cell("short for all", 0, 500, 0.52, 150.0, 80.0),
    cell("long for the active", 0, 800, 0.494, 110.0, 54.0),
    cell("weights for the active", 0, 1000, 0.495, 99.0),
]


def test_the_table_compares_seed_by_seed():
    lines = dwell_page.table(CELLS).splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in lines if line.startswith("|")}
    assert rows["full"] == "| full | 2 | none | 0.5500 ± 0.0707 |  | 100 ± 0 | 50 |"
    policy = "| policy-30 | 2 | 27.5 ± 3.5 % | 0.5700 ± 0.0849 | +0.0200 ± 0.0141 | +25.0 ± 7.1 % | +10.0 % |"
    assert rows["policy-30"] == policy
    assert rows["random-30"] == "| random-30 | 1 | 25.0 % | 0.7000 | +0.1000 | -10.0 % |  |"
    assert "policy-50" not in rows
    training = "| removal: training throughput | +1.15 % | +25.0 ± 7.1 % with 27.5 ± 3.5 % of the events removed |"
    assert rows["removal: training throughput"] == training
    boosting = (
        "-1.000 % with weights beside the full history; -5.000 % with the long history beside the short one for all"
    )
    assert rows["boosting the active: NE"] == f"| boosting the active: NE | 0.033 better | {boosting} |"
    assert "+8.0 % beside the long history for all" in rows["boosting the active: inference QPS"]


def test_what_is_missing_is_not_measured(tmp_path):
    assert dwell_page.table(CELLS[:1]).count("not measured") == 4
    for cells in ([], [CELLS[2]], [CELLS[0] | {"overrides": ["--training.epochs=1"]}]):
        (tmp_path / "dwell.json").write_text(json.dumps(cells))
        with pytest.raises(FileNotFoundError):
            dwell_page.read(tmp_path / "dwell.json")


def test_the_picture_is_drawn(tmp_path):
    dwell_page.draw(CELLS, tmp_path / "dwell.png")
    assert (tmp_path / "dwell.png").read_bytes().startswith(b"\x89PNG")
