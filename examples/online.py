"""Trains on a log while a server answers from what is trained: trainer, server and client as processes on a CPU.

python examples/online.py --out online --hours 12

The log is that of online_log.py. A run is trained on its first hours; then, hour by hour of log time, a client asks for
the score of each row before anybody knows its label, and sends the events to the server each minute of log time. The
server writes the rows of the hour as a part that the run follows. The client waits until an answer is of a version that
has learned from the part. A second server keeps the model of the beginning, with the same histories. Commands are shown
as they are run; what the processes say is in OUT/*.log.
"""

import argparse
import http.client
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
from online_log import hours
from sklearn.metrics import roc_auc_score

CONFIG = Path(__file__).resolve().parents[1] / "configs/online.yaml"
MINUTE = 60.0
#: Requests that wait for an answer at a time.
THREADS = 8


class Program:
    """A command of jfi; what it says goes to a file.

    Args:
        out: folder in which it runs, and of the file.
        name: of the file.
        arguments: of `jfi`.
    """

    def __init__(self, out: Path, name: str, *arguments: object) -> None:
        command = list(map(str, arguments))
        print(f"$ jfi {shlex.join(command)}", flush=True)
        self.name, self.log = name, out / f"{name}.log"
        with self.log.open("wb") as log:
            # In a session of its own Ctrl-C reaches this process alone, which ends the others.
            options = {"cwd": out, "stdout": log, "stderr": log, "start_new_session": True}
            self.process = subprocess.Popen([sys.executable, "-m", "jfi", *command], **options)

    def check(self) -> None:
        """Raises SystemExit if it has ended."""
        if self.process.poll() is not None:
            self._fail()

    def wait(self) -> None:
        """Waits for its end, and raises SystemExit if it has failed."""
        if self.process.wait():
            self._fail()

    def said(self, text: str) -> str:
        """Waits for a line that begins with `text`, and returns its rest."""
        while True:
            for line in self.log.read_text(errors="replace").splitlines():
                if line.startswith(text):
                    return line.removeprefix(text)
            self.check()
            time.sleep(0.1)

    def _fail(self) -> None:
        last = self.log.read_text(errors="replace").splitlines()[-1:]
        raise SystemExit(f"{self.name} ended with exit code {self.process.returncode}: {' '.join(last)}")


@contextmanager
def running(out: Path, name: str, *arguments: object) -> Iterator[Program]:
    """Runs a command of jfi within the block, and ends it after it."""
    program = Program(out, name, *arguments)
    try:
        yield program
    finally:
        program.process.terminate()
        try:
            program.process.wait(60)
        except subprocess.TimeoutExpired:
            program.process.kill()


class Client:
    """A client of a server, whose threads keep their connections open."""

    def __init__(self, server: Program) -> None:
        self._address = server.said("serving on http://").split(";")[0]
        self._own = threading.local()

    def ask(self, path: str, body: object = None) -> dict:
        """Returns the answer to GET, or to POST with a body."""
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection(self._address, timeout=60)
        content = None if body is None else json.dumps(body)
        self._own.connection.request("GET" if body is None else "POST", path, content)
        answer = self._own.connection.getresponse()
        found = json.load(answer)
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {found}")
        return found


def minutes(table: pa.Table) -> Iterator[list[dict]]:
    """Yields the rows of each minute."""
    for _, rows in itertools.groupby(table.to_pylist(), lambda row: row["time"] // MINUTE):
        yield list(rows)


def request(row: dict) -> dict:
    return {"user": row["user"], "candidates": {"item": [row["item"]]}, "time": row["time"]}


def event(row: dict) -> dict:
    return {name: row[name] for name in ("user", "time", "item", "clicked")}


class Loop:
    """The client of both servers; the first of them writes the log that the trainer follows."""

    def __init__(self, parts: Path, programs: list[Program], served: Client, first: Client) -> None:
        self._parts, self._programs, self._served, self._first = parts, programs, served, first
        self._pool, self._hours = ThreadPoolExecutor(THREADS), 0

    def run_hour(self, number: int, table: pa.Table) -> tuple[float, float]:
        """Asks and tells an hour; returns the AUC of the server that follows and of the one that does not."""
        labels, scores, first, versions = [], [], [], set()
        for rows in minutes(table):
            answers = list(self._pool.map(lambda row: self._served.ask("/score", request(row)), rows))
            first += list(self._pool.map(lambda row: self._first.ask("/score", request(row))["scores"][0], rows))
            scores += [answer["scores"][0] for answer in answers]
            versions |= {answer["version"] for answer in answers}
            labels += [row["clicked"] for row in rows]
            self._served.ask("/events", [event(row) for row in rows])
        name = self._part()
        seconds = self._until_learned(name, rows[-1])
        auc = roc_auc_score(labels, scores), roc_auc_score(labels, first)
        shown = " to ".join(map(str, sorted({min(versions), max(versions)})))
        line = f"hour {number}: AUC {auc[0]:.4f} by version {shown}, {auc[1]:.4f} by the first; "
        print(f"{line}served {seconds:.1f} s after the part was there", flush=True)
        return auc

    def _part(self) -> str:
        """Waits for the part of the hour, and returns its name."""
        self._hours += 1
        while len(names := sorted(path.name for path in self._parts.glob("[!.]*.parquet"))) < self._hours:
            self._wait()
        return names[-1]

    def _until_learned(self, name: str, row: dict) -> float:
        """Waits until an answer is of a version that has learned from a part; returns the seconds."""
        start = time.monotonic()
        while True:
            health = self._served.ask("/health")
            if (health["log_position"] or {}).get("part", "") >= name:
                answer = self._served.ask("/score", request(row))
                if answer["version"] >= health["version"]:
                    return time.monotonic() - start
            self._wait()

    def _wait(self) -> None:
        for program in self._programs:
            program.check()
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on a log while a server answers from what is trained.")
    parser.add_argument("--out", type=Path, default=Path("online"), help="a new folder")
    parser.add_argument("--first-hours", type=int, default=24, help="hours that train the run before it follows")
    parser.add_argument("--hours", type=int, default=12, help="hours that it follows")
    parser.add_argument("--rows", type=int, default=2000, help="rows an hour")
    parser.add_argument("--publish-every", type=float, default=1.0, help="seconds between two versions")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of the first training")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for a model so small more threads only wait for one another
    out, log = options.out.absolute(), enumerate(hours(rows=options.rows))
    for name in ("day", "parts"):
        (out / name).mkdir(parents=True)
    for number, table in itertools.islice(log, options.first_hours):
        pa.parquet.write_table(table, out / f"day/hour-{number:05d}.parquet")
    settings = ["--training.epochs", options.epochs, "--training.publish_every", options.publish_every]
    with running(out, "train", "train", "--config", CONFIG, *settings) as program:
        program.wait()
    run = out / "runs/online"
    with running(out, "state", "state", "load", "--run", "runs/online", "--state", "users") as program:
        program.wait()
    with running(out, "trainer", "train", "--resume", "runs/online", "--follow", "parts") as trainer:
        while not (first := run / "published/0000000001").exists():  # its model is compiled
            trainer.check()
            time.sleep(0.1)
        shared = ["--state", "users", "--port", "0", "--drain-seconds", "0"]
        artifact = first.relative_to(out) / "artifact"
        by_hour = ["--log", "parts", "--log-rows", options.rows, "--log-seconds", 3600]  # a part has an hour's rows
        with (
            running(out, "server", "serve", "--follow", "runs/online/published", *by_hour, *shared) as server,
            running(out, "first", "serve", "--artifact", artifact, *shared) as other,
        ):
            loop = Loop(out / "parts", [trainer, server, other], Client(server), Client(other))
            found = [loop.run_hour(*hour) for hour in itertools.islice(log, options.hours)]
    lines = map(json.loads, (run / "follow/metrics.jsonl").read_text().splitlines())
    ways = [*zip(*found, strict=True), [line["auc"] for line in lines if "part" in line]]
    for way, aucs in zip(("as served", "the model of the beginning", "the trainer's own"), ways, strict=True):
        print(f"{sum(aucs) / len(aucs):.4f} mean AUC, {way}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped by Ctrl-C")
