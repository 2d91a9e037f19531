"""Fills a state with the columns of items and users, from their tables, or from the log where they have none."""

from collections.abc import Callable, Collection
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data import DataConfig, DataError, DataSchema
from jfi.data.io.arrays import as_text
from jfi.data.io.blocks import DROP, read_table
from jfi.data.io.table import SourceRows
from jfi.data.prepared.stages.columns import Columns
from jfi.data.schema.columns import CodedColumn
from jfi.data.schema.semantic_ids import SemanticIDs
from jfi.serving.validation import LONGEST_ID
from jfi.state.columns import KNOWN, ColumnLayout, Entity, Values, layouts_of, write_columns
from jfi.state.dictionaries import Cache
from jfi.state.layout import StateInfo
from jfi.state.stores import Store
from jfi.state.table_rows import check_lists
from jfi.utils.jagged import blocks

#: Ids that are written together.
_AT_ONCE = 5000


def read_semantic_ids(config: DataConfig, schema: DataSchema) -> SemanticIDs | None:
    """Reads the semantic IDs of a run's items, or None if it has none."""
    if schema.codec is None or config.semantic_ids is None:
        return None
    sids = SemanticIDs.read(config.semantic_ids, config.item)
    sids.check_codec(schema.codec, "the run")
    return sids


def write_tables(
    store: Store, info: StateInfo, config: DataConfig, schema: DataSchema, of: Collection[Entity] = ("item", "user")
) -> dict[Entity, int]:
    """Writes the columns of a run's tables of items and users; returns by entity how many ids have been written.

    Raises:
        DataError: a table is missing or malformed, or an id is too long.
    """
    config, written = config.resolved(), {}
    tables = {"item": (config.items, config.item), "user": (config.users, config.user)}
    for one, layout in layouts_of(info).items():
        paths, key = tables[one]
        if one in of and layout.columns and paths is not None:
            table = read_table(paths, config.columns(), config, f"data.{one}s")
            check_lists(table, layout.columns.values(), config.separators())
            categories = partial(_categories, table, config.separators())
            sids = read_semantic_ids(config, schema) if one == "item" else None
            ids = table.unique_ids(key, DROP)
            written[one] = _write(store, layout, ids, categories, table.numbers, sids)
    return written


def _categories(table: SourceRows, separators: dict[str, str], name: str) -> CodedColumn:
    return CodedColumn.of(table.categories(name, separators))


def write_columns_of_log(
    store: Store, info: StateInfo, columns: Columns, sids: SemanticIDs | None, of: Collection[Entity]
) -> None:
    """Writes the columns of items and users that have no tables: those of their first events, as in training."""
    keys = {"item": columns.config.item, "user": columns.config.user}
    for one, layout in layouts_of(info).items():
        if one in of and layout.columns:
            ids, source = columns.categories(keys[one], one).values, (columns.categories, columns.numbers)
            _write(store, layout, ids, *(partial(read, of=one) for read in source), sids if one == "item" else None)


def _write(
    store: Store,
    layout: ColumnLayout,
    ids: pa.Array,
    categories: Callable[[str], CodedColumn],
    numbers: Callable[[str], np.ndarray],
    sids: SemanticIDs | None,
) -> int:
    """Writes the columns of ids `[N]`, which are those of N rows, and the semantic IDs of others; returns how many."""
    rows = np.arange(len(ids))
    if sids is not None:
        others = as_text(sids.items)
        others = others.filter(pc.invert(pc.is_in(others, ids.cast(others.type))))
        ids, rows = pa.concat_arrays([ids.cast(others.type), others]), np.append(rows, np.full(len(others), -1))
    if (longest := pc.max(pc.binary_length(ids)).as_py() or 0) > LONGEST_ID:
        raise DataError(f"a {layout.of} has an id of {longest} bytes, and a state's have at most {LONGEST_ID}")
    read: dict[str, Callable[[slice], Values]] = {}
    cache = Cache()
    for name, one in layout.columns.items():
        if one.kind == "sid":
            found = np.full(len(ids), -1) if sids is None else sids.of(ids, allow_no_match=True)
            read[name] = found.__getitem__
        elif one.kind == "number":
            read[name] = np.append(numbers(name), np.nan)[rows].__getitem__
        else:
            read[name] = _texts(categories(name), rows, is_list=one.kind == "texts")
    if layout.sids:
        read[KNOWN] = (rows >= 0).__getitem__
    for begin, end in blocks(len(ids), _AT_ONCE):
        part = slice(begin, end)
        columns = {name: one(part) for name, one in read.items()}
        write_columns(store, layout, ids[part].to_pylist(), columns, cache)
    return len(ids)


def _texts(column: CodedColumn, rows: np.ndarray, is_list: bool) -> Callable[[slice], Values]:
    """Returns what gives the texts of a column of the table for a range of `rows [N]` int64, -1 for none."""
    texts = np.array([*column.values.to_pylist(), None], object)  # the code of a missing value is -1

    def read(part: slice) -> Values:
        found = column.take(rows[part])
        if not is_list:
            return texts[found.codes].tolist()
        counts = np.diff(found.offsets) if found.offsets is not None else (found.codes >= 0).astype(np.int64)
        return texts[found.codes[found.codes >= 0]].tolist(), counts

    return read
