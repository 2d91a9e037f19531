"""Small files of every format, and seeded damage to them.

A mutation of `HARMLESS` leaves the values in use as they are; one of `HARMFUL` does anything.
"""

import csv
import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

COLUMNS = ["user_id", "item_id", "rating", "timestamp"]
_RANDOM = np.random.default_rng(7)
ROWS = [
    [f"u{_RANDOM.integers(5)}", f"i{_RANDOM.integers(6)}", str(1 + i % 5), str(1_000_000_000 + 50 * i), f"Title {i} é"]
    for i in range(40)
]
Edit = Callable[[bytes, np.random.Generator], bytes]


def _text(header: str | None, delimiter: str, fields: int = 5) -> bytes:
    lines = ([] if header is None else [header]) + [delimiter.join(row[:fields]) for row in ROWS]
    return "".join(f"{line}\n" for line in lines).encode()


def _parquet() -> bytes:
    user, item, rating, time, title = (list(column) for column in zip(*ROWS, strict=True))
    data = {"user_id": user, "item_id": pa.array(item).dictionary_encode(), "rating": list(map(int, rating))}
    stream = io.BytesIO()
    pa.parquet.write_table(
        pa.table(data | {"timestamp": list(map(int, time)), "title": title}),
        stream,
        row_group_size=15,
        write_page_checksum=True,
    )
    return stream.getvalue()


_ALL = [*COLUMNS, "title"]
FILES = {
    "r.csv": _text(",".join(_ALL), ","),
    "r.tsv": _text("\t".join(_ALL), "\t"),
    "r.inter": _text("user_id:token\titem_id:token\trating:float\ttimestamp:float\ttitle:token_seq", "\t"),
    "ratings.dat": _text(None, "::", 4),
    "u.data": _text(None, "\t", 4),
    "r.jsonl": "".join(
        json.dumps(dict(zip(_ALL, row, strict=True)), ensure_ascii=False) + "\n" for row in ROWS
    ).encode(),
    "r.parquet": _parquet(),
}
DELIMITERS = {"r.csv": b",", "r.tsv": b"\t", "r.inter": b"\t", "ratings.dat": b"::", "u.data": b"\t", "r.jsonl": b", "}


def read_again(name: str, content: bytes) -> dict[str, list[str | None]] | None:
    """The columns in use as Python's own modules read them, or None for a file that they refuse."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        text = content.decode("utf-8-sig")
        if name == "r.jsonl":
            lines = [line for line in text.split("\n") if line.strip()]
            rows: list[dict[str, Any]] = [json.loads(line, parse_int=str, parse_float=str) for line in lines]
            return {key: [_json_text(row.get(key)) for row in rows] for key in COLUMNS}
        delimiter = DELIMITERS[name].decode()
        quoted = name in ("r.csv", "r.tsv")
        lines = io.StringIO(text.replace("::", "\x1f") if delimiter == "::" else text, newline="")
        reader = csv.reader(
            lines, delimiter="\x1f" if delimiter == "::" else delimiter, quoting=0 if quoted else csv.QUOTE_NONE
        )
        rows = [row for row in reader if row]
        if quoted and len(rows) < sum(1 for line in io.StringIO(text, newline="") if line.strip("\r\n")):
            # Line ends within quotes: text after the closing quote tells that the opening one was none.
            list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except (ValueError, csv.Error, RecursionError, AttributeError):
        return None
    finally:
        csv.field_size_limit(limit)
    names = COLUMNS if name in ("ratings.dat", "u.data") else [field.rsplit(":", 1)[0] for field in rows.pop(0)]
    if any(len(row) != len(names) for row in rows) or not set(COLUMNS) <= set(names):
        return None
    return {key: [row[names.index(key)] or None for row in rows] for key in COLUMNS}


def _json_text(value: Any) -> str | None:
    if value is None or value == "":
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flip(content: bytes, random: np.random.Generator) -> bytes:
    damaged = bytearray(content)
    for _ in range(random.integers(1, 4)):
        damaged[random.integers(len(damaged))] ^= 1 << random.integers(8)
    return bytes(damaged)


def _cut(content: bytes, random: np.random.Generator) -> bytes:
    return content[: random.integers(len(content))]


def _drop(content: bytes, random: np.random.Generator) -> bytes:
    start = random.integers(len(content))
    return content[:start] + content[start + random.integers(1, 40) :]


def _insert(*choices: bytes) -> Edit:
    def insert(content: bytes, random: np.random.Generator) -> bytes:
        place = random.integers(len(content) + 1)
        return content[:place] + choices[random.integers(len(choices))] + content[place:]

    return insert


def _random_bytes(content: bytes, random: np.random.Generator) -> bytes:
    place = random.integers(len(content))
    return content[:place] + random.bytes(int(random.integers(1, 60))) + content[place:]


def _field(change: Callable[[bytes, np.random.Generator], bytes]) -> Callable[[str], Edit]:
    """Changes one field of one line."""

    def of(name: str) -> Edit:
        def edit(content: bytes, random: np.random.Generator) -> bytes:
            lines = content.split(b"\n")
            row = random.integers(len(lines) - 1)
            fields = lines[row].split(DELIMITERS.get(name, b"\0"))
            column = random.integers(len(fields))
            fields[column] = change(fields[column], random)
            lines[row] = DELIMITERS.get(name, b"\0").join(fields)
            return b"\n".join(lines)

        return edit

    return of


def _swallow(delimiter: bytes) -> Edit:
    """A quote at the start of a field, and one within the same field of a later row: the rows between become one."""

    def edit(content: bytes, random: np.random.Generator) -> bytes:
        rows = [line.split(delimiter) for line in content.split(b"\n")]
        first, second = sorted(random.choice(len(rows) - 2, 2, replace=False) + 1)
        column = random.integers(len(rows[first]))
        rows[first][column] = b'"' + rows[first][column]
        rows[second][column] += b'" x'
        return b"\n".join(map(delimiter.join, rows))

    return edit


_VALUES = [b"", b"abc", b"nan", b"inf", b"-1", b"1e999", b"2020-01-01", b"null", b"{}", b"[1]", b"true", b'"', b"\\"]
_HUGE = b"x" * 1_500_000
_QUOTES = [b'"', b'""', b'"x', b"'", b'x"y', b'\\"']
_BYTES = [b"\0", b"\r", b"\n", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\x1e", b"\x1f", "\u2028".encode(), b"\x85"]


def _lines(change: Callable[[list[bytes], int], list[bytes]]) -> Edit:
    def edit(content: bytes, random: np.random.Generator) -> bytes:
        lines = content.splitlines(keepends=True)
        return b"".join(change(lines, int(random.integers(len(lines)))))

    return edit


def harmful(name: str) -> dict[str, Edit]:
    """By name, edits that may do anything to the values of the file `name`."""
    edits = {
        "flip": _flip,
        "cut": _cut,
        "drop": _drop,
        "odd bytes": _insert(*_BYTES),
        "random bytes": _random_bytes,
        "empty": lambda content, random: b"",
        "only noise": lambda content, random: random.bytes(int(random.integers(1, 5000))),
        "twice": lambda content, random: content + content,
    }
    if name == "r.parquet":
        return edits
    if name in ("r.csv", "r.tsv"):
        edits["swallowed rows"] = _swallow(DELIMITERS[name])
    return edits | {
        "quote": _insert(*_QUOTES),
        "two quotes": lambda content, random: _insert(*_QUOTES)(_insert(*_QUOTES)(content, random), random),
        "value": _field(lambda field, random: _VALUES[random.integers(len(_VALUES))])(name),
        "field twice": _field(lambda field, random: field + DELIMITERS[name] + field)(name),
        "no field": _field(lambda field, random: b"")(name),
        "huge field": _field(lambda field, random: field + _HUGE)(name),
        "open quote": _field(lambda field, random: b'"' + field)(name),
        "line twice": _lines(lambda lines, i: [*lines[:i], lines[i], *lines[i:]]),
        "no line": _lines(lambda lines, i: lines[:i] + lines[i + 1 :]),
        "joined lines": _lines(lambda lines, i: [*lines[:i], lines[i].rstrip(b"\n"), *lines[i + 1 :]]),
        "latin-1": lambda content, random: content.decode().encode("latin-1"),
        "utf-16": lambda content, random: content.decode().encode("utf-16"),
        "zip": lambda content, random: b"PK\x03\x04" + content,
        "gzip": lambda content, random: gzip.compress(content)[: random.integers(2, 500)],
    }


def _quote_all(delimiter: bytes) -> Edit:
    def edit(content: bytes, random: np.random.Generator) -> bytes:
        return b"".join(
            delimiter.join(b'"%b"' % field for field in line.split(delimiter)) + b"\n" for line in content.splitlines()
        )

    return edit


def _titles(content: bytes, random: np.random.Generator) -> bytes:
    """Other characters in the column that is not in use."""
    letters = "xyzü用户 '"
    return content.replace(b"Title", "".join(random.choice(list(letters), 5)).encode())


def harmless(name: str) -> dict[str, Edit]:
    """By name, edits that leave the values in use of the file `name` as they are."""
    if name == "r.parquet":
        return {"same": lambda content, random: content, "chunks": _rewrite}
    edits = {
        "mark": lambda content, random: b"\xef\xbb\xbf" + content,
        "windows": lambda content, random: content.replace(b"\n", b"\r\n"),
        "no last line end": lambda content, random: content[:-1],
        "empty lines": _lines(lambda lines, i: [*lines[: i + 1], b"\n\n", *lines[i + 1 :]]),
        "titles": _titles,
    }
    if name != "r.jsonl":
        edits["mac"] = lambda content, random: content.replace(b"\n", b"\r")
    if name in ("r.csv", "r.tsv"):
        edits["all quoted"] = _quote_all(DELIMITERS[name])
        edits["line ends in titles"] = lambda content, random: content.replace(b"Title 7 \xc3\xa9", b'"Ti\n\n,\ttle"')
    return edits


def _rewrite(content: bytes, random: np.random.Generator) -> bytes:
    table = pa.parquet.read_table(io.BytesIO(content))
    stream = io.BytesIO()
    codec = ["none", "snappy", "gzip", "zstd", "lz4"][random.integers(5)]
    pa.parquet.write_table(table, stream, row_group_size=int(random.integers(1, 40)), compression=codec)
    return stream.getvalue()
