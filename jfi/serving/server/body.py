"""Reads the JSON of a request and writes that of an answer, by orjson."""

import json
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import orjson

from jfi.serving.validation import BadRequestError, shown

T = TypeVar("T")

#: Most lists and objects of a body, which take up to 0.2 us each to parse: no other request is answered meanwhile.
MAX_PARTS = 2**16
#: Bytes of the largest body in which the key is looked for that an object has twice.
_SEARCHED = 2**16


def parse(body: bytes) -> object:
    """Parses JSON in UTF-8.

    Raises:
        BadRequestError: not JSON, as NaN, infinities, numbers beyond float64 and halves of surrogate pairs are not, or
            more than `MAX_PARTS` lists and objects, which are counted by their brackets.
    """
    if (parts := body.count(b"[") + body.count(b"{")) > MAX_PARTS:
        raise BadRequestError(f"the request must have at most {MAX_PARTS} lists and objects, got {parts}")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the request is not JSON: {error}") from None


def read_body(body: bytes, encode: Callable[[object], T]) -> T:
    """Parses a body and encodes it.

    Raises:
        BadRequestError: not JSON, or a fault, with its place.
    """
    given = parse(body)
    found = encode(given)
    check_keys(body, given)
    return found


def write_answer(answer: dict) -> bytes:
    """Returns the JSON of an answer, whose scores have the shortest text of their float32.

    >>> write_answer({"scores": [0.10000000149011612]})
    b'{"scores":[0.1]}'
    """
    scores = answer.get("scores")
    if isinstance(scores, dict):  # by label
        answer = answer | {"scores": {name: np.array(one, np.float32) for name, one in scores.items()}}
    elif scores is not None:
        answer = answer | {"scores": np.array(scores, np.float32)}
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def check_keys(body: bytes, request: dict | list) -> None:
    """Checks that no object of a body has a key twice; orjson keeps the last of its values.

    With such a key the body has more colons than the JSON of what was read. It is not found in a body that writes as
    many colons of its texts as escapes.

    Args:
        body: JSON.
        request: what `parse` read of it.

    Raises:
        BadRequestError: there is one.
    """
    colons = body.count(b":")
    if isinstance(request, dict) and colons == _count_keys(request):
        return  # of tables by columns there are no other keys
    try:
        if colons > orjson.dumps(request).count(b":"):
            if len(body) <= _SEARCHED:
                json.loads(body, object_pairs_hook=_check_pairs)  # says which
            raise BadRequestError("the request has an object with a field twice")
    except (orjson.JSONEncodeError, RecursionError):
        raise BadRequestError("the request has lists or objects nested in more than 250 others") from None


def _count_keys(request: dict) -> int:
    return len(request) + sum(len(part) for part in request.values() if isinstance(part, dict))


def _check_pairs(pairs: list[tuple[str, object]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise BadRequestError(f"the request has an object with the field {shown(key)} twice")
        seen.add(key)
