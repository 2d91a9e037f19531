"""A history policy, which decides what stays of a user's history: a readable table by segment, surface and dwell."""

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, to_builtins

from jfi.history_policies.log import EventLog, check_range, check_surfaces
from jfi.history_policies.relevance import Cells
from jfi.history_policies.segments import Segments, statistics_of
from jfi.history_policies.select import CellTables, Selected, select_events
from jfi.utils.errors import suggest
from jfi.utils.files import DamagedFileError, reading_file, write_file
from jfi.utils.json_files import decode_json

_FORMAT = "jfi history policy 3"
#: Rows whose statistics are computed together.
_ROWS = 1 << 21

Count = Annotated[int, Meta(ge=0)]
Weight = Annotated[float, Meta(ge=0)]


class SegmentReport(Struct, frozen=True, forbid_unknown_fields=True):
    """A segment of users and what was seen of it.

    Attributes:
        name: of the segment.
        users: in the log that the policy was fitted to.
        events: of these users.
        conversions: of these events.
        removed: share of the segment's events whose cells are not kept; the newest of a history stay all the same.
        cap: the longest history, or None for no limit.
        boosted: whether its events have weights.
        is_global: whether the relevance is that of all users, since none or all of the segment's events have a
            conversion.
    """

    name: str
    users: Count
    events: Count
    conversions: Count
    removed: float
    cap: int | None
    boosted: bool
    is_global: bool


class SurfaceReport(Struct, frozen=True, forbid_unknown_fields=True):
    """The events of one segment on one surface: what dwell says of conversions, and what stays.

    Lists are by bin of dwell; the last entry is that of events whose dwell is not known.

    Attributes:
        segment: its name.
        surface: its name.
        events: counts by bin.
        conversions: those of them with a conversion.
        log_odds: relevance of each bin: its log-odds of a conversion less the segment's, shrunk towards 0.
        keep: whether events stay.
        weight: as how many events an event counts.
        information: corrected mutual information of an event's bin and its conversion, in nats.
        entropy: of an event's conversion, in nats.
        intercept: of logit P(conversion) = intercept + slope · log(1 + dwell); None where nothing could be fitted.
        slope: of that.
    """

    segment: str
    surface: str
    events: tuple[Count, ...]
    conversions: tuple[Count, ...]
    log_odds: tuple[float, ...]
    keep: tuple[bool, ...]
    weight: tuple[Weight, ...]
    information: float
    entropy: float
    intercept: float | None
    slope: float | None


class Policy(Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """Which events stay in a user's history, and as how many each counts. `fit` makes one; its file has these fields.

    Attributes:
        surfaces: G names.
        edges: by surface, ascending, seconds: bin b has `edges[b - 1] <= dwell < edges[b]`.
        newest: how many of a history's newest events stay whatever their cell.
        segments: K segments, the least active one first.
        segment_reports: one for each of the segments.
        surface_reports: K · G, surface by surface of the first segment, then of the next.
        notes: what was clipped and where the policy falls back, in sentences.
        format: of the file.

    Raises:
        ValueError: the parts do not go together.
    """

    surfaces: tuple[str, ...]
    edges: tuple[tuple[float, ...], ...]
    newest: Count
    segments: Segments
    segment_reports: tuple[SegmentReport, ...]
    surface_reports: tuple[SurfaceReport, ...]
    notes: tuple[str, ...]
    format: str = _FORMAT

    def __post_init__(self) -> None:
        check_surfaces(self.surfaces)
        _must(len(self.edges) == len(self.surfaces), "edges must have a list for each surface")
        for name, edges in zip(self.surfaces, self.edges, strict=True):
            _must(all(a < b for a, b in pairwise(edges)), f"edges of '{name}' must ascend")
        names = tuple(one.name for one in self.segment_reports)
        _must(names == self.segments.names, f"segments are {list(self.segments.names)}, reports are of {list(names)}")
        for one in self.segment_reports:
            _must(one.cap is None or one.cap >= max(1, self.newest), f"cap of '{one.name}' must be at least newest")
        expected = [(segment, surface) for segment in names for surface in self.surfaces]
        found = [(one.segment, one.surface) for one in self.surface_reports]
        _must(found == expected, "there must be one report for each segment and surface, in their order")
        for i, one in enumerate(self.surface_reports):
            bins = len(self.edges[i % len(self.surfaces)]) + 2
            columns = (one.events, one.conversions, one.log_odds, one.keep, one.weight)
            what = f"the report of '{one.segment}' on '{one.surface}' must have {bins} bins"
            _must(all(len(column) == bins for column in columns), what)

    @property
    def keeps_all(self) -> bool:
        """Returns whether nothing is removed and every weight is 1, so that applying changes nothing."""
        tables = self.tables
        return bool(tables.keep.all()) and tables.weight is None and tables.cap is None

    @property
    def is_weighted(self) -> bool:
        """Returns whether any event counts as more or less than one."""
        return self.tables.weight is not None

    @property
    def num_bins(self) -> int:
        """The most bins of a surface, with that of unknown dwell."""
        return max(len(edges) for edges in self.edges) + 2

    @property
    def num_cells(self) -> int:
        """C; the cells behind those of the surfaces are for a surface that the policy does not know."""
        return (len(self.surfaces) + 1) * self.num_bins

    @cached_property
    def tables(self) -> CellTables:
        """Returns the tables that decide which events stay; an event of an unknown surface stays with weight 1."""
        count, bins = len(self.segments.names), self.num_bins
        keep = np.ones((count, len(self.surfaces) + 1, bins), bool)
        weight = np.ones(keep.shape, np.float32)
        for i, one in enumerate(self.surface_reports):
            place = divmod(i, len(self.surfaces))
            # Bins that a surface lacks stay unused; that of unknown dwell is the last of all.
            for table, values in ((keep, one.keep), (weight, one.weight)):
                table[place][: len(values) - 1], table[place][-1] = values[:-1], values[-1]
        caps = [one.cap for one in self.segment_reports]
        largest = np.iinfo(np.int32).max
        numbers = [largest if one is None else min(one, largest) for one in caps]
        cap = None if caps == [None] * count else np.array(numbers, np.int32)
        weighted = weight.reshape(count, -1) if (weight != 1).any() else None
        return CellTables(keep.reshape(count, -1), weighted, cap, self.newest)

    def surface_ids(self, names: Iterable[str | None]) -> np.ndarray:
        """`[len(names)]` int64: the policy's index of each surface of the data; None, for a missing value, is -1.

        Raises:
            ValueError: a surface that the policy was not fitted to.
        """
        place = {name: i for i, name in enumerate(self.surfaces)} | {None: -1}
        found = []
        for name in names:
            if name not in place:
                what = f"the policy was fitted to other surfaces than the data's: it has no surface '{name}'"
                raise ValueError(f"{what}; {suggest(str(name), self.surfaces)}")
            found.append(place[name])
        return np.array(found, np.int64)

    def cells(self, surface: np.ndarray, dwell: np.ndarray) -> np.ndarray:
        """`[N]` int16, the cell of each event: its surface and the bin of its dwell. Independent of the user.

        Args:
            surface: `[N]` integers, indices of `surfaces`, -1 for another one.
            dwell: `[N]` seconds, NaN where missing.

        Raises:
            ValueError: an index that is no surface.
        """
        check_range("surface", surface, -1, len(self.surfaces) - 1)
        return self._cells(surface, dwell)

    @cached_property
    def _cells(self) -> Cells:
        return Cells(self.edges)

    def segments_before(self, log: EventLog) -> np.ndarray:
        """`[N]` int8: the segment of each row's user, by the user's events that are strictly older than the row.

        Running counts decide, so a row's segment depends neither on the future nor on events of its own time. Without
        an older event it is segment 0.

        Args:
            log: with the policy's surfaces.

        Raises:
            ValueError: the log has other surfaces.
        """
        self.check_log(log)
        ordered, found = log.ordered, np.empty(len(log), np.int8)
        ends, first = ordered.moments(), ordered.first[ordered.owner]
        for begin in range(0, len(log), _ROWS):  # bounds the memory of the statistics
            part = slice(begin, begin + _ROWS)
            statistics = statistics_of(ordered, len(self.surfaces), first[part], ends[part])
            found[ordered.order[part]] = self.segments.assign(statistics)
        return found

    def check_log(self, log: EventLog) -> None:
        """Raises ValueError unless the log's surfaces are the policy's, in their order."""
        if tuple(log.surfaces) != self.surfaces:
            what = f"must be the policy's, {list(self.surfaces)}, got {list(log.surfaces)}"
            raise ValueError(f"surfaces of the log {what}; `surface_ids` translates them")

    def select(self, cells: np.ndarray, segments: np.ndarray, lengths: np.ndarray) -> Selected:
        """The events of packed histories that stay; what a loader calls before it reads their fields.

        Args:
            cells: `[S]` of `cells`, packed by history, the oldest first.
            segments: `[B]`, of the histories.
            lengths: `[B]`, their sum S.

        Raises:
            ValueError: cells, segments or lengths that do not fit each other or the policy.

        Example:
            >>> stay = policy.select(cells[history], segments[samples], lengths)  # doctest: +SKIP
            >>> history, lengths = history[stay.rows], stay.lengths  # doctest: +SKIP
        """
        self.check_packed(cells, segments, lengths)
        return select_events(self.tables, cells, segments, lengths)

    def check_packed(self, cells: np.ndarray, segments: np.ndarray, lengths: np.ndarray) -> None:
        """Raises ValueError unless cells, segments and lengths fit each other and the policy."""
        count, events = len(lengths), int(lengths.sum())
        if segments.shape != (count,):
            raise ValueError(f"segments must have one for each of {count} histories, got shape {list(segments.shape)}")
        if cells.shape != (events,):
            raise ValueError(f"cells must be [{events}], the sum of lengths, got shape {list(cells.shape)}")
        check_range("cells", cells, 0, self.num_cells - 1)
        check_range("segments", segments, 0, len(self.segments.names) - 1)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the policy, in hexadecimal: two runs with the same one remove and boost the same."""
        return hashlib.sha256(json.dumps(to_builtins(self), sort_keys=True).encode()).hexdigest()

    def save(self, path: Path | str) -> None:
        """Writes the policy as JSON, whole or not at all."""
        write_file(Path(path), _text(to_builtins(self), "\n") + "\n")

    @staticmethod
    def load(path: Path | str) -> "Policy":
        """Loads what `save` wrote, edited by hand or not.

        Raises:
            DamagedFileError: the file is missing, or is no policy; one line that names it.
        """
        with reading_file(path, DamagedFileError):
            content = Path(path).read_bytes()
        found = decode_json(content, dict[str, Any], path, DamagedFileError).get("format")
        if found != _FORMAT:
            what = f"its format is {found!r}, must be {_FORMAT!r}"
            raise DamagedFileError(f"{path} is not a policy of this version of jfi: {what}; fit it again")
        return decode_json(content, Policy, path, DamagedFileError)


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _text(value: Any, line: str) -> str:
    """Returns JSON, indented but for lists of numbers and texts; `line` is a line break and the indentation."""
    inner = line + " "
    if isinstance(value, dict) and value:
        parts = [f"{json.dumps(name, ensure_ascii=False)}: {_text(one, inner)}" for name, one in value.items()]
        return f"{{{inner}{f',{inner}'.join(parts)}{line}}}"
    if isinstance(value, list | tuple) and any(isinstance(one, dict | list | tuple) for one in value):
        return f"[{inner}{f',{inner}'.join(_text(one, inner) for one in value)}{line}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
