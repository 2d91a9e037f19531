"""JSON Lines -> a table: an object per line, of which numbers are read as text, as those of other text files are."""

import io
import json
from collections.abc import Container
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa

from jfi.data.decode import read_utf8
from jfi.data.errors import DataError
from jfi.data.layouts import Layout
from jfi.data.table import Table

_BLOCK = 1 << 16
_STRINGS = pa.list_(pa.string())


def read_json(path: str, layout: Layout, wanted: Container[str]) -> Table:
    """The columns of a file of JSON Lines that are in `wanted`.

    A column holds strings, or lists of strings, or booleans if all of its values are; null and "" are empty. Numbers
    keep their digits as written.
    """
    lines = io.BytesIO(read_utf8(path, layout.encodings))
    known: dict[str, None] = {}
    chunks: dict[str, list[pa.Array]] = {}
    start, rows = 0, 0
    while block := list(islice(lines, _BLOCK)):
        records = [_parse(path, start + i, line) for i, line in enumerate(block) if not line.isspace()]
        for record in records:
            # A file has few sets of names, and one look-up a row is cheaper than one a field.
            if not record.keys() <= known.keys():
                known.update(dict.fromkeys(record))
        for name in known:
            if name in wanted:
                column = chunks.setdefault(name, [pa.nulls(rows)] if rows else [])
                column.append(_column(path, start, block, name, [record.get(name) for record in records]))
        start, rows = start + len(block), rows + len(records)
    data = {name: _join(path, name, column) for name, column in chunks.items()}
    # Without a column the number of rows would be lost.
    return Table(path, pa.table(data or {"": pa.nulls(rows)}), list(known), partial(_line, path, layout))


def _text(constant: str) -> str:
    return constant


# json.loads would make one for each line.
_DECODER = json.JSONDecoder(parse_int=_text, parse_float=_text, parse_constant=_text)


def _parse(path: str, line: int, text: bytes) -> dict[str, Any]:
    try:
        record = _DECODER.decode(text.decode())
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{line + 1}: not JSON: {error.msg.lower()} at column {error.colno}") from error
    except RecursionError as error:
        raise DataError(f"{path}:{line + 1}: nested too deeply") from error
    if not isinstance(record, dict):
        raise DataError(f'{path}:{line + 1}: must be an object such as {{"user_id": 1}}, one a line')
    return record


def _column(path: str, start: int, block: list[bytes], name: str, values: list[Any]) -> pa.Array:
    types = set(map(type, values)) - {type(None)}
    try:
        if types == {bool}:
            return pa.array(values, pa.bool_())
        if types == {list} and all(type(x) is str for value in values if value is not None for x in value):
            return pa.array(values, _STRINGS)
        if types <= {str}:
            return pa.array([value or None for value in values], pa.string())
    except (UnicodeEncodeError, pa.ArrowException):
        pass  # The loop below finds the row.
    lines = [start + i + 1 for i, line in enumerate(block) if not line.isspace()]
    result, is_list = [], types == {list}
    for line, value in zip(lines, values, strict=True):
        try:
            result.append(_value(value, is_list))
        except (TypeError, UnicodeEncodeError) as error:
            what = error if isinstance(error, TypeError) else "holds half of a surrogate pair, which is no character"
            raise DataError(f"{path}:{line}: '{name}' {what}") from None
    return pa.array(result, _STRINGS if is_list else pa.string())


def _value(value: Any, is_list: bool) -> str | list[str | None] | None:
    """A value as text, or a list as texts; TypeError says what it is instead."""
    if value is None:
        return None
    if is_list:
        if any(isinstance(one, (list, dict)) for one in value):
            raise TypeError("is a list of lists or objects; it must be a list of texts or numbers")
        return [_value(one, False) for one in value]
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        kind = "an object" if isinstance(value, dict) else "a list here and a single value in other rows"
        raise TypeError(f"is {kind}; it must have one value per row")
    value.encode()
    return value or None


def _join(path: str, name: str, chunks: list[pa.Array]) -> pa.ChunkedArray:
    types = {chunk.type for chunk in chunks if not pa.types.is_null(chunk.type) and chunk.null_count < len(chunk)}
    to = types.pop() if len(types) == 1 else pa.string()
    if pa.types.is_list(to) or not any(map(pa.types.is_list, types)):
        chunks = [pa.nulls(len(x), to) if x.null_count == len(x) else x.cast(to) for x in chunks]
        return pa.chunked_array(chunks, to)
    raise DataError(f"{path}: '{name}' has lists in some rows and single values in others")


def _line(path: str, layout: Layout, row: int) -> int:
    lines = io.BytesIO(read_utf8(path, layout.encodings))
    filled = (number for number, line in enumerate(lines, start=1) if not line.isspace())
    return next(islice(filled, row, None), 1)
