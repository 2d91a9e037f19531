"""The ids that a model reads, of the records of a state."""

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jfi.serving.schema import Field, Schema
from jfi.serving.validation import KnownValues
from jfi.state.layout import KINDS, POLICY_KINDS, Column, EventLayout
from jfi.state.stores import StateError
from jfi.utils.encoding import HashBuckets, HashedIds, cross, quantile_ids

Encoding = KnownValues | HashBuckets | HashedIds
#: Gives the texts of numbers of a dictionary.
Texts = Callable[[str, list[int]], list[str | None]]
#: Crosses whose ids are kept in memory.
_MAX_CROSSES = 1_000_000
_SHOWN = {"text": "texts", "texts": "lists of texts", "number": "numbers", "sid": "semantic IDs"}


class ModelIds:
    """Turns records into the ids of the events that a model reads.

    Args:
        known: by column with ids what gives them, as of RequestReader.

    Raises:
        StateError: the records lack what the model reads.
    """

    def __init__(self, layout: EventLayout, schema: Schema, known: Mapping[str, Encoding], texts: Texts) -> None:
        for one in schema.event_fields:
            for name in one.columns if one.kind == "cross" else [one.name] if one.kind in KINDS else []:
                check_column("events", name, layout.columns.get(name), one)
        for role, one in ({} if schema.policy is None else schema.policy.fields()).items():
            column = layout.columns.get(one.name)
            kinds = {POLICY_KINDS[role], "text" if role == "session" else None}  # the model may read sessions too
            if column is None or column.kind not in kinds:
                what = f"no field '{one.name}' that is the {role} of the model's policy"
                raise StateError(f"the events of the state have {what}; load them by `jfi state load`")
        has_sids = any(one.kind == "sid" for one in schema.event + schema.candidate)
        if has_sids and layout.info.codec not in (schema.codec, None):
            what = f"semantic IDs of the codec {layout.info.codec}, and the model reads those of {schema.codec}"
            raise StateError(f"the state has {what}; load it by `jfi state load`")
        self._fields = [one for one in schema.event_fields if one.kind != "age"]
        self._ids = {
            one.name: Ids(one.name, known[one.name], one, texts)
            for one in self._fields
            if one.kind in ("category", "slots")
        }
        self._edges = {one.name: np.array(one.edges) for one in self._fields if one.kind == "quantile"}
        self._crosses = {
            one.name: _CrossIds(one, known[one.name], texts) for one in self._fields if one.kind == "cross"
        }

    def __call__(
        self, records: np.ndarray, texts: Mapping[str, Sequence[str | None]] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns by key of the model's inputs the ids `[S]` int64 of records `[S]`.

        Args:
            texts: of new events, whose texts may have no numbers yet, by column of texts `[S]`, of lists of texts
                `[S * size]`; they are read in place of numbers, and crosses are left out.
        """
        found = {}
        for one in self._fields:
            if one.kind == "cross":
                if texts is None:
                    found[one.keys[0]] = self._crosses[one.name]([records[name] for name in one.columns])
            elif one.kind == "quantile":
                found[one.keys[0]] = quantile_ids(records[one.name], self._edges[one.name], one.default)
            elif one.kind == "sid":
                found[one.keys[0]] = records[one.name].astype(np.int64)
            else:
                numbers, coded = records[one.name], self._ids[one.name]
                ids = coded(numbers) if texts is None else coded.of_texts(texts[one.name]).reshape(numbers.shape)
                # A state may keep more values of a list than the model reads.
                found |= zip(one.keys, [ids] if one.kind == "category" else ids.T, strict=False)
        return found


def check_column(of: str, name: str, column: Column | None, one: Field) -> None:
    """Checks that records have a column of a field that a model reads.

    Args:
        of: what the records are of, "events", "items" or "users".
    """
    kind, load = "text" if one.kind == "cross" else KINDS[one.kind], "load them by `jfi state load`"
    if column is None:
        raise StateError(f"the {of} of the state have no field '{name}', which the model reads; {load}")
    if column.kind != kind:
        had = _SHOWN.get(column.kind, "hashes of sessions")
        raise StateError(
            f"the field '{name}' of the state's {of} has {had}, and the model reads {_SHOWN[kind]}; {load}"
        )
    if kind == "texts" and column.size and column.size < len(one.keys):
        what = f"the first {column.size} values of a list, and the model reads {len(one.keys)}"
        raise StateError(f"the field '{name}' of the state's {of} has {what}; {load}")


class Ids:
    """The ids of a column's numbers, which are read as they come up."""

    def __init__(self, values: str, known: Encoding, one: Field, texts: Texts) -> None:
        self._values, self._known, self._texts = values, known, texts
        self._default = one.default if one.kind == "category" else None
        #: By number the id, -1 where it was not read yet.
        self._ids = np.full(1024, -1, np.int64)
        self._ids[0] = self.of_texts([None])[0]
        self._lock = threading.Lock()  # events are counted in another thread than requests are scored

    def of_texts(self, texts: Sequence[str | None]) -> np.ndarray:
        """Returns the ids `[N]` of texts, with the default in place of missing ones."""
        return self._known.ids([self._default if text is None else text for text in texts])

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the ids of numbers of any shape."""
        try:
            found = self._ids.take(numbers)
        except IndexError:
            found = None
        if found is not None and (not found.size or found.min() >= 0):
            return found
        with self._lock:
            self._read(np.unique(numbers))
            return self._ids.take(numbers)

    def _read(self, numbers: np.ndarray) -> None:
        is_new = numbers >= len(self._ids)
        is_new[~is_new] = self._ids[numbers[~is_new]] < 0
        lacking = numbers[is_new]
        ids = self.of_texts(self._texts(self._values, lacking.tolist()))  # first: a damaged number has no text
        if len(lacking) and (most := int(lacking.max())) >= len(self._ids):
            more = np.full(max(2 * len(self._ids), most + 1) - len(self._ids), -1, np.int64)
            self._ids = np.append(self._ids, more)
        self._ids[lacking] = ids


class _CrossIds:
    """The ids of crosses of columns' numbers."""

    def __init__(self, one: Field, known: Encoding, texts: Texts) -> None:
        self._columns, self._known, self._texts, self._default = one.columns, known, texts, one.default
        self._ids: dict[tuple[int, ...], int] = {}

    def __call__(self, numbers: list[np.ndarray]) -> np.ndarray:
        """Returns the ids `[S]` of the columns' numbers `[S]`."""
        rows = list(zip(*(one.tolist() for one in numbers), strict=True))
        if lacking := [row for row in dict.fromkeys(rows) if row not in self._ids]:
            columns = zip(self._columns, zip(*lacking, strict=True), strict=True)
            crossed = cross(*(self._texts(name, list(own)) for name, own in columns))
            if self._default is not None:
                crossed = [self._default if text is None else text for text in crossed]
            self._ids |= zip(lacking, self._known.ids(crossed).tolist(), strict=True)
            if len(self._ids) > _MAX_CROSSES:
                self._ids = dict(zip(rows, map(self._ids.__getitem__, rows), strict=True))
        return np.fromiter(map(self._ids.__getitem__, rows), np.int64, len(rows))
