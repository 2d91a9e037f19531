"""Boosting on features that one would write by hand for a shop's log: ``python -m benchmarks.quality.practitioner``.

It reads the table `shop` or `impressions`, and prints the test AUC that the library's boosting (`jfi.baselines`) and
models must reach. Its features use what is known of these tables: which rows are impressions, what a dwell is, what
follows a click. All are sums over rows that are strictly older.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

from benchmarks.quality.impressions import TEST
from benchmarks.quality.tables import DATA

_DAY = 86_400
#: Learning rate, leaves, least rows of a leaf, L2, of the trials.
_TRIALS = ((0.05, 15, 50, 0.0), (0.05, 31, 100, 1.0), (0.03, 31, 200, 5.0), (0.03, 63, 200, 5.0))


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
    """The features of the impressions; the categorical ones are last."""
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
    columns = features(log, items)
    shown = log["action"] == "impression"
    matrix, label = np.stack([*columns.values()], axis=1), log["clicked"][shown].astype(int)
    order = np.argsort(log["timestamp"][shown], kind="stable")
    test = int(TEST * len(order))
    parts = order[: -2 * test], order[-2 * test : -test], order[-test:]
    (x, y), (x_val, y_val), (x_test, y_test) = ((matrix[part], label[part]) for part in parts)
    best = (0.0, 0.0, ())
    for trial in _TRIALS:
        rate, leaves, rows, penalty = trial
        model = HistGradientBoostingClassifier(
            learning_rate=rate,
            max_leaf_nodes=leaves,
            min_samples_leaf=rows,
            l2_regularization=penalty,
            max_iter=600,
            early_stopping=True,
            n_iter_no_change=30,
            categorical_features=[*range(len(columns) - 2, len(columns))],
            random_state=0,
        )
        model.fit(x, y, X_val=x_val, y_val=y_val)
        scores = [roc_auc_score(of, model.decision_function(rows)) for rows, of in ((x_val, y_val), (x_test, y_test))]
        best = max(best, (*scores, trial))
        print(f"{trial}: validation {scores[0]:.4f}, test {scores[1]:.4f}", flush=True)
    print(f"{options.table}: {len(columns)} features, {len(label)} rows, test AUC {best[1]:.4f} ({best[2]})")


if __name__ == "__main__":
    main()
