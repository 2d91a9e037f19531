"""Which events of a user's history are worth computing, by surface, dwell and segment of users (DynamiX)."""

from typing import TYPE_CHECKING

from jfi.history_policies.fit import fit
from jfi.history_policies.log import EventLog
from jfi.history_policies.policy import Policy, SegmentReport, SurfaceReport
from jfi.history_policies.segments import Segments
from jfi.history_policies.select import Selected

if TYPE_CHECKING:
    from jfi.history_policies.apply import PolicyModule

__all__ = [
    "EventLog",
    "Policy",
    "PolicyModule",
    "SegmentReport",
    "Segments",
    "Selected",
    "SurfaceReport",
    "fit",
]


def __getattr__(name: str) -> object:
    if name != "PolicyModule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # A server does without TorchRec, so it is imported here, after a look at its version.
    import jfi.utils.lockstep  # noqa: F401
    from jfi.history_policies.apply import PolicyModule

    return PolicyModule
