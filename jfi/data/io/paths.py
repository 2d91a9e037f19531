"""A file, a folder, a glob, or a list of these -> the files of one table."""

import glob
import os
from dataclasses import dataclass, field
from urllib.parse import unquote

from jfi.data.errors import DataError
from jfi.data.io.layouts import KNOWN_NAMES, Layout, find_layout
from jfi.utils.files import by_number, reading_file

#: Files of a prepared dataset.
_PREPARED = ("manifest.json", "schema.json")
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class File:
    """A file of a table.

    Args:
        path: as the config names it, or below the folder that the config names.
        layout: its format.
        partitions: values of columns that the names of its folders give, as in `parts/day=2020-01-01/0.parquet`.
    """

    path: str
    layout: Layout
    partitions: dict[str, str | None] = field(default_factory=dict)


def find_files(paths: str | list[str], setting: str = "data.interactions") -> list[File]:
    """The files that a config's field names.

    A folder stands for the files in it and in its subfolders, linked ones too, sorted by name, where a number counts by
    its value; they must be of one kind. Names that start with `.` or `_` are skipped, as `_SUCCESS` is. The files of a
    glob are sorted in the same way; those of a list keep its order.

    Args:
        paths: a file, a folder, a glob, or a list of these.
        setting: the field's name, for messages.

    Raises:
        DataError: nothing is there, a file's kind is unknown or repeated, or a folder holds several kinds.
    """
    listed = [paths] if isinstance(paths, str) else list(paths)
    if not listed:
        raise DataError(f"{setting} is an empty list; it must name at least one file")
    files = [file for path in listed for file in _expand(path, setting)]
    seen: dict[str, str] = {}
    for file in files:
        real = os.path.realpath(file.path)
        if real in seen:
            raise DataError(f"{file.path}: {setting} names this file twice{_other_name(seen[real], file.path)}")
        seen[real] = file.path
    return files


def _other_name(first: str, second: str) -> str:
    return "" if first == second else f", also as {first}"


def _expand(path: str, setting: str) -> list[File]:
    if not path:
        raise DataError(f"{setting} is ''; it must name a file, a folder or a glob")
    if "\0" in path:
        raise DataError(f"{path}: {setting} holds the character NUL, which no path can hold")
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return _folder(path)
    if os.path.exists(path) or not glob.has_magic(path):
        return [_file(path)]
    found = sorted(glob.glob(path, recursive=True), key=by_number)
    # `**` also gives the folders of the files that it gives.
    found = [one for one in found if not (os.path.isdir(one) and any(x.startswith(one + os.sep) for x in found))]
    if not found:
        raise DataError(f"{path}: no file matches; {setting} is read as a glob, since no file has this name")
    return [file for one in found for file in (_folder(one) if os.path.isdir(one) else [_file(one)])]


def _file(path: str, partitions: dict[str, str | None] | None = None) -> File:
    layout = find_layout(path)
    if layout is None and not os.path.exists(path) and not os.path.splitext(path)[1]:  # meant as a folder
        raise DataError(f"{path}: no such file or directory")
    if layout is None:
        raise DataError(f"{path}: unknown file type; known names and suffixes: {KNOWN_NAMES}")
    if os.path.exists(path) and not os.path.isfile(path):
        raise DataError(f"{path}: not a regular file")
    return File(path, layout, partitions or {})


def _folder(folder: str) -> list[File]:
    def refuse(error: OSError) -> None:
        with reading_file(error.filename, DataError):
            raise error

    if all(os.path.isfile(os.path.join(folder, name)) for name in _PREPARED):
        raise DataError(f"{folder}: a prepared dataset, not a table; train on it with data.prepared")
    found = []
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for name in folders:
            _check_loop(os.path.join(parent, name), folder)
        found += [os.path.join(parent, name) for name in names if not name.startswith((".", "_"))]
    files = [_file(path, _partitions(os.path.relpath(path, folder))) for path in sorted(found, key=by_number)]
    if not files:
        raise DataError(f"{folder}: the folder holds no files; known names and suffixes: {KNOWN_NAMES}")
    for file in files[1:]:
        if file.layout != files[0].layout:
            raise DataError(
                f"{folder}: the folder holds files of several kinds, {os.path.relpath(files[0].path, folder)} and "
                f"{os.path.relpath(file.path, folder)}; name those to read, as in {os.path.join(folder, '*.parquet')}"
            )
    return files


def _check_loop(path: str, folder: str) -> None:
    """Raises DataError if `path`, below `folder`, is a link to a folder that it is in."""
    if not os.path.islink(path):
        return
    real, above = os.path.realpath(path), path
    while len(above) > len(folder):
        above = os.path.dirname(above)
        if os.path.realpath(above) == real:
            raise DataError(f"{path}: a link to {above}, the folder that it is in; remove it")


def _partitions(path: str) -> dict[str, str | None]:
    """The columns of Hive's folders `name=value` in a path below the folder of the table."""
    pairs = [part.split("=", 1) for part in path.split(os.sep)[:-1] if "=" in part]
    return {unquote(name): None if value == _HIVE_NULL else unquote(value) for name, value in pairs}
