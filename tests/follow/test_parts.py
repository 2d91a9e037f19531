"""Parts that are late, repeated, damaged or of another kind, and runs that cannot follow a log."""

import os
import shutil
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import jfi
from jfi.data import DataError, FeatureConfig
from jfi.data.io.blocks import read_table
from jfi.follow.parts import PartFolder
from jfi.follow.start import follow
from jfi.follow.state import contents, open_state
from jfi.state.dictionaries import Dictionaries
from jfi.state.state import read_layout
from jfi.state.stores import LmdbStore
from jfi.state.user_rows import scan_records
from jfi.training import ConfigError, resume, train
from jfi.training.distributed.processes import Interrupted
from jfi.training.run.recorder import SPEED
from jfi.training.run.run_folder import RunFolder
from jfi.utils.encoding import HashedIds

from .followed_log import FEATURES, KINDS, KNOWN, config_of, content, lines, write, write_parts

pytestmark = pytest.mark.usefixtures("no_pictures")


def records(run: Path) -> dict[str, list[tuple]]:
    """The events of each user in the state, with texts in place of their numbers."""
    with closing(LmdbStore(run / "follow" / "state")) as store:
        layout, names, found = read_layout(store), Dictionaries(store.get), {}
        for user, own in scan_records(store, layout):
            columns = [
                names.texts(name, own[name].ravel().tolist()) if one.kind in ("text", "texts") else own[name].tolist()
                for name, one in layout.columns.items()
            ]
            found[user] = [own["jfi time"].tolist(), *columns]
        return found


def test_repeated_late_and_old_rows(rows, run, tmp_path):
    new = rows[KNOWN : KNOWN + 60]
    newest = new[-1]["timestamp"]
    late = new[-1] | {"timestamp": newest - 500.0, "item_id": 777}
    old = new[-1] | {"timestamp": newest - 2000.0, "item_id": 778}
    write(tmp_path / "parts" / "a.parquet", [*new, new[3], rows[KNOWN - 1]])
    write(tmp_path / "parts" / "b.parquet", [new[5], late, old, late])
    assert follow(run, tmp_path / "parts", until_idle=True, late_seconds=1000.0) == 2
    one, other = (
        {name: line[name] for name in ("rows", "repeated", "late", "too_old", "labeled")} for line in lines(run)
    )
    assert all(line[SPEED] > 0 for line in lines(run))
    assert one == {"rows": 62, "repeated": 2, "late": 0, "too_old": 0, "labeled": 60}
    assert other == {"rows": 4, "repeated": 2, "late": 1, "too_old": 1, "labeled": 1}


def test_labels_that_come_later_than_their_rows(rows, tmp_path):
    """They are trained on, and histories and counts are as if they had come with their rows."""
    write(tmp_path / "log.parquet", rows[:KNOWN])
    train(config_of(tmp_path / "log.parquet", tmp_path / "run", statistics=["item", "user_item", "popularity"]))
    # The first user is new, so that its late label replaces the first row of the records.
    new = [rows[KNOWN] | {"user_id": "u-new"}, *rows[KNOWN + 1 : KNOWN + 60]]
    shown = [row | {"rating": None} for row in new]
    states = []
    for name, parts in {"once": [new], "late": [shown[:30] + new[25:30], shown[20:], [*shown, *new, *new]]}.items():
        own = Path(shutil.copytree(tmp_path / "run", tmp_path / name))
        for number, part in enumerate(parts):
            write(tmp_path / f"parts {name}" / f"{number}.parquet", part)
        follow(own, tmp_path / f"parts {name}", until_idle=True)
        saved = jfi.load_run(own)
        with closing(open_state(own / "follow" / "state", saved.config.data, saved.schema)) as state:
            kinds = {one.prefix: one for one in state.counters.live.names.values()}
            counts = {
                (kinds[key[:5]].text, key): np.frombuffer(value, kinds[key[:5]].dtype)[-1].tolist()  # of all rows
                for key, value in state._store.scan(b"k")
            }
        states.append((repr(records(own)), counts))
    found = [
        [line[name] for name in ("repeated", "late", "late_labels", "labeled")] for line in lines(tmp_path / "late")
    ]
    assert found == [[5, 0, 0, 5], [10, 0, 0, 0], [125, 0, 55, 55]]
    assert states[0] == states[1]


def test_rows_beyond_those_that_are_kept_count_once(rows, tmp_path, monkeypatch):
    """Rows that are no events of histories, too."""
    monkeypatch.setattr("jfi.state.user_rows.OTHERS", 5)
    write(tmp_path / "log.parquet", rows[:KNOWN])
    train(config_of(tmp_path / "log.parquet", run := tmp_path / "run", history="rating >= 3"))
    begin, row = rows[KNOWN]["timestamp"], rows[KNOWN] | {"rating": 1}
    others = [row | {"timestamp": begin + i, "item_id": i} for i in range(12)]
    event = row | {"timestamp": begin - 1.0, "rating": 5, "item_id": 888}  # late; few events are known
    write(tmp_path / "parts" / "a.parquet", others)
    write(tmp_path / "parts" / "b.parquet", [others[0], others[9], event, others[3] | {"item_id": 999}])
    assert follow(run, tmp_path / "parts", until_idle=True) == 2
    assert [(line["repeated"], line["labeled"]) for line in lines(run)] == [(0, 12), (3, 1)]


def test_types_that_are_read_to_the_same_values(rows, run, tmp_path):
    first, second = (
        [row | {"price": row["price"] and round(row["price"], 2), "device": None} for row in part]
        for part in (rows[KNOWN : KNOWN + 80], rows[KNOWN + 80 : KNOWN + 160])
    )
    other = {
        "user_id": pa.dictionary(pa.int32(), pa.string()),
        "item_id": pa.int32(),
        "rating": pa.float64(),
        "price": pa.float64(),
        "tags": pa.large_list(pa.large_string()),
        "brand": pa.large_string(),
        "device": pa.null(),
    }
    found = []
    for number, kinds in enumerate([KINDS, pa.schema([(one.name, other.get(one.name, one.type)) for one in KINDS])]):
        own = Path(shutil.copytree(run, tmp_path / f"run-{number}"))
        write(tmp_path / f"parts-{number}" / "a.parquet", first, KINDS)
        write(tmp_path / f"parts-{number}" / "b.parquet", second, kinds)
        assert follow(own, tmp_path / f"parts-{number}", until_idle=True) == 2
        found.append((records(own), [line["ne"] for line in lines(own)]))
    assert repr(found[0]) == repr(found[1])


def test_a_late_row_is_an_event_of_later_histories(rows, run, tmp_path):
    """Whether it comes in time or late, later parts are the same."""
    new, later = rows[KNOWN : KNOWN + 80], rows[KNOWN + 80 : KNOWN + 120]
    late = new[40]
    states = []
    for name, parts in {"in time": [new], "late": [new[:40] + new[41:], [late]]}.items():
        own = Path(shutil.copytree(run, tmp_path / name))
        for number, part in enumerate([*parts, later]):
            write(tmp_path / f"parts {name}" / f"{number}.parquet", part)
        follow(own, tmp_path / f"parts {name}", until_idle=True)
        states.append(records(own))
    assert lines(tmp_path / "late")[1]["late"] == 1
    assert repr(states[0]) == repr(states[1]) and len(states[0]) > 20


def test_memory_of_users_is_bounded(rows, trained, tmp_path):
    """A user's record has the newest events, of whatever log."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    row, sizes = rows[KNOWN], []
    for number in range(6):
        time = row["timestamp"] + 100.0 * number
        events = [row | {"timestamp": time + i, "item_id": i % 7} for i in range(30)]
        write(tmp_path / "parts" / f"{number}.parquet", events)
        follow(run, tmp_path / "parts", until_idle=True)
        with closing(LmdbStore(run / "follow" / "state")) as store:
            sizes.append(max(len(value) for _, value in store.scan(b"u")))
    assert sizes[0] < sizes[1] < sizes[3] == sizes[4] == sizes[5]


def refused(run: Path, parts: Path, match: str) -> None:
    """Following raises an error of a part, and changes nothing."""
    before = content(run)
    with pytest.raises(DataError, match=match) as raised:
        follow(run, parts, until_idle=True)
    assert "\n" not in str(raised.value)
    assert content(run) == before


@pytest.fixture
def followed(rows, run, tmp_path) -> tuple[Path, Path]:
    """A run that has followed two parts, and their folder."""
    write_parts(tmp_path / "parts", rows[KNOWN : KNOWN + 80], 2)
    assert follow(run, tmp_path / "parts", until_idle=True) == 2
    assert follow(run, tmp_path / "parts", until_idle=True) == 0
    return run, tmp_path / "parts"


def test_bad_parts(rows, followed):
    run, parts = followed
    bad, good = parts / "part-0002.parquet", rows[KNOWN + 80 : KNOWN + 120]
    write(bad, good)
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    refused(run, parts, r"part-0002\.parquet: a damaged Parquet file")
    bad.write_bytes(b"")
    refused(run, parts, r"part-0002\.parquet: a damaged Parquet file")
    write(bad, good, pa.schema([one for one in KINDS if one.name != "price"]))
    refused(run, parts, r"part-0002\.parquet: no column 'price'")
    write(bad, [row | {"item_id": str(row["item_id"])} for row in good], _with_type("item_id", pa.string()))
    refused(run, parts, r"part-0002\.parquet: column 'item_id' holds texts, but numbers in the run's interactions")
    write(bad, [*good, good[0] | {"timestamp": time.time() + 660.0}])
    refused(run, parts, r"part-0002\.parquet:41: 'timestamp' is 20.*, more than 600 s in the future")
    write(bad, [good[0] | {"timestamp": 1e300}])
    refused(run, parts, r"part-0002\.parquet:1: 'timestamp' is 1e\+300 s after 1970, more than 600 s in the future")
    write(bad, [good[0] | {"user_id": None}])
    refused(run, parts, r"part-0002\.parquet:1: empty 'user_id'")
    write(bad, [*good, good[0] | {"user_id": "x" * 481}])
    refused(run, parts, r"part-0002\.parquet:41: 'user_id' has 481 bytes, and an id of a state has at most 480")
    write(bad, [*good, good[0] | {"timestamp": float("nan"), "item_id": 5}])
    refused(run, parts, r"part-0002\.parquet:41: ")
    bad.unlink()
    bad.mkdir()
    refused(run, parts, r"part-0002\.parquet: not a regular file")
    bad.rmdir()
    write(bad, good)
    assert follow(run, parts, until_idle=True) == 1


def _with_type(name: str, kind: pa.DataType) -> pa.Schema:
    return KINDS.set(KINDS.get_field_index(name), pa.field(name, kind))


def test_a_part_with_more_items_than_a_table_has_rows(rows, tmp_path):
    """Those without a row of their own share one."""
    write(tmp_path / "log.parquet", [row | {"item_id": row["item_id"] % 5} for row in rows[:KNOWN]])
    features = [FeatureConfig("item_id", "item", capacity=20), *FEATURES]
    config = config_of(tmp_path / "log.parquet", run := tmp_path / "run", features=features)
    train(config.with_training(admit_every=2))
    begin = rows[-1]["timestamp"] + 1
    new = [rows[-1] | {"timestamp": begin + i, "item_id": 100 + i} for i in range(200)]
    write_parts(tmp_path / "parts", [*rows[KNOWN:], *new], 4)
    assert follow(run, tmp_path / "parts", until_idle=True) == 4
    owners = jfi.load_run(run).model.growing_ids.ids("item_id")
    assert len(owners) == len(set(owners.tolist())) == 20
    assert len({*HashedIds(20).ids([str(100 + i) for i in range(200)]).tolist()} & {*owners.tolist()}) > 10


def test_occurrences_count_over_parts(rows, tmp_path):
    """When a new value gets a row follows from steps alone, wherever parts end."""
    write(tmp_path / "log.parquet", rows[:KNOWN])
    features = [FeatureConfig("item_id", "item", capacity=60, min_count=2), *FEATURES]
    config = config_of(tmp_path / "log.parquet", run := tmp_path / "run", features=features)
    train(config.with_training(admit_every=2))
    for number, row in enumerate(rows[KNOWN : KNOWN + 4]):
        write(tmp_path / "parts" / f"{number}.parquet", [row | {"item_id": 500}])
    assert follow(run, tmp_path / "parts", until_idle=True) == 4
    (item,) = HashedIds(60).ids(["500"]).tolist()
    assert item in jfi.load_run(run).model.growing_ids.ids("item_id").tolist()


def test_a_good_part_before_a_bad_one_is_kept(rows, followed):
    run, parts = followed
    write(parts / "part-0002.parquet", rows[KNOWN + 80 : KNOWN + 120])
    (parts / "part-0003.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"part-0003\.parquet: a damaged"):
        follow(run, parts, until_idle=True, checkpoint_seconds=1e6)
    assert len(lines(run)) == 3
    (parts / "part-0003.parquet").unlink()
    assert follow(run, parts, until_idle=True) == 0


def test_refused_parts_are_moved_where_the_user_says_so(rows, followed, tmp_path, caplog):
    run, parts = followed
    new = rows[KNOWN + 80 : KNOWN + 120]
    write(parts / "part-00005.parquet", new[:10])  # late
    write(parts / "part-0002.parquet", [*new, new[0] | {"timestamp": time.time() + 660.0}])
    write(parts / "part-0003.parquet", [row | {"price": "low"} for row in new], _with_type("price", pa.string()))
    write(parts / "part-0004.parquet", new)
    with pytest.raises(ConfigError, match=r"--refused-to: got .*, must be a folder beside the folder of parts"):
        follow(run, parts, until_idle=True, refused_to=parts)
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "part-0002.parquet").write_bytes(b"an older one")
    assert follow(run, parts, until_idle=True, refused_to=tmp_path / "refused") == 1
    assert lines(run)[-1]["part"] == "part-0004.parquet" and lines(run)[-1]["labeled"] == 40
    reasons = {one.name: one.read_text() for one in (tmp_path / "refused").glob("*.reason.txt")}
    assert "sorts before part-0001.parquet" in reasons["part-00005.parquet.reason.txt"]
    assert "part-0002.parquet:41: 'timestamp' is 20" in reasons["part-0002.parquet-2.reason.txt"]
    assert "part-0003.parquet:1: 'price' is 'low'" in reasons["part-0003.parquet.reason.txt"]
    assert len(reasons) == 3
    assert all((tmp_path / "refused" / name.removesuffix(".reason.txt")).is_file() for name in reasons)
    assert "refused part 3 since the start: " in caplog.text
    assert follow(run, parts, until_idle=True) == 0


def test_parts_in_another_order_or_changed(rows, followed):
    run, parts = followed
    write(parts / "part-00005.parquet", rows[KNOWN + 80 : KNOWN + 90])
    refused(run, parts, r"part-00005\.parquet: its name sorts before part-0001\.parquet, which was trained on")
    (parts / "part-00005.parquet").unlink()
    first = parts / "part-0000.parquet"
    whole = first.read_bytes()
    first.write_bytes(whole)  # the same content at another time
    assert follow(run, parts, until_idle=True) == 0
    first.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    refused(run, parts, r"part-0000\.parquet: was changed after it was trained on")
    first.unlink()  # parts that were trained on may go
    assert follow(run, parts, until_idle=True) == 0


def test_files_that_are_no_parts_are_not_read(tmp_path, caplog):
    """Those that may have been meant as parts are named, the first of each kind once."""
    for name in (".a.parquet", "_b.parquet", "c.parquet.tmp", "d.txt", "_SUCCESS", ".part-0.crc"):
        (tmp_path / name).write_bytes(b"half")
    parts = PartFolder(tmp_path)
    assert parts.next("") is None and not caplog.messages
    for name in ("e.parq", "f.parq", "g.csv", "day/part-00000-c000.snappy.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    assert parts.next("") is None and parts.next("") is None
    named = sorted(Path(one.split(": not read; parts are files")[0]).name for one in caplog.messages)
    assert len(named) == 3 and named[0] == "day" and named[1] in ("e.parq", "f.parq") and named[2] == "g.csv"


def test_parts_without_rows_or_labels(rows, run, tmp_path, capsys):
    """The columns of a part without rows, and those without a value, may have any type."""
    parts = tmp_path / "parts"
    write(parts / "a.parquet", [], pa.schema([(name, pa.float64()) for name in KINDS.names]))  # as pandas writes it
    new = [row | {"rating": None, "device": float("nan")} for row in rows[KNOWN : KNOWN + 5]]
    write(parts / "b.parquet", new, _with_type("device", pa.float64()))
    write(parts / "c.parquet", [row | {"rating": 1} for row in rows[KNOWN + 5 : KNOWN + 20]])
    write(parts / "d.parquet", rows[KNOWN + 20 : KNOWN + 50])
    assert follow(run, parts, until_idle=True) == 4
    assert [line["labeled"] for line in lines(run)] == [0, 0, 15, 30]
    assert [line["rows"] for line in lines(run)] == [0, 5, 15, 30]
    said = capsys.readouterr().out.splitlines()
    assert [one.endswith("; no labeled row") for one in said] == [True, True, False, False]
    loss = lines(run)[2]["loss"]
    assert said[2].startswith(f"c.parquet: 15 rows; loss {loss:.4f}, no AUC: the labels are all equal")


def test_times_with_and_without_an_offset_are_of_two_kinds(rows, tmp_path):
    """As within one table: those without one would be read as UTC."""
    rows = [row | {"timestamp": int(row["timestamp"] * 1e6)} for row in rows]
    own, other = (_with_type("timestamp", pa.timestamp("us", zone)) for zone in ("UTC", None))
    write(tmp_path / "log.parquet", rows[:KNOWN], own)
    train(config_of(tmp_path / "log.parquet", run := tmp_path / "run"))
    write(tmp_path / "parts" / "a.parquet", rows[KNOWN:], other)
    with pytest.raises(DataError, match=r"a\.parquet: column 'timestamp' holds times without a time zone, but"):
        follow(run, tmp_path / "parts", until_idle=True)
    write(tmp_path / "parts" / "a.parquet", rows[KNOWN:], own)
    assert follow(run, tmp_path / "parts", until_idle=True) == 1


def test_the_followed_parameters_are_those_of_the_run(rows, trained, followed):
    run, _ = followed
    table = pa.Table.from_pylist(rows[KNOWN : KNOWN + 20], KINDS)
    before, after = (jfi.load_run(one).predict(table)["score"].to_pylist() for one in (trained, run))
    assert before != after
    with pytest.raises(ConfigError, match="the run follows a log; go on with --follow FOLDER"):
        resume(run)


def test_runs_that_cannot_follow(rows, run, tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"--follow .*nowhere: no such folder"):
        follow(run, tmp_path / "nowhere", until_idle=True)
    config = config_of(run.parent / "log.parquet", tmp_path / "other", label=None)
    write(tmp_path / "log.parquet", rows[:KNOWN])
    config = replace(config, data=replace(config.data, interactions=str(tmp_path / "log.parquet")))
    train(replace(config, training=replace(config.training, ranking="none")))
    (tmp_path / "parts").mkdir()
    with pytest.raises(ConfigError, match=r"data\.label is null, and --follow draws no negatives"):
        follow(tmp_path / "other", tmp_path / "parts", until_idle=True)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("epochs: 1", "epochs: 3"))
    with pytest.raises(ConfigError, match=r"config\.yaml has changed since the checkpoint"):
        follow(run, tmp_path / "parts", until_idle=True)


def test_a_signal_ends_it_at_the_last_checkpoint(rows, followed, monkeypatch):
    run, parts = followed
    before = content(run)
    write(parts / "part-0002.parquet", rows[KNOWN + 80 : KNOWN + 180])

    class Stop:
        steps = 0

        def after_step(self) -> None:
            Stop.steps += 1
            if Stop.steps == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        def after_part(self, place: dict) -> None:
            raise AssertionError("the part has not ended")

        def close(self) -> None:
            raise AssertionError("the run is not at the end of a part")

    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        follow(run, parts, hook=lambda _: Stop())
    assert Stop.steps == 2 and content(run) == before
    assert follow(run, parts, until_idle=True) == 1


def test_it_waits_for_parts(rows, followed):
    """A part that comes while it waits is trained on, and a signal ends the waiting."""
    run, parts = followed
    places, waited, closed = [], [], []

    class Hook:
        def after_step(self) -> None:
            pass

        def after_part(self, place: dict) -> None:
            places.append(place["part"])

        def while_waiting(self) -> None:
            waited.append((len(places), *sorted(one.name for one in (run / "checkpoints").iterdir())))
            if not places:
                write(parts / "part-0002.parquet", rows[KNOWN + 80 : KNOWN + 100])
            else:
                os.kill(os.getpid(), signal.SIGINT)

        def close(self) -> None:
            closed.append(waited[-1])

    with pytest.raises(Interrupted, match="stopped by SIGINT"):
        follow(run, parts, checkpoint_seconds=1e6, hook=lambda _: Hook())
    assert places == ["part-0002.parquet"] and len(lines(run)) == 3
    assert closed == [waited[-1]]
    (before, *checkpoint), (after, *other) = sorted(set(waited))
    assert (before, after) == (0, 1) and checkpoint == other != [one.name for one in (run / "checkpoints").iterdir()]


def test_a_label_of_booleans_is_as_one_of_numbers(run):
    _, config = RunFolder.open(run)
    settings = replace(config.data.resolved(), label="clicked")
    kinds = []
    for values in ([True, False], [1, 0]):
        table = read_table(pa.table({"clicked": values, "brand": values}), ["clicked", "brand"])
        kinds.append(contents(table, settings))
    assert kinds == [{"brand": "bool", "clicked": "numbers"}, {"brand": "numbers", "clicked": "numbers"}]
