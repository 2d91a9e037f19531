"""Requests with a history policy: by rows and by columns the same events stay, those that training keeps."""

import random
from dataclasses import replace

import numpy as np
import pytest
from history_policies.logs import planted
from msgspec import structs

from jfi.history_policies import EventLog, Policy, fit
from jfi.serving.history_policy import RequestPolicy, _codes
from jfi.serving.requests import RequestReader
from jfi.serving.schema import Field, Limits, PolicyFields, Schema

from .test_columns import assert_same, by_columns, encode, outcome

SHORT, LONG = ["feed", "search", "unknown"], ["feed", "a page of products", "s" * 40]
ALL = PolicyFields("dwell", "surface", "session", 1000.0)


def fitted(surfaces: list[str], **options) -> Policy:
    log, conversion, _ = planted()
    log = EventLog(log.user, log.time, log.surface, log.dwell, surfaces)
    return fit(log, conversion, **options)


def removing(surfaces: list[str], **options) -> Policy:
    return fitted(surfaces, remove=0.5, newest=1, **options)


def reader(policy: Policy, fields: PolicyFields, num_buckets: int = 0) -> RequestReader:
    items = [str(i) for i in range(20)]
    schema = Schema(
        user=[],
        candidate=[Field("item", "category", ["item"])],
        event=[
            Field("item", "category", ["history_item"]),
            Field("kind", "category", ["history_kind"], num_buckets=num_buckets),
            Field("surface", "category", ["history_surface"]),
            Field("both", "cross", ["history_both"], columns=["item", "surface"]),
            Field("dwell", "quantile", ["history_dwell"], edges=[1e3, 5e3]),
            Field("age", "age", num_buckets=24),
        ],
        vocabularies={"item": items, "kind": ["k", "l"], "surface": ["feed", "search"], "both": ["1\x1ffeed"]},
        policy=fields,
    )
    return RequestReader(schema, Limits(3, 30), RequestPolicy(policy, fields))


def history(draw: random.Random, surfaces: list[str], session: str | None) -> list[dict]:
    dwell = (None, 0, 3, 700, 2999, 3000, 61000.5, 1e-3, -4, 123456789012)
    sessions = {
        "integers": (1, 2, 3),
        "mixed": (1, "1", 2, None, ""),
        "texts": ("a", "b", "a session of many letters"),
        "long": ("x" * 29, "x" * 50, 3),
        "fractions": ("a", None, -3, 12345678901234567890),
    }
    ages = sorted(draw.choice([draw.randrange(400_000), draw.random() * 1e5]) for _ in range(draw.randrange(38)))
    if draw.random() < 0.8:
        ages.reverse()
    rows = []
    for age in ages:
        row = {"item": draw.choice([*range(22), None, "7"]), "kind": draw.choice(["k", "l", "ü", None])}
        row |= {"surface": draw.choice([*surfaces, None, "a new one", 5]), "dwell": draw.choice(dwell), "age": age}
        rows.append(row | ({} if session is None else {"session": draw.choice(sessions[session])}))
    return rows


@pytest.mark.parametrize("session", ["integers", "mixed", "texts", "long", "fractions", None])
@pytest.mark.parametrize(
    ("policy", "surfaces", "num_buckets"),
    [
        (lambda: removing(SHORT), SHORT, 0),
        (lambda: removing(LONG, caps={"passive": 4, "active": 9}), LONG, 7),
        (lambda: removing([*LONG[:2], "b"], boost=["active"], num_segments=2), LONG, 0),
        (lambda: removing(SHORT, num_segments=4), SHORT, 7),
        (lambda: fitted(SHORT, remove=0.0), SHORT, 0),
    ],
    ids=["removes", "caps", "boosts", "four segments", "keeps all"],
)
def test_columns_give_the_events_that_rows_give(policy, surfaces, num_buckets, session):
    policy, read_so, removed = policy(), 0, 0
    read = reader(policy, replace(ALL, session=session and "session"), num_buckets)
    draw = random.Random(str(session))
    for _ in range(60):
        rows = history(draw, surfaces, session)
        if rows and draw.random() < 0.3:  # a fault somewhere, perhaps in an event that goes
            draw.choice(rows)[draw.choice(list(rows[0]))] = draw.choice(["0", -1, True, 1.5, None, {}])
        request = {"user": {}, "history": rows, "candidates": [{"item": 3}]}
        one = outcome(read.read, encode(request, ensure_ascii=False))
        assert_same(one, outcome(read.read, encode(by_columns(request))), request)
        if not isinstance(one, str):
            assert_same(one, read(request), request)
            read_so += 1
            removed += min(30, len(rows)) - one.num_events
    assert read_so > 25 and (removed > 100) == (not policy.keeps_all)


@pytest.mark.parametrize("missing", ["dwell", "surface"])
def test_columns_give_the_events_that_rows_give_without_a_field_of_the_policy(missing):
    surfaces = ["all"] if missing == "surface" else SHORT
    log, conversion, _ = planted()
    log = EventLog(log.user, log.time, log.surface % len(surfaces), log.dwell, surfaces)
    read = reader(fit(log, conversion, remove=0.5, newest=1), replace(ALL, **{missing: None}))
    draw = random.Random(0)
    for _ in range(20):
        request = {"user": {}, "history": history(draw, SHORT, "mixed"), "candidates": [{"item": 3}]}
        assert_same(outcome(read.read, encode(request)), outcome(read.read, encode(by_columns(request))), request)


EVENT = {"item": 1, "kind": "k", "surface": "feed", "dwell": 9, "session": 2, "age": 4}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**EVENT, "item": 1.5}] + [EVENT] * 29, None),  # nobody reads it, if it goes
        ([{**EVENT, "session": [1]}] + [EVENT] * 29, "history[0].session must be bool | int | float | str | null"),
        ([{**EVENT, "surface": {}}] + [EVENT] * 29, "history[0].surface must be bool | int | float | str | null"),
        ([{**EVENT, "dwell": "9"}] + [EVENT] * 29, "history[0].dwell must be float | null, got str"),
        ([{**EVENT, "age": None}] + [EVENT] * 29, "history[0].age must be float, got null"),
        (
            [{**EVENT, "dwell": None}] * 2 + [{name: EVENT[name] for name in EVENT if name != "dwell"}],
            "history[2] ",
        ),
        ([], None),
    ],
    ids=["item", "session", "surface", "dwell", "age", "ragged", "empty"],
)
def test_a_fault_of_an_event_is_named_by_its_place(rows, message):
    policy = removing(SHORT)
    gone = structs.replace(
        policy,
        surface_reports=tuple(structs.replace(one, keep=(False,) * len(one.keep)) for one in policy.surface_reports),
    )
    read = reader(gone, ALL)
    request = {"user": {}, "history": rows, "candidates": [{"item": 3}]}
    one = outcome(read.read, encode(request))
    if all(row.keys() == EVENT.keys() for row in rows):
        assert_same(one, outcome(read.read, encode(by_columns(request))), request)
    if message is None:
        assert one.num_events == min(1, len(rows))
    else:
        assert one.startswith(message)


@pytest.mark.parametrize("longest", ["11", "more than eight bytes"])
def test_codes_of_sessions_are_equal_for_equal_ones_and_differ_for_nulls(longest):
    values = [1, "1", "", None, longest, longest, "2", *[None] * 300]
    texts = [None if value is None else str(value) for value in values]
    codes = _codes(texts)
    same = [
        [i == j or (one is not None and one == other) for j, other in enumerate(texts)] for i, one in enumerate(texts)
    ]
    assert np.array_equal(codes[:, None] == codes, same)
