"""A history policy where batches are assembled: which events of a history stay, before any field of them is read.

The policy chooses among the newest `max_history` events strictly before a sample, and these alone decide the segment of
its user. A request to a server holds the same events, so that training and serving choose the same, and nothing comes
from a sample's future. Neither the sample's own dwell nor any conversion is read.

In a batch by user the samples of a timeline share its events, so the policy is applied once: the segment is that of the
timeline's first sample, which knows the least. An event that is among the newest ones of any of the samples stays for
all of them; the later ones see no more of their future by it, since it is older than they are. A cap counts back from
the first sample that sees an event. A sample reads the newest `max_history` of what stays of its timeline, which may be
older than what it would choose among alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jfi.data.errors import DataError
from jfi.events.events import Histories, SortedEvents, user_blocks
from jfi.history_policies import EventLog, Policy
from jfi.history_policies.segments import statistics_of
from jfi.history_policies.select import select_events
from jfi.utils.files import DamagedFileError
from jfi.utils.jagged import blocks, ranges

#: The name of the only surface where `data.surface` is not set, and of a policy's for events without a surface.
ONLY_SURFACE, UNKNOWN_SURFACE = "all", "unknown"


@dataclass(frozen=True)
class Engagement:
    """Aligned fields of E events that no model reads. The arrays may be maps of files.

    Conversions are no part of it: they are needed for fitting a policy alone, see `training_log`.

    Args:
        dwell: `[E]` float32 seconds, NaN where missing.
        surface: `[E]` integers, indices of `surfaces`, -1 where missing.
        surfaces: the names of the surfaces.
        session: `[E]` int64, equal for the events of a session of a user, or None without a column of it.
    """

    dwell: np.ndarray
    surface: np.ndarray
    surfaces: list[str]
    session: np.ndarray | None = None

    def on_surfaces(self, surfaces: Sequence[str]) -> "Engagement":
        """The same with other names of surfaces; an event on a surface that is not among them has none.

        An event without a surface has `unknown`, if that is a name.
        """
        positions = {name: index for index, name in enumerate(surfaces)}
        index = np.array([positions.get(name, -1) for name in (*self.surfaces, UNKNOWN_SURFACE)], np.int32)
        return replace(self, surface=index[self.surface], surfaces=list(surfaces))

    def log(self, user: np.ndarray, time: np.ndarray, rows: np.ndarray | None = None) -> EventLog:
        """The events as `jfi.history_policies` takes them.

        Args:
            user, time: `[E]`.
            rows: `[N]` the events to take, or None for all.
        """
        rows = slice(None) if rows is None else rows
        session = None if self.session is None else np.asarray(self.session[rows])
        parts = (np.asarray(one[rows]) for one in (user, time, self.surface, self.dwell))
        return EventLog(*parts, surfaces=self.surfaces, session=session)


class EventChooser:
    """Applies a policy to packed histories: the events stay that `Policy.select` keeps.

    Args:
        policy: what stays.
        events: all events of a dataset.
        engagement: of these events.
        max_history: the newest events of a history that the policy chooses among.

    Raises:
        DataError: there is no engagement, or it has surfaces that the policy does not know.
    """

    def __init__(self, policy: Policy, events: SortedEvents, engagement: Engagement | None, max_history: int) -> None:
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

    def histories(self, owners: np.ndarray) -> Histories:
        """Returns what stays of the histories of samples `[B]` int64."""
        start, length = self._events.histories(owners, self._max_history)
        return self._select(start, length, self._segments[owners])

    def timelines(self, rows: np.ndarray, offsets: np.ndarray) -> Histories:
        """Returns what stays of the events of U timelines.

        Args:
            rows: `[R]` int64, the samples, by timeline and time.
            offsets: `[U + 1]` int64, the samples of each timeline, at least one.
        """
        owners = offsets[:-1]
        start, length = self._events.histories(rows, self._max_history)
        ends = start + length
        # What each sample sees and those before it do not; the first of a timeline sees its whole history.
        new = np.diff(ends, prepend=0)
        new[owners] = length[owners]
        lengths = np.add.reduceat(new, owners)
        return self._select(start[owners], lengths, self._segments[rows[owners]], np.cumsum(new).repeat(new))

    def _select(
        self, start: np.ndarray, lengths: np.ndarray, segments: np.ndarray, seen_by: np.ndarray | None = None
    ) -> Histories:
        """Returns what stays of histories that are ranges of the rows of histories."""
        rows = self._events.rows_at(ranges(start, lengths))
        found = select_events(self.policy.tables, self._cells.take(rows), segments, lengths, seen_by)
        return Histories(found.lengths, events=rows.take(found.rows), weights=found.weights)


def load_policy(path: str) -> Policy:
    """Returns the policy in the file that `data.policy` names.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        return Policy.load(path)
    except DamagedFileError as error:
        raise DataError(f"data.policy: {error}") from None


def _segments(policy: Policy, events: SortedEvents, engagement: Engagement, max_history: int) -> np.ndarray:
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
