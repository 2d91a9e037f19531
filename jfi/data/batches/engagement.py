"""Dwell times and surfaces of events, which a history policy reads in addition to the model's inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jfi.history_policies import EventLog

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
        positions = {name: place for place, name in enumerate(surfaces)}
        place = np.array([positions.get(name, -1) for name in (*self.surfaces, UNKNOWN_SURFACE)], np.int32)
        return replace(self, surface=place[self.surface], surfaces=list(surfaces))

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
