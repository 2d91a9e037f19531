"""Text in any encoding -> UTF-8; delimited text -> tables of texts, since the config defines the type of a column."""

import codecs
import csv
import io
import os
import re
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from jfi.data.errors import DataError
from jfi.data.io.arrays import TEXT
from jfi.data.io.paths import COMPRESSED, File, FileLayout, open_file
from jfi.data.io.table import SourceReading, SourceRows, columns_in, header_hint

UTF8 = "utf-8"
#: Bytes of a part of a file, of which memory holds a few.
PART = 1 << 24
#: No row is longer.
LONGEST_ROW = 1 << 26
_MAGIC = {
    b"PK\x03\x04": "a zip archive (or a spreadsheet); unpack it",
    b"PAR1": "a Parquet file; let its name end in .parquet",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; let its name end in .zst",
    b"\x1f\x8b": "compressed by gzip; let its name end in .gz",
}
_ADVICE = "set data.encoding to the encoding of the file, such as gb18030, latin-1, cp1252 or utf-16"


def stream_utf8(file: File) -> Iterator[bytes]:
    """Yields the text of a file as UTF-8, without a byte order mark, in parts of about 16 MiB.

    A file whose name ends in `.gz` or `.zst` is decompressed. Where its layout has several encodings, it is read twice.

    Raises:
        DataError: the file is in none of the encodings, or its content is another format's.
    """
    first, encoding = file.layout.encodings[0], file.layout.encodings[-1]
    if first != encoding:
        with suppress(DataError):
            for _ in _decode(file, first):
                pass
            encoding = first
    parts = (part for part in _decode(file, encoding) if part)
    yield next(parts, b"").removeprefix(codecs.BOM_UTF8)
    yield from parts


def count_lines(text: bytes | bytearray) -> int:
    """Returns the number of line ends: LF, CR LF or CR."""
    return text.count(b"\n") + (text.count(b"\r") - text.count(b"\r\n") if b"\r" in text else 0)


def _raw_parts(path: str) -> Iterator[bytes]:
    codec = COMPRESSED.get(os.path.splitext(path.lower())[1])
    with open_file(path) as file:
        stream = file if codec is None else pa.CompressedInputStream(pa.PythonFile(file, "r"), codec)
        try:
            for number, part in enumerate(iter(lambda: stream.read(PART), b"")):
                for magic, what in _MAGIC.items():
                    if number == 0 and part.startswith(magic):
                        raise DataError(f"{path}: this is no text, but {what}")
                yield part
        except OSError as error:
            if codec is None or error.errno is not None:
                raise
            raise DataError(f"{path}: not a whole {codec} file: {str(error).lower()}") from error


def _decode(file: File, encoding: str) -> Iterator[bytes]:
    """Yields the text of a file as UTF-8; no part ends between the CR and the LF of a line end."""
    path = file.path
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), translate=False)
    begin, offset, lines = b"", 0, 1
    for part in chain(_raw_parts(path), [b""]):
        begin, offset = begin or part[:4], offset + len(part)
        try:
            text = decoder.decode(part, final=not part).encode(UTF8)
        except UnicodeDecodeError as error:
            # The decoder may have kept the first bytes of a character from the part before.
            position = offset - len(error.object) + error.start
            lines += count_lines(error.object[: error.start].decode(encoding, "ignore").encode(UTF8, "ignore"))
            name = "UTF-8" if codecs.lookup(encoding).name == UTF8 else encoding
            is_utf16 = begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            advice = "it starts like UTF-16: set data.encoding: utf-16" if is_utf16 else _ADVICE
            what = f"the byte 0x{error.object[error.start]:02X} at offset {position} is not {name}"
            raise DataError(f"{path}:{lines}: {what}{file.advice(advice)}") from error
        except UnicodeError as error:  # UTF-16 without a byte order mark, or half of a surrogate pair
            raise DataError(f"{path}: not {encoding}: {error}{file.advice(_ADVICE)}") from error
        lines += count_lines(text)
        yield text


#: Bytes of the line of the columns' names, and characters of a name.
_MAX_HEADER, _MAX_NAME = 1 << 22, 1000
#: Arrow and csv split at single characters: a longer delimiter becomes the ASCII unit separator.
_UNIT_SEPARATOR = "\x1f"
_UNQUOTE = "set data.quoting: false if quotes are ordinary characters in this file"
#: The error of Python's csv for a quote that is never closed.
_OPEN = "unexpected end of data"


def iterate_text(file: File, wanted: Container[str], reading: SourceReading) -> Iterator[SourceRows]:
    """Yields columns of a text file as texts, and as lists where its layout has separators.

    A table has the rows of about 16 MiB.

    Raises:
        DataError: the header is malformed, a row has too few or too many fields, or a quote is not closed.
    """
    path, layout = file.path, file.layout
    names, separators, before = layout.columns, layout.separators, 0
    pending, begun = bytearray(), False
    for part in chain(stream_utf8(file), [None]):
        pending += part or b""
        if names is None:
            header = re.match(rb"[^\r\n]*(\r\n|\r|\n)?", pending)
            if header.end() > _MAX_HEADER:
                raise DataError(f"{path}:1: a line longer than {_MAX_HEADER >> 20} MiB, expected the names of columns")
            if part is not None and header.end() == len(pending):  # it may go on
                continue
            names, separators = _header(file, header[0].decode())
            del pending[: header.end()]
            before = 1
        block = _Block(file, names, bytes(pending), before, is_last=part is None)
        if block.end or (part is None and not begun):  # a file without rows has a table too
            yield _table(block, separators, wanted, reading)
            begun = True
        elif part is not None and len(pending) > LONGEST_ROW:
            _Block(file, names, bytes(pending), before, is_last=True)  # names a quote that is not closed
            raise block.fault(1, f"a row longer than {LONGEST_ROW >> 20} MiB")
        del pending[: block.end]
        before += block.num_lines


def _table(block: "_Block", separators: dict[str, str], wanted: Container[str], reading: SourceReading) -> SourceRows:
    names, flags = block.names, block.file.layout.flags
    used = [name for name in names if name in wanted or ("genres" in wanted and name in flags)]
    data = columns_in(block.parse(used or names[:1]), used)
    for name in separators.keys() & set(used):
        lists = pc.split_pattern(data.column(name), separators[name])
        data = data.set_column(data.column_names.index(name), name, lists)
    if flags:
        names = [name for name in names if name not in flags] + ["genres"]
        if "genres" in wanted:
            data = data.append_column("genres", _join_flags(data.select(flags)))
    return SourceRows(block.file.path, data, names, block.line, reading=reading)


class _Block:
    """The whole rows at the start of some text of a file.

    Args:
        file: the file.
        names: of its columns.
        text: UTF-8, from the start of a row.
        before: the number of lines before the text.
        is_last: whether the file ends with the text; otherwise its last row may go on.
    """

    def __init__(self, file: File, names: list[str], text: bytes, before: int, is_last: bool) -> None:
        self.file, self.names, self._before = file, names, before
        #: The first line and the fields of each row, if Python's csv has read them.
        self._rows: list[tuple[int, list[str]]] | None = None
        end = _end_of_rows(text, file.layout, is_last)
        self.end = self._read(text, is_last) if end is None else end
        self._text = text[: self.end]
        self.num_lines = count_lines(self._text)

    def fault(self, line: int, what: str) -> DataError:
        """Returns the error for a line of the text, counted from 1."""
        return DataError(f"{self.file.path}:{self._before + line}: {what}")

    def line(self, row: int) -> int:
        """Returns the line of the file on which a row starts."""
        if self._rows is None:
            self._read(self._text, is_last=True)
        return self._before + self._rows[row][0]

    def parse(self, used: list[str]) -> pa.Table:
        """Returns some columns as texts."""
        if self._rows is None:
            try:
                return self._parse(used)
            except pa.ArrowInvalid:
                self._read(self._text, is_last=True)
        positions = [self.names.index(name) for name in used]
        return pa.table([pa.array([record[i] for _, record in self._rows], TEXT) for i in positions], used)

    def _parse(self, used: list[str]) -> pa.Table:
        quote, (text, delimiter) = self.file.layout.quote, _split_by_one(self._text, self.file.layout.delimiter)
        quote = quote if quote and quote.encode() in text else None
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

    def _read(self, content: bytes, is_last: bool) -> int:
        """Reads the whole rows by Python's csv, and returns the number of their bytes.

        Raises:
            DataError: a row has too few or too many fields, or text follows the quote that closes a field.
        """
        quote, (text, delimiter) = self.file.layout.quote, _split_by_one(content, self.file.layout.delimiter)
        lines, rows, start = list(io.StringIO(text.decode(), newline="")), [], 0
        with _csv_reader(lines, delimiter, quote) as reader:
            try:
                for record in reader:
                    end = reader.line_num
                    if not is_last and end == len(lines):  # it may go on
                        break
                    if record and len(record) != len(self.names):
                        what = f"{len(record)} fields, expected {len(self.names)}"
                        is_quoted = quote is not None and quote in "".join(lines[start:end])
                        raise self.fault(start + 1, what + self.file.advice(_UNQUOTE) * is_quoted)
                    if record:  # a blank line has none
                        rows.append((start + 1, record))
                    start = end
            except csv.Error as error:
                if is_last or str(error) != _OPEN:
                    what = f"takes in text up to a quote within line {self._before + reader.line_num}"
                    what = "is never closed" if str(error) == _OPEN else what
                    what += self.file.advice(_UNQUOTE)
                    raise self.fault(start + 1, f"the quote that opens a field here {what}") from error
        self._rows = rows
        return len(content) if is_last else len("".join(lines[:start]).encode())


def _end_of_rows(text: bytes, layout: FileLayout, is_last: bool) -> int | None:
    """Returns the number of bytes of whole rows, or None if not each quote opens or closes a field or doubles one."""
    quote = (layout.quote or "").encode()
    if not quote or quote not in text:
        return len(text) if is_last else max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
    content = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(content == quote[0])
    around = np.zeros(256, bool)
    around[[ord(layout.delimiter), quote[0], *b"\r\n"]] = True
    openers, closers = quotes[::2], quotes[1::2] + 1
    starts_field = around[content[openers - 1]] | (openers == 0)
    if not (starts_field.all() and around[content[closers[closers < len(text)]]].all()):
        return None
    if is_last:
        return len(text) if len(quotes) % 2 == 0 else None
    ends = np.flatnonzero((content == 10) | (content == 13)) + 1
    ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
    return int(ends[-1]) if len(ends) else 0


def _split_by_one(text: bytes, delimiter: str) -> tuple[bytes, str]:
    if len(delimiter.encode()) == 1:
        return text, delimiter
    return text.replace(delimiter.encode(), _UNIT_SEPARATOR.encode()), _UNIT_SEPARATOR


@contextmanager
def _csv_reader(lines: list[str], delimiter: str, quote: str | None) -> Iterator[Any]:
    """Makes a reader by Python's csv, without its limit of 128 KiB a field within the block."""
    limit = csv.field_size_limit(sys.maxsize)
    quoting = csv.QUOTE_NONE if quote is None else csv.QUOTE_MINIMAL
    try:
        yield csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    finally:
        csv.field_size_limit(limit)


def _header(file: File, line: str) -> tuple[list[str], dict[str, str]]:
    """Returns the names of the columns, and the separators of those that are multi-valued."""
    location, layout, names = f"{file.path}:1", file.layout, line.strip("\r\n")
    if not names:
        what = "empty line" if line else "the file is empty"
        raise DataError(f"{location}: {what}, expected the names of the columns")
    if "\0" in line:
        advice = " set data.encoding: utf-16" if file.is_configured else ""
        raise DataError(f"{location}: the names of the columns hold the byte 0; is this UTF-16?{advice}")
    text, delimiter = _split_by_one(names.encode(), layout.delimiter)
    try:
        with _csv_reader([text.decode()], delimiter, layout.quote) as reader:
            names = next(reader)
    except csv.Error as error:
        what = "is not closed on the line" if str(error) == _OPEN else "is followed by text"
        raise DataError(f"{location}: the quote of a column's name {what}{file.advice(_UNQUOTE)}") from error
    longest = max(map(len, names))
    if longest > _MAX_NAME:
        raise DataError(f"{location}: the name of a column has {longest} characters, at most {_MAX_NAME} are read")
    separators = {}
    if layout.typed:
        for name in names:
            if not re.fullmatch(r".+:(token|token_seq|float|float_seq)", name):
                expected = "name:type, where type is token, token_seq, float or float_seq"
                raise DataError(f"{location}: header '{name}' must be {expected}")
        pairs = [name.rsplit(":", 1) for name in names]
        names, separators = [name for name, _ in pairs], {name: " " for name, kind in pairs if kind.endswith("_seq")}
    if len(set(names)) < len(names):
        repeated = next(name for i, name in enumerate(names) if name in names[:i])
        hint = header_hint(names) if file.is_configured else ""
        raise DataError(f"{location}: column '{repeated}' appears twice{hint}")
    return names, separators


def _join_flags(flags: pa.Table) -> pa.LargeListArray:
    present = np.stack([pc.equal(flag, "1").to_numpy() for flag in flags.columns], axis=1).astype(bool)
    offsets = np.append(0, np.cumsum(present.sum(axis=1)))
    names = np.array(flags.column_names)[np.nonzero(present)[1]]
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(names, TEXT))
