import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from data_configs import line_of

from jfi.data import DataConfig, DataError, load_dataset
from jfi.data.io import arrays
from jfi.data.io.blocks import read_table


def fault(read) -> str:
    with pytest.raises(DataError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value).rsplit("/", 1)[-1]


@pytest.mark.parametrize("name", ["r.csv", "r.tsv", "r.jsonl", "r.ndjson", "r.inter", "ratings.dat", "u.data"])
def test_gzip(write, tmp_path, name):
    lines = {
        "csv": ["user_id,rating", "7,4", "9,2"],
        "tsv": ["user_id\trating", "7\t4", "9\t2"],
        "inter": ["user_id:token\trating:float", "7\t4", "9\t2"],
        "dat": ["7::1::4::1", "9::1::2::1"],
        "data": ["7\t1\t4\t1", "9\t1\t2\t1"],
    }.get(name.split(".")[1], ['{"user_id": 7, "rating": 4}', '{"user_id": 9, "rating": 2}'])
    plain = write(name, *lines)
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(Path(plain).read_bytes()))
    for path in (plain, str(packed)):
        table = read_table(path, ["user_id", "rating"])
        assert table.ids("user_id").to_pylist() == ["7", "9"]
        assert table.numbers("rating").tolist() == [4.0, 2.0]
        first = line_of(table, 0)
        assert line_of(table, 1) == first + 1
    content = packed.read_bytes()
    packed.write_bytes(content[:-9])
    assert fault(lambda: read_table(str(packed), [])).startswith(f"{name}.gz: not a whole gzip file: ")
    packed.write_bytes(b"user_id,rating\n")
    assert fault(lambda: read_table(str(packed), [])).startswith(f"{name}.gz: not a whole gzip file: ")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"PK\x03\x04rest", "this is no text, but a zip archive (or a spreadsheet); unpack it"),
        (gzip.compress(b"a,b\n", mtime=0), "this is no text, but compressed by gzip; let its name end in .gz"),
        (b"PAR1rest", "this is no text, but a Parquet file; let its name end in .parquet"),
        (b"a,b\0\n1,2\n", "1: the names of the columns hold the byte 0; is this UTF-16? set data.encoding: utf-16"),
    ],
)
def test_other_formats_named_csv(tmp_path, content, expected):
    path = tmp_path / "r.csv"
    path.write_bytes(content)
    assert fault(lambda: read_table(str(path), ["a"])).removeprefix("r.csv:").strip() == expected


def test_json_lines(write):
    path = write(
        "r.jsonl",
        '{"user": 12345678901234567890123, "rating": 4.50, "tags": ["a", "b"], "seen": true, "mixed": 1}',
        "",
        '{"mixed": "x", "user": "ü", "rating": null, "tags": [], "seen": false, "extra": {"any": [1]}}\r',
        '{"user": "\\u00fc 2", "rating": "", "tags": null, "seen": null, "mixed": true}',
    )
    table = read_table(path, ["user", "rating", "tags", "seen", "mixed"])
    assert table.known == ["user", "rating", "tags", "seen", "mixed", "extra"]
    # Digits are kept: 64 bits would merge ids.
    assert table.ids("user").to_pylist() == ["12345678901234567890123", "ü", "ü 2"]
    assert table.strings("rating").to_pylist() == ["4.5", None, None]
    assert table.categories("tags", {}).to_pylist() == [["a", "b"], [], None]
    assert table.numbers("seen").tolist()[:2] == [1.0, 0.0]
    assert table.strings("seen").to_pylist() == ["true", "false", None]
    assert table.strings("mixed").to_pylist() == ["1", "x", "true"]
    assert [line_of(table, row) for row in range(3)] == [1, 3, 4]


def test_json_lines_of_more_than_a_block(write, monkeypatch):
    monkeypatch.setattr("jfi.data.io.text.PART", 40)
    lines = [f'{{"user": {i}, "late": {i}}}' if i > 7 else f'{{"user": {i}}}' for i in range(11)]
    lines[5:5] = ["", " "]
    table = read_table(write("r.jsonl", *lines), ["user", "late"])
    assert table.strings("user").to_pylist() == [str(i) for i in range(11)]
    assert table.strings("late").to_pylist() == [None] * 8 + ["8", "9", "10"]
    assert line_of(table, 5) == 8
    assert fault(lambda: read_table(write("t.jsonl", *lines, '{"user": [1]}'), ["user"])).startswith("t.jsonl:")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"user": 1', "r.jsonl:3: not JSON: expecting ',' delimiter at column "),
        ("[1, 2]", 'r.jsonl:3: must be an object such as {"user_id": 1}'),
        ("7", 'r.jsonl:3: must be an object such as {"user_id": 1}'),
        ('{"user": {"id": 1}}', "r.jsonl:3: 'user' is an object; it must have one value per row"),
        ('{"user": [1]}', "r.jsonl:3: 'user' is a list here and a single value in other rows; it must be of one kind"),
        ('{"user": "\\ud800"}', "r.jsonl:3: 'user' holds half of a surrogate pair, which is no character"),
        ('{"tags": [["a"]]}', "r.jsonl:3: 'tags' is a list of lists or objects; it must be a list of texts or numbers"),
        (
            '{"tags": ["a", ["b"]]}',
            "r.jsonl:3: 'tags' is a list of lists or objects; it must be a list of texts or num",
        ),
        ('{"user_id": ' + "[" * 100_000, "r.jsonl:3: nested too deeply"),
    ],
)
def test_faults_of_json_lines(write, line, expected):
    path = write("r.jsonl", '{"user": 1}', "", line)
    assert fault(lambda: read_table(path, ["user", "tags"])).startswith(expected)


def test_json_lines_train_like_csv(write):
    rows = [(u, i, (u + i) % 2, 10 * i + u) for u in range(6) for i in range(8)]
    csv = write("r.csv", "user,item,label,time", *(",".join(map(str, row)) for row in rows))
    json = write("r.jsonl", *('{{"user": {}, "item": {}, "label": {}, "time": {}}}'.format(*row) for row in rows))
    batches = []
    for path in (csv, json):
        config = DataConfig(interactions=path, user="user", item="item", label="label", timestamp="time")
        batches.append(load_dataset(config).batches("train", batch_size=16, seed=0, epoch=0)[0])
    assert batches[0].sparse_features.values().tolist() == batches[1].sparse_features.values().tolist()
    assert batches[0].labels.tolist() == batches[1].labels.tolist()


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["a", "b", None]), ["a", "b", None]),
        (pa.array(["a", "b", None], pa.large_string()), ["a", "b", None]),
        (pa.array(["a", "b", None], pa.string_view()), ["a", "b", None]),
        (pa.array(["a", "b", None]).dictionary_encode(), ["a", "b", None]),
        (pa.array(["a", "b", None], pa.large_string()).dictionary_encode(), ["a", "b", None]),
        (pa.array([b"a", "ü".encode(), None], pa.binary()), ["a", "ü", None]),
        (pa.array([b"ab", b"cd", None], pa.binary(2)), ["ab", "cd", None]),
        (pa.array([7, 8, None], pa.uint64()).dictionary_encode(), ["7", "8", None]),
        # Integers with gaps become floating-point numbers in pandas.
        (pa.array([1.0, 2.0**50, float("nan")]), ["1", str(2**50), None]),
        (pa.array([1.0, 2.5, None], pa.float32()), ["1", "2.5", None]),
        (pa.array([True, False, None]), ["true", "false", None]),
        (pa.array([1, 2, None], pa.decimal128(38, 0)), ["1", "2", None]),
        (pa.nulls(3), [None, None, None]),
    ],
)
@pytest.mark.parametrize("name", ["r.parquet", "r.parq"])
def test_parquet_columns_as_text(tmp_path, name, column, expected):
    pa.parquet.write_table(pa.table({"x": column}), tmp_path / name, row_group_size=2)
    assert read_table(str(tmp_path / name), ["x"]).strings("x").to_pylist() == expected


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([b"ok", b"\xff", b"ok"]), "r.parquet:2: 'x' has type binary, and this value is not UTF-8 text"),
        (pa.array([{"a": 1}] * 3), "r.parquet: column 'x' has type struct<a: int64>, but must have one value per row"),
        (pa.array([["a"]] * 3), "r.parquet: column 'x' has type list<element: string>, but must have one value"),
        (pa.array([[("a", 1)]] * 3, pa.map_(pa.string(), pa.int64())), "r.parquet: column 'x' has type map<string, "),
        (pa.array(["a", None, "b"]), "r.parquet:2: empty 'x'"),
    ],
)
def test_parquet_columns_that_are_no_ids(tmp_path, column, expected):
    pa.parquet.write_table(pa.table({"x": column}), tmp_path / "r.parquet", row_group_size=1)
    assert fault(lambda: read_table(str(tmp_path / "r.parquet"), ["x"]).ids("x")).startswith(expected)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([["a"], []], pa.list_(pa.large_string())), [["a"], []]),
        (pa.array([["a"], []], pa.large_list(pa.string())), [["a"], []]),
        (pa.array([["a", "b"], ["c", "d"]], pa.list_(pa.string(), 2)), [["a", "b"], ["c", "d"]]),
        (pa.array([["a"], []], pa.list_(pa.dictionary(pa.int32(), pa.string()))), [["a"], []]),
        (pa.array([[1], None]), [["1"], None]),
        (
            pa.array([[["a"]], []]),
            "r.parquet: column 'x' has type list<element: list<element: string>>, but it ",
        ),
        (pa.array([[{"a": 1}], []]), "r.parquet: column 'x' has type list<element: struct<a: int64>>, but it must "),
        (pa.array([[b"\xff"], []]), "r.parquet: column 'x' has type list<element: binary>, but it must hold "),
    ],
)
def test_parquet_lists(tmp_path, column, expected):
    pa.parquet.write_table(pa.table({"x": column}), tmp_path / "r.parquet")
    table = read_table(str(tmp_path / "r.parquet"), ["x"])
    if isinstance(expected, str):
        assert fault(lambda: table.categories("x", {})).startswith(expected)
    else:
        assert table.categories("x", {}).to_pylist() == expected


def test_parquet_text_that_is_not_utf8(tmp_path):
    values = pa.array([b"a", b"b", b"c\xff", b"d"]).view(pa.string())
    pa.parquet.write_table(pa.table({"x": values}), tmp_path / "r.parquet", row_group_size=2)
    assert fault(lambda: read_table(str(tmp_path / "r.parquet"), ["x"])) == "r.parquet:3: 'x' is not UTF-8"


NO_PARQUET = "a damaged Parquet file, or one that Arrow cannot read"


def test_damaged_parquet(tmp_path):
    path = tmp_path / "r.parquet"
    path.touch()
    assert fault(lambda: read_table(str(path), ["x"])) == f"r.parquet: {NO_PARQUET}: Parquet file size is 0 bytes"
    table = pa.table({"x": [str(i) for i in range(1000)]})
    pa.parquet.write_table(table, path, write_page_checksum=True, compression="none")
    content = bytearray(path.read_bytes())
    for size in (4, 5, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        what = f"Parquet file size is {size} bytes" if size < 8 else "Parquet magic bytes not found in footer"
        assert fault(lambda: read_table(str(path), ["x"])).startswith(f"r.parquet: {NO_PARQUET}: {what}")
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    assert fault(lambda: read_table(str(path), ["x"])).startswith(f"r.parquet: {NO_PARQUET}: ")
    duplicate = pa.table([pa.array([1]), pa.array([2])], names=["x", "x"])
    pa.parquet.write_table(duplicate, path)
    assert fault(lambda: read_table(str(path), ["x"])) == "r.parquet: column 'x' appears twice"


@pytest.mark.slow
def test_two_gib_of_characters_fit_a_column():
    # Chunks share one buffer, so that only the result takes memory.
    chunk = pa.array([f"{i:036d}" for i in range(100_000)])
    column = arrays.flatten(pa.chunked_array([chunk] * 620))
    assert column.type == pa.large_string()
    assert len(column) == 62_000_000
    assert column[61_999_999].as_py() == f"{99_999:036d}"
    del column
    encoded = arrays.flatten(pa.chunked_array([chunk.dictionary_encode()] * 620))
    assert encoded.type == pa.large_string()
    assert encoded[61_999_999].as_py() == f"{99_999:036d}"
