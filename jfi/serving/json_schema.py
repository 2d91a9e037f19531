"""The JSON Schema (draft 2020-12) of a request, for clients.

It does not say what no JSON Schema can: that the lists of a table by columns have one length, that no key is there
twice, and that semantic IDs are those of the codec.
"""

from collections.abc import Mapping

from jfi.serving.schema import KINDS, Limits


def request_schema(fields: Mapping[str, Mapping[str, str]], codec: str | None, limits: Limits, answer: str) -> dict:
    """Returns the schema.

    Args:
        fields: by part of a request the kinds of its fields by name, see `jfi.serving.schema.Field`.
        codec: fingerprint of the codec of semantic IDs, None without such IDs.
        limits: of a request.
        answer: what a score is.
    """
    kept = f"events, oldest first; of more than {limits.max_history} the newest are read"
    parts = {part: {name: KINDS[kind] for name, kind in of.items()} for part, of in fields.items()}
    properties = {"user": _object(parts["user"])}
    if "history" in parts:
        properties["history"] = {"description": kept} | _table(parts["history"], {})
    properties["candidates"] = _table(parts["candidates"], {"minItems": 1, "maxItems": limits.max_candidates})
    if codec is not None:
        properties["codec"] = {"const": codec}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A request of POST /score",
        "description": f'The answer is {{"scores": [...]}}: a {answer} for each candidate, in their order.',
    } | _object(properties)


def _object(properties: dict[str, dict]) -> dict:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _table(fields: dict[str, dict], bounds: dict[str, int]) -> dict:
    """Rows by rows or by columns."""
    columns = {name: {"type": "array", "items": one, **bounds} for name, one in fields.items()}
    return {"anyOf": [{"type": "array", "items": _object(fields), **bounds}, _object(columns)]}
