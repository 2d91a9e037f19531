"""Parts in every shape that pandas, DuckDB, Spark and pyarrow write for the same rows are read to the same batches."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jfi.data import DataError, load_dataset
from jfi.follow.parts import Part
from jfi.follow.rows import SAMPLES, PartRows, Reading
from jfi.follow.state import LogState, open_state

from .followed_log import KNOWN, config_of
from .test_exact import assert_same

Shape = Callable[[pa.Table, Path], None]


def typed(rows: list[dict], zone: str | None) -> pa.Table:
    """Rows with whole numbers as ids, and dates."""
    own = [row | {"user_id": int(row["user_id"][1:]), "age": int(row["age"][1:])} for row in rows]
    own = [row | {"timestamp": int(row["timestamp"]), "price": row["price"] and round(row["price"], 2)} for row in own]
    whole = dict.fromkeys(("user_id", "item_id", "rating", "age", "position"), pa.int64())
    kinds = whole | {"timestamp": pa.timestamp("s", zone), "price": pa.float64(), "tags": pa.list_(pa.string())}
    kinds |= dict.fromkeys(("brand", "device"), pa.string())
    table = pa.Table.from_pylist(own, pa.schema(list(kinds.items())))
    return cast("timestamp", pa.timestamp("us", zone))(table)


def cast(names: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    """Returns what changes the types of columns."""

    def change(table: pa.Table) -> pa.Table:
        for name in names.split():
            number = table.schema.get_field_index(name)
            table = table.set_column(number, name, table[name].cast(kind))
        return table

    return change


def by_arrow(*changes: Callable[[pa.Table], pa.Table], **options: object) -> Shape:
    def shape(table: pa.Table, path: Path) -> None:
        for change in changes:
            table = change(table)
        pq.write_table(table, path, **options)

    return shape


def by_pandas(change: Callable = lambda frame: frame) -> Shape:
    return lambda table, path: change(table.to_pandas()).to_parquet(path)


def by_duckdb(options: str = "", columns: str = "*") -> Shape:
    def shape(table: pa.Table, path: Path) -> None:
        with duckdb.connect() as connection:
            connection.execute("set timezone = 'America/New_York'")
            connection.register("part", table)
            connection.execute(f"copy (select {columns} from part) to '{path}' (format parquet{options})")

    return shape


def dictionaries(table: pa.Table) -> pa.Table:
    for name in ("user_id", "brand", "device", "rating"):
        table = table.set_column(table.schema.get_field_index(name), name, table[name].dictionary_encode())
    return table


WHOLE = "user_id item_id rating age position"
#: Shapes for times with and without a zone.
SHAPES: dict[str, Shape] = {
    **{str(kind): by_arrow(cast(WHOLE, kind)) for kind in (pa.int32(), pa.int16(), pa.uint8(), pa.uint64())},
    "numbers with a fraction": by_arrow(cast("user_id item_id rating", pa.float64()), cast("age", pa.float32())),
    "decimals": by_arrow(cast("user_id item_id rating", pa.decimal128(21, 2)), cast("price", pa.decimal128(19, 4))),
    "dictionaries": by_arrow(dictionaries),
    "large": by_arrow(cast("brand device", pa.large_string()), cast("tags", pa.large_list(pa.large_string()))),
    "bytes": by_arrow(cast("brand", pa.binary()), cast("device", pa.large_binary())),
    "no schema of Arrow": by_arrow(dictionaries, store_schema=False),
    "Spark": by_arrow(flavor="spark", use_deprecated_int96_timestamps=False, row_group_size=7),
    "milliseconds": lambda table, path: by_arrow(cast("timestamp", pa.timestamp("ms", zone_of(table))))(table, path),
    "nanoseconds": lambda table, path: by_arrow(cast("timestamp", pa.timestamp("ns", zone_of(table))))(table, path),
    "pandas": by_pandas(),
    "pandas with categories": by_pandas(lambda frame: frame.astype({"brand": "category", "item_id": "category"})),
    "pandas with nullable integers": by_pandas(lambda frame: frame.astype(dict.fromkeys(WHOLE.split(), "Int32"))),
    "pandas with an index": by_pandas(lambda frame: frame.set_index("position", drop=False).rename_axis("index")),
    "DuckDB": by_duckdb(),
    "DuckDB with compression": by_duckdb(", compression zstd, row_group_size 2048, parquet_version v2"),
    "DuckDB with narrow types": by_duckdb(
        columns="* replace (user_id::utinyint as user_id, price::decimal(9, 2) as price)"
    ),
}


def zone_of(table: pa.Table) -> str | None:
    return table.schema.field("timestamp").type.tz


@pytest.fixture(scope="module", params=["UTC", None])
def log(request, rows, tmp_path_factory) -> Iterator[tuple[LogState, Reading, pa.Table]]:
    """The state of a run, whose times have a zone or none, and the rows of the next part."""
    folder = tmp_path_factory.mktemp("shapes")
    pq.write_table(typed(rows[:KNOWN], request.param), folder / "log.parquet")
    config = replace(config_of(folder / "log.parquet", folder).data, statistics=["item", "user_item"], null_ids="drop")
    config = config.resolved()
    schema = load_dataset(config).schema
    with closing(open_state(folder / "state", config, schema)) as state:
        yield state, Reading(config.resolved(), schema, None, 0.0), typed(rows[KNOWN : KNOWN + 60], request.param)


def read(log: tuple[LogState, Reading, pa.Table], path: Path) -> tuple[list, dict, object]:
    """The batches of a part, what it changes in the state, and its counts."""
    state, reading, _ = log
    (folder := path.with_suffix("")).mkdir()
    found = PartRows(Part(path.name, path, 0, 0), state, reading, folder)
    changes = state._changes.maps[0]
    state.drop_part()
    return [] if found.dataset is None else list(found.dataset.batches(SAMPLES, 25)), changes, found.counts


@pytest.fixture(scope="module")
def plain(log, tmp_path_factory) -> tuple[list, dict, object]:
    """What is read of the part as it is."""
    return written(log, by_arrow(), log[2], tmp_path_factory.mktemp("plain") / "a.parquet")


def written(log: tuple, shape: Shape, table: pa.Table, path: Path) -> tuple[list, dict, object]:
    """What is read of a part in a shape."""
    shape(table, path)
    return read(log, path)


def assert_same_parts(*found: tuple[list, dict, object]) -> None:
    assert len(found[0][0]) == len(found[1][0]) and found[0][1:] == found[1][1:]
    for pair in zip(found[0][0], found[1][0], strict=True):
        assert_same(*pair)


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_rows_in_another_shape(log, plain, name, tmp_path):
    assert_same_parts(plain, written(log, SHAPES[name], log[2], tmp_path / "a.parquet"))


@pytest.mark.parametrize("name", SHAPES)
def test_no_rows_in_any_shape(log, name, tmp_path):
    batches, changes, counts = written(log, SHAPES[name], log[2][:0], tmp_path / "a.parquet")
    assert not batches and not changes and counts.rows == 0


@pytest.mark.parametrize(
    "kind", [pa.null(), pa.float64(), pa.int32(), pa.list_(pa.null()), pa.large_string(), pa.bool_()]
)
def test_columns_without_values(log, kind, tmp_path):
    """pandas writes them as objects or doubles, Spark as what it was told, and lists without values have no type."""

    def without(kinds: dict[str, pa.DataType]) -> pa.Table:
        table = log[2]
        for name, own in kinds.items():
            table = table.set_column(table.schema.get_field_index(name), name, pa.nulls(len(table), own))
        return table

    plain = {"device": pa.string(), "tags": pa.list_(pa.string()), "price": pa.float64(), "brand": pa.string()}
    other = {name: kind for name in plain if not pa.types.is_list(kind) or name == "tags"}
    one, other = (
        written(log, by_arrow(), without(kinds), tmp_path / f"{number}.parquet")
        for number, kinds in enumerate((plain, plain | other))
    )
    assert_same_parts(one, other)


@pytest.mark.parametrize("shape", [by_arrow(), by_pandas(), by_duckdb()])
def test_null_ids(log, shape, tmp_path):
    """pandas makes doubles of integers among which one is missing."""
    table = log[2]
    for name, missing in (("user_id", 3), ("item_id", 7)):
        column = pa.array([None if row == missing else one for row, one in enumerate(table[name].to_pylist())])
        table = table.set_column(table.schema.get_field_index(name), name, column)
    kept = pa.concat_tables([log[2][:3], log[2][4:7], log[2][8:]])
    one = written(log, by_arrow(), kept, tmp_path / "a.parquet")
    assert_same_parts(one, written(log, shape, table, tmp_path / "b.parquet"))


def test_times_of_another_kind_are_refused(log, plain, tmp_path):
    """INT96, in which Spark writes times by default, has no zone; a zone's name makes no difference."""
    zone, table = zone_of(log[2]), log[2]
    without, berlin = (cast("timestamp", pa.timestamp("us", one))(table) for one in (None, "Europe/Berlin"))
    int96 = by_arrow(use_deprecated_int96_timestamps=True)
    if zone is None:
        assert_same_parts(plain, written(log, int96, table, tmp_path / "a.parquet"))
        others, match = [(by_arrow(), berlin)], "holds times in UTC, but times without a time zone in the run's"
    else:
        assert_same_parts(plain, written(log, by_arrow(), berlin, tmp_path / "a.parquet"))
        others = [(by_arrow(), without), (int96, table)]
        match = "holds times without a time zone, but times in UTC in the run's"
    for number, (shape, own) in enumerate(others):
        with pytest.raises(DataError, match=rf"refused-{number}\.parquet: column 'timestamp' {match}"):
            written(log, shape, own, tmp_path / f"refused-{number}.parquet")
