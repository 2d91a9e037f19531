"""Tables for the suite `timeline`: MovieLens-100K or a table of its size, and long timelines with few labelled rows."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from jfi.data import DataConfig, FeatureConfig
from jfi.training import Config
from jfi.training.config_parser import parse_config

MOVIELENS = Path(__file__).parents[1] / "configs/movielens_100k.yaml"
CLASSES, MOST_CLASSES = 19, 6
#: Seconds: of a user's first event the latest, and of the gaps between events the mean.
FIRST_EVENT, MEAN_GAP = 3e7, 3600


@dataclass(frozen=True)
class SyntheticTable:
    """Users with events of random items; ratings are a function of the item and of chance.

    Args:
        users, items: how many.
        mean_length: mean events of a user.
        labelled: rows of a user that have a label, spread evenly over the timeline; None for all.
        sigma: of the log-normal numbers of events; 0 gives every user `mean_length`.
    """

    users: int
    items: int
    mean_length: int
    labelled: int | None = None
    sigma: float = 0.0

    @property
    def name(self) -> str:
        events = f"{self.mean_length:,} events" + (" on average" if self.sigma else "")
        labelled = "all" if self.labelled is None else f"{self.labelled:,}"
        return f"{self.users:,} users, {events}, {labelled} labelled, {self.items:,} items"

    def interactions(self) -> pa.Table:
        """Columns user_id, item_id, timestamp, and rating, which is null in rows without a label."""
        rng = np.random.default_rng(0)
        spread = np.exp(self.sigma * rng.standard_normal(self.users))
        lengths = np.maximum(1, np.rint(self.mean_length * spread / spread.mean())).astype(np.int64)
        user = np.repeat(np.arange(self.users), lengths)
        first = np.cumsum(lengths) - lengths
        place = np.arange(len(user)) - first[user]
        item = rng.integers(0, self.items, len(user))
        clock = np.cumsum(1 + rng.exponential(MEAN_GAP, len(user)).astype(np.int64))
        timestamp = rng.integers(0, int(FIRST_EVENT), self.users)[user] + clock - clock[first][user]
        rating = 1 + (item % 3 + rng.integers(0, 3, len(user)))
        unlabelled = np.zeros(len(user), bool)
        if self.labelled is not None:
            length = lengths[user]
            unlabelled = place * self.labelled // length == (place - 1) * self.labelled // length
        columns = {"user_id": user, "item_id": item, "timestamp": timestamp}
        return pa.table(columns | {"rating": pa.array(rating, mask=unlabelled)})

    def item_table(self) -> pa.Table:
        """Columns item_id and class, of one to MOST_CLASSES names."""
        rng = np.random.default_rng(1)
        counts = rng.integers(1, MOST_CLASSES + 1, self.items)
        classes = [" ".join(f"c{c}" for c in rng.choice(CLASSES, count, replace=False)) for count in counts]
        return pa.table({"item_id": np.arange(self.items), "class": classes})


#: MovieLens-100K has 943 users, 1,682 items and 100,000 ratings, 20 to 737 a user.
MOVIELENS_SIZE = SyntheticTable(943, 1682, 106, sigma=0.9)
GPU_TABLE = SyntheticTable(4096, 100_000, 2000, labelled=200)


def write_table(table: SyntheticTable, folder: Path) -> DataConfig:
    """Its interactions as a file; all labelled rows of a user but the last two train."""
    path = folder / "interactions.parquet"
    pa.parquet.write_table(table.interactions(), path)
    return DataConfig(interactions=str(path), label="rating >= 4", split="leave_one_out", statistics=[])


def movielens_config(folder: Path, movielens: Path | None, table: SyntheticTable = MOVIELENS_SIZE) -> Config:
    """configs/movielens_100k.yaml with the files in the folder `movielens`, or a synthetic table in their place.

    It has no statistics.
    """
    config, _ = parse_config(["--config", str(MOVIELENS), "--data.statistics=[]"])
    if movielens is not None:
        files = {"interactions": str(movielens / "ml-100k.inter"), "items": str(movielens / "ml-100k.item")}
        return replace(config, data=replace(config.data, **files))
    files = {"interactions": str(folder / "interactions.parquet"), "items": str(folder / "items.parquet")}
    pa.parquet.write_table(table.interactions(), files["interactions"])
    pa.parquet.write_table(table.item_table(), files["items"])
    features = [FeatureConfig("class", "item", separator=" "), FeatureConfig("rating", "event")]
    return replace(config, data=replace(config.data, **files, title=None, features=features))
