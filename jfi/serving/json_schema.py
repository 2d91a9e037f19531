"""The JSON Schema (draft 2020-12) of a request, for clients.

It does not say what no JSON Schema can: that the lists of a table by columns have one length, that no key is there
twice, and that semantic IDs are those of the codec.
"""

from collections.abc import Mapping, Sequence

from jfi.serving.schema import KINDS, Limits


def request_schema(
    fields: Mapping[str, Mapping[str, str]],
    codec: str | None,
    limits: Limits,
    answer: str,
    statistics: Sequence[str] = (),
) -> dict:
    """Returns the schema.

    Args:
        fields: by part of a request the kinds of its fields by name, see `jfi.serving.schema.Field`.
        codec: fingerprint of the codec of semantic IDs, None without such IDs.
        limits: of a request.
        answer: what a score is.
        statistics: fields of candidates that all have or none, since the artifact has its own.
    """
    kept = f"events, oldest first; of more than {limits.max_history} the newest are read"
    parts = {part: {name: KINDS[kind] for name, kind in of.items()} for part, of in fields.items()}
    properties = {"user": _object(parts["user"])}
    if "history" in parts:
        properties["history"] = {"description": kept} | _table(parts["history"], {})
    bounds = {"minItems": 1, "maxItems": limits.max_candidates}
    properties["candidates"] = _table(parts["candidates"], bounds, statistics)
    if codec is not None:
        properties["codec"] = {"const": codec}
    optional = []
    if statistics:
        optional = ["time"]
        text = "seconds since 1970 at which the artifact's own statistics are looked up; by default now"
        properties["time"] = {"description": text, "type": "number"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A request of POST /score",
        "description": f'The answer is {{"scores": [...]}}: a {answer} for each candidate, in their order.',
    } | _object(properties, optional)


def _object(properties: dict[str, dict], optional: Sequence[str] = ()) -> dict:
    required = [name for name in properties if name not in optional]
    found = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if len(optional) > 1:
        found["dependentRequired"] = dict(zip(optional, ([one] for one in [*optional[1:], optional[0]]), strict=True))
    return found


def _table(fields: dict[str, dict], bounds: dict[str, int], optional: Sequence[str] = ()) -> dict:
    """Rows by rows or by columns."""
    columns = {name: {"type": "array", "items": one, **bounds} for name, one in fields.items()}
    rows = {"type": "array", "items": _object(fields, optional), **bounds}
    return {"anyOf": [rows, _object(columns, optional)]}
