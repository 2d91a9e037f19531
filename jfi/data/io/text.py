"""Delimited text -> tables of texts, since the config defines the type of a column, not its first rows."""

import csv
import io
import re
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from jfi.data.errors import DataError
from jfi.data.io.arrays import TEXT
from jfi.data.io.decode import stream_utf8
from jfi.data.io.layouts import Layout
from jfi.data.io.table import Reading, Table, columns_in, header_hint

#: No row is longer.
LONGEST_ROW = 1 << 28
_MAX_NAME = 1000
#: Arrow and csv split at single characters: a longer delimiter becomes the ASCII unit separator.
_UNIT_SEPARATOR = "\x1f"
_UNQUOTE = "set data.quoting: false if quotes are ordinary characters in this file"
_LINE_ENDS = [10, 13]
#: The error of Python's csv for a quote that is never closed.
_OPEN = "unexpected end of data"


def iterate_text(path: str, layout: Layout, wanted: Container[str], reading: Reading) -> Iterator[Table]:
    """Yields the columns of a text file that are in `wanted`, as texts; a table has the rows of about 16 MiB.

    Raises:
        DataError: the header is malformed, a row has too few or too many fields, or a quote is not closed.
    """
    names, separators, before = layout.columns, layout.separators, 0
    pending, enough, begun = bytearray(), 1, False
    for part in chain(stream_utf8(path, layout.encodings), [None]):
        pending += part or b""
        # A row that is longer than the text so far is not looked through once a part.
        if part is not None and len(pending) < enough:
            continue
        if names is None:
            header = re.match(rb"[^\r\n]*(\r\n|\r|\n)?", pending)
            if part is not None and header.end() == len(pending):  # it may go on
                continue
            names, separators = _header(path, layout, header[0].decode())
            del pending[: header.end()]
            before = 1
        block = _Block(path, layout, names, bytes(pending), before, is_last=part is None)
        if block.end or (part is None and not begun):  # a file without rows has a table too
            yield _table(block, separators, wanted, reading)
            begun = True
        elif part is not None and len(pending) > LONGEST_ROW:
            _Block(path, layout, names, bytes(pending), before, is_last=True)  # names a quote that is not closed
            raise block.fault(1, f"a row longer than {LONGEST_ROW >> 20} MiB")
        del pending[: block.end]
        before += block.num_lines
        enough = 1 if block.end else 2 * len(pending)


def _table(block: "_Block", separators: dict[str, str], wanted: Container[str], reading: Reading) -> Table:
    names, flags = block.names, block.layout.flags
    used = [name for name in names if name in wanted or ("genres" in wanted and name in flags)]
    data = columns_in(block.parse(used or names[:1]), used)
    if flags:
        names = [name for name in names if name not in flags] + ["genres"]
        if "genres" in wanted:
            data = data.append_column("genres", _join_flags(data.select(flags)))
    return Table(block.path, data, names, block.line, separators, reading=reading)


class _Block:
    """The rows of some text of a file.

    Args:
        path: of the file.
        layout: of the file.
        names: of its columns.
        text: UTF-8, from the start of a row.
        before: the number of lines before the text.
        is_last: whether the file ends with the text; otherwise its last row may go on.
    """

    def __init__(self, path: str, layout: Layout, names: list[str], text: bytes, before: int, is_last: bool) -> None:
        self.path, self.layout, self.names, self._before, self._is_last = path, layout, names, before, is_last
        self._text, self._delimiter = text, layout.delimiter
        #: Bytes and lines of whole rows.
        self.end = self.num_lines = 0
        #: The fields of the rows, if Python's csv has read them.
        self._records: list[list[str]] | None = None
        if not self._find_rows():
            self._read_slowly()

    def fault(self, line: int, what: str) -> DataError:
        """Returns the error for a line of the text, counted from 1."""
        return DataError(f"{self.path}:{self._before + line}: {what}")

    def line(self, row: int) -> int:
        """Returns the line of the file on which a row starts."""
        if self._records is None:
            return self._before + 1 + int(np.searchsorted(self._ends, self._starts[row], side="right"))
        return self._before + self._first_lines[row]

    def _find_rows(self) -> bool:
        """Finds where rows and lines end, if each quote opens or closes a field or doubles one."""
        content, text = np.frombuffer(self._text, np.uint8), self._text
        ends = np.flatnonzero(content == 10) + 1
        if b"\r" in text:
            returns = np.flatnonzero(content == 13) + 1
            # After a last CR an LF may follow.
            alone = np.append(content, 0 if self._is_last else 10)[returns] != 10
            ends = np.sort(np.append(ends, returns[alone]))
        if self._is_last and text and (not len(ends) or ends[-1] < len(text)):
            ends = np.append(ends, len(text))
        row_ends = ends
        quote = (self.layout.quote or "").encode()
        if quote and quote in text:
            quotes = np.flatnonzero(content == quote[0])
            row_ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
            self.end = int(row_ends[-1]) if len(row_ends) else 0
            if self._is_last and self.end < len(text):
                return False
            quotes = quotes[quotes < self.end]
            around = np.zeros(256, bool)
            around[[ord(self._delimiter), quote[0], *_LINE_ENDS]] = True
            openers, closers = quotes[::2], quotes[1::2] + 1
            starts_field = around[content[openers - 1]] | (openers == 0)
            if not (starts_field.all() and around[content[closers[closers < len(text)]]].all()):
                return False
        self.end = int(row_ends[-1]) if len(row_ends) else 0
        self.num_lines = int(np.searchsorted(ends, self.end, side="right"))
        starts = np.append(0, row_ends[:-1])[: len(row_ends)]
        first = content[starts]
        self._starts, self._ends = starts[(first != 10) & (first != 13)], ends  # blank lines are no rows
        return True

    def parse(self, used: list[str]) -> pa.Table:
        """Returns some columns as texts."""
        if self._records is None and len(self._starts):
            try:
                data = self._parse(used)
                if len(data) == len(self._starts):
                    return data
            except pa.ArrowInvalid:
                pass
            self._text, self._is_last = self._text[: self.end], True
            self._read_slowly()
        records = self._records or []
        places = [self.names.index(name) for name in used]
        return pa.table([pa.array([record[i] for record in records], TEXT) for i in places], used)

    def _parse(self, used: list[str]) -> pa.Table:
        text, delimiter, quote = self._text[: self.end], self._delimiter, self.layout.quote
        if quote is not None and quote.encode() not in text:
            quote = None
        if len(delimiter) > 1:
            text, delimiter = text.replace(delimiter.encode(), _UNIT_SEPARATOR.encode()), _UNIT_SEPARATOR
        return pyarrow.csv.read_csv(
            pa.BufferReader(text),
            # In one block, since Arrow loses the LF of a CR LF in quotes where a block ends between them.
            read_options=pyarrow.csv.ReadOptions(use_threads=False, column_names=self.names, block_size=len(text) + 1),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=delimiter, quote_char=quote or False, newlines_in_values=quote is not None
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(used, TEXT),
                include_columns=used,
                strings_can_be_null=True,
                null_values=[""],
                check_utf8=False,
            ),
        )

    def _read_slowly(self) -> None:
        """Reads the rows by Python's csv, which takes quotes within a field for characters as Arrow does.

        Raises:
            DataError: a row has too few or too many fields, or a quote takes in other rows.
        """
        text, delimiter = self._text.decode(), self._delimiter
        if len(delimiter) > 1:
            text, delimiter = text.replace(delimiter, _UNIT_SEPARATOR), _UNIT_SEPARATOR
        lines = list(io.StringIO(text, newline=""))
        quoting = _quoting(self.layout.quote)
        found: list[tuple[int, int, list[str]]] = []  # the lines before and up to the end of each row, and its fields
        with _long_fields():
            reader, start = csv.reader(iter(lines), delimiter=delimiter, quoting=quoting), 0
            try:
                for record in reader:
                    found.append((start, reader.line_num, record))
                    start = reader.line_num
            except csv.Error as error:
                raise self.fault(reader.line_num, str(error)) from error
            if not self._is_last:
                start = found.pop()[0] if found else 0
            for i, (first, last, record) in enumerate(found):
                # A blank line gives a record without fields.
                if record and (len(record) != len(self.names) or last > first + 1 or i == len(found) - 1):
                    self._check(lines[first:last], first + 1, delimiter, record)
        self.end = len(self._text) if self._is_last else len("".join(lines[:start]).encode())
        self.num_lines = start
        self._records = [record for _, _, record in found if record]
        self._first_lines = [first + 1 for first, _, record in found if record]

    def _check(self, lines: list[str], first: int, delimiter: str, record: list[str]) -> None:
        """Raises DataError if a row has not as many fields as there are names, or a quote takes in other rows."""
        fault, end = _quote_fault(lines, delimiter, self.layout.quote)
        if fault == _OPEN:
            raise self.fault(first, f"the quote that opens a field here is never closed; {_UNQUOTE}")
        if len(record) != len(self.names):
            what = f"{len(record)} fields, expected {len(self.names)}"
            if len(lines) > 1 or any(delimiter in field for field in record):
                taken = f"text up to line {self._before + first + len(lines) - 1}" if len(lines) > 1 else "a delimiter"
                what += f"; the quote that opens a field here takes in {taken}; {_UNQUOTE}"
            raise self.fault(first, what)
        if fault is not None and len(lines) > 1:
            line = self._before + first + end - 1
            what = f"the quote that opens a field here takes in text up to a quote within line {line}"
            raise self.fault(first, f"{what}; {_UNQUOTE}")


def _quote_fault(lines: list[str], delimiter: str, quote: str | None) -> tuple[str | None, int]:
    """Returns what Python's csv finds wrong with the quotes of a row, and the number of lines up to there."""
    reader = csv.reader(iter(lines), delimiter=delimiter, quoting=_quoting(quote), strict=True)
    try:
        next(reader)
    except csv.Error as error:
        return str(error), reader.line_num
    return None, 0


def _quoting(quote: str | None) -> int:
    return csv.QUOTE_NONE if quote is None else csv.QUOTE_MINIMAL


def _header(path: str, layout: Layout, line: str) -> tuple[list[str], dict[str, str]]:
    """Returns the names of the columns, and the separators of those that are multi-valued."""
    place = f"{path}:1"
    if not line.strip("\r\n"):
        what = "empty line" if line else "the file is empty"
        raise DataError(f"{place}: {what}, expected the names of the columns")
    if "\0" in line:
        raise DataError(f"{place}: the names of the columns hold the byte 0; is this UTF-16? set data.encoding: utf-16")
    delimiter = layout.delimiter
    if len(delimiter) > 1:
        line, delimiter = line.replace(delimiter, _UNIT_SEPARATOR), _UNIT_SEPARATOR
    lines = [line.strip("\r\n")]
    with _long_fields():
        if _quote_fault(lines, delimiter, layout.quote)[0] == _OPEN:
            raise DataError(f"{place}: the quote of a column's name is not closed on the line; {_UNQUOTE}")
        names = next(csv.reader(lines, delimiter=delimiter, quoting=_quoting(layout.quote)))
    longest = max(map(len, names))
    if longest > _MAX_NAME:
        raise DataError(f"{place}: the name of a column has {longest} characters, at most {_MAX_NAME} are read")
    separators = {}
    if layout.typed:
        for name in names:
            if not re.fullmatch(r".+:(token|token_seq|float|float_seq)", name):
                expected = "name:type, where type is token, token_seq, float or float_seq"
                raise DataError(f"{place}: header '{name}' must be {expected}")
        pairs = [name.rsplit(":", 1) for name in names]
        names, separators = [name for name, _ in pairs], {name: " " for name, kind in pairs if kind.endswith("_seq")}
    if len(set(names)) < len(names):
        repeated = next(name for i, name in enumerate(names) if name in names[:i])
        raise DataError(f"{place}: column '{repeated}' appears twice{header_hint(names)}")
    return names, separators


def _join_flags(flags: pa.Table) -> pa.LargeListArray:
    present = np.stack([pc.equal(flag, "1").to_numpy() for flag in flags.columns], axis=1).astype(bool)
    offsets = np.append(0, np.cumsum(present.sum(axis=1)))
    names = np.array(flags.column_names)[np.nonzero(present)[1]]
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(names, TEXT))


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lifts the limit of Python's csv, which is 128 KiB a field."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)
