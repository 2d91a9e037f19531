"""A file that is one array of objects is read as their lines are, whatever its layout, and its faults have a line."""

import json

import numpy as np
import pytest
from data_configs import read_blocks

from jfi.data import DataConfig, DataError, load_dataset
from jfi.data.io.blocks import read_table

NAMES = ["user", "x", "tags"]
TEXTS = ["a", "", 'quote " and \\', "],[{}\\", "\\\\", "line\nend", "用户 é", "}, {", None, True, 7, 0.25, 2**70, 1e300]


def columns(path: str) -> dict[str, list]:
    tables = list(read_blocks(path, NAMES))
    found = {"line": [table.line(row) for table in tables for row in range(len(table))]}
    for name in NAMES:
        found[name] = [x for table in tables for x in table.categories(name, {}).to_pylist()]
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("compact", [True, False])
def test_an_array_has_the_values_of_its_lines(tmp_path, monkeypatch, seed, indent, compact):
    random = np.random.default_rng([seed, indent or 7])
    rows = []
    for i in range(30):
        texts = [TEXTS[random.integers(len(TEXTS))] for _ in range(3)]
        rows.append({"user": f"u{i}", "x": texts[0], "tags": ["t", str(texts[1])], "other": [{"a": [texts[2]]}, {}]})
    separators = (",", ":") if compact else None
    text = json.dumps(rows, indent=indent, ensure_ascii=bool(seed % 2), separators=separators)
    (tmp_path / "r.json").write_text(f" \n{text}\r\n \n", newline="")
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = columns(str(tmp_path / "r.jsonl"))
    starts = [number for number, line in enumerate(f" \n{text}".split("\n"), 1) if line.strip().startswith('{"user"')]
    if indent is None:
        starts = [2] * len(rows)
    elif not starts:  # the brace and the first name are in lines of their own
        starts = [n - 1 for n, line in enumerate(f" \n{text}".split("\n"), 1) if line.strip().startswith('"user"')]
    expected["line"] = starts
    assert columns(str(tmp_path / "r.json")) == expected
    for part in (3, 50, 333):
        monkeypatch.setattr("jfi.data.io.text.PART", part)
        assert columns(str(tmp_path / "r.json")) == expected


def message(path: str) -> str:
    with pytest.raises(DataError) as caught:
        for table in read_blocks(path, ["user"]):
            table.strings("user")
    return str(caught.value).rsplit("/", 1)[-1]


OBJECT = 'must be an object such as {"user_id": 1}'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('[{"user": 1},\n{"user": 2},]', f"r.json:2: an element of the array is missing; it {OBJECT}"),
        ('[{"user": 1},\n\n,{"user": 2}]', f"r.json:3: an element of the array is missing; it {OBJECT}"),
        ("[,]", f"r.json:1: an element of the array is missing; it {OBJECT}"),
        ('\n[{"user": 1},\n{"user": 2}', "r.json:3: the array that goes on here is not closed"),
        ('[{"user": 1},\n{"user": "2]\n', "r.json:2: the array that goes on here is not closed"),
        ("[", "r.json:2: the array that goes on here is not closed"),
        ('[{"user": 1}\n]\n{"user": 2}', "r.json:2: text follows the array"),
        ('[{"user": 1}\n]]', "r.json:2: text follows the array"),
        ('[{"user": 1},\n 7]', f"r.json:2: {OBJECT}"),
        ('[{"user": 1},\n [{"user": 1}]]', f"r.json:2: {OBJECT}"),
        ('[{"user": 1},\n {"user": 2} {"user": 3}]', "r.json:2: not JSON: extra data at column 13 of the element"),
        ('[{"user": 1},\n {"user":\n 2,}]', "r.json:2: not JSON: "),
        ('[{"user": 1},\n {"user": 1]}]', "r.json:2: not JSON: expecting ',' delimiter at column 11 of the element"),
        ('[{"user": 1},\n {"user": "a\nb"}]', "r.json:2: not JSON: unterminated string starting at at column 10"),
        ('[{"user": 1}, {"user": 1}, \x0b\n{"user": 1}]', "r.json:1: not JSON: expecting value at column 1"),
        ('[{"user": 1},\n {"user": 2, "user": 3}]', "r.json:2: 'user' is twice in one object"),
        ('[{"user": 1},\n {"user": {"a": 1}}]', "r.json:2: 'user' is an object; it must have one value per row"),
        ('[{"user": 1},\n {"user": [1]}]', "r.json:2: 'user' is a list here and a single value in other rows"),
        ('[{"user": 1},\n {"user": "\\ud800"}]', "r.json:2: 'user' holds half of a surrogate pair"),
        ("[" * 5000 + "]" * 5000, f"r.json:1: {OBJECT}"),
    ],
)
def test_a_fault_has_its_line(write, monkeypatch, content, expected):
    path = write("r.json", content)
    found = message(path)
    assert found.startswith(expected)
    monkeypatch.setattr("jfi.data.io.text.PART", 5)
    assert message(path).split(":")[1] == found.split(":")[1]


@pytest.mark.parametrize("content", ["[]", " [ \n ]\n", "[\n]"])
def test_an_empty_array_has_no_rows(write, content):
    assert len(read_table(write("r.json", content), ["user"])) == 0


def test_a_column_that_later_parts_lack_is_missing_there(write, monkeypatch):
    monkeypatch.setattr("jfi.data.io.text.PART", 20)
    path = write("r.jsonl", *['{"user": 1, "x": 2, "tags": ["a"]}'] * 3, *['{"user": 1}'] * 5)
    assert columns(path)["x"] == ["2"] * 3 + [None] * 5


def test_a_dataset_of_an_array_is_that_of_the_lines(tmp_path):
    rows = [{"user_id": i % 9, "item_id": f"i{i % 5}", "timestamp": i, "like": i % 2} for i in range(90)]
    (tmp_path / "r.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, other = (
        load_dataset(DataConfig(interactions=str(tmp_path / name), label="like")).batches("train", 32)[0]
        for name in ("r.json", "r.jsonl")
    )
    assert one.sparse_features.values().tolist() == other.sparse_features.values().tolist()
    assert one.labels.tolist() == other.labels.tolist()
