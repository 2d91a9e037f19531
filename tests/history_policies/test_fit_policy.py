"""The command: what it writes, that it reads nothing after the training rows, and what it refuses, by name."""

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
from jfi.history_policies import Policy, fit

ROOT = Path(__file__).parents[2]
COLUMNS = {"user": "user", "item": "item", "surface": "tab", "dwell": "ms", "dwell_unit": "ms"}
DATA = {"interactions": "log.parquet", **COLUMNS}
OPTIONS = [*(f"--data.{name}={value}" for name, value in DATA.items()), "--conversion", "buys"]


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    events, conversion, _ = planted(60)
    dwell = pa.array(events.dwell * 1000, mask=np.arange(len(events)) % 10 == 0)
    tab = pa.array([SURFACES[one] for one in events.surface]).dictionary_encode()
    user = [f"user {one}" for one in events.user]
    table = {"user": user, "timestamp": events.time, "tab": tab, "ms": dwell, "buys": conversion.astype(int)}
    table["item"] = np.arange(len(events)) % 9
    pq.write_table(pa.table(table), "log.parquet")

    def call(*arguments: object) -> tuple[int, str, str]:
        return commands.call("policy", *arguments), *capsys.readouterr()

    return call


def test_it_fits_prints_and_draws(command):
    options = "--remove passive=0.5 --boost active --caps 40 --newest 3 --segments 2 --out policy.json"
    code, out, err = command(*OPTIONS, *shlex.split(options))
    assert code == 0, err
    log, conversion = training_log(DataConfig(**DATA), "buys")
    expected = fit(log, conversion, remove={"passive": 0.5}, boost=["active"], caps=40, newest=3)
    assert Policy.load("policy.json") == expected
    assert Path("policy.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in Path().iterdir()) == ["log.parquet", "policy.json", "policy.png"]
    assert "passive" in out and "active" in out and "feed: seconds from" in out and ", boosted" in out
    assert f"of {len(log):,} events have no dwell" in out


def test_nothing_after_the_training_rows_counts(command):
    assert command(*OPTIONS, "--out", "before.json")[0] == 0
    table = pq.read_table("log.parquet")
    later = table["timestamp"].to_numpy() > np.quantile(table["timestamp"].to_numpy(), 0.85)
    for name, other in (("buys", 1), ("ms", 1e6)):
        changed = pa.array(np.where(later, other, table[name].to_pandas().to_numpy()), from_pandas=True)
        table = table.set_column(table.column_names.index(name), name, changed)
    pq.write_table(table, "log.parquet")
    assert command(*OPTIONS, "--out", "after.json")[0] == 0
    assert Policy.load("before.json") == Policy.load("after.json")


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
        ("--out policy.json --data.dwell seconds", "no column 'seconds'"),
        ("--out policy.json --data.surface null --data.dwell tab", "'tab' is"),
        ("--out policy.json --data.dwell null --data.surface null", "neither data.dwell nor data.surface is set"),
        ("--out policy.json --conversion ms", "label 'ms' is"),
        ("--out policy.json --conversion bought", "no column 'bought'"),
        ("--out policy.json --conversion 'buys == 7'", "--conversion 'buys == 7': no event is one"),
        ("--out policy.json --conversion 'buys < 7'", "--conversion 'buys < 7': every event is one"),
        ("--out policy.json --data.user ms", "data.user and data.dwell are both 'ms'"),
        ("--out policy.json --data.interactions gone.csv", "gone.csv"),
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


def test_a_config_names_the_columns_and_its_label_is_the_conversion(command):
    data = DATA | {"label": "buys"}
    Path("run.yaml").write_text(yaml.safe_dump({"data": data}))
    code, _, err = command("--config", "run.yaml", "--remove", "0.3", "--out", "policy.json")
    assert code == 0, err
    log, conversion = training_log(DataConfig(**data))
    assert Policy.load("policy.json") == fit(log, conversion, remove=0.3)
    assert command("--config", "run.yaml", "--conversion", "buys == 0", "--out", "none.json")[0] == 0
    assert Policy.load("none.json") == fit(log, ~conversion)
    assert len(log) == pytest.approx(0.8 * pq.read_metadata("log.parquet").num_rows, rel=0.01)
