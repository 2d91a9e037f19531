"""Reads a file's name: the format, and for text the delimiter, header and encodings."""

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

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
# MovieLens' own files are latin-1; some mirrors converted them to UTF-8.
_MOVIELENS = ("utf-8", "latin-1")


@dataclass(frozen=True)
class Layout:
    """The format of a file.

    Args:
        format: "text" has fields between delimiters, "json" has an object per line.
        delimiter: between fields of text; one or two characters.
        columns: names of the columns, or None if the first line has them.
        quote: the quote character, or None.
        typed: the first line holds `name:type` for each column.
        separators: by multi-valued column the separator of its values.
        flags: columns of 0 and 1 that together make the multi-valued column `genres`.
        encodings: tried in this order, unless the config names another one.
    """

    format: Literal["text", "json", "parquet"]
    delimiter: str = ""
    columns: list[str] | None = None
    quote: str | None = None
    typed: bool = False
    separators: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    encodings: tuple[str, ...] = ("utf-8",)


_RECBOLE = Layout("text", "\t", typed=True)
_JSON, _PARQUET = Layout("json"), Layout("parquet")
# By the name of the file, else by its suffix.
_LAYOUTS = {
    "u.data": Layout("text", "\t", _RATINGS, encodings=_MOVIELENS),
    "u.user": Layout("text", "|", ["user_id", "age", "gender", "occupation", "zip_code"], encodings=_MOVIELENS),
    "u.item": Layout(
        "text",
        "|",
        ["item_id", "title", "release_date", "video_release_date", "imdb_url", *_GENRES],
        flags=_GENRES,
        encodings=_MOVIELENS,
    ),
    "ratings.dat": Layout("text", "::", _RATINGS, encodings=_MOVIELENS),
    "users.dat": Layout("text", "::", ["user_id", "gender", "age", "occupation", "zip_code"], encodings=_MOVIELENS),
    "movies.dat": Layout(
        "text", "::", ["item_id", "title", "genres"], separators={"genres": "|"}, encodings=_MOVIELENS
    ),
    ".csv": Layout("text", ",", quote='"'),
    ".tsv": Layout("text", "\t", quote='"'),
    ".inter": _RECBOLE,
    ".user": _RECBOLE,
    ".item": _RECBOLE,
    ".jsonl": _JSON,
    ".ndjson": _JSON,
    ".parquet": _PARQUET,
    ".parq": _PARQUET,
}
#: For messages.
KNOWN_NAMES = f"{', '.join(_LAYOUTS)}, and those of text with .gz"


def find_layout(path: str) -> Layout | None:
    """The layout of a file by its name, or None for a name that is not known.

    >>> find_layout("parts/0.csv.gz").delimiter, find_layout("notes.txt")
    (',', None)
    """
    name = PurePath(path).name.lower()
    plain = name.removesuffix(".gz")
    layout = _LAYOUTS.get(plain, _LAYOUTS.get(PurePath(plain).suffix))
    # Parquet compresses by itself.
    return None if layout is _PARQUET and plain != name else layout
