"""Describes what a request reads from the state of users, and its fields as the model reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Encoded:
    """Fields of the user, of the candidates or of the events as the model reads them; numbers by the field's name."""

    ids: dict[str, np.ndarray] = field(default_factory=dict)
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    ages: np.ndarray | None = None
    numbers: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(eq=False)
class Lookup:
    """Describes what a request reads from the state, and what was found there.

    Args:
        now: time of the request in seconds; only events before it count.
        user: text of the user's id, None for none.
        items: `[R]` texts of the candidates' ids, None where nothing is read by them.
        events: how many there are before `now`, at most the newest `max_history`.
        time: of the newest of them in seconds, or None.
        unknown_items: how many of the candidates have no record in the state; None if none are read.
        position: rows of the log that the state had; 0 if it was not read.
        oldest: seconds since 1970, up to which events have expired; None if all are kept.
        column_ids: by key the ids `[R, K]` of the candidates' values that statistics count by.
    """

    now: float
    reads_events: bool = False
    reads_statistics: bool = False
    user: str | None = None
    user_columns: Sequence[str] = ()
    items: Sequence[str | None] | None = None
    item_columns: Sequence[str] = ()
    events: int = 0
    time: float | None = None
    unknown_items: int | None = None
    is_available: bool = True
    position: int = 0
    oldest: float | None = None
    column_ids: dict[str, np.ndarray] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.reads_events or self.reads_statistics or self.user_columns or self.item_columns)

    def mark_unavailable(self) -> None:
        """Forgets what was read before the store failed."""
        self.events, self.time, self.unknown_items, self.is_available, self.position = 0, None, None, False, 0

    def answer(self) -> dict[str, object]:
        """Returns what an answer says of it."""
        found: dict[str, object] = {"events": self.events, "time": self.time} if self.reads_events else {}
        found |= {} if self.unknown_items is None else {"unknown_items": self.unknown_items}
        return found | {"available": self.is_available}
