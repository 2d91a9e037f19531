"""The same random table in every format gives the same samples, and its values have the same ids in requests."""

import csv
import gzip
import io
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from data_configs import data_config

from jfi.data import DataConfig, load_dataset
from jfi.serving.requests import RequestReader
from jfi.serving.schema import Field, Limits, Schema
from jfi.utils.encoding import text_of

NAMES = ["user_id", "item_id", "clicked", "timestamp", "kind", "price", "tags"]
ROWS = 30
#: By kind of values what a column of a table draws from.
VALUES = {
    "small": [0, 1, 2, 3, 7, 100],
    "large": [2**53 + 1, -(2**62), 10**18, 12, 0],
    "halves": [0.5, 7.0, -0.0, 1.5, -2.0, 1024.0],
    "tenths": [0.1, 0.7, 3.3, 1e-3, 12.0],
    "floats": [1e16, 1.5e300, 1e-7, 0.1 + 0.2, 123456789.123, 3.0],
    "decimals": [Decimal("7.00"), Decimal("0.50"), Decimal("19.99"), Decimal("-0.00"), Decimal("1200")],
    "booleans": [True, False],
    "texts": ["a", "007", "1e3", "+5", "é", " b", "x,y", 'say "hi"', "two\r\nlines", "-", "1.2.3", "0x1"],
    "mixed": ["7.0", "7", "0.50", "TRUE", "true", "-0", "12345678901234567890123", "b"],
}
IDS = ["small", "large", "halves", "decimals", "texts", "mixed"]
NUMBERS = ["small", "halves", "tenths", "floats", "decimals", "booleans"]


class Table:
    """A random table: by column its kind and its values."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.kinds = {"user_id": self.pick(IDS), "item_id": self.pick(IDS), "clicked": self.pick(["small", "booleans"])}
        self.kinds |= {"timestamp": "small", "kind": self.pick(list(VALUES)), "price": self.pick(NUMBERS)}
        self.kinds["tags"] = self.pick(["small", "tenths", "booleans", "texts", "mixed"])
        self.values = {name: [self.pick(VALUES[self.kinds[name]]) for _ in range(ROWS)] for name in NAMES}
        self.values["timestamp"] = random.permutation(ROWS).tolist()
        labels = [i % 2 for i in self.values["timestamp"]]
        self.values["clicked"] = [bool(one) for one in labels] if self.kinds["clicked"] == "booleans" else labels
        tags = [one for one in VALUES[self.kinds["tags"]] if "|" not in str(one)]
        self.values["tags"] = [[self.pick([*tags, None]) for _ in range(random.integers(4))] for _ in range(ROWS)]
        for name in ("kind", "price"):
            for row in np.flatnonzero(random.random(ROWS) < 0.2):
                self.values[name][row] = None

    def pick(self, choices: list) -> object:
        return choices[self.random.integers(len(choices))]

    def rows(self) -> list[dict]:
        return [dict(zip(NAMES, row, strict=True)) for row in zip(*self.values.values(), strict=True)]


def as_text(value: object, table: Table) -> str:
    """The value as one of the texts by which programs write it."""
    if isinstance(value, list):
        return "|".join(as_text(one, table) for one in value)
    if isinstance(value, bool):
        return table.pick([str(value), str(value).lower(), str(value).upper()])
    if isinstance(value, float) and abs(value) < 1e15:
        return table.pick([repr(value), np.format_float_positional(value, trim="-")])
    return "" if value is None else str(value)


def write_text(table: Table, folder: Path, suffix: str = ".csv") -> str:
    delimiter = "\t" if "tsv" in suffix else ","
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, delimiter=delimiter, lineterminator=table.pick(["\n", "\r\n"]))
    writer.writerow(NAMES)
    writer.writerows([[as_text(value, table) for value in row.values()] for row in table.rows()])
    return write(folder / f"rows{suffix}", stream.getvalue().encode())


def write(path: Path, content: bytes) -> str:
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = pa.compress(content, "zstd", asbytes=True)
    path.write_bytes(content)
    return str(path)


def json_of(value: object, table: Table) -> str:
    if isinstance(value, list):
        return f"[{', '.join(json_of(one, table) for one in value)}]"
    if value is None:
        return table.pick(["null", '""'])
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=bool(table.random.integers(2)))


def write_json(table: Table, folder: Path, suffix: str = ".jsonl") -> str:
    lines = []
    for row in table.rows():
        pairs = [(name, value) for name, value in row.items() if value is not None or table.random.integers(2)]
        lines.append("{" + ", ".join(f'"{name}": {json_of(value, table)}' for name, value in pairs) + "}\n")
    return write(folder / f"rows{suffix}", "".join(lines).encode())


def arrow_column(values: list, table: Table) -> pa.Array:
    """The values in a random type that holds them."""
    found = [one for one in values if one is not None]
    kinds: list[pa.DataType] = []
    if all(isinstance(one, bool) for one in found):
        kinds = [pa.bool_()]
    elif all(isinstance(one, int) and not isinstance(one, bool) for one in found):
        sizes = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.decimal128(38, 0), pa.decimal128(38, 2)]
        kinds = [kind for kind in sizes if fits(found, kind)]
    elif all(isinstance(one, Decimal) for one in found):
        kinds = [pa.decimal128(10, 2), pa.decimal256(40, 5), pa.decimal128(20, 3)]
    is_number = not any(isinstance(one, bool | str | Decimal) for one in found)
    if is_number and all(float(one) == one for one in found):
        kinds.append(pa.float64())
        with np.errstate(over="ignore"):
            kinds += [pa.float32()] if all(float(str(np.float32(one))) == one for one in found) else []
            kinds += [pa.float16()] if all(float(str(np.float16(one))) == one for one in found) else []
    texts = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
    kind = table.pick([*kinds, *kinds, *texts] if kinds else texts)
    if kind in texts:
        missing = [None, ""] if table.random.integers(2) else [None]
        texts = [table.pick(missing) if one is None else as_text(one, table) for one in values]
        return pa.array(texts, pa.string()).cast(kind)
    values = [None if one is None and table.random.integers(2) else one for one in values]
    if pa.types.is_floating(kind):
        values = [None if one is None else float(one) for one in values]
        values = [float("nan") if one is None and table.random.integers(2) else one for one in values]
        if kind == pa.float16():
            mask = np.array([one is None for one in values])
            return pa.array(np.array([0 if one is None else one for one in values], np.float16), mask=mask)
    if pa.types.is_decimal(kind):
        values = [None if one is None else Decimal(one) for one in values]
    return pa.array(values, kind)


def fits(values: list, kind: pa.DataType) -> bool:
    try:
        pa.array([Decimal(one) for one in values] if pa.types.is_decimal(kind) else values, kind)
    except (pa.ArrowInvalid, OverflowError):
        return False
    return True


def arrow_table(table: Table) -> pa.Table:
    columns = {name: arrow_column(table.values[name], table) for name in NAMES[:-1]}
    lists = table.values["tags"]
    values = arrow_column([one for value in lists for one in value], table)
    if pa.types.is_dictionary(values.type):  # Arrow reads lists of these from one row group only
        values = values.dictionary_decode()
    offsets = np.append(0, np.cumsum([len(value) for value in lists]))
    tags = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
    if table.random.integers(2):
        tags = pa.LargeListViewArray.from_arrays(pa.array(offsets[:-1]), pa.array(np.diff(offsets)), values)
    return pa.table(columns | {"tags": tags})


def write_parquet(table: Table, folder: Path, suffix: str = ".parquet") -> str:
    data = arrow_table(table)
    pa.parquet.write_table(data, folder / "rows.parquet", row_group_size=int(table.random.integers(1, ROWS)))
    return str(folder / "rows.parquet")


def in_memory(table: Table, folder: Path, suffix: str) -> pa.Table:
    return arrow_table(table)


WRITERS = {suffix: write_text for suffix in (".csv", ".tsv", ".csv.gz", ".csv.zst")}
WRITERS |= {suffix: write_json for suffix in (".jsonl", ".json", ".jsonl.gz", ".jsonl.zst")}
WRITERS |= {".parquet": write_parquet, "memory": in_memory}


def config_of(interactions: object, buckets: bool) -> DataConfig:
    return data_config(
        interactions=interactions,
        label="clicked",
        item_categorical=["kind"],
        event_categorical=["tags"],
        context_dense=["price"],
        separators={"tags": "|"},
        fractions=[0.5, 0.25, 0.25],
        hash_buckets={"kind": 50} if buckets else {},
    )


def samples(config: DataConfig) -> dict:
    """All that training reads: the values that ids stand for, and the batches of each split."""
    dataset = load_dataset(config)
    found = {name: list(known.values) for name, known in dataset.schema.encodings.vocabularies.items()}
    for split in ("train", "validation", "test"):
        for batch in dataset.batches(split, batch_size=ROWS, seed=0, epoch=0):
            features = batch.sparse_features
            found[split] = [features.keys(), features.values().tolist(), features.lengths().tolist()]
            found[split] += [batch.dense_features.tolist(), batch.labels.tolist()]
    return found


def check(seed: int, folder: Path) -> None:
    table = Table(np.random.default_rng(seed))
    config = config_of(write_text(table, folder), buckets=seed % 3 == 0)
    expected = samples(config)
    for suffix in table.random.permutation([name for name in WRITERS if name != ".csv"])[:3]:
        found = samples(replace(config, interactions=WRITERS[suffix](table, folder, suffix)))
        assert found == expected, (seed, suffix, table.kinds)
    check_requests(table, {name: expected.get(name, []) for name in ("item_id", "kind", "tags")})


def check_requests(table: Table, vocabularies: dict[str, list[str]]) -> None:
    """Ids of the table's values in requests, as numbers and as texts, are those of training."""
    fields = [Field(name, "category", [name]) for name in ("item_id", "kind")]
    lists = [*fields, Field("tags", "categories", ["tags"])]
    rows = [{name: row[name] for name in vocabularies} for row in table.rows()]
    for candidate in (fields, lists):  # without lists a request is read from its bytes
        names = [field.name for field in candidate]
        schema = Schema(user=[], candidate=candidate, event=[], vocabularies=vocabularies)
        read = RequestReader(schema, Limits(max_candidates=ROWS, max_history=1))
        for write_value in (json_of, json_text):
            objects = [", ".join(f'"{name}": {write_value(row[name], table)}' for name in names) for row in rows]
            candidates = ", ".join(f"{{{one}}}" for one in objects)
            found = read.read(f'{{"user": {{}}, "candidates": [{candidates}]}}'.encode())
            for name in names:
                texts = [text_of(row[name]) for row in rows] if name != "tags" else tags_of(rows)
                known = {text: i for i, text in enumerate(vocabularies[name], 1)}
                assert found.ids[name].tolist() == [known.get(text, 0) for text in texts], (name, table.kinds)


def tags_of(rows: list[dict]) -> list[str]:
    return [text for row in rows for value in row["tags"] if (text := text_of(value)) is not None]


def json_text(value: object, table: Table) -> str:
    return json.dumps([as_text(one, table) for one in value] if isinstance(value, list) else as_text(value, table))


@pytest.mark.parametrize("part", range(10))
def test_a_table_has_the_same_samples_and_ids_in_every_format(tmp_path, part):
    for seed in range(6 * part, 6 * part + 6):
        check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(50))
def test_many_tables_have_the_same_samples_and_ids_in_every_format(tmp_path, part):
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        check(seed, tmp_path)
