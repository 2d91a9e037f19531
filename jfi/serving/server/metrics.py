"""Metrics of the server, with prometheus-client."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from jfi.serving.validation import BadRequestError
from jfi.state.lookups import Lookup
from jfi.state.state import Added

#: Upper bounds of the buckets.
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SIZES = tuple(2**power for power in range(15))


class Metrics:
    """The metrics of one server, in a registry of its own, since a process may have several servers."""

    def __init__(self) -> None:
        own = {"registry": CollectorRegistry()}
        self.registry = own["registry"]
        self.requests = Counter("jfi_requests_total", "Answers by path and status.", ["path", "status"], **own)
        self.refused = Counter("jfi_refused_total", "Requests that were refused, by reason.", ["reason"], **own)
        self.left = Counter("jfi_clients_left_total", "Requests whose client left before the answer.", **own)
        self.values = Counter("jfi_values_total", "Values of fields with a vocabulary, by field.", ["field"], **own)
        unknown = "Those of jfi_values_total that the vocabulary lacks, or that are null."
        self.unknown_values = Counter("jfi_unknown_values_total", unknown, ["field"], **own)
        spent = "Time from the headers of a POST /score to its answer."
        self.request_seconds = Histogram("jfi_request_seconds", spent, buckets=SECONDS, **own)
        self.call_seconds = Histogram("jfi_call_seconds", "Time of a call of the model.", buckets=SECONDS, **own)
        requests, candidates = (f"{what} in a call of the model." for what in ("Requests", "Candidates"))
        self.batch_requests = Histogram("jfi_batch_requests", requests, buckets=SIZES, **own)
        self.batch_candidates = Histogram("jfi_batch_candidates", candidates, buckets=SIZES, **own)
        self.inside = Gauge("jfi_requests_inside", "Requests that are read, wait or are scored.", **own)
        self.queue_length = Gauge("jfi_queue_length", "Requests that wait for a call of the model.", **own)
        self.queue_capacity = Gauge("jfi_queue_capacity", "Most requests inside.", **own)
        self.bodies_arriving = Gauge("jfi_bodies_arriving", "Bodies that are arriving.", **own)
        self.connections = Gauge("jfi_connections", "Connections that are open.", **own)
        described = "Events of POST /events, by what became of them."
        self.events = Counter("jfi_state_events_total", described, ["result"], **own)
        for result in ("added", "repeated", "refused", "failed"):
            self.events.labels(result)  # shown as 0 until there is one
        described = "Requests that read the state of users, by what they found."
        self.stored = Counter("jfi_state_requests_total", described, ["found"], **own)
        for found in ("events", "none", "unavailable"):
            self.stored.labels(found)
        self.log_waiting = Gauge("jfi_log_waiting_rows", "Rows that are in no part of --log yet.", **own)
        self.log_written = Counter("jfi_log_written_rows_total", "Rows in parts of --log.", **own)
        self.log_failures = Counter("jfi_log_failures_total", "Times that no part could be written.", **own)
        self.feed = Counter("jfi_feed_rows_total", "Rows of --feed, by what became of them.", ["result"], **own)
        for result in ("added", "repeated", "late"):
            self.feed.labels(result)
        self.feed_stopped = Gauge("jfi_feed_stopped", "1 while a fault stops --feed.", **own)
        described = "Published versions that the server has found, by what became of them."
        self.versions = Counter("jfi_versions_total", described, ["result"], **own)
        for result in ("applied", "refused"):
            self.versions.labels(result)
        self.version = Gauge("jfi_version", "The published version that answers, 0 of an artifact alone.", **own)
        self.version_published = Gauge("jfi_version_published_seconds", "When it was published, since 1970.", **own)
        refused = "1 while a newer published version is missing or refused."
        self.version_refused = Gauge("jfi_version_refused", refused, **own)
        described = "Requests for the log of requests, by what became of them."
        self.logged = Counter("jfi_logged_requests_total", described, ["result"], **own)
        for result in ("written", "dropped"):
            self.logged.labels(result)
        self.artifact = Info("jfi_artifact", "The artifact that answers.", **own)

    def logged_lines(self, result: str, count: int) -> None:
        """Records what became of lines of the log of requests."""
        self.logged.labels(result).inc(count)

    def called(self, requests: int, candidates: int, seconds: float) -> None:
        """Records a call of the model."""
        self.batch_requests.observe(requests)
        self.batch_candidates.observe(candidates)
        self.call_seconds.observe(seconds)

    def wrote(self, count: int, result: object) -> None:
        """Records what became of a body of events: Added, or the error."""
        if isinstance(result, Added):
            self.events.labels("added").inc(result.added)
            self.events.labels("repeated").inc(result.repeated)
        else:
            self.events.labels("refused" if isinstance(result, BadRequestError) else "failed").inc(count)

    def fed(self, added: Added) -> None:
        """Records what became of rows of --feed."""
        for result in ("added", "repeated", "late"):
            self.feed.labels(result).inc(getattr(added, result))

    def read_stored(self, stored: Lookup) -> None:
        """Records what a request has found in the state of users."""
        found = "events" if stored.events else "none" if stored.is_available else "unavailable"
        self.stored.labels(found).inc()

    def read(self, unknown: dict[str, tuple[int, int]]) -> None:
        """Records by field of a request how many of its values are unknown, and how many there are."""
        for field, (absent, count) in unknown.items():
            self.values.labels(field).inc(count)
            self.unknown_values.labels(field).inc(absent)
