"""Reads, numbers, sorts and splits a table by the stages of preparation, and by SQL on one DuckDB connection.

    python -m benchmarks.sql_stages [--rows 1000000] [--runs 5] [--json out.json]

Both forms read the same blocks of a Parquet table (users, items, times, labels, a category of 1,000 values with gaps, a
number), and end with the same arrays: the sorted ids, the columns sorted by (user, time, item, row), the order in time
and the split. They run in turn, each in a process of its own; what is counted are seconds of CPU after the imports, and
the peak of the process. The SQL form has neither lists, rules of histories, groups nor splits but that by time.
"""

import argparse
import hashlib
import inspect
import json
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet

from jfi.data import DataConfig, FeatureConfig
from jfi.data.io.blocks import DROP
from jfi.data.prepared.prepare import Stages, read_and_sort
from jfi.data.prepared.stages.column_files import ColumnWriter, new_map, read_columns, write_arrow
from jfi.data.prepared.stages.read import RowReader, SourceTables, open_tables, raw_columns, read_labels
from jfi.data.prepared.stages.sort import ROW, order_and_split, read_ids, read_order_and_split, sort_rows
from jfi.data.prepared.stages.splits import split_by_time, time_cuts
from jfi.data.schema.columns import Dictionary
from jfi.utils.jagged import BLOCK

_NUMBERS = "SELECT id, (row_number() OVER (ORDER BY {by}) - 1)::INTEGER AS code FROM"


def write_table(path: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    category = rng.integers(0, 1000, count)
    columns = {
        "user_id": rng.integers(0, count // 50, count),
        "item_id": rng.integers(0, count // 20, count),
        "timestamp": np.sort(rng.integers(0, 10**7, count)) + 1_600_000_000,
        "clicked": rng.integers(0, 2, count),
        "genre": pa.array([f"genre {one}" for one in category], mask=category == 0),
        "price": np.round(rng.random(count) * 9, 2),
    }
    pa.parquet.write_table(pa.table(columns), path)


def by_stages(given: SourceTables, folder: Path) -> None:
    read_and_sort(given, Stages(folder, show=False, durable=False, memory="1GB"), check=False)


def by_sql(given: SourceTables, folder: Path) -> None:
    settings = {"memory_limit": "1GB", "temp_directory": str(folder), "threads": min(8, os.cpu_count() or 1)}
    settings |= {"preserve_insertion_order": False}
    for name in ("rows", "order"):
        (folder / name).mkdir()
    with duckdb.connect(folder / "rows.duckdb", config=settings) as db:
        _read(given, db)
        kinds = {column.file: column.kind for column in raw_columns(given.config)}
        _number(db, [name for name, kind in kinds.items() if kind == "category"])
        _sort(db, kinds, folder / "rows")
        _split(db, given.config, folder / "order")


def _read(given: SourceTables, db: duckdb.DuckDBPyConnection) -> None:
    """Writes the blocks of rows as a table of DuckDB."""
    config, columns = given.config, raw_columns(given.config)

    def batches() -> Iterator[pa.RecordBatch]:
        start = 0
        for table in given.blocks():
            batch = {"user": table.ids(config.user, DROP), "item": table.ids(config.item, DROP)}
            batch["time"] = table.times(config.timestamp, config.timestamp_unit)
            batch["label"] = read_labels(table, config.targets()[0])
            for column in columns:
                is_number = column.kind == "number"
                batch[column.file] = table.numbers(column.name) if is_number else table.strings(column.name)
            yield pa.RecordBatch.from_pydict(batch | {ROW: np.arange(start, start + len(table))})
            start += len(table)

    parts = batches()
    first = next(parts)
    db.register("given", pa.RecordBatchReader.from_batches(first.schema, _chain(first, parts)))
    db.execute("CREATE TABLE read AS SELECT * FROM given")


def _chain(first: pa.RecordBatch, others: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from others


def _number(db: duckdb.DuckDBPyConnection, categories: list[str]) -> None:
    """Numbers users and items in the order of their ids, and values of categories in that of their first rows."""
    for name in ("user", "item"):
        ids = f"(SELECT DISTINCT {name} AS id FROM read)"
        ((numeric,),) = db.execute(f"SELECT bool_and(regexp_full_match(id, '-?[0-9]{{1,18}}')) FROM {ids}").fetchall()
        db.execute(f"CREATE TABLE ids_{name} AS {_NUMBERS.format(by='id::BIGINT, id' if numeric else 'id')} {ids}")
    for number, name in enumerate(categories):
        values = f'(SELECT "{name}" AS id, min(row) AS row FROM read WHERE "{name}" IS NOT NULL GROUP BY 1)'
        db.execute(f"CREATE TABLE values_{number} AS {_NUMBERS.format(by='row')} {values}")


def _sort(db: duckdb.DuckDBPyConnection, kinds: dict[str, str], folder: Path) -> None:
    """Writes the sorted ids and columns."""
    for name in ("user", "item"):
        ids = db.sql(f"SELECT id FROM ids_{name} ORDER BY code").to_arrow_table().column("id").combine_chunks()
        write_arrow(folder / f"{name}_ids.arrow", {"id": ids.cast(pa.large_string())})
    chosen, joins, number = ["u.code AS user", "i.code AS item", "time", "label"], "", 0
    for name, kind in kinds.items():
        if kind == "number":
            chosen.append(f'"{name}"')
        else:
            chosen.append(f'coalesce(v{number}.code, -1) AS "{name}"')
            joins += f' LEFT JOIN values_{number} v{number} ON read."{name}" = v{number}.id'
            number += 1
    joined = f"FROM read JOIN ids_user u ON read.user = u.id JOIN ids_item i ON read.item = i.id{joins}"
    types = {"user": np.int32, "item": np.int32, "time": np.float64, "label": np.float32}
    types |= {name: np.int32 if kind == "category" else np.float64 for name, kind in kinds.items()} | {ROW: np.int64}
    writer = ColumnWriter(folder, types)
    for batch in db.sql(f"SELECT {', '.join(chosen)}, row {joined} ORDER BY 1, 3, 2, row").to_arrow_reader(BLOCK):
        for name in types:
            writer.append(name, batch.column(name).to_numpy())
    writer.close()
    sorted_rows = pa.table({name: read_columns(folder)[name] for name in ("time", "label")})
    db.register("columns", sorted_rows.append_column("position", pa.array(np.arange(len(sorted_rows)))))
    db.execute("CREATE TABLE sorted AS SELECT * FROM columns")


def _split(db: duckdb.DuckDBPyConnection, config: DataConfig, folder: Path) -> None:
    """Writes the order in time, and the split: validation and test begin behind a labeled row each."""
    ((count, labeled),) = db.execute("SELECT count(*), count(*) FILTER (NOT isnan(label)) FROM sorted").fetchall()
    found = []
    for cut in time_cuts(labeled, config.fractions).tolist():
        last = f"WHERE NOT isnan(label) ORDER BY time, position LIMIT 1 OFFSET {cut - 1}"
        found += db.execute(f"SELECT time, position FROM sorted {last}").fetchall()
    behind = " + ".join(f"((time, position) > ({time}, {position}))::TINYINT" for time, position in found)
    writer = ColumnWriter(folder, {"order": np.int32})
    split = new_map(folder / "split.npy", np.int8, count)
    query = f"SELECT position, {behind} AS split FROM sorted ORDER BY time, position"
    for batch in db.sql(query).to_arrow_reader(BLOCK):
        rows = batch.column("position").to_numpy()
        writer.append("order", rows)
        split[rows] = batch.column("split").to_numpy()
    writer.close()
    split.flush()


FORMS: dict[str, Callable[[SourceTables, Path], None]] = {"stages": by_stages, "sql": by_sql}
#: What reads, numbers, sorts and splits in each form.
_OWN = {
    "stages": (Dictionary, RowReader, sort_rows, order_and_split, split_by_time),
    "sql": (by_sql, _read, _chain, _number, _sort, _split),
}


def measure(form: str, config: DataConfig, results: multiprocessing.Queue) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.process_time()
        FORMS[form](open_tables(config), folder)
        seconds, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        digest = hashlib.sha256()
        for one in ("user", "item"):
            digest.update("\n".join(read_ids(folder, one).to_pylist()).encode())
        columns = read_columns(folder / "rows")
        order, split = read_order_and_split(folder)
        for column in ("user", "item", "time", "label", "category genre", "number price", ROW):
            digest.update(np.ascontiguousarray(columns[column]).data)
        digest.update(np.ascontiguousarray(order, np.int64).data)
        digest.update(np.ascontiguousarray(split).data)
        results.put({"cpu_seconds": round(seconds, 2), "peak_gb": round(peak, 2), "sha256": digest.hexdigest()[:16]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    spawn, results = multiprocessing.get_context("spawn"), {form: [] for form in FORMS}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rows.parquet"
        write_table(path, options.rows)
        features = [FeatureConfig("genre", "context"), FeatureConfig("price", "context", "number")]
        config = DataConfig(interactions=str(path), label="clicked", features=features, statistics=[])
        for _ in range(options.runs):
            for form, found in results.items():
                queue = spawn.Queue()
                process = spawn.Process(target=measure, args=(form, config, queue))
                process.start()
                found.append(queue.get())
                process.join()
                print(form, found[-1], flush=True)
    lines = {form: {one.__name__: len(inspect.getsource(one).splitlines()) for one in of} for form, of in _OWN.items()}
    report = {
        "what": __doc__.splitlines()[0],
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": [round(one, 1) for one in os.getloadavg()],
        "versions": {"duckdb": duckdb.__version__, "pyarrow": pa.__version__},
        "rows": options.rows,
        "lines": lines,
        "same_bits": len({one["sha256"] for found in results.values() for one in found}) == 1,
        "results": results,
    }
    print(lines, report["same_bits"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
