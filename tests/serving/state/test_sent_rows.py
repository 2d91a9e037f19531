"""Rows that are sent are read as training reads those of a table: missing values, separators and dates."""

import logging

import numpy as np
import pytest

from jfi.serving.requests import BadRequestError
from jfi.serving.schema import Field, Schema
from jfi.state.events import EventReader
from jfi.state.layout import LABELED, TIME, Column, Log, layout_of

NOW = 1_700_000_000.0
SCHEMA = Schema(
    user=[],
    candidate=[],
    event=[
        Field("item", "category", ["history_item"]),
        Field("tags", "slots", ["history_tags_0", "history_tags_1"]),
        Field("price", "quantile", ["history_price"], edges=[1.0, 5.0]),
    ],
    vocabularies={"item": ["1"], "tags": ["a"]},
    user_id="user",
    item_id="item",
)


def reader(**log) -> EventReader:
    own = Log("user", "item", "time", others=[Column("rating", "any")], **log)
    return EventReader(layout_of(SCHEMA, 20, own), clock=lambda: NOW)


def row(**change) -> dict:
    return {"user": "u", "time": NOW - 60, "item": 3, "tags": ["a"], "price": 2.0, "rating": 4} | change


@pytest.mark.parametrize("form", ["rows", "columns"])
def test_texts_that_mean_a_missing_value_and_separators_are_those_of_the_run(form):
    read = reader(missing_values=["NULL", "-1"], separators={"tags": "|"}, history="rating >= 3")
    rows = [row(tags="a|b"), row(tags=["NULL", "c", None]), row(tags="NULL"), row(tags=7), row(tags=None)]
    prices, ratings = [-1, "NULL", None, 3, 0.5], ["5", "-1", 2, -1, 3]
    rows = [one | {"price": price, "rating": rating} for one, price, rating in zip(rows, prices, ratings, strict=True)]
    found = read(rows if form == "rows" else {name: [one[name] for one in rows] for name in rows[0]})
    assert found.texts["tags"] == ["a", "b", "c", None, None, None, "7", None, None, None]
    np.testing.assert_array_equal(found.records["price"], [np.nan, np.nan, np.nan, 3, 0.5])
    assert found.in_history.tolist() == [True, False, False, False, True]
    flat, lengths = found.given["tags"]
    assert flat == ["a", "b", "c", "7"] and lengths.tolist() == [2, 1, 0, 1, 0]
    for name, missing in (("user", "NULL"), ("item", -1), ("time", -1)):
        with pytest.raises(BadRequestError, match=rf"events\[0\]\.{name} must be "):
            read([row(**{name: missing})])
    assert reader()([row(item="NULL", tags=["NULL"], price=-1)]).records["price"].tolist() == [-1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rating": "x"}, "events[1].rating is 'x', not a number"),
        ({"rating": "NULL"}, "events[1].rating is 'NULL', not a number"),
        ({"time": "2023-11-14 12:00:60"}, "events[1].time is '2023-11-14 12:00:60', neither a number nor a date"),
    ],
)
def test_faults_of_labels_rules_and_dates_name_their_place_without_advice_of_training(change, why):
    date = {"time": "2023-11-14 12:00:00"}
    for given in (
        [row(**date), row(**date | change)],
        {name: [one[name] for one in (row(**date), row(**date | change))] for name in row()},
    ):
        with pytest.raises(BadRequestError) as fault:
            reader(history="rating >= 3")(given)
        name = next(iter(change))
        said = str(fault.value).partition("; a date is of ISO 8601")[0]
        assert said == (why if isinstance(given, list) else why.replace(f"[1].{name}", f".{name}[1]"))


def test_dates_of_two_kinds_and_labels_that_are_none_name_their_place():
    with pytest.raises(BadRequestError) as fault:
        reader()([row(time="2023-11-14 12:00:00"), row(time="2023-11-14 12:00:00Z")])
    assert str(fault.value).startswith("events[1].time is '2023-11-14 12:00:00Z', which has a time zone offset; ")


def test_a_value_that_looks_like_a_missing_one_is_named_once(caplog):
    read = reader(history="rating == 'a'")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            read([row(rating="null"), row(rating="a")])
    (line,) = [one.getMessage() for one in caplog.records]
    assert line == "events: column 'rating' has the value 'null'; if it means a missing value, leave it empty"


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_a_date_and_a_number_of_one_moment_have_the_same_bits(unit):
    draw, per_second = np.random.default_rng(0), {"s": 1, "ms": 10**3, "us": 10**6}[unit]
    moments = draw.integers(10**8 * per_second, int(NOW) * per_second, 300)
    dates = (moments * (10**6 // per_second)).astype("datetime64[us]").astype(str).tolist()
    read = reader(unit=unit)
    one, other = read([row(time=int(each)) for each in moments]), read([row(time=each) for each in dates])
    assert one.records[TIME].tobytes() == other.records[TIME].tobytes()
    assert other.given["time"].astype(np.int64).tolist() == (moments * (10**6 // per_second)).tolist()
    assert one.records[LABELED].all()
