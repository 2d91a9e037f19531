"""Encodings, quotes, line ends and sizes of text files."""

import gzip
import json

import numpy as np
import pytest
from data_configs import line_of, read_blocks

from jfi.data import DataConfig, DataError, load_dataset
from jfi.data.io import text as decode
from jfi.data.io.blocks import read_table
from jfi.data.io.table import SourceRows

HEADER = "user,title,time"


def message(path, **settings) -> str:
    wanted = settings.pop("wanted", HEADER.split(","))
    with pytest.raises(DataError) as caught:
        read_table(path, wanted, DataConfig(**settings))
    assert "\n" not in str(caught.value)
    return str(caught.value).rsplit("/", 1)[-1]


@pytest.mark.parametrize(
    ("encoding", "title"),
    [
        ("utf-8", "Müller 用户 😀"),
        ("utf-8-sig", "Müller 用户 😀"),
        ("utf-16", "Müller 用户 😀"),
        ("utf-16-le", "Müller 用户 😀"),
        ("utf-32", "Müller 用户 😀"),
        ("gb18030", "Müller 用户 😀"),
        ("gbk", "用户"),
        ("shift_jis", "東京"),
        ("latin-1", "Müller"),
        ("cp1252", "Müller €"),
    ],
)
@pytest.mark.parametrize("name", ["r.csv", "r.jsonl"])
def test_encodings(tmp_path, monkeypatch, name, encoding, title):
    # Blocks that end within characters.
    monkeypatch.setattr("jfi.data.io.text.PART", 7)
    lines = [f"user,{title},time", f"u1,{title},1", f"u2,{title},2"]
    if name == "r.jsonl":
        lines = [f'{{"user": "u{i}", "{title}": "{title}"}}' for i in (1, 2)]
    path = tmp_path / name
    path.write_bytes("\r\n".join(lines).encode(encoding))
    table = read_table(str(path), ["user", title], DataConfig(encoding=encoding))
    assert table.strings(title).to_pylist() == [title] * 2
    assert table.ids("user").to_pylist() == ["u1", "u2"]
    assert line_of(table, 1) == len(lines)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "r.csv"
    path.write_bytes(f"{HEADER}\r\nu1,Müller,1\r\n".encode() + "u2,Köln,2\r\n".encode("latin-1"))
    advice = "set data.encoding to the encoding of the file, such as gb18030, latin-1, cp1252 or utf-16"
    assert message(str(path)) == f"r.csv:3: the byte 0xF6 at offset 35 is not UTF-8; {advice}"
    assert path.read_bytes()[35] == 0xF6
    # Also where the column is not in use, so that the answer does not depend on the config.
    assert message(str(path), wanted=["user"]) == f"r.csv:3: the byte 0xF6 at offset 35 is not UTF-8; {advice}"
    assert read_table(str(path), ["title"], DataConfig(encoding="latin-1")).strings("title").to_pylist() == [
        "MÃ¼ller",
        "Köln",
    ]
    path.write_bytes(f"{HEADER}\ru1,x,1\r".encode() + b"u2,\xff,2\r")
    assert message(str(path)).startswith("r.csv:3: the byte 0xFF at offset 26 is not UTF-8; ")
    path.write_bytes("用户,x\n1,2\n".encode("gbk"))
    assert message(str(path)).startswith("r.csv:1: the byte 0xD3 at offset 0 is not UTF-8; ")
    path.write_text("a,b\n1,2\n", encoding="utf-16")
    assert message(str(path)).endswith(" is not UTF-8; it starts like UTF-16: set data.encoding: utf-16")
    path.write_bytes("a,b\n1,2\n".encode("utf-16-le"))
    assert message(str(path)).endswith("hold the byte 0; is this UTF-16? set data.encoding: utf-16")
    path.write_bytes(f"{HEADER}\nu1,".encode("ascii") + b"\x81\n")
    assert message(str(path), encoding="cp1252").startswith("r.csv:2: the byte 0x81 at offset 19 is not cp1252; ")
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"user": 1}\n{"user": "\xe9"}\n')
    assert message(str(path)).startswith("r.jsonl:2: the byte 0xE9 at offset 22 is not UTF-8; ")


def test_a_byte_of_another_encoding_deep_in_a_large_file_is_placed(tmp_path):
    path = tmp_path / "r.csv"
    rows = f"{HEADER}\n".encode() + b"".join(b"u%d,\xc3\xbc,1\n" % i for i in range(300_000))
    path.write_bytes(rows + b"u,\xfc,1\n")
    assert message(str(path)).startswith(f"r.csv:300002: the byte 0xFC at offset {len(rows) + 2} is not UTF-8; ")


def test_half_of_a_surrogate_pair_is_refused(tmp_path):
    (tmp_path / "r.csv").write_bytes(b"user,title\nu1,\\ud800\nu2,x")
    with pytest.raises(DataError, match=r"r\.csv: not unicode_escape: .* surrogates not allowed"):
        read_table(str(tmp_path / "r.csv"), ["title"], DataConfig(encoding="unicode_escape"))


def test_the_encoding_must_be_known(write):
    for encoding in ("utf9", "rot13", "base64", "", "\0", "undefined"):
        config = DataConfig(interactions=write("r.csv", HEADER), encoding=encoding)
        with pytest.raises(DataError, match=r"^data.encoding is '.*'; it must be an encoding that Python knows, "):
            load_dataset(config)


RAW = ["user\ttitle\ttime", "u1\tx\t1", 'u2\t"Foo bar\t2', "u3\tx\t3", 'u4\t5" disc\t4', 'u5\t"Q"\t5', "u6\tx\t6"]


def test_quotes_can_be_ordinary_characters(write):
    path = write("r.tsv", *RAW)
    table = read_table(path, ["user", "title"], DataConfig(quoting=False))
    assert table.ids("user").to_pylist() == ["u1", "u2", "u3", "u4", "u5", "u6"]
    assert table.strings("title").to_pylist() == ["x", '"Foo bar', "x", '5" disc', '"Q"', "x"]
    assert line_of(table, 4) == 6


UNQUOTE = "set data.quoting: false if quotes are ordinary characters in this file"


OPEN = f"the quote that opens a field here is never closed; {UNQUOTE}"
TAKES = "the quote that opens a field here takes in text up to a quote within line"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (RAW[1:4], f"r.tsv:3: {OPEN}"),
        (["u1\tx\t1", "u2\t\t2", '"u3\tx\t3'], f"r.tsv:4: {OPEN}"),
        (['u1\t"a\nb"\t1', 'u2\tx\t"3'], f"r.tsv:4: {OPEN}"),
        # Three rows become one with the right number of fields.
        (RAW[1:6], f"r.tsv:3: {TAKES} 5; {UNQUOTE}"),
        ([*RAW[1:4], "u4\ty\t4", 'u5\t"Q\t5'], f"r.tsv:3: {TAKES} 6; {UNQUOTE}"),
        ([*RAW[1:3], 'u3\tx\t3"'], f"r.tsv:3: 2 fields, expected 3; {UNQUOTE}"),
        (['u1\t"a\tb"'], f"r.tsv:2: 2 fields, expected 3; {UNQUOTE}"),
        (['u1\t"a"\t1', "u2\tx"], "r.tsv:3: 2 fields, expected 3"),
        # Python's csv and Arrow's would read `Q disc`, which the file does not hold.
        (["u1\tx\t1", 'u2\t"Q" disc\t2', "u3\tx\t3"], f"r.tsv:3: {TAKES} 3; {UNQUOTE}"),
    ],
)
def test_a_quote_that_takes_in_other_fields_is_named(write, rows, expected):
    assert message(write("r.tsv", RAW[0], *rows)) == expected


def test_an_open_quote_is_never_taken_for_a_value(write):
    # Each of these lost rows in silence: the quote opens the last field.
    path = write("r.csv", HEADER, "u1,x,1", 'u2,x,"2', "u3,x,3")
    assert message(path) == f"r.csv:3: {OPEN}"
    path = write("r.csv", HEADER, "u1,x,1", 'u2,x,"2')
    assert message(path) == f"r.csv:3: {OPEN}"
    path = write("r.csv", "user", "u1", '"u2', "u3")
    assert message(path) == f"r.csv:3: {OPEN}"
    path = write("r.csv", HEADER, 'u1,"x\ny",1', '"u2,x,2')
    assert message(path) == f"r.csv:4: {OPEN}"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False])
def test_line_ends(tmp_path, end, last):
    path = tmp_path / "r.csv"
    lines = [HEADER, "u1,x,1", "", 'u2,"y",2', "u3,,3"]
    path.write_bytes((end.join(lines) + end * last).encode())
    table = read_table(str(path), HEADER.split(","))
    assert table.strings("title").to_pylist() == ["x", "y", None]
    assert table.times("time", "s").tolist() == [1.0, 2.0, 3.0]
    assert [line_of(table, row) for row in range(3)] == [2, 4, 5]
    path.write_bytes((end.join([*lines, "u4,x"]) + end * last).encode())
    assert message(str(path)) == "r.csv:6: 2 fields, expected 3"


@pytest.mark.parametrize("quoting", [True, False])
def test_rows_longer_than_a_block_are_read(write, quoting):
    long = "x" * 3_000_000
    path = write("r.csv", HEADER, "u1,a,1", f"u2,{long},2", "u3,b,3")
    table = read_table(path, HEADER.split(","), DataConfig(quoting=quoting))
    assert table.strings("title").to_pylist() == ["a", long, "b"]
    path = write("r.csv", HEADER, "u1,a,1", f"u2,{long},2", "u3,b")
    assert message(path, quoting=quoting) == "r.csv:4: 2 fields, expected 3"
    with pytest.raises(DataError, match=r"r.csv:3: 'title' is 'x{80}\.\.\.', not a number$"):
        read_table(write("r.csv", HEADER, "u1,1,1", f"u2,{long},2"), ["title"]).numbers("title")


def test_rows_longer_than_the_largest_block_are_refused(write, monkeypatch):
    monkeypatch.setattr("jfi.data.io.text.PART", 1 << 10)
    monkeypatch.setattr("jfi.data.io.text.LONGEST_ROW", 1 << 12)
    path = write("r.csv", HEADER, *["u1,a,1"] * 1000, f"u2,{'x' * 10_000},2", "u3,b,3")
    assert message(path).startswith("r.csv:1002: a row longer than ")


@pytest.mark.parametrize(
    ("name", "begin", "part", "refused"),
    [
        ("r.json", "", b'{"user": 1},', "r.json:1: a line longer than 0 MiB; it must be an object such as"),
        ("r.json", "[[", b'{"user": 1},', "r.json:1: an element longer than 0 MiB; it must be an object such as"),
        ("r.jsonl", '{"user": 1}\n', b'{"user": 1},', "r.jsonl:2: a line longer than 0 MiB; it must be an object such"),
        ("r.csv", "", b"user,", "r.csv:1: a line longer than 0 MiB, expected the names of columns"),
    ],
)
def test_a_line_without_an_end_is_refused_before_the_file_is_read(write, monkeypatch, name, begin, part, refused):
    monkeypatch.setattr("jfi.data.io.text.PART", 1 << 10)
    for module, limit in (("json_lines", "LONGEST_ROW"), ("text", "LONGEST_ROW"), ("text", "_MAX_HEADER")):
        monkeypatch.setattr(f"jfi.data.io.{module}.{limit}", 1 << 12)
    read, count = decode._raw_parts, 0

    def counted(path: str):
        nonlocal count
        for one in read(path):
            count += 1
            yield one

    monkeypatch.setattr(decode, "_raw_parts", counted)
    path = write(name, begin + part.decode() * 10_000)
    assert message(path, wanted=["user"]).startswith(refused)
    assert count <= 6


def test_headers_that_are_none(write):
    assert message(write("r.csv", "x" * 200_000, "1")) == (
        "r.csv:1: the name of a column has 200000 characters, at most 1000 are read"
    )
    assert message(write("r.csv", 'user,"title,time', "u,t,1")) == (
        f"r.csv:1: the quote of a column's name is not closed on the line; {UNQUOTE}"
    )
    assert message(write("r.inter", "a:token\ta:float", "1\t2")) == "r.inter:1: column 'a' appears twice"
    table = read_table(write("r.csv", 'user,"a, b",5" disc', "u,t,1"), ["a, b", '5" disc'])
    assert table.known == ["user", "a, b", '5" disc']


def test_random_bytes_named_csv_are_refused(tmp_path):
    path = tmp_path / "r.csv"
    path.write_bytes(np.random.default_rng(0).bytes(100_000))
    assert message(str(path)).startswith("r.csv:1: the byte 0x")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("inf", "'time' is 'inf', which is no time"),
        ("-Infinity", "'time' is '-Infinity', which is no time"),
        ("nan", "'time' is 'nan', which is no time"),
        ("1e999", "'time' is '1e999', which is no time"),
        ("", "empty 'time'"),
        ("soon", "'time' is 'soon', neither a number nor a date; a date is of ISO 8601"),
    ],
)
def test_a_wrong_time_is_called_what_it_is(write, value, expected):
    table = read_table(write("r.csv", HEADER, "u1,x,1", f"u2,x,{value}"), ["time"])
    with pytest.raises(DataError) as caught:
        table.times("time", "s")
    assert str(caught.value).partition(", such as ")[0].endswith(f"r.csv:3: {expected}")


def test_quoted_line_breaks_beside_quotes_that_are_characters(write, monkeypatch):
    titles = ["two\nlines", 'a "b" c', "", '"', "\n", '""\n', "x"]
    rows = ['u,"' + title.replace('"', '""') + '",1' for title in titles]
    table = read_table(write("r.csv", HEADER, *rows, 'u,5" disc,1', 'u,a"b"c,1'), ["title"])
    assert table.strings("title").to_pylist() == [title or None for title in titles] + ['5" disc', 'a"b"c']


def test_a_fault_after_many_quoted_line_breaks_has_its_line(write):
    rows = ['u1,"two\nlines",1'] * 30_000
    path = write("r.csv", HEADER, *rows, "u2,x")
    assert message(path) == "r.csv:60002: 2 fields, expected 3"


@pytest.mark.parametrize("name", ["max_history", "max_slots", "negatives"])
def test_counts_that_no_memory_holds_are_refused(write, name):
    with pytest.raises(DataError, match=rf"^data.{name}: got 10{{30}}, must be an integer in .*, 2147483648\)$"):
        DataConfig(interactions=write("r.csv", HEADER), **{name: 10**30})


FIELDS = [
    "a",
    "",
    "用户",
    "x y",
    '"quoted"',
    '"with, comma"',
    '"two\nlines"',
    '"a ""word"" here"',
    '5" disc',
    '"',
    '""',
]


def blocks_of(size: int, path: str, wanted: list[str]) -> list[SourceRows]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jfi.data.io.blocks.BLOCK", size)
        return list(read_blocks(path, wanted))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_text_in_parts_is_the_text_as_a_whole(tmp_path, monkeypatch, end):
    """Also where parts end within characters, line ends and quotes."""
    random, path = np.random.default_rng(0), tmp_path / "r.csv.gz"
    outcomes = {"read": 0, "refused": 0}
    for trial in range(120):
        fields = FIELDS[: 8 if trial % 2 else 10]
        rows = [f"u{i},{fields[random.integers(len(fields))]},{i}" for i in range(9)]
        path.write_bytes(gzip.compress(end.join([HEADER, *rows]).replace("two\nlines", f"two{end}lines").encode()))
        monkeypatch.setattr("jfi.data.io.text.PART", int(random.integers(4, 60)))
        try:
            whole = read_table(str(path), HEADER.split(","))
        except DataError as error:
            with pytest.raises(DataError) as caught:
                blocks_of(4, str(path), HEADER.split(","))
            # Of several faults an earlier one may be named.
            found, of_whole = (str(one).split(": ")[0].split(":") for one in (caught.value, error))
            assert found[0] == of_whole[0] == str(path)
            assert 1 < int(found[1]) <= int(of_whole[1])
            outcomes["refused"] += 1
            continue
        parts = blocks_of(4, str(path), HEADER.split(","))
        assert [x for part in parts for x in part.strings("title").to_pylist()] == whole.strings("title").to_pylist()
        lines = [line_of(part, row) for part in parts for row in range(len(part))]
        assert lines == [line_of(whole, row) for row in range(len(whole))]
        outcomes["read"] += 1
    assert min(outcomes.values()) > 10


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([None, None, True, False, None], None),
        ([None, "a", True, 3, None], None),
        ([None, True, True, True, "yes"], None),
        ([None, None, ["a"], None, ["b", "c"]], None),
        (["a", None, None, None, ["b"]], "r.jsonl:6: 'x' is a list here and a single value in other rows"),
        ([["a"], None, None, None, 7], "r.jsonl:6: 'x' is a single value here and a list in other rows"),
    ],
)
def test_a_column_of_json_lines_in_parts_has_one_kind(tmp_path, monkeypatch, values, message):
    monkeypatch.setattr("jfi.data.io.text.PART", 10)
    path = tmp_path / "r.jsonl"
    rows = [json.dumps({"x": value} | ({"y": i} if i > 2 else {})) for i, value in enumerate(values)]
    path.write_text("\n".join(["", *rows]))
    if message is not None:
        with pytest.raises(DataError, match=f"{message}; it must be of one kind$"):
            blocks_of(2, str(path), ["x", "y"])
        return
    whole, parts = read_table(str(path), ["x", "y"]), blocks_of(2, str(path), ["x", "y"])
    read = [x for part in parts for x in part.categories("x", {}).to_pylist()]
    texts = {True: "true", False: "false", 3: "3"}
    assert read == [value if isinstance(value, list) else texts.get(value, value) for value in values]
    assert whole.categories("x", {}).to_pylist() == read
    assert [x for part in parts for x in part.strings("y").to_pylist()] == [None, None, None, "3", "4"]
    types = [column.type for part in parts if (column := part.categories("x", {})).null_count < len(part)]
    assert set(types) == {whole.categories("x", {}).type}
    assert [line_of(part, row) for part in parts for row in range(len(part))] == [2, 3, 4, 5, 6]
