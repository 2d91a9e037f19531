"""Columns in chunks -> one array each, whatever their type and size."""

import contextlib

import pyarrow as pa
import pyarrow.compute as pc

# What 32-bit offsets can address: the bytes of a string array, and the values of a list array.
MAX_OFFSET = 2**31 - 1


def is_text(kind: pa.DataType) -> bool:
    """True for string and large_string."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_list(kind: pa.DataType) -> bool:
    """True for all of Arrow's lists."""
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    views = (pa.types.is_list_view, pa.types.is_large_list_view)
    return any(test(kind) for test in (*tests, *views))


def flatten(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array: dictionaries are decoded, views become strings, text is large_string where needed."""
    if pa.types.is_dictionary(column.type):
        values = column.type.value_type
        if is_text(values) or pa.types.is_string_view(values):
            size = sum(_decoded_size(chunk) for chunk in column.chunks)
            values = pa.string() if size <= MAX_OFFSET else pa.large_string()
        column = pa.chunked_array([_decode(chunk, values) for chunk in column.chunks], values)
    elif pa.types.is_string_view(column.type) or (pa.types.is_string(column.type) and column.nbytes > MAX_OFFSET):
        column = column.cast(pa.string() if _size(column) <= MAX_OFFSET else pa.large_string())
    return column.combine_chunks()


def text_lists(column: pa.Array) -> pa.Array:
    """An array of lists as lists of strings, with 64-bit offsets where needed.

    Raises:
        pa.ArrowException: it cannot be cast.
    """
    values = column.flatten()
    if len(values) > MAX_OFFSET:
        return column.cast(pa.large_list(pa.large_string()))
    return column.cast(pa.list_(pa.large_string() if values.nbytes > MAX_OFFSET else pa.string()))


def as_text(column: pa.Array) -> pa.Array:
    """Single values as strings, null where empty.

    Floating-point numbers that are whole read like integers, since integers become floating-point numbers where a
    column has gaps. NaN is such a gap.

    Raises:
        pa.ArrowException: they cannot be cast.
    """
    if is_text(column.type):
        return column
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
        with contextlib.suppress(pa.ArrowInvalid):
            column = column.cast(pa.int64())
    return column.cast(pa.string())


def _decode(chunk: pa.DictionaryArray, values: pa.DataType) -> pa.Array:
    # Not dictionary_decode, whose result may exceed 32-bit offsets.
    return chunk.dictionary.cast(values).take(chunk.indices)


def _decoded_size(chunk: pa.DictionaryArray) -> int:
    lengths = pc.fill_null(pc.binary_length(chunk.dictionary.cast(pa.large_string())), 0)
    return pc.sum(lengths.cast(pa.int64()).take(chunk.indices)).as_py() or 0


def _size(column: pa.ChunkedArray) -> int:
    if pa.types.is_string_view(column.type):
        return column.nbytes  # An upper bound.
    return sum(pc.sum(pc.binary_length(chunk).cast(pa.int64())).as_py() or 0 for chunk in column.chunks)
