"""Writes the synthetic tables of configs/ as Parquet, `interactions.parquet` and `items.parquet` in `data/NAME`.

python examples/synthetic_tables.py quickstart
python examples/synthetic_tables.py dwell --num_users 300 --seed 1 --out data/small

`taste` and `dwell` make the two kinds of tables; equal arguments make equal rows. In both, item k of `num_items` is of
category k modulo `num_categories`, and the number of events of a user is random, with the mean `mean_length`.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Tables = tuple[pa.Table, pa.Table]
_DAY, _START = 86400.0, 1_700_000_000.0

_TASTE_SPREAD = 0.8
_TASTE_QUALITY, _BIAS = 1.0, 0.3
_CUTS = (-3.0, -1.5, 0.0, 1.5)

SURFACES = ("feed", "search", "autoplay")
#: Seconds; events with a longer dwell on `feed` or `search` count. It is halfway between both medians in log dwell.
LONG = 12.6

_DAYS = 60
_SPREAD, _DEVIATION, _QUALITY = 0.3, 0.7, 0.3
_BASE, _GAIN, _PASSIVE_BASE, _AUTOPLAY_BASE = -3.0, 2.5, -1.2, -3.5
# Medians of dwell in seconds: not converted and converted of an active user; on autoplay; of a passive user.
_SHORT_DWELL, _LONG_DWELL, _AUTOPLAY_DWELL, _PASSIVE_DWELL = 4.0, 40.0, 15.0, 2.0
# By type of user (passive, active): the shares of the surfaces, and the mean number of events of a session.
_SURFACE_SHARES = ((0.4, 0.0, 0.6), (0.45, 0.2, 0.35))
_SESSION_EVENTS = (12.0, 8.0)
# By type of user the mean number of events, as a multiple of `mean_length`.
_LENGTHS = (0.85, 1.15)


def taste(
    num_users: int = 1000,
    num_items: int = 500,
    num_categories: int = 10,
    mean_length: float = 60.0,
    taste: float = 2.5,
    seed: int = 0,
) -> Tables:
    """Makes interactions and items whose labels depend on the target and the history together.

    Every user likes or dislikes each category independently, with probability 1/2. The rating that user u gives an item
    of category c is cut from

        taste * (like[u, c] ? 1 : -1) + quality[item] + bias[user] + logistic noise,

    and the label is rating >= 4. An event has both a category and a rating. The ratings of the events *in the target's
    category* reveal like[u, c], and attention can select them. Pooling that ignores the target only leaves the number
    of events by category and by rating, which say nothing about like[u, c] beyond the small bias[u]. Items are drawn by
    Zipf's law.
    """
    rng = np.random.default_rng(seed)
    category = np.arange(num_items) % num_categories
    popularity = 1.0 / np.arange(1, num_items + 1)
    quality = rng.normal(0.0, _TASTE_QUALITY, num_items)
    bias = rng.normal(0.0, _BIAS, num_users)
    likes = rng.integers(0, 2, (num_users, num_categories))

    # exp(normal(m, s)) has mean exp(m + s^2 / 2).
    lengths = rng.lognormal(np.log(mean_length) - _TASTE_SPREAD**2 / 2, _TASTE_SPREAD, num_users)
    lengths = np.maximum(1, np.rint(lengths)).astype(np.int64)
    user = np.repeat(np.arange(num_users), lengths)
    item = rng.choice(num_items, len(user), p=popularity / popularity.sum())
    start = rng.uniform(0.0, 365 * _DAY, num_users)
    time = _START + np.rint(start[user] + rng.uniform(0.0, 60 * _DAY, len(user)))

    sign = 2.0 * likes[user, category[item]] - 1.0
    score = taste * sign + quality[item] + bias[user] + rng.logistic(size=len(user))
    rating = 1 + np.searchsorted(_CUTS, score)
    titles = [f"item {i} of category {c}" for i, c in enumerate(category)]
    interactions = pa.table({"user": user, "item": item, "timestamp": time, "rating": rating})
    return interactions, pa.table({"item": np.arange(num_items), "category": category, "title": titles})


def dwell(
    num_users: int = 1000,
    num_items: int = 500,
    num_categories: int = 10,
    mean_length: float = 60.0,
    horizon: int = 1000,
    labeled: int = 16,
    seed: int = 0,
) -> Tables:
    """Makes a log with dwell times whose labels depend on the long-dwell events of active users alone, and its items.

    Users are active or passive. An event has a surface, an item of a category, a dwell time and `converted`.

    An active user reads on "feed" and "search": event k of user u, with an item of category c, converts with

        logit P = -3 + 2.5 log(1 + n) + quality[item],

    where n is the number of u's earlier events of category c with a long dwell on these two surfaces, among the
    `horizon` events before k. Dwell follows interest: it is log-normal around 40 s for an event that converts and
    around 4 s for one that does not, so that the log-odds of a conversion are linear in log dwell. "autoplay" needs no
    click: its dwell is log-normal around 15 s whatever happens, its events rarely convert and never count.

    Of a passive user, who scrolls through "autoplay" and "feed", neither dwell nor history says anything: dwell is
    log-normal around 2 s, and logit P = -1.2 + quality[item].

    `label` repeats `converted` for the newest `labeled` events of each user, but for those on "autoplay"; all other
    events are part of histories only. So the events that matter are known: removing others costs nothing, and every
    long-dwell event of an active user counts the same, however old it is.

    The interactions have the columns user, item, timestamp, surface, dwell (seconds), session, converted, label, and
    `active` and `counted`, the truth: whether the user is active, and n.
    """
    rng = np.random.default_rng(seed)
    category = np.arange(num_items) % num_categories
    popularity = 1.0 / np.sqrt(np.arange(1, num_items + 1))
    quality = rng.normal(0.0, _QUALITY, num_items)

    active = rng.random(num_users) < 0.5
    # exp(normal(-s^2 / 2, s)) has mean 1.
    lengths = mean_length * rng.lognormal(-(_SPREAD**2) / 2, _SPREAD, num_users)
    lengths *= np.array(_LENGTHS)[active.astype(np.int64)]
    lengths = np.maximum(1, np.rint(lengths)).astype(np.int64)
    user = np.repeat(np.arange(num_users), lengths)
    first = np.append(0, np.cumsum(lengths)[:-1])
    item = rng.choice(num_items, len(user), p=popularity / popularity.sum())
    surface = _draw_surfaces(rng, active[user])
    noise, uniform = rng.normal(0.0, _DEVIATION, len(user)), rng.random(len(user))

    is_autoplay, of_active = surface == SURFACES.index("autoplay"), active[user]
    dwell, converted, counted = np.zeros(len(user)), np.zeros(len(user), bool), np.zeros(len(user), np.int64)
    count = np.zeros((num_users, num_categories), np.int64)
    is_long = np.zeros(len(user), bool)
    for k in range(lengths.max()):
        owner = np.flatnonzero(lengths > k)
        row = first[owner] + k
        if k > horizon:
            old = row - horizon - 1
            np.subtract.at(count, (owner, category[item[old]]), is_long[old])
        counted[row] = count[owner, category[item[row]]]
        interest = np.where(of_active[row], _BASE + _GAIN * np.log1p(counted[row]), _PASSIVE_BASE)
        interest = np.where(is_autoplay[row], _AUTOPLAY_BASE, interest)
        converted[row] = uniform[row] < 1 / (1 + np.exp(-interest - quality[item[row]]))
        median = np.where(converted[row], _LONG_DWELL, _SHORT_DWELL)
        median = np.where(is_autoplay[row], _AUTOPLAY_DWELL, median)
        median = np.where(of_active[row], median, _PASSIVE_DWELL)
        dwell[row] = median * np.exp(noise[row])
        is_long[row] = of_active[row] & ~is_autoplay[row] & (dwell[row] > LONG)
        count[owner, category[item[row]]] += is_long[row]

    time, session = _draw_times(rng, lengths, active, dwell)
    newest = np.repeat(lengths, lengths) - (np.arange(len(user)) - first[user]) <= labeled
    newest &= ~is_autoplay
    interactions = pa.table(
        {
            "user": user,
            "item": item,
            "timestamp": time,
            "surface": pa.array(np.array(SURFACES)[surface]),
            "dwell": np.round(dwell, 2),
            "session": session,
            "converted": converted.astype(np.int64),
            "label": pa.array(converted.astype(np.int64), mask=~newest),
            "active": of_active.astype(np.int64),
            "counted": np.where(of_active & ~is_autoplay, counted, 0),
        }
    )
    items = pa.table({"item": np.arange(num_items), "category": category})
    return interactions, items


def _draw_surfaces(rng: np.random.Generator, active: np.ndarray) -> np.ndarray:
    """`[E]` the surface of each event, by the type of its user."""
    bounds = np.cumsum(_SURFACE_SHARES, axis=1)[active.astype(np.int64)]
    return (rng.random(len(active))[:, None] >= bounds[:, :-1]).sum(axis=1)


def _draw_times(
    rng: np.random.Generator, lengths: np.ndarray, active: np.ndarray, dwell: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`[E]` each, the time of an event in seconds and the number of its session.

    An event begins a few seconds after the one before it was left. A user's pauses between sessions, those before the
    first and after the last included, fill 60 days; each is an hour at least.
    """
    first = np.append(0, np.cumsum(lengths)[:-1])
    user = np.repeat(np.arange(len(lengths)), lengths)
    begins = rng.random(len(user)) < 1 / np.array(_SESSION_EVENTS)[active[user].astype(np.int64)]
    begins[first] = True
    session = np.cumsum(begins) - 1
    share = np.where(begins, rng.exponential(1.0, len(user)), 0.0)
    shares = np.bincount(user, weights=share) + rng.exponential(1.0, len(lengths))
    pause = 3600.0 + share / shares[user] * _DAYS * _DAY
    gap = np.append(0.0, dwell[:-1]) + rng.exponential(3.0, len(user)) + 1.0
    elapsed = np.cumsum(np.where(begins, pause, gap))
    before = np.append(0.0, elapsed)[first]
    # In milliseconds: the difference of large sums would leave digits that say nothing.
    return _START + np.rint((elapsed - before[user]) * 1000) / 1000, session


#: By config what makes its tables.
MAKERS: dict[str, Callable[..., Tables]] = {
    "quickstart": partial(taste, num_users=1500),
    "encoder": partial(taste, num_users=500),
    "multi_gpu": partial(taste, num_users=20_000, num_items=20_000),
    "dwell": partial(dwell, num_users=3000, num_items=100, num_categories=14, mean_length=160, labeled=40),
}


def write(folder: Path, tables: Tables) -> None:
    """Writes interactions and items into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in zip(("interactions", "items"), tables, strict=True):
        pq.write_table(table, folder / f"{name}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the synthetic tables of a config.")
    parser.add_argument("name", choices=MAKERS, help="the config")
    parser.add_argument("--out", type=Path, help="folder of the tables (default: data/NAME)")
    for name in ("num_users", "num_items", "num_categories", "mean_length", "seed"):
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS, help="in place of the config's")
    options = vars(parser.parse_args())
    name, out = options.pop("name"), options.pop("out")
    folder = out or Path("data", name)
    write(folder, MAKERS[name](**options))
    print(f"wrote {folder}/interactions.parquet and items.parquet")


if __name__ == "__main__":
    main()
