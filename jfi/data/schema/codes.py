"""Distinct values of columns that arrive a block at a time, numbered in the order of their first occurrence."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class Codes:
    """The distinct values of a column of strings so far, each with a code.

    Memory grows with the distinct values, which a model holds an embedding of, and not with the rows.

    Example:
        >>> codes = Codes()
        >>> codes.encode(pa.array(["b", "a", None, "b"])), codes.encode(pa.array(["c", "a"]))
        (array([ 0,  1, -1,  0], dtype=int32), array([2, 1], dtype=int32))
        >>> codes.values.to_pylist()
        ['b', 'a', 'c']
    """

    def __init__(self) -> None:
        self.values = pa.array([], pa.large_string())

    def encode(self, column: pa.Array) -> np.ndarray:
        """`[N]` int32, -1 for null."""
        encoded = column.cast(pa.large_string()).dictionary_encode()
        known = pc.index_in(encoded.dictionary, value_set=self.values)
        new = known.is_null()
        code = pc.fill_null(known, 0).to_numpy(zero_copy_only=False).astype(np.int32)
        place = np.flatnonzero(new.to_numpy(zero_copy_only=False))
        code[place] = len(self.values) + np.arange(len(place), dtype=np.int32)
        if len(place):
            self.values = pa.concat_arrays([self.values, encoded.dictionary.filter(new)])
        # Nulls, which are not in the dictionary, read the code that is appended.
        return np.append(code, np.int32(-1))[pc.fill_null(encoded.indices, -1).to_numpy()]

    def encode_lists(self, column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """`[sum of counts]` int32 codes and `[N]` int64 counts of lists; null and empty values are left out."""
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        values = column.flatten()
        present = pc.fill_null(pc.not_equal(values, ""), False)
        ends = np.append(0, np.cumsum(present.to_numpy(zero_copy_only=False)))
        stops = np.cumsum(counts)
        return self.encode(values.filter(present)), ends[stops] - ends[stops - counts]
