"""Delimited text -> a table of strings, since the config defines the type of a column, not its first rows."""

import csv
import io
import re
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import cached_property, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from jfi.data.decode import count_lines, read_utf8
from jfi.data.errors import DataError
from jfi.data.layouts import Layout
from jfi.data.table import Table

_MAX_NAME = 1000
# Arrow reads a block at a time and refuses a row that is longer; the second size is tried where the first is too small.
_BLOCKS = (1 << 20, 1 << 28)
# The last row given to Arrow. A quote that is never closed would swallow it, and so shows.
_END = "\x1e"
# Bytes to look at in one step, which bounds the memory.
_SCAN = 1 << 24
_UNQUOTE = "set data.quoting: false if quotes are ordinary characters in this file"


class _Text:
    """The text of a file as UTF-8, its delimiter as one character, and where its rows start."""

    def __init__(self, path: str, layout: Layout) -> None:
        self.path, self.layout, self.quote = path, layout, layout.quote
        self.content, self.delimiter = read_utf8(path, layout.encodings), layout.delimiter
        if len(self.delimiter) > 1:
            # Arrow splits at single characters, so the delimiter becomes the ASCII unit separator.
            self.delimiter = "\x1f"
            self.content = self.content.replace(layout.delimiter.encode(), self.delimiter.encode())
        self.header = b"" if layout.columns is not None else re.match(rb"[^\r\n]*(\r\n|\r|\n)?", self.content)[0]

    def records(self) -> Iterator[tuple[int, int, list[str]]]:
        """The first and the last line of each row, and its fields, by the rules by which Arrow reads them."""
        lines = io.TextIOWrapper(io.BytesIO(self.content), "utf-8", newline="")
        quoting = csv.QUOTE_NONE if self.quote is None else csv.QUOTE_MINIMAL
        with _long_fields():
            reader = csv.reader(lines, delimiter=self.delimiter, quoting=quoting)
            if self.header:
                next(reader)
            start = reader.line_num + 1
            for record in reader:
                if record:  # Arrow skips empty lines.
                    yield start, reader.line_num, record
                start = reader.line_num + 1

    @cached_property
    def lines(self) -> list[bytearray]:
        return self.content.splitlines(keepends=True)


def read_text(path: str, layout: Layout, wanted: Container[str]) -> Table:
    """The columns of a delimited text file that are in `wanted`, as strings."""
    text = _Text(path, layout)
    names, separators = layout.columns, layout.separators
    if names is None:
        names = _header(text)
        if layout.typed:
            names, separators = _typed(path, names)
    used = [name for name in names if name in wanted or ("genres" in wanted and name in layout.flags)]
    if re.compile(rb"[^\r\n]").search(text.content, len(text.header)):
        # Without a column the number of rows would be lost.
        data = _parse(text, names, used or names[:1])
    else:
        data = pa.table({name: pa.array([], pa.string()) for name in used or names[:1]})
    if layout.flags:
        names = [name for name in names if name not in layout.flags] + ["genres"]
        if "genres" in wanted:
            data = data.append_column("genres", _join_flags(data.select(layout.flags)))
    return Table(path, data, names, partial(_line, path, layout), separators)


def _parse(text: _Text, names: list[str], used: list[str]) -> pa.Table:
    content, end = text.content, None
    if text.quote is not None:
        end = _END
        content += b"" if content.endswith((b"\n", b"\r")) else b"\n"
        content += text.delimiter.join([_END] * len(names)).encode()
    rows = pa.py_buffer(content).slice(len(text.header))
    for block in _BLOCKS:
        try:
            data = pyarrow.csv.read_csv(
                pa.BufferReader(rows),
                read_options=pyarrow.csv.ReadOptions(use_threads=False, column_names=names, block_size=block),
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter=text.delimiter, quote_char=text.quote or False, newlines_in_values=text.quote is not None
                ),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=dict.fromkeys(used, pa.string()),
                    include_columns=used,
                    strings_can_be_null=True,
                    null_values=[""],
                    check_utf8=False,
                ),
            )
            break
        except pa.ArrowInvalid as error:
            if "straddling" in str(error) and block < min(_BLOCKS[-1], len(content)):
                continue
            raise _explain(text, len(names), str(error)) from error
    if end is None:
        return data
    if any(data.column(name)[-1].as_py() != end for name in used):
        raise _explain(text, len(names), "the last row is not whole")
    lines = count_lines(content) - count_lines(text.header) + 1
    if lines != len(data) and not _quotes_are_regular(text) and (fault := _swallowed(text)):
        raise fault
    return data.slice(0, len(data) - 1)


def _explain(text: _Text, expected: int, error: str) -> DataError:
    """What is wrong with the file, found by reading it row by row."""
    last = 1
    try:
        for first, last, record in text.records():
            if record == [_END] * expected:
                break
            span = _open_quote(text, first, last) if last > first or len(record) != expected else None
            if span is not None and span[1] is None:
                what = f"the quote that opens a field here is never closed; {_UNQUOTE}"
                return DataError(f"{text.path}:{span[0]}: {what}")
            if len(record) != expected:
                what = f"{len(record)} fields, expected {expected}"
                if span is not None:
                    taken = f"text up to line {span[1]}" if span[1] > span[0] else "a delimiter"
                    what += f"; the quote that opens a field on line {span[0]} takes in {taken}; {_UNQUOTE}"
                return DataError(f"{text.path}:{first}: {what}")
            if sum(map(len, record)) > _BLOCKS[-1] // 4:
                return DataError(f"{text.path}:{first}: a row longer than {_BLOCKS[-1] >> 20} MiB")
    except csv.Error as fault:
        error = str(fault)
    return DataError(f"{text.path}:{last}: {error}")


def _quotes_are_regular(text: _Text) -> bool:
    """Whether every second quote opens a field or follows another quote, and every other one closes or precedes."""
    delimiter, quote = ord(text.delimiter), ord(text.quote)
    before, after = np.zeros(256, bool), np.zeros(256, bool)
    before[[delimiter, quote, 10, 13]] = after[[delimiter, quote, 10, 13]] = True
    content, opens = np.frombuffer(text.content, np.uint8), True
    for start in range(0, len(content), _SCAN):
        places = np.flatnonzero(content[start : start + _SCAN] == quote) + start
        openers, closers = places[not opens :: 2], places[opens::2]
        # Index -1 is the sentinel's last byte: the first quote of a file without a header follows nothing.
        regular = before[content[openers - 1]] | (openers == 0)
        if not (regular.all() and after[content[closers + 1]].all()):
            return False
        opens ^= bool(len(places) % 2)
    return True


def _swallowed(text: _Text) -> DataError | None:
    """The fault if a quoted field that holds line ends goes on after its closing quote, as in `"Foo ... 5" disc`.

    Such a field began with a quote that was an ordinary character, and has taken in rows.
    """
    for first, last, _ in text.records():
        span = _open_quote(text, first, last) if last > first else None
        if span is not None and span[2]:
            what = f"the quote that opens a field here takes in text up to a quote within line {span[1]}"
            return DataError(f"{text.path}:{span[0]}: {what}; {_UNQUOTE}")
    return None


def _open_quote(text: _Text, first: int, last: int) -> tuple[int, int | None, bool] | None:
    """Finds a row's first quoted field that holds a delimiter or a line end.

    Returns:
        The field's first line, its last line, and whether text follows its closing quote; None if there is no such
        field. A field whose quote is never closed is preferred; its last line is None.
    """
    content = b"".join(text.lines[first - 1 : last])
    quote, delimiter = re.escape(text.quote or "").encode(), re.escape(text.delimiter).encode()
    if not quote:
        return None
    quoted = re.compile(rb"%b(?:[^%b]|%b%b)*+(%b|\Z)" % ((quote,) * 5))
    rest = re.compile(rb"[^%b\r\n]*+(%b|\r\n|\r|\n|\Z)" % (delimiter, delimiter))
    position, span = 0, None
    while position < len(content):
        start = position
        match = quoted.match(content, position)
        if match is not None:
            position = match.end()
            inside = match[0]
            opened = first + _breaks(content[:start])
            if not match[1]:
                return opened, None, False
            if span is None and (_breaks(inside) or text.delimiter.encode() in inside):
                goes_on = content[position : position + 1] not in (b"", b"\r", b"\n", text.delimiter.encode())
                span = opened, opened + _breaks(inside), goes_on
        position = max(rest.match(content, position).end(), start + 1)
    return span


def _breaks(text: bytes) -> int:
    return len(re.findall(rb"\r\n|\r|\n", text))


def _header(text: _Text) -> list[str]:
    line = text.header.decode().strip("\r\n")
    place = f"{text.path}:1"
    if not line:
        raise DataError(f"{place}: empty line, expected the names of the columns")
    if "\0" in line:
        raise DataError(f"{place}: the names of the columns hold the byte 0; is this UTF-16? set data.encoding: utf-16")
    quoting = csv.QUOTE_NONE if text.quote is None else csv.QUOTE_MINIMAL
    with _long_fields():
        try:
            names = next(csv.reader([line], delimiter=text.delimiter, quoting=quoting, strict=True))
        except csv.Error as error:
            if "end of data" in str(error):
                raise DataError(
                    f"{place}: the quote of a column's name is not closed on the line; {_UNQUOTE}"
                ) from None
            names = next(csv.reader([line], delimiter=text.delimiter, quoting=quoting))
    longest = max(map(len, names))
    if longest > _MAX_NAME:
        raise DataError(f"{place}: the name of a column has {longest} characters, at most {_MAX_NAME} are read")
    repeated = next((name for i, name in enumerate(names) if name in set(names[:i])), None) if _repeats(names) else None
    if repeated is not None:
        raise DataError(f"{place}: column '{repeated}' appears twice")
    return names


def _repeats(names: list[str]) -> bool:
    return len(set(names)) < len(names)


def _typed(path: str, header: list[str]) -> tuple[list[str], dict[str, str]]:
    """Names and separators of RecBole's atomic files, whose header holds `name:type`."""
    for name in header:
        if not re.fullmatch(r".+:(token|token_seq|float|float_seq)", name):
            raise DataError(
                f"{path}:1: header '{name}' must be name:type, where type is token, token_seq, float or float_seq"
            )
    names, types = zip(*(name.rsplit(":", 1) for name in header), strict=True)
    if _repeats(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}:1: column '{repeated}' appears twice")
    return list(names), {name: " " for name, kind in zip(names, types, strict=True) if kind.endswith("_seq")}


def _join_flags(flags: pa.Table) -> pa.ListArray:
    present = np.stack([pc.equal(flag, "1").to_numpy() for flag in flags.columns], axis=1).astype(bool)
    offsets = np.append(0, np.cumsum(present.sum(axis=1)))
    names = np.array(flags.column_names)[np.nonzero(present)[1]]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(names, pa.string()))


def _line(path: str, layout: Layout, row: int) -> int:
    """The line on which row `row` starts: Arrow skips empty lines, and a quoted field may hold newlines."""
    records = _Text(path, layout).records()
    return next((first for i, (first, _, _) in enumerate(records) if i == row), 1)


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lifts the limit of Python's csv, which is 128 KiB a field."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)
