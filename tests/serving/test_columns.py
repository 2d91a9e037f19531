"""A request by columns is the request by rows, and both are what a plain reading of their values gives."""

import copy
import json
import random
import re
import tracemalloc
from dataclasses import fields

import numpy as np
import pytest

from jfi.serving import validation as known
from jfi.serving.requests import BadRequestError, Request, RequestReader
from jfi.serving.schema import Field, Limits, Schema
from jfi.serving.validation import KnownValues, sids
from jfi.utils.encoding import HashBuckets, Vocabulary, age_buckets, cross, quantile_ids, standardize, text_of

ITEMS = ["1", "2", "-3", "12345678", "123456789", "a b", "x:y", "{é}", "日本語の長い値", "null", "true", "0"]
ACTIONS = ["v", "b" * 40, "c" * 70]
PRICE = "a long name: of a price"
SCHEMA = Schema(
    user=[Field("city", "category", ["city"])],
    candidate=[
        Field("item", "category", ["item"]),
        Field(PRICE, "number", mean=1.0),
        Field("tags", "categories", ["tags"]),
    ],
    event=[
        Field("item", "category", ["history_item"]),
        Field("kind", "category", ["history_kind"], num_buckets=7),
        Field("action", "category", ["history_action"], default="v"),
        Field("tags", "slots", ["history_tags_0", "history_tags_1"]),
        Field("both", "cross", ["history_both"], columns=["item", "action"]),
        Field("seconds", "quantile", ["history_seconds"], edges=[1.0, 5.0]),
        Field("age", "age", num_buckets=8),
    ],
    vocabularies={
        "city": ["Bonn"],
        "item": ITEMS,
        "action": ACTIONS,
        "tags": [*ITEMS, "t"],
        "both": ["1\x1fv", "2\x1fv"],
    },
)
LIMITS = Limits(max_candidates=6, max_history=4)
READ = RequestReader(SCHEMA, LIMITS)


#: Values of which some fields take none.
ODD = [None, -3, 12345678901234567890, 1.5, "z" * 70, 'q"', "a,b", "]", "}", [], [1, 2], {}, True, "a\0", -1]


def request(draw: random.Random, odd: float) -> dict:
    """A request by rows; this share of requests has an odd value in one place."""

    def rows(most: int, **of: tuple) -> list[dict]:
        return [{name: draw.choice(usual) for name, usual in of.items()} for _ in range(draw.randrange(most))]

    texts = draw.random() < 0.3
    items, numbers = (*ITEMS, *([] if texts else [1, 2, 12345678, None])), (0, 7, 12345678, 123456789, 2.5, 1e-3)
    tags = (None, [], ["t"], [1, "t", None, "", True], ["-3", "new"])
    actions = (*ACTIONS, *ACTIONS, "new", None)
    whole = {
        "user": {"city": draw.choice(["Bonn", None])},
        "history": rows(7, item=items, kind=("k", "ü", 5), action=actions, tags=tags, seconds=numbers, age=numbers),
        "candidates": rows(7, item=items, tags=tags, **{PRICE: numbers}),
    }
    if draw.random() < odd:
        part = draw.choice([whole["user"], *whole["history"], *whole["candidates"]])
        part[draw.choice([*part])] = draw.choice(ODD)
    return whole


def by_columns(whole: dict) -> dict:
    """The same request by columns, where it has a row."""
    parts = {name: whole[name] for name in ("candidates", "history") if whole.get(name)}
    return whole | {name: {field: [row[field] for row in rows] for field in rows[0]} for name, rows in parts.items()}


def outcome(read, body: object) -> Request | str:
    """The request, or why it is refused; faults of columns have the place of those of rows."""
    try:
        return read(body)
    except BadRequestError as error:
        return re.sub(r"^(\w+)\.([\w: ]+)\[(\d+)\]", r"\1[\3].\2", str(error))


def assert_same(one: Request | str, other: Request | str, body: object) -> None:
    assert type(one) is type(other), (one, other, body)
    if isinstance(one, str):
        assert one == other, body
        return
    for field in fields(Request):
        if field.name == "now":  # of the clock, where a request has no time
            continue
        a, b = getattr(one, field.name), getattr(other, field.name)
        for x, y in [(a, b)] if not isinstance(a, dict) else [(a[key], b[key]) for key in a.keys() | b.keys()]:
            assert np.array_equal(x, y) and getattr(x, "dtype", None) == getattr(y, "dtype", None), (field.name, body)


def encode(text: str, **how: object) -> bytes:
    return json.dumps(text, **how).encode()


def expected(whole: dict) -> Request:
    """The valid request as its values are read one by one."""
    history, candidates = whole["history"][-LIMITS.max_history :], whole["candidates"]
    vocabulary = {name: Vocabulary(values) for name, values in SCHEMA.vocabularies.items()}
    vocabulary["kind"] = HashBuckets(7)

    def texts(rows: list[dict], name: str) -> list[str | None]:
        return [text_of(row[name]) for row in rows]

    def numbers(rows: list[dict], name: str) -> np.ndarray:
        return np.array([np.nan if row[name] is None else row[name] for row in rows], np.float64)

    def tags(rows: list[dict]) -> list[list[str]]:
        return [[text for one in row["tags"] or [] if (text := text_of(one)) is not None] for row in rows]

    ids = {"city": vocabulary["city"].ids(texts([whole["user"]], "city"))}
    ids["item"] = vocabulary["item"].ids(texts(candidates, "item"))
    ids["tags"] = vocabulary["tags"].ids([one for row in tags(candidates) for one in row])
    for name in ("item", "kind"):
        ids[f"history_{name}"] = vocabulary[name].ids(texts(history, name))
    ids["history_action"] = vocabulary["action"].ids([text or "v" for text in texts(history, "action")])
    for slot in (0, 1):
        own = [row[slot] if len(row) > slot else None for row in tags(history)]
        ids[f"history_tags_{slot}"] = vocabulary["tags"].ids(own)
    ids["history_both"] = vocabulary["both"].ids(cross(texts(history, "item"), texts(history, "action")))
    ids["history_seconds"] = quantile_ids(numbers(history, "seconds"), np.array([1.0, 5.0]))
    dense = standardize(numbers(candidates, PRICE), 1.0, 1.0)[:, None]
    counts = {"tags": np.array([len(row) for row in tags(candidates)], np.int64)}
    ages = age_buckets(numbers(history, "age"), 8)
    return Request(ids, counts, ages, dense, len(history), len(candidates))


@pytest.mark.parametrize("few", [True, False], ids=["dicts", "tables"])
def test_columns_and_rows_are_what_their_values_are_one_by_one(few, monkeypatch):
    """Random requests, as other programs write JSON: equal arrays, or the same fault at the same place."""
    if not few:
        monkeypatch.setattr(known, "_FEW", 0)
    read, draw, count = RequestReader(SCHEMA, LIMITS), random.Random(2), 0
    for _ in range(2000):
        whole = request(draw, 0.5)
        how = {"separators": draw.choice([None, (",", ":")]), "ensure_ascii": draw.random() < 0.3}
        how["indent"] = draw.choice([None, None, 1])
        one = outcome(read.read, encode(whole, **how))
        assert_same(one, outcome(read.read, encode(by_columns(whole), **how)), whole)
        mixed = by_columns(whole) | {"history": whole["history"]}
        assert_same(one, outcome(read.read, encode(mixed, **how)), whole)
        if not isinstance(one, str):
            assert_same(one, expected(whole), whole)
            count += 1
    assert count > 1000


def test_changed_bytes_are_refused_or_read():
    draw, statuses = random.Random(3), []
    pieces = [b"", b'"', b",", b" ", b"0", b"-", b"{", b"]", b'":', b"\\", b"\x00", b"\xff", b"null", b"[]", b":"]
    for _ in range(3000):
        whole = request(draw, 0.3)
        body = bytearray(encode(whole if draw.random() < 0.5 else by_columns(whole), ensure_ascii=False))
        for _ in range(draw.choice([1, 1, 2])):
            at = draw.randrange(len(body))
            body[at : at + draw.randrange(3)] = draw.choice(pieces)
        statuses.append(isinstance(outcome(READ.read, bytes(body)), str))
    assert 300 < sum(statuses) < 2900


EVENTS = {
    "item": ["1", "2"],
    "kind": ["k", "k"],
    "action": ["v", None],
    "tags": [[], None],
    "seconds": [1, None],
    "age": [3, 2],
}
GOOD = {"user": {"city": None}, "history": EVENTS, "candidates": {"item": [1], PRICE: [2.5], "tags": [["t"]]}}


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (["history"], [], None),
        (["history"], {name: [] for name in EVENTS}, None),
        (["history"], None, r"history must be object \| array, got null"),
        (["history"], {}, "history lacks the field 'item'"),
        (["history", "age"], 3, "history.age must be array, got int"),
        (["history", "age"], None, "history.age must be array, got null"),
        (["history", "age"], [3], "history must have as many values of each field, got 2 of item, .*, 1 of age"),
        (["history", "age"], [3] * 3, "history must have as many values of each field, got 2 of item, .*, 3 of age"),
        (["history", "ages"], [3, 2], "history has an unknown field 'ages'; did you mean 'age'"),
        (["history", "age", 1], "2", r"history.age\[1\] must be float, got str"),
        (["history", "tags", 1], "t", r"history.tags\[1\] must be array \| null, got str"),
        (["history", "tags", 1], [{}], r"history.tags\[1\]\[0\] must be bool"),
        (["history", "tags", 0], ["t"] * 1001, r"history.tags\[0\] must be array of length <= 1000"),
        (["history", "item", 1], {}, r"history.item\[1\] must be bool .* null, got object"),
        (["history", "kind", 1], [], r"history.kind\[1\] must be bool .* null, got array"),
        (["candidates"], {name: [] for name in GOOD["candidates"]}, "candidates.item must be array of length >= 1"),
        (
            ["candidates"],
            {name: [1] * 7 for name in GOOD["candidates"]},
            "candidates.item must be array of length <= 6",
        ),
        (["candidates", PRICE, 0], True, rf"candidates.{PRICE}\[0\] must be float \| null, got bool"),
        (["user", "city"], ["Bonn"], r"user.city must be bool \| int"),
        (["user"], [], "user must be object, got array"),
    ],
)
def test_a_fault_of_columns_is_named_by_its_place(path, value, reason):
    whole = part = copy.deepcopy(GOOD)
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    if reason is None:
        assert READ.read(encode(whole)).num_events == 0
        return
    with pytest.raises(BadRequestError, match=f"^{reason}"):
        READ.read(encode(whole))


def test_the_place_in_columns_that_are_cut_is_the_one_in_the_request():
    whole = copy.deepcopy(GOOD)
    whole["history"] = {name: values * 3 for name, values in EVENTS.items()}
    assert READ.read(encode(whole)).num_events == 4
    for row in (0, 4):  # of a dropped event too
        wrong = copy.deepcopy(whole)
        wrong["history"]["age"][row] = "old"
        with pytest.raises(BadRequestError, match=rf"history.age\[{row}\] must be float, got str"):
            READ.read(encode(wrong))


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize(
    ("once", "twice", "key"),
    [
        ('"user":', '"user": {"city": 1}, "user":', "user"),
        ('"history":', '"history": [], "history":', "history"),
        ('"city":', '"city": 1, "city":', "city"),
        ('"age":', '"age": VALUE, "age":', "age"),
        ('"item":', '"item": VALUE, "item":', "item"),
        ('"seconds":', r'"\u0061ge": VALUE, "seconds":', "age"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(rows, once, twice, key):
    parts = {name: GOOD[name] for name in ("history", "candidates")}
    if rows:
        parts = {
            name: [dict(zip(part, values, strict=True)) for values in zip(*part.values(), strict=True)]
            for name, part in parts.items()
        }
    body = json.dumps(GOOD | parts)
    READ.read(body.encode())
    with pytest.raises(BadRequestError, match=f"^the request has an object with the field '{key}' twice$"):
        READ.read(body.replace(once, twice.replace("VALUE", "1" if rows else "[1]"), 1).encode())


def test_colons_of_texts_are_no_keys():
    whole = copy.deepcopy(GOOD)
    whole["history"]["kind"], whole["candidates"]["item"] = ["a:b", "::"], ["x:y"]
    body = json.dumps(whole)
    for text in (body, body.replace("::", r"\u003a:"), body.replace('": ', '":\n')):
        assert READ.read(text.encode()).ids["item"].tolist() == [1 + ITEMS.index("x:y")]


#: Bodies of a MB.
LARGE = {
    "lists": b'{"user": [' + b"[]," * 350_000 + b"[]]}",
    "objects": b'{"user": [' + b"{}," * 350_000 + b"{}]}",
    "nested lists": b'{"user": [' + (b"[" * 900 + b"]" * 900 + b",") * 580 + b"1]}",
    "lists without an end": b"[" * 1_000_000,
    "a key again and again": b"{" + b'"history": [{"x": 1}],' * 45_000 + b'"user": {}}',
    "many fields": b'{"user": {' + b",".join(b'"%d": 1' % i for i in range(80_000)) + b"}}",
    "integers": b'{"user": [' + b"1," * 500_000 + b"1]}",
    "a long number": b'{"user": ' + b"9" * 1_000_000 + b"}",
    "a long text": b'{"user": "' + b"\\u00e9" * 160_000 + b'"}',
    "history of lists": encode(GOOD).replace(b'"item": ["1"', b'"item": [' + b"[]," * 350_000 + b'"1"'),
    "a dropped event of lists": encode(GOOD | {"history": [[[]] * 250_000, *[dict.fromkeys(EVENTS)] * 4]}),
}


@pytest.mark.parametrize("case", LARGE)
def test_large_bodies_take_memory_in_proportion_to_their_size(case):
    tracemalloc.start()
    with pytest.raises(BadRequestError) as refused:
        READ.read(LARGE[case])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * len(LARGE[case]) and len(str(refused.value)) < 400


def test_semantic_ids_are_checked():
    layout = {"num_digits": 25, "codebook_size": 0}
    schema = Schema([], [Field("sid", "sid", ["item_sid"], layout=layout)], [], {}, codec="abc")
    reader = RequestReader(schema, Limits(max_candidates=6, max_history=4))

    def outcome_of(*sids: object) -> Request | str:
        rows = {"user": {}, "candidates": [{"sid": sid} for sid in sids], "codec": "abc"}
        one, other = outcome(reader.read, encode(rows)), outcome(reader.read, encode(by_columns(rows)))
        assert_same(one, other, rows)
        return one

    assert outcome_of(5, "13", None, -1).ids["item_sid"].tolist() == [5, 13, -1, -1]
    assert "candidates[1].sid is 255, which is no ID" in outcome_of(5, 255)
    assert "candidates[1].sid must be a semantic ID: an integer of 64 bits or its text, or null, got 'x'" in outcome_of(
        5, "x"
    )
    assert "candidates[0].sid must be a semantic ID: an integer of 64 bits or its text, or null, got 2.5" in outcome_of(
        2.5
    )
    for outside in (2**63, 2**64, -(2**63) - 1, 10**30, 2.0**53 + 2, True, []):
        assert "candidates[0].sid must be" in outcome_of(outside)
    for outside in (2**63, -(2**63) - 1):
        assert "candidates[1].sid must be a semantic ID: an integer of 64 bits" in outcome_of(5, str(outside))
    edges, wide = [2**63 - 1, str(2**63 - 1)], {"num_digits": 63, "codebook_size": 2}
    assert sids("sid", wide, edges, str).tolist() == list(map(int, edges))


@pytest.mark.parametrize(
    "values",
    [
        [str(i) for i in range(3000)],
        ["a", "12345678", "123456789", "é" * 7, "q" * 32],
        ["b", "q" * 64, "q" * 65, "a\0", "a", "é" * 32, "é" * 33],
        ["a\0", "a"],
        ["\ud800"],
        ["-3", "7", "-0", "07", "٣", "9" * 19, "9" * 5000, str(-(2**63)), str(2**64 - 1)],
        [],
    ],
    ids=["many", "lengths", "long", "zero byte", "surrogate", "integers", "none"],
)
@pytest.mark.parametrize("few", [0, 2**12], ids=["table", "dict"])
def test_known_values_give_the_ids_of_the_vocabulary(values, few, monkeypatch):
    monkeypatch.setattr(known, "_FEW", few)
    draw, found, wanted = random.Random(0), KnownValues(values), Vocabulary(values)
    strange = [7, True, None, "", "a", "a\0", "\0", "\ud800", "q" * 31, "q" * 34, "q" * 66, "123456789\0", "99999"]
    for _ in range(20):
        asked = [draw.choice([*values, *strange]) for _ in range(draw.randrange(200))]
        ids = found.ids(asked)
        assert ids.dtype == np.int64 and ids.tolist() == wanted.ids(asked).tolist()
