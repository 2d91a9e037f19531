"""JSON -> tables: an object per line, or one array of objects."""

import json
import re
from collections.abc import Callable, Container, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from jfi.data.errors import DataError
from jfi.data.io.arrays import TEXT, TEXTS, is_list
from jfi.data.io.paths import File
from jfi.data.io.table import SourceReading, SourceRows, columns_in, of_other_kind
from jfi.data.io.text import LONGEST_ROW, stream_utf8
from jfi.utils.encoding import text_of

_OBJECT = 'must be an object such as {"user_id": 1}'
#: Integers up to it are exact in float64.
_EXACT = 2.0**53
_BLANK, _BLANKS = b" \t\r\n", re.compile(rb"[ \t\r\n]*")
_QUOTE, _COMMA, _LINE_END = b'",\n'
#: By byte of JSON how many more lists and objects are open after it.
_DEPTH = np.zeros(256, np.int8)
_DEPTH[[*b"[{"]], _DEPTH[[*b"]}"]] = 1, -1
_IS_STRUCTURE = _DEPTH != 0
_IS_STRUCTURE[[_QUOTE, _COMMA, _LINE_END]] = True


def iterate_json(file: File, wanted: Container[str], reading: SourceReading) -> Iterator[SourceRows]:
    """Yields the columns of a file of JSON that are in `wanted`; a table has the rows of about 16 MiB.

    Values keep the types that Arrow finds in a part of the file, or are texts where they are of several types.

    Raises:
        DataError: a row is not an object, a name is twice in one, or a value is an object or a list of lists.
    """
    known: dict[str, None] = {}
    parts = stream_utf8(file)
    first = next(parts, b"")
    split = _split_array if first.lstrip().startswith(b"[") else _split_lines
    for block in split(file.path, chain([first], parts)):
        data = block.parse(wanted)
        known.update((name, None) for name in data.column_names if name)
        for name in known.keys() - data.column_names:  # of rows before
            data = data.append_column(name, pa.nulls(len(data)))
        yield SourceRows(file.path, columns_in(data, wanted), list(known), block.line, reading=reading)


def _split_lines(path: str, parts: Iterator[bytes]) -> Iterator["_Block"]:
    rest: list[bytes] = []  # of a line that goes on
    begun, lines = False, 1
    for part in parts:
        end = part.rfind(b"\n") + 1
        if sum(map(len, rest)) + (part.find(b"\n") if end else len(part)) > LONGEST_ROW:
            raise DataError(f"{path}:{lines}: a line longer than {LONGEST_ROW >> 20} MiB; it {_OBJECT}")
        if end:
            yield _Block(path, b"".join([*rest, part[:end]]), lambda line, lines=lines: lines + line)
            lines += part.count(b"\n")
            begun, rest = True, []
        rest.append(part[end:])
    if not begun or any(rest):
        yield _Block(path, b"".join(rest), lambda line: lines + line)


def _split_array(path: str, parts: Iterator[bytes]) -> Iterator["_Block"]:
    """Yields the elements of an array, a line each."""
    text, line, begun, is_closed = b"", 1, False, False
    for part in chain(parts, [None]):
        text += part or b""
        if is_closed:
            if text.strip(_BLANK):
                raise DataError(f"{path}:{line}: text follows the array")
            text = b""
            continue
        start = 0 if begun else text.index(b"[") + 1
        content = np.frombuffer(re.sub(rb"\\[^\n]", b"__", text), np.uint8)
        at = start + np.flatnonzero(_IS_STRUCTURE[content[start:]])
        kinds = content[at]
        is_outside = np.cumsum(kinds == _QUOTE) % 2 == 0  # of texts
        depth = np.cumsum(np.where(is_outside, _DEPTH[kinds], 0))
        ends, line_ends = at[is_outside & (kinds == _COMMA) & (depth == 0)], np.flatnonzero(content == _LINE_END)
        if is_closed := bool((depth < 0).any()):
            last = at[(depth < 0).argmax()]
            ends = np.append(ends[ends < last], last)
        starts = [start, *(ends[:-1] + 1)]

        def line_of(row: int, text=text, line=line, starts=starts, line_ends=line_ends) -> int:
            return line + int(np.searchsorted(line_ends, _BLANKS.match(text, starts[row]).end()))

        if not len(ends):
            if part is None:
                raise DataError(f"{path}:{line_of(0)}: the array that goes on here is not closed")
            if len(text) > LONGEST_ROW:
                raise DataError(f"{path}:{line_of(0)}: an element longer than {LONGEST_ROW >> 20} MiB; it {_OBJECT}")
            continue
        flat = bytearray(text)
        np.frombuffer(flat, np.uint8)[at[is_outside & (kinds == _LINE_END)]] = ord(" ")
        rows = [flat[a:b].strip(_BLANK) for a, b in zip(starts, ends, strict=True)]
        if rows == [b""] and is_closed and not begun:
            rows = []
        if b"" in rows:
            raise DataError(f"{path}:{line_of(rows.index(b''))}: an element of the array is missing; it {_OBJECT}")
        yield _Block(path, b"\n".join(rows), line_of, " of the element")
        begun, line, text = True, line + int(np.searchsorted(line_ends, ends[-1])), text[ends[-1] + 1 :]


class _Block:
    """Some rows of a file, a line each.

    Args:
        path: of the file.
        content: the lines.
        line_of: from the number of a line of the content to the line of the file.
        unit: what columns of a line are counted in, for messages.
    """

    def __init__(self, path: str, content: bytes, line_of: Callable[[int], int], unit: str = "") -> None:
        self._path, self._content, self._line_of, self._unit = path, content, line_of, unit

    def line(self, row: int) -> int:
        """Returns the line of a row of the block."""
        return self._line_of(self._rows()[row][0])

    def parse(self, wanted: Container[str]) -> pa.Table:
        """Returns all columns of the block; values of those that are not in `wanted` may be missing."""
        try:
            data = self._parse()
        except pa.ArrowInvalid:
            return self._parse_slowly(wanted)
        # Arrow also takes several objects in a line, and an object in several lines.
        text = self._content.strip()
        if text.count(b"\n") != text.count(b"}\n{"):
            text = re.sub(rb"[ \t\r]+\n", b"\n", text)
        has_lines = text.count(b"\n") == text.count(b"}\n{") == len(data) - 1
        is_plain = has_lines and all(_is_exact(data.column(name)) for name in data.column_names if name in wanted)
        return data if is_plain else self._parse_slowly(wanted)

    def _parse(self) -> pa.Table:
        texts: dict[str, pa.DataType] = {}
        while True:
            data = pyarrow.json.read_json(
                pa.BufferReader(self._content),
                read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(self._content) + 1),
                parse_options=pyarrow.json.ParseOptions(explicit_schema=pa.schema(texts) if texts else None),
            )
            # Arrow makes times of texts that look like some.
            kinds = {field.name: field.type for field in data.schema}
            times = {name: TEXT for name, kind in kinds.items() if pa.types.is_timestamp(kind)}
            times |= {n: TEXTS for n, kind in kinds.items() if is_list(kind) and pa.types.is_timestamp(kind.value_type)}
            if not times:
                return data
            texts |= times

    def _rows(self) -> list[tuple[int, bytes]]:
        """Returns the number and the text of each line that is not blank."""
        lines = enumerate(self._content.split(b"\n"))
        return [(number, line) for number, line in lines if line and not line.isspace()]

    def _parse_slowly(self, wanted: Container[str]) -> pa.Table:
        rows = self._rows()
        records = [self._record(number, line) for number, line in rows]
        columns = {}
        for name in dict.fromkeys(name for record in records for name in record):
            values = [record.get(name) for record in records]
            columns[name] = self._column(name, values, rows) if name in wanted else pa.nulls(len(rows))
        return pa.table(columns or {"": pa.nulls(len(rows))})

    def _fault(self, line: int, what: str) -> DataError:
        return DataError(f"{self._path}:{self._line_of(line)}: {what}")

    def _record(self, line: int, text: bytes) -> dict[str, Any]:
        if text.lstrip()[:1] == b"[":  # before a large array is decoded
            raise self._fault(line, _OBJECT)
        try:
            record = _DECODER.decode(text.decode())
        except json.JSONDecodeError as error:
            raise self._fault(line, f"not JSON: {error.msg.lower()} at column {error.colno}{self._unit}") from error
        except ValueError as error:
            raise self._fault(line, str(error)) from error
        except RecursionError as error:
            raise self._fault(line, "nested too deeply") from error
        if not isinstance(record, dict):
            raise self._fault(line, _OBJECT)
        return record

    def _column(self, name: str, values: list[Any], rows: list[tuple[int, bytes]]) -> pa.Array:
        has_lists = isinstance(next((value for value in values if value not in (None, "")), None), list)
        found = []
        for (line, _), value in zip(rows, values, strict=True):
            if value in (None, ""):
                found.append(None)
                continue
            if isinstance(value, dict):
                raise self._fault(line, f"'{name}' is an object; it must have one value per row")
            if isinstance(value, list) != has_lists:
                raise self._fault(line, f"'{name}' {of_other_kind(not has_lists)}")
            try:
                found.append([_text(one) for one in value] if has_lists else _text(value))
            except TypeError as error:
                raise self._fault(line, f"'{name}' {error}") from None
        return pa.array(found, TEXTS if has_lists else TEXT)


def _is_exact(column: pa.ChunkedArray) -> bool:
    """Returns whether Arrow has read the values of a column as they are.

    It reads integers beyond 64 bits, and integers in a column that has fractions, as float64. It loses a null that is
    the first value of the first list.
    """
    kind = column.type
    if is_list(kind):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            return False
        column, kind = pa.chunked_array([chunk.flatten() for chunk in column.chunks], kind.value_type), kind.value_type
    if pa.types.is_nested(kind):
        return False
    return not pa.types.is_floating(kind) or (pc.max(pc.abs(column)).as_py() or 0) < _EXACT


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(name for name in names if names.count(name) > 1)}' is twice in one object")
    return record


# json.loads would make one for each line.
_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _text(value: Any) -> str | None:
    if isinstance(value, list | dict):
        raise TypeError("is a list of lists or objects; it must be a list of texts or numbers")
    # A large float keeps its exponent, which `count_rounded` looks for.
    text = repr(value) if isinstance(value, float) and abs(value) >= _EXACT else text_of(value)
    if text is None and isinstance(value, str) and value:
        raise TypeError("holds half of a surrogate pair, which is no character")
    return text
