"""A synthetic table whose labels depend on the target and the history together.

Every user likes or dislikes each category independently, with probability 1/2. The rating that user u gives an item of
category c is cut from

    taste * (like[u, c] ? 1 : -1) + quality[item] + bias[u] + logistic noise,

and the label is rating >= 4. An event has both a category and a rating. The ratings of the events *in the target's
category* reveal like[u, c], and attention can select them. Pooling that ignores the target only leaves the number of
events by category and by rating, which say nothing about like[u, c] beyond the small bias[u].
"""

import numpy as np
import pyarrow as pa

from jfi.data.config import FeatureConfig, SyntheticConfig
from jfi.data.io.table import Table

# The meaning of the columns; replaces these settings of a DataConfig.
COLUMNS = {
    "user": "user",
    "item": "item",
    "timestamp": "timestamp",
    "timestamp_unit": "s",
    "label": "rating >= 4",
    "features": [FeatureConfig("category", "item"), FeatureConfig("rating", "event")],
    "title": "title",
    "request_id": None,
    "history": None,
    "dwell": None,
    "surface": None,
    "session": None,
    "conversion": None,
}

_DAY = 86400.0
_SPREAD = 0.8
_QUALITY, _BIAS = 1.0, 0.3
_CUTS = (-3.0, -1.5, 0.0, 1.5)


def make_tables(config: SyntheticConfig) -> tuple[Table, Table]:
    """The tables of interactions and of items."""
    rng = np.random.default_rng(config.seed)
    category = np.arange(config.num_items) % config.num_categories
    popularity = 1.0 / np.arange(1, config.num_items + 1)
    quality = rng.normal(0.0, _QUALITY, config.num_items)
    bias = rng.normal(0.0, _BIAS, config.num_users)
    likes = rng.integers(0, 2, (config.num_users, config.num_categories))

    # exp(normal(m, s)) has mean exp(m + s^2 / 2).
    lengths = rng.lognormal(np.log(config.mean_length) - _SPREAD**2 / 2, _SPREAD, config.num_users)
    lengths = np.maximum(1, np.rint(lengths)).astype(np.int64)
    user = np.repeat(np.arange(config.num_users), lengths)
    item = rng.choice(config.num_items, len(user), p=popularity / popularity.sum())
    start = rng.uniform(0.0, 365 * _DAY, config.num_users)
    time = np.rint(start[user] + rng.uniform(0.0, 60 * _DAY, len(user)))

    sign = 2.0 * likes[user, category[item]] - 1.0
    score = config.taste * sign + quality[item] + bias[user] + rng.logistic(size=len(user))
    rating = 1 + np.searchsorted(_CUTS, score)

    interactions = pa.table({"user": user, "item": item, "timestamp": time, "rating": rating})
    items = pa.table(
        {
            "item": np.arange(config.num_items),
            "category": category,
            "title": [f"item {i} of category {c}" for i, c in enumerate(category)],
        }
    )
    return as_tables(interactions, items)


def as_tables(interactions: pa.Table, items: pa.Table) -> tuple[Table, Table]:
    """Gives generated tables their names."""
    named = {"synthetic interactions": interactions, "synthetic items": items}
    return tuple(Table(name, data, data.column_names, lambda row: row + 1) for name, data in named.items())
