"""A prepared dataset: what load_dataset makes of the same tables, bit for bit, whatever the length of a block."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from jfi.data import DataConfig, InteractionDataset, coded, events, load_dataset, table_blocks
from jfi.data.prepare import prepare_dataset
from jfi.data.prepared_write import write_prepared


def prepare_in_small_blocks(config: DataConfig, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepares in blocks of 7 rows, so that a small table has many."""
    monkeypatch.setattr(coded.blocks, "__defaults__", (7,))
    monkeypatch.setattr(events.user_blocks, "__defaults__", (7,))
    monkeypatch.setattr(events.order_by_item, "__defaults__", (None, 7))
    monkeypatch.setattr(table_blocks.iterate_tables, "__defaults__", (7,))
    monkeypatch.setattr("jfi.data.columns.BLOCK", 7)
    prepare_dataset(config, out)
    monkeypatch.undo()


def write_table(folder: Path, rng: np.random.Generator, count: int = 300) -> str:
    """A Parquet table with a column of each kind, ties in time, repeated rows and missing values."""
    item = rng.integers(0, 25, count)
    words = np.array(["x", "y", "z", "late", ""])

    def lists() -> list:
        drawn = [None if n == 4 else words[rng.integers(0, 5, n)].tolist() for n in rng.integers(0, 5, count)]
        return drawn

    columns = {
        "user_id": [f"u{i:03d}" for i in rng.integers(0, 12, count)],
        "item_id": [str(i) if i % 2 else f"0{i}" for i in item],
        "timestamp": rng.integers(0, 60, count),
        "clicked": np.where(rng.random(count) < 0.1, None, rng.integers(0, 2, count)).tolist(),
        "action": np.where(rng.random(count) < 0.1, None, rng.choice(["view", "buy", "10", "9"], count)).tolist(),
        "tags": lists(),
        "seconds": np.where(rng.random(count) < 0.1, np.nan, np.round(rng.lognormal(2, 1, count), 1)),
        "city": np.where(rng.random(count) < 0.2, None, rng.choice(["Rome", "Oslo"], count)).tolist(),
        "hobbies": lists(),
        "years": rng.normal(40, 9, count),
        "genre": [f"g{i % 4}|g{i % 3}" for i in item],
        "price": np.where(rng.random(count) < 0.2, np.nan, rng.lognormal(2, 1, count)),
        "title": np.where(rng.random(count) < 0.2, None, [f"Title {i}" for i in item]).tolist(),
    }
    path = str(folder / "rows.parquet")
    pa.parquet.write_table(pa.table(columns), path, row_group_size=50)
    return path


def config_of(path: str, **settings) -> DataConfig:
    config = DataConfig(
        interactions=path,
        label="clicked",
        user_categorical=["user_id", "city", "hobbies"],
        user_dense=["years"],
        item_categorical=["genre"],
        item_dense=["price"],
        event_categorical=["action", "tags"],
        event_dense=["seconds"],
        separators={"genre": "|"},
        title="title",
        fractions=[0.6, 0.2, 0.2],
        num_quantiles=5,
        max_slots=3,
        max_history=20,
    )
    return replace(config, **settings)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_batches(left: InteractionDataset, right: InteractionDataset) -> None:
    assert left.features == right.features
    for split in ("train", "validation", "test"):
        pairs = zip(left.batches(split, 16, shuffle=True), right.batches(split, 16, shuffle=True), strict=True)
        for a, b in pairs:
            assert torch.equal(a.sparse_features.values(), b.sparse_features.values())
            assert torch.equal(a.sparse_features.lengths(), b.sparse_features.lengths())
            assert torch.equal(a.dense_features, b.dense_features)
            assert torch.equal(a.labels, b.labels)
            assert torch.equal(a.users, b.users)
            assert a.users.dtype == b.users.dtype == torch.int64


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"split": "leave_one_out"},
        {"label": None, "negatives": 2},
        {"label": None, "split": "leave_one_out"},
        {
            "label": "seconds >= 7",
            "event_dense": [],
            "max_slots": 1,
            "item_categorical": [],
            "title": None,
            "separators": {},
        },
        {"user_categorical": [], "user_dense": [], "item_dense": [], "num_quantiles": 1, "max_history": 3},
    ],
)
def test_a_prepared_dataset_is_the_loaded_one_bit_for_bit(tmp_path, monkeypatch, settings):
    config = config_of(write_table(tmp_path, np.random.default_rng(len(str(settings)))), **settings)
    check_same(config, tmp_path, monkeypatch)


def test_tables_of_users_and_items_and_text_with_dates(tmp_path, write, monkeypatch):
    rng = np.random.default_rng(1)
    days = [f"2020-0{1 + i % 3}-{1 + i % 28:02d}" for i in rng.integers(0, 90, 80)]
    rows = [
        f"u{rng.integers(9)},{rng.integers(12)},{day},{rng.integers(2)},{rng.choice(['a;b', 'b', ''])}" for day in days
    ]
    config = DataConfig(
        interactions=write("rows.csv", "user_id,item_id,timestamp,clicked,tags", *rows),
        users=write("users.csv", "user_id,city,years", "u0,Rome,20", "u3,,40", "u5,Oslo,31"),
        items=write("items.csv", "item_id,genres,price,title", *(f"{i},g{i % 3}|h,{i},T{i}" for i in range(10))),
        label="clicked",
        user_categorical=["city"],
        user_dense=["years"],
        item_categorical=["genres"],
        item_dense=["price"],
        event_categorical=["clicked", "tags"],
        separators={"genres": "|", "tags": ";"},
        title="title",
        fractions=[0.6, 0.2, 0.2],
    )
    check_same(config, tmp_path, monkeypatch)


def check_same(config: DataConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads the tables, prepares them, and compares batches and, byte for byte, files."""
    loaded, before = load_dataset(config), {path.name for path in folder.iterdir()}
    prepare_in_small_blocks(config, folder / "prepared", monkeypatch)
    assert {path.name for path in folder.iterdir()} - before == {"prepared"}
    assert_same_batches(loaded, load_dataset(DataConfig(prepared=str(folder / "prepared"))))
    (folder / "written").mkdir()
    write_prepared(loaded, config.with_absolute_paths(), folder / "written")
    assert files_of(folder / "prepared") == files_of(folder / "written")
