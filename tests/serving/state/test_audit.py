"""`jfi audit`: served requests are what training reads, and each kind of skew is found and named."""

import json
import random
import shutil
from contextlib import closing, contextmanager
from itertools import pairwise
from types import SimpleNamespace

import commands
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("aiohttp")

import jfi
from jfi.cli.audit import audit_of
from jfi.data.io.blocks import count_rows
from jfi.serving import artifact
from jfi.serving.request_log import RequestLog, read_lines
from jfi.serving.scorer import Scorer, StateSettings
from jfi.state.deletions import METADATA, PartInfo, append_deletions, deletion_of
from jfi.state.dictionaries import text_key
from jfi.state.retention import KEEP_ALL, Retention
from jfi.state.stores import open_store
from jfi.utils.exit_codes import DIFFERS

from ..conftest import rewriting

COLUMNS = pa.schema({"user": pa.int64(), "item": pa.int64(), "timestamp": pa.float64(), "rating": pa.int64()})


@pytest.fixture(scope="module")
def made(exported, tmp_path_factory):
    """The run, a state of its interactions, and the time of the newest of them."""
    folder = tmp_path_factory.mktemp("audit")
    commands.run("state", "load", "--run", exported.run, "--state", folder / "state", "--state-gb", 1)
    table = pq.read_table(exported.run.parent / "tables/interactions.parquet")
    return SimpleNamespace(
        run=jfi.load_run(exported.run),
        state=folder / "state",
        path=exported.path,
        newest=max(table["timestamp"].to_pylist()),
    )


class Server:
    """A scorer whose requests are logged, as the server does it."""

    def __init__(self, scorer: Scorer, folder) -> None:
        self.scorer, self._log, self._number = scorer, RequestLog(folder, 1.0, 1 << 30, lambda *_: None), 0
        self.close = self._log.close

    def score(self, body: dict) -> list[float]:
        raw = json.dumps(body).encode()
        request = self.scorer.reader.read(raw)
        (scores,) = self.scorer.score([request])
        self._log.add(f"r{self._number}", raw, scores, request, self.scorer.reader)
        self._number += 1
        return scores

    def add(self, rows: list[dict]) -> None:
        (found,) = self.scorer.state.add([self.scorer.events(rows)])
        assert found.added == len(rows)


@pytest.fixture
def serving(made, tmp_path):
    """Opens a server on a copy of the state; it may be changed first."""

    @contextmanager
    def serve(path=made.path, output="logits", change=lambda store: None, retention=KEEP_ALL):
        if not (tmp_path / "state").exists():
            shutil.copytree(made.state, tmp_path / "state")
        with closing(open_store(str(tmp_path / "state"), max_gb=1)) as store:
            change(store)
            settings = StateSettings(store, max_late=1e9, retention=retention)
            server = Server(Scorer(path, output=output, state=settings), tmp_path / "requests")
            yield server
            server.close()

    return serve


def event(user: int, item: int, now: float) -> dict:
    return {
        "user": user,
        "item": item,
        "category": item % 10 if item < 60 else None,
        "rating": 1 + item % 5,
        "timestamp": now,
    }


def by_id(user: object, now: float, items=(3, 17, 58)) -> dict:
    return {"user": user, "candidates": list(items), "time": now}


def write_part(folder, number: int, rows: list[dict], removed: list[int] | None = None) -> None:
    """Writes a part; with `removed` one of a server, that has lost these rows."""
    folder.mkdir(exist_ok=True)
    schema = COLUMNS
    if removed is not None:
        info = PartInfo("state", [[len(rows) + len(removed)]], removed)
        schema = COLUMNS.with_metadata({METADATA: msgspec.json.encode(info)})
    own = [{name: row[name] for name in COLUMNS.names} for row in rows]
    pq.write_table(pa.Table.from_pylist(own, schema), folder / f"part-{number}.parquet")


def replay(server: Server, folder, newest: float, count: int = 60) -> None:
    """Sends events, writes them to parts, and asks between them, at times that are those of events too."""
    draw, now = random.Random(0), newest
    for number in range(count):
        rows, now = [event(draw.randrange(90), draw.randrange(70), now + 100 * i) for i in range(1, 5)], now + 500
        server.add(rows)
        write_part(folder, number, rows)
        for row in draw.sample(rows, 2):
            items = [draw.randrange(75) for _ in range(draw.randrange(1, 5))]
            server.score(
                by_id(
                    draw.choice([row["user"], str(row["user"]), 1000]),
                    row["timestamp"] + draw.choice([0, 0.5, 700]),
                    items,
                )
            )


def test_a_replayed_log_has_no_difference(made, serving, tmp_path, capsys):
    with serving(output="probabilities") as server:
        replay(server, tmp_path / "log", made.newest)
        given = {"item": [3, "never seen", 7.0], "category": [3, None, 7]}  # as the table of items has it
        server.score(by_id(5, made.newest + 9) | {"candidates": given})
        server.score(by_id(5, made.newest - 10_000))
        server.score({"user": {}, "candidates": [{"item": 3, "category": 3}], "history": []})
    options = ["audit", "--run", made.run.path, "--requests", tmp_path / "requests", "--log", tmp_path / "log"]
    assert commands.call(*options, "--tolerance", 2e-6, "--report", tmp_path / "report.json") == 0
    told = json.loads((tmp_path / "report.json").read_text())
    wanted = {"requests": 123, "left_out": 1, "compared": 122, "other_versions": 0, "unavailable": 0, "unexplained": 0}
    assert told | wanted == told and told["scores"] + told["late"] == 122 and told["largest"] <= 2e-6
    assert "122 rebuilt" in capsys.readouterr().out


def audited(made, tmp_path, log=True, **options):
    """What is found, by feature the cause of most."""
    run = options.pop("run", made.run)
    audit = audit_of(run, [str(tmp_path / "log")] if log else None, **options)
    report = audit(tmp_path / "requests")
    return report, {name: one.causes.most_common(1)[0][0] for name, one in report.features.items()}


def test_an_event_that_came_late_is_named(made, serving, tmp_path):
    now = made.newest
    first, late = [event(1, 3, now + 10), event(2, 4, now + 20)], [event(1, 5, now + 15)]
    with serving() as server:
        server.add(first)
        server.score(by_id(1, now + 100))
        server.score(by_id(2, now + 100))
        server.add(late)
        server.score(by_id(1, now + 101))
    write_part(tmp_path / "log", 0, first)
    write_part(tmp_path / "log", 1, late)
    report, causes = audited(made, tmp_path)
    assert (report.compared, report.differing, report.late, report.unexplained) == (3, 1, 1, 0) and report.is_clean
    assert {*causes.values()} == {"late event"} and "history length" in causes
    example = report.features["history length"].example
    assert (example["request"], example["user"], example["candidate"]) == ("r0", "1", "3")
    assert example["rebuilt"] == int(example["served"]) + 1


def test_positions_count_the_rows_that_a_deletion_has_removed(made, serving, tmp_path):
    now, log = made.newest, tmp_path / "log"
    first = [event(2, 4, now + 1), event(2, 5, now + 2), event(1, 3, now + 10), event(3, 6, now + 12)]
    late = [event(2, 8, now + 14), event(1, 5, now + 15)]
    with serving() as server:
        server.add(first)
        server.score(by_id(1, now + 100))  # before the late one
        server.add(late)
        server.score(by_id(1, now + 100))
        server.score(by_id(2, now + 100))
    write_part(log, 0, first[2:], [0, 1])
    write_part(log, 1, late[1:], [0])
    append_deletions(log, deletion_of(log, "2", None))
    report, causes = audited(made, tmp_path)
    assert (report.requests, report.compared, report.deleted, report.left_out) == (3, 2, 1, 0)
    assert (report.differing, report.late, report.unexplained) == (1, 1, 0) and {*causes.values()} == {"late event"}
    assert "1 requests of deleted users" in [*report.lines()]
    rebuild = audit_of(made.run, [str(log)])._rebuild
    counts = [count_rows(rebuild.history_at(position)) - count_rows(rebuild.own) for position in range(8)]
    assert counts == [0, 0, 0, 1, 2, 2, 3, 3]


def test_events_that_had_expired_are_no_difference(made, serving, tmp_path):
    table, times = pq.read_table(made.run.path.parent / "tables/interactions.parquet").to_pylist(), {}
    for row in table:
        times.setdefault(row["user"], []).append(row["timestamp"])
    user = max(times, key=lambda one: len({*times[one]}))
    moments, now = sorted(times[user]), [0.0]
    with serving(retention=Retention(1e6, clock=lambda: now[0])) as server:
        for kept in (0, 1, 9, len(moments)):
            now[0] = (moments[-1 - kept] if kept < len(moments) else moments[0] - 1) + 1e6
            server.score(by_id(user, moments[-1] + 10))
    lengths = [int(line.features["history length"]) for line in read_lines(tmp_path / "requests")]
    assert lengths[0] == 0 < lengths[1] < lengths[2] < lengths[3]
    report, causes = audited(made, tmp_path, log=False)
    assert (report.compared, report.scores, causes) == (4, 4, {}) and report.largest < 1e-5


def test_events_of_another_time_zone_are_named(made, serving, tmp_path):
    now, events = made.newest + 12_500, [event(1, item, made.newest + 1000 * item) for item in (3, 4, 5)]
    with serving() as server:
        server.add([row | {"timestamp": row["timestamp"] + 7200} for row in events])
        server.score(by_id(1000, now))  # of whom there is none
        server.score(by_id(1, now))
    write_part(tmp_path / "log", 0, events)
    report, causes = audited(made, tmp_path)
    assert report.unexplained == 1 and not report.is_clean
    assert causes["history_age"] == "time zone: times of events are +2 h from the log's"


def test_a_stale_column_of_an_item_is_named(made, serving, tmp_path, capsys):
    with serving() as server:
        server.scorer.state.put("item", "3", {"category": ["9"]})
        server.score(by_id(1, made.newest + 10))
        server.score(by_id(1, made.newest + 10, [4]))
    report, causes = audited(made, tmp_path, log=False)
    assert (report.unexplained, report.scores) == (1, 1)
    assert causes["category"] == "column of the item in the state is another"
    options = ["audit", "--run", made.run.path, "--requests", tmp_path / "requests"]
    assert commands.call(*options) == DIFFERS
    assert "column of the item in the state is another (1)" in capsys.readouterr().out
    # Another table may be that which was served.
    table = pq.read_table(made.run.path.parent / "tables/items.parquet").to_pylist()
    table[3]["category"] = 9
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "items.parquet")
    report, causes = audited(made, tmp_path, log=False, items=str(tmp_path / "items.parquet"))
    assert "category" not in causes


def test_a_column_that_a_request_gives_replaces_the_table(made, serving, tmp_path):
    with serving() as server:
        server.score(by_id(1, made.newest + 10) | {"candidates": {"item": [3, 4, 5], "category": [3, 9, None]}})
        server.score(by_id(2, made.newest + 10, [4]))
    table = pq.read_table(made.run.path.parent / "tables/items.parquet")
    assert table["category"].to_pylist()[4] != 9
    report, causes = audited(made, tmp_path, log=False)
    assert (report.compared, report.scores, causes) == (2, 2, {}) and report.largest < 1e-5


def test_a_wrong_dictionary_is_named(made, serving, tmp_path):
    with rewriting(tmp_path / "artifact", made.path) as folder:  # the ids of two items are swapped
        known = json.loads((folder / artifact.VOCABULARIES).read_text())
        known["item"][2], known["item"][5] = known["item"][5], known["item"][2]
        (folder / artifact.VOCABULARIES).write_text(json.dumps(known))
    with serving(tmp_path / "artifact") as server:
        for user in range(20):
            server.score(by_id(user, made.newest + 10, [int(known["item"][2])]))
    report, causes = audited(made, tmp_path, log=False)
    assert report.unexplained == 20
    assert causes["item"] == "dictionary: the request has the text, and its id differs"
    assert causes["history_item"] == "dictionary: the same events have other ids"


def swap_texts(store, values: str, one: str, other: str) -> None:
    """Swaps the numbers of two texts in a dictionary of a state, and the texts of these numbers."""
    keys = [b"n" + values.encode() + b"\0" + text.encode() for text in (one, other)]
    numbers = store.get(keys)
    texts = [text_key(values, int.from_bytes(number, "little")) for number in numbers]
    assert store.get(texts) == [one.encode(), other.encode()]
    store.update(lambda get: dict(zip(keys + texts, numbers[::-1] + get(texts)[::-1], strict=True)))


def test_a_wrong_dictionary_of_the_state_is_named(made, serving, tmp_path):
    table = pq.read_table(made.run.path.parent / "tables/interactions.parquet").to_pylist()
    last = {row["user"]: str(row["item"]) for row in sorted(table, key=lambda row: row["timestamp"])}
    (user, one), (_, other) = next(pair for pair in pairwise(last.items()) if pair[0][1] != pair[1][1])
    with serving(change=lambda store: swap_texts(store, "item", one, other)) as server:
        server.score(by_id(user, made.newest + 10))
        server.score(by_id(1000, made.newest + 10))  # without events
    report, causes = audited(made, tmp_path, log=False)
    assert (report.compared, report.differing, report.unexplained) == (2, 1, 1) and not report.is_clean
    assert causes["history_item"] == "dictionary: the same events have other ids"
    assert {*causes} == {"history_item"}
    assert report.features["history_item"].example["user"] == str(user)


def test_another_version_is_named(made, serving, tmp_path):
    with rewriting(tmp_path / "artifact", made.path) as folder:
        file = folder / artifact.INFO
        file.write_text(json.dumps(json.loads(file.read_text()) | {"checkpoint": "0" * 16}))
        known = json.loads((folder / artifact.VOCABULARIES).read_text())
        known["item"][2], known["item"][5] = known["item"][5], known["item"][2]
        (folder / artifact.VOCABULARIES).write_text(json.dumps(known))
    with serving(tmp_path / "artifact") as server:
        server.score(by_id(1, made.newest + 10, [int(known["item"][2])]))
        server.score(by_id(1000, made.newest + 10, [7]))
    report, causes = audited(made, tmp_path, log=False)
    assert (report.other_versions, report.scores, report.unexplained) == (2, 0, 0)
    assert {*causes.values()} == {"another version"}
