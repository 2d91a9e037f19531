"""Dense features of what was known of user and target before a sample: `data.statistics`.

What a sample of user u, item i and time t gets is made of rows that are strictly older than t, of any split, since they
are known by then; rows of its own time are not among them. With labels a rate is that of positives, as if there were
some more rows of the rate that is expected anyway. In implicit feedback a share takes its place, of all older rows or
of the user's; a sampled negative has the statistics of its item at the time of its positive, made by the same function.

docs/features.md says what the columns of each group are. `similar` looks at as many of the newest events in every table
as in training, so that a table to score has the same scale. It takes the most time.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from jfi.events.events import Histories, index_type
from jfi.events.groups import GROUPS, NUM_VALUES, columns_of
from jfi.events.past import Past, Tally
from jfi.events.point_in_time import PastIndex, Queries, Tallies
from jfi.utils.encoding import standardize
from jfi.utils.jagged import blocks, ranges

#: Pairs that are computed together, and stay in the cache.
_PAIRS_AT_ONCE = 1 << 17
_FEW_PAIRS = 10.0


def co_occurrence(tallies: Tallies, window: int) -> np.ndarray:
    """Compares targets with the events of their users' histories, by which users had both before that moment.

    A user who has two items within `window` events makes a pair of them, at the time of the later one. With c the
    number of pairs of items i and j that are strictly older than a sample, and n_i and n_j those of events,

        w_ij = c / sqrt(n_i n_j)                 similarity
        a_ij = sum of r_i r_j / (c + 10)         agreement, over the pairs, of the surprise r in the labels of both

    where the surprise of an event is its label minus what the item and the user let expect. Sums over the history's
    newest `window` events j then say how much the target resembles the history, and whether users like both.

    Args:
        tallies: the queries; their index keeps the pairs. In implicit feedback no label is surprising.
        window: the number of newest events of a history that count.

    Returns:
        `[4, B]` float64, the sums of w, of w over the events with a label, of w times the label, and of a times the
        event's surprise.
    """
    index, item, rows, moment = tallies.index, tallies.queries.item, tallies.queries.events, tallies.moment
    events, name, with_labels = index.events, f"pairs of {window}", not index.is_implicit
    pairs, alone = _pairs(index, window, name), index.past("history", ("item",))
    of_target = alone.older(item, moment).count
    # A sample that is an event of histories, with its own item, reads the pairs that it made.
    position, first = np.full(len(item), -1), index.arrays.get(f"{name}: first")
    if rows is not None and first is not None and len(first):
        found = rows
        if events.rows is not None:  # values of another type would convert all of the array
            found = np.searchsorted(events.rows, rows.astype(events.rows.dtype))
            found = np.minimum(found, len(events.rows) - 1)
        is_own = (events.rows_at(found) == rows) & (events.item[rows] == item) & (events.label_delay == 0)
        position = np.where(is_own, found, -1)
    if rows is None:
        (newest,) = (one.newest(window) for one in tallies.older("history", ("user",)))
        start, lengths = newest.first, newest.end - newest.first
    else:
        start, lengths = events.histories(rows, window)
    sums, surprise = np.zeros((4, len(item))), _surprise(index) if with_labels else None
    for is_own in (True, False):
        chosen = np.flatnonzero((position >= 0) == is_own)
        histories = Histories(lengths[chosen], start[chosen])
        for own, _, event in histories.blocks(events, _PAIRS_AT_ONCE):
            part, count = chosen[own], histories.lengths[own]
            now, other, agreed = moment[part].repeat(count), events.item[event].astype(np.int64), 0.0
            if is_own:
                own_pairs = ranges(first[position[part]], count)
                found = index.arrays[f"{name}: older"][own_pairs]
                if with_labels:
                    agreed = index.arrays[f"{name}: agreement"][own_pairs]
            else:
                pair = _pair(item[part].repeat(count), other, index.num_items)
                older = pairs.older(pair, now)
                found = older.count
                if with_labels:
                    older = pairs.older(pair, tallies.known[part].repeat(count)) if events.label_delay else older
                    agreed = older.sum(index.arrays[f"{name}: products"])
            weight = found / np.sqrt(np.maximum(of_target[part].repeat(count) * alone.older(other, now).count, 1))
            agreement, label = agreed / (found + _FEW_PAIRS), events.label[event]
            if events.label_delay:
                is_known = events.time[event] + events.label_delay < tallies.seconds[part].repeat(count)
                label = np.where(is_known, label, np.nan)
            labeled, liked = ~np.isnan(label), np.nan_to_num(label)
            surprising = 0.0 if surprise is None else surprise[event] * labeled
            sample = np.arange(len(part)).repeat(count)
            for i, values in enumerate((weight, weight * labeled, weight * liked, agreement * surprising)):
                sums[i, part] = np.bincount(sample, weights=values, minlength=len(part))
    return sums


def _pairs(index: PastIndex, window: int, name: str) -> Past:
    """The pairs, sorted by both items and the moment of the later event."""
    arrays, events = index.arrays, index.events
    if f"{name}: codes" not in arrays:
        first, begin, count = index.new(len(events) if events.rows is None else len(events.rows), np.int64), 0, 0
        for rows in index.rows("history"):
            ends = count + np.cumsum(_newest(index, rows, window).lengths)
            first[begin] = count
            first[begin + 1 : begin + len(rows)] = ends[:-1]
            count, begin = int(ends[-1]), begin + len(rows)
        product = None if index.is_implicit else index.new(count, np.float64)
        pairs = Past.sort(_unsorted(index, window, product, count), count, len(index.times), index.new)
        arrays |= {f"{name}: codes": pairs.codes, f"{name}: keys": pairs.keys, f"{name}: first": first}
        products = None
        if product is not None:
            products = arrays[f"{name}: products"] = pairs.prefix(product.take, index.new)
        arrays[f"{name}: older"], agreement = pairs.of_each_row(products, index.new)
        if agreement is not None:
            arrays[f"{name}: agreement"] = agreement
    return index.sorted_rows(name)


def _unsorted(
    index: PastIndex, window: int, product: np.ndarray | None, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the keys, the later moments and the numbers of pairs, and writes the products of their surprises."""
    events, end, kind = index.events, 0, index_type(count)
    for rows in index.rows("history"):
        histories, item, moment = _newest(index, rows, window), events.item[rows].astype(np.int64), index.moment(rows)
        for own, _, event in histories.blocks(events, _PAIRS_AT_ONCE):
            begin, end, each = end, end + len(event), histories.lengths[own]
            key = _pair(item[own].repeat(each), events.item[event].astype(np.int64), index.num_items)
            if product is not None:
                product[begin:end] = _surprise(index)[rows[own]].repeat(each) * _surprise(index)[event]
            yield key, moment[own].repeat(each), np.arange(begin, end, dtype=kind)


def _surprise(index: PastIndex) -> np.ndarray:
    """The surprises, as multiples of 2**-10, so that sums of products are exact."""

    def make() -> np.ndarray:
        found, surprise = index.new(len(index.events), np.float64), index.surprise
        for begin, end in blocks(len(found), _PAIRS_AT_ONCE):
            found[begin:end] = np.rint(surprise[begin:end] * 1024) / 1024
        return found

    return index.array("rounded surprise", make)


def _newest(index: PastIndex, rows: np.ndarray, window: int) -> Histories:
    """The newest `window` events of the histories of rows `[N]`."""
    start, lengths = index.events.histories(rows, window)
    return Histories(lengths, start)


def _pair(one: np.ndarray, other: np.ndarray, num_items: int) -> np.ndarray:
    """A number for each pair of items, whatever their order."""
    return np.minimum(one, other) * num_items + np.maximum(one, other)


#: Rows of the expected rate that a rate is smoothed with: of items and users, and of one user's events of one item or
#: category.
_SMOOTHING, _OF_FEW = 10.0, 2.0
#: Added to a sum of similarities before its logarithm is taken.
_LEAST_SIMILARITY = 1e-3
_AT_ONCE = 1 << 18

StatisticColumns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Statistics:
    """Makes the columns of some groups.

    Args:
        categories: the categorical columns of the item but its id.
        window: the newest events that `similar` compares a target with.
        half_lives: of `popularity`, in seconds.
        numbers, values: the numbers and the categorical columns of events, which the index has the values of.
    """

    index: PastIndex
    groups: list[str]
    categories: list[str]
    window: int
    half_lives: list[float]
    numbers: Iterable[str] = ()
    values: Iterable[str] = ()

    def of(self, events: np.ndarray, item: np.ndarray | None = None) -> StatisticColumns:
        """Returns by column the statistics `[B]` float64 of queries, NaN for a missing value.

        Args:
            events: `[B]` int64, the event of each query.
            item: `[B]` int64, the targets; None for the events' own items.
        """
        return self.compute(self.index.queries(events, item))

    def compute(self, queries: Queries) -> StatisticColumns:
        """Returns by column the statistics `[B]` float64 of queries, NaN for a missing value."""
        tallies, columns = Tallies(self.index, queries), {}
        for name in GROUPS:
            if name in self.groups:
                columns |= getattr(self, f"_{name}")(tallies)
        columns_of_events = self.categories, self.numbers, self.values
        return {name: columns[name] for name in columns_of(self.groups, self.index.is_implicit, *columns_of_events)}

    def of_rows(self, rows: np.ndarray | None, new: Callable[[str, type, int], np.ndarray]) -> StatisticColumns:
        """Returns by column the statistics `[E]` of events at `rows [N]`, NaN elsewhere.

        Args:
            rows: `[N]` int64, or None for all.
            new: gives by name, type and length an array to write to.
        """
        found: StatisticColumns = {}
        count = len(self.index.events) if rows is None else len(rows)
        if not count:
            self.of(np.zeros(0, np.int64))  # makes the arrays of the index
        for begin, end in blocks(count, _AT_ONCE):
            part = np.arange(begin, end) if rows is None else rows[begin:end]
            for name, values in self.of(part).items():
                if name not in found:
                    found[name] = new(f"statistic-{len(found)}", np.float64, len(self.index.events))
                    if rows is not None:
                        found[name][:] = np.nan
                found[name][part] = values
        return found

    def _item(self, tallies: Tallies) -> StatisticColumns:
        count = {"past_item_count": np.log1p(tallies.item.count)}
        if self.index.is_implicit:
            return {"past_item_share": np.log(self._item_share(tallies))} | count
        return {"past_item_rate": tallies.item_rate} | count

    def _user(self, tallies: Tallies) -> StatisticColumns:
        count = {"past_user_count": np.log1p(tallies.user.count)}
        if self.index.is_implicit:
            return count
        columns = {"past_user_rate": _user_rate(tallies)} | count
        for most in (3, 10, 30):
            above = tallies.sums("labeled", ("user",), "item surprise", most)
            columns[f"past_user_newest_{most}"] = above / (np.minimum(tallies.user.count, most) + 1)
        return columns

    def _user_item(self, tallies: Tallies) -> StatisticColumns:
        key = ("user", "item")
        if self.index.is_implicit:
            tally, _ = tallies.user_share("item")
            share = tally.rate(self._item_share(tallies), _OF_FEW)
            count = {"past_user_item_count": np.log1p(tally.positives)}
            return {"past_user_item_share": share} | count | self._user_item_pause(tallies)
        tally = tallies.tally(key)
        rate = tally.rate(tallies.item_rate, _OF_FEW)
        return {
            "past_user_item_rate": rate,
            "past_user_item_count": np.log1p(tally.count),
            "past_user_item_newest_3": tallies.tally(key, 3).rate(rate, 1.0),
        }

    def _similar(self, tallies: Tallies) -> StatisticColumns:
        similarity, labeled, liked, agreement = co_occurrence(tallies, self.window)
        columns = {"past_similarity": np.log(similarity + _LEAST_SIMILARITY)}
        if self.index.is_implicit:
            return columns
        rate = (liked + _user_rate(tallies)) / (labeled + 1.0)
        return columns | {"past_similar_rate": rate, "past_agreement": agreement}

    def _popularity(self, tallies: Tallies) -> StatisticColumns:
        columns = {}
        for number, half_life in enumerate(self.half_lives, 1):
            tally, total = tallies.decayed(("item",), half_life), tallies.decayed((), half_life).count
            share = (tally.count + 1 / self.index.num_known) / (total + 1)
            columns[f"past_popularity_{number}"] = np.log(share)
            if not self.index.is_implicit:
                columns[f"past_recent_rate_{number}"] = tally.rate(tallies.overall, _SMOOTHING)
        return columns

    def _age(self, tallies: Tallies) -> StatisticColumns:
        return {
            "past_item_age": np.log1p(tallies.age("labeled", ("item",), oldest=True)),
            "past_user_pause": np.log1p(tallies.age("history", ("user",))),
        } | ({} if self.index.is_implicit else self._user_item_pause(tallies))

    def _user_item_pause(self, tallies: Tallies) -> StatisticColumns:
        return {"past_user_item_pause": np.log1p(tallies.age("history", ("user", "item")))}

    def _user_category(self, tallies: Tallies) -> StatisticColumns:
        columns = {}
        for name in self.categories:
            part, prefix = f"column {name}", f"past_user_{name}"
            if part not in self.index.item_columns:  # no list in training has a value
                missing = np.full(len(tallies.seconds), np.nan)
                kind = "share" if self.index.is_implicit else "rate"
                columns |= {f"{prefix}_{kind}": missing, f"{prefix}_count": missing}
            elif self.index.is_implicit:
                tally, everybody = tallies.user_share(part)
                columns[f"{prefix}_share"] = tally.rate(everybody, _OF_FEW)
                columns[f"{prefix}_count"] = np.log1p(tally.positives)
            else:
                tally = tallies.tally(("user", part))
                columns[f"{prefix}_rate"] = tally.rate(_user_rate(tallies), _OF_FEW)
                columns[f"{prefix}_count"] = np.log1p(tally.count)
        return columns

    def _session(self, tallies: Tallies) -> StatisticColumns:
        count = tallies.session[0].count
        columns = {"past_session_count": np.log1p(count)}
        for name in self.categories:
            part, share = f"column {name}", np.full(len(count), np.nan)
            if part in self.index.item_columns:
                values = np.maximum((tallies.keys((part,)) >= 0).sum(axis=1), 1)
                share = tallies.in_session((part,)) / values / np.maximum(count, 1)
            columns[f"past_session_{name}_share"] = share
        return columns

    def _event_values(self, tallies: Tallies) -> StatisticColumns:
        columns, session = {}, tallies.session[0]

        def mean(name: str, key: tuple[str, ...], expected: np.ndarray | float, smoothing: float) -> np.ndarray:
            total, count = (tallies.sums("history", key, f"{what} {name}") for what in ("sum of", "has"))
            return Tally(total, count).rate(expected, smoothing)

        def of_session(what: str) -> np.ndarray:
            return session.sum(self.index.prefix("history", ("user",), what))

        for name in self.numbers:
            overall = mean(name, (), 1.0, 1.0)
            columns[f"past_item_mean_{name}"] = mean(name, ("item",), overall, _SMOOTHING)
            user = columns[f"past_user_mean_{name}"] = mean(name, ("user",), overall, _SMOOTHING)
            for category in self.categories:
                known = f"column {category}" in self.index.item_columns
                of = mean(name, ("user", f"column {category}"), user, _OF_FEW) if known else np.full(len(user), np.nan)
                columns[f"past_user_{category}_mean_{name}"] = of
            tally = Tally(of_session(f"sum of {name}"), of_session(f"has {name}"))
            columns[f"past_session_mean_{name}"] = tally.rate(user, _OF_FEW)
        for name in self.values:
            for i in range(1, NUM_VALUES + 1):
                what = f"{name} is {i}"
                columns[f"past_session_{name}_{i}"] = np.log1p(of_session(what))
                columns[f"past_user_item_{name}_{i}"] = np.log1p(tallies.sums("history", ("user", "item"), what))
        return columns

    def _item_share(self, tallies: Tallies) -> np.ndarray:
        share = (tallies.num_rows("labeled", ("item",)) + _SMOOTHING / self.index.num_known).astype(np.float64)
        return share / (tallies.num_rows("labeled") + _SMOOTHING)


def _user_rate(tallies: Tallies) -> np.ndarray:
    return tallies.user.rate(tallies.overall, _SMOOTHING)


class DenseStatistics:
    """Statistics of drawn items, as the dense features of a batch.

    Args:
        columns: of the dense features that it fills the name, the index, and the mean, deviation and default.
    """

    def __init__(self, statistics: Statistics, columns: list[tuple[str, int, tuple]]) -> None:
        self.statistics, self._columns = statistics, columns

    def fill(self, dense: np.ndarray, rows: np.ndarray, events: np.ndarray, item: np.ndarray) -> None:
        """Writes the statistics of events with other targets, `[n]` int64 each, to the `rows [n]` of `dense [B, D]`."""
        made = self.statistics.of(events, item)
        for name, position, scale in self._columns:
            dense[rows, position] = standardize(made[name], *scale)
