"""Delimited text -> a table of strings, since the config defines the type of a column, not its first rows."""

import csv
import re
from collections.abc import Callable, Container, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from jfi.data.errors import DataError
from jfi.data.io.decode import count_lines, read_utf8, stream_utf8
from jfi.data.io.layouts import Layout
from jfi.data.io.table import Table
from jfi.data.io.text_rows import (
    LONGEST_ROW,
    UNQUOTE,
    Text,
    long_fields,
    open_quote,
    quotes_are_regular,
    rows_of,
    swallowed,
)

_MAX_NAME = 1000
# Arrow reads a block at a time and refuses a row that is longer; the second size is tried where the first is too small.
_BLOCKS = (1 << 20, LONGEST_ROW)
# The last row given to Arrow. A quote that is never closed would swallow it, and so shows.
_END = "\x1e"
# Bytes of a part of a file that is read in parts.
_PART = 1 << 24


def read_text(path: str, layout: Layout, wanted: Container[str]) -> Table:
    """The columns of a delimited text file that are in `wanted`, as strings."""
    text = Text(path, layout, read_utf8(path, layout.encodings))
    return _table(text, *_columns(text), wanted, partial(_line, path, layout))


def iterate_text(path: str, layout: Layout, wanted: Container[str]) -> Iterator[Table]:
    """`read_text` as tables of some rows each, whose lines are those of the file; memory does not grow with it."""
    before, columns = 0, None
    for content in rows_of(stream_utf8(path, layout.encodings, _PART), layout):
        lines = count_lines(content)  # the parser appends to the text
        text = Text(path, layout, content, before)
        columns = columns or _columns(text)
        yield _table(text, *columns, wanted, partial(_line_of, text))
        before += lines


def _columns(text: Text) -> tuple[list[str], dict[str, str]]:
    """The names of the columns, and the separators of those that are multi-valued."""
    names, separators = text.layout.columns, text.layout.separators
    if names is None:
        names = _header(text)
        if text.layout.typed:
            names, separators = _typed(text.path, names)
    return names, separators


def _table(
    text: Text, names: list[str], separators: dict[str, str], wanted: Container[str], line: Callable[[int], int]
) -> Table:
    layout = text.layout
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
    return Table(text.path, data, names, line, separators)


def _parse(text: Text, names: list[str], used: list[str]) -> pa.Table:
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
            if "straddling" in str(error) and block < min(LONGEST_ROW, len(content)):
                continue
            raise _explain(text, len(names), str(error)) from error
    if end is None:
        return data
    if any(data.column(name)[-1].as_py() != end for name in used):
        raise _explain(text, len(names), "the last row is not whole")
    lines = count_lines(content) - count_lines(text.header) + 1
    if lines != len(data):
        regular = quotes_are_regular(content, ord(text.delimiter), ord(text.quote), len(text.content))
        if not regular and (fault := swallowed(text)):
            raise fault
    return data.slice(0, len(data) - 1)


def _explain(text: Text, expected: int, error: str) -> DataError:
    """Returns what is wrong with the file, found by reading it row by row."""
    last = 1
    try:
        for first, last, record in text.records():
            if record == [_END] * expected:
                break
            span = open_quote(text, first, last) if last > first or len(record) != expected else None
            if span is not None and span[1] is None:
                what = f"the quote that opens a field here is never closed; {UNQUOTE}"
                return text.fault(span[0], what)
            if len(record) != expected:
                what = f"{len(record)} fields, expected {expected}"
                if span is not None:
                    opened, closed = span[0] + text.before, span[1] + text.before
                    taken = f"text up to line {closed}" if closed > opened else "a delimiter"
                    what += f"; the quote that opens a field on line {opened} takes in {taken}; {UNQUOTE}"
                return text.fault(first, what)
            if sum(map(len, record)) > LONGEST_ROW // 4:
                return text.fault(first, f"a row longer than {LONGEST_ROW >> 20} MiB")
    except csv.Error as fault:
        error = str(fault)
    return text.fault(last, error)


def _header(text: Text) -> list[str]:
    line = text.header.decode().strip("\r\n")
    place = f"{text.path}:1"
    if not line:
        what = "empty line" if text.header else "the file is empty"
        raise DataError(f"{place}: {what}, expected the names of the columns")
    if "\0" in line:
        raise DataError(f"{place}: the names of the columns hold the byte 0; is this UTF-16? set data.encoding: utf-16")
    quoting = csv.QUOTE_NONE if text.quote is None else csv.QUOTE_MINIMAL
    with long_fields():
        try:
            names = next(csv.reader([line], delimiter=text.delimiter, quoting=quoting, strict=True))
        except csv.Error as error:
            if "end of data" in str(error):
                raise DataError(f"{place}: the quote of a column's name is not closed on the line; {UNQUOTE}") from None
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
    return _line_of(Text(path, layout, read_utf8(path, layout.encodings)), row)


def _line_of(text: Text, row: int) -> int:
    return text.before + next((first for i, (first, _, _) in enumerate(text.records()) if i == row), 1)
