import gzip
import os

import pyarrow as pa
import pyarrow.parquet
import pytest

from jfi.data import DataConfig, DataError, load_dataset
from jfi.data.io.blocks import read_table
from jfi.training.config_parser import load_config, parse_config, save_config

HEADER = "user,item,stars,time"


@pytest.fixture
def parts(tmp_path):
    """A folder of three files of two rows each, beside what writers of Parquet and people leave in folders."""
    folder = tmp_path / "parts"
    folder.mkdir()
    for i in range(3):
        rows = [f"u{i}{k},i{k},{k},{10 * i + k}" for k in range(2)]
        (folder / f"part-{i}.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.csv.crc").write_bytes(b"\0\1")
    (folder / "_delta_log").mkdir()
    (folder / "_delta_log" / "0.json").write_text("{}")
    return folder


USERS = ["u00", "u01", "u10", "u11", "u20", "u21"]


def users(paths) -> list[str]:
    return read_table(paths, HEADER.split(",")).ids("user").to_pylist()


def test_a_folder_a_glob_and_a_list_are_one_table(parts):
    assert users(str(parts)) == USERS
    assert users(str(parts) + os.sep) == USERS
    assert users(str(parts / "part-*.csv")) == USERS
    assert users(str(parts / "part-[02].csv")) == USERS[:2] + USERS[4:]
    assert users(str(parts.parent / "**" / "*.csv")) == USERS
    # A list keeps its order.
    assert users([str(parts / "part-2.csv"), str(parts / "part-[01].csv")]) == USERS[4:] + USERS[:4]


def test_files_are_read_in_the_order_of_the_numbers_in_their_names(tmp_path):
    names = ["day=2/part-9", "day=2/part-10", "day=10/part-99999-a", "day=10/part-100000-a"]
    for i in (2, 3, 1, 0):
        path = tmp_path / f"{names[i]}.csv"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{HEADER}\nu{i},i,1,1\n")
    for paths in (tmp_path, tmp_path / "day=*", tmp_path / "**/*.csv"):
        assert users(str(paths)) == ["u0", "u1", "u2", "u3"]


def test_a_name_with_the_signs_of_a_glob_is_a_file_where_it_exists(write):
    assert users(write("[ab]*.csv", HEADER, "u,i,1,2")) == ["u"]


def test_files_may_order_their_columns_differently(write, tmp_path):
    paths = [write("a.csv", HEADER, "u1,i1,4,10"), write("b.csv", "more,time,item,user,stars", "x,11,i2,u2,5")]
    table = read_table(paths, HEADER.split(","))
    assert table.ids("user").to_pylist() == ["u1", "u2"]
    assert table.numbers("stars").tolist() == [4.0, 5.0]
    assert table.times("time", "s").tolist() == [10.0, 11.0]


def test_files_of_several_formats_are_one_table(write, tmp_path):
    csv = write("a.csv", HEADER, "1,i1,4,10")
    pa.parquet.write_table(
        pa.table({"user": [2, 3], "item": ["i2", "i3"], "stars": [4.5, None], "time": pa.array([11, 12], pa.int32())}),
        tmp_path / "b.parquet",
    )
    json = write("c.jsonl", '{"user": 4, "item": "i4", "stars": 1, "time": 13}')
    table = read_table([csv, str(tmp_path / "b.parquet"), json], HEADER.split(","))
    assert table.ids("user").to_pylist() == ["1", "2", "3", "4"]
    assert table.strings("stars").to_pylist() == ["4", "4.5", None, "1"]
    assert table.times("time", "s").tolist() == [10.0, 11.0, 12.0, 13.0]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.array([1], pa.int32()), pa.array([2**40], pa.int64()), ["1", str(2**40)]),
        (pa.array([2**60 + 1], pa.int64()), pa.array([2.0, None]), [str(2**60 + 1), "2", None]),
        (pa.array(["a"]).dictionary_encode(), pa.array(["b"]), ["a", "b"]),
        (pa.array(["a"]).dictionary_encode(), pa.array(["b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        (pa.array(["a"]), pa.array(["b"], pa.large_string()), ["a", "b"]),
        (pa.nulls(2), pa.array([7]), [None, None, "7"]),
        (pa.array([1], pa.timestamp("s")), pa.array([2000], pa.timestamp("ns")), None),
    ],
)
def test_types_of_files_are_joined_without_a_change_of_values(tmp_path, first, second, expected):
    for name, column in (("a", first), ("b", second)):
        pa.parquet.write_table(pa.table({"x": column}), tmp_path / f"{name}.parquet")
    table = read_table(str(tmp_path), ["x"])
    if expected is None:
        assert table.times("x", "s").tolist() == pytest.approx([1.0, 2e-6])
    else:
        assert table.strings("x").to_pylist() == expected


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("value", ["null", None, '""'], ids=["null", "missing", "empty"])
def test_a_file_of_json_lines_without_a_list_goes_with_files_that_have_them(write, order, value):
    empty = '{"user": 1}' if value is None else f'{{"user": 1, "x": {value}}}'
    paths = {
        "a": write("a.jsonl", empty, empty, '{"user": 1, "x": null}'),
        "b": write("b.jsonl", '{"user": 2, "x": ["p", "q"]}', '{"user": 2}'),
    }
    read = read_table([paths[name] for name in order], ["x", "user"]).categories("x", {}).to_pylist()
    assert read == ([None] * 3 + [["p", "q"], None] if order == "ab" else [["p", "q"], None] + [None] * 3)
    # Nowhere a value: text, as in a single file.
    nowhere = [paths["a"], write("c.jsonl", '{"user": 1, "x": null}')]
    assert read_table(nowhere, ["x", "user"]).categories("x", {}).to_pylist() == [None] * 4


def test_types_that_do_not_go_together_name_both_files(tmp_path):
    for name, column in (("a", ["x"]), ("b", [["x"]])):
        pa.parquet.write_table(pa.table({"x": column}), tmp_path / f"{name}.parquet")
    expected = r"b.parquet:1: 'x' is a list here and a single value in other rows; it must be of one kind"
    with pytest.raises(DataError, match=expected):
        read_table(str(tmp_path), ["x"])


def test_folders_of_hive_give_columns(tmp_path):
    for day in ("2020-01-01", "2020-01-02"):
        for country in ("de", "__HIVE_DEFAULT_PARTITION__", "a%2Fb"):
            folder = tmp_path / f"day={day}" / f"country={country}"
            folder.mkdir(parents=True)
            pa.parquet.write_table(pa.table({"user": [f"{day}{country}"]}), folder / "0.parquet")
    table = read_table(str(tmp_path), ["user", "day", "country"])
    assert table.known == ["user", "day", "country"]
    assert table.times("day", "s").tolist() == [1577836800.0] * 3 + [1577923200.0] * 3
    assert table.strings("country").to_pylist() == [None, "a/b", "de"] * 2
    assert read_table(str(tmp_path), ["user"]).data.column_names == ["user"]


def message(paths) -> str:
    with pytest.raises(DataError) as caught:
        table = read_table(paths, HEADER.split(","))
        table.ids("user")
        table.numbers("stars")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_fault_names_its_file_and_its_line_there(parts):
    path = parts / "part-1.csv"
    path.write_text(f"{HEADER}\n\nu1,i1,4,10\nu1,i1,many,10\n")
    assert message(str(parts)) == f"{path}:4: 'stars' is 'many', not a number"
    path.write_text(f"{HEADER}\nu1,i1,4,10\n,i1,1,10\n")
    assert message(str(parts)) == f"{path}:3: empty 'user'"
    path.write_text(f"{HEADER}\nu1,i1,4,10\nu1,i1\n")
    assert message(str(parts)) == f"{path}:3: 2 fields, expected 4"


def test_an_id_given_twice_names_both_places(write):
    interactions = write("r.csv", HEADER, "u1,i1,1,1", "u1,i2,0,2", "u1,i1,1,3")
    config = DataConfig(interactions=interactions, user="user", item="item", timestamp="time", label="stars")
    config.users = [write("a.csv", "user", "u1"), write("b.csv", "user", "u2", "u1")]
    with pytest.raises(DataError, match=r"b.csv:3: 'user' u1 is already in \S*a.csv:2$"):
        load_dataset(config)


def test_files_of_one_table_have_the_columns_in_use(parts):
    path = parts / "part-1.csv"
    path.write_text("user,item,stars,when\nu1,i1,4,10\n")
    assert message(str(parts)) == f"{path}: no column 'time', which {parts / 'part-0.csv'} has"
    path.write_text("user,item,time\nu1,i1,4\n")
    assert message(str(parts)) == f"{path}: no column 'stars', which {parts / 'part-0.csv'} has"
    # A column that is not in use may differ.
    assert read_table(str(parts), ["user", "item", "time"]).ids("user").to_pylist()[2] == "u1"
    for i in range(3):
        (parts / f"part-{i}.csv").write_text("id,item\nu1,i1\n")
    first, last = parts / "part-0.csv", parts / "part-2.csv"
    assert message(str(parts)) == f"{first} to {last}: no column 'user'; known: id, item"


def test_paths_that_name_no_table(parts, tmp_path):
    (tmp_path / "empty").mkdir()
    assert message(str(tmp_path / "empty")).startswith(f"{tmp_path / 'empty'}: the folder holds no files; known names")
    assert message(str(tmp_path / "gone")) == f"{tmp_path / 'gone'}: no such file or directory"
    assert message(str(tmp_path / "gone.csv")) == f"{tmp_path / 'gone.csv'}: no such file or directory"
    assert message(str(tmp_path / "*.parquet")).startswith(f"{tmp_path / '*.parquet'}: no file matches; ")
    assert message("") == "data.interactions is ''; it must name a file, a folder or a glob"
    assert message([]) == "data.interactions is an empty list; it must name at least one file"
    assert message("a\0b.csv") == "a\\x00b.csv: data.interactions holds the character NUL, which no path can hold"
    path = parts / "part-0.csv"
    assert message([str(parts), str(path)]) == f"{path}: data.interactions names this file twice"
    os.mkfifo(tmp_path / "pipe.csv")
    assert message(str(tmp_path / "pipe.csv")) == f"{tmp_path / 'pipe.csv'}: not a regular file"
    (parts / "notes.txt").touch()
    assert message(str(parts)).startswith(f"{parts / 'notes.txt'}: unknown file type; known names")
    (parts / "notes.txt").rename(parts / "zzz.tsv")
    assert message(str(parts)).startswith(f"{parts}: the folder holds files of several kinds, part-0.csv and zzz.tsv; ")


def test_a_folder_may_mix_files_with_and_without_gzip(parts):
    path = parts / "part-1.csv"
    (parts / "part-1.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert users(str(parts)) == USERS


@pytest.mark.parametrize("name", ["manifest.json", "schema.json"])
def test_a_table_may_have_the_name_of_a_file_of_a_prepared_dataset(tmp_path, name):
    (tmp_path / name).write_text('{"user": "u", "item": "i", "stars": 1, "time": 2}\n')
    assert users(str(tmp_path)) == ["u"]


def test_linked_subfolders_of_a_folder_are_read(parts, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (parts / "part-2.csv").rename(outside / "part-2.csv")
    (parts / "zz=1").symlink_to(outside)
    assert users(str(parts)) == users(str(parts) + os.sep) == USERS
    assert read_table(str(parts / "z*"), ["user"]).ids("user").to_pylist() == USERS[4:]


def test_links_that_lead_around_in_a_circle_are_named(parts, tmp_path):
    (parts / "again").symlink_to(parts)
    for path in (str(parts), str(parts) + os.sep):
        assert message(path).startswith(f"{parts / 'again'}: the same folder as {path}, which is read too")
    (parts / "again").unlink()
    # Two folders that lead to one another; neither is inside of the other.
    (tmp_path / "other").mkdir()
    (tmp_path / "other/back").symlink_to(parts)
    (parts / "on").symlink_to(tmp_path / "other")
    assert message(str(parts)).startswith(f"{parts / 'on/back'}: the same folder as {parts}, which is read too")


def test_the_command_line_takes_a_path_or_a_list(tmp_path):
    for argument, expected in [
        ("a.csv", "a.csv"),
        ("parts/*.parquet", "parts/*.parquet"),
        ("part-[01].csv", "part-[01].csv"),
        ("[a.csv, b.csv]", ["a.csv", "b.csv"]),
    ]:
        config = parse_config(["--data.interactions", argument, "--data.items", argument])[0]
        assert config.data.interactions == config.data.items == expected
        save_config(config, tmp_path / "config.yaml")
        assert load_config(tmp_path / "config.yaml") == config
