"""The command: what it writes, that no ID that was written changes, and what it refuses, by name."""

import json
import random
import shutil
from pathlib import Path

import commands
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from jfi.data import DataError
from jfi.data.schema.semantic_ids import SemanticIDs, write_sids
from jfi.semantic_ids import UNKNOWN_SID, Codec, DiscretePCA
from jfi.utils.files import read_sums, sha256_of, write_sums

ROOT = Path(__file__).parents[2]
WORDS = ["red pen", "blue pen", "paper clip", "green folder", "desk lamp", "paper tray"]


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        return commands.call("semantic-ids", *arguments), *capsys.readouterr()

    return call


def rows(count: int, first: int = 0) -> pa.Table:
    number = range(first, first + count)
    generator = torch.Generator().manual_seed(first)
    return pa.table(
        {
            "item": pa.array(number, pa.int64()),
            "title": [f"{WORDS[i % 6]} number {i % 4}" for i in number],
            "description": [None if i % 3 else f"a {WORDS[i % 5]}" for i in number],
            "image": torch.randn(count, 4, generator=generator).tolist(),
            "brand": [f"brand {i % 3}" for i in number],
        }
    )


def with_column(table: pa.Table, name: str, values: list, kind: pa.DataType | None = None) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values, kind))


def items_and_sids(path: str) -> dict:
    table = pq.read_table(path)
    return dict(zip(table["item"].to_pylist(), table["sid"].to_pylist(), strict=True))


DPCA = ["--items", "items.parquet", "--text", "title", "--out", "sids.parquet", "--codec", "dpca", "--digits", "10"]


def test_the_command_writes_ids_codec_and_figures(command):
    pq.write_table(rows(60), "items.parquet")
    arguments = ["--items", "items.parquet", "--text", "title,description", "--embeddings", "image"]
    code, out, error = command(*arguments, "--categorical", "brand", "--steps", "10", "--out", "sids.parquet")
    assert (code, error) == (0, "")
    table = pq.read_table("sids.parquet")
    codec = Codec.load("sids.codec/codec.safetensors")
    assert table.schema.field("item").type == pa.int64() and table.schema.field("sid").type == pa.int64()
    assert table.schema.metadata[b"jfi.sid.fingerprint"].decode() == codec.fingerprint
    assert codec.digits(torch.tensor(table["sid"].to_pylist())).shape == (60, 25)
    assert len(codec.widths) == 3
    figures = json.loads(Path("sids.codec/quality.json").read_text())
    assert figures["items"] == 60 and figures["distinct"] == len({*table["sid"].to_pylist()})
    assert f"{figures['labels']['brand']['probe']:.1%} from IDs" in out
    assert Path("sids.codec/quality.png").read_bytes().startswith(b"\x89PNG")
    assert "0 items as they were, 60 new" in out


def test_new_items_are_added_and_no_id_changes(command):
    pq.write_table(rows(60), "items.parquet")
    assert command(*DPCA)[0] == 0
    before, codec = items_and_sids("sids.parquet"), Path("sids.codec/codec.safetensors").read_bytes()
    # Other content for old items, which keep their IDs; some old items are gone from the table.
    grown = with_column(rows(80), "title", [f"desk lamp {i}" if i < 60 else f"{WORDS[i % 6]}" for i in range(80)])
    pq.write_table(grown.slice(10), "items.parquet")
    code, out, _ = command(*DPCA)
    assert code == 0 and "60 items as they were, 20 new" in out
    after = items_and_sids("sids.parquet")
    assert list(after) == list(range(80)) and {item: after[item] for item in before} == before
    assert Path("sids.codec/codec.safetensors").read_bytes() == codec
    # A new item with an old one's content has its ID.
    same = pa.concat_tables([rows(1), with_column(rows(1), "item", [99])])
    pq.write_table(same, "items.parquet")
    assert command(*DPCA)[0] == 0
    assert items_and_sids("sids.parquet")[99] == before[0]


def test_the_same_command_gives_the_same_ids(command):
    pq.write_table(rows(60), "items.parquet")
    arguments = [*DPCA[:-4], "--codec", "vq", "--steps", "5", "--embeddings", "image"]
    for name in ("a", "b"):
        assert command(*arguments, "--out", f"{name}.parquet")[0] == 0
    assert Path("a.parquet").read_bytes() == Path("b.parquet").read_bytes()


def test_the_content_itself_is_a_codebook_with_a_code_for_each_item(command):
    pq.write_table(rows(60), "items.parquet")
    arguments = [*DPCA[:-4], "--codec", "rq", "--levels", "1", "--codebook-size", "60", "--embeddings", "image"]
    code, out, _ = command(*arguments)
    assert code == 0 and "reconstruction error  0.0%" in out
    codec, before = Codec.load("sids.codec/codec.safetensors"), items_and_sids("sids.parquet")
    images = codec.decode(torch.tensor(list(before.values())))[:, -4:]
    torch.testing.assert_close(images, torch.tensor(rows(60)["image"].to_pylist()), atol=1e-5, rtol=1e-5)
    pq.write_table(rows(62), "items.parquet")  # the images of these are others: new items have the nearest content
    assert command(*arguments)[0] == 0
    after = items_and_sids("sids.parquet")
    assert {item: after[item] for item in before} == before and {after[60], after[61]} <= {*before.values()}


def test_an_item_without_content_is_counted(command):
    titles = ["", None, "  ", *rows(60)["title"].to_pylist()[3:]]
    pq.write_table(with_column(rows(60), "title", titles), "items.parquet")
    code, out, _ = command(*DPCA)
    assert code == 0 and "60 new, of which 3 without content have the ID -1" in out
    sids = items_and_sids("sids.parquet")
    assert [item for item, sid in sids.items() if sid == UNKNOWN_SID] == [0, 1, 2]
    assert "60, of which 3 (5.0%) without content" in out
    # Content that comes later gives an ID; other content of an item that has one does not.
    titles = [None, *rows(60)["title"].to_pylist()[1:3], *["green folder"] * 57]
    pq.write_table(with_column(rows(60), "title", titles).slice(0, 40), "items.parquet")
    code, out, _ = command(*DPCA)
    late = "58 items as they were, 2 that had no content and now have an ID, 0 new, of which 0 without"
    assert code == 0 and late in out
    after = items_and_sids("sids.parquet")
    assert list(after) == list(sids) and after[0] == UNKNOWN_SID
    assert {**after, 1: UNKNOWN_SID, 2: UNKNOWN_SID} == sids
    pq.write_table(with_column(rows(3), "item", [100, 101, 102]), "items.parquet")  # the same content as a new item's
    assert command(*DPCA)[0] == 0
    both = items_and_sids("sids.parquet")
    assert (both[1], both[2]) == (both[101], both[102]) and UNKNOWN_SID not in (both[1], both[2])
    # Words that the codec has never seen say nothing of an item either.
    pq.write_table(with_column(rows(1, 99), "title", ["xyzzy"]), "items.parquet")
    assert "1 new, of which 1 without content" in command(*DPCA)[1]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.large_string())])
def test_lists_of_texts_count_as_one_text(command, kind):
    """A gap in a list leaves its other texts."""
    table = rows(60)
    titles = table["title"].to_pylist()
    pq.write_table(table, "items.parquet")
    assert command(*DPCA)[0] == 0
    lists = [[*title.split(), None, ""] for title in titles[:58]] + [[None], None]
    pq.write_table(with_column(table, "title", lists, kind), "items.parquet")
    assert command(*DPCA, "--out", "lists.parquet")[0] == 0
    sids, of_lists = items_and_sids("sids.parquet"), items_and_sids("lists.parquet")
    assert [item for item, sid in of_lists.items() if sid == UNKNOWN_SID] == [58, 59]
    pairs = {(sids[item], of_lists[item]) for item in range(58)}  # the same texts have the same ID
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs}) == len(WORDS)


def test_an_empty_category_is_not_known(command):
    brands = ["" if i % 2 else f"brand {i % 3}" for i in range(60)]
    table = with_column(rows(60), "brand", brands)
    pq.write_table(table, "items.parquet")
    lines = [
        f"{i},{title},{brand}" for i, (title, brand) in enumerate(zip(table["title"].to_pylist(), brands, strict=True))
    ]
    Path("items.csv").write_text("\n".join(["item,title,brand", *lines]))
    for name in ("items.parquet", "items.csv"):
        arguments = [*DPCA, "--items", name, "--categorical", "brand", "--out", f"{Path(name).suffix[1:]}.parquet"]
        assert command(*arguments)[0] == 0
    found = [json.loads(Path(f"{kind}.codec/quality.json").read_text())["labels"] for kind in ("parquet", "csv")]
    assert found[0] == found[1] and found[0]["brand"]["items"] == 15


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_texts_that_are_all_the_same(command):
    pq.write_table(with_column(rows(60), "title", ["the same"] * 60), "items.parquet")
    code, _, _ = command(*DPCA)
    assert code == 0 and len({*items_and_sids("sids.parquet").values()}) == 1


def test_csv_and_residual_kmeans(command):
    table = rows(60)
    lines = [f"{i},{title}" for i, title in zip(table["item"].to_pylist(), table["title"].to_pylist(), strict=True)]
    Path("items.csv").write_text("\n".join(["item,title", *lines]))
    code, out, _ = command("--items", "items.csv", "--text", "title", "--out", "s.parquet", *RQ)
    assert code == 0 and "60 new" in out
    assert pq.read_table("s.parquet").schema.field("item").type == pa.large_string()
    assert command("--items", "items.csv", "--text", "title", "--out", "s.parquet", *RQ)[0] == 0


RQ = ["--codec", "rq", "--levels", "2", "--codebook-size", "8"]
IMAGE = ["--items", "items.parquet", "--embeddings", "image", "--out", "sids.parquet", "--codec", "dpca"]


def image(values: list, kind: pa.DataType | None = None) -> pa.Table:
    table = rows(60)
    return with_column(table, "image", table["image"].to_pylist()[: 60 - len(values)] + values, kind)


@pytest.mark.parametrize(
    ("table", "arguments", "message"),
    [
        (rows(60), [*DPCA, "--text", "titel"], "items.parquet: no column 'titel'; did you mean 'title'?"),
        (rows(60), [*DPCA, "--item", "id"], "items.parquet: no column 'id'"),
        (rows(60), [*DPCA, "--text", "image"], "column 'image' has type"),
        (
            rows(60),
            [*IMAGE, "--embeddings", "title"],
            "column 'title' has type string, but must hold lists of numbers; text files have none",
        ),
        (image([[1.0, 2.0]]), IMAGE, "items.parquet:60: 'image' has 2 numbers, and that of items.parquet:1 has 4"),
        (image([[1.0, 2.0, None, 3.0]]), IMAGE, "items.parquet:60: 'image' holds a number that is missing or not"),
        (image([[1.0, 2.0, 1e300, 3.0]]), IMAGE, "items.parquet:60: 'image' holds a number that is missing or not"),
        (image([[1.0, 2.0, float("inf"), 3.0]]), IMAGE, "items.parquet:60: 'image' holds a number that is missing or"),
        (
            with_column(rows(60), "item", [*range(59), 7]),
            DPCA,
            "items.parquet:60: 'item' 7 is already in items.parquet:8",
        ),
        (with_column(rows(60), "item", [*range(59), None]), DPCA, "items.parquet:60: empty 'item'"),
        (with_column(rows(60), "title", [None] * 60, pa.string()), DPCA, "column 'title' has no words"),
        (rows(60), [*DPCA, "--categorical", "item"], "no two rows have the same 'item', so it cannot be a label"),
        (rows(5), [*DPCA, *RQ], "codebook_size is 8, but only 5 rows have content"),
        (rows(60), [*DPCA, "--digits", "41"], "num_digits is 41, must be from 1 to 40"),
        (rows(60), [*DPCA, "--text", "title,title"], "--text: got 'title,title', must be different names"),
        (rows(60), [*DPCA, "--embeddings", "title"], "--embeddings: 'title' is in --text too"),
        (rows(60), [*DPCA, "--out", "sids.csv"], "--out sids.csv: the name must end in .parquet"),
        (rows(60), [*DPCA, "--out", "gone/sids.parquet"], "--out gone/sids.parquet: there is no folder gone"),
        (rows(60), [*DPCA, "--out", "items.parquet"], "--out items.parquet: --items names this file too"),
        (rows(60), [*DPCA, "--seed", "-1"], "--seed: got -1, must be from 0 to 4294967295"),
        (rows(60), [*DPCA, "--items", "."], "--out sids.parquet: is in the folder . of --items, which would read it"),
        (rows(60), [*DPCA, "--item", "sid"], "--item sid: the file of IDs has a column of this name"),
        (rows(60), DPCA[:2] + DPCA[4:], "name the content: --text, --embeddings or both"),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_refused(command, table, arguments, message):
    pq.write_table(table, "items.parquet")
    code, _, error = command(*arguments)
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not Path("sids.parquet").exists() and not Path("sids.codec").exists()


def damaged_codec() -> None:
    path = Path("sids.codec/codec.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


def codec_of_another_version() -> None:
    folder = Path("sids.codec")
    path = folder / "codec.safetensors"
    path.write_bytes(path.read_bytes().replace(b"jfi codec 2", b"jfi codec 9"))
    write_sums(folder, {name: sha256_of(folder / name) for name in read_sums(folder)})


def other_codec(sids: list[int] | None = None, codec: Codec | None = None) -> None:
    codec = codec or DiscretePCA(10).fit(torch.randn(50, 8))
    items = pa.array(range(50))
    write_sids(Path("sids.parquet"), "item", items, torch.tensor(sids or [0] * 50), codec)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with the items, the IDs and the codec of `DPCA`."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        pq.write_table(rows(60), "items.parquet")
        commands.run("semantic-ids", *DPCA)
    return folder


@pytest.mark.parametrize(
    ("damage", "arguments", "message"),
    [
        (other_codec, [], "sids.parquet: its IDs are of the codec"),
        (
            lambda: other_codec([0] * 49 + [10**8], Codec.load("sids.codec/codec.safetensors")),
            [],
            "sids.parquet: sids[49] is 100000000, which is no ID of 10 ternary digits",
        ),
        (lambda: pq.write_table(pa.table({"item": [1], "sid": [1]}), "sids.parquet"), [], "no fingerprint of a codec"),
        (lambda: pq.write_table(pa.table({"item": [1]}), "sids.parquet"), [], "sids.parquet: no column 'sid'"),
        (damaged_codec, [], "sids.codec/codec.safetensors is damaged"),
        (lambda: Path("sids.codec/content.safetensors").unlink(), [], "sids.codec/content.safetensors is missing"),
        (lambda: Path("sids.codec").rename("x"), [], "--out sids.parquet exists, but its codec sids.codec does not"),
        (lambda: None, ["--digits", "12"], "--digits: sids.codec was made with 10, not 12"),
        (lambda: None, ["--text", "description"], "--text: sids.codec was made with ['title'], not ['description']"),
        (
            lambda: pq.write_table(with_column(rows(60), "item", [f"i{i}" for i in range(60)]), "items.parquet"),
            [],
            "'item' has type string, which does not go with int64 of sids.parquet",
        ),
        (
            lambda: pq.write_table(with_column(rows(60), "item", [f"{i:02d}" for i in range(60)]), "items.parquet"),
            [],
            "items.parquet:1: 'item' is '00', which as int64, the type of sids.parquet, is '0'",
        ),
        (codec_of_another_version, [], "codec.safetensors is no codec of this version of jfi"),
    ],
)
def test_refused_beside_ids_that_are_there(command, made, damage, arguments, message):
    shutil.copytree(made, ".", dirs_exist_ok=True)
    damage()
    before = Path("sids.parquet").read_bytes()
    code, _, error = command(*DPCA, *arguments)
    assert code == 2 and message in error
    assert Path("sids.parquet").read_bytes() == before


def test_a_list_of_another_width_than_the_codecs(command):
    pq.write_table(rows(60), "items.parquet")
    assert command(*IMAGE)[0] == 0
    pq.write_table(with_column(rows(2, 90), "image", [[1.0, 2.0]] * 2), "items.parquet")
    code, _, error = command(*IMAGE)
    assert code == 2 and "items.parquet:1: 'image' has 2 numbers, and the codec's has 4" in error


def test_the_codec_is_used_where_the_ids_are_gone(command, made):
    """A run that was killed between the two continues with its codec."""
    shutil.copytree(made, ".", dirs_exist_ok=True)
    before = items_and_sids("sids.parquet")
    Path("sids.parquet").unlink()
    code, out, _ = command(*DPCA)
    assert code == 0 and "distinct IDs" not in out
    assert items_and_sids("sids.parquet") == before


@pytest.mark.parametrize("bits", ["some bits", pytest.param("all bits", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [pa.string(), pa.int64()], ids=str)
def test_a_flipped_bit_of_the_ids_is_refused_or_changes_nothing(tmp_path, kind, bits):
    """In the pages and in the footer, which no checksum of Parquet covers."""
    path, items = tmp_path / "sids.parquet", pa.array([i * 7919 % 1000 for i in range(60)]).cast(kind)
    codec = DiscretePCA(num_digits=12).fit(torch.randn(60, 8))
    sids = codec.encode(torch.randn(60, 8))
    write_sids(path, "item", items, sids, codec)
    good, draw, refused = path.read_bytes(), random.Random(0), 0
    for bit in range(8 * len(good)) if bits == "all bits" else range(draw.randrange(20), 8 * len(good), 21):
        content = bytearray(good)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            found = SemanticIDs.read(path, "item", codec=codec)
        except DataError as fault:
            refused += 1
            assert str(path) in str(fault) and "\n" not in str(fault), bit
        else:
            assert found.items.cast(pa.string()).equals(items.cast(pa.string())), bit
            assert torch.equal(torch.from_numpy(found.sids), sids), bit
    assert refused > len(good) // 5


def test_ids_without_a_checksum_are_refused(tmp_path):
    path, codec = tmp_path / "sids.parquet", DiscretePCA(num_digits=12).fit(torch.randn(60, 8))
    sids = codec.encode(torch.randn(3, 8))
    write_sids(path, "item", pa.array(["a", "b", "c"]), sids, codec)
    table = pq.read_table(path)
    metadata = {name: text for name, text in table.schema.metadata.items() if name != b"jfi.sid.sha256"}
    assert len(metadata) < len(table.schema.metadata)
    pq.write_table(table.replace_schema_metadata(metadata), path)
    with pytest.raises(DataError, match="damaged, its items and IDs do not match their SHA-256"):
        SemanticIDs.read(path, "item", codec=codec)
