"""The file of a policy: what is read is what was written, edits count, and damage is refused by name."""

import json
from dataclasses import replace

import numpy as np
import pytest
from history_policies.logs import planted

from jfi.history_policies import EventLog, Policy, fit
from jfi.utils.files import DamagedFileError


@pytest.fixture(scope="module")
def policy() -> Policy:
    events, conversion, _ = planted()
    names = ["fe[ ed  ]", 'a "b"', "日本"]  # what a name may hold
    log = EventLog(events.user, events.time, events.surface, events.dwell, names)
    return fit(log, conversion, remove={"active": 0.3}, boost=["active"], caps={"passive": 40}, num_segments=2)


def test_what_is_read_is_what_was_written(policy, tmp_path):
    path = tmp_path / "policy.json"
    policy.save(path)
    read = Policy.load(path)
    assert read == policy and read.fingerprint == policy.fingerprint
    assert [one.name for one in tmp_path.iterdir()] == ["policy.json"]
    events = planted()[0]
    cells = policy.cells(events.surface, events.dwell)
    assert (read.cells(events.surface, events.dwell) == cells).all()
    lengths = np.array([len(events)])
    for segment in range(2):
        one, other = (p.select(cells, np.array([segment]), lengths) for p in (policy, read))
        assert one.rows.tolist() == other.rows.tolist()
    # A list of numbers is one line.
    assert '\n   "keep": [false, ' in path.read_text() or '\n   "keep": [true, ' in path.read_text()


def test_another_table_has_another_fingerprint(policy):
    assert replace(policy, newest=policy.newest - 1).fingerprint != policy.fingerprint


def test_a_table_edited_by_hand_counts(policy, tmp_path):
    path = tmp_path / "policy.json"
    policy.save(path)
    tree = json.loads(path.read_text())
    tree["segments"]["reports"][1]["cap"] = 12
    tree["surfaces"][0]["weight"][0] = 2
    path.write_text(json.dumps(tree))
    edited = Policy.load(path)
    assert edited.segment_reports[1].cap == 12 and edited.tables.cap.tolist() == [40, 12]
    assert edited.tables.weight[0, 0] == 2


def damaged(tree: dict, *keys: object, value: object = None) -> dict:
    inner = tree
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    return tree


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["format"], "jfi history policy 9", "'format' must be 'jfi history policy 1'"),
        (["newest"], None, "no 'newest'"),
        (["newest"], -1, "newest must be at least 0, got -1"),
        (["newest"], "3", "newest must be int, got '3'"),
        (["newest"], 41, "cap of 'passive' must be at least newest"),
        (["surfaces", 0, "keep"], [True], "must have 11 bins"),
        (["surfaces", 0, "keep", 0], 1, "keep in SurfaceReport must be bool, got 1"),
        (["surfaces", 0, "weight", 0], -1.0, "must be finite and at least 0"),
        (["surfaces", 0, "wieght"], 1, "unknown 'wieght' in SurfaceReport; did you mean 'weight'"),
        (["surfaces", 0, "surface"], "other", "one report for each segment and surface"),
        (["surfaces", 1], None, "one report for each segment and surface"),
        (["segments", "statistics", 0], "other", "statistics must be"),
        (["segments", "scale", 0], 0, "scale must be above 0"),
        (["segments", "mean"], [0.0], "must have 6 numbers"),
        (["segments", "reports", 0, "name"], "lively", "reports are of"),
        (["edges", "日本"], [2.0, 1.0], "edges of '日本' must be finite and ascend"),
        (["edges", "日本"], None, "one report for each segment and surface"),
        (["segments"], [], r"segments must be an object, got \[\]"),
        (["edges"], 3, "edges must be an object, got 3"),
        (["surfaces", 0], 3, "an entry of surfaces must be an object, got 3"),
        (["surfaces"], 3, "surfaces must be a list, got 3"),
    ],
)
def test_a_damaged_file_is_refused_by_name(policy, tmp_path, keys, value, message):
    path = tmp_path / "policy.json"
    policy.save(path)
    tree = damaged(json.loads(path.read_text()), *keys, value=value)
    path.write_text(json.dumps(tree))
    with pytest.raises(DamagedFileError, match=f"policy.json: .*{message}"):
        Policy.load(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"format": NaN}', "\xff"])
def test_what_is_no_policy_is_refused(tmp_path, content):
    path = tmp_path / "policy.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DamagedFileError, match=r"policy\.json: not "):
        Policy.load(path)
    with pytest.raises(DamagedFileError, match=r"gone\.json: no such file or directory"):
        Policy.load(tmp_path / "gone.json")


def test_a_policy_that_cannot_be_written_leaves_the_old_one(policy, tmp_path, monkeypatch):
    path = tmp_path / "policy.json"
    policy.save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        replace(policy, newest=3).save(path)
    assert path.read_bytes() == before and len([*tmp_path.iterdir()]) == 1
