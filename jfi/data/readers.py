"""Files -> tables. Text is read as strings, since the config defines the type of a column, not its first rows."""

import csv
import re
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from jfi.data.errors import DataError
from jfi.data.table import Table

_RATINGS = ["user_id", "item_id", "rating", "timestamp"]
_GENRES = [
    *(
        "unknown",
        "Action",
        "Adventure",
        "Animation",
        "Children's",
        "Comedy",
        "Crime",
        "Documentary",
        "Drama",
        "Fantasy",
    ),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
]


@dataclass(frozen=True)
class _Layout:
    """The format of a text file.

    Args:
        delimiter: between fields; one or two characters.
        columns: names of the columns, or None if the first line has them.
        quote: the quote character, or None.
        typed: the first line holds `name:type` for each column.
        separators: by multi-valued column the separator of its values.
        flags: columns of 0 and 1 that together make the multi-valued column `genres`.
    """

    delimiter: str
    columns: list[str] | None = None
    quote: str | None = None
    typed: bool = False
    separators: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)


_RECBOLE = _Layout("\t", typed=True)
# By the name of the file, else by its suffix.
_LAYOUTS = {
    "u.data": _Layout("\t", _RATINGS),
    "u.user": _Layout("|", ["user_id", "age", "gender", "occupation", "zip_code"]),
    "u.item": _Layout(
        "|", ["item_id", "title", "release_date", "video_release_date", "imdb_url", *_GENRES], flags=_GENRES
    ),
    "ratings.dat": _Layout("::", _RATINGS),
    "users.dat": _Layout("::", ["user_id", "gender", "age", "occupation", "zip_code"]),
    "movies.dat": _Layout("::", ["item_id", "title", "genres"], separators={"genres": "|"}),
    ".csv": _Layout(",", quote='"'),
    ".tsv": _Layout("\t", quote='"'),
    ".inter": _RECBOLE,
    ".user": _RECBOLE,
    ".item": _RECBOLE,
}


def read_table(path: str, wanted: Container[str]) -> Table:
    """The columns of a file that are in `wanted`; the layout follows from the file's name.

    Raises:
        DataError: the file cannot be read, its name has no known layout, or a row is malformed.
    """
    file = Path(path)
    layout = _LAYOUTS.get(file.name, _LAYOUTS.get(file.suffix))
    if layout is None and file.suffix != ".parquet":
        raise DataError(f"{path}: unknown file type; known names and suffixes: {', '.join(_LAYOUTS)}, .parquet")
    try:
        return _read_parquet(path, wanted) if layout is None else _read_text(path, layout, wanted)
    except OSError as error:
        raise DataError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from error


def _read_parquet(path: str, wanted: Container[str]) -> Table:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            known = file.schema_arrow.names
            data = file.read(columns=[name for name in known if name in wanted])
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file") from error
    return Table(path, data, known, line=lambda row: row + 1)


def _read_text(path: str, layout: _Layout, wanted: Container[str]) -> Table:
    text, delimiter = Path(path).read_bytes(), layout.delimiter
    if len(delimiter) > 1:
        # Arrow splits at single characters, so the delimiter becomes the ASCII unit separator.
        delimiter = "\x1f"
        text = text.replace(layout.delimiter.encode(), delimiter.encode())

    names, separators, start = layout.columns, layout.separators, 0
    if names is None:
        header = re.match(rb"[^\n]*\n?", text)[0]
        start = len(header)
        names = _header(path, header, delimiter, layout.quote)
        if layout.typed:
            names, separators = _typed(path, names)
    used = [name for name in names if name in wanted or ("genres" in wanted and name in layout.flags)]
    line = partial(_line, path, layout)
    if re.compile(rb"[^\r\n]").search(text, start):
        options = pyarrow.csv.ParseOptions(
            delimiter=delimiter, quote_char=layout.quote or False, newlines_in_values=layout.quote is not None
        )
        data = _parse(path, pa.py_buffer(text).slice(start), names, used, options, line)
    else:
        data = pa.table({name: pa.array([], pa.string()) for name in used})
    if layout.flags:
        names = [name for name in names if name not in layout.flags] + ["genres"]
        if "genres" in wanted:
            data = data.append_column("genres", _join_flags(data.select(layout.flags)))
    return Table(path, data, names, line, separators)


def _parse(
    path: str,
    rows: pa.Buffer,
    names: list[str],
    used: list[str],
    options: pyarrow.csv.ParseOptions,
    line: Callable[[int], int],
    encoding: str = "utf8",
) -> pa.Table:
    malformed = []

    def refuse(row: pyarrow.csv.InvalidRow) -> str:
        malformed.append(row)
        return "error"

    options.invalid_row_handler = refuse
    try:
        return pyarrow.csv.read_csv(
            pa.BufferReader(rows),
            # Arrow reports the number of a malformed row only when it reads with one thread.
            read_options=pyarrow.csv.ReadOptions(use_threads=False, column_names=names, encoding=encoding),
            parse_options=options,
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(used, pa.string()),
                include_columns=used,
                strings_can_be_null=True,
                null_values=[""],
            ),
        )
    except pa.ArrowInvalid as error:
        if malformed:
            row = malformed[0]
            what = f"{row.actual_columns} fields, expected {row.expected_columns}"
            raise DataError(f"{path}:{line(row.number - 1)}: {what}") from error
        if "invalid UTF8" in str(error) and encoding == "utf8":
            return _parse(path, rows, names, used, options, line, encoding="latin-1")
        raise DataError(f"{path}: {error}") from error


def _header(path: str, line: bytes, delimiter: str, quote: str | None) -> list[str]:
    decoded = line.strip(b"\r\n").decode("utf-8-sig", errors="replace")
    if not decoded:
        raise DataError(f"{path}:1: empty line, expected the names of the columns")
    quoting = csv.QUOTE_NONE if quote is None else csv.QUOTE_MINIMAL
    names = next(csv.reader([decoded], delimiter=delimiter, quoting=quoting))
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{path}:1: column '{name}' appears twice")
    return names


def _typed(path: str, header: list[str]) -> tuple[list[str], dict[str, str]]:
    """Names and separators of RecBole's atomic files, whose header holds `name:type`."""
    for name in header:
        if not re.fullmatch(r".+:(token|token_seq|float|float_seq)", name):
            raise DataError(
                f"{path}:1: header '{name}' must be name:type, where type is token, token_seq, float or float_seq"
            )
    names, types = zip(*(name.rsplit(":", 1) for name in header), strict=True)
    return list(names), {name: " " for name, kind in zip(names, types, strict=True) if kind.endswith("_seq")}


def _join_flags(flags: pa.Table) -> pa.ListArray:
    present = np.stack([pc.equal(flag, "1").to_numpy() for flag in flags.columns], axis=1).astype(bool)
    offsets = np.append(0, np.cumsum(present.sum(axis=1)))
    names = np.array(flags.column_names)[np.nonzero(present)[1]]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(names, pa.string()))


def _line(path: str, layout: _Layout, row: int) -> int:
    """The line on which row `row` starts: Arrow skips empty lines, and a quoted field may hold newlines."""
    quoting = csv.QUOTE_NONE if layout.quote is None else csv.QUOTE_MINIMAL
    # Latin-1 decodes any bytes, and delimiters, quotes and newlines are ASCII.
    with open(path, encoding="latin-1", newline="") as file:
        reader = csv.reader(file, delimiter=layout.delimiter[0], quoting=quoting)
        if layout.columns is None:
            next(reader)
        start = reader.line_num + 1
        for record in reader:
            if record:
                if row == 0:
                    break
                row -= 1
            start = reader.line_num + 1
        return start
