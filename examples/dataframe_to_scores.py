"""From a DataFrame of clicks to the scores of the next minute's candidates, in Python.

python examples/dataframe_to_scores.py

The clicks are drawn at random: each user likes two of eight categories, so that a history says what comes next.
"""

import numpy as np
import pandas as pd

import jfi
from jfi.data import DataConfig, FeatureConfig
from jfi.training import Config, ModelConfig, TrainingConfig, train

rng = np.random.default_rng(0)
users, items, rows = 1000, 200, 30_000
category = rng.integers(0, 8, items)
likes = rng.random((users, 8)) < 0.25
user, item = rng.integers(0, users, rows), rng.integers(0, items, rows)
clicked = rng.random(rows) < np.where(likes[user, category[item]], 0.7, 0.2)
time = pd.date_range("2026-01-01", periods=rows, freq="min", tz="UTC")
log = pd.DataFrame({"user": user, "item": item, "time": time, "clicked": clicked.astype(int)})
catalogue = pd.DataFrame({"item": np.arange(items), "category": [f"category {c}" for c in category]})

data = DataConfig(
    interactions=log,
    items=catalogue,
    user="user",
    item="item",
    timestamp="time",
    label="clicked",
    features=[FeatureConfig("category", of="item"), FeatureConfig("clicked", of="event")],
)
config = Config(data=data, model=ModelConfig(embedding_dim=16), training=TrainingConfig(epochs=3))
result = train(config)

run = jfi.load_run(result.run_dir)
next_minute = pd.DataFrame(
    {"user": np.repeat([0, 1], items), "item": np.tile(np.arange(items), 2), "time": time[-1] + time.freq}
)
scores = run.predict(next_minute, history=log, items=catalogue)
best = scores.sort_values("probability", ascending=False).groupby("user").head(3)
print(best.merge(catalogue, on="item").sort_values(["user", "probability"], ascending=[True, False]))
