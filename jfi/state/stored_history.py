"""The part of a request that the state of users gives, before and after it is read."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class StoredHistory:
    """A user's events and statistics in the state of users, and what was read of them.

    Args:
        user: text of the user's id, or None for a new user, where events are not read.
        now: time of the request in seconds; only events before it count.
        reads_events: whether the user's events are read; if not, the request has its own or the model reads none.
        events: how many there are before `now`, at most the newest `max_history`.
        time: of the newest of them in seconds, or None.
        is_available: whether the store has answered.
        items: `[R]` texts of the candidates' ids, whose statistics are read, or None.
        column_ids: by key the ids `[R, K]` of the candidates' values that statistics count by.
    """

    user: str | None
    now: float
    reads_events: bool = True
    events: int = 0
    time: float | None = None
    is_available: bool = True
    items: list[str | None] | None = None
    column_ids: dict[str, np.ndarray] = field(default_factory=dict)

    def mark_unavailable(self) -> None:
        """Forgets what was read before the store failed."""
        self.events, self.time, self.is_available = 0, None, False

    def answer(self) -> dict[str, object]:
        """Returns what an answer says of it."""
        return {"events": self.events, "time": self.time, "available": self.is_available}
