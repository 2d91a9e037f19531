"""Labels of what comes later (`LabelWindow`), made of the sorted rows of a table."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.errors import DataError
from jfi.data.labels import ITEM, SESSION, USER
from jfi.data.prepared.stages.column_files import map_arrow, read_columns
from jfi.data.prepared.stages.read import ADDED, RawColumn, SourceTables
from jfi.events.events import PAUSE, first_rows, user_blocks

_LEFT_OUT = "left_out.json"


def make_labels(work: Path, given: SourceTables, repeated: np.ndarray | None = None) -> None:
    """Writes the labels that are windows into the stage `rows`, and how many rows have none since theirs is not over.

    Args:
        work: folder of the stages; those up to `rows` are sorted.
        given: the tables.
        repeated: `[R]` int64 ascending, rows that are there twice and do not count, or None.
    """
    windows, folder, notes = given.config.label_windows(), work / "rows", []
    columns = read_columns(folder, "r+") if windows else {}
    repeated = np.zeros(0, np.int64) if repeated is None else repeated
    for name, window in windows.items():
        groups, open_rows, samples = _groups(columns, window.of, work, given), 0, 0
        newest = columns["time"].max(initial=-np.inf)
        for begin, end in user_blocks(first_rows(columns["user"])):
            rows = slice(begin, end)
            user, time, added, label = (columns[one][rows] for one in ("user", "time", ADDED + name, name))
            group, counted = groups(rows), np.array(added)
            counted[repeated[slice(*np.searchsorted(repeated, (begin, end)))] - begin] = 0.0
            found = sum_windows(user, time, group, added, counted, window.seconds)
            is_sample, is_open = ~np.isnan(label), time + window.seconds > newest
            samples, open_rows = samples + int(is_sample.sum()), open_rows + int((is_sample & is_open).sum())
            is_sample &= ~is_open & (group >= 0)
            label[:] = np.where(is_sample, found > 0 if window.value is None else found, np.nan)
        if open_rows:
            what = f"rows have no label '{window}': the table ends within their window"
            notes.append(f"{open_rows:,} of {samples:,} {what}")
    (folder / _LEFT_OUT).write_text(json.dumps(notes))


def read_left_out(work: Path) -> list[str]:
    """A line for each label of which `make_labels` has left out rows."""
    return json.loads((work / "rows" / _LEFT_OUT).read_text())


def sum_windows(
    user: np.ndarray, time: np.ndarray, group: np.ndarray, added: np.ndarray, counted: np.ndarray, seconds: float
) -> np.ndarray:
    """`[N]` float64, what the other rows of a row's user and group add from its time until so many seconds later.

    Args:
        user, time: `[N]` of rows sorted by them.
        group: `[N]` integers; rows with -1 are in none.
        added: `[N]` float64, what each row adds; NaN adds nothing.
        counted: `[N]` float64, the same, 0 for rows that repeat another one.
        seconds: the length of the window.

    Example:
        >>> time, group, added = np.array([0.0, 5.0, 9.0]), np.array([4, 4, 4]), np.array([1.0, 1.0, 1.0])
        >>> sum_windows(np.zeros(3, int), time, group, added, added, 5.0)
        array([1., 1., 0.])
    """
    if not len(user):
        return np.zeros(0)
    size = np.int64(group.max()) + 2
    key = (user.astype(np.int64) - int(user[0])) * size + group + 1
    order = np.argsort(key, kind="stable")  # rows of a user stay in the order of time
    key = np.cumsum(np.diff(key[order], prepend=key[order[0]]) != 0)
    times, moment = np.unique(time, return_inverse=True)
    until = np.searchsorted(times, times + seconds, side="right")[moment[order]]
    key = key * (len(times) + 1)
    codes = key + moment[order]
    first = np.maximum.accumulate(np.where(np.diff(codes, prepend=-1) != 0, np.arange(len(codes)), 0))
    total = np.append(0.0, np.cumsum(np.nan_to_num(counted[order])))
    found = np.empty(len(user))
    found[order] = total[np.searchsorted(codes, key + until)] - total[first]
    return found - np.nan_to_num(added)


def _groups(columns: dict[str, np.ndarray], of: str, work: Path, given: SourceTables) -> Callable[[slice], np.ndarray]:
    """Gives of rows of whole users `[n]` integers, equal for what a window says must be, -1 for none."""
    config = given.config
    if of == USER:
        return lambda rows: np.zeros(rows.stop - rows.start, np.int32)
    if of == ITEM:
        return lambda rows: columns["item"][rows]
    if of == SESSION and config.session is None:  # only rows of one user are compared
        return lambda rows: np.cumsum(np.diff(columns["time"][rows], prepend=-np.inf) > PAUSE)
    name = config.session if of == SESSION else of
    if given.items is not None and of not in (SESSION, *config.window_columns()):
        ids = map_arrow(work / "rows/item_ids.arrow")["id"].cast(pa.large_string())
        values = given.items.categories(name, config.separators())
        _check_single(name, pa.types.is_nested(values.type))
        values = values.take(pc.index_in(ids, value_set=given.items.strings(config.item))).dictionary_encode()
        codes = pc.fill_null(values.indices, -1).to_numpy(zero_copy_only=False)
        return lambda rows: codes[columns["item"][rows]]
    column = RawColumn(name, "category")
    _check_single(name, column.offsets in columns)
    return lambda rows: columns[column.file][rows]


def _check_single(name: str, has_lists: bool) -> None:
    if has_lists:
        raise DataError(f"data.label.of is '{name}', whose rows are lists; it must have one value a row")
