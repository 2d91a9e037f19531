"""Statistics of the past for requests, of the log as it was at the export.

An artifact has the counters of all users and items, see `jfi.events.counters`. A request then has the ids of the
user and of the candidates; what the model reads of a user or an item that the log does not have is what it read in
training before their first row.

past.safetensors    the counters
past.json           the ids of the users and of the items that they are of
"""

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jfi.events.counters import index_of_counters
from jfi.events.point_in_time import Queries
from jfi.events.statistics import Statistics
from jfi.serving.artifact import PAST, PAST_IDS
from jfi.serving.schema import PastFields
from jfi.serving.tables import write_tensors
from jfi.serving.vocabulary_tables import KnownValues
from jfi.utils.files import write_file
from jfi.utils.json_files import read_json


class CountersError(ValueError):
    """Counters that are not those of their fields."""


@dataclass(frozen=True)
class PastIds:
    """The contents of past.json."""

    users: list[str]
    items: list[str]


@dataclass(frozen=True)
class LogCounters:
    """The counters of a log as of its end.

    Args:
        fields: of requests.
        ids: of the users and items.
        arrays: of `jfi.events.counters.counters_of`.
    """

    fields: PastFields
    ids: PastIds
    arrays: dict[str, np.ndarray]

    def save(self, folder: Path) -> None:
        """Writes both files."""
        arrays = {name: np.ascontiguousarray(one) for name, one in self.arrays.items()}
        write_tensors(folder / PAST, lambda: save_file(arrays, folder / PAST))
        write_file(folder / PAST_IDS, msgspec.json.encode(self.ids))

    @classmethod
    def load(cls, folder: Path, fields: PastFields) -> "LogCounters":
        """Reads both files.

        Raises:
            CountersError: they are not of these fields.
        """
        ids = read_json(folder / PAST_IDS, PastIds, CountersError)
        try:
            return cls(fields, ids, load_file(folder / PAST))
        except SafetensorError as error:
            raise CountersError(f"{PAST}: {error}") from None


class RequestStatistics:
    """Looks up the statistics of requests.

    Args:
        counters: of the log.

    Raises:
        CountersError: the counters are not those that the fields need.
    """

    def __init__(self, counters: LogCounters) -> None:
        self.fields = fields = counters.fields
        self._users, self._items = KnownValues(counters.ids.users), KnownValues(counters.ids.items)
        sizes = {f"column {name}": column.size for name, column in fields.columns.items()}
        try:
            known = fields.num_known, sizes, fields.is_implicit, fields.sets
            index = index_of_counters(counters.arrays, len(counters.ids.items), *known)
            made = fields.groups, fields.categories, fields.window, fields.half_lives, fields.numbers, fields.values
            self._statistics = Statistics(index, *made)
            none = {column.key: np.zeros((1, column.slots), np.int64) for column in fields.columns.values()}
            self("", [""], none)
        except (KeyError, IndexError, ValueError) as error:
            raise CountersError(f"{PAST} lacks what {', '.join(fields.groups)} need: {error!r}") from None

    def __call__(
        self, user: str | None, items: list[str | None], ids: dict[str, np.ndarray], now: float | None = None
    ) -> dict[str, np.ndarray]:
        """Returns by name the statistics `[R]` float64 of candidates, NaN for a missing value.

        Args:
            user: id of the user, None for a new one.
            items: `[R]` ids of the candidates.
            ids: by key of `fields.columns` the ids `[R, K]` of the candidates' values, 0 for none.
            now: seconds; None for the clock's. A time before the end of the log counts as right after it.
        """
        until = np.nextafter(self.fields.until, np.inf)
        seconds = max(time.time() if now is None else now, until)
        queries = Queries(
            np.repeat(self._users.ids([user]) - 1, len(items)),
            np.full(len(items), seconds),
            self._items.ids(items) - 1,
            ids={f"column {name}": ids[column.key] for name, column in self.fields.columns.items()},
        )
        return self._statistics.compute(queries)
