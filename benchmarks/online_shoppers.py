"""How much dwell says about a purchase, on the sessions of a real shop.

python -m benchmarks.online_shoppers online_shoppers_intention.csv

The table is UCI's "Online Shoppers Purchasing Intention" (Sakar et al. 2018; 12,330 sessions, a line each, 15.5 % of
them with a purchase): the seconds that a session spent on pages of three kinds. Each session with a page of a kind is
an event on that surface, and `jfi.history_policies.fit` is given nothing else. The information is that of the table's
columns, 0 seconds without such a page, computed without jfi.
"""

import argparse
import sys

import numpy as np
import pyarrow.csv
from numpy.typing import NDArray

from jfi.history_policies import EventLog, Policy, fit

KINDS = ("ProductRelated", "Administrative", "Informational")


def read_sessions(path: str) -> tuple[NDArray, NDArray, NDArray]:
    """Pages and seconds `[3, N]` by kind, and `[N]` whether a session ends with a purchase."""
    table = pyarrow.csv.read_csv(path)
    pages, seconds = (np.stack([table[f"{kind}{of}"].to_numpy() for kind in KINDS]) for of in ("", "_Duration"))
    purchase = np.array([str(value).lower() == "true" for value in table["Revenue"].to_pylist()])
    return pages, seconds.astype(np.float64), purchase


def fit_sessions(pages: NDArray, seconds: NDArray, purchase: NDArray) -> Policy:
    """A policy of one segment; a session is its own user."""
    kind, session = np.nonzero(pages)
    log = EventLog(session, np.zeros(len(session)), kind, seconds[kind, session], KINDS, session=session)
    return fit(log, purchase[session], num_segments=1)


def share_of_entropy(seconds: NDArray, purchase: NDArray, num_bins: int = 10) -> float:
    """Mutual information of deciles of dwell and purchase by its entropy, by the definition and not corrected."""
    edges = np.unique(np.quantile(seconds, np.linspace(0, 1, num_bins + 1)[1:-1]))
    bins = np.searchsorted(edges, seconds, side="right")
    table = np.stack([np.bincount(bins[purchase == one], minlength=len(edges) + 1) for one in (False, True)])
    joint = table / table.sum()
    of_both = joint.sum(0, keepdims=True) * joint.sum(1, keepdims=True)
    some = joint > 0
    rate = purchase.mean()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return float((joint[some] * np.log(joint[some] / of_both[some])).sum() / entropy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="online_shoppers_intention.csv")
    pages, seconds, purchase = read_sessions(parser.parse_args().path)
    policy = fit_sessions(pages, seconds, purchase)
    print(f"{len(purchase):,} sessions, {purchase.mean():.2%} with a purchase")
    print("| kind of page | information, % of the entropy | slope | log-odds by bin of dwell |")
    print("|---|---|---|---|")
    for kind, report, dwell in zip(KINDS, policy.surface_reports, seconds, strict=True):
        odds = [f"{x:+.2f}" for x, events in zip(report.log_odds, report.events, strict=True) if events]
        share = share_of_entropy(dwell, purchase)
        print(f"| {kind} | {100 * share:.2f} | {report.slope:.2f} | {' '.join(odds)} |")


if __name__ == "__main__":
    sys.exit(main())
