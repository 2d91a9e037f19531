"""A file, a folder, a glob, a URL, a table in memory, or a list of these -> the files of one table."""

import glob
import hashlib
import os
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import unquote

import fsspec
import pyarrow as pa

from jfi.data.errors import DataError
from jfi.data.io.layouts import KNOWN_NAMES, Layout, find_layout
from jfi.utils.files import by_number, reading_file

#: Files of a prepared dataset.
_PREPARED = ("manifest.json", "schema.json")
#: How messages name a table in memory; and what is before its SHA-256, where it has to be named.
IN_MEMORY, _URL = "the table", "table://"
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class File:
    """A file of a table.

    Args:
        path: as the config names it, or below the folder that the config names.
        layout: its format.
        partitions: values of columns that the names of its folders give, as in `parts/day=2020-01-01/0.parquet`.
        table: its rows, if it is a table in memory.
        setting: the config's field that names it.
    """

    path: str
    layout: Layout
    partitions: dict[str, str | None] = field(default_factory=dict)
    table: pa.Table | None = None
    setting: str = "data.interactions"


def is_url(path: str) -> bool:
    """True for a path that fsspec opens, such as `s3://bucket/rows.parquet`."""
    return "://" in path


def open_file(path: str) -> IO[bytes]:
    """Opens a file of this machine or of any file system that fsspec knows."""
    return fsspec.open(path, "rb").open() if is_url(path) else open(path, "rb")


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
        if not isinstance(source, str | os.PathLike):
            files.append(File(IN_MEMORY, Layout("arrow"), table=as_table(source, setting), setting=setting))
            continue
        first: dict[str, File] = {}  # by folder
        for folder, path in _expand(os.fspath(source), setting):
            file = File(path, _layout(path, delimiter), _partitions(path, folder), setting=setting)
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
        system, path = fsspec.url_to_fs(url)
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


def _layout(path: str, delimiter: str | None) -> Layout:
    layout = find_layout(path, delimiter)
    if layout is None:
        advice = "; for other text files set data.delimiter"
        raise DataError(f"{path}: unknown file type; known names and suffixes: {KNOWN_NAMES}{advice}")
    return layout


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
    """Returns what `find_files` takes with a text that holds the SHA-256 in the place of each table in memory."""
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
    except (pa.ArrowException, AttributeError, TypeError) as error:
        what = f"a path, a pyarrow.Table or a DataFrame that Arrow can read, got {type(table).__name__}"
        raise DataError(f"{setting} must be {what}: {error}") from error


def _partitions(path: str, folder: str | None) -> dict[str, str | None]:
    """Returns the columns of Hive's folders `name=value` in a path below the folder of the table."""
    below = [] if folder is None else os.path.relpath(path, folder).split(os.sep)[:-1]
    pairs = [part.split("=", 1) for part in below if "=" in part]
    return {unquote(name): None if value == _HIVE_NULL else unquote(value) for name, value in pairs}
