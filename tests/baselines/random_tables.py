"""Small tables for the baselines, with ties, unlabeled rows, an item table and a given split."""

import random
from pathlib import Path

from data_configs import data_config

from jfi.data import DataSchema, InteractionDataset, load_dataset

USERS, ITEMS = 4, 6
GENRES = ["drama|war", "drama", "", "war|comedy|drama", "comedy", "war"]
LABELED = {"label": "rating >= 4"}
IMPLICIT = {"label": None, "negatives": 2}
CLICKS = {"history": "action == click"}
#: user, item, time, rating, action, device, split
Row = tuple[int, int, int, str, str, str, str]


def random_row(rng: random.Random, time: int) -> Row:
    rating = rng.choice(["1", "2", "4", "5", ""])
    action, device = rng.choice(["click", "view"]), rng.choice(["phone", "tv"])
    split = "train" if time < 8 else rng.choice(["validation", "test"])
    return rng.randrange(USERS), rng.randrange(ITEMS), time, rating, action, device, split


def first_rows() -> list[Row]:
    """Rows at time 0 that give every split both labels, and training all items and values."""
    rows = [(u, i, 0, "5", "click", "tv", "train") for i, u in enumerate([0, 1, 2, 3, 0, 1])]
    rows += [(USERS, 0, 0, rating, "click", "phone", split) for rating, split in (("1", "train"), ("5", "train"))]
    for split in ("validation", "test"):
        rows += [(USERS, 0, 0, rating, "view", "tv", split) for rating in ("1", "5")]
    return rows


def load(folder: Path, rows: list[Row], settings: dict, schema: DataSchema | None = None) -> InteractionDataset:
    lines = ["user_id,item_id,timestamp,rating,action,device,split", *(",".join(map(str, row)) for row in rows)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    items = [f"{i},{genres},{i * 0.5}" for i, genres in enumerate(GENRES)]
    (folder / "items.csv").write_text("\n".join(["item_id,genres,price", *items]) + "\n")
    config = data_config(
        interactions=str(folder / "rows.csv"),
        items=str(folder / "items.csv"),
        item_categorical=["genres"],
        item_dense=["price"],
        separators={"genres": "|"},
        user_categorical=["user_id"],
        context_categorical=["device"],
        split="column",
        split_column="split",
        max_history=5,
        **settings,
    )
    return load_dataset(config, schema)
