"""The JSON Schema of requests accepts what the reader accepts, and nothing else."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from jfi.serving.requests import BadRequestError, RequestReader
from jfi.serving.schema import Field, Schema
from jfi.serving.validation import LONGEST_TEXT

from .test_requests import READ, SCHEMA, request

LAYOUT = {"num_digits": 25, "codebook_size": 0}
ODD = [None, True, 0, 7, -1, 2.5, 1e39, -1e300, 2**63, "", "x", "7", "-7", " 7", [], ["a"], [None, 2, True], [[]], {}]
ODD += [["a"] * 1000, ["a"] * 1001, {"a": 1}, [{"item": 1, "tags": None}] * 3]


def validator(reader: RequestReader) -> Draft202012Validator:
    schema = json.loads(json.dumps(reader.json_schema()))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def accepts(reader: RequestReader, body: Any) -> bool | None:
    """Whether the reader does; None for a fault of which the JSON Schema does not say anything."""
    try:
        reader.read(json.dumps(body).encode())
    except BadRequestError as fault:
        unsaid = r".* must have as many values of each field|candidates must not be empty|candidates\S* lacks"
        return None if re.match(unsaid, str(fault)) else False
    return True


def by_columns(rows: list[dict]) -> dict[str, list]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def both_forms(whole: dict) -> list[dict]:
    return [whole, whole | {part: by_columns(whole[part]) for part in ("history", "candidates") if part in whole}]


def changed(tree: Any) -> Iterator[Any]:
    """Yields copies of a tree with an odd value in each place, or without it, or with a field more."""
    yield from ODD
    for key in [*tree, "more"] if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        for value in changed(tree[key]) if key != "more" else ODD:
            copy = deepcopy(tree)
            copy[key] = value
            yield copy
        if isinstance(tree, dict) and key != "more":
            yield {name: value for name, value in tree.items() if name != key}


@pytest.mark.parametrize("form", [0, 1], ids=["rows", "columns"])
def test_the_schema_accepts_what_the_reader_accepts(form):
    user = Field("tags", "categories", ["user_tags"])
    reader = RequestReader(replace(SCHEMA, user=[user, *SCHEMA.user]), READ.limits)
    valid, whole, outcomes = validator(reader), request() | {"time": 1767225600.5}, set()
    whole["user"]["tags"] = ["a"]
    for body in [whole, *changed(both_forms(whole)[form])]:
        outcome = accepts(reader, body)
        if outcome is not None:
            assert valid.is_valid(body) == outcome, (body, outcome)
        outcomes.add(outcome)
    assert valid.is_valid(both_forms(whole)[form]) and outcomes >= {True, False}


def test_the_schema_of_semantic_ids_and_of_no_history():
    schema = Schema([], [Field("sid", "sid", ["item_sid"], layout=LAYOUT)], [], codec="abc")
    reader = RequestReader(schema, READ.limits)
    valid, whole = validator(reader), {"user": {}, "candidates": [{"sid": 5}, {"sid": None}], "codec": "abc"}
    assert valid.is_valid(whole) and valid.is_valid(both_forms(whole)[1])
    for body in changed(whole):
        if not valid.is_valid(body):
            assert not accepts(reader, body), body
    for body in (whole | {"codec": "other"}, whole | {"history": []}, whole | {"candidates": [{"sid": "x"}]}):
        assert not valid.is_valid(body) and not accepts(reader, body)


def test_an_integer_of_json_schema_may_have_a_fraction_of_0():
    reader = RequestReader(Schema([], [Field("sid", "sid", ["item_sid"], layout=LAYOUT)], [], codec="abc"), READ.limits)
    whole = {"user": {}, "candidates": [{"sid": 5.0}, {"sid": 5}, {"sid": None}], "codec": "abc"}
    assert validator(reader).is_valid(whole) and reader(whole).ids["item_sid"].tolist() == [5, 5, -1]
    for sid in (5.5, 2.0**53 + 2, -(2.0**53) - 2, float("inf"), float("nan")):
        with pytest.raises(
            BadRequestError,
            match=r"candidates\[0\].sid must be a semantic ID: an integer of 64 bits or its text, or null, got",
        ):
            reader(whole | {"candidates": [{"sid": sid}]})
    with pytest.raises(BadRequestError, match="is 9007199254740992, which is no ID of"):
        reader(whole | {"candidates": [{"sid": 2.0**53}]})


@pytest.mark.parametrize("form", [0, 1], ids=["rows", "columns"])
def test_texts_have_a_bounded_length(form):
    """Of columns with a vocabulary, with a capacity and of a cross."""
    candidate = [Field("item", "category", ["item"], capacity=9), Field("tags", "categories", ["tags"], capacity=9)]
    pair = Field("pair", "cross", ["history_pair"], columns=["item", "way"], capacity=9)
    event = [Field("item", "category", ["history_item"]), Field("way", "category", ["history_way"]), pair]
    vocabularies = {"item": ["a"], "way": ["b"], "city": ["c"]}
    reader = RequestReader(Schema([Field("city", "category", ["city"])], candidate, event, vocabularies), READ.limits)
    text, longer, valid = "x" * LONGEST_TEXT, "x" * (LONGEST_TEXT + 1), validator(reader)
    whole = {
        "user": {"city": text},
        "history": [{"item": text, "way": text}, {"item": text, "way": text}],
        "candidates": [{"item": text, "tags": []}, {"item": None, "tags": [None, text]}],
    }
    whole = both_forms(whole)[form]
    assert valid.is_valid(whole) and accepts(reader, whole)
    faults = [("user", 0, "city"), ("history", 1, "way"), ("candidates", 0, "item"), ("candidates", 1, "tags")]
    for part, row, name in faults:
        for value, is_good in ((longer, False), ("é" * LONGEST_TEXT, True), ("é" * (LONGEST_TEXT + 1), False)):
            wrong = deepcopy(whole)
            at, key = (wrong[part][row], name) if form == 0 and part != "user" else (wrong[part], name)
            at, key = (at, key) if form == 0 or part == "user" else (at[name], row)
            at[key] = [None, "", value] if name == "tags" else value
            place = f"{part}[{row}].{name}" if form == 0 else f"{part}.{name}[{row}]"
            place = re.escape("user.city" if part == "user" else place)
            assert valid.is_valid(wrong) == is_good
            if is_good:
                reader(wrong)
                continue
            with pytest.raises(BadRequestError, match=rf"^{place}(\[2\])? must be str of length <= 1024$"):
                reader(wrong)


def test_the_schema_names_fields_limits_and_the_answer():
    schema = RequestReader(SCHEMA, READ.limits, answer="probability").json_schema()
    whole, columns = (schema["$defs"][name]["properties"] for name in ("Request", "Columns_of_Candidate"))
    rows = next(one for one in whole["candidates"]["anyOf"] if one.get("type") == "array")
    assert rows["maxItems"] == columns["item"]["maxItems"] == READ.limits.max_candidates
    assert schema["$defs"]["Candidate"]["properties"].keys() == {"item", "tags"}
    assert "of more than 4 the newest" in whole["history"]["description"]
    assert "a probability for each candidate" in schema["description"]
    assert list(READ.fields["history"]) == ["item", "tags", "seconds", "age"]
