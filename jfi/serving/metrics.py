"""Metrics of the server, as the text that Prometheus reads (exposition format 0.0.4)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Upper bounds of the buckets.
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SIZES = tuple(2**power for power in range(15))


class Histogram:
    """Counts of values by bucket.

    Args:
        bounds: ascending upper bounds, inclusive.

    Example:
        >>> sizes = Histogram((1, 2))
        >>> sizes.observe(2)
        >>> sizes.lines("n")
        ['n_bucket{le="1"} 0', 'n_bucket{le="2"} 1', 'n_bucket{le="+Inf"} 1', 'n_sum 2', 'n_count 1']
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        found, below = [], 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            below += count
            found.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*found, f"{name}_sum {self._sum:g}", f"{name}_count {below}"]


class Metrics:
    """All counts since the start of the server."""

    def __init__(self) -> None:
        #: By path and status; by reason; by result.
        self.requests: Counter[tuple[str, int]] = Counter()
        self.refused: Counter[str] = Counter()
        self.swaps: Counter[str] = Counter()
        self.left = 0
        self.request_seconds, self.call_seconds = Histogram(SECONDS), Histogram(SECONDS)
        self.batch_requests, self.batch_candidates = Histogram(SIZES), Histogram(SIZES)

    def called(self, requests: int, candidates: int, seconds: float) -> None:
        """Records a call of the model."""
        self.batch_requests.observe(requests)
        self.batch_candidates.observe(candidates)
        self.call_seconds.observe(seconds)

    def text(self, gauges: dict[str, tuple[str, float]], artifact: str) -> str:
        """The whole page.

        Args:
            gauges: by name what it means and its value now.
            artifact: identity of the artifact that answers now.
        """
        lines: list[str] = []

        def add(name: str, kind: str, meaning: str, samples: Iterable[str]) -> None:
            lines.extend((f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *samples))

        def count(name: str, meaning: str, samples: Iterable[tuple[str, int]]) -> None:
            add(name, "counter", meaning, [f"{name}{labels} {value}" for labels, value in samples])

        by_status = [
            (f'{{path="{path}",status="{status}"}}', value) for (path, status), value in sorted(self.requests.items())
        ]
        count("jfi_requests_total", "Answers by path and status.", by_status)
        by_reason = [(f'{{reason="{reason}"}}', value) for reason, value in sorted(self.refused.items())]
        count("jfi_refused_total", "Requests that were refused, by reason.", by_reason)
        count("jfi_clients_left_total", "Requests whose client left before the answer.", [("", self.left)])
        swaps = [(f'{{result="{result}"}}', self.swaps[result]) for result in ("done", "failed")]
        count("jfi_artifact_swaps_total", "Artifacts loaded while serving.", swaps)
        for name, meaning, histogram in (
            ("jfi_request_seconds", "Time from the headers of a POST /score to its answer.", self.request_seconds),
            ("jfi_call_seconds", "Time of a call of the model.", self.call_seconds),
            ("jfi_batch_requests", "Requests in a call of the model.", self.batch_requests),
            ("jfi_batch_candidates", "Candidates in a call of the model.", self.batch_candidates),
        ):
            add(name, "histogram", meaning, histogram.lines(name))
        for name, (meaning, value) in gauges.items():
            add(name, "gauge", meaning, [f"{name} {value}"])
        info = f'jfi_artifact_info{{id="{artifact}"}} 1'
        add("jfi_artifact_info", "gauge", "The artifact that answers.", [info])
        return "\n".join(lines) + "\n"
