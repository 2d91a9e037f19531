"""Timelines: rows of a batch that share a user's events, and when each of them happened."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Timelines:
    """U timelines, each the events of a user that R rows share: a row sees those that are strictly older than itself.

    Args:
        row_offsets: `[U + 1]` int64, from 0 to R: the rows of timeline u are `row_offsets[u]:row_offsets[u + 1]`.
        target_times: `[R]`, not decreasing within a timeline.
        event_times: `[S]` of the same dtype, the times of the packed events, not decreasing within a timeline.
        max_events: a row sees at most this many of the newest events; None for all.
    """

    row_offsets: Tensor
    target_times: Tensor
    event_times: Tensor
    max_events: int | None = None

    @property
    def count(self) -> int:
        """Returns U."""
        return self.row_offsets.size(0) - 1
