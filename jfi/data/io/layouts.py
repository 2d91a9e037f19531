"""The layouts of files, by their names: the format, and for text the delimiter, header and encodings."""

import codecs
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal

from jfi.data.errors import DataError

_RATINGS = "user_id item_id rating timestamp"
_GENRES = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy "
    "Film-Noir Horror Musical Mystery Romance Sci-Fi Thriller War Western"
)


@dataclass(frozen=True)
class Layout:
    """The format of a file.

    Args:
        format: "text" has fields between delimiters, "json" has an object per line, "arrow" is a table in memory.
        delimiter: between fields of text; one character, or several without quotes.
        columns: names of the columns, or None if the first line has them.
        quote: the quote character, or None.
        typed: the first line holds `name:type` for each column.
        separators: by multi-valued column the separator of its values.
        flags: columns of 0 and 1 that together make the multi-valued column `genres`.
        encodings: tried in this order, unless the config names another one.
    """

    format: Literal["text", "json", "parquet", "arrow"]
    delimiter: str = ""
    columns: list[str] | None = None
    quote: str | None = None
    typed: bool = False
    separators: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    encodings: tuple[str, ...] = ("utf-8",)


@dataclass(frozen=True)
class FileSettings:
    """The settings of a config that say how files are read; see `jfi.data.DataConfig`.

    Args:
        encoding: of text files; UTF-8 leaves it to the layout, which for MovieLens' files allows latin-1 too.
        quoting: whether `"` quotes a field of CSV and TSV.
        delimiter: of text files with a header or with names in `header`, or None for that of the layout.
        header: by setting, such as "interactions", the names of the columns of text files without a header.
        missing_values: texts that mean a missing value.
    """

    encoding: str = "utf-8"
    quoting: bool = True
    delimiter: str | None = None
    header: dict[str, list[str]] = field(default_factory=dict)
    missing_values: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises DataError for settings that are wrong for any file."""
        try:
            # Codecs such as rot13 and base64 are not for text: str.encode refuses them.
            "a".encode(self.encoding)
            codecs.getincrementaldecoder(self.encoding)
        except (LookupError, ValueError) as error:
            raise DataError(
                f"data.encoding is '{self.encoding}'; it must be an encoding that Python knows, such as utf-8, "
                "gb18030, latin-1, cp1252 or utf-16"
            ) from error
        if self.delimiter is not None and (not self.delimiter or any(sign in self.delimiter for sign in '"\r\n')):
            raise DataError(f"data.delimiter is {self.delimiter!r}; it must be a character such as ';', and no quote")
        for name, columns in self.header.items():
            if name not in ("interactions", "users", "items"):
                raise DataError(f"data.header has '{name}'; it must have interactions, users or items")
            if not columns or len(set(columns)) < len(columns):
                raise DataError(f"data.header.{name} is {columns}; it must be the names of columns, each once")


def _movielens(delimiter: str, columns: str, **other: Any) -> Layout:
    # MovieLens' own files are latin-1; some mirrors converted them to UTF-8.
    return Layout("text", delimiter, columns.split(), encodings=("utf-8", "latin-1"), **other)


_RECBOLE = Layout("text", "\t", typed=True)
_JSON, _PARQUET = Layout("json"), Layout("parquet")
# By the name of the file, else by its suffix.
_LAYOUTS = {
    "u.data": _movielens("\t", _RATINGS),
    "u.user": _movielens("|", "user_id age gender occupation zip_code"),
    "u.item": _movielens(
        "|", f"item_id title release_date video_release_date imdb_url {_GENRES}", flags=_GENRES.split()
    ),
    "ratings.dat": _movielens("::", _RATINGS),
    "users.dat": _movielens("::", "user_id gender age occupation zip_code"),
    "movies.dat": _movielens("::", "item_id title genres", separators={"genres": "|"}),
    ".csv": Layout("text", ",", quote='"'),
    ".tsv": Layout("text", "\t", quote='"'),
    ".inter": _RECBOLE,
    ".user": _RECBOLE,
    ".item": _RECBOLE,
    ".jsonl": _JSON,
    ".ndjson": _JSON,
    ".json": _JSON,
    ".parquet": _PARQUET,
    ".parq": _PARQUET,
}
#: Suffixes of compressed text.
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
#: For messages.
KNOWN_NAMES = f"{', '.join(_LAYOUTS)}, and those of text with {' or '.join(COMPRESSED)}"


def find_layout(path: str, delimiter: str | None = None) -> Layout | None:
    """Returns the layout of a file by its name, or None for a name that is not known.

    With `delimiter`, a name that is not known is that of a text file.

    >>> find_layout("parts/0.csv.gz").delimiter, find_layout("notes.txt"), find_layout("notes.txt", ";").delimiter
    (',', None, ';')
    """
    name = PurePath(path).name.lower()
    suffix = PurePath(name).suffix
    plain = name.removesuffix(suffix) if suffix in COMPRESSED else name
    layout = _LAYOUTS.get(plain, _LAYOUTS.get(PurePath(plain).suffix))
    if layout is _PARQUET and plain != name:  # Parquet compresses by itself.
        return None
    return Layout("text", delimiter, quote='"') if layout is None and delimiter is not None else layout


def with_settings(layout: Layout, settings: FileSettings, setting: str) -> Layout:
    """Returns the layout of a file that the setting `data.interactions`, or another one, names."""
    if codecs.lookup(settings.encoding).name != "utf-8":
        layout = replace(layout, encodings=(settings.encoding,))
    if not settings.quoting:
        layout = replace(layout, quote=None)
    if layout.format != "text" or layout.typed or layout.columns is not None:
        return layout
    delimiter = settings.delimiter or layout.delimiter
    quote = layout.quote if len(delimiter) == 1 else None
    name = setting.removeprefix("data.")
    name = "interactions" if name in ("validation", "test") else name
    return replace(layout, delimiter=delimiter, quote=quote, columns=settings.header.get(name))
