"""JSON Lines -> a table: an object per line, of which numbers are read as text, as those of other text files are."""

import io
import json
from collections.abc import Collection, Container, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa

from jfi.data.errors import DataError
from jfi.data.io.decode import read_utf8, stream_utf8
from jfi.data.io.layouts import Layout
from jfi.data.io.table import Table

_BLOCK = 1 << 16
# Bytes of a part of a file that is read in parts.
_PART = 1 << 24
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
        numbers = [start + i for i, line in enumerate(block, 1) if not line.isspace()]
        records = [_parse(path, number, block[number - start - 1]) for number in numbers]
        for record in records:
            # A file has few sets of names, and one look-up a row is cheaper than one a field.
            if not record.keys() <= known.keys():
                known.update(dict.fromkeys(record))
        for name in known:
            if name in wanted:
                column = chunks.setdefault(name, [pa.nulls(rows)] if rows else [])
                column.append(_column(path, numbers, name, [record.get(name) for record in records]))
        start, rows = start + len(block), rows + len(records)
    data = {name: _join(path, name, column) for name, column in chunks.items()}
    # Without a column the number of rows would be lost.
    return Table(path, pa.table(data or {"": pa.nulls(rows)}), list(known), partial(_line, path, layout))


def iterate_json(path: str, layout: Layout, wanted: Container[str], size: int) -> Iterator[Table]:
    """`read_json` as tables of at most `size` rows; memory does not grow with the file.

    A column's type is that of its first values, so that one of true and false must not have texts further down.
    """
    known, kinds = _kinds(path, layout, wanted, size)
    for numbers, records in _blocks(path, layout, size):
        data = {}
        for name, kind in kinds.items():
            values = [record.get(name) for record in records]
            data[name] = _as_kind(path, numbers, name, values, kind)
        # Without a column the number of rows would be lost.
        yield Table(path, pa.table(data or {"": pa.nulls(len(records))}), known, numbers.__getitem__)


def _as_kind(path: str, lines: list[int], name: str, values: list[Any], kind: pa.DataType) -> pa.Array:
    """`_column` of a part of a file whose values before had the type `kind`."""
    column = _column(path, lines, name, values)
    if column.null_count == len(column):
        return pa.nulls(len(column), kind)
    if column.type == kind or (column.type == pa.bool_() and kind == pa.string()):
        return column.cast(kind)
    kept = {pa.bool_(): bool, _STRINGS: list}.get(kind)
    is_other = (lambda value: isinstance(value, list)) if kept is None else (lambda value: not isinstance(value, kept))
    row = next(i for i, value in enumerate(values) if value not in (None, "") and is_other(value))
    shown = {bool: "true or false", list: "a list"}
    here, before = shown.get(type(values[row]), "a text or a number"), shown.get(kept, "a text or a number")
    raise DataError(f"{path}:{lines[row]}: '{name}' is {here} here and {before} in rows before; it must be of one kind")


def _kinds(path: str, layout: Layout, wanted: Container[str], size: int) -> tuple[list[str], dict[str, pa.DataType]]:
    """The names of the columns, and the types of those in `wanted`; reads on until each of these has a value."""
    known: dict[str, None] = {}
    kinds: dict[str, pa.DataType] = {}
    for numbers, records in _blocks(path, layout, size):
        for record in records:
            if not record.keys() <= known.keys():
                known.update(dict.fromkeys(record))
        for name in known:
            if name in wanted and name not in kinds:
                column = _column(path, numbers, name, [record.get(name) for record in records])
                if column.null_count < len(column):
                    kinds[name] = column.type
        if isinstance(wanted, Collection) and len(kinds) == len(set(wanted)):
            break
    return list(known), {name: kinds.get(name, pa.string()) for name in known if name in wanted}


def _blocks(path: str, layout: Layout, size: int) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
    """Up to `size` rows at a time: the numbers of their lines, and the objects."""
    lines = ((number, line) for number, line in enumerate(_lines(path, layout), 1) if not line.isspace())
    while block := list(islice(lines, size)):
        yield [number for number, _ in block], [_parse(path, number, line) for number, line in block]


def _lines(path: str, layout: Layout) -> Iterator[bytes]:
    rest = []  # of a line that goes on
    for part in stream_utf8(path, layout.encodings, _PART):
        first, *lines = part.split(b"\n")
        rest.append(first)
        if lines:
            yield b"".join(rest) + b"\n"
            *lines, last = lines
            yield from (line + b"\n" for line in lines)
            rest = [last]
    yield b"".join(rest) or b"\n"


def _text(constant: str) -> str:
    return constant


# json.loads would make one for each line.
_DECODER = json.JSONDecoder(parse_int=_text, parse_float=_text, parse_constant=_text)


def _parse(path: str, line: int, text: bytes) -> dict[str, Any]:
    try:
        record = _DECODER.decode(text.decode())
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{line}: not JSON: {error.msg.lower()} at column {error.colno}") from error
    except RecursionError as error:
        raise DataError(f"{path}:{line}: nested too deeply") from error
    if not isinstance(record, dict):
        raise DataError(f'{path}:{line}: must be an object such as {{"user_id": 1}}, one a line')
    return record


def _column(path: str, lines: list[int], name: str, values: list[Any]) -> pa.Array:
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
