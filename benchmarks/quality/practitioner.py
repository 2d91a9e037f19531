"""Boosting on features that one would write by hand for a shop's log: ``python -m benchmarks.quality.practitioner``.

It reads the table `shop` or `impressions`, and prints the test AUC that the library's boosting (`jfi.baselines`), which
grows the same trees, and models must reach. Its features use what is known of these tables: which rows are impressions,
what a dwell is, what follows a click. All are sums over rows that are strictly older.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.quality.impressions import TEST
from benchmarks.quality.tables import DATA
from jfi.baselines.models import LEAST_ROWS, LEAVES, best, gradient_boosting
from jfi.baselines.samples import Samples

_DAY = 86_400


class Sums:
    """Sums over a log's rows that are strictly older than these rows.

    Args:
        time: `[N]` seconds.
    """

    def __init__(self, time: np.ndarray) -> None:
        self._time, self._span = time - time.min(), int(np.ptp(time)) + 1

    def __call__(self, value: np.ndarray, *keys: np.ndarray, days: float | None = None) -> np.ndarray:
        """`[N]`, over rows of the same keys, of the last days alone if these are given."""
        key = np.zeros(len(value), np.int64)
        for one in keys:
            key = np.unique(key * (int(one.max()) + 1) + one, return_inverse=True)[1]
        code = key * self._span + self._time
        order = np.argsort(code, kind="stable")
        total = np.append(0.0, np.cumsum(value[order]))
        first = key * self._span if days is None else np.maximum(key * self._span, code - int(days * _DAY))
        return total[np.searchsorted(code[order], code)] - total[np.searchsorted(code[order], first)]


def features(log: dict[str, np.ndarray], items: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The features of the impressions."""
    item, user, session = log["item_id"], log["user_id"], log["session"]
    category, brand, price = (items[name][item] for name in ("category", "brand", "price"))
    shown, viewed, carted, bought = (log["action"] == one for one in ("impression", "view", "cart", "purchase"))
    click, sums = np.nan_to_num(log["clicked"]), Sums(log["timestamp"])
    interest = np.where(viewed, np.nan_to_num(np.log(log["dwell"])), 0.0)
    overall = click.sum() / shown.sum()

    def rate(*keys: np.ndarray, expected: np.ndarray | float = overall, days: float | None = None) -> np.ndarray:
        weight = 20.0 if len(keys) == 1 else 5.0
        return (sums(click, *keys, days=days) + weight * expected) / (sums(shown, *keys, days=days) + weight)

    def mean_interest(*keys: np.ndarray) -> np.ndarray:
        mean = interest[viewed].mean()
        return (sums(interest, *keys) + 2 * mean) / (sums(viewed, *keys) + 2)

    of_user, views = rate(user), sums(viewed, session)
    spent = np.where(viewed, np.log(price), 0.0)
    found = {
        "item rate": rate(item),
        "item rate, 7 days": rate(item, days=7),
        "item impressions": sums(shown, item),
        "item impressions, 3 days": sums(shown, item, days=3),
        "item dwell": mean_interest(item),
        "item carts per view": (sums(carted, item) + 1) / (sums(viewed, item) + 4),
        "category rate, 7 days": rate(category, days=7),
        "category rate of the hour": rate(category, log["hour"]),
        "user rate": of_user,
        "user impressions": sums(shown, user),
        "user trend": rate(user, days=2) / of_user,
        "session rate": rate(session, expected=of_user),
        "user dwell": mean_interest(user),
        "user category rate": rate(user, category, expected=of_user),
        "user category views": sums(viewed, user, category),
        "user category dwell": mean_interest(user, category),
        "user brand rate": rate(user, brand, expected=of_user),
        "seen": sums(shown, user, item),
        "viewed": sums(viewed, user, item),
        "carted before": sums(carted, user, item),
        "bought before": sums(bought, user, item),
        "session views": views,
        "session carts": sums(carted, session),
        "session purchases": sums(bought, session),
        "session share": sums(viewed, session, category) / np.maximum(views, 1),
        "price": np.log(price),
        "price above the user's": np.log(price) - (sums(spent, user) + 9) / (sums(viewed, user) + 3),
        "position": np.nan_to_num(log["position"]),
        "hour": log["hour"],
        "category": category,
        "brand": brand,
    }
    return {name: one[shown] for name, one in found.items()}


def _read(path: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", default="shop", choices=("shop", "impressions"))
    parser.add_argument("--data", type=Path, default=DATA, help="folder that benchmarks.quality.fetch wrote")
    options = parser.parse_args()
    log, items = (_read(options.data / options.table / f"{file}.parquet") for file in ("interactions", "items"))
    columns, shown = features(log, items), np.flatnonzero(log["action"] == "impression")
    categories = {name: columns.pop(name) for name in ("category", "brand")}
    count, test = len(shown), int(TEST * len(shown))
    splits = {"train": slice(0, count - 2 * test), "validation": slice(count - 2 * test, count - test)}
    splits["test"] = slice(count - test, count)  # the log is in the order of time
    samples = Samples(shown, *(log[name][shown] for name in ("item_id", "clicked", "user_id")), splits)
    trials = itertools.product(LEAVES, LEAST_ROWS)
    fit = best((gradient_boosting(columns, samples, *trial, categories) for trial in trials), "auc")
    shape = f"{len(columns) + len(categories)} features, {count} rows"
    print(f"{options.table}: {shape}, test AUC {fit.test['auc']:.4f} ({fit.settings})")


if __name__ == "__main__":
    main()
