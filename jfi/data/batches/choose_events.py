"""A history policy where batches are assembled: which events of a history stay, before any field of them is read.

The policy chooses among the newest `max_history` events strictly before a sample, and these alone decide the segment of
its user. A request to a server holds the same events, so that training and serving choose the same, and nothing comes
from a sample's future. Neither the sample's own dwell nor any conversion is read.

In a batch by user the samples of a timeline share its events, so the policy is applied once: the segment is that of the
timeline's first sample, which knows the least. An event that is among the newest ones of any of the samples stays for
all of them; the later ones see no more of their future by it, since it is older than they are. A cap counts back from
the first sample that sees an event. A sample reads the newest `max_history` of what stays of its timeline, which may be
older than what it would choose among by itself.
"""

from functools import cached_property

import numpy as np

from jfi.data.batches.engagement import Engagement
from jfi.data.batches.events import Events, Histories, index_type, user_blocks
from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.schema.coded import blocks
from jfi.history_policies import Policy, PolicyIndex
from jfi.history_policies.segments import statistics_of
from jfi.utils.files import DamagedFileError


class EventChooser:
    """Applies a policy to packed histories; the same events stay as with `Policy.select`.

    It is `PolicyIndex`, which reads no event that goes.

    Args:
        policy: what stays.
        events: all events of a dataset.
        engagement: of these events.
        max_history: the newest events of a history that the policy chooses among.

    Raises:
        DataError: there is no engagement, or it has surfaces that the policy does not know.
    """

    def __init__(self, policy: Policy, events: Events, engagement: Engagement | None, max_history: int) -> None:
        if engagement is None:
            raise DataError("data.policy is set, but the data has neither data.dwell nor data.surface")
        self.policy, self._max_history, self._events = policy, max_history, events
        try:
            policy.surface_ids(engagement.surfaces)
        except ValueError as error:
            raise DataError(f"data.policy: {error}") from None
        known = engagement.on_surfaces(policy.surfaces)
        #: `[E]` int16 and int8.
        self._cells = np.empty(len(events), np.int16)
        for begin, end in blocks(len(events)):
            self._cells[begin:end] = policy.cells(known.surface[begin:end], np.asarray(known.dwell[begin:end]))
        self._segments = _segments(policy, events, known, max_history)
        self._index = PolicyIndex(policy, self._cells if events.rows is None else self._cells[events.rows])

    def histories(self, owners: np.ndarray) -> Histories:
        """Returns what stays of the histories of samples `[B]` int64."""
        start, length = self._events.histories(owners, self._max_history)
        index, counts, weights = self._index.select(start, length, self._segments[owners])
        return Histories(counts, events=self._events.rows_at(index), weights=weights)

    def timelines(self, rows: np.ndarray, offsets: np.ndarray) -> Histories:
        """Returns what stays of the events of U timelines.

        Args:
            rows: `[R]` int64, the samples, by timeline and time.
            offsets: `[U + 1]` int64, the samples of each timeline, at least one.
        """
        owners, (firsts, ends) = offsets[:-1], self._ends
        end = ends.take(rows)
        # Each sample adds the events that it sees and those before it do not. The newest of them stay, since those of
        # later samples are no older, and a cap counts back from their end. Where no more than these are added all stay:
        # only the others, and the first of a timeline, are histories to choose from, with what follows them.
        chooses = np.empty(len(rows), bool)
        np.greater(end[1:] - end[:-1], self.policy.newest, out=chooses[1:])
        chooses[owners] = True
        (at,) = chooses.nonzero()
        first = at.searchsorted(owners)  # of each timeline
        last = np.empty(len(at), np.int64)
        last[:-1], last[-1] = at[1:] - 1, len(rows) - 1
        start, stop, end, of = end.take(at - 1, mode="wrap"), end.take(last), end.take(at), rows.take(owners)
        start[first] = np.maximum(end.take(first) - self._max_history, firsts.take(self._events.user.take(of)))
        count = np.empty(len(of), np.int64)  # of histories to choose from
        count[:-1], count[-1] = first[1:] - first[:-1], len(at) - first[-1]
        segments = self._segments.take(of).repeat(count)
        index, counts, weights = self._index.select(start, end - start, segments, stop - end)
        return Histories(np.add.reduceat(counts, first), events=self._events.rows_at(index), weights=weights)

    @cached_property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """`[U]` and `[E]` integers, where among the events of histories a user's begin and a row's history ends."""
        events, ends = self._events, np.empty(len(self._events), index_type(len(self._events)))
        for begin, end in blocks(len(ends)):
            ends[begin:end] = np.add(*events.histories(np.arange(begin, end), 1))
        firsts = events.first[:-1]
        return firsts if events.rows is None else np.searchsorted(events.rows, firsts.astype(events.rows.dtype)), ends


def load_policy(config: DataConfig) -> Policy | None:
    """The policy that a config names.

    Raises:
        DataError: the file is missing or damaged.
    """
    if config.policy is None:
        return None
    try:
        return Policy.load(config.policy)
    except DamagedFileError as error:
        raise DataError(f"data.policy: {error}") from None


def _segments(policy: Policy, events: Events, engagement: Engagement, max_history: int) -> np.ndarray:
    """`[E]` int8, the segment of each row's user by the newest `max_history` events strictly before the row."""
    segments = np.zeros(len(events), np.int8)
    if len(policy.segments.names) == 1:
        return segments
    for begin, end in user_blocks(events.first):
        low, rows = begin, np.arange(begin, end)
        if events.rows is not None:
            low, high = np.searchsorted(events.rows, np.array([begin, end], events.rows.dtype))
            rows = events.rows[low:high]
        log = engagement.log(events.user, events.time, rows).ordered  # in this order already
        first, length = events.histories(np.arange(begin, end), max_history)
        found = statistics_of(log, len(policy.surfaces), first - low, first - low + length)
        segments[begin:end] = policy.segments.assign(found)
    return segments
