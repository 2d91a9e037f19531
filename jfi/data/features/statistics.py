"""Running counts and rates of the past as dense features of the sample: `data.statistics`.

What a sample of user u, item i and time t gets is made of labeled rows that are strictly older than t, of any split,
since they are known by then; rows of its own time are not among them. A rate is that of positives, as if there were
some more rows of the rate that is expected anyway:

    item        of the item's rows: their rate, and log(1 + n) of their number
    user        of the user's events: the same; and of the newest 3, 10 and 30 how far labels lay above the rates that
                their items had then, which follows the user's mood
    user_item   of the user's events of the same item: the same as of the item, and the rate of the newest 3
    similar     of the user's newest events, weighted by how many users had both items: the sum of the weights as a
                logarithm, the rate, and how far labels of both items go together; see `co_occurrence`

`similar` looks at the 32 newest events, the same in every table, so that a table to score has the scale of training. It
takes the most time. They enter the model like numeric features of the context, under the names of `STATISTICS` in
`jfi.data.config`.
"""

from collections.abc import Callable

import numpy as np

from jfi.data.config import STATISTICS
from jfi.data.features.co_occurrence import co_occurrence
from jfi.data.features.point_in_time import PastIndex, Tallies

#: Rows of the expected rate that a rate is smoothed with: of items and users, and of one user's events of one item.
_SMOOTHING, _OF_FEW = 10.0, 2.0
#: The newest events that `similar` compares a target with.
_WINDOW = 32
#: Added to a sum of similarities before its logarithm is taken.
_LEAST_SIMILARITY = 1e-3
_AT_ONCE = 1 << 18


def make_statistics(
    index: PastIndex, names: list[str], max_history: int, new: Callable[[str, type, int], np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns by column the statistics `[E]` float64 of all events, in their order.

    Args:
        index: of the dataset.
        names: the groups.
        max_history: no history is longer.
        new: gives by name, type and length an array to write to.
    """
    count, found = len(index.events), {}
    for begin in range(0, count, _AT_ONCE):
        rows = np.arange(begin, min(begin + _AT_ONCE, count))
        for name, values in statistics(Tallies(index, rows), names, max_history).items():
            if name not in found:
                found[name] = new(f"statistic-{len(found)}", np.float64, count)
            found[name][rows] = values
    return found


def statistics(tallies: Tallies, names: list[str], max_history: int) -> dict[str, np.ndarray]:
    """Returns by column the statistics `[B]` float64 of questions."""
    columns: dict[str, np.ndarray] = {}
    for name in STATISTICS:
        if name == "similar" and name in names:
            columns |= _similar(tallies, min(_WINDOW, max_history))
        elif name in names:
            columns |= _GROUPS[name](tallies)
    return columns


def _item(tallies: Tallies) -> dict[str, np.ndarray]:
    return {"past_item_rate": _item_rate(tallies), "past_item_count": np.log1p(tallies.item.count)}


def _user(tallies: Tallies) -> dict[str, np.ndarray]:
    columns = {"past_user_rate": _user_rate(tallies), "past_user_count": np.log1p(tallies.user.count)}
    for most in (3, 10, 30):
        above = tallies.sums("labeled history", ("user",), "item surprise", most)
        columns[f"past_user_newest_{most}"] = above / (np.minimum(tallies.user.count, most) + 1)
    return columns


def _user_item(tallies: Tallies) -> dict[str, np.ndarray]:
    key = ("user", "item")
    tally = tallies.tally("labeled history", key)
    rate = tally.rate(_item_rate(tallies), _OF_FEW)
    return {
        "past_user_item_rate": rate,
        "past_user_item_count": np.log1p(tally.count),
        "past_user_item_newest_3": tallies.tally("labeled history", key, 3).rate(rate, 1.0),
    }


def _similar(tallies: Tallies, window: int) -> dict[str, np.ndarray]:
    sums = co_occurrence(tallies.index, window, tallies.events, tallies.item_ids)
    return {
        "past_similarity": np.log(sums.similarity + _LEAST_SIMILARITY),
        "past_similar_rate": (sums.liked + _user_rate(tallies)) / (sums.labeled + 1.0),
        "past_agreement": sums.agreement,
    }


def _item_rate(tallies: Tallies) -> np.ndarray:
    return tallies.item.rate(tallies.overall, _SMOOTHING)


def _user_rate(tallies: Tallies) -> np.ndarray:
    return tallies.user.rate(tallies.overall, _SMOOTHING)


_GROUPS: dict[str, Callable[[Tallies], dict[str, np.ndarray]]] = {"item": _item, "user": _user, "user_item": _user_item}
