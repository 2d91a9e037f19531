"""The columns of items and users in a state: what is written is read."""

import json
import random
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from jfi.serving.validation import BadRequestError
from jfi.state.columns import ColumnLayout, read_columns, write_columns
from jfi.state.dictionaries import Cache, Dictionaries
from jfi.state.events import EventReader
from jfi.state.layout import Column, layout_of
from jfi.state.stores import StateError

from .adding import LOG, READ, SCHEMA

SID = {"num_digits": 25, "codebook_size": 0}
COLUMNS = [
    Column("brand", "text"),
    Column("tags", "texts", 0),
    Column("price", "number"),
    Column("labels", "texts", 0),
    Column("sid", "sid", layout=SID),
]
MISSING = {"brand": None, "tags": [], "price": None, "labels": [], "sid": -1}


def rows(draw: random.Random, count: int) -> list[dict]:
    value = {
        "brand": lambda: draw.choice([None, "a", "é" * 500, f"b{draw.randrange(9)}"]),
        "tags": lambda: [f"t{draw.randrange(5)}" for _ in range(draw.choice([0, 1, 3, 400]))],
        "price": lambda: draw.choice([None, 0.1, -1e300, 7]),
        "labels": lambda: draw.choice([[], ["x"], ["t1", "t1"]]),
        "sid": lambda: draw.choice([-1, 5, 77]),
    }
    return [{name: one() for name, one in value.items() if draw.random() < 0.8} for _ in range(count)]


def stored(store, layout: ColumnLayout, ids: list[str]) -> list[dict]:
    """The columns of ids as they are in a store."""
    found, names = layout.decode(store.get(list(map(layout.key, ids)))), Dictionaries(store.get)
    columns = {}
    for name, values in found.items():
        kind = layout.columns[name].kind
        if kind == "texts":
            texts, ends = names.texts(name, values[0].tolist()), np.append(0, np.cumsum(values[1]))
            columns[name] = [texts[a:b] for a, b in pairwise(ends)]
        elif kind == "text":
            columns[name] = names.texts(name, values.tolist())
        else:
            columns[name] = [None if number != number else number for number in values.tolist()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize("of", ["item", "user"])
def test_what_is_written_is_read(new_store, of):
    """Random rows, some of them written again, each of any columns; an id without a row has missing values."""
    draw, store, layout, cache = random.Random(0), new_store(), ColumnLayout(of, COLUMNS), Cache()
    known: dict[str, dict] = {}
    for number in range(60):
        (row,) = rows(draw, 1)
        name = f"ü{draw.randrange(40)}"
        read = read_columns(layout, READ, json.dumps(row).encode())
        write_columns(store, layout, [name], read, cache if number % 2 else Cache())
        known[name] = MISSING | row
    ids = [f"ü{number}" for number in range(45)] * 2
    assert stored(store, layout, ids) == [known.get(name, MISSING) for name in ids]
    assert stored(store, ColumnLayout("user" if of == "item" else "item", COLUMNS), ids) == [MISSING] * len(ids)


def test_a_state_without_lists_and_one_of_lists_alone():
    for columns in (COLUMNS[:1], COLUMNS[1:2], [COLUMNS[2], COLUMNS[4]]):
        layout, names = ColumnLayout("item", columns), Dictionaries()
        given = {"brand": ["a", None], "tags": (["x", "y", "x"], np.array([1, 2])), "price": np.array([1.0, 2.0])}
        given = {name: values for name, values in given.items() if name in layout.columns}
        found = layout.decode([*layout.encode(given, 2, names), None])
        for name, values in found.items():
            if name == "tags":
                assert (values[0].tolist(), values[1].tolist()) == ([1, 2, 1], [1, 2, 0])
            else:
                wanted = {"brand": [1, 0, 0], "price": [1.0, 2.0, np.nan], "sid": [-1, -1, -1]}[name]
                np.testing.assert_array_equal(values, wanted)


def test_damaged_records_are_refused_by_name():
    layout = ColumnLayout("item", COLUMNS)
    (good,) = layout.encode({"tags": (["a"], np.array([1]))}, 1, Dictionaries())
    for wrong in (b"", good[:-1], good[:-4], good + b"\0\0\0\0"):
        with pytest.raises(StateError, match=r"^the state of users is damaged: the columns of items: "):
            layout.decode([good, wrong])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ([], "the item must be object, got array"),
        ({"brnd": "a"}, "the item has an unknown field 'brnd'; did you mean 'brand'"),
        ({"brand": ["a"]}, "brand must be bool | int | float | str | null, got array"),
        ({"brand": "é" * 1025}, "brand must be str of length <= 1024"),
        ({"tags": "a"}, "tags must be array | null, got str"),
        ({"tags": ["a"] * 1001}, "tags must be array of length <= 1000"),
        ({"tags": ["a", "x" * 1025]}, "tags[1] must be str of length <= 1024"),
        ({"price": "7"}, "price must be float | null, got str"),
        ({"sid": 255}, "sid is 255, which is no ID of"),
    ],
)
def test_faults_of_columns_are_named(body, why):
    with pytest.raises(BadRequestError) as fault:
        read_columns(ColumnLayout("item", COLUMNS), READ, json.dumps(body).encode())
    assert str(fault.value).startswith(why)
    with pytest.raises(BadRequestError, match="this state has no columns of users"):
        read_columns(ColumnLayout("user", []), READ, b"{}")


def test_values_that_mean_a_missing_one_are_missing_as_in_a_table():
    log = msgspec.structs.replace(LOG, missing_values=["NULL", "-1"])
    body = {"brand": "NULL", "tags": ["a", "NULL", "b"], "price": -1}
    events = EventReader(layout_of(SCHEMA, 10, log))
    found = read_columns(ColumnLayout("item", COLUMNS), events, json.dumps(body).encode())
    assert found["brand"] == [None] and np.isnan(found["price"]).all()
    assert (found["tags"][0], found["tags"][1].tolist()) == (["a", "b"], [2])
