"""One process at a time writes a run."""

import os
import shutil
import signal
import socket
import threading
import time
from datetime import datetime
from types import SimpleNamespace

import pytest
from test_run import tiny

from jfi.training import ConfigError, resume, train
from jfi.training.distributed.processes import World
from jfi.training.run.run_folder import check_new, new_run_dir, writing_run
from jfi.training.run.saved_run import load_run

LOG_EVERY = 4


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path):
    with writing_run(tmp_path / "run", World()):
        for attempt in (lambda: enter(tmp_path / "run"), lambda: train(tiny(tmp_path / "run", epochs=1))):
            with pytest.raises(ConfigError) as caught:
                attempt()
            holder = f"process {os.getpid()} on {socket.gethostname()}"
            assert str(caught.value) == f"{tmp_path / 'run'}: {holder} is writing this run"
    enter(tmp_path / "run")


def test_runs_that_begin_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jfi.training.run.run_folder.datetime", SimpleNamespace(now=lambda: datetime(2025, 1, 1)))
    paths = [str(new_run_dir()) for _ in range(3)]
    assert paths == [f"runs/20250101-000000{end}" for end in ("", "-2", "-3")]
    check_new(tmp_path / paths[0])


def test_anybody_may_read_the_lock_and_nobody_runs_it(tmp_path):
    before = os.umask(0)
    try:
        enter(tmp_path)
    finally:
        os.umask(before)
    (lock,) = tmp_path.iterdir()
    assert lock.stat().st_mode & 0o777 == 0o644


def enter(path) -> None:
    with writing_run(path, World()):
        pass


def hold_in_a_fork(path) -> int:
    """The id of a process that holds the lock."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with writing_run(path, World()):
            os.write(write, b"held")
            time.sleep(60)
        os._exit(0)
    os.read(read, 4)
    return child


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    child = hold_in_a_fork(tmp_path)
    with pytest.raises(ConfigError, match=f"process {child} on"):
        enter(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    enter(tmp_path)


def test_a_restarted_process_waits_for_the_one_before_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    child = hold_in_a_fork(tmp_path)
    threading.Timer(0.2, lambda: (os.kill(child, signal.SIGKILL), os.waitpid(child, 0))).start()
    enter(tmp_path)


def test_other_processes_of_a_run_hold_no_lock_and_wait_for_none(tmp_path, monkeypatch):
    monkeypatch.setattr(World, "on_first", lambda world, act: act() if world.is_first else None)
    with writing_run(tmp_path, World()), writing_run(tmp_path, World(rank=1, size=2, launched=True)):
        pass


def test_a_locked_run_can_be_exported_and_not_resumed(tmp_path, monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
    train(tiny(tmp_path / "run", epochs=1))
    with writing_run(tmp_path / "run", World()):
        load_run(tmp_path / "run")
        with pytest.raises(ConfigError, match="is writing this run"):
            resume(tmp_path / "run")


def test_a_run_that_died_before_it_wrote_its_config_can_be_started_again(tmp_path, monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
    enter(tmp_path / "run")
    (tmp_path / "run" / ".config.yaml.unfinished-a").mkdir()
    train(tiny(tmp_path / "run", epochs=1))
    shutil.rmtree(tmp_path / "run")
