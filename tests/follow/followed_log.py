"""A log with every kind of column, in parts, and the run that the parts follow."""

import dataclasses
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jfi.data import DataConfig, FeatureConfig
from jfi.state.stores import LmdbStore
from jfi.training import Config, ModelConfig, OptimizerConfig, OptimizerGroup, TrainingConfig

START, ITEMS, USERS = 1_600_000_000, 40, 30
#: Rows that the run of the fixture `run` was trained on; others are for parts.
KNOWN = 300
#: Seconds of a visit.
VISIT = 4000
KINDS = pa.schema(
    [
        ("user_id", pa.string()),
        ("item_id", pa.int64()),
        ("timestamp", pa.float64()),
        ("rating", pa.int64()),
        ("price", pa.float32()),
        ("tags", pa.list_(pa.string())),
        ("brand", pa.string()),
        ("age", pa.string()),
        ("device", pa.string()),
        ("position", pa.int32()),
        ("weight", pa.float64()),
        ("visit", pa.string()),
    ]
)
FEATURES = [
    FeatureConfig("tags", "item"),
    FeatureConfig("brand", "item", hash_buckets=7),
    FeatureConfig("rating", "event"),
    FeatureConfig("price", "event", "number"),
    FeatureConfig("device", "event"),
    FeatureConfig("brand_device", "event", cross=["brand", "device"]),
    FeatureConfig("age", "user"),
    FeatureConfig("device", "context"),
    FeatureConfig("position", "context", "number"),
]
#: In the place of the first two, and of ids.
GROWING = [
    FeatureConfig("tags", "item", capacity=8),
    FeatureConfig("brand", "item", capacity=8),
    FeatureConfig("item_id", "item", capacity=90),
    FeatureConfig("user_id", "user", capacity=40, min_count=2),
]


def make_rows(count: int, seed: int = 0, items: int = ITEMS) -> list[dict]:
    """Rows in the order of time, no two of the same user, item and time; later ones have items that are new."""
    rng = np.random.default_rng(seed)
    tags = [[f"t{tag}" for tag in rng.choice(6, rng.integers(0, 4), replace=False)] for _ in range(items)]
    time = np.sort(rng.integers(0, 6 * count, count)) * 10.0 + START
    rows = {}
    for number, one in enumerate(time.tolist()):
        item = int(rng.integers(0, max(4, items * (number + 1) // count)))
        user = int(rng.integers(0, USERS))
        rows[user, item, one] = {
            "user_id": f"u{user}",
            "item_id": item,
            "timestamp": one,
            "rating": int(rng.integers(1, 6)),
            "price": float(rng.random()) if rng.random() < 0.9 else None,
            "tags": tags[item],
            "brand": f"b{item % 5}",
            "age": f"a{user % 4}",
            "device": rng.choice(["phone", "tablet", None]),
            "position": int(rng.integers(0, 9)),
            "weight": float(rng.integers(1, 4)),
            "visit": f"v{(one - START) // VISIT}" if rng.random() < 0.8 else None,
        }
    return sorted(rows.values(), key=lambda row: (row["timestamp"], row["user_id"], row["item_id"]))


def write(path: Path, rows: list[dict], kinds: pa.Schema = KINDS) -> None:
    """Writes rows under the name of a file that is not read, which is then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    pq.write_table(pa.Table.from_pylist(rows, kinds), unfinished)
    unfinished.rename(path)


def write_parts(folder: Path, rows: list[dict], count: int) -> list[list[dict]]:
    """Writes rows as parts of about equal size; returns the rows of each."""
    parts = [[rows[row] for row in part] for part in np.array_split(np.arange(len(rows)), count)]
    for number, part in enumerate(parts):
        write(folder / f"part-{number:04d}.parquet", part)
    return parts


def config_of(table: Path, run: Path, **data: object) -> Config:
    """A small model of every kind of column, without dropout."""
    base = DataConfig(
        interactions=str(table),
        label="rating >= 4",
        features=FEATURES,
        statistics=[],
        max_history=12,
        max_slots=2,
    )
    model = ModelConfig(embedding_dim=4, num_heads=1, dense_arch=[4], over_arch=[8], cross_layers=0, dropout=0.1)
    training = TrainingConfig(run_dir=str(run), epochs=1, batch_size=32, device="cpu", patience=None)
    return Config(
        data=dataclasses.replace(base, **data),
        model=model,
        optimizer=OptimizerConfig(dense=OptimizerGroup(), ema_decay=0.9),
        training=training,
    )


def lines(run: Path) -> list[dict]:
    """The lines of the parts."""
    found = [json.loads(line) for line in (run / "follow" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "part" in line]


def content(run: Path) -> dict[str, bytes]:
    """The bytes of the last checkpoint and of the state."""
    (checkpoint,) = (run / "checkpoints").iterdir()
    found = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    with closing(LmdbStore(run / "follow" / "state")) as store:
        return found | {repr(key): value for key, value in store.scan(b"") if key != b"m"}  # but for its random id
