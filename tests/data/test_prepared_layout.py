"""docs/prepared-data.md suffices to write a dataset: here with pyarrow and the standard library alone."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from jfi.data import DataConfig, DataError, load_dataset, prepared_complete
from jfi.data.prepared_complete import complete_dataset
from jfi.training import Config, ModelConfig, TrainingConfig, train

USERS, ITEMS, COUNT = 20, 12, 400


def features() -> list[dict]:
    """The keys of the schema.

    They are the city of the user, item and genres of the target, place and tags of the impression, and item, genres,
    action and place of events.
    """

    def spec(key: str, role: str, column: str, of: str, num: int, many: bool = False, slot: int | None = None) -> dict:
        names = {"key": key, "role": role, "column": column, "table": column, "num_embeddings": num}
        return names | {"multi_valued": many, "of": of, "slot": slot}

    return [
        spec("city", "user", "city", "user", 3),
        spec("item_id", "item", "item_id", "item", ITEMS + 1),
        spec("genres", "item", "genres", "item", 4, many=True),
        spec("place", "impression", "place", "event", 4),
        spec("tags", "impression", "tags", "event", 3, many=True),
        spec("history_item_id", "history", "item_id", "item", ITEMS + 1),
        spec("history_genres_0", "history", "genres", "item", 4, slot=0),
        spec("history_genres_1", "history", "genres", "item", 4, slot=1),
        spec("history_action", "history", "action", "event", 3),
        spec("history_place", "history", "place", "event", 4),
        spec("history_age", "bucket", "timestamp", "event", 32) | {"table": ""},
    ]


@pytest.fixture
def rows() -> dict[str, np.ndarray]:
    """The columns of the events, sorted."""
    rng = np.random.default_rng(0)
    user = np.sort(np.append(np.arange(USERS), rng.integers(0, USERS, COUNT - USERS)))
    item, time = rng.integers(0, ITEMS, COUNT), rng.integers(0, 200, COUNT).astype(np.float64)
    order = np.lexsort((item, time, user))
    user, item, time = user[order], item[order], time[order]
    split = np.searchsorted(np.quantile(time, [0.6, 0.8]), time).astype(np.int8)
    action = rng.integers(0, 3, COUNT)
    label = (action == 1).astype(np.float32)
    place = rng.integers(0, 4, COUNT)
    return {
        "user": user,
        "item": item,
        "time": time,
        "label": label,
        "split": split,
        "history_action": action,
        "history_place": place,
        "impression_place": place,
        "impression_tags": [rng.integers(0, 3, n).tolist() for n in rng.integers(0, 3, COUNT)],
        "impression_hour": rng.normal(size=COUNT).astype(np.float32),
    }


def write(
    folder: Path, rows: dict[str, np.ndarray], suffix: str = "parquet", label: str | None = "action == buy"
) -> str:
    """Writes the dataset as a cluster would, in parts whose numbers have more digits than the first ones."""
    folder.mkdir()
    rows = dict(rows)
    price = rows.pop("price", np.linspace(-1, 1, ITEMS, dtype=np.float32))
    for name in ("events", "users", "items"):
        (folder / name).mkdir()
    for i, part in enumerate(np.array_split(np.arange(COUNT), 3)):
        columns = {name: [values[row] for row in part] for name, values in rows.items() if isinstance(values, list)}
        columns |= {name: values[part] for name, values in rows.items() if not isinstance(values, list)}
        write_part(folder / f"events/part-{99_998 + i}.{suffix}", columns)
    for part, own in ((9, slice(None, 7)), (10, slice(7, None))):
        write_part(folder / f"users/part-{part}.{suffix}", {"city": np.arange(USERS)[own] % 3})
    genres = [[1 + i % 3] * (i % 3) for i in range(ITEMS)]
    write_part(
        folder / f"items/part-0.{suffix}", {"item_id": np.arange(1, ITEMS + 1), "genres": genres, "price": price}
    )

    values = {"city": ["Oslo", "Rome"], "item_id": [f"i{i:02d}" for i in range(ITEMS)]}
    values |= {"genres": ["a", "b", "c"], "action": ["buy", "view"], "place": ["p", "q", "r"], "tags": ["x", "y"]}
    pairs = [(column, value) for column, known in values.items() for value in known]
    kind = pa.schema([("column", pa.string()), ("value", pa.large_string())])
    table = pa.table([[pair[0] for pair in pairs], [pair[1] for pair in pairs]], schema=kind)
    pa.parquet.write_table(table, folder / "vocabularies.parquet")
    content = {
        "features": features(),
        "dense_names": ["price", "hour"],
        "item_key": "item_id",
        "max_history": 50,
        "edges": {},
        "moments": {"price": [10.0, 2.0], "hour": [12.0, 3.0]},
        "buckets": {},
        "values": {name: len(known) for name, known in values.items()},
        "sha256": hashlib.sha256((folder / "vocabularies.parquet").read_bytes()).hexdigest(),
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    schema = {"format": "jfi data schema 1", "sha256": digest, "content": content}
    (folder / "schema.json").write_text(json.dumps(schema))
    data = {"label": label, "max_history": 50, "user_categorical": ["city"]}
    data |= {"item_categorical": ["genres"], "item_dense": ["price"], "event_categorical": ["action", "place"]}
    data |= {"impression_categorical": ["place", "tags"], "impression_dense": ["hour"]}
    (folder / "manifest.json").write_text(json.dumps({"format": "jfi prepared dataset 1", "data": data}))
    return str(folder)


def write_part(path: Path, columns: dict) -> None:
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=50)
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_dataset_that_pyarrow_wrote_loads(tmp_path, rows, suffix):
    folder = write(tmp_path / "prepared", rows, suffix)
    with pytest.raises(DataError, match=r"files that jfi derives are missing; run examples/prepare_data.py --complete"):
        load_dataset(DataConfig(prepared=folder))
    complete_dataset(folder)
    dataset = load_dataset(DataConfig(prepared=folder))
    for number, split in enumerate(("train", "validation", "test")):
        chosen = np.lexsort((rows["item"], rows["user"], rows["time"]))
        chosen = chosen[rows["split"][chosen] == number]
        batch = next(dataset.batches(split, COUNT))
        assert batch.users.tolist() == rows["user"][chosen].tolist()
        assert batch.labels.tolist() == rows["label"][chosen].tolist()
        sparse = batch.sparse_features
        assert sparse["item_id"].values().tolist() == (rows["item"][chosen] + 1).tolist()
        assert sparse["city"].values().tolist() == (rows["user"][chosen] % 3).tolist()
        assert np.allclose(batch.dense_features[:, 0], np.linspace(-1, 1, ITEMS)[rows["item"][chosen]])
        assert batch.dense_features[:, 1].tolist() == rows["impression_hour"][chosen].tolist()
        assert sparse["place"].values().tolist() == rows["impression_place"][chosen].tolist()
        assert [ids.tolist() for ids in sparse["tags"].to_dense()] == [rows["impression_tags"][row] for row in chosen]
        for row, items, actions, genres in zip(
            chosen,
            sparse["history_item_id"].to_dense(),
            sparse["history_action"].to_dense(),
            sparse["history_genres_1"].to_dense(),
            strict=True,
        ):
            before = np.flatnonzero((rows["user"] == rows["user"][row]) & (rows["time"] < rows["time"][row]))[-50:]
            assert items.tolist() == (rows["item"][before] + 1).tolist()
            assert actions.tolist() == rows["history_action"][before].tolist()
            assert genres.tolist() == [1 + i % 3 if i % 3 == 2 else 0 for i in rows["item"][before].tolist()]


@pytest.mark.parametrize("kind", [bool, np.int8])
def test_only_the_events_that_the_layout_says_are_in_histories(tmp_path, rows, kind):
    chosen = rows["history_action"] == 2
    folder = Path(write(tmp_path / "prepared", rows | {"in_history": chosen.astype(kind)}))
    tree = json.loads((folder / "manifest.json").read_text())
    tree["data"]["history"] = "action == view"
    (folder / "manifest.json").write_text(json.dumps(tree))
    complete_dataset(folder)
    batch = next(load_dataset(DataConfig(prepared=str(folder))).batches("test", COUNT))
    assert set(batch.sparse_features["history_action"].values().tolist()) == {2}
    order = np.lexsort((rows["item"], rows["user"], rows["time"]))
    order = order[rows["split"][order] == 2]
    earlier = [
        int((chosen & (rows["user"] == rows["user"][row]) & (rows["time"] < rows["time"][row])).sum()) for row in order
    ]
    assert batch.sparse_features["history_action"].lengths().tolist() == earlier


def test_it_trains_and_the_run_has_a_summary(tmp_path, rows, capsys):
    folder = write(tmp_path / "prepared", rows)
    complete_dataset(folder)
    config = Config(
        data=DataConfig(prepared=folder),
        model=ModelConfig(embedding_dim=8, num_heads=2, dense_arch=[8], over_arch=[8]),
        training=TrainingConfig(run_dir=str(tmp_path / "run"), epochs=1, batch_size=64, device="cpu"),
    )
    assert train(config).epochs == 1
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["rows"], summary["users"], summary["items"]) == (COUNT, USERS, ITEMS)
    assert summary["samples"]["train"] == (rows["split"] == 0).sum()
    assert summary["label_shares"]["test"] == pytest.approx(rows["label"][rows["split"] == 2].mean())
    assert summary["unseen"]["test"].keys() == {"user", "item"}
    sizes = {"city": 2, "item_id": ITEMS, "genres": 3, "action": 2, "place": 3, "tags": 2}
    assert summary["vocabulary_sizes"] == sizes
    assert "warning: 'timestamp' lies around the year 1970" in capsys.readouterr().out


def test_positives_without_a_label_have_negatives(tmp_path, rows, monkeypatch):
    folder = write(tmp_path / "prepared", rows | {"label": np.ones(COUNT, np.float32)}, label=None)
    monkeypatch.setattr(prepared_complete, "_LARGE", 0)  # the order in time comes from the engine
    complete_dataset(folder)
    dataset = load_dataset(DataConfig(prepared=folder, negatives=1))
    batch = next(dataset.batches("train", 2 * COUNT))
    assert batch.labels.tolist() == [1.0, 0.0] * (len(batch.labels) // 2)
    item, user = batch.sparse_features["item_id"].values().numpy() - 1, batch.users.numpy()
    known = {(u, i): t for u, i, t in zip(*(rows[name][::-1] for name in ("user", "item", "time")), strict=True)}
    times = np.repeat(np.sort(rows["time"][rows["split"] == 0]), 2)
    fresh = [known.get((u, i), np.inf) > t for u, i, t in zip(user[1::2], item[1::2], times[1::2], strict=True)]
    assert all(fresh[: len(fresh) // 2])  # later on a user may know all twelve items


def change(name: str, row: int, value: object) -> Callable[[dict], None]:
    """Sets one value."""
    return lambda rows: rows[name].__setitem__(row, value)


def sort_wrongly(rows: dict) -> None:
    rows["time"][210] = -1.0


def skip_a_user(rows: dict) -> None:
    rows["user"][rows["user"] >= 7] += 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (sort_wrongly, r"row 210 of the events: rows are not sorted by \(user, time, item\)$"),
        (skip_a_user, r"of the events: a user before this one has no event$"),
        (change("item", 399, 12), r"part-100000.parquet: row 399 .*: 'item' is not a row of items$"),
        (change("label", 5, 2), r"row 5 of the events: 'label' is not 0, 1 or missing$"),
        (change("split", 5, 3), r"row 5 of the events: 'split' is not 0, 1 or 2$"),
        (change("history_action", 9, 3), r"'history_action' is 3 in row 9; ids are from 0 to 2$"),
        (
            lambda rows: rows.update(price=np.array([1.0, np.nan] * 6, np.float32)),
            r"'price' is nan in row 1, not finite",
        ),
        (lambda rows: rows.update(price=np.full(12, np.inf)), r"items: 'price' is inf in row 0, not finite"),
        (lambda rows: rows.pop("history_action"), r"no column 'history_action', see docs/prepared-data.md$"),
        (change("impression_place", 300, 4), r"'impression_place' is 4 in row 300; ids are from 0 to 3$"),
        (change("impression_tags", 301, [0, 5]), r"'impression_tags' is 5 in row 301; ids are from 0 to 2$"),
        (change("impression_tags", 301, None), r"'impression_tags' has nulls; a row without values has an empty list"),
        (
            lambda rows: rows.update(impression_tags=rows["impression_place"]),
            r"'impression_tags' has type int64, but the schema has lists of ids$",
        ),
        (
            change("impression_hour", 399, np.inf),
            r"part-100000.parquet: 'impression_hour' is inf in row 399, not finite; a missing value is 0$",
        ),
        (lambda rows: rows.pop("impression_hour"), r"no column 'impression_hour', see docs/prepared-data.md$"),
        (lambda rows: rows.update(time=rows["time"].astype(int)), r"column 'time' has type int64, see docs/prep"),
    ],
)
def test_a_broken_rule_is_named_and_nothing_is_left(tmp_path, rows, spoil, message):
    spoil(rows)
    folder = write(tmp_path / "prepared", rows)
    with pytest.raises(DataError, match=message):
        complete_dataset(folder)
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        *("events", "items", "manifest.json", "schema.json", "users", "vocabularies.parquet")
    ]


def test_a_part_that_is_missing_or_damaged_is_named(tmp_path, rows):
    folder = Path(write(tmp_path / "prepared", rows))
    (folder / "users/part-9.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"users/part-9.parquet: damaged"):
        complete_dataset(folder)
    shutil.rmtree(folder / "users")
    with pytest.raises(DataError, match=r"neither users.arrow nor a folder users with parts"):
        complete_dataset(folder)
