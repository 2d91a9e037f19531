"""A file, a folder, a glob, a URL, a table in memory, or a list of these -> the files of a table, and their layouts."""

import glob
import hashlib
import os
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import IO, Any, Literal
from urllib.parse import unquote

import fsspec
import pyarrow as pa

from jfi.data.errors import DataError
from jfi.utils.files import by_number, reading_file

_RATINGS = "user_id item_id rating timestamp"
_GENRES = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy "
    "Film-Noir Horror Musical Mystery Romance Sci-Fi Thriller War Western"
)


@dataclass(frozen=True)
class FileLayout:
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


def _movielens(delimiter: str, columns: str, **other: Any) -> FileLayout:
    # MovieLens' own files are latin-1; some mirrors converted them to UTF-8.
    return FileLayout("text", delimiter, columns.split(), encodings=("utf-8", "latin-1"), **other)


_RECBOLE = FileLayout("text", "\t", typed=True)
_JSON, _PARQUET = FileLayout("json"), FileLayout("parquet")
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
    ".csv": FileLayout("text", ",", quote='"'),
    ".tsv": FileLayout("text", "\t", quote='"'),
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


def find_layout(path: str, delimiter: str | None = None) -> FileLayout | None:
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
    return FileLayout("text", delimiter, quote='"') if layout is None and delimiter is not None else layout


#: Files of a prepared dataset.
_PREPARED = ("manifest.json", "schema.json")
#: How messages name a table in memory; and what is before its SHA-256, where it has to be named.
IN_MEMORY, _URL = "the table", "table://"
#: Names under which file systems say when an object was written, or what is in it.
_VERSION = re.compile(r"(?i)etag|time|modified|updated|created|generation|version|md5|sha|crc|lfs|blob")
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
#: The file systems that URLs may name: they only read files. Others of fsspec read what a file names, or run its code.
_PROTOCOLS = ("file", "memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "http", "https", "hf", "hdfs", "oss")


@dataclass(frozen=True)
class File:
    """A file of a table.

    Args:
        path: as the config names it, or below the folder that the config names.
        layout: its format.
        partitions: values of columns that the names of its folders give, as in `parts/day=2020-01-01/0.parquet`.
        table: its rows, if it is a table in memory.
        setting: the config's field that names it, or an option or an argument.
    """

    path: str
    layout: FileLayout
    partitions: dict[str, str | None] = field(default_factory=dict)
    table: pa.Table | None = None
    setting: str = "data.interactions"

    @property
    def is_configured(self) -> bool:
        """Returns whether a config names the file, so that its settings can say how to read it."""
        return self.setting.startswith("data.")

    def advice(self, text: str) -> str:
        """Returns the end of a message that advises on a setting of a config; "" where none names the file."""
        return f"; {text}" if self.is_configured else ""


class UnnamedURL(str):
    """A URL that a file names, such as a run's config, and the command line does not; `find_files` refuses it."""

    def __deepcopy__(self, memo: dict) -> str:
        return str(self)  # `dataclasses.asdict` copies values, to write them


def unnamed_urls(paths: Any, named: Collection[str] = ()) -> Any:
    """Returns the paths of a setting that a file gives, in which a URL of another machine is an `UnnamedURL`.

    Args:
        paths: what the setting holds.
        named: URLs that the command line names, which stay as they are.
    """
    if isinstance(paths, list):
        return [unnamed_urls(path, named) for path in paths]
    is_marked = isinstance(paths, str) and is_url(paths) and not paths.startswith("file://") and paths not in named
    return UnnamedURL(paths) if is_marked else paths


def is_url(path: str) -> bool:
    """True for a path that fsspec opens, such as `s3://bucket/rows.parquet`."""
    return "://" in path


def open_file(path: str) -> IO[bytes]:
    """Opens a file of this machine or of one of the file systems that URLs may name."""
    if not is_url(path):
        return open(path, "rb")
    system, path = _file_system(path)
    return system.open(path, "rb")


def identify_file(path: str) -> list[Any] | dict[str, str]:
    """Returns what changes where a file is replaced, as JSON can hold it; nothing of a path where no file is.

    Where the server of a URL says neither when an object was written nor what is in it, no two results are equal.
    """
    if not is_url(path):
        state = os.stat(path) if os.path.exists(path) else None
        return [] if state is None else [state.st_size, state.st_mtime_ns]
    system, path = _file_system(path)
    system.invalidate_cache()
    info = {name: str(value) for name, value in sorted(system.info(path).items()) if value is not None}
    return info if any(map(_VERSION.search, info)) else info | {"unknown": secrets.token_hex(8)}


def _file_system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the file system of a URL, and the path there.

    Raises:
        ValueError: the URL names another protocol, or chains several.
    """
    protocol = url.split("://")[0]
    if protocol not in _PROTOCOLS:
        raise ValueError(f"its protocol must be one of {', '.join(_PROTOCOLS)}")
    if "::" in url:
        raise ValueError("URLs that are chained by :: are not read")
    return fsspec.url_to_fs(url)


def find_files(paths: Any, setting: str = "data.interactions", delimiter: str | None = None) -> list[File]:
    """Returns the files that a config's field names.

    A folder stands for the files in it and in its subfolders, linked ones too, sorted by name, where a number counts by
    its value; they must be of one kind. Names that start with `.` or `_` are skipped, as `_SUCCESS` is. The files of a
    glob are sorted in the same way; those of a list keep its order.

    Args:
        paths: a file, a folder, a glob, a URL such as `s3://bucket/*.parquet`, a table (`pyarrow.Table`, or a DataFrame
            of pandas or Polars), or a list of these.
        setting: the field's name, for messages.
        delimiter: of text files whose names are not known, or None to refuse them.

    Raises:
        DataError: nothing is there, a file's kind is unknown or repeated, or a folder holds several kinds.
    """
    listed = list(paths) if isinstance(paths, list | tuple) else [paths]
    if not listed:
        raise DataError(f"{setting} is an empty list; it must name at least one file")
    files: list[File] = []
    seen: dict[str, str] = {}
    for source in listed:
        if isinstance(source, UnnamedURL):
            what = f"{setting} of a config file or a run is a URL, {source}; only those that the command line names too"
            given = listed[0] if len(listed) == 1 else f"'[{', '.join(map(str, listed))}]'"
            raise DataError(f"{what} are opened: add --{setting.removeprefix('--')} {given}")
        if not isinstance(source, str | os.PathLike):
            files.append(File(IN_MEMORY, FileLayout("arrow"), table=as_table(source, setting), setting=setting))
            continue
        first: dict[str, File] = {}  # by folder
        for folder, path in _expand(os.fspath(source), setting):
            layout = find_layout(path, delimiter)
            file = File(path, layout or FileLayout("text"), _partitions(path, folder), setting=setting)
            if layout is None:
                advice = file.advice("for other text files set data.delimiter")
                raise DataError(f"{path}: unknown file type; known names and suffixes: {KNOWN_NAMES}{advice}")
            other = file if folder is None else first.setdefault(folder, file)
            if file.layout != other.layout:
                names = " and ".join(os.path.relpath(one.path, folder) for one in (other, file))
                advice = f"name those to read, as in {os.path.join(folder, '*.parquet')}"
                raise DataError(f"{folder}: the folder holds files of several kinds, {names}; {advice}")
            real = path if is_url(path) else os.path.realpath(path)
            if real in seen:
                also = "" if seen[real] == path else f", also as {seen[real]}"
                raise DataError(f"{path}: {setting} names this file twice{also}")
            seen[real] = path
            files.append(file)
    return files


def _expand(path: str, setting: str) -> list[tuple[str | None, str]]:
    """Returns the files of a path, each after the folder that stands for it, or None."""
    if not path:
        raise DataError(f"{setting} is ''; it must name a file, a folder or a glob")
    if "\0" in path:
        raise DataError(f"{path}: {setting} holds the character NUL, which no path can hold")
    if is_url(path):
        return _expand_url(path, setting)
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return [(path, one) for one in _files_below(path)]
    if os.path.exists(path):
        if not os.path.isfile(path):
            raise DataError(f"{path}: not a regular file")
        return [(None, path)]
    if not glob.has_magic(path):
        if not os.path.splitext(path)[1]:  # meant as a folder
            raise DataError(f"{path}: no such file or directory")
        return [(None, path)]  # reading it says that it is not there
    found = sorted(glob.glob(path, recursive=True), key=by_number)
    # `**` also gives the folders of the files that it gives.
    found = [one for one in found if not (os.path.isdir(one) and any(x.startswith(one + os.sep) for x in found))]
    if not found:
        raise DataError(f"{path}: no file matches; {setting} is read as a glob, since no file has this name")
    return [pair for one in found for pair in _expand(one, setting)]


def _expand_url(url: str, setting: str) -> list[tuple[str | None, str]]:
    if url.startswith(_URL):
        raise DataError(f"{setting} was a table in memory, which no file holds; set it again")
    try:
        system, path = _file_system(url)
    except (ImportError, ValueError) as error:
        raise DataError(f"{url}: {setting}: {error}") from error
    if system.isfile(path):
        return [(None, url)]
    is_glob = glob.has_magic(path)
    found = system.glob(path) if is_glob else system.find(path)
    skipped = ("/.",) if is_glob else ("/.", "/_")
    found = [one for one in found if not any(sign in one.removeprefix(path) for sign in skipped) and system.isfile(one)]
    if not found:
        raise DataError(f"{url}: {'no file matches' if is_glob else 'no such file or directory'}")
    folder = None if is_glob else system.unstrip_protocol(path)
    return [(folder, system.unstrip_protocol(one)) for one in sorted(found, key=by_number)]


def _files_below(folder: str) -> list[str]:
    def refuse(error: OSError) -> None:
        with reading_file(error.filename, DataError):
            raise error

    if all(os.path.isfile(os.path.join(folder, name)) for name in _PREPARED):
        raise DataError(f"{folder}: a prepared dataset, not a table; train on it with data.prepared")
    found, seen = [], {}
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        other = seen.setdefault(os.path.realpath(parent), parent)
        if other != parent:
            raise DataError(f"{parent}: the same folder as {other}, which is read too; remove the link")
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        found += [os.path.join(parent, name) for name in names if not name.startswith((".", "_"))]
    if not found:
        raise DataError(f"{folder}: the folder holds no files; known names and suffixes: {KNOWN_NAMES}")
    for path in found:
        if not os.path.isfile(path):
            raise DataError(f"{path}: not a regular file")
    return sorted(found, key=by_number)


def name_tables(source: Any) -> Any:
    """Returns what `find_files` takes with a text that holds the SHA-256 in place of each table in memory."""
    if isinstance(source, list | tuple):
        return [name_tables(one) for one in source]
    if source is None or isinstance(source, str):
        return source
    if isinstance(source, os.PathLike):
        return os.fspath(source)
    digest = hashlib.sha256()
    table = as_table(source, "the data").combine_chunks()
    digest.update(str(table.schema).encode())
    for batch in table.to_batches():
        digest.update(batch.serialize())
    return f"{_URL}{digest.hexdigest()}"


def as_table(table: Any, setting: str) -> pa.Table:
    """Returns a `pyarrow.Table`, or a DataFrame of pandas or Polars, as a table of Arrow.

    Raises:
        DataError: it is another object; the message names the setting.
    """
    try:
        if isinstance(table, pa.Table):
            return table
        if hasattr(table, "__arrow_c_stream__"):
            return pa.table(table)
        return pa.Table.from_pandas(table, preserve_index=False)
    except (pa.ArrowException, AttributeError, OverflowError, TypeError, ValueError) as error:
        what = f"a path, a pyarrow.Table or a DataFrame that Arrow can read, got {type(table).__name__}"
        why = "an integer has more than 64 bits; write texts" if isinstance(error, OverflowError) else error
        raise DataError(f"{setting} must be {what}: {why}") from error


def _partitions(path: str, folder: str | None) -> dict[str, str | None]:
    """Returns the columns of Hive's folders `name=value` in a path below the folder of the table."""
    below = [] if folder is None else os.path.relpath(path, folder).split(os.sep)[:-1]
    pairs = [part.split("=", 1) for part in below if "=" in part]
    return {unquote(name): None if value == _HIVE_NULL else unquote(value) for name, value in pairs}
