"""A history policy, which decides what stays of a user's history: a readable table by segment, surface and dwell."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jfi.history_policies.log import EventLog, check_range, check_surfaces
from jfi.history_policies.policy_file import as_tree, read_policy, write_policy
from jfi.history_policies.relevance import bins_of
from jfi.history_policies.reports import SegmentReport, SurfaceReport
from jfi.history_policies.segments import STATISTICS, Segments, statistics_of
from jfi.history_policies.select import Selected, Tables, select_events
from jfi.utils.suggest import suggest

#: Rows whose statistics are computed together.
_ROWS = 1 << 21


@dataclass(frozen=True)
class Policy:
    """Which events stay in a user's history, and as how many each counts. `fit` makes one.

    Args:
        surfaces: G names.
        edges: by surface, ascending, seconds: bin b has `edges[b - 1] <= dwell < edges[b]`.
        newest: how many of a history's newest events stay whatever their cell.
        segments: K segments, the least active one first.
        segment_reports: beside the segments.
        surface_reports: K · G, surface by surface of the first segment, then of the next.
        silhouettes: by number of segments that was tried.
        agreement: share of users that both halves of the time put into the same segment; None where no user has events
            in both.
        agreement_by_chance: the share that would agree if the halves were independent.
        notes: what was clipped and where the policy falls back, in sentences.

    Raises:
        ValueError: the parts do not go together.
    """

    surfaces: tuple[str, ...]
    edges: tuple[tuple[float, ...], ...]
    newest: int
    segments: Segments
    segment_reports: tuple[SegmentReport, ...]
    surface_reports: tuple[SurfaceReport, ...]
    silhouettes: dict[int, float | None]
    agreement: float | None
    agreement_by_chance: float | None
    notes: tuple[str, ...]

    def __post_init__(self) -> None:
        check_surfaces(self.surfaces)
        _must(len(self.edges) == len(self.surfaces), "edges must have a list for each surface")
        for name, edges in zip(self.surfaces, self.edges, strict=True):
            ascending = all(a < b for a, b in pairwise(edges))
            _must(ascending and np.isfinite(edges).all(), f"edges of '{name}' must be finite and ascend")
        _must(self.newest >= 0, f"newest must be at least 0, got {self.newest}")
        kinds = self.segments
        _must(1 <= len(kinds.names) == len(kinds.centers), "segments must have a center for each name")
        for row in (kinds.mean, kinds.scale, *kinds.centers):
            _must(len(row) == len(STATISTICS), f"means, scales and centers must have {len(STATISTICS)} numbers")
        names = tuple(one.name for one in self.segment_reports)
        _must(names == kinds.names, f"the segments are {list(kinds.names)}, but reports are of {list(names)}")
        for one in self.segment_reports:
            _must(one.cap is None or one.cap >= max(1, self.newest), f"cap of '{one.name}' must be at least newest")
        expected = [(segment, surface) for segment in names for surface in self.surfaces]
        found = [(one.segment, one.surface) for one in self.surface_reports]
        _must(found == expected, "there must be one report for each segment and surface, in their order")
        for i, one in enumerate(self.surface_reports):
            bins = len(self.edges[i % len(self.surfaces)]) + 2
            for column in (one.events, one.conversions, one.log_odds, one.keep, one.weight):
                what = f"the report of '{one.segment}' on '{one.surface}' must have {bins} bins"
                _must(len(column) == bins, what)
            fits = all(np.isfinite(w) and w >= 0 for w in one.weight)
            _must(fits, f"weights of '{one.segment}' on '{one.surface}' must be finite and at least 0")

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
    def tables(self) -> Tables:
        """Returns CPU tables that decide which events stay; an event of an unknown surface stays with weight 1."""
        count, bins = len(self.segments.names), self.num_bins
        keep = torch.ones(count, len(self.surfaces) + 1, bins, dtype=torch.bool)
        weight = torch.ones(keep.shape)
        for i, one in enumerate(self.surface_reports):
            place = divmod(i, len(self.surfaces))
            # Bins that a surface lacks stay unused; that of unknown dwell is the last of all.
            for table, values in ((keep, one.keep), (weight, one.weight)):
                row = torch.tensor(values, dtype=table.dtype)
                table[place][: len(values) - 1], table[place][-1] = row[:-1], row[-1]
        caps = [one.cap for one in self.segment_reports]
        most = torch.iinfo(torch.int32).max
        numbers = [most if one is None else min(one, most) for one in caps]
        cap = None if caps == [None] * count else torch.tensor(numbers, dtype=torch.int32)
        weighted = bool((weight != 1).any())
        return Tables(keep.flatten(1), weight.flatten(1) if weighted else None, cap, self.newest)

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
        bins = self.num_bins
        cells = np.full(len(surface), len(self.surfaces) * bins, np.int16)
        for place, edges in enumerate(self.edges):
            rows = np.flatnonzero(surface == place)
            of = bins_of(dwell[rows], np.array(edges, np.float32))
            of[of == len(edges) + 1] = bins - 1
            cells[rows] = place * bins + of
        return cells

    def segments_before(self, log: EventLog, is_event: np.ndarray | None = None) -> np.ndarray:
        """`[N]` int8: the segment of each row's user, by the user's events that are strictly older than the row.

        Running counts decide, so a row's segment depends neither on the future nor on events of its own time. Without
        an older event it is segment 0.

        Args:
            log: with the policy's surfaces.
            is_event: `[N]` bool, the rows that are events of histories and count; None for all.

        Raises:
            ValueError: the log has other surfaces.
        """
        self.check_log(log)
        if is_event is None:
            ordered, rows = log.ordered, log.ordered.order
            ends, first = ordered.moments(), ordered.first[ordered.owner]
        else:
            counted = np.flatnonzero(is_event)
            names = ("user", "time", "surface", "dwell", "session")
            parts = {one: getattr(log, one) for one in names}
            parts = {one: None if array is None else array[counted] for one, array in parts.items()}
            ordered = EventLog(**parts, surfaces=log.surfaces).ordered
            all_rows, rows = log.ordered, log.ordered.order
            place = np.concatenate([[0], np.cumsum(is_event[rows])])  # events before each row, in the order of rows
            ends, first = place[all_rows.moments()], place[all_rows.first[all_rows.owner]]
        found = np.empty(len(log), np.int8)
        for begin in range(0, len(rows), _ROWS):  # bounds the memory beside the prefix sums
            part = slice(begin, begin + _ROWS)
            found[rows[part]] = self.segments.assign(
                statistics_of(ordered, len(self.surfaces), first[part], ends[part])
            )
        return found

    def segments_of(self, log: EventLog) -> tuple[np.ndarray, np.ndarray]:
        """Users, `[U]`, and the segment of each, `[U]` int8, by all of their events in the log, as for a request.

        Raises:
            ValueError: the log has other surfaces.
        """
        self.check_log(log)
        ordered = log.ordered
        of = self.segments.assign(statistics_of(ordered, len(self.surfaces), ordered.first[:-1], ordered.first[1:]))
        return log.user[ordered.order[ordered.first[:-1]]], of

    def check_log(self, log: EventLog) -> None:
        """Raises ValueError unless the log's surfaces are the policy's, in their order."""
        if tuple(log.surfaces) != self.surfaces:
            what = f"must be the policy's, {list(self.surfaces)}, got {list(log.surfaces)}"
            raise ValueError(f"surfaces of the log {what}; `surface_ids` translates them")

    def select(
        self, cells: Tensor | np.ndarray, segments: Tensor | np.ndarray, lengths: Tensor | np.ndarray
    ) -> Selected:
        """The events of packed histories that stay, on the CPU; what a loader calls before it reads their fields.

        Args:
            cells: `[S]` of `cells`, packed by history, the oldest first.
            segments: `[B]`, of the histories.
            lengths: `[B]`, their sum S.

        Example:
            >>> stay = policy.select(cells[history], segments[samples], lengths)  # doctest: +SKIP
            >>> history, lengths = history[stay.rows.numpy()], stay.lengths.numpy()  # doctest: +SKIP
        """
        cells, segments, lengths = map(torch.as_tensor, (cells, segments, lengths))
        offsets = torch.zeros(lengths.size(0) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        check_packed(self, cells, segments, offsets)
        return select_events(self.tables, cells, segments, offsets)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the policy, in hexadecimal: two runs with the same one remove and boost the same."""
        return hashlib.sha256(json.dumps(as_tree(self), sort_keys=True).encode()).hexdigest()

    def save(self, path: Path | str) -> None:
        """Writes the policy as JSON, whole or not at all."""
        write_policy(Path(path), self)

    @staticmethod
    def load(path: Path | str) -> "Policy":
        """Loads what `save` wrote, edited by hand or not.

        Raises:
            DamagedFileError: the file is missing, or is no policy; one line that names it.
        """
        return read_policy(Path(path), Policy)


def check_packed(policy: Policy, cells: Tensor, segments: Tensor, offsets: Tensor) -> None:
    """Checks packed histories on the CPU.

    Raises:
        ValueError: cells, segments or lengths that do not fit each other or the policy.
    """
    count = offsets.size(0) - 1
    if segments.dim() != 1 or segments.size(0) != count:
        raise ValueError(f"segments must have one for each of {count} histories, got shape {list(segments.shape)}")
    if cells.dim() != 1 or cells.size(0) != int(offsets[-1]):
        raise ValueError(f"cells must be [{int(offsets[-1])}], the sum of lengths, got shape {list(cells.shape)}")
    for name, values, most in (("cells", cells, policy.num_cells), ("segments", segments, len(policy.segments.names))):
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < most:
            raise ValueError(f"{name} must be from 0 to {most - 1}, got {int(values.min())} to {int(values.max())}")


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
