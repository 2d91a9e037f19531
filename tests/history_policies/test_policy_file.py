"""The file of a policy: what is read is what was written, edits count, and damage is refused by name."""

import json

import numpy as np
import pytest
from history_policies.logs import planted
from msgspec.structs import replace

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
    # A list of numbers is one line, and a name is readable.
    assert '"日本"' in path.read_text()
    assert '\n   "keep": [false, ' in path.read_text() or '\n   "keep": [true, ' in path.read_text()


def test_a_number_that_json_does_not_have_is_not_written(policy, tmp_path):
    reports = (replace(policy.surface_reports[0], slope=float("nan")), *policy.surface_reports[1:])
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(policy, surface_reports=reports).save(tmp_path / "policy.json")
    assert not list(tmp_path.iterdir())


def test_another_table_has_another_fingerprint(policy):
    assert replace(policy, newest=policy.newest - 1).fingerprint != policy.fingerprint


def test_a_table_edited_by_hand_counts(policy, tmp_path):
    path = tmp_path / "policy.json"
    policy.save(path)
    tree = json.loads(path.read_text())
    tree["segment_reports"][1]["cap"] = 12
    tree["surface_reports"][0]["weight"][0] = 2
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
        (["format"], "jfi history policy 9", "format is 'jfi history policy 9', must be 'jfi history policy 3'"),
        (["newest"], None, "missing required field `newest`"),
        (["newest"], -1, r"expected `int` >= 0 - at `\$.newest`"),
        (["newest"], "3", r"expected `int`, got `str` - at `\$.newest`"),
        (["newest"], 41, "cap of 'passive' must be at least newest"),
        (["surface_reports", 0, "keep"], [True], "must have 11 bins"),
        (["surface_reports", 0, "keep", 0], 1, r"expected `bool`, got `int` - at `\$.surface_reports\[0\].keep\[0\]`"),
        (["surface_reports", 0, "weight", 0], -1.0, "expected `float` >= 0.0"),
        (["surface_reports", 0, "wieght"], 1, r"unknown field `wieght` - at `\$.surface_reports"),
        (["surface_reports", 0, "surface"], "other", "one report for each segment and surface"),
        (["surface_reports", 1], None, "one report for each segment and surface"),
        (["segments", "scale", 0], 0, r"expected `float` > 0.0 - at `\$.segments.scale"),
        (["segments", "mean"], [0.0], r"expected `array` of length 6 - at `\$.segments.mean`"),
        (["segments", "centers"], [[0.0] * 6], r"a center for each name - at `\$.segments`"),
        (["segment_reports", 0, "name"], "lively", "reports are of"),
        (["edges", 2], [2.0, 1.0], "edges of '日本' must ascend"),
        (["edges", 2], None, "edges must have a list for each surface"),
        (["segments"], [], r"expected `object`, got `array` - at `\$.segments`"),
        (["edges"], 3, "expected `array`, got `int`"),
        (["surface_reports", 0], 3, "expected `object`, got `int`"),
        (["surface_reports"], 3, "expected `array`, got `int`"),
    ],
)
def test_a_damaged_file_is_refused_by_name(policy, tmp_path, keys, value, message):
    path = tmp_path / "policy.json"
    policy.save(path)
    tree = damaged(json.loads(path.read_text()), *keys, value=value)
    path.write_text(json.dumps(tree))
    with pytest.raises(DamagedFileError, match=f"policy.json is .*{message}"):
        Policy.load(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"format": NaN}', "\xff"])
def test_what_is_no_policy_is_refused(tmp_path, content):
    path = tmp_path / "policy.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DamagedFileError, match=r"policy\.json is (damaged|not a policy)"):
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
