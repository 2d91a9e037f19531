"""Requests that are not as they should be are refused by their place."""

import pytest

from jfi.serving.requests import BadRequestError, RequestReader, parse
from jfi.serving.schema import Field, Limits, Schema
from jfi.serving.values import columns_of
from jfi.utils.encoding import HashBuckets, Vocabulary

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
        (["user"], [], "user must be an object, got list"),
        (["user", "cty"], "Bonn", "user has an unknown field 'cty'; did you mean 'city'"),
        (["user", "income"], "14", "user.income must be a finite number of float32's range, or null, got '14'"),
        (["user", "income"], 10**400, "user.income must be a finite number"),
        (["user", "income"], True, "user.income must be a finite number of float32's range, or null, got True"),
        (["user", "income"], 1e39, "user.income must be a finite number of float32's range, or null, got 1e.39"),
        (["candidates"], [], "candidates must not be empty"),
        (["history"], {}, "history must be a list of objects, got dict"),
        (["history", 1], None, r"history\[1\] must be an object, got None"),
        (["history", 2, "item"], ..., r"history\[2\] lacks the field 'item'"),
        (["history", 2, "item"], [1], r"history\[2\].item must be a string, a number or a boolean, or null"),
        (["history", 0, "tags"], "c", r"history\[0\].tags must be a list of .*, at most 1000, got 'c'"),
        (["history", 0, "tags"], ["c", {}], r"history\[0\].tags must be a list"),
        (["history", 1, "tags"], ["c"] * 1001, r"history\[1\].tags must be at most 1000 values, got 1001"),
        (["candidates", 1, "tags"], ["c"] * 1001, r"candidates\[1\].tags must be at most 1000 values, got 1001"),
        (["history", 1, "seconds"], float("inf"), r"history\[1\].seconds must be a finite number"),
        (["history", 1, "age"], None, r"history\[1\].age must be a number of seconds"),
        (["history", 1, "age"], -1, r"history\[1\].age must be a number of seconds, at least 0, got -1"),
        (["candidates"], [{}] * 4, "candidates must be at most 3, got 4"),
        (
            ["candidates", 1, "item"],
            {},
            r"candidates\[1\].item must be a string, a number or a boolean, or null",
        ),
        (["candidates", 1, "price"], 1, r"candidates\[1\] has an unknown field 'price'; known: item, tags"),
    ],
)
def test_a_fault_is_named_by_its_place(path, value, reason):
    with pytest.raises(BadRequestError, match=reason):
        READ(changed(path, value))


def test_near_names_are_not_looked_for_where_a_name_is_huge(monkeypatch):
    looked = []
    monkeypatch.setattr("jfi.utils.suggest.get_close_matches", lambda name, *_, **__: looked.append(len(name)))
    for length in (100, 101, 10**6):
        with pytest.raises(BadRequestError, match=r"user has an unknown field 'a+\.\.\.; known: city, income$"):
            READ(changed(["user", "a" * length], 1))
    assert looked == [100]


def test_a_list_may_be_as_long_as_the_schema_says():
    encoded = READ(changed(["candidates", 1, "tags"], ["c"] * 1000))
    assert encoded.counts["tags"].tolist() == [2, 1000]
    schema = READ.describe()
    assert (
        schema["candidates"]["tags"]
        == schema["history"]["tags"]
        == "a list of strings, numbers or booleans, at most 1000"
    )


def test_the_place_in_a_history_that_is_cut_is_the_one_in_the_request():
    long = changed(["history"], request()["history"] * 3)
    assert READ(long).num_events == 4
    long["history"][6] = dict(long["history"][6], age="old")
    with pytest.raises(BadRequestError, match=r"history\[6\].age"):
        READ(long)


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"], ids=range(6)
)
def test_what_is_no_json_is_refused(body):
    with pytest.raises(BadRequestError, match="not JSON"):
        parse(body)


def test_the_schema_names_every_field():
    schema = READ.describe()
    assert list(schema["history"]) == ["item", "tags", "seconds", "age"] and schema["max_candidates"] == 3


@pytest.mark.parametrize("row", [[], "", ()])
def test_an_object_without_fields_is_an_object(row):
    """As the user of a model that reads nothing of them."""
    assert columns_of([{}], [], lambda _: "user") == {}
    with pytest.raises(BadRequestError, match="user must be an object, got"):
        columns_of([row], [], lambda _: "user")


@pytest.mark.parametrize("buckets", [0, 7])
@pytest.mark.parametrize("has_lists", [False, True])
def test_a_value_has_one_text(buckets, has_lists):
    """Read from the bytes of a request without lists, and by the JSON parser of one with them."""
    texts = ["7", "0.5", "true", "10000000000000000", "007", "1e3"]
    fields = [Field("item", "category", ["item"], num_buckets=buckets)]
    fields += [Field("tags", "categories", ["tags"], num_buckets=buckets)] if has_lists else []
    schema = Schema(user=[], candidate=fields, event=[], vocabularies={"item": texts, "tags": texts})
    read = RequestReader(schema, Limits(max_candidates=100, max_history=1))
    known = HashBuckets(buckets) if buckets else Vocabulary(texts)
    same = {
        "7": ["7", "7.0", '"7"', '"7.0"', '"7.00"', "7e0"],
        "0.5": ["0.5", "0.50", '"0.50"', "5e-1"],
        "true": ["true", '"true"', '"True"', '"TRUE"'],
        "10000000000000000": ["10000000000000000", "1e16", '"1e+16"', "1e+16"],
        "007": ['"007"'],
        "1e3": ['"1e3"'],
        None: ["null", '""', '"\\ud800"', '"a\\ud800"'],
    }
    for text, written in same.items():
        for value in written:
            row = f'{{"item": {value}' + (f', "tags": [{value}]' if has_lists else "") + "}"
            for rows in (row, f"{row}, {row}"):
                found = read.read(f'{{"user": {{}}, "candidates": [{rows}]}}'.encode())
                (expected,) = known.ids([text])
                assert set(found.ids["item"].tolist()) == {expected}, value
                assert not has_lists or set(found.ids["tags"].tolist()) == ({expected} - {0}), value
