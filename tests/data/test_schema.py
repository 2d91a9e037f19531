"""The schema: what it learns from, that it encodes other tables as the first, and that it survives its files."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from data_configs import data_config, replace_data
from synthetic_data import synthetic_data

from jfi.data import DataConfig, DataError, DataSchema, load_dataset
from jfi.data.schema.schema import Strings
from jfi.utils.files import SUMS

HEADER = "user_id,item_id,timestamp,clicked,seconds,tags,genre,price,title,city"


def config_of(path: str, **settings: object) -> DataConfig:
    """A config with a column of each kind."""
    return data_config(
        interactions=path,
        label="clicked",
        user_categorical=["user_id", "city"],
        item_categorical=["genre"],
        item_dense=["price"],
        event_categorical=["tags"],
        event_dense=["seconds"],
        separators={"tags": ";"},
        title="title",
        fractions=[0.6, 0.2, 0.2],
        **settings,
    )


@pytest.fixture(autouse=True)
def _four_quantiles(monkeypatch):
    monkeypatch.setattr("jfi.data.prepared.stages.encode_columns.NUM_QUANTILES", 4)


def line(i: int, item: object = None, seconds: object = None, tags: str = "x;y", city: str = "Rome") -> str:
    item = i % 3 if item is None else item
    seconds = i if seconds is None else seconds
    return f"u{i % 2},{item},{i},{i % 2},{seconds},{tags},g{item},{seconds},Title {item},{city}"


@pytest.fixture
def table(write) -> str:
    """Ten rows of which six train; the others have values that no training row has, all above those of training."""
    later = [line(i, f"new{i}", 1000 * i, "x;y;z;late", "Oslo") for i in range(6, 10)]
    return write("r.csv", HEADER, *(line(i) for i in range(6)), *later)


def test_everything_is_learnt_from_the_training_rows_alone(write, table):
    schema = load_dataset(config_of(table)).schema
    other = [line(i, i % 3, -5 * i, "y", "Rome") for i in range(6, 10)]
    alone = load_dataset(config_of(write("other.csv", HEADER, *(line(i) for i in range(6)), *other))).schema
    assert schema.features == alone.features
    assert schema.encodings.edges["seconds"].tolist() == alone.encodings.edges["seconds"].tolist() == [1.25, 2.5, 3.75]
    assert schema.encodings.moments == alone.encodings.moments == {"price": (1.0, pytest.approx((2 / 3) ** 0.5))}
    values = {name: list(vocabulary.values) for name, vocabulary in schema.encodings.vocabularies.items()}
    assert values == {
        "user_id": ["u0", "u1"],
        "city": ["Rome"],
        "item_id": ["0", "1", "2"],
        "genre": ["g0", "g1", "g2"],
        "tags": ["x", "y"],
    }
    assert list(schema.titles) == ["unseen", "Title 0", "Title 1", "Title 2"]
    assert [spec.key for spec in schema.features if spec.slot is not None] == ["history_tags_0", "history_tags_1"]


def test_a_given_schema_encodes_another_table_and_learns_nothing(write, table):
    schema = load_dataset(config_of(table)).schema
    rows = [line(i, ["never", "2", "0"][i % 3], 3 * i, "late;y;x", "Rome") for i in range(10)]
    dataset = load_dataset(config_of(write("new.csv", HEADER, *rows)), schema)
    assert dataset.schema is schema
    sparse = dataset.batches("train", 6)[0].sparse_features
    assert sparse["item_id"].values().tolist() == sparse["genre"].values().tolist() == [0, 3, 1, 0, 3, 1]
    assert sparse["history_tags_0"].values().unique().tolist() == [0]
    assert sparse["history_tags_1"].values().unique().tolist() == [2]
    # Users alternate; the events of u0 before its third row are rows 0 and 2, of 0 and 6 seconds.
    assert sparse["history_seconds"].to_dense()[4].tolist() == [1, 4]
    price = dataset.batches("train", 6)[0].dense_features[:, 0]
    # An item's price is that of its first row in time: 0, 3 and 6.
    assert torch.allclose(price, (torch.tensor([0.0, 3.0, 6.0] * 2) - 1) / (2 / 3) ** 0.5)


def test_a_table_is_encoded_by_its_own_schema_as_at_first(table, tmp_path):
    first = load_dataset(config_of(table))
    first.schema.save(tmp_path / "data")
    again = load_dataset(config_of(table), DataSchema.load(tmp_path / "data"))
    for split in ("train", "validation", "test"):
        for a, b in zip(first.batches(split, 4), again.batches(split, 4), strict=True):
            assert torch.equal(a.sparse_features.values(), b.sparse_features.values())
            assert torch.equal(a.sparse_features.lengths(), b.sparse_features.lengths())
            assert torch.equal(a.dense_features, b.dense_features)


def test_a_saved_schema_is_the_same_schema(write, tmp_path):
    # Values that text formats break, and moments with all their digits.
    items = ["é\n", "1e5", "null", "ünï", "日本", '"']
    rows = [f'u{i % 2},"{items[i % 6]}",{i},{i % 2},{0.1 * i}'.replace('"""', '""""') for i in range(20)]
    path = write("r.csv", "user_id,item_id,timestamp,clicked,seconds", *rows)
    config = data_config(interactions=path, label="clicked", user_dense=["seconds"])
    schema = load_dataset(config).schema
    schema.save(tmp_path / "data")
    read = DataSchema.load(tmp_path / "data")
    assert (read.features, read.dense_names, read.item_key) == (schema.features, schema.dense_names, schema.item_key)
    assert (read.max_history, read.titles) == (schema.max_history, None)
    assert read.encodings.moments == schema.encodings.moments
    assert list(read.encodings.vocabularies["item_id"].values) == list(schema.encodings.vocabularies["item_id"].values)
    assert sorted(read.encodings.vocabularies["item_id"].values) == sorted(items)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"schema.json", "vocabularies.parquet", SUMS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("schema") / "data"
    load_dataset(synthetic_data(num_users=60, num_items=20)).schema.save(folder)
    return folder


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte % len(data)] ^= 1 << byte % 8
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("schema.json", Path.unlink, ": no such file or directory"),
        ("schema.json", lambda path: path.write_bytes(path.read_bytes()[:200]), " is damaged: "),
        ("schema.json", lambda path: path.write_text("[" * 100_000), " is damaged: "),
        ("schema.json", lambda path: path.write_text("[1]"), " is damaged: expected `object`, got `array`"),
        ("schema.json", lambda path: path.write_text('{"format": "other"}'), ": not a file of this version of jfi"),
        ("vocabularies.parquet", Path.unlink, " is missing"),
        (
            "vocabularies.parquet",
            lambda path: path.write_bytes(b""),
            " is damaged: its SHA-256 is not the one in",
        ),
        (
            "vocabularies.parquet",
            lambda path: pyarrow.parquet.write_table(pa.table({"value": ["a"]}), path),
            " is damaged: its SHA-256 is not the one in",
        ),
    ],
)
def test_a_damaged_or_foreign_schema_is_refused_in_one_line(saved, tmp_path, name, damage, message):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path / name)
    with pytest.raises(DataError) as fault:
        DataSchema.load(tmp_path)
    assert str(fault.value).startswith(f"{tmp_path / name}{message}") and "\n" not in str(fault.value)


@pytest.mark.parametrize("name", ["schema.json", "vocabularies.parquet", SUMS])
def test_no_flipped_bit_is_read_in_silence(saved, tmp_path, name):
    size = (saved / name).stat().st_size
    for byte in range(0, size, max(1, size // 40)):
        for path in saved.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        flip(tmp_path / name, byte)
        with pytest.raises(DataError, match=name):
            DataSchema.load(tmp_path)


def test_a_schema_is_written_whole_or_not_at_all(saved, tmp_path, monkeypatch):
    schema = DataSchema.load(saved)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("jfi.utils.files.os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            schema.save(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []
    schema.save(tmp_path / "data")
    with pytest.raises(FileExistsError):
        schema.save(tmp_path / "data")
    assert DataSchema.load(tmp_path / "data").features == schema.features


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"item_categorical": []}, r"data\.features of item: got \[\], but the run was started with \['genre'\]"),
        ({"max_history": 7}, r"data\.max_history: got 7, but the run was started with 200"),
        ({"user_dense": ["seconds"], "event_dense": []}, r"data\.features of event: got \['tags'\]"),
    ],
)
def test_a_config_with_other_columns_does_not_fit_the_schema(table, settings, message):
    schema = load_dataset(config_of(table)).schema
    config = replace_data(config_of(table), **settings)
    with pytest.raises(DataError, match=message):
        load_dataset(config, schema)


def test_lists_where_training_had_single_values_are_refused(table):
    schema = load_dataset(config_of(table)).schema
    for separators, kinds in (({}, "one value a row, but in training it had lists"), ({"tags": ";", "city": "o"}, "")):
        config = replace_data(config_of(table), separators=separators)
        with pytest.raises(DataError, match=kinds or "'city' has lists of values, but in training it had one value"):
            load_dataset(config, schema)


def test_strings_are_a_sequence():
    strings = Strings(pa.array(["a", "b", "c"]))
    assert (strings[1], strings[-1], list(strings), "b" in strings) == ("b", "c", ["a", "b", "c"], True)
    assert strings == ["a", "b", "c"] and strings != ["a", "b"] and strings == Strings(pa.array(["a", "b", "c"]))
