"""Requests that are not as they should be are refused by their place."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from jfi.serving import validation as known
from jfi.serving.requests import BadRequestError, RequestReader
from jfi.serving.schema import Field, Limits, Schema
from jfi.serving.validation import MAX_PARTS, BodyType
from jfi.state.layout import layout_of
from jfi.utils.encoding import HashBuckets, Vocabulary, are_canonical, text_of

SCHEMA = Schema(
    user=[Field("city", "category", ["city"]), Field("income", "number", mean=10.0, deviation=2.0)],
    candidate=[Field("item", "category", ["item"]), Field("tags", "categories", ["tags"])],
    event=[
        Field("item", "category", ["history_item"]),
        Field("tags", "slots", ["history_tags_0", "history_tags_1"]),
        Field("seconds", "quantile", ["history_seconds"], edges=[1.0, 5.0]),
        Field("age", "age", num_buckets=8),
    ],
    vocabularies={"city": ["Bonn"], "item": ["1", "2"], "tags": ["a", "b", "c"]},
)
READ = RequestReader(SCHEMA, Limits(max_candidates=3, max_history=4))


def request() -> dict:
    return {
        "user": {"city": "Bonn", "income": 14},
        "history": [
            {"item": 2, "tags": ["c", "a", "b"], "seconds": 5, "age": 4},
            {"item": "9", "tags": [], "seconds": None, "age": 3.9},
            {"item": None, "tags": ["", "b"], "seconds": 0.5, "age": 1e9},
        ],
        "candidates": [{"item": "1", "tags": ["a", "zzz"]}, {"item": 2, "tags": []}],
    }


def test_values_become_ids_as_in_training():
    encoded = READ(request())
    ids = {key: values.tolist() for key, values in encoded.ids.items()}
    assert ids == {
        "city": [1],
        "item": [1, 2],
        "tags": [1, 0],
        "history_item": [2, 0, 0],
        "history_tags_0": [3, 0, 2],
        "history_tags_1": [1, 0, 0],
        "history_seconds": [3, 0, 1],
    }
    assert encoded.counts["tags"].tolist() == [2, 0]
    assert encoded.ages.tolist() == [3, 2, 7]
    assert encoded.dense.tolist() == [[2.0], [2.0]]


def changed(path: list, value: object) -> dict:
    """A request with something else at a place; `...` takes away what is there."""
    whole = part = request()
    for step in path[:-1]:
        part = part[step]
    if value is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return whole


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (["usr"], {}, "unknown field 'usr'; did you mean 'user'"),
        (["history"], ..., "the request lacks the field 'history'"),
        (["user"], [], "user must be object, got array"),
        (["user", "cty"], "Bonn", "user has an unknown field 'cty'; did you mean 'city'"),
        (["user", "income"], "14", r"user.income must be float \| null, got str"),
        (["user", "income"], 10**400, "user.income: Number out of range"),
        (["user", "income"], True, r"user.income must be float \| null, got bool"),
        (["user", "income"], 1e39, r"user.income must be float <= 3\.4028234663852886e\+38"),
        (["candidates"], [], "candidates must be array of length >= 1"),
        (["candidates"], {}, "candidates must not be empty"),
        (["history"], 3, r"history must be object \| array, got int"),
        (["history"], {}, "history lacks the field 'item'"),
        (["history", 1], None, r"history\[1\] must be object, got null"),
        (["history", 2, "item"], ..., r"history\[2\] lacks the field 'item'"),
        (["history", 2, "item"], [1], r"history\[2\].item must be bool \| int \| float \| str \| null, got array"),
        (["history", 0, "tags"], "c", r"history\[0\].tags must be array \| null, got str"),
        (["history", 0, "tags"], ["c", {}], r"history\[0\].tags\[1\] must be bool .* null, got object"),
        (["history", 1, "tags"], ["c"] * 1001, r"history\[1\].tags must be array of length <= 1000"),
        (["candidates", 1, "tags"], ["c"] * 1001, r"candidates\[1\].tags must be array of length <= 1000"),
        (["history", 1, "seconds"], float("inf"), "the request is not JSON"),
        (["history", 1, "seconds"], True, r"history\[1\].seconds must be float \| null, got bool"),
        (["history", 1, "age"], None, r"history\[1\].age must be float, got null"),
        (["history", 1, "age"], -1, r"history\[1\].age must be float >= 0.0"),
        (["candidates"], [{}] * 4, "candidates must be array of length <= 3"),
        (
            ["candidates", 1, "item"],
            {},
            r"candidates\[1\].item must be bool \| int \| float \| str \| null, got object",
        ),
        (["candidates", 1, "price"], 1, r"candidates\[1\] has an unknown field 'price'; known: item, tags"),
    ],
)
def test_a_fault_is_named_by_its_place(path, value, reason):
    with pytest.raises(BadRequestError, match=reason):
        READ.read(json.dumps(changed(path, value)).encode())


def test_near_names_are_not_looked_for_where_a_name_is_huge(monkeypatch):
    looked = []
    monkeypatch.setattr("jfi.utils.errors.get_close_matches", lambda name, *_, **__: looked.append(len(name)))
    for length in (100, 101, 10**6):
        with pytest.raises(BadRequestError, match=r"user has an unknown field 'a+\.\.\.; known: city, income$"):
            READ(changed(["user", "a" * length], 1))
    assert looked == [100]


def test_a_list_may_be_as_long_as_the_schema_says():
    encoded = READ(changed(["candidates", 1, "tags"], ["c"] * 1000))
    assert encoded.counts["tags"].tolist() == [2, 1000]


def test_null_is_a_list_without_values():
    """Of candidates, of events and of the user."""
    user = Field("tags", "categories", ["user_tags"])
    schema = replace(SCHEMA, user=[user, *SCHEMA.user], candidate=[replace(user, keys=["tags"])])
    read, requests = RequestReader(schema, READ.limits), []
    for empty in (None, [], [None], [""]):
        candidates = [{"tags": tags} for tags in (empty, ["b", None, "zzz"], empty)]
        whole = request() | {"user": {"tags": empty, "city": None, "income": None}, "candidates": candidates}
        whole["history"][1]["tags"] = empty
        requests.append(read.read(json.dumps(whole).encode()))
    for one in requests:
        assert {key: counts.tolist() for key, counts in one.counts.items()} == {"user_tags": [0], "tags": [0, 2, 0]}
        assert one.ids["tags"].tolist() == [2, 0] and one.ids["user_tags"].tolist() == []
        assert one.ids["history_tags_0"].tolist() == [3, 0, 2]


def test_the_place_in_a_history_that_is_cut_is_the_one_in_the_request():
    long = changed(["history"], request()["history"] * 3)
    assert READ(long).num_events == 4
    for row in (0, 6):
        long["history"][row] = dict(long["history"][row], age="old")
        with pytest.raises(BadRequestError, match=rf"history\[{row}\].age must be float, got str"):
            READ(long)
        long["history"][row] = request()["history"][0]


@pytest.mark.parametrize(
    "body",
    [
        *[b"", b"{", b'{"a": NaN}', b"\xff", b'{"a": 1}}'],
        *[b'{"a": "\\ud800"}', b'\xef\xbb\xbf{"a": 1}', '{"a": 1}'.encode("utf-16"), b'{"a": 1}{}', b"[1,]"],
    ],
    ids=range(10),
)
def test_what_is_no_json_is_refused(body):
    with pytest.raises(BadRequestError, match=r"^the request is not JSON: "):
        BodyType(dict[str, float | str] | list[float], {"": []}).read(body)


def test_rows_and_lists_are_counted_before_anything_is_made_of_them(monkeypatch):
    """Wherever they are; and the rows of candidates before their context is written into each."""
    for brackets in (b"[]", b"{}"):
        body, anything = b"[" + b",".join([brackets] * MAX_PARTS) + b"]", BodyType(Any, {"": []})
        with pytest.raises(BadRequestError, match=f"at most 65536 lists and objects, got {MAX_PARTS + 1}$"):
            anything.read(body)
        assert len(anything.read(body.replace(brackets + b",", b"", 2))) == MAX_PARTS - 2
    monkeypatch.setattr("jfi.serving.requests.TableColumns", None)
    schema = replace(SCHEMA, user_id="user")
    reader = RequestReader(schema, READ.limits, state=layout_of(schema, 4).info)
    for candidates, place in (([{}] * 4, ""), ({"item": [1] * 4}, ".item"), ({"item": [1], "tags": [[]] * 4}, ".tags")):
        with pytest.raises(BadRequestError, match=f"candidates{place} must be array of length <= 3"):
            reader({"user": {}, "candidates": candidates, "context": {"tags": []}})


def test_a_field_that_is_there_twice_is_named_in_a_small_body():
    for size, named in ((1000, " 'a' twice"), (100_000, " twice")):
        body = b'{"a": 1, "a": 2, "b": [' + b"1," * size + b"1]}"
        with pytest.raises(BadRequestError, match=f"an object with (a|the) field{named}$"):
            BodyType(Any, {"": []}).read(body)


def test_an_object_without_fields_is_an_object():
    """As the user of a model that reads nothing of them, and rows of such candidates."""
    read = RequestReader(Schema([], [], []), READ.limits)
    assert read({"user": {}, "candidates": [{}, {}]}).num_candidates == 2
    for row in ([], ""):
        with pytest.raises(BadRequestError, match=r"user must be object, got (array|str)"):
            read({"user": row, "candidates": [{}]})


def test_candidates_are_all_objects_or_all_ids():
    read = RequestReader(replace(SCHEMA, item_id="item"), READ.limits)
    context = {"tags": []}
    for candidates in ([1, {"item": 2}], [{"item": 2}, 1]):
        with pytest.raises(BadRequestError, match=r"^candidates\[1\] is an? .*, and candidates\[0\] is not"):
            read({"user": {"city": None, "income": None}, "history": [], "candidates": candidates, "context": context})


@pytest.mark.parametrize("few", [True, False], ids=["dict", "table"])
@pytest.mark.parametrize("buckets", [0, 7])
def test_a_value_has_one_text(buckets, few, monkeypatch):
    """As a value and in a list, alone and among others of its type and of other types, by rows and by columns."""
    if not few:
        monkeypatch.setattr(known, "_FEW", 0)
    texts = ["7", "0.5", "true", "10000000000000000", "007", "1e3", "0", "-3", "é:,"]
    kinds = {"item": "category", "tags": "categories"}
    fields = [Field(name, kind, [name], num_buckets=buckets) for name, kind in kinds.items()]
    schema = Schema(user=[], candidate=fields, event=[], vocabularies=dict.fromkeys(kinds, texts))
    read = RequestReader(schema, Limits(max_candidates=100, max_history=1))
    vocabulary = HashBuckets(buckets) if buckets else Vocabulary(texts)
    same = {
        "7": ["7", "7.0", '"7"', '"7.0"', '"7.00"', "7e0"],
        "0": ["0", "-0", "0.0", "-0.0", '"0"', '"-0"', '"-0.0"'],
        "-3": ["-3", "-3.0", '"-3"', '"-3.0"'],
        "0.5": ["0.5", "0.50", '"0.50"', "5e-1"],
        "true": ["true", '"true"', '"True"', '"TRUE"'],
        "10000000000000000": ["10000000000000000", "1e16", '"1e+16"', "1e+16"],
        "007": ['"007"'],
        "1e3": ['"1e3"'],
        "é:,": ['"é:,"', '"\\u00e9\\u003a,"', '"\\u00e9:\\u002c"'],
        None: ["null", '""'],
    }
    (filler,) = vocabulary.ids(["zzz"])
    for text, written in same.items():
        (expected,) = vocabulary.ids([text])
        for value in written:
            for others in ([], [value], ['"zzz"'], ["12345"], ["null", "true", "1.5", '"7"']):
                items, tags = ", ".join([value, *others]), ", ".join([f"[{value}]"] * (1 + len(others)))
                rows = ", ".join(f'{{"item": {one}, "tags": [{value}]}}' for one in [value, *others])
                for candidates in (f"[{rows}]", f'{{"item": [{items}], "tags": [{tags}]}}'):
                    found = read.read(f'{{"user": {{}}, "candidates": {candidates}}}'.encode())
                    assert found.ids["item"][0] == expected, (value, others)
                    assert set(found.ids["tags"].tolist()) == (set() if text is None else {expected}), value
                    if others == ['"zzz"']:
                        assert found.ids["item"][1] == filler


def test_texts_that_are_canonical_stay_as_they_are():
    draw, found = random.Random(0), set()
    words = [
        "a",
        "item-7",
        "17",
        "007",
        "7.0",
        "-0",
        "1e+16",
        "True",
        "FALSE",
        "true",
        "",
        "ü",
        "\ud800",
        "\u0663",
        " 1",
    ]
    for _ in range(2000):
        texts = [draw.choice(words) for _ in range(draw.choice([1, 1, 2, 5]))]
        found.add(are_canonical(texts))
        assert not are_canonical(texts) or [text_of(one) for one in texts] == texts
    assert found == {True, False} and are_canonical(["item-7", "x"]) and are_canonical(["17", "007"])
