"""Types of the JSON that a server reads, made of the fields of a schema, and the arrays of a column's values.

msgspec decodes a body as its type, which also gives the JSON Schema; a fault is refused with its place.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import astuple

from jfi.semantic_ids.packing import UNKNOWN_SID, Layout
from jfi.serving.schema import Field
from jfi.utils.encoding import LARGEST_NUMBER, UNKNOWN, HashBuckets, HashedIds, Vocabulary, are_canonical, text_of
from jfi.utils.errors import suggest

#: Values of a field, row by row: as JSON has them, or an array of those that `numbers` has read.
Values = Sequence[object] | np.ndarray
#: From the index of a row and the name of a field, or "" for the row, to the place in the request, for messages.
Place = Callable[[int, str], str]

#: Most values of a list in a request. Training keeps all values of a user or a target.
MAX_VALUES = 1000
#: The year 5138 in seconds: times in milliseconds are above.
LATEST = 1e11
#: Bytes of the longest id of a user; LMDB's keys have 511 bytes at most.
LONGEST_ID = 480
#: Characters of the longest text of a value.
LONGEST_TEXT = 1024
#: Most lists and objects of a body, which take up to 0.2 us each to parse: no other request is answered meanwhile.
MAX_PARTS = 2**16
#: Bytes of the largest body in which the key is looked for that an object has twice.
_SEARCHED = 2**16

VALUE = Annotated[str, Meta(max_length=LONGEST_TEXT)] | int | float | bool | None
_VALUES = Annotated[list[VALUE], Meta(max_length=MAX_VALUES)] | None
#: By kind of field, the type of its values in a request. A semantic ID may be text, since JavaScript rounds integers
#: over 2^53, and 5.0 is an integer of JSON Schema.
TYPES: dict[str, Any] = {
    "category": VALUE,
    "categories": _VALUES,
    "slots": _VALUES,
    "number": Annotated[float, Meta(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)] | None,  # another one is none of float32
    "quantile": float | None,
    "age": Annotated[float, Meta(ge=0, description="seconds")],
    "sid": Annotated[int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**63 - 1})]
    | Annotated[float, Meta(extra_json_schema={"minimum": -(2.0**53), "maximum": 2.0**53, "multipleOf": 1})]
    | Annotated[str, Meta(extra_json_schema={"pattern": "^(-?[0-9]{1,19})?$"})]
    | None,
}


class BadRequestError(ValueError):
    """A fault in a request, as one line that names the field."""


#: Values of the largest vocabulary whose dict stays in the caches of a CPU. In one of a million values a look-up takes
#: four cache misses, one after the other: 1 µs.
_FEW = 2**12


class KnownValues(Vocabulary):
    """A Vocabulary that looks up many of many values faster, by their hashes of 64 bits.

    The hashes are Python's, which differ from process to process, so nobody can choose values that share one.

    Args:
        values: distinct strings.

    Example:
        >>> KnownValues(["drama", "war"]).ids(["war", None, "opera", "drama"])
        array([2, 0, 0, 1])
    """

    def __init__(self, values: Sequence[str]) -> None:
        super().__init__(values)
        if len(values) <= _FEW:
            return
        hashes, largest = _hashes(values), np.iinfo(np.uint64).max
        order = np.argsort(hashes, kind="stable")
        #: The hashes, ascending, and the ids of their values.
        self._hashes, self._ids_of_hashes = np.append(hashes[order], largest), np.append(order + 1, UNKNOWN)
        bits = len(values).bit_length() + 1
        self._shift = np.uint64(64 - bits)
        #: By the first bits of a hash the index of the first one with these, and the most that share them.
        self._first = hashes[order].searchsorted(np.arange(2**bits, dtype=np.uint64) << self._shift)
        self._most = int(np.diff(self._first, append=len(values)).max())

    def ids(self, values: Sequence[object]) -> np.ndarray:
        """`[N]` int64 ids of N values; `UNKNOWN` for one that is not in the vocabulary, such as None or a number."""
        if len(self.values) <= _FEW:
            return super().ids(values)
        hashes = _hashes(values)
        index = self._first.take((hashes >> self._shift).view(np.int64))
        for _ in range(self._most):
            index += self._hashes.take(index) < hashes
        return np.where(self._hashes.take(index) == hashes, self._ids_of_hashes.take(index), UNKNOWN)


def _hashes(values: Sequence[object]) -> np.ndarray:
    return np.fromiter(map(hash, values), np.int64, len(values)).view(np.uint64)


def id_type(longest: int) -> Any:
    """Returns the type of ids, of texts of at most so many characters."""
    return Annotated[str, Meta(min_length=1, max_length=longest)] | int | float | bool


def object_type(name: str, fields: Mapping[str, Any], optional: Collection[str] = ()) -> type[Struct]:
    """Returns the type of an object that has these fields, of types by name, and no others."""
    own = [
        (f"f{i}", one | UnsetType, UNSET) if field in optional else (f"f{i}", one)
        for i, (field, one) in enumerate(fields.items())
    ]
    names = {one[0]: field for one, field in zip(own, fields, strict=True)}
    return msgspec.defstruct(name, own, rename=names, forbid_unknown_fields=True, kw_only=True, gc=False)


def table_type(
    name: str,
    fields: Mapping[str, Any],
    optional: Collection[str] = (),
    of_ids: Any = None,
    bounds: Meta = Meta(min_length=0),  # noqa: B008
) -> Any:
    """Returns the type of a list of objects, or of values of type `of_ids`, or of an object of lists.

    Args:
        optional: names of the fields that all rows have or none.
        of_ids: None for objects alone.
        bounds: of the number of rows.
    """
    row = object_type(name, fields, optional)
    columns = {field: Annotated[list[one], bounds] for field, one in fields.items()}
    rows = list[row] if of_ids is None else list[row | of_ids]
    return Annotated[rows, bounds] | object_type(f"Columns of {name}", columns, optional)


def fields_of(given: Struct) -> dict[str, Any]:
    """Returns by name the fields that an object has."""
    own = zip(given.__struct_encode_fields__, astuple(given), strict=True)
    return {name: value for name, value in own if value is not UNSET}


class BodyType:
    """Bodies of a type.

    Args:
        names: by part of a body the names of its fields, which messages say; "" for the body itself.
        name: of the body, before the names of its parts in messages.
        whole: of the body alone.
    """

    def __init__(
        self, kind: Any, names: Mapping[str, Collection[str]], name: str = "", whole: str = "the request"
    ) -> None:
        self._kind, self._names, self._name, self._whole = kind, names, name, whole
        self._decoder = msgspec.json.Decoder(kind)

    def read(self, body: bytes) -> Any:
        """Parses a body.

        Raises:
            BadRequestError: a fault, with its place, or not JSON, as NaN, infinities, numbers beyond float64 and halves
                of surrogate pairs are not, or more than `MAX_PARTS` lists and objects, counted by their brackets.
        """
        if (parts := body.count(b"[") + body.count(b"{")) > MAX_PARTS:
            raise BadRequestError(f"the request must have at most {MAX_PARTS} lists and objects, got {parts}")
        try:
            given = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise self._fault(error) from None
        except msgspec.DecodeError as error:
            raise BadRequestError(f"the request is not JSON: {error}") from None
        _check_keys(body, given)
        return given

    def convert(self, given: object) -> Any:
        """Reads what the JSON of a body stands for.

        Raises:
            BadRequestError: a fault, with its place.
        """
        try:
            return msgspec.convert(given, self._kind)
        except msgspec.ValidationError as error:
            raise self._fault(error) from None

    def json_schema(self, title: str, description: str) -> dict:
        """Returns the JSON Schema, which does not say that lists of columns have one length."""
        about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, "description": description}
        return about | msgspec.json.schema(self._kind)

    def _fault(self, error: msgspec.ValidationError) -> BadRequestError:
        what, _, path = str(error).removesuffix("`").partition(" - at `$")
        place = (self._name + path).removeprefix(".") or self._whole
        if found := re.fullmatch("Object (missing required|contains unknown) field `(.*)`?", what, re.DOTALL):
            name = found[2].removesuffix("`")
            if found[1] == "missing required":
                return BadRequestError(f"{place} lacks the field '{name}'")
            (part,) = re.match(r"\.?(\w*)", path).groups()
            known = suggest(name, sorted(self._names.get(part, self._names[""])))
            return BadRequestError(f"{place} has an unknown field {shown(name)}; {known}")
        what = what.replace("`", "").replace("Expected", "must be", 1)
        return BadRequestError(f"{place} {what}" if what.startswith("must be") else f"{place}: {what}")


def _check_keys(body: bytes, given: object) -> None:
    """Checks that no object of a body has a key twice; of its values msgspec keeps the last one.

    With such a key the body has more colons than the JSON of what was read. It is not found in a body that writes as
    many colons of its texts as escapes.
    """
    colons = body.count(b":")
    if colons > _count_keys(given) and colons > msgspec.json.encode(given).count(b":"):
        if len(body) <= _SEARCHED:
            json.loads(body, object_pairs_hook=_check_pairs)  # says which
        raise BadRequestError("the request has an object with a field twice")


def _count_keys(given: object) -> int:
    """Returns the number of keys but for those of rows."""
    own = fields_of(given) if isinstance(given, Struct) else {}
    return len(own) + sum(map(_count_keys, own.values()))


def _check_pairs(pairs: list[tuple[str, object]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise BadRequestError(f"the request has an object with the field {shown(key)} twice")
        seen.add(key)


class TableColumns:
    """The columns of a table: of the candidates or of the events.

    Args:
        name: of the part of the request.
        given: what the request has there, of a `table_type`.
        most: of more rows the last ones are kept.
        of_ids: the field whose values a list may have in place of objects, or None.

    Raises:
        BadRequestError: rows of which some lack a field, or lists that differ in length.
    """

    def __init__(self, name: str, given: list | Struct, most: int | None = None, of_ids: str | None = None) -> None:
        self.name, self._is_by_columns, self._of_ids, self._first = name, isinstance(given, Struct), False, 0
        #: By name the values of each field.
        self.columns: dict[str, Sequence[object]] = {}
        if self._is_by_columns:
            self.columns = fields_of(given)
        elif given:
            self._of_ids = not isinstance(given[0], Struct)
            if any(issubclass(kind, Struct) == self._of_ids for kind in set(map(type, given))):
                row = next(row for row, one in enumerate(given) if isinstance(one, Struct) == self._of_ids)
                what = "an object" if self._of_ids else "an id"
                raise BadRequestError(f"{name}[{row}] is {what}, and {name}[0] is not")
            self.columns = {of_ids: given} if self._of_ids else self._columns_of(given)
        lengths = {field: len(values) for field, values in self.columns.items()}
        if len({*lengths.values()}) > 1:
            lengths = ", ".join(f"{length} of {field}" for field, length in lengths.items())
            raise BadRequestError(f"{name} must have as many values of each field, got {lengths}")
        count = max(lengths.values(), default=0) if self._is_by_columns else len(given)
        if most is not None and count > most:
            self._first, count = count - most, most
            self.columns = {field: values[self._first :] for field, values in self.columns.items()}
        self._count = count

    def __len__(self) -> int:
        return self._count

    def _columns_of(self, rows: list[Struct]) -> dict[str, Sequence[object]]:
        columns = {}
        for field, attribute in zip(rows[0].__struct_encode_fields__, rows[0].__struct_fields__, strict=True):
            values = list(map(attrgetter(attribute), rows))
            lacking = values.count(UNSET) if rows[0].__struct_defaults__ else 0
            if 0 < lacking < len(values):
                raise BadRequestError(f"{self.place(values.index(UNSET), '')} lacks the field '{field}'")
            if not lacking:
                columns[field] = values
        return columns

    def place(self, row: int, field: str) -> str:
        """Returns how messages name a value, as of `Place`."""
        row += self._first
        if self._is_by_columns:
            return f"{self.name}.{field}[{row}]" if field else self.name
        return f"{self.name}[{row}].{field}" if field and not self._of_ids else f"{self.name}[{row}]"


def take(values: Values, rows: np.ndarray, indices: list[int]) -> Values:
    """The values of some rows, at least one, which are given as an array and as a list."""
    if isinstance(values, np.ndarray):
        return values.take(rows)
    return itemgetter(*indices)(values) if len(indices) > 1 else [values[indices[0]]]


def texts(values: Sequence[object]) -> Sequence[str | None]:
    """The values of a category as texts."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return msgspec.json.encode(values)[1:-1].decode().split(",")  # faster than str
    if kinds == {str} and are_canonical(values):
        return values
    if kinds <= {str, type(None)}:  # many are equal
        by_value = {value: text_of(value) for value in set(values)}
        return list(map(by_value.__getitem__, values))
    return list(map(text_of, values))


def ids_of(one: Field, known: KnownValues | HashBuckets | HashedIds, values: Sequence[object]) -> np.ndarray:
    """`[N]` int64 ids of a category's values."""
    if one.default is not None or not isinstance(known, KnownValues):
        return known.ids([one.default if text is None else text for text in texts(values)])
    if values and type(values[0]) is int:
        values = texts(values)
    ids = known.ids(values)  # most texts are those of the vocabulary, as they are
    (unknown,) = (ids == UNKNOWN).nonzero()
    if len(unknown):
        ids[unknown] = known.ids(texts(take(values, unknown, unknown.tolist())))
    return ids


def flat_values(values: Sequence[list | None]) -> tuple[Sequence[object], np.ndarray]:
    """All values of a field that has lists, one list after the other, and `[N]` int64 numbers of them.

    Values without a text are left out; null is an empty list.
    """
    values = [value or [] for value in values]
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    flat = list(chain.from_iterable(values))
    if None in flat or "" in flat:
        there = np.array([text_of(value) is not None for value in flat])
        lengths = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[there], minlength=len(lengths))
        flat = take(flat, there.nonzero()[0], there.nonzero()[0].tolist()) if there.any() else []
    return flat, lengths


def read_id(value: object, text: str | None, place: str, of: str = "a user") -> str:
    """Returns the text of an id; none, and one that is too long to be a key of the state, is refused."""
    if text is None:
        raise BadRequestError(f"{place} must be the id of {of}, got {shown(value)}")
    if len(text) > LONGEST_ID // 4 and len(text.encode()) > LONGEST_ID:
        raise BadRequestError(f"{place} must be at most {LONGEST_ID} bytes, got {len(text.encode())}")
    return text


def sids(name: str, codec: Mapping[str, int], values: Sequence[int | float | str | None], place: Place) -> np.ndarray:
    """Semantic IDs, -1 for null; their digits must be in the range of the codec's."""
    if set(map(type, values)) != {int} or max(map(abs, values)) >= 2**63:
        values = [_sid(value, place, row, name) for row, value in enumerate(values)]
    found = np.array(values, np.int64)
    layout = Layout(**codec)
    valid = layout.valid(torch.from_numpy(found)).numpy()
    if not valid.all():
        i = int(valid.argmin())
        at = place(i, name)
        raise BadRequestError(f"{at} is {values[i]}, which is no ID of {layout}; another codec's?")
    return found


def _sid(value: int | float | str | None, place: Place, row: int, name: str) -> int:
    if value is None or value == "":
        return UNKNOWN_SID
    if isinstance(value, float):  # a larger one may have been rounded
        is_whole = value.is_integer() and abs(value) <= 2.0**53
    else:
        is_whole = re.fullmatch("-?[0-9]{1,19}", str(value)) is not None
    if not is_whole or not -(2**63) <= (found := int(value)) < 2**63:
        what = "must be a semantic ID: an integer of 64 bits or its text, or null"
        raise BadRequestError(f"{place(row, name)} {what}, got {shown(value)}")
    return found


def shown(value: object) -> str:
    """A value as a message shows it, shortened."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
