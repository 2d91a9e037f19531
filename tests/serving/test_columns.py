"""A request that is read column by column is the request that JSON's parser reads."""

import json
import random
import tracemalloc
from dataclasses import fields

import numpy as np
import pytest

from jfi.serving import requests
from jfi.serving.columns import read_plain
from jfi.serving.known import KnownValues
from jfi.serving.requests import BadRequestError, Request, RequestReader, parse
from jfi.serving.schema import Field, Limits, Schema
from jfi.serving.values import _as_int64
from jfi.sid.packing import UNKNOWN_SID
from jfi.utils.encoding import Vocabulary

ITEMS = ["1", "2", "-3", "12345678", "123456789", "", "a b", "x:y", "{é}", "日本語の長い値", "null", "true", "0"]
SCHEMA = Schema(
    user=[Field("city", "category", ["city"])],
    candidate=[Field("item", "category", ["item"]), Field("a long name: of a price", "number", mean=1.0)],
    event=[
        Field("item", "category", ["history_item"]),
        Field("kind", "category", ["history_kind"], num_buckets=7),
        Field("action", "category", ["history_action"]),
        Field("both", "cross", ["history_both"], columns=["item", "action"]),
        Field("seconds", "quantile", ["history_seconds"], edges=[1.0, 5.0]),
        Field("age", "age", num_buckets=8),
    ],
    vocabularies={"city": ["Bonn"], "item": ITEMS, "action": ["v", "b" * 40, "c" * 70], "both": ["1\x1fv", "2\x1fv"]},
)
READ = RequestReader(SCHEMA, Limits(max_candidates=6, max_history=4))


def request(draw: random.Random, odd: float) -> dict:
    """A request, with odd values in this share of the places."""

    def value(*usual: object) -> object:
        strange = [None, -3, 12345678901234567890, 1.5, "z" * 70, 'q"', "a,b", "]", "}", [], [1, 2], {}, True, 1e400]
        return draw.choice(strange if draw.random() < odd else usual)

    def rows(most: int, **of: tuple) -> list[dict]:
        return [{name: value(*usual) for name, usual in of.items()} for _ in range(draw.randrange(most))]

    items, numbers = (*ITEMS, 1, 2, 12345678, None), (0, 7, 12345678, 123456789, 2.5, 1e-3)
    actions = ("v", "v", "b" * 40, "c" * 70)
    return {
        "user": {"city": value("Bonn")},
        "history": rows(7, item=items, kind=("k", "ü"), action=actions, seconds=numbers, age=numbers),
        "candidates": rows(7, item=items, **{"a long name: of a price": numbers}),
    }


def outcome(read, body: bytes) -> Request | str:
    try:
        return read(body)
    except BadRequestError as error:
        return str(error)


def assert_same(one: Request | str, other: Request | str, body: bytes) -> None:
    assert type(one) is type(other), (one, other, body)
    if isinstance(one, str):
        assert one == other, body
        return
    for field in fields(Request):
        a, b = getattr(one, field.name), getattr(other, field.name)
        for x, y in [(a, b)] if not isinstance(a, dict) else [(a[key], b[key]) for key in a.keys() | b.keys()]:
            assert np.array_equal(x, y) and getattr(x, "dtype", None) == getattr(y, "dtype", None), (field.name, body)


def test_what_is_read_by_columns_is_what_json_reads(monkeypatch):
    """Random requests, and the same with bytes changed: equal arrays or the same refusal."""
    draw, plain, read_so = random.Random(2), [], requests.read_plain
    pieces = [b"", b'"', b",", b" ", b"0", b"-", b"{", b"]", b'":', b"\\", b"\x00", b"\xff", b"null", b"[]"]
    monkeypatch.setattr(requests, "read_plain", lambda *args: plain.append(read_so(*args)) or plain[-1])
    for _ in range(2000):
        spaces, in_ascii = draw.choice([None, (",", ":")]), draw.random() < 0.3
        body = bytearray(
            json.dumps(request(draw, draw.choice([0, 0, 0.05])), separators=spaces, ensure_ascii=in_ascii).encode()
        )
        for _ in range(draw.choice([0, 0, 1, 2])):
            at = draw.randrange(len(body))
            body[at : at + draw.randrange(3)] = draw.choice(pieces)
        assert_same(outcome(READ.read, bytes(body)), outcome(lambda body: READ(parse(body)), bytes(body)), body)
    assert sum(found is not None for found in plain) > 600


def test_plain_numbers_have_the_bits_that_json_gives_them():
    """Random decimals, some with a fault: those of JSON's parser, or None."""
    draw, read, refused = random.Random(1), 0, 0

    def number() -> str:
        whole, digits = str(draw.randrange(10 ** draw.randrange(1, 9))), draw.choice([0, 1, 3, 7, 8])
        text = whole + ("." if digits else "") + "".join(draw.choices("0123456789", k=digits))
        at = draw.randrange(len(text) + 1)
        return text if draw.random() < 0.95 else text[:at] + draw.choice([".", "e5", "-", "0", "x"]) + text[at:]

    for _ in range(3000):
        values = [number() for _ in range(draw.randrange(1, 6))]
        body = '{"rows": [' + ", ".join(f'{{"x": {value}}}' for value in values) + "]}"
        rows = read_plain(body.encode(), {"rows": ["x"]})
        found = None if rows is None else rows["rows"].columns["x"].numbers()
        if found is not None:
            assert found.tobytes() == np.array([row["x"] for row in json.loads(body)["rows"]], np.float64).tobytes(), (
                body
            )
        read, refused = read + (found is not None), refused + (found is None)
    assert read > 1000 and refused > 200


def test_plain_integers_are_those_that_semantic_ids_are_read_from():
    """Random integers, texts and nulls, some with a fault: as `_as_int64` reads the values of JSON, or None."""
    draw, read, refused = random.Random(3), 0, 0
    edges = [2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**19 - 1, 10**19, 0, -1, 99999999, 10**8, 10**16]

    def value() -> str:
        number = draw.choice(edges) if draw.random() < 0.2 else draw.randrange(-(10**9), 10 ** draw.randrange(1, 20))
        text = draw.choice(["{}", "{}", '"{}"', '"0{}"', "null"]).format(number)
        at = draw.randrange(len(text) + 1)
        return text if draw.random() < 0.95 else text[:at] + draw.choice(["e5", "-", "0", "x", ".0"]) + text[at:]

    for _ in range(4000):
        values = [value() for _ in range(draw.randrange(1, 6))]
        body = '{"rows": [' + ", ".join(f'{{"x": {value}}}' for value in values) + "]}"
        rows = read_plain(body.encode(), {"rows": ["x"]})
        found = None if rows is None else rows["rows"].columns["x"].integers(UNKNOWN_SID)
        if found is not None:
            assert found.dtype == np.int64 and found.tolist() == [
                _as_int64(row["x"]) for row in json.loads(body)["rows"]
            ], body
        read, refused = read + (found is not None), refused + (found is None)
    assert read > 1500 and refused > 500


def test_semantic_ids_of_plain_requests_are_checked():
    layout = {"num_digits": 25, "codebook_size": 0}
    schema = Schema([], [Field("sid", "sid", ["item_sid"], layout=layout)], [], {}, codec="abc")
    reader = RequestReader(schema, Limits(max_candidates=6, max_history=4))

    def outcome_of(*sids: object) -> Request | str:
        body = json.dumps({"user": {}, "candidates": [{"sid": sid} for sid in sids], "codec": "abc"}).encode()
        one, other = outcome(reader.read, body), outcome(lambda body: reader(parse(body)), body)
        assert_same(one, other, body)
        return one

    assert outcome_of(5, "13", None, -1).ids["item_sid"].tolist() == [5, 13, -1, -1]
    assert "candidates[1].sid is 255, which is no ID" in outcome_of(5, 255)
    assert "candidates[1].sid must be" in outcome_of(5, "x") and "got 2.5" in outcome_of(2.5)
    assert "candidates[0].sid must be" in outcome_of(2**63)


@pytest.mark.parametrize(
    "body",
    [
        b'{"user": {}, "history": [{"x": 1}], "history": []}',
        b'{"user": "history", "history": [{"x": 1}]}',
        b'{"user": {"history": [{"x": 1}]}, "other": 1}',
        b'{"history": [{"x": "a"b"}, {"x": 1"}]}',
        b'{"history": [{"x": 1}, {"x": 2}],}',
        b'{"history": [{"x": 1} {"x": 2}]}',
        b'{"history": [{"x": 1},{"x": 2}, {"x": 3}]}',
        b'{"history": [{"x": 1}, {"y": 2}]}',
        b'{"history": [{"x":  "1"}]}',
        b'{"history": [{"x": "\\u0031"}]}',
        b'{"history": [{"x": "\xff"}]}',
        b'{"history": [{"x": "\t"}]}',
    ],
)
def test_what_is_not_plain_is_left_to_json(body):
    assert read_plain(body, {"history": ["x"]}) is None


#: Bodies that are not plain, of some MB.
LARGE = {
    "lists": b'{"user": {"u": [' + b"[]," * 1_000_000 + b'[]]}, "history": [{"x": 1}]}',
    "lists without an end": b'{"user": {}, ' + b'"history": [' * 300_000 + b"}",
    "a key again and again": b"{" + b'"history": [{"x": 1}],' * 200_000 + b'"user": {}}',
    "many fields": b'{"user": {' + b'"u": 1, ' * 500_000 + b'"u": 1}, "history": [{"x": 1}]}',
    "a long row": b'{"user": {}, "history": [{' + b'"x": 1, ' * 500_000 + b'"x": 1}]}',
    "commas": b'{"user": {}, "history": [{"x": 1}' + b"," * 4_000_000 + b'{"x": 1}]}',
}


@pytest.mark.parametrize("case", LARGE)
def test_large_bodies_that_are_not_plain_are_left_to_json_with_little_memory(case):
    """One call of json.loads, or arrays by comma, would take more."""
    tracemalloc.start()
    assert read_plain(LARGE[case], {"history": ["x"]}) is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * len(LARGE[case])


def test_a_key_far_before_its_list_is_left_to_json():
    assert read_plain(b'{"u": [[], []], "history":' + b" " * 5000 + b'[{"x": 1}]}', {"history": ["x"]}) is None


def test_values_of_long_columns_are_read_in_pieces():
    values = [i if i % 3 else float(f"{i}e1") for i in range(10_001)]
    body = b'{"rows": [' + b",".join(b'{"x": %s}' % json.dumps(value).encode() for value in values) + b"]}"
    rows = read_plain(body, {"rows": ["x"]})["rows"]
    assert rows.columns["x"].values() == values and rows[4000:9000].columns["x"].values() == values[4000:9000]


def test_rows_that_the_limit_drops_are_json_all_the_same():
    good = {"item": "1", "kind": "k", "action": "v", "seconds": 1, "age": 2}
    body = json.dumps(
        {"user": {"city": None}, "history": [good] * 6, "candidates": [{"item": 1, "a long name: of a price": 1}]}
    )
    assert READ.read(body.encode()).num_events == 4
    with pytest.raises(BadRequestError, match="not JSON"):
        READ.read(body.replace('"age": 2', '"age": 02', 1).encode())


@pytest.mark.parametrize(
    "values",
    [
        [str(i) for i in range(3000)],
        ["", "a", "12345678", "123456789", "é" * 7, "q" * 32],
        ["b", "q" * 64, "q" * 65, "a\0", "a", "é" * 32, "é" * 33],  # some too long for a table
        ["q" * 65],
        ["a\0", "a"],
        ["\ud800"],
        [],
    ],
    ids=["many", "lengths", "long", "all long", "zero byte", "surrogate", "none"],
)
def test_a_table_of_known_values_gives_the_ids_of_the_vocabulary(values):
    draw, known, wanted = random.Random(0), KnownValues(values), Vocabulary(values)
    strange = [None, "", "a", "a\0", "\0", "\ud800", "q" * 31, "q" * 34, "q" * 66, "123456789\0", "99999"]
    for _ in range(20):
        asked = [draw.choice([*values, *strange]) for _ in range(draw.randrange(200))]
        found = known.ids(asked)
        assert found.dtype == np.int64 and found.tolist() == wanted.ids(asked).tolist()
