"""What `jfi state` says where it cannot do what it is asked for."""

import time

import commands
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jfi.data import DataError
from jfi.state.stores import StateError
from jfi.training import train
from jfi.training.config_parser import parse_config

from ..conftest import TINY


def test_a_run_whose_log_has_moved_says_how_to_name_another(tmp_path, capsys):
    rows = {"user": ["u", "v"] * 10, "item": list("abcd") * 5, "time": [*range(20)], "like": [0, 1, 1, 0] * 5}
    log, state = tmp_path / "log.parquet", tmp_path / "users"
    pq.write_table(pa.table(rows), log)
    own = {"interactions": log, "user": "user", "item": "item", "timestamp": "time", "label": "like"}
    names = [word for name, value in own.items() for word in (f"--data.{name}", str(value))]
    run = tmp_path / "run"
    train(parse_config([*TINY, *names, "--encoder.num_layers", "0", "--training.run_dir", str(run)])[0])
    commands.run("state", "load", "--run", run, "--state", state)
    assert "20 events of 2 users" in capsys.readouterr().out
    log.rename(moved := tmp_path / "moved.parquet")
    why = r"--run .*: its log cannot be read: .*log\.parquet.*; name a log by --interactions FILE, or none"
    with pytest.raises(StateError, match=why):
        commands.run("state", "load", "--run", run, "--state", tmp_path / "second")
    commands.run("state", "load", "--run", run, "--interactions", moved, "--state", tmp_path / "second")
    assert "20 events of 2 users" in capsys.readouterr().out
    rows["time"][7] = time.time() + 660
    pq.write_table(pa.table(rows), log)
    with pytest.raises(DataError, match=r"log\.parquet:8: 'time' is 20.*, more than 600 s in the future"):
        commands.run("state", "load", "--run", run, "--interactions", log, "--state", tmp_path / "third")
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    "name",
    [
        "redis://:pw1@h/0?prefix=a:b",
        "redis://:pw1@h/0",
        "redis://me:pw1@h/0",
        "unix:///h?password=pw1",
        "redis://:p:w1@h",
        "redis://:w1/@w1@h",
    ],
)
def test_a_password_is_refused_in_a_url_and_in_no_message(name, tmp_path):
    why = "prefix is 'a:b'" if "a:b" in name else "all users .* see its password; set .* JFI_STATE_PASSWORD to it$"
    with pytest.raises(StateError, match=f"cannot be used: {why}") as fault:
        commands.run("state", "export", "--state", name, "--out", tmp_path / "events.parquet")
    assert "w1" not in str(fault.value) and "***" in str(fault.value)
