"""The start of a run that follows a log: what it checks, a state that is made anew, and what its end leaves."""

import errno
import os
import shutil
import signal
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from jfi.data import DataError
from jfi.data.prepared.manifest import prepared_config
from jfi.data.prepared.prepare import prepare_dataset
from jfi.follow.parts import PartFolder
from jfi.follow.start import follow
from jfi.follow.state import LogState
from jfi.serving.publish import PublishHook
from jfi.state.stores import LmdbStore, StoreUnavailableError
from jfi.training import ConfigError, train
from jfi.training.distributed.processes import Interrupted
from jfi.utils.errors import InputError

from .followed_log import KNOWN, config_of, content, lines, write, write_parts

pytestmark = pytest.mark.usefixtures("no_pictures")


class Hook:
    """Notes what is called; `stop_at` is the number of parts after which it sends SIGTERM."""

    def __init__(self, stop_at: int = 0) -> None:
        self.calls: list[str] = []
        self._stop_at = stop_at

    def after_step(self) -> None:
        pass

    def after_part(self, place: dict) -> None:
        self.calls.append(place["part"])
        if len(self.calls) == self._stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        self.calls.append("close")


def own_run(folder: Path, rows: list[dict], is_prepared: bool = False) -> Path:
    """A run of its own on rows in `folder`/log/day.parquet."""
    write(folder / "log" / "day.parquet", rows)
    config = config_of(folder / "log" / "day.parquet", folder / "run")
    if is_prepared:
        prepare_dataset(config.data, folder / "prepared", show=False)
        config = replace(config, data=prepared_config(folder / "prepared"))
    train(config)
    return folder / "run"


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_seconds_are_checked(run, tmp_path, seconds):
    for name in ("late", "checkpoint"):
        with pytest.raises(ConfigError, match=rf"--{name}-seconds: got {seconds}, must be a number of at least 0"):
            follow(run, tmp_path, until_idle=True, **{f"{name}_seconds": seconds})


@pytest.mark.parametrize("is_prepared", [False, True])
def test_interactions_that_have_grown_are_refused(rows, tmp_path, is_prepared):
    """Else their new rows, which the run has not learnt, would count as repeated in the parts."""
    run = own_run(tmp_path, rows[:KNOWN], is_prepared)
    before = sorted(run.rglob("*"))
    write_parts(tmp_path / "parts", rows[KNOWN:], 2)
    write(tmp_path / "log" / "day.parquet", rows[: KNOWN + 50])
    with pytest.raises(ConfigError, match=r"day\.parquet has changed: it has 350 rows, 50 more .* part of the log"):
        follow(run, tmp_path / "parts", until_idle=True)
    assert sorted(run.rglob("*")) == before
    write(tmp_path / "log" / "day.parquet", rows[:KNOWN])
    assert follow(run, tmp_path / "parts", until_idle=True) == 2
    (tmp_path / "log" / "day.parquet").unlink()  # the state has it
    assert follow(run, tmp_path / "parts", until_idle=True) == 0


@pytest.mark.parametrize("source", ["log/day.parquet", "log", "log/*.parquet", ".", "*"])
def test_parts_among_the_interactions_are_refused(rows, tmp_path, source):
    write(tmp_path / "all" / "log" / "day.parquet", rows[:KNOWN])
    train(config_of(tmp_path / "all" / source, tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"--follow .*/log: has files of data\.interactions, .*; name a folder"):
        follow(tmp_path / "run", tmp_path / "all" / "log", until_idle=True)
    assert not (tmp_path / "run" / "follow").exists()
    if source.startswith("log"):
        (tmp_path / "all" / "parts").mkdir()
        assert follow(tmp_path / "run", tmp_path / "all" / "parts", until_idle=True) == 0


def test_interactions_of_the_future_are_refused(rows, tmp_path):
    run = own_run(tmp_path, [*rows[: KNOWN - 1], rows[KNOWN] | {"timestamp": time.time() + 1e6}])
    (tmp_path / "parts").mkdir()
    with pytest.raises(DataError, match=r"day\.parquet:300: 'timestamp' is 20.*, more than 600 s in the future"):
        follow(run, tmp_path / "parts", until_idle=True)
    assert not (run / "follow" / "state").exists()


@pytest.fixture
def late(rows, run, tmp_path) -> tuple[Path, Path]:
    """A run that has read parts, each with a row that is 2,000 s late, with two settings of late rows."""
    parts = tmp_path / "parts"
    for number, (seconds, own) in enumerate([(1e4, rows[KNOWN : KNOWN + 60]), (1e3, rows[KNOWN + 60 : KNOWN + 120])]):
        known = rows[: KNOWN + 60 * number]
        newest = max(row["timestamp"] for row in known if row["user_id"] == own[0]["user_id"])
        write(parts / f"{number}.parquet", [*own, own[0] | {"timestamp": newest - 2000.0, "item_id": 700 + number}])
        assert follow(run, parts, until_idle=True, late_seconds=seconds) == 1
    assert [(line["late_seconds"], line["late"], line["too_old"]) for line in lines(run)] == [(1e4, 1, 0), (1e3, 0, 1)]
    return run, parts


def test_a_state_that_is_made_anew_reads_each_part_as_before(late):
    run, parts = late
    before = content(run)
    shutil.rmtree(run / "follow" / "state")
    assert follow(run, parts, until_idle=True, late_seconds=0.0) == 0
    assert content(run) == before


def test_catching_up_hears_a_signal_after_each_part(late, monkeypatch):
    run, parts = late
    before = content(run)
    shutil.rmtree(run / "follow" / "state")
    end_part, ended = LogState.end_part, []

    def stop(self: LogState, name: str, newest: float) -> None:
        ended.append(name)
        end_part(self, name, newest)
        if len(ended) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LogState, "end_part", stop)
    with pytest.raises(Interrupted):
        follow(run, parts, until_idle=True)
    assert ended == ["0.parquet"]
    assert follow(run, parts, until_idle=True) == 0
    assert ended == ["0.parquet", "1.parquet"] and content(run) == before


def test_a_full_disk_of_the_state_is_named(rows, run, tmp_path, monkeypatch):
    """Exit code 3; the checkpoint has the part, and the state gets it at the next start."""
    (tmp_path / "parts").mkdir()
    assert follow(run, tmp_path / "parts", until_idle=True) == 0  # makes the state
    write_parts(tmp_path / "parts", rows[KNOWN : KNOWN + 40], 1)

    def fail(self: LmdbStore, change: object) -> None:
        raise StoreUnavailableError("LMDB: mdb_txn_commit: No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"run/follow/state: LMDB: .*No space left"):
        patch.setattr(LmdbStore, "update", fail)
        follow(run, tmp_path / "parts", until_idle=True)
    assert follow(run, tmp_path / "parts", until_idle=True) == 0
    with closing(LmdbStore(run / "follow" / "state")) as store:
        assert b"part-0000.parquet" in store.get([b"f"])[0]


def test_training_goes_on_where_no_version_can_be_written(rows, run, tmp_path, caplog):
    write_parts(tmp_path / "parts", rows[KNOWN : KNOWN + 60], 3)
    now, attempts = [0.0], []

    class Full:
        def publish(self, log_position: object = None) -> None:
            attempts.append(now[0])
            raise OSError(errno.ENOSPC, "No space left on device", "published/7")

    hook = PublishHook(Full(), 10.0, clock=lambda: now[0])
    assert hook.begin() is None
    after_part = hook.after_part

    def later(place: object) -> None:
        now[0] += 15.0
        after_part(place)

    hook.after_part = later
    with pytest.raises(OSError, match="No space left"):
        follow(run, tmp_path / "parts", until_idle=True, hook=lambda _: hook)
    assert [line.get("publish_failures") for line in lines(run)] == [1, 1, 2]
    assert attempts == [0.0, 30.0, 45.0]
    assert "no version could be written, 2 times in a row; training goes on, next attempt in 40 s" in caplog.text
    assert follow(run, tmp_path / "parts", until_idle=True) == 0


class Versions:
    """Notes the parts of the log that versions are of."""

    def __init__(self) -> None:
        self.parts: list[str | None] = []

    def publish(self, log_position: dict | None = None) -> int:
        self.parts.append(log_position and log_position["part"])
        return len(self.parts)


def test_versions_are_held_back_while_the_rule_does_not_hold(rows, run, tmp_path, caplog):
    """Two parts have too few rows; each has one step."""
    write_parts(tmp_path / "parts", rows[KNOWN : KNOWN + 90], 5)
    versions = Versions()

    def hook(trainer: object) -> PublishHook:
        scores = partial(trainer.windows.metrics, "all")
        made = PublishHook(versions, 0.0, clock=lambda: 0.0, publish_if="ne < 9 and rows >= 45", scores=scores)
        assert made.begin() == 1  # no row was scored yet
        return made

    assert follow(run, tmp_path / "parts", until_idle=True, hook=hook) == 5
    assert [line.get("publish_held_back") for line in lines(run)] == [1, 3, None, None, None]
    assert versions.parts[1:] == [f"part-{number:04d}.parquet" for number in (1, 2, 2, 3, 3, 4)]
    assert caplog.text.count("held back a version, training goes on: training.publish_if does not hold, ne ") == 2
    assert not any("publish_failures" in line for line in lines(run))


def test_a_score_without_a_value_holds_versions_back_and_an_unknown_one_is_refused():
    versions, found = Versions(), {"window": "hour", "time": 0.0, "rows": 7, "ne": None, "auc": None}
    hook = PublishHook(versions, 0.0, publish_if="auc >= .7", scores=lambda: found)
    assert hook.begin() is None and hook.held_back == 1
    hook.close()
    assert hook.held_back == 2 and not versions.parts
    found["auc"] = 0.7
    hook.close()
    assert hook.held_back == 0 and versions.parts == [None]
    for name in ("auc_like", "window"):
        with pytest.raises(InputError, match=f"publish_if: '{name} > 1' reads '{name}', must be of time, rows,"):
            PublishHook(versions, 0.0, publish_if=f"{name} > 1", scores=lambda: found)


def test_versions_are_of_the_last_part_where_a_part_is_refused(rows, run, tmp_path):
    parts = tmp_path / "parts"
    write_parts(parts, rows[KNOWN:], 2)
    (parts / "x.parquet").write_bytes(b"half")
    hook = Hook()
    with pytest.raises(DataError, match="a damaged Parquet file"):
        follow(run, parts, until_idle=True, checkpoint_seconds=1e6, hook=lambda _: hook)
    assert hook.calls == ["part-0000.parquet", "part-0001.parquet", "close"]
    assert len(lines(run)) == 2


def test_a_signal_between_parts_leaves_all_of_them_in_a_checkpoint(rows, run, tmp_path):
    write_parts(tmp_path / "parts", rows[KNOWN:], 3)
    hook = Hook(stop_at=2)
    with pytest.raises(Interrupted):
        follow(run, tmp_path / "parts", checkpoint_seconds=1e6, hook=lambda _: hook)
    assert hook.calls == ["part-0000.parquet", "part-0001.parquet", "close"]
    assert follow(run, tmp_path / "parts", until_idle=True) == 1


def test_a_picture_is_drawn_now_and_then(rows, run, tmp_path, monkeypatch):
    drawn, seconds = [], iter(range(0, 10**6, 25))
    monkeypatch.setattr("jfi.follow.plot.draw_windows", lambda log, *_: drawn.append(log.read_bytes().count(b"part-")))
    write_parts(tmp_path / "parts", rows[KNOWN:], 8)
    assert follow(run, tmp_path / "parts", until_idle=True, clock=lambda: float(next(seconds))) == 8
    assert 2 < len(drawn) <= 9 and drawn[0] < 8 and drawn[-1] == 8


def test_names_of_parts_that_are_gone_are_forgotten(tmp_path):
    parts = PartFolder(tmp_path)
    for name in ("a.parquet", "b.parquet"):
        (tmp_path / name).touch()
    parts.check([parts.part("a.parquet")])
    assert parts.next("a.parquet") == "b.parquet" and parts.next("b.parquet") is None
    (tmp_path / "a.parquet").unlink()
    assert parts.next("b.parquet") is None
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match=r"a\.parquet: its name sorts before b\.parquet, which was trained on"):
        parts.next("b.parquet")


@pytest.mark.parametrize("table", ["users", "items"])
def test_a_url_of_a_table_is_named_by_an_option_that_follow_takes(run, tmp_path, table):
    follow(run, tmp_path, until_idle=True)  # its state is there from now on
    url = "s3://bucket/rows.parquet"
    path = run / "config.yaml"
    path.write_text(path.read_text().replace(f"  {table}: null", f"  {table}: {url}", 1))
    with pytest.raises(DataError, match=f"data.{table} of a config file .* add --data.{table} {url}"):
        follow(run, tmp_path, until_idle=True)
