"""A generated shop's log of impressions: the labels are drawn from a known logit, whose AUC no model can exceed.

Users open sessions, which show pages of up to `PAGE` items. A click (`clicked` of the impression) is followed by rows
of its own, without a label: a view with its dwell time, perhaps a cart, perhaps a purchase. Each is later than its
page and older than the next one, so that no impression shows what became of it. The logit of a click has

- the item: its quality, a wave of popularity while it is on sale, and the hours of the day that suit its category;
- the user: activity, a level of prices, tastes for categories that drift from session to session;
- the session: one category that it is about;
- the user's past with the item: seen without a click, viewed, in the cart, bought. Bought goods are shown again: who
  has bought a durable good passes it by, who has bought a consumable one returns;
- the position on the page.

What a page shows depends on popularity, the user's tastes and the items that they met before.

The table `shop` is the same with fewer users and another logit. There a taste shows in how long the user has looked at
the category's items, and the session in what it was about so far, whether something went into the cart, and whether the
user clicks more than usual: what one would write features of by hand, as `practitioner.py` does.
"""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from jfi.training.metrics.label_metrics import auc

USERS, ITEMS, CATEGORIES, BRANDS, DAYS, PAGE, SEED = 2_000, 2_000, 24, 60, 90, 6, 0
#: Midnight of 1 January 2024, in UTC.
START, DAY = 1_704_067_200, 86_400
ACTIONS = ("impression", "view", "cart", "purchase")
#: Users of the table `shop`.
SHOP_USERS = 500
#: Share of the newest impressions that are test rows in configs/quality, and the AUC of the true logits.
TEST, CEILING, SHOP_CEILING = 0.1, 0.7978, 0.8525


def files(users: int = USERS, seed: int = SEED, by_hand: bool = False) -> dict[str, bytes]:
    """Contents of interactions.parquet and items.parquet, which are a function of the arguments; prints the ceiling."""
    items, log, logits = simulate(users, seed, by_hand)
    shown = np.count_nonzero(log["action"] == ACTIONS[0])
    print(f"{shown} impressions; the true logit has a test AUC of {ceiling(log, logits):.4f}", flush=True)
    return {"interactions.parquet": _parquet(log), "items.parquet": _parquet(items)}


def ceiling(log: dict[str, np.ndarray], logits: np.ndarray) -> float:
    """AUC of the true logits on the test rows."""
    shown = np.flatnonzero(log["action"] == ACTIONS[0])
    test = shown[np.argsort(log["timestamp"][shown], kind="stable")][-int(TEST * len(shown)) :]
    return auc(torch.from_numpy(logits[test]), torch.from_numpy(log["clicked"][test]))


class Shop:
    """Items, sorted by category, with their popularity at any time, and what pages show on a day.

    Args:
        draw: generator of all random numbers.
    """

    def __init__(self, draw: np.random.Generator) -> None:
        self.category = np.sort(draw.integers(0, CATEGORIES, ITEMS))
        self.price, self.quality = draw.standard_normal(ITEMS), 0.55 * draw.standard_normal(ITEMS)
        first = np.where(draw.random(ITEMS) < 0.5, -1.0, draw.uniform(0, DAYS - 10, ITEMS))
        last = np.where(draw.random(ITEMS) < 0.6, DAYS + 1.0, first + draw.uniform(15, 60, ITEMS))
        self.peak, self.width = np.maximum(first, 0) + draw.uniform(0, 30, ITEMS), draw.uniform(3, 10, ITEMS)
        self.height, self.phase = draw.exponential(0.6, ITEMS), draw.uniform(0, 24, CATEGORIES)
        self.brand = (self.category + draw.integers(0, 8, ITEMS) * 7) % BRANDS
        day = np.arange(DAYS + 1)[:, None]
        self.on_sale = (first <= day) & (day <= last)
        weight = np.exp(2 * self.quality + 1.5 * self.wave(np.arange(ITEMS), day)) * self.on_sale + 1e-9
        shares = np.cumsum(weight, 1) / weight.sum(1, keepdims=True)
        #: Cumulative shares of the items that pages show, of all days one after the other, each with its number added.
        self.flat, self.shares = (shares + day).ravel(), np.pad(shares, ((0, 0), (1, 0)))
        self.bounds = np.searchsorted(self.category, np.arange(CATEGORIES + 1))

    def wave(self, item: np.ndarray, day: np.ndarray) -> np.ndarray:
        """The passing part of an item's popularity."""
        return self.height[item] * np.exp(-(((day - self.peak[item]) / self.width[item]) ** 2) / 2)

    def pick(self, draw: np.random.Generator, day: np.ndarray, category: np.ndarray) -> np.ndarray:
        """Items of the categories, -1 for any, by the popularity of the day."""
        low = np.where(category < 0, 0, self.shares[day, self.bounds[category]])
        high = np.where(category < 0, 1, self.shares[day, self.bounds[np.maximum(category, 0) + 1]])
        point = low + draw.random(category.shape) * (high - low)
        return np.clip(np.searchsorted(self.flat, day + point) - day * ITEMS, 0, ITEMS - 1)


class Behavior:
    """What the users have done so far, of which the logit of the table `shop` consists."""

    def __init__(self, users: int) -> None:
        #: By user and category the views, the sum of their interest, and the views of the session.
        self.views, self.interest, self.in_session = np.zeros((3, users, CATEGORIES))
        #: By user the carts of the session, and how much of what was shown is clicked: lately, and for long.
        self.carts, self.lately, self.usually = np.zeros(users), np.full(users, 0.15), np.full(users, 0.15)

    def begin_session(self, who: np.ndarray) -> None:
        self.in_session[who], self.carts[who] = 0, 0

    def logit(self, user: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Of users `[n, 1]` and categories `[n, P]`."""
        session = self.in_session[user].sum(-1)
        found = 1.8 * self.interest[user, of] / (self.views[user, of] + 2)
        found += 1.6 * self.in_session[user, of] / (session + 1) - 0.9 * np.minimum(self.carts[user], 2)
        return found + 2.5 * (self.lately - self.usually)[user]

    def add(self, who: np.ndarray, of: np.ndarray, page: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        """Adds a page of users `[n]`, whose categories, clicks, carts and logarithms of dwells are `[n, P]`."""
        clicked, cart, interest = page
        at = np.broadcast_to(who[:, None], of.shape), of
        for total, one in ((self.views, clicked), (self.in_session, clicked), (self.interest, clicked * interest)):
            np.add.at(total, at, one)
        self.carts[who] += cart.sum(1)
        for rate, share in ((self.lately, 0.4), (self.usually, 0.04)):
            rate[who] += share * (clicked.mean(1) - rate[who])


def simulate(
    users: int, seed: int, by_hand: bool = False
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """Returns the columns of items, those of the log by time, and the true logit of each row (NaN but of impressions).

    All users take their next page in the same step; what they do depends on themselves and the clock alone.

    Args:
        users: the number of users.
        seed: of all random numbers.
        by_hand: whether the logit is that of the table `shop`.
    """
    draw = np.random.default_rng(seed)
    shop, behavior, rows = Shop(draw), Behavior(users), []
    num_sessions = np.clip(draw.lognormal(2.4, 0.8, users), 1, DAYS - 1).astype(int)
    days = draw.random((users, DAYS)).argsort(1)  # a session a day at most, between 6 and 24 o'clock
    days = np.sort(np.where(np.arange(DAYS) < num_sessions[:, None], days, DAYS))
    hours = np.clip(draw.normal(draw.uniform(9, 21, users)[:, None], 3.0, (users, DAYS)), 6, 23.9)
    activity, level = 0.3 * draw.standard_normal(users), draw.standard_normal(users)
    taste, focus = draw.standard_normal((users, CATEGORIES)), np.zeros(users, int)
    session, pages, clock = np.full(users, -1), np.zeros(users, int), np.zeros(users)
    past = np.zeros((4, users, ITEMS), np.int16)  # by action, the number of times; of impressions those without a click
    recent, number = np.full((users, 12), -1), np.zeros(users, int)

    def write(action: int, who, item, time, dwell=np.nan, position=np.nan, clicked=0, logit=np.nan) -> None:
        columns = who, item, time, session[who], np.full(len(who), action), dwell, position, clicked, logit
        rows.append(tuple(np.broadcast_to(one, len(who)) for one in columns))

    while True:
        who = np.flatnonzero(pages == 0)  # begin their next session, or have had their last
        session[who] += 1
        behavior.begin_session(who)
        pages[who] = np.where(session[who] < num_sessions[who], 1 + draw.poisson(3.0, len(who)), -1)
        who = who[pages[who] > 0]
        clock[who] = np.floor((days[who, session[who]] + hours[who, session[who]] / 24) * DAY)
        taste[who] = 0.95 * taste[who] + np.sqrt(1 - 0.95**2) * draw.standard_normal((len(who), CATEGORIES))
        focus[who] = np.argmax(1.3 * taste[who] + draw.gumbel(size=(len(who), CATEGORIES)), 1)
        who = np.flatnonzero(pages > 0)
        if not len(who):
            break
        pages[who] -= 1

        # A page: of 20 items 8 of the session's category or one that the user likes, 7 popular ones, 5 seen before.
        user, time, size = who[:, None], clock[who][:, None], (len(who), PAGE)
        today, kind = np.floor(time / DAY).astype(int), draw.random(size)
        liked = np.argmax(taste[user] + draw.gumbel(size=(*size, CATEGORIES)), 2)
        liked = np.where(draw.random(size) < 0.5, focus[user], liked)
        item = shop.pick(draw, today, np.where(kind < 0.4, liked, -1))
        again = recent[user, draw.integers(0, recent.shape[1], size)]
        item = np.where((kind > 0.75) & (again >= 0) & shop.on_sale[today, again], again, item)
        is_new = np.array([[one not in page[:place] for place, one in enumerate(page)] for page in item.tolist()])

        of, (seen, viewed, carted, bought) = shop.category[item], past[:, user, item]
        logit = -3.1 + shop.quality[item] + shop.wave(item, time / DAY) + activity[user] - 0.12 * np.arange(PAGE)
        logit += 0.3 * np.cos((time / 3600 - shop.phase[of]) * np.pi / 12)
        logit += behavior.logit(user, of) if by_hand else 0.45 * taste[user, of] + 0.75 * (of == focus[user])
        logit -= 0.15 * (shop.price[item] - level[user]) ** 2
        logit += 0.3 * (viewed > 0) - 0.2 * np.minimum(seen, 4) + 0.9 * ((carted > 0) & (bought == 0))
        logit += (bought > 0) * np.where(of % 3 == 0, 1.0, -1.8)  # every third category is of consumable goods
        clicked = (draw.random(size) < 1 / (1 + np.exp(-logit))) & is_new
        match = draw.standard_normal(size) + taste[user, of] + (of == focus[user])
        dwell = np.ceil(np.exp(2.6 + 0.5 * match))
        cart = clicked & (draw.random(size) < 1 / (1 + np.exp(2.2 - 0.8 * match)))
        buys = cart & (draw.random(size) < 0.5)

        at = np.nonzero(is_new)
        write(0, who[at[0]], item[at], clock[who[at[0]]], np.nan, at[1], clicked[at], logit[at])
        spent = np.cumsum(clicked * (dwell + 30), 1)
        view = time + spent - dwell - 20
        for action, happens, moment in ((1, clicked, view), (2, cart, view + dwell), (3, buys, view + dwell + 10)):
            at = np.nonzero(happens)
            write(action, who[at[0]], item[at], moment[at], dwell[at] if action == 1 else np.nan)
            past[action, who[at[0]], item[at]] += 1  # an item is on a page once
        at = np.nonzero(is_new & ~clicked)
        past[0, who[at[0]], item[at]] += 1
        behavior.add(who, of, (clicked, cart, np.log(dwell) - 2.6))
        for place in range(PAGE):
            here = clicked[:, place]
            recent[who[here], number[who[here]] % recent.shape[1]] = item[here, place]
            number[who[here]] += 1
        clock[who] += 20 + spent[:, -1]
    items = {"item_id": np.arange(ITEMS), "category": shop.category, "brand": shop.brand}
    return items | {"price": np.round(np.exp(3 + shop.price), 2)}, *_log(rows)


def _log(rows: list[tuple]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The columns of the log by time, user and item, and the logits."""
    names = ("user_id", "item_id", "timestamp", "session", "action", "dwell", "position", "clicked", "logit")
    log = {name: np.concatenate(parts) for name, *parts in zip(names, *rows, strict=True)}
    order = np.lexsort((log["item_id"], log["user_id"], log["timestamp"]))
    log = {name: column[order] for name, column in log.items()}
    log["timestamp"] = START + log["timestamp"].astype(np.int64)
    log["hour"] = log["timestamp"] % DAY // 3600
    log["session"] += log["user_id"] * DAYS
    log["action"] = np.array(ACTIONS)[log["action"]]
    log["clicked"] = np.where(np.isnan(log["logit"]), np.nan, log["clicked"])
    return log, log.pop("logit")


def _parquet(columns: dict[str, np.ndarray]) -> bytes:
    """A Parquet file; NaN becomes null, and labels and positions are whole numbers."""
    tables = pa.table({name: pa.array(column, from_pandas=True) for name, column in columns.items()})
    for name in {"clicked", "position"} & columns.keys():
        at = tables.schema.get_field_index(name)
        tables = tables.set_column(at, name, tables[name].cast(pa.int8()))
    out = io.BytesIO()
    pq.write_table(tables, out, compression="zstd")
    return out.getvalue()
