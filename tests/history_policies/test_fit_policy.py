"""The command: what it writes, that it reads nothing after --until, and what it refuses, by name."""

import shlex
from pathlib import Path

import commands
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from history_policies.logs import SURFACES, planted

from benchmarks.online_shoppers import fit_sessions, read_sessions, share_of_entropy
from jfi.data import DataConfig
from jfi.data.prepared.event_logs import training_log
from jfi.history_policies import EventLog, Policy, fit

ROOT = Path(__file__).parents[2]
OPTIONS = shlex.split("--interactions log.parquet --surface tab --dwell ms --dwell-unit ms --conversion buys")


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    events, conversion, _ = planted(60)
    dwell = pa.array(events.dwell * 1000, mask=np.arange(len(events)) % 10 == 0)
    tab = pa.array([SURFACES[one] for one in events.surface]).dictionary_encode()
    user = [f"user {one}" for one in events.user]
    table = {"user": user, "timestamp": events.time, "tab": tab, "ms": dwell, "buys": conversion.astype(int)}
    pq.write_table(pa.table(table), "log.parquet")

    def call(*arguments: object) -> tuple[int, str, str]:
        return commands.call("policy", *arguments), *capsys.readouterr()

    return call


def test_it_fits_prints_and_draws(command):
    options = "--remove passive=0.5 --boost active --caps 40 --newest 3 --segments 2 --out policy.json"
    code, out, err = command(*OPTIONS, *shlex.split(options))
    assert code == 0, err
    events, conversion, _ = planted(60)
    dwell = np.where(np.arange(len(events)) % 10 == 0, np.nan, events.dwell * 1000 * 1e-3)
    place = {name: i for i, name in enumerate(sorted(SURFACES))}
    surface = np.array([place[SURFACES[one]] for one in events.surface])
    # Users by the order of their names, which k-means does not depend on in so clear a case.
    user = np.unique([f"user {one}" for one in events.user], return_inverse=True)[1]
    log = EventLog(user, events.time, surface, dwell, sorted(SURFACES))
    expected = fit(log, conversion, remove={"passive": 0.5}, boost=["active"], caps=40, newest=3)
    assert Policy.load("policy.json") == expected
    assert Path("policy.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in Path().iterdir()) == ["log.parquet", "policy.json", "policy.png"]
    assert "passive" in out and "active" in out and "feed: seconds from" in out and ", boosted" in out
    assert f"{len(events) // 10:,} of {len(events):,} events have no dwell" in out


def test_nothing_after_the_training_span_counts(command):
    middle = 3 * 86400
    assert command(*OPTIONS, "--until", middle, "--out", "whole.json")[0] == 0
    table = pq.read_table("log.parquet")
    before = pa.array(table["timestamp"].to_numpy() < middle)
    pq.write_table(table.filter(before), "log.parquet")
    assert command(*OPTIONS, "--out", "half.json")[0] == 0
    assert Policy.load("half.json") == Policy.load("whole.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--out policy.txt", "--out policy.txt: the name must end in .json"),
        ("--out gone/policy.json", "there is no folder gone"),
        ("--out policy.json --remove 1.5", "remove must be in [0, 1), got 1.5"),
        ("--out policy.json --remove much", "--remove: got 'much', must be a number for all segments"),
        ("--out policy.json --remove lively=0.5", "remove names segment 'lively'"),
        ("--out policy.json --caps 3", "caps must be whole numbers of at least newest = 10"),
        ("--out policy.json --segments 9", "num_segments must be 1 to 8"),
        ("--out policy.json --until -5", "--until -5: no event of log.parquet is older"),
        ("--out policy.json --dwell seconds", "no column 'seconds'"),
        ("--out policy.json --dwell tab", "'tab' is"),
        ("--out policy.json --conversion ms", "label 'ms' is"),
        ("--out policy.json --conversion 'buys == 7'", "no event has one"),
        ("--out policy.json --user ms", "empty 'ms'"),
        ("--out policy.json --interactions gone.csv", "gone.csv"),
    ],
)
def test_faults_are_one_line_and_leave_nothing(command, options, message):
    code, _, err = command(*OPTIONS, *shlex.split(options))
    assert code == 2 and message in err and err.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["log.parquet"]


def test_the_information_of_dwell_is_that_of_the_columns(tmp_path):
    """On a table in the layout of Online Shoppers: by the sessions that have a page of a kind."""
    rng = np.random.default_rng(0)
    pages = rng.integers(0, 3, (3, 4000))
    pages[0] += 1
    seconds = np.where(pages > 0, rng.lognormal(4, 1, pages.shape), 0)
    purchase = rng.random(4000) < 1 / (1 + np.exp(3 - 0.5 * np.log1p(seconds[0])))
    columns = {}
    for kind, of_pages, of_seconds in zip(
        ("ProductRelated", "Administrative", "Informational"), pages, seconds, strict=True
    ):
        columns |= {kind: of_pages, f"{kind}_Duration": of_seconds}
    path = tmp_path / "shoppers.csv"
    names = [*columns, "Revenue"]
    lines = zip(*columns.values(), np.where(purchase, "TRUE", "FALSE"), strict=True)
    path.write_text("\n".join([",".join(names), *(",".join(map(str, line)) for line in lines)]))
    read = read_sessions(str(path))
    policy = fit_sessions(*read)
    for report, dwell in zip(policy.surface_reports, seconds, strict=True):
        visited = dwell > 0
        bias = 9 / (2 * visited.sum()) / report.entropy  # the definition's, of 10 bins
        wanted = share_of_entropy(dwell[visited], purchase[visited]) - bias
        assert report.information / report.entropy == pytest.approx(wanted, abs=0.002)
    first, second, third = (one.information for one in policy.surface_reports)
    assert first > 10 * max(abs(second), abs(third))


def test_a_config_names_the_columns_and_its_training_rows_are_fitted(command, tmp_path):
    table = pq.read_table("log.parquet")
    pq.write_table(table.append_column("item", pa.array(np.arange(len(table)) % 9)), "log.parquet")
    columns = {"item": "item", "label": "buys", "dwell": "ms", "dwell_unit": "ms", "surface": "tab"}
    data = {"interactions": "log.parquet", "user": "user", **columns}
    Path("run.yaml").write_text(yaml.safe_dump({"data": data}))
    code, _, err = command("--config", "run.yaml", "--remove", "0.3", "--out", "policy.json")
    assert code == 0, err
    log, conversion = training_log(DataConfig(**data))
    assert Policy.load("policy.json") == fit(log, conversion, remove=0.3)
    assert command("--config", "run.yaml", "--conversion", "buys == 0", "--out", "none.json")[0] == 0
    assert Policy.load("none.json") == fit(log, ~conversion)
    assert len(log) == pytest.approx(0.8 * pq.read_metadata("log.parquet").num_rows, rel=0.01)
    for options, message in (
        (["--config", "run.yaml", "--dwell", "ms"], "--dwell is not for --config"),
        (["--interactions", "log.parquet", "--dwell", "ms"], "--conversion is missing"),
        (["--config", "run.yaml", "--conversion", "bought"], "no column 'bought'"),
    ):
        code, _, err = command(*options, "--out", "other.json")
        assert (code, message in err) == (2, True), err
    assert not Path("other.json").exists()
