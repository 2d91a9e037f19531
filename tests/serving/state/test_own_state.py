"""The state that `jfi export` makes of a run's log and tables, and that `jfi serve` uses without a further option."""

import shutil
import urllib.error
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jfi.cli.state import make_state, own_state
from jfi.state.state import read_layout
from jfi.state.stores import open_store
from jfi.state.user_rows import scan_records
from jfi.training.run.saved_run import load_run

from ..test_commands import post, server


@pytest.fixture
def artifact(exported, tmp_path) -> Path:
    """A copy of an artifact with its state."""
    for path in (exported.path, own_state(exported.path, None)):
        shutil.copytree(path, tmp_path / path.name)
    return tmp_path / exported.path.name


def test_an_exported_run_is_served_with_its_users_and_items(exported, artifact):
    config = load_run(exported.run).config.data
    log = pq.read_table(config.interactions)
    user, items = str(log[config.user][0]), log[config.item].to_pylist()[:3]
    with server("--artifact", artifact) as (_, address):
        answer = post(address, {"user": user, "candidates": items})
        assert len(answer["scores"]) == 3 and answer["state"]["events"] > 0
        assert answer["state"]["unknown_items"] == 0
    with server("--artifact", artifact, "--state", "none") as (_, address), pytest.raises(urllib.error.HTTPError):
        post(address, {"user": user, "candidates": items})


def test_the_state_has_the_whole_log(exported):
    log = pq.read_table(load_run(exported.run).config.data.interactions)
    with closing(open_store(str(own_state(exported.path, None)))) as store:
        found = {user: len(records) for user, records in scan_records(store, read_layout(store))}
    counts = log["user"].value_counts().to_pylist()
    assert found == {str(one["values"]): one["counts"] for one in counts}


def test_a_state_that_is_there_stays(exported, artifact, capsys):
    """So does the lack of one, if the log cannot be read: the artifact is whole without it."""
    run, state = load_run(exported.run), str(own_state(artifact, None))
    with closing(open_store(state)) as store:
        store.put([(b"mine", b"1")])
    make_state(state, run, exported.run)
    assert capsys.readouterr().out == f"state {state}: is there, and stays as it is\n"
    with closing(open_store(state)) as store:
        assert store.get([b"mine"]) == [b"1"]
    gone = replace(run.config, data=replace(run.config.data, interactions="/no/log.parquet"))
    make_state(f"{state}2", replace(run, config=gone), exported.run)
    said = capsys.readouterr().out
    assert said.startswith("no state was made: ") and "jfi state load" in said and not Path(f"{state}2").exists()


def test_versions_have_their_state_in_their_folder():
    assert own_state(None, Path("versions")) == Path("versions/state")
    assert own_state(Path("runs/a/artifact"), None) == Path("runs/a/artifact.state")
