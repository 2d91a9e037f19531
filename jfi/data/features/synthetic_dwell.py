"""A synthetic log with dwell times whose labels depend on the long-dwell events of active users alone.

Users are active or passive. An event has a surface, an item of a category, a dwell time and `converted`.

An active user reads on "feed" and "search": event k of user u, with an item of category c, converts with

    logit P = -3 + 2.5 log(1 + n) + quality[item],

where n is the number of u's earlier events of category c with a long dwell on these two surfaces, among the `horizon`
events before k. Dwell follows interest: it is log-normal around 40 s for an event that converts and around 4 s for one
that does not, so that the log-odds of a conversion are linear in log dwell. "autoplay" needs no click: its dwell is
log-normal around 15 s whatever happens, its events rarely convert and never count.

Of a passive user, who scrolls through "autoplay" and "feed", neither dwell nor history says anything: dwell is
log-normal around 2 s, and logit P = -1.2 + quality[item].

`label` repeats `converted` for the newest `labeled` events of each user, but for those on "autoplay"; all other events
are part of histories only. So the events that matter are known: removing others costs nothing, and every long-dwell
event of an active user counts the same, however old it is.
"""

import numpy as np
import pyarrow as pa

from jfi.data.config import FeatureConfig, SyntheticConfig
from jfi.data.features import synthetic
from jfi.data.features.synthetic import as_tables
from jfi.data.io.table import Table

#: The meaning of the columns; replaces these settings of a DataConfig.
COLUMNS = {
    **synthetic.COLUMNS,
    "label": "label",
    "features": [
        FeatureConfig("category", "item"),
        FeatureConfig("surface", "event"),
        FeatureConfig("dwell", "event", "number"),
    ],
    "title": None,
    "dwell": "dwell",
    "dwell_unit": "s",
    "surface": "surface",
    "session": "session",
    "conversion": "converted",
}

SURFACES = ("feed", "search", "autoplay")
#: Events with a longer dwell on `feed` or `search` count, seconds: halfway between both medians in log dwell.
LONG = 12.6

_DAY, _DAYS, _START = 86400.0, 60, 1_700_000_000.0
_SPREAD, _DEVIATION, _QUALITY = 0.3, 0.7, 0.3
_BASE, _GAIN, _PASSIVE_BASE, _AUTOPLAY_BASE = -3.0, 2.5, -1.2, -3.5
# Medians of dwell in seconds: not converted and converted of an active user; on autoplay; of a passive user.
_SHORT_DWELL, _LONG_DWELL, _AUTOPLAY_DWELL, _PASSIVE_DWELL = 4.0, 40.0, 15.0, 2.0
# By type of user (passive, active): the shares of the surfaces, and the mean number of events of a session.
_SURFACE_SHARES = ((0.4, 0.0, 0.6), (0.45, 0.2, 0.35))
_SESSION_EVENTS = (12.0, 8.0)
# By type of user the mean number of events, as a multiple of `mean_length`.
_LENGTHS = (0.85, 1.15)


def make_tables(config: SyntheticConfig) -> tuple[Table, Table]:
    """The tables of interactions and of items.

    The interactions have the columns user, item, timestamp, surface, dwell (seconds), session, converted, label, and
    `active` and `counted`, the truth: whether the user is active, and n.
    """
    rng = np.random.default_rng(config.seed)
    category = np.arange(config.num_items) % config.num_categories
    popularity = 1.0 / np.sqrt(np.arange(1, config.num_items + 1))
    quality = rng.normal(0.0, _QUALITY, config.num_items)

    active = rng.random(config.num_users) < 0.5
    # exp(normal(-s^2 / 2, s)) has mean 1.
    lengths = config.mean_length * rng.lognormal(-(_SPREAD**2) / 2, _SPREAD, config.num_users)
    lengths *= np.array(_LENGTHS)[active.astype(np.int64)]
    lengths = np.maximum(1, np.rint(lengths)).astype(np.int64)
    user = np.repeat(np.arange(config.num_users), lengths)
    first = np.append(0, np.cumsum(lengths)[:-1])
    item = rng.choice(config.num_items, len(user), p=popularity / popularity.sum())
    surface = _draw_surfaces(rng, active[user])
    noise, uniform = rng.normal(0.0, _DEVIATION, len(user)), rng.random(len(user))

    is_autoplay, of_active = surface == SURFACES.index("autoplay"), active[user]
    dwell, converted, counted = np.zeros(len(user)), np.zeros(len(user), bool), np.zeros(len(user), np.int64)
    count = np.zeros((config.num_users, config.num_categories), np.int64)
    is_long = np.zeros(len(user), bool)
    for k in range(lengths.max()):
        owner = np.flatnonzero(lengths > k)
        row = first[owner] + k
        if k > config.horizon:
            old = row - config.horizon - 1
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
    newest = np.repeat(lengths, lengths) - (np.arange(len(user)) - first[user]) <= config.labeled
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
    items = pa.table({"item": np.arange(config.num_items), "category": category})
    return as_tables(interactions, items)


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
