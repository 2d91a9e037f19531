"""Users who are deleted from the log: their rows do not count in parts, and leave the state of a run."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from jfi.data import DataError
from jfi.follow.start import follow
from jfi.state.deletions import LIST, append_deletions, deletion_of
from jfi.state.layout import digest
from jfi.state.state import read_layout
from jfi.state.stores import LmdbStore
from jfi.training import train

from .followed_log import KNOWN, config_of, lines, write, write_parts

pytestmark = pytest.mark.usefixtures("no_pictures")
USER = "u23"


@pytest.fixture(scope="module")
def counted(rows, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("counted")
    write(folder / "log.parquet", rows[:KNOWN])
    train(config_of(folder / "log.parquet", folder / "run", statistics=["item", "user", "user_item", "session"]))
    return folder / "run"


def without(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["user_id"] != USER]


def state(run: Path, user: str = USER) -> tuple[list[float], dict[bytes, bytes]]:
    """The times of the user's events in the state of a run, and the records of the user's own statistics."""
    with closing(LmdbStore(run / "follow" / "state")) as store:
        layout, found = read_layout(store), dict(store.scan(b""))
        own = layout.records(found.get(b"u" + user.encode()), user)
        return own["jfi time"].tolist(), {key: one for key, one in found.items() if digest(user) in key}


def test_a_run_forgets_users_as_the_list_grows_and_takes_parts_that_were_written_anew(rows, counted, tmp_path):
    run, folder = Path(shutil.copytree(counted, tmp_path / "run")), tmp_path / "parts"
    parts = write_parts(folder, rows[KNOWN:], 5)
    for number in (2, 3, 4):
        (folder / f"part-{number:04d}.parquet").rename(tmp_path / f"{number}")
    assert follow(run, folder, until_idle=True) == 2
    assert len(state(run)[0]) > 2 and state(run)[1]
    append_deletions(folder, deletion_of(folder, USER, None))
    for number in (0, 1):  # by whoever owns them
        write(folder / f"part-{number:04d}.parquet", without(parts[number]))
    assert follow(run, folder, until_idle=True) == 0  # it is not refused that they were changed
    append_deletions(folder, deletion_of(folder, "nobody", None))
    for number in (2, 3):
        (tmp_path / f"{number}").rename(folder / f"part-{number:04d}.parquet")
    assert follow(run, folder, until_idle=True) == 2
    back = [row["timestamp"] for part in parts[2:4] for row in part if row["user_id"] == USER]
    times, records = state(run)
    assert times == back and len(back) > 0 and records
    assert [line["rows"] for line in lines(run)] == [len(part) for part in parts[:4]]
    # A state that is made anew has the same of the user, and so has a run that reads the parts as they were.
    shutil.rmtree(run / "follow" / "state")
    (tmp_path / "4").rename(folder / "part-0004.parquet")
    assert follow(run, folder, until_idle=True) == 1
    fresh = Path(shutil.copytree(counted, tmp_path / "fresh"))
    for number in (0, 1):
        write(folder / f"part-{number:04d}.parquet", parts[number])
    assert follow(fresh, folder, until_idle=True) == 5
    assert [line["rows"] for line in lines(fresh)] == [
        *(len(without(part)) for part in parts[:2]),
        *map(len, parts[2:]),
    ]
    assert state(run)[0] == state(fresh)[0] == back + [r["timestamp"] for r in parts[4] if r["user_id"] == USER]
    assert state(run)[1].keys() == state(fresh)[1].keys()


def test_a_part_that_was_changed_without_a_deletion_is_refused_still(rows, counted, tmp_path):
    run, folder = Path(shutil.copytree(counted, tmp_path / "run")), tmp_path / "parts"
    parts = write_parts(folder, rows[KNOWN:], 2)
    (folder / "part-0001.parquet").unlink()
    assert follow(run, folder, until_idle=True) == 1
    (folder / LIST).write_text("")
    write(folder / "part-0000.parquet", without(parts[0]))
    with pytest.raises(DataError, match="was changed after it was trained on"):
        follow(run, folder, until_idle=True)
    append_deletions(folder, deletion_of(folder, USER, None))
    assert follow(run, folder, until_idle=True) == 0


def test_a_part_that_is_refused_leaves_the_deletion_for_the_next_one(rows, counted, tmp_path):
    run, folder = Path(shutil.copytree(counted, tmp_path / "run")), tmp_path / "parts"
    parts = write_parts(folder, rows[KNOWN:], 3)
    (folder / "part-0002.parquet").rename(tmp_path / "2")
    (folder / "part-0001.parquet").write_bytes(b"no part")
    assert follow(run, folder, until_idle=True, refused_to=tmp_path / "refused") == 1
    append_deletions(folder, deletion_of(folder, USER, None))
    bad = [row | {"tags": None, "rating": 77} for row in parts[1]]
    write(folder / "part-0001.parquet", [{**row, "timestamp": 1e12} for row in bad])
    assert follow(run, folder, until_idle=True, refused_to=tmp_path / "refused") == 0
    assert state(run)[0]  # it goes with the next part
    (tmp_path / "2").rename(folder / "part-0002.parquet")
    assert follow(run, folder, until_idle=True) == 1
    assert state(run)[0] == [row["timestamp"] for row in parts[2] if row["user_id"] == USER]
