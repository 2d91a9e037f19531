"""Items that training knows, which positives to evaluate are compared with."""

from dataclasses import replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.prepared.arrange import Rows
from jfi.data.schema.codes import Codes
from jfi.data.schema.schema import DataSchema, as_array


class KnownItems:
    """The items that a run's negatives are drawn from, in one order however the rows are spread over parts.

    They are the item vocabulary of training. A run that hashes item ids has none: all items of the tables count as
    known.

    Args:
        schema: of the run.
        seen_only: whether only items of the tables have their columns; others are left out of `values`.
    """

    def __init__(self, schema: DataSchema, seen_only: bool) -> None:
        known = schema.encodings.vocabularies.get(schema.item_key)
        self._vocabulary = None if known is None else as_array(known.values)
        self._seen = Codes() if seen_only or known is None else None

    def add(self, items: pa.ChunkedArray) -> np.ndarray:
        """`[N]` bool, whether training knows the item, for the items `[N]` of further rows of the tables."""
        if self._seen is not None:
            self._seen.encode(items.combine_chunks())
        if self._vocabulary is None:
            return np.ones(len(items), bool)
        return pc.is_in(items, value_set=self._vocabulary).to_numpy()

    @cached_property
    def values(self) -> pa.Array:
        """The items, as strings; to be read after the last `add`."""
        if self._vocabulary is None:
            return self._seen.values
        if self._seen is None:
            return self._vocabulary
        return self._vocabulary.filter(pc.is_in(self._vocabulary, value_set=self._seen.values))

    def append_to(self, rows: Rows) -> tuple[Rows, np.ndarray]:
        """The rows with further items, which have no row; and the index `[C]` int64 of each of `values`."""
        ids = rows.item_ids.cast(pa.large_string())
        place = pc.index_in(self.values, value_set=ids)
        new = place.is_null()
        index = pc.fill_null(place, -1).to_numpy().astype(np.int64)
        index[index < 0] = len(ids) + np.arange(place.null_count)
        return replace(rows, item_ids=pa.concat_arrays([ids, self.values.filter(new)])), index
