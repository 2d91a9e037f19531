"""Columns in chunks -> one array each, and the texts and numbers of their values."""

import uuid
from collections.abc import Callable, Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.utils.encoding import NOT_CANONICAL, text_of

#: The type of texts; with 64-bit offsets a column may have more than 2 GiB of them.
TEXT = pa.large_string()
#: The type of lists of texts.
TEXTS = pa.large_list(TEXT)


def is_text(kind: pa.DataType) -> bool:
    """True for all of Arrow's texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_list(kind: pa.DataType) -> bool:
    """True for all of Arrow's lists."""
    types = pa.types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def has_values(column: pa.Array | pa.ChunkedArray) -> bool:
    """Returns whether a column without dictionaries has a value: not null, no empty text, not NaN."""
    if is_text(column.type):
        return bool(pc.any(pc.not_equal(column.cast(TEXT), "")).as_py())
    if pa.types.is_floating(column.type) and not pa.types.is_float16(column.type):
        return bool(pc.any(pc.invert(pc.is_null(column, nan_is_null=True))).as_py())
    return column.null_count < len(column)


def type_name(kind: pa.DataType) -> str:
    """Returns a type as messages name it, whatever the size of its offsets."""
    return str(kind).replace("large_", "")


def flatten(column: pa.ChunkedArray) -> pa.Array:
    """Returns the column as one array of values: without dictionaries and extension types; texts are `TEXT`."""
    chunks = [_plain(chunk) for chunk in column.chunks or [pa.array([], column.type)]]
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


def _plain(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_dictionary(kind):
        # Not dictionary_decode, whose result may exceed 32-bit offsets.
        return _plain(array.dictionary).take(array.indices)
    if isinstance(kind, pa.BaseExtensionType):
        return _uuids(array.storage) if kind.extension_name == "arrow.uuid" else _plain(array.storage)
    if is_text(kind):
        return array.cast(TEXT)
    return array


def _uuids(storage: pa.Array) -> pa.Array:
    encoded = storage.dictionary_encode()
    texts = [str(uuid.UUID(bytes=value)) for value in encoded.dictionary.to_pylist()]
    return pa.array(texts, TEXT).take(encoded.indices)


def as_text(column: pa.Array, change: Callable[[pa.Array], pa.Array] = lambda texts: texts) -> pa.Array:
    """Returns single values as `TEXT` by the rule of `jfi.utils.encoding.text_of`, null where they are missing.

    Args:
        column: of `flatten`.
        change: changes the distinct texts.

    Raises:
        pa.ArrowException: the values have no text.
    """
    if pa.types.is_null(column.type):
        return column.cast(TEXT)
    encoded = column.dictionary_encode()
    texts = change(_texts(encoded.dictionary))
    return column if texts is encoded.dictionary else texts.take(encoded.indices)


def _texts(values: pa.Array) -> pa.Array:
    """Returns the texts of distinct values; the values themselves if these are their texts."""
    kind = values.type
    if pa.types.is_float16(kind):
        values = _float64_of_float16(values)
    if pa.types.is_decimal(kind):
        return pa.array([text_of(value) for value in values.to_pylist()], TEXT)
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), None, values)
    texts = values if kind == TEXT else values.cast(TEXT)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return texts
    if pa.types.is_temporal(kind):  # the fraction has as many digits as the type
        texts = pc.replace_substring_regex(texts, r"(\.[0-9]*[1-9])0+$|\.0+$", r"\1")
    odd = pc.fill_null(pc.match_substring_regex(texts, NOT_CANONICAL), False)
    if not pc.any(odd).as_py():
        return texts
    return pc.replace_with_mask(texts, odd, pa.array([text_of(text) for text in texts.filter(odd).to_pylist()], TEXT))


def _float64_of_float16(values: pa.Array) -> pa.Array:
    found = values.to_numpy(zero_copy_only=False)
    return pa.array([float(str(value)) for value in found], pa.float64(), mask=values.is_null().to_numpy(False))


def text_lists(column: pa.Array, change: Callable[[pa.Array], pa.Array] = lambda texts: texts) -> pa.Array:
    """Returns an array of lists as `TEXTS`, of which each value is a text as `as_text` returns it.

    Raises:
        pa.ArrowException: the values of a list have no texts.
    """
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.large_list(column.type.value_type))
    values = _plain(column.flatten())
    if pa.types.is_nested(values.type):
        raise pa.ArrowInvalid("lists of lists or objects")
    offsets = np.append(0, np.cumsum(pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)))
    mask = column.is_null() if column.null_count else None
    return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64)), as_text(values, change), mask=mask)


def count_rounded(column: pa.ChunkedArray) -> int:
    """Counts values that a float may have been rounded to: whole ones from 2^53 on, 2^24 of float32, 2^11 of float16.

    Texts count if they are written as a float: with an exponent, or with a fraction of zeros.
    """
    values = flatten(column)
    while is_list(values.type):
        values = flatten(pa.chunked_array([values.flatten()]))
    limit = {pa.float16(): 2.0**11, pa.float32(): 2.0**24}.get(values.type, 2.0**53)
    if values.type == TEXT:
        values = values.filter(pc.match_substring_regex(values, _FLOATS)).cast(pa.float64())
    if not pa.types.is_floating(values.type):
        return 0
    sizes = pc.abs(values.cast(pa.float64()))
    return pc.sum(pc.and_(pc.greater_equal(sizes, limit), pc.less(sizes, np.inf))).as_py() or 0


#: Texts of numbers from 10^15 on by which programs write floats.
_FLOATS = r"^-?(?:[1-9](?:\.[0-9]+)?e\+[0-9]{2,3}|[1-9][0-9]{15,}\.0*)$"


def common_type(types: Collection[pa.DataType]) -> pa.DataType:
    """Returns the type that columns of several types have together: that of all, or else text, or lists of texts."""
    kinds = {kind for kind in types if not pa.types.is_null(kind)}
    if len(kinds) < 2:
        return next(iter(kinds), pa.null())
    if all(map(pa.types.is_timestamp, kinds)):
        return pa.timestamp("us")
    return TEXTS if any(map(is_list, kinds)) else TEXT


def as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns a column in the `common_type` of its type and others."""
    if column.type == kind:
        return column
    if pa.types.is_null(column.type) or pa.types.is_timestamp(kind):
        return column.cast(kind, safe=False)
    column = flatten(pa.chunked_array([column]))
    if kind == TEXTS:  # a column of single values has none where others are lists
        return text_lists(column) if is_list(column.type) else pa.nulls(len(column), TEXTS)
    return as_text(column)


def as_float64(column: pa.Array) -> pa.Array:
    """Returns numbers as float64; those of fewer bits, and decimals, by their shortest decimal: float32 0.7 is 0.7.

    Raises:
        pa.ArrowException: a value is not a number.
    """
    kind = column.type
    if pa.types.is_float16(kind) or pa.types.is_float32(kind) or pa.types.is_decimal(kind):
        encoded = column.dictionary_encode()
        if pa.types.is_float16(kind):
            values = _float64_of_float16(encoded.dictionary)
        else:
            values = encoded.dictionary.cast(pa.string()).cast(pa.float64())
        return values.take(encoded.indices)
    try:
        return column.cast(pa.float64(), safe=False)  # a safe cast would refuse integers beyond 2^53
    except pa.ArrowInvalid:
        if kind != TEXT:
            raise
    texts = pc.utf8_trim_whitespace(column)
    numbers = pa.array(["1", "0"] * 3, TEXT).take(pc.index_in(texts, _BOOLEANS))
    return pc.coalesce(numbers, texts).cast(pa.float64())


_BOOLEANS = pa.array(["true", "false", "True", "False", "TRUE", "FALSE"], TEXT)
