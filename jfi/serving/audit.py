"""Compares what a server has read and answered with what the training code makes of the same requests."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
import numpy as np

from jfi.serving.rebuild import Asked, Rebuilder, Rebuilt, asked_of, deleted_users
from jfi.serving.request_log import AGE, LENGTH, WEIGHTS, Line, read_lines
from jfi.state.layout import digest

#: Requests that are rebuilt at their positions together.
_AT_ONCE = 1000
#: Hours by which the clocks of two time zones differ.
_ZONES = [step / 2 for step in range(-28, 29) if step]
#: Names of causes that are no faults of the code.
LATE, OTHER_VERSION, UNAVAILABLE = "late event", "another version", "the state did not answer"
SCORE = "score"


@dataclass
class Difference:
    """The requests of which a feature, or the score, differs.

    Args:
        kind: what has the feature.
        causes: how many by cause, as far as it is known.
        example: of the first request its id, user, first candidate, and what was served and rebuilt.
    """

    kind: str
    requests: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    example: dict[str, object] = field(default_factory=dict)


@dataclass
class Report:
    """Holds what an audit has found.

    Args:
        left_out: those whose user or a candidate has no id, by which a row could be made.
        deleted: those of users on the log's list of deletions; they are not compared.
        other_versions: those that another model than the run's has scored; their scores are not compared.
        differing: those of which a feature or the score differs, whatever the cause.
        late: those that are equal at their position of the log.
        unexplained: those that differ for another cause than a late event, another version or a state that was down.
        scores: those whose scores were compared.
        largest: difference of two scores.
    """

    requests: int = 0
    left_out: int = 0
    deleted: int = 0
    other_versions: int = 0
    unavailable: int = 0
    compared: int = 0
    differing: int = 0
    late: int = 0
    unexplained: int = 0
    scores: int = 0
    largest: float = 0.0
    features: dict[str, Difference] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Returns whether there is a request, and none differs for a cause in the code or the data of a server."""
        return bool(self.compared) and not self.unexplained

    def lines(self) -> Iterator[str]:
        """Yields the lines of a table."""
        yield f"{self.requests:,} requests, {self.compared:,} rebuilt, {self.differing:,} differ"
        yield f"late events explain {self.late:,}; {self.unexplained:,} differ for other causes"
        yield f"{self.scores:,} requests with equal features scored again: scores differ by at most {self.largest:.3g}"
        others = {"without the id of a user or an item": self.left_out, "of deleted users": self.deleted}
        others |= {"of another version": self.other_versions, "whose state did not answer": self.unavailable}
        yield from (f"{count:,} requests {what}" for what, count in others.items() if count)
        if self.features:
            yield f"{'feature':28s} {'kind':28s} {'requests':>9s}  causes"
        for name, one in sorted(self.features.items(), key=lambda pair: -pair[1].requests):
            causes = ", ".join(f"{cause} ({count:,})" for cause, count in one.causes.most_common())
            yield f"{name:28s} {one.kind:28s} {one.requests:9,d}  {causes}"
            yield "  " + ", ".join(f"{what} {value}" for what, value in one.example.items())


class Audit:
    """Audits a log of requests.

    Args:
        outputs: gives the scores `[R, L]` that an output of the server makes of logits `[R, L]`.
        tolerance: most that two scores may differ, times the score where that is above 1.
        examples: most requests for which what takes a log of its own is tried: statistics at a position, time zones.
    """

    def __init__(
        self,
        rebuild: Rebuilder,
        checkpoint: str,
        outputs: Callable[[np.ndarray, str], np.ndarray],
        tolerance: float,
        examples: int,
    ) -> None:
        self._rebuild, self._checkpoint, self._outputs = rebuild, checkpoint, outputs
        self._tolerance, self._examples = tolerance, examples
        self._specs = {spec.key: spec for spec in rebuild.schema.features}
        self._statistics = {*rebuild.config.resolved().statistics_columns()}
        self.report = Report()

    def __call__(self, requests: Path) -> Report:
        """Returns what is found in a folder or a file of logged requests."""
        report, config, deleted = self.report, self._rebuild.config, deleted_users(self._rebuild.log)

        def read() -> Iterator[Asked]:
            report.requests = report.deleted = 0
            for line in read_lines(requests):
                report.requests += 1
                if (one := asked_of(line, config)) is not None:
                    if deleted and digest(one.user).hex() in deleted:
                        report.deleted += 1
                    else:
                        yield one

        with TemporaryFile() as differing:
            for asked, rebuilt in self._rebuild(read):
                report.compared += 1
                report.other_versions += asked.line.model.checkpoint != self._checkpoint
                report.unavailable += not asked.line.available
                if names := self._differing(asked, rebuilt):
                    differing.write(msgspec.json.encode((names, self._examples_of(asked, rebuilt, names), asked.line)))
                    differing.write(b"\n")
                else:
                    self._compare_scores(asked, rebuilt)
            report.left_out = report.requests - report.compared - report.deleted
            differing.seek(0)
            while part := [*islice(differing, _AT_ONCE)]:
                self._explain(part)
        return report

    def _differing(self, asked: Asked, rebuilt: Rebuilt) -> list[str]:
        return [name for name, value in asked.line.features.items() if rebuilt.digest(name) != value]

    def _examples_of(self, asked: Asked, rebuilt: Rebuilt, names: list[str]) -> dict[str, dict[str, object]]:
        """Returns examples of features that have none yet."""
        found = {}
        for name in names:
            if name not in self.report.features or not self.report.features[name].example:
                values = rebuilt.values(name)
                shown = len(values[0]) if name == LENGTH else [one[-5:].tolist() for one in values]
                found[name] = {"served": asked.line.features[name], "rebuilt": shown}
        return found

    def _compare_scores(self, asked: Asked, rebuilt: Rebuilt) -> None:
        line = asked.line
        if line.model.checkpoint != self._checkpoint:
            return
        served = np.array([*line.scores.values()] if isinstance(line.scores, dict) else [line.scores]).T
        again = self._outputs(rebuilt.logits, line.model.output)
        distance = np.abs(served - again)
        self.report.scores += 1
        self.report.largest = max(self.report.largest, float(distance.max()))
        if not (distance <= self._tolerance * np.maximum(1.0, np.abs(again))).all():
            example = {"served": served[0].tolist(), "rebuilt": again[0].tolist()}
            self._count(asked.line, {SCORE: ""}, {SCORE: example})

    def _explain(self, part: list[bytes]) -> None:
        """Looks for the causes of requests that differ, and counts them."""
        found = [msgspec.json.decode(one, type=tuple[list[str], dict[str, dict], Line]) for one in part]
        asked = [asked_of(line, self._rebuild.config) for *_, line in found]
        causes = [dict.fromkeys(names, "") for names, *_ in found]
        for one, own in zip(asked, causes, strict=True):
            if one.line.model.checkpoint != self._checkpoint or not one.line.available:
                why = UNAVAILABLE if not one.line.available else OTHER_VERSION
                own.update(dict.fromkeys(own, why))
        if self._rebuild.log:
            self._find_late(asked, causes)
        self._find_zones(asked, causes)
        for one, own, (_, examples, _) in zip(asked, causes, found, strict=True):
            for name, cause in own.items():
                own[name] = cause or self._cause(one, name, own)
            self._count(one.line, own, examples)

    def _find_late(self, asked: list[Asked], causes: list[dict[str, str]]) -> None:
        """Rebuilds requests at their position: histories of all, statistics of some."""
        chosen = [i for i, own in enumerate(causes) if any(not own[name] for name in own if self._is_of_events(name))]
        if chosen:
            own, history = self._rebuild.at_positions([asked[i] for i in chosen])
            for i, (one, rebuilt) in zip(chosen, self._rebuild(own.copy, history), strict=True):
                self._mark(LATE, causes[i], one, rebuilt, self._is_of_events)
        for given, causes_of_one in zip(asked, causes, strict=True):
            if self._examples and any(not causes_of_one[name] for name in causes_of_one if name in self._statistics):
                self._examples -= 1
                history = self._rebuild.history_at(given.line.position)
                for one, rebuilt in self._rebuild([given].copy, history):
                    self._mark(LATE, causes_of_one, one, rebuilt, self._statistics.__contains__)

    def _find_zones(self, asked: list[Asked], causes: list[dict[str, str]]) -> None:
        """Rebuilds some requests at the times of other time zones."""
        chosen = [i for i, own in enumerate(causes) if any(not own[name] for name in own if self._is_of_events(name))]
        chosen = chosen[: self._examples]
        self._examples -= len(chosen)
        tried = [(i, hours) for i in chosen for hours in _ZONES]
        shifted = [asked[i]._replace(now=asked[i].now + 3600 * hours) for i, hours in tried]
        for (i, hours), (one, rebuilt) in zip(tried, self._rebuild(shifted.copy), strict=True):
            if not any(map(self._is_of_events, self._differing(one, rebuilt))):
                zone = f"time zone: times of events are {-hours:+g} h from the log's"
                self._mark(zone, causes[i], one, rebuilt, self._is_of_events)

    def _mark(
        self, cause: str, own: dict[str, str], one: Asked, rebuilt: Rebuilt, is_concerned: Callable[[str], bool]
    ) -> None:
        """Names the cause of features that are equal now."""
        for name in own:
            if not own[name] and is_concerned(name) and rebuilt.digest(name) == one.line.features[name]:
                own[name] = cause

    def _is_of_events(self, name: str) -> bool:
        return name in (LENGTH, WEIGHTS, AGE) or (name in self._specs and self._specs[name].role == "history")

    def _kind(self, name: str) -> str:
        if name == SCORE:
            return SCORE
        if self._is_of_events(name):
            return "history"
        if name in self._statistics:
            return "statistics of the past"
        config = self._rebuild.config.resolved()
        column = self._specs[name].column if name in self._specs else name
        if column in (config.user, config.item):
            return "id"
        if name in self._specs and self._specs[name].semantic:
            return "column of the item"
        return next((f"column of the {of}" for of in ("user", "item") if column in config.names(of)), "context")

    def _cause(self, asked: Asked, name: str, own: dict[str, str]) -> str:
        """Returns the likely cause of a difference that is neither late nor of a time zone."""
        kind, config = self._kind(name), self._rebuild.config.resolved()
        column = self._specs[name].column if name in self._specs else name
        if kind in ("id", "context") or (kind.startswith("column") and column in asked.columns):
            return "dictionary: the request has the text, and its id differs"
        if kind.startswith("column"):
            return f"{kind} in the state is another"
        if kind == "history" and not {AGE, LENGTH, WEIGHTS} & {*own}:
            if column == config.item:
                return "dictionary: the same events have other ids"
            return "column of the same events in the state is another"
        return "the state has other events" if kind == "history" else ""

    def _count(self, line: Line, causes: dict[str, str], examples: dict[str, dict[str, object]]) -> None:
        report = self.report
        report.differing += 1
        report.late += {*causes.values()} == {LATE}
        report.unexplained += not {*causes.values()} <= {LATE, OTHER_VERSION, UNAVAILABLE}
        for name, cause in causes.items():
            one = report.features.setdefault(name, Difference(self._kind(name)))
            one.requests += 1
            one.causes[cause or "unknown"] += 1
            if not one.example and name in examples:
                asked = asked_of(line, self._rebuild.config)
                one.example = {"request": line.id, "user": asked.user, "candidate": asked.items[0], **examples[name]}
