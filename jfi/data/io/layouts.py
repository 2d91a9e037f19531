"""The layouts of files, by their names: the format, and for text the delimiter, header and encodings."""

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

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
        is_configured: whether a config names the file, so that its settings can say how to read it.
    """

    format: Literal["text", "json", "parquet", "arrow"]
    delimiter: str = ""
    columns: list[str] | None = None
    quote: str | None = None
    typed: bool = False
    separators: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    encodings: tuple[str, ...] = ("utf-8",)
    is_configured: bool = True

    def advice(self, text: str) -> str:
        """Returns the end of a message that advises on a setting of a config; "" where none names the file."""
        return f"; {text}" if self.is_configured else ""


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
    if layout is _PARQUET and plain != name:  # Parquet has its own compression.
        return None
    return Layout("text", delimiter, quote='"') if layout is None and delimiter is not None else layout
