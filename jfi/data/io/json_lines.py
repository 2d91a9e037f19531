"""JSON Lines -> tables: an object per line."""

import json
import re
from collections.abc import Container, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from jfi.data.errors import DataError
from jfi.data.io.arrays import TEXT, TEXTS, is_list
from jfi.data.io.decode import LONGEST_ROW, stream_utf8
from jfi.data.io.paths import File
from jfi.data.io.table import Reading, Table, columns_in, of_other_kind
from jfi.utils.encoding import text_of

_LINE = 'must be an object such as {"user_id": 1}, one a line'
#: Integers up to it are exact in float64.
_EXACT = 2.0**53


def iterate_json(file: File, wanted: Container[str], reading: Reading) -> Iterator[Table]:
    """Yields the columns of a file of JSON Lines that are in `wanted`; a table has the rows of about 16 MiB.

    Values keep the types that Arrow finds in a part of the file, or are texts where they are of several types.

    Raises:
        DataError: a line is not an object, a name is twice in one, or a value is an object or a list of lists.
    """
    known: dict[str, None] = {}
    before = 0
    for content in _whole_lines(file):
        block = _Block(file.path, content, before)
        data = block.parse(wanted)
        known.update((name, None) for name in data.column_names if name)
        yield Table(file.path, columns_in(data, wanted), list(known), block.line, reading=reading)
        before += content.count(b"\n")


def _whole_lines(file: File) -> Iterator[bytes]:
    rest: list[bytes] = []  # of a line that goes on
    begun, lines = False, 1
    for part in stream_utf8(file):
        end = part.rfind(b"\n") + 1
        if sum(map(len, rest)) + (part.find(b"\n") if end else len(part)) > LONGEST_ROW:
            raise DataError(f"{file.path}:{lines}: a line longer than {LONGEST_ROW >> 20} MiB; {_LINE}")
        if end:
            lines += part.count(b"\n")
            yield b"".join([*rest, part[:end]])
            begun, rest = True, []
        rest.append(part[end:])
    if not begun or any(rest):
        yield b"".join(rest)


class _Block:
    """Some whole lines of a file, after `before` others."""

    def __init__(self, path: str, content: bytes, before: int) -> None:
        self._path, self._content, self._before = path, content, before

    def line(self, row: int) -> int:
        """Returns the line of a row of the block."""
        return self._before + self._rows()[row][0]

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
        lines = enumerate(self._content.split(b"\n"), 1)
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
        return DataError(f"{self._path}:{self._before + line}: {what}")

    def _record(self, line: int, text: bytes) -> dict[str, Any]:
        if text.lstrip()[:1] == b"[":  # before a large array is decoded
            raise self._fault(line, _LINE)
        try:
            record = _DECODER.decode(text.decode())
        except json.JSONDecodeError as error:
            raise self._fault(line, f"not JSON: {error.msg.lower()} at column {error.colno}") from error
        except ValueError as error:
            raise self._fault(line, str(error)) from error
        except RecursionError as error:
            raise self._fault(line, "nested too deeply") from error
        if not isinstance(record, dict):
            raise self._fault(line, _LINE)
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
