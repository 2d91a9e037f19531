"""Which events of a user's history are worth computing, by surface, dwell and segment of users (DynamiX)."""

from jfi import lockstep  # noqa: F401  # before TorchRec: a wrong pair of torch and fbgemm is said in one line
from jfi.history.apply import PolicyModule
from jfi.history.fit import fit
from jfi.history.index import PolicyIndex
from jfi.history.log import EventLog
from jfi.history.policy import Policy
from jfi.history.reports import SegmentReport, SurfaceReport
from jfi.history.segments import Segments
from jfi.history.select import Selected

__all__ = [
    "EventLog",
    "Policy",
    "PolicyIndex",
    "PolicyModule",
    "SegmentReport",
    "Segments",
    "Selected",
    "SurfaceReport",
    "fit",
]
