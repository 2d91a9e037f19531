"""Sources beyond the files of this machine, and settings that say how files are read."""

import datetime
import json
import logging
import re
import signal
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest
from data_configs import data_config, line_of, read_blocks, replace_data

from jfi.data import DataConfig, DataError, FeatureConfig, load_dataset
from jfi.data.io.blocks import read_table
from jfi.data.prepared import prepare
from jfi.data.prepared.prepare import prepare_dataset

ROWS = [(f"u{i % 4}", i % 5, i * i % 3 % 2, 10 * i) for i in range(40)]
CSV = "user_id,item_id,clicked,timestamp\n" + "".join(f"{u},{i},{c},{t}\n" for u, i, c, t in ROWS)


@pytest.fixture
def table() -> pa.Table:
    return pa.table(dict(zip(["user_id", "item_id", "clicked", "timestamp"], zip(*ROWS, strict=True), strict=True)))


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def samples(config: DataConfig) -> list:
    batches = [one for name in ("train", "test") for one in load_dataset(config).batches(name, 16, seed=0, epoch=0)]
    return [(one.sparse_features.values().tolist(), one.labels.tolist()) for one in batches]


def message(paths, settings: DataConfig | None = None, wanted=("user_id", "item_id")) -> str:
    with pytest.raises(DataError) as caught:
        read = read_table(paths, list(wanted), settings)
        for name in wanted:
            read.ids(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tables_of_python_are_read_as_files(tmp_path, table):
    (tmp_path / "r.csv").write_text(CSV)
    config = DataConfig(interactions=str(tmp_path / "r.csv"), label="clicked")
    expected = samples(config)

    class Frame:
        """A DataFrame by the Arrow C stream, as those of pandas and Polars are."""

        def __arrow_c_stream__(self, requested_schema=None):
            return table.__arrow_c_stream__(requested_schema)

    for source in (table, Frame(), [table[:7], table[7:]], tmp_path / "r.csv", [tmp_path / "r.csv"]):
        assert samples(replace_data(config, interactions=source)) == expected
    prepare_dataset(replace_data(config, interactions=table), tmp_path / "prepared")
    assert samples(DataConfig(prepared=str(tmp_path / "prepared"))) == expected
    for name, ids in (("user", ["u0", "u0"]), ("item", [1, 1])):
        with pytest.raises(DataError, match=rf"^the table:2: '{name}_id' \w+ is already in the table:1$"):
            load_dataset(replace_data(config, **{f"{name}s": pa.table({f"{name}_id": ids})}))
    assert message({"user_id": [1]}).startswith("data.interactions must be a path, a pyarrow.Table or a DataFrame ")


def test_a_table_in_memory_is_named_by_its_content(table):
    first, same, other = (
        DataConfig(interactions=one).without_tables().interactions for one in (table, table.combine_chunks(), table[1:])
    )
    assert first == same != other and json.dumps(first)
    assert message(first) == "data.interactions was a table in memory, which no file holds; set it again"


@pytest.mark.parametrize("module", ["pandas", "polars"])
def test_data_frames_are_read_as_tables(table, module):
    library = pytest.importorskip(module)
    frame = table.to_pandas() if module == "pandas" else library.from_arrow(table)
    assert samples(DataConfig(interactions=frame, label="clicked")) == samples(
        DataConfig(interactions=table, label="clicked")
    )


@pytest.mark.parametrize(
    ("columns", "values", "why"),
    [
        (["user_id", "user_id"], [1, 2], r"Duplicate column names found: \['user_id', 'user_id'\]"),
        (["user_id", "item_id"], [2**70, 2], "an integer has more than 64 bits; write texts"),
        (["user_id", "item_id"], [[2**70], 2], "an integer has more than 64 bits; write texts"),
    ],
)
def test_a_data_frame_that_arrow_cannot_read_is_refused(columns, values, why):
    frame = pytest.importorskip("pandas").DataFrame([values], columns=columns)
    assert re.fullmatch(f"data.interactions must be a path, .* got DataFrame: {why}", message(frame))


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl", "r.parquet", "memory"])
def test_ids_that_floats_have_rounded_are_counted(tmp_path, monkeypatch, caplog, name):
    """Of 19-digit ids six are whole, five are floats, and three are floats in lists."""
    monkeypatch.setattr("jfi.data.io.blocks.BLOCK", 4)
    first, small = 1234567890123456789, 2.0**53 - 1
    floats = [float(first + i) for i in range(5)] + [small]
    table = pa.table(
        {"user_id": floats, "item_id": range(first, first + 6), "n": floats, "tags": [[x] for x in floats]}
    )
    table = table.set_column(3, "tags", pa.array([[], [small], [], [1e18], [1e18, -1e18, 2.0], None]))
    source, path = table, str(tmp_path / name)
    if name == "r.csv":
        lines = [f"{x},{first + i},{x},a" for i, x in enumerate(floats)]
        Path(path).write_text("\n".join(["user_id,item_id,n,tags", *lines]))
    elif name == "r.jsonl":
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        pa.parquet.write_table(table, tmp_path / name)
    source = table if name == "memory" else path
    config = DataConfig(features=[FeatureConfig("n", "event", type="number"), FeatureConfig("tags", "event")])
    read = read_table(source, table.column_names, config)
    assert len(set(read.ids("item_id").to_pylist())) == 6 and len(set(read.ids("user_id").to_pylist())) == 2
    found = {re.search("column '(.*?)' has (.*) values as floats", line).groups() for line in caplog.messages}
    assert found == {("user_id", "5"), *([] if name == "r.csv" else [("tags", "3")])}


def test_urls_are_read_as_paths(tmp_path, memory, table):
    for name in ("day=1/part-10.csv", "day=1/part-9.csv", "day=1/_SUCCESS", ".hidden/part.csv"):
        memory.pipe(f"/clicks/{name}", CSV.replace("u0", f"{name[-5]}-0").encode())
    with memory.open("/clicks.parquet", "wb") as file:
        pa.parquet.write_table(table, file)
    for url in ("memory://clicks", "memory://clicks/", "memory://clicks/*/*.csv"):
        read = read_table(url, ["user_id", "day"] if "*" not in url else ["user_id"])
        assert len(read) == 80 and read.ids("user_id")[0].as_py() == "9-0"  # 9 before 10
        assert "*" in url or set(read.strings("day").to_pylist()) == {"1"}
        assert read.location(41) == "memory:///clicks/day=1/part-10.csv:3"
    (tmp_path / "r.csv").write_text(CSV)
    expected = samples(DataConfig(interactions=str(tmp_path / "r.csv"), label="clicked"))
    for url in ("memory://clicks.parquet", f"file://{tmp_path}/r.csv", f"file://{tmp_path}"):
        assert samples(DataConfig(interactions=url, label="clicked")) == expected
    assert message("memory://gone.csv") == "memory://gone.csv: no such file or directory"
    assert message("memory://gone/*.csv").startswith("memory://gone/*.csv: no file matches")
    assert message("nosuch://a.csv").startswith("nosuch://a.csv: data.interactions: its protocol must be one of file, ")
    memory.pipe("/bad.parquet", b"PAR1 no")
    assert message("memory://bad.parquet").startswith("memory://bad.parquet: a damaged Parquet file")


@pytest.mark.parametrize("tells", [True, False], ids=["a system that tells times", "one that does not"])
def test_a_preparation_of_a_url_that_was_replaced_starts_over(tmp_path, memory, monkeypatch, tells):
    """It was interrupted after its rows had been read."""
    if not tells:
        info = type(memory).info
        told = {"name", "size", "type"}
        monkeypatch.setattr(
            type(memory), "info", lambda *own: {name: one for name, one in info(*own).items() if name in told}
        )
    config = DataConfig(interactions="memory://clicks.csv", label="clicked", statistics=[])
    memory.pipe("/clicks.csv", CSV.encode())
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "order_and_split", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            prepare_dataset(config, tmp_path / "out")
    assert (tmp_path / ".out.preparing" / "rows.done").exists()
    before = samples(config)
    memory.pipe("/clicks.csv", re.sub(r",([01]),(\d+)\n", lambda m: f",{1 - int(m[1])},{m[2]}\n", CSV).encode())
    prepare_dataset(config, tmp_path / "out")
    assert samples(DataConfig(prepared=str(tmp_path / "out"))) == samples(config) != before


def test_a_delimiter_and_a_header_by_settings(write):
    rows = ["u1;i1;4", 'u2;"i;2";5']
    headed = write("r.txt", "user_id;item_id;stars", *rows)
    read = read_table(headed, ["item_id"], DataConfig(delimiter=";"))
    assert read.ids("item_id").to_pylist() == ["i1", "i;2"] and read.location(1) == f"{headed}:3"
    settings = DataConfig(delimiter=";", header={"interactions": ["user_id", "item_id", "stars"]})
    for name in ("r.log", "r.csv"):
        read = read_table(write(name, *rows), ["item_id"], settings)
        assert read.ids("item_id").to_pylist() == ["i1", "i;2"] and read.location(1).endswith(f"{name}:2")
    assert read_table(headed, ["user_id"], settings, "data.users").known == ["user_id", "item_id", "stars"]
    several = write("r.txt", "user_id::item_id", 'u1::"a', "u2::b:c")
    assert read_table(several, ["item_id"], DataConfig(delimiter="::")).ids("item_id").to_pylist() == ['"a', "b:c"]
    wide = write("w.txt", "user_id§item_id", 'u1§"a', "u2§b")
    assert read_table(wide, ["item_id"], DataConfig(delimiter="§")).ids("item_id").to_pylist() == ['"a', "b"]
    assert message(several).endswith("; for other text files set data.delimiter")
    table = write("r.json", '{"user_id": 1, "item_id": 2}')
    assert read_table(table, ["user_id"]).ids("user_id").to_pylist() == ["1"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"delimiter": ""}, "data.delimiter is ''; it must be a character such as ';', and no quote"),
        ({"delimiter": '"'}, "data.delimiter is '\"'; it must be a character such as ';', and no quote"),
        ({"header": {"rows": ["a"]}}, "data.header has 'rows'; it must have interactions, users or items"),
        ({"header": {"users": ["a", "a"]}}, "data.header.users is ['a', 'a']; it must be the names of columns, each"),
    ],
)
def test_wrong_settings_of_files(settings, expected):
    with pytest.raises(DataError) as caught:
        load_dataset(DataConfig(interactions="r.csv", **settings))
    assert str(caught.value).startswith(expected)


def test_a_header_that_is_a_row_is_named(write):
    hint = "; the first line seems to be a row: name the columns by data.header if the file has no header"
    assert message(write("r.csv", "196,242,3", "186,302,3")).endswith(hint)
    assert message(write("r.csv", "u1,i1,1,1", "u2,i2,1,2")).endswith(f":1: column '1' appears twice{hint}")
    assert not message(write("r.csv", "user,item")).endswith(hint)


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl", "r.parquet"])
def test_values_that_mean_a_missing_one(write, tmp_path, caplog, monkeypatch, name):
    values = ["NULL", "7", None, "-1", "nan", ""]
    if name == "r.csv":
        path = write(name, "x,y", *(f"{value or ''},1" for value in values))
    elif name == "r.jsonl":
        lines = ["null" if v is None else v if v in ("7", "-1") else f'"{v}"' for v in values]
        path = write(name, *(f'{{"x": {line}, "y": 1}}' for line in lines))
    else:
        path = str(tmp_path / name)
        pa.parquet.write_table(pa.table({"x": values, "y": [1] * 6}), path)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr("jfi.data.io.blocks.BLOCK", 2)
        for part in read_blocks(path, ["x", "y"]):
            part.strings("x")
    advice = "if it means a missing value, add it to data.missing_values"
    assert [one.getMessage() for one in caplog.records] == [
        f"{path}: column 'x' has the value '{mark}'; {advice}" for mark in ("NULL", "nan")
    ]
    caplog.clear()
    marks = DataConfig(missing_values=["NULL", "-1", "nan"])
    read = read_table(path, ["x", "y"], marks)
    assert read.strings("x").to_pylist() == [None, "7", None, None, None, None] and not caplog.records
    assert read.numbers("x").tolist() == pytest.approx([float("nan"), 7, *[float("nan")] * 4], nan_ok=True)
    with pytest.raises(DataError, match=rf"{name}:{2 if name == 'r.csv' else 1}: empty 'x'$"):
        read.ids("x")
    # A number that means a missing value, of a column of numbers.
    pa.parquet.write_table(pa.table({"x": [1.5, -1.0, 7.0]}), tmp_path / "numbers.parquet")
    read = read_table(str(tmp_path / "numbers.parquet"), ["x"], marks)
    assert read.strings("x").to_pylist() == ["1.5", None, "7"] and read.numbers("x")[1] != read.numbers("x")[1]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float16()])
def test_a_narrow_float_is_the_decimal_that_it_shows(tmp_path, kind):
    data = pa.table({"x": pa.array([i / 10 for i in range(10)]).cast(kind)})
    pa.parquet.write_table(data, tmp_path / "r.parquet")
    read = read_table(str(tmp_path / "r.parquet"), ["x"])
    assert read.numbers("x").tolist() == [i / 10 for i in range(10)]
    assert read.strings("x").to_pylist() == ["0", *(f"0.{i}" for i in range(1, 10))]


def test_true_and_false_are_numbers(write):
    read = read_table(write("r.csv", "x", "True", "FALSE", "true", "1", "", "0"), ["x"])
    assert read.numbers("x").tolist()[:4] == [1.0, 0.0, 1.0, 1.0]
    rows = [f"{u},{i},{c == 1},{t}" for u, i, c, t in ROWS]
    config = DataConfig(interactions=write("b.csv", CSV.split("\n")[0], *rows), label="clicked")
    assert samples(config) == samples(replace_data(config, interactions=write("r.csv", *CSV.split("\n")[:-1])))
    assert samples(config) == samples(replace_data(config, label="clicked == True"))


def test_times_of_all_precisions(write, tmp_path):
    text = [
        "2020-01-01 10:00:00.1234567",
        "2020-01-01T10:00:00.123456999",
        "2020-01-01 10:00:00.5",
        "1969-12-31 23:59:59.9999999",
    ]
    expected = [1577872800.123456, 1577872800.123456, 1577872800.5, -1e-6]
    assert read_table(write("r.csv", "t", *text), ["t"]).times("t", "s").tolist() == expected
    zoned = ["2020-01-01 10:00:00 UTC", "2020-01-01T10:00:00.1234567Z", "2020-01-01 10:00:00.123456789+00:00"]
    read = read_table(write("z.csv", "t", *zoned), ["t"]).times("t", "s").tolist()
    assert read == [1577872800.0, 1577872800.123456, 1577872800.123456]
    nanoseconds = pa.array([1577872800123456999, -1], pa.timestamp("ns"))
    pa.parquet.write_table(pa.table({"t": nanoseconds}), tmp_path / "r.parquet")
    assert read_table(str(tmp_path / "r.parquet"), ["t"]).times("t", "s").tolist() == [1577872800.123456, -1e-6]
    far = pa.array([datetime.datetime(9999, 12, 31), datetime.datetime(1, 1, 1)], pa.timestamp("us"))
    pa.parquet.write_table(pa.table({"t": far}), tmp_path / "f.parquet", use_deprecated_int96_timestamps=True)
    assert read_table(str(tmp_path / "f.parquet"), ["t"]).times("t", "s").tolist() == [253402214400.0, -62135596800.0]


def test_a_time_is_of_the_kind_of_the_first_one_in_all_files(write, tmp_path):
    first = write("a.csv", "user_id,t", "1,2020-01-01")
    pa.parquet.write_table(pa.table({"user_id": [1], "t": pa.array([0], pa.timestamp("ms"))}), tmp_path / "b.parquet")
    pa.parquet.write_table(pa.table({"user_id": [1], "t": [17]}), tmp_path / "c.parquet")
    read = [part.times("t", "s").tolist() for part in read_blocks([first, str(tmp_path / "b.parquet")], ["t"])]
    assert read == [[1577836800.0], [0.0]]
    with pytest.raises(DataError, match=r"c.parquet:1: 't' is '17', a number; the first value is a date"):
        [part.times("t", "s") for part in read_blocks([first, str(tmp_path / "c.parquet")], ["t"])]


def test_types_of_parquet_that_arrow_lists_apart(tmp_path):
    import uuid

    ids = [uuid.UUID(int=i) for i in (5, 7)]
    views = pa.array([["a", "b"], None], pa.list_view(pa.string()))
    data = pa.table({"u": pa.array([one.bytes for one in ids], pa.uuid()), "tags": views})
    pa.parquet.write_table(data, tmp_path / "r.parquet")
    read = read_table(str(tmp_path / "r.parquet"), ["u", "tags"])
    assert read.ids("u").to_pylist() == [str(one) for one in ids]
    assert read.categories("tags", {}).to_pylist() == [["a", "b"], None]
    pa.parquet.write_table(pa.table({"u": ["x"], "tags": [[1.0, 2.5]]}), tmp_path / "s.parquet")
    both = read_table(str(tmp_path), ["u", "tags"])
    assert both.categories("tags", {}).to_pylist() == [["a", "b"], None, ["1", "2.5"]]
    # A view whose lists overlap and are in no order.
    view = pa.ListViewArray.from_arrays(pa.array([2, 0, 1]), pa.array([1, 3, 0]), pa.array(["x", "y", "z"]))
    assert read_table(pa.table({"tags": view}), ["tags"]).categories("tags", {}).to_pylist() == [
        ["z"],
        ["x", "y", "z"],
        [],
    ]


@pytest.mark.parametrize("part", [7, 11, 1 << 24])
def test_line_ends_in_two_quoted_fields_of_a_row(tmp_path, monkeypatch, part):
    monkeypatch.setattr("jfi.data.io.text.PART", part)
    (tmp_path / "r.csv").write_bytes(b'a,b\r\n"x\n\ny","a\nb"\r\n1,2\r\n"c\r\nd","e\rf"\r\n')
    read = read_table(str(tmp_path / "r.csv"), ["a", "b"])
    assert read.strings("a").to_pylist() == ["x\n\ny", "1", "c\r\nd"]
    assert read.strings("b").to_pylist() == ["a\nb", "2", "e\rf"]
    assert [line_of(read, row) for row in range(3)] == [2, 6, 7]


def test_line_ends_in_quotes_are_kept_in_long_files(tmp_path):
    cells = [f"{'x' * (i % 50)}\r\n{i}" for i in range(150_000)]
    (tmp_path / "r.csv").write_bytes(b"a,b\r\n" + "".join(f'"{one}",1\r\n' for one in cells).encode())
    assert read_table(str(tmp_path / "r.csv"), ["a"]).strings("a").to_pylist() == cells


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"user_id": 1, "item_id": 2, "user_id": 3}', "r.jsonl:2: 'user_id' is twice in one object"),
        ('{"user_id": 1, "item_id": 2, "more": {"a": 1, "a": 2}}', "r.jsonl:2: 'a' is twice in one object"),
        ('{"user_id": 1, "item_id": 2, "us\\u0065r_id": 3}', "r.jsonl:2: 'user_id' is twice in one object"),
        ('{"user_id": 1, "item_id": 2} {"user_id": 3, "item_id": 4}', "r.jsonl:2: not JSON: extra data at column 30"),
        ('{"user_id": 1,', "r.jsonl:2: not JSON: expecting property name"),
        ('{"user_id": "", "item_id": 1}', "r.jsonl:2: empty 'user_id'"),
        ('{"user_id": NaN, "item_id": 1}', "r.jsonl:2: empty 'user_id'"),
        ('{"item_id": 1}', "r.jsonl:2: empty 'user_id'"),
    ],
)
def test_lines_of_json_that_are_refused(write, line, expected):
    assert message(write("r.jsonl", '{"user_id": 1, "item_id": 2}', line)).rsplit("/", 1)[1].startswith(expected)


def test_values_of_json_that_arrow_does_not_keep(write):
    rows = [
        '{"x": [null, "a"], "y": 9007199254740993, "t": "2020-01-01"}',
        '{"x": ["b", 1], "y": 1.5, "t": "2020-01-02"}',
    ]
    read = read_table(write("r.jsonl", *rows), ["x", "y", "t"])
    assert read.categories("x", {}).to_pylist() == [[None, "a"], ["b", "1"]]
    assert read.strings("y").to_pylist() == ["9007199254740993", "1.5"]
    assert read.strings("t").to_pylist() == ["2020-01-01", "2020-01-02"]
    assert read_table(write("l.jsonl", '{"x": [null, 1]}', '{"x": [2]}'), ["x"]).categories("x", {}).to_pylist() == [
        [None, "1"],
        ["2"],
    ]


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl", "r.parquet"])
def test_a_table_without_rows(write, tmp_path, name):
    path = write(name, *(["user_id,item_id"] if name == "r.csv" else []))
    if name == "r.parquet":
        pa.parquet.write_table(
            pa.table({"user_id": pa.array([], pa.int64()), "item_id": pa.array([], pa.string())}), path
        )
    for settings in ([path], [path, write("more.csv", "user_id,item_id", "1,2")]):
        read = read_table(settings, ["user_id", "item_id"])
        assert read.ids("user_id").to_pylist() == ["1"] * (len(settings) - 1)
        assert read.numbers("item_id").tolist() == [2.0] * (len(settings) - 1)
    with pytest.raises(DataError, match=rf"{name}: no rows$"):
        load_dataset(data_config(interactions=path))


def test_memory_does_not_grow_with_a_file(tmp_path):
    """Reads of a file twice as long do not take more memory of Arrow."""
    most = []
    for count in (2, 4):
        path = Path(tmp_path / "r.csv")
        path.write_text("user_id,text\n" + f"1,{'x' * 100}\n" * (300_000 * count))
        before = pa.total_allocated_bytes()
        most.append(max(pa.total_allocated_bytes() - before for _ in read_blocks(str(path), ["user_id", "text"])))
    assert most[1] < 1.2 * most[0]


@pytest.mark.parametrize("name", ["r.csv", "r.tsv", "r.jsonl", "r.parquet", "memory"])
def test_rows_without_ids_are_left_out_and_counted(write, tmp_path, monkeypatch, name):
    monkeypatch.setattr("jfi.data.io.blocks.BLOCK", 7)
    gaps = [*ROWS[:3], ("", 3, 1, 25), *ROWS[3:20], ("u1", None, 0, 195), (None, None, 0, 196), *ROWS[20:]]
    names = ["user_id", "item_id", "clicked", "timestamp"]

    def source(rows: list[tuple], name: str) -> object:
        if name.endswith("sv"):
            mark = "," if name == "r.csv" else "\t"
            return write(name, mark.join(names), *(mark.join("" if v is None else str(v) for v in r) for r in rows))
        if name == "r.jsonl":
            return write(name, *(json.dumps(dict(zip(names, r, strict=True))) for r in rows))
        table = pa.table(dict(zip(names, zip(*rows, strict=True), strict=True)))
        if name == "memory":
            return table
        pa.parquet.write_table(table, tmp_path / name)
        return str(tmp_path / name)

    expected = samples(DataConfig(interactions=source(ROWS, name), label="clicked"))
    users = write("users.csv", "user_id,age", "u0,3", ",4", "u1,5")
    config = DataConfig(
        interactions=source(gaps, name), users=users, label="clicked", features=[FeatureConfig("age", "user")]
    )
    with pytest.raises(DataError, match=r"empty 'user_id'; data\.null_ids: drop leaves such rows out$"):
        load_dataset(replace_data(config, users=None, features=[]))
    with pytest.raises(DataError, match=r"users.csv:3: empty 'user_id'; data.null_ids: drop leaves such rows out$"):
        load_dataset(replace_data(config, interactions=source(ROWS, name)))
    config = replace_data(config, interactions=source(gaps, name), null_ids="drop")
    dataset = load_dataset(config)
    assert dataset.summary.rows == 40
    assert [line.split(": ", 1)[1] for line in dataset.summary.warnings if "left out" in line] == [
        "left out 3 of 43 rows without a user or an item (data.null_ids: drop)",
        "left out 1 of 3 rows without a user or an item (data.null_ids: drop)",
    ]
    assert samples(replace_data(config, users=None, features=[])) == expected
    # A line is that of the file where rows before it are left out.
    broken = source([*gaps, ("u1", 3, 1, None)], name)
    with pytest.raises(DataError, match=f":{len(gaps) + 1 + name.endswith('sv')}: empty 'timestamp'$"):
        load_dataset(replace_data(config, interactions=broken))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["2020-01-01T00:00:00+01:00", "2020-01-02T00:00:00"], "has no time zone offset; the first value has one"),
        (["2020-01-01T00:00:00", "2020-01-02T00:00:00+01:00"], "has a time zone offset; the first value has none"),
    ],
)
def test_times_with_and_without_an_offset(write, values, message):
    path = write("r.csv", "t,x", *(f"{value},1" for value in values))
    with pytest.raises(DataError, match=re.escape(f"r.csv:3: 't' is '{values[1]}', which {message}")):
        read_table(path, ["t"]).times("t", "s")
