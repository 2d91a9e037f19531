"""The text of a delimited file, whole or some rows at a time, and what its quotes enclose."""

import csv
import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property

import numpy as np

from jfi.data.errors import DataError
from jfi.data.io.layouts import Layout

#: No row is longer.
LONGEST_ROW = 1 << 28
#: Advice for messages.
UNQUOTE = "set data.quoting: false if quotes are ordinary characters in this file"
# Bytes to look at in one step, which bounds the memory.
_SCAN = 1 << 24


class Text:
    """The text of a file as UTF-8, or whole rows of it, its delimiter as one character, and where its rows start.

    Args:
        path: of the file.
        layout: of the file.
        content: the text.
        before: lines of the file before the text, of which 0 means that it begins with the header.
    """

    def __init__(self, path: str, layout: Layout, content: bytearray, before: int = 0) -> None:
        self.path, self.layout, self.quote = path, layout, layout.quote
        self.content, self.delimiter, self.before = content, layout.delimiter, before
        if len(self.delimiter) > 1:
            # Arrow splits at single characters, so the delimiter becomes the ASCII unit separator.
            self.delimiter = "\x1f"
            self.content = self.content.replace(layout.delimiter.encode(), self.delimiter.encode())
        has_header = layout.columns is None and not before
        self.header = re.match(rb"[^\r\n]*(\r\n|\r|\n)?", self.content)[0] if has_header else b""

    def fault(self, line: int, what: str) -> DataError:
        """The error for a line of the text."""
        return DataError(f"{self.path}:{self.before + line}: {what}")

    def records(self) -> Iterator[tuple[int, int, list[str]]]:
        """The first and the last line of each row, and its fields, by the rules by which Arrow reads them."""
        lines = io.TextIOWrapper(io.BytesIO(self.content), "utf-8", newline="")
        quoting = csv.QUOTE_NONE if self.quote is None else csv.QUOTE_MINIMAL
        with long_fields():
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


def rows_of(parts: Iterator[bytes], layout: Layout) -> Iterator[bytearray]:
    """The text of the parts, cut between rows."""
    pending, enough = bytearray(), 1
    for part in parts:
        pending += part
        if len(pending) < enough:
            continue
        end = _end_of_rows(pending, layout)
        if end:
            yield pending[:end]
            del pending[:end]
        elif len(pending) > 2 * LONGEST_ROW:
            break  # the reader of the rows says what is wrong
        # A row that is longer than the text so far is not looked through once a part.
        enough = 1 if end else 2 * len(pending)
    if pending or not layout.columns:
        yield pending


def _end_of_rows(content: bytearray, layout: Layout) -> int:
    """Returns where the last row ends that is whole for sure; 0 if none is."""
    # After a last CR an LF may follow.
    end = max(content.rfind(b"\n"), content.rfind(b"\r", 0, len(content) - 1)) + 1
    quote = (layout.quote or "").encode()
    if not quote or content.find(quote) < 0:
        return end
    if content.count(quote, 0, end) % 2:
        opener = content.rfind(quote, 0, end)
        end = max(content.rfind(b"\n", 0, opener), content.rfind(b"\r", 0, opener)) + 1
    if quotes_are_regular(content, ord(layout.delimiter), ord(quote), end):
        return end
    # A quote within a field: Python's csv finds the rows, of which the last may go on.
    text, last = Text("", layout, content), 1
    with suppress(csv.Error):
        for first, _, _ in text.records():
            last = first
    return sum(map(len, text.lines[: last - 1]))


def quotes_are_regular(content: bytes | bytearray, delimiter: int, quote: int, end: int) -> bool:
    """Returns whether odd quotes open a field or follow a quote, and even ones close a field or precede one.

    Args:
        content: whole rows, and at least one byte after `end` or a line end before it.
        delimiter, quote: the characters.
        end: of the bytes to look at.
    """
    before, after = np.zeros(256, bool), np.zeros(256, bool)
    before[[delimiter, quote, 10, 13]] = after[[delimiter, quote, 10, 13]] = True
    content, opens = np.frombuffer(content, np.uint8), True
    for start in range(0, end, _SCAN):
        places = np.flatnonzero(content[start : min(start + _SCAN, end)] == quote) + start
        openers, closers = places[not opens :: 2], places[opens::2]
        regular = before[content[openers - 1]] | (openers == 0)
        if not (regular.all() and after[content[closers + 1]].all()):
            return False
        opens ^= bool(len(places) % 2)
    return True


def swallowed(text: Text) -> DataError | None:
    """The fault if a quoted field that holds line ends goes on after its closing quote, as in `"Foo ... 5" disc`.

    Such a field began with a quote that was an ordinary character, and has taken in rows.
    """
    for first, last, _ in text.records():
        span = open_quote(text, first, last) if last > first else None
        if span is not None and span[2]:
            what = f"the quote that opens a field here takes in text up to a quote within line {text.before + span[1]}"
            return text.fault(span[0], f"{what}; {UNQUOTE}")
    return None


def open_quote(text: Text, first: int, last: int) -> tuple[int, int | None, bool] | None:
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


@contextmanager
def long_fields() -> Iterator[None]:
    """Lifts the limit of Python's csv, which is 128 KiB a field."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)
