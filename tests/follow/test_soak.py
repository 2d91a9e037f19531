"""An hour of log time is followed and served, while trainer and server are killed again and again."""

import http.client
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import commands
import pyarrow.parquet as pq
import pytest

from jfi.cli.state import schema_of_run
from jfi.follow.start import follow
from jfi.serving import MAX_CANDIDATES
from jfi.serving.export import Export
from jfi.serving.published import numbers
from jfi.serving.schema import Limits
from jfi.serving.scorer import Scorer, StateSettings
from jfi.serving.server.events import write_answer
from jfi.state.stores import LmdbStore
from jfi.training import train
from jfi.training.checkpoints.checkpoint import latest_checkpoint
from jfi.training.run.saved_run import load_run

from .comparing import assert_same, bodies
from .followed_log import FEATURES, GROWING, config_of, make_rows, write

#: Rows that train the run, rows that it follows, and parts of a minute that have these.
KNOWN, FOLLOWED, PARTS = 400, 1000, 60
KILLS = 10
#: Seconds of the longest life of a process that is killed, and from one part to the next.
LIFE, PAUSE = 20.0, 2.5


class Program:
    """A command of jfi, which is killed at random points and started again.

    Args:
        folder: of the file with what it says.
        name: of this file.
        command: of `jfi`.
    """

    def __init__(self, folder: Path, name: str, *command: object) -> None:
        self._log, self._draw = folder / f"{name}.log", random.Random(name)
        self._command = [sys.executable, "-m", "jfi", *map(str, command)]
        #: Times of the kills.
        self.killed: list[float] = []
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        self._until = time.monotonic() + self._draw.uniform(0, LIFE)
        #: Resident kilobytes of this life.
        self.resident: list[int] = []

    def tick(self, kills: int = 0) -> None:
        """Kills the process if it is time to, and it was killed less often than `kills` times."""
        assert self.process.poll() is None, self._log.read_text()
        if len(self.killed) < kills and time.monotonic() > self._until:
            self.killed.append(time.monotonic())
            self.process.kill()
            self.process.wait()
            self._start()
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        self.resident += [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()

    def quarters(self) -> tuple[float, float]:
        """Returns the median of resident MB in the first and the last quarter of this life, without its start."""
        counted = self.resident[len(self.resident) // 3 :]
        quarter = max(1, len(counted) // 4)
        return tuple(statistics.median(part) / 1e3 for part in (counted[:quarter], counted[-quarter:]))


class Asker(threading.Thread):
    """A client that asks all the time.

    Args:
        address: of the server.
        asked: bodies of requests, asked in turn.
    """

    def __init__(self, address: str, asked: list[dict]) -> None:
        super().__init__(daemon=True)
        self._address, self._asked = address, asked
        #: Of each request the times before and after it, and the version that has answered; None without an answer.
        self.answers: list[tuple[float, float, int | None]] = []
        self.wrong: list[str] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            start = time.monotonic()
            try:
                version = ask(f"{self._address}/score", self._asked[len(self.answers) % len(self._asked)])["version"]
            except (OSError, http.client.HTTPException) as error:  # a status other than 200 is an OSError, too
                if isinstance(error, urllib.request.HTTPError):
                    self.wrong.append(f"{error} {error.read()!r}")
                version = None
                time.sleep(0.02)
            self.answers.append((start, time.monotonic(), version))


def ask(url: str, body: object = None) -> dict:
    content = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, content), timeout=60) as answer:
        return json.load(answer)


def surely(url: str, body: object, tick) -> dict:
    """Asks until there is an answer, which a server that is down does not give."""
    while True:
        try:
            return ask(url, body)
        except urllib.request.HTTPError:
            raise
        except (OSError, http.client.HTTPException):
            tick()
            time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def make_log() -> tuple[list[dict], list[list[dict]]]:
    """Returns the rows that train a run, and an hour of rows that follow, by minute."""
    rows = make_rows(KNOWN + FOLLOWED, items=150)
    end = rows[KNOWN]["timestamp"]
    scale = 3599 / (rows[-1]["timestamp"] - end)
    parts: list[list[dict]] = [[] for _ in range(PARTS)]
    for row in rows[KNOWN:]:
        row["timestamp"] = end + (row["timestamp"] - end) * scale
        parts[int(row["timestamp"] - end) // 60].append(row)
    parts[40].append(parts[20].pop(0))  # a late row
    return rows[:KNOWN], parts


@pytest.fixture
def run(tmp_path) -> Path:
    """A run that has ended, and publishes as it follows."""
    rows, _ = make_log()
    write(tmp_path / "log.parquet", rows)
    features = [*GROWING[2:], *(one for one in FEATURES if one.name not in ("tags", "brand", "brand_device"))]
    config = config_of(tmp_path / "log.parquet", tmp_path / "run", features=features, max_history=4)
    config.optimizer.ema_decay = "auto"
    train(config.with_training(batch_size=16, admit_every=3, publish_every=0.3))
    return tmp_path / "run"


class Silent:
    """A hook that publishes nothing."""

    def after_step(self) -> None:
        pass

    def after_part(self, place: dict) -> None:
        pass

    def while_waiting(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_an_hour_with_kills_of_trainer_and_server(run, tmp_path, record_property):
    shutil.copytree(run, tmp_path / "whole")
    (parts := tmp_path / "parts").mkdir()
    commands.run("state", "load", "--run", run, "--state", tmp_path / "users")
    trainer = Program(tmp_path, "trainer", "train", "--resume", run, "--follow", parts, "--checkpoint-seconds", 2)
    programs = [trainer]
    try:
        while not numbers(run / "published"):  # the first one is compiled, and a server needs it
            trainer.tick()
            time.sleep(0.1)
        port = free_port()
        server = Program(
            *(tmp_path, "server", "serve", "--follow", run / "published"),
            *("--state", tmp_path / "users", "--port", port, "--drain-seconds", 0),
        )
        programs.append(server)
        address, rows = f"http://127.0.0.1:{port}", [row for part in make_log()[1] for row in part]

        def tick(kills: int = KILLS) -> None:
            for one in programs:
                one.tick(kills)

        fields = ["user_id", "item_id", "timestamp", "rating", "price", "device", "position", "age"]
        known = {
            "user": ["user_id", "age"],
            "history": ["item_id", "rating", "price", "device", "age"],
            "candidates": ["item_id", "device", "position"],
        }
        asked = [{name: body[name] for name in ("user", "history", "candidates")} for body in bodies(known)]
        stored = [{**body, "time": rows[-1]["timestamp"] + 1} for body in asked]
        for body in stored:
            del body["history"]
        asker = Asker(address, asked)
        surely(f"{address}/score", asked[0], lambda: tick(0))
        asker.start()
        last = ""
        for number, part in enumerate(make_log()[1]):
            write(parts / (last := f"minute-{number:02d}.parquet"), part)
            events = [{name: row[name] for name in fields} for row in part]
            surely(f"{address}/events", events, tick)
            until = time.monotonic() + PAUSE
            while time.monotonic() < until:
                tick()
                time.sleep(0.1)
        while min(len(one.killed) for one in programs) < KILLS:
            tick()
            time.sleep(0.1)
        while (surely(f"{address}/health", None, tick)["log_position"] or {}).get("part") != last:
            tick()
            time.sleep(0.1)
        asker.is_over.set()
        asker.join()
        found = [ask(f"{address}/score", body) for body in (*asked, *stored)]
    finally:
        for one in programs:
            one.end()
    check_answers(asker, server.killed)
    check_scores(run, tmp_path, [*asked, *stored], found)
    assert follow(tmp_path / "whole", parts, until_idle=True, hook=lambda _: Silent()) == PARTS
    assert_same(run, tmp_path / "whole")
    progress = json.loads((latest_checkpoint(run / "checkpoints") / "progress.json").read_text())
    assert progress["follow"]["rows"] == len(rows)
    commands.run("state", "export", "--state", tmp_path / "users", "--out", tmp_path / "events.parquet")
    assert pq.read_metadata(tmp_path / "events.parquet").num_rows == KNOWN + len(rows)
    for name, one in (("trainer", trainer), ("server", server)):
        first, last = one.quarters()
        record_property(name, f"{len(one.killed)} kills, {first:.0f} MB, {last:.0f} MB")
        assert last < 1.1 * first, name
    record_property("answers", f"{len(asker.answers)}, {sum(one[2] is None for one in asker.answers)} while down")


def check_answers(asker: Asker, killed: list[float]) -> None:
    """No request fails but of a server that was killed, and versions do not go back."""
    assert not asker.wrong
    for before, after in zip(asker.answers[:-1], asker.answers[1:], strict=True):
        if before[2] is not None and after[2] is None:
            assert any(before[0] <= kill <= after[1] for kill in killed)
    versions = [version for *_, version in asker.answers if version is not None]
    assert versions == sorted(versions) and len(set(versions)) > PARTS / 2


def check_scores(run: Path, folder: Path, asked: list[dict], found: list[dict]) -> None:
    """The server's answers are those of an export of the run, to the bit."""
    saved = load_run(run)
    limits = Limits(MAX_CANDIDATES, saved.schema.max_history)
    Export(saved.model, schema_of_run(saved), limits).write(folder / "artifact")
    with closing(LmdbStore(folder / "users")) as store:
        scorer = Scorer(folder / "artifact", state=StateSettings(store))
        wanted = [scorer.score([scorer.reader(body)])[0] for body in asked]
    assert [one["scores"] for one in found] == json.loads(write_answer({"scores": wanted}))["scores"]
    assert len({one["version"] for one in found}) == 1
