"""The columns of samples: the statistics that models read, rates by the values of columns, and the data's own columns.

What `data.statistics: auto` makes is here whether or not the dataset has it, from rows that are strictly older than a
sample. A column of few values is there as it is too, for trees.
"""

import re
from dataclasses import dataclass

import numpy as np

from jfi.baselines.samples import Samples
from jfi.data import InteractionDataset
from jfi.data.prepared.stages.statistics import past_index
from jfi.events.groups import AUTO, HALF_LIVES
from jfi.events.point_in_time import Tallies
from jfi.events.statistics import Statistics
from jfi.utils.encoding import UNKNOWN

#: Rows of the overall rate that a value's rate is smoothed with.
_SMOOTHING = 10.0
#: The most values of a column that trees read as categories.
_MAX_VALUES = 255
_SMALL, _RATE = 1e-6, re.compile(r"_rate(_\d)?$")


@dataclass(frozen=True)
class Features:
    """Columns of B samples.

    Args:
        numbers: `[B]` float64 by name, NaN for a missing value; rates are logits.
        categories: `[B]` float64 by name, the ids of columns of few values, NaN for a missing one.
        half_lives: in seconds, of the statistics of popularity.
    """

    numbers: dict[str, np.ndarray]
    categories: dict[str, np.ndarray]
    half_lives: list[float]

    @classmethod
    def of(cls, dataset: InteractionDataset, samples: Samples) -> "Features":
        """Makes the columns in memory.

        Args:
            dataset: of a training run.
            samples: B samples of it.
        """
        arrays, schema, is_implicit = dataset.arrays(), dataset.schema, dataset.is_implicit
        session = None if arrays.engagement is None else arrays.engagement.session
        index = past_index(arrays.events, schema, arrays.columns, is_implicit, session, contexts=True)
        categories = [column.key for column in index.item_columns.values()]
        of_events = [one for _, one in schema.of_events() if one.of == "event" and not one.raw]
        edges, columns = schema.encodings.edges, dict.fromkeys(one.column for one in of_events)
        values = [one for one in columns if one in edges], [one for one in columns if one not in edges]
        times = arrays.events.time[samples.events[samples.splits["train"]]]
        span = max(float(np.ptp(times)), 1.0)
        half_lives = schema.encodings.half_lives or [span * part for part in HALF_LIVES]
        tallies, ids = Tallies(index, index.queries(samples.events, samples.item)), {}
        groups = dict.fromkeys([*AUTO[is_implicit], "similar"])
        made = Statistics(index, [*groups], categories, schema.encodings.window, half_lives, *values)
        numbers = made.compute(tallies.queries)
        for part, column in index.columns.items():
            if not is_implicit:  # negatives share the user and the context of their positive
                numbers[f"{column.key}_rate"] = tallies.tally((part,)).rate(tallies.overall, _SMOOTHING)
            if column.ids.shape[1] == 1 and column.size <= _MAX_VALUES:
                of = {"item": samples.item, "user": samples.user, "event": samples.events}[column.of]
                own = column.ids[of, 0]
                ids[column.key] = np.where(own == UNKNOWN, np.nan, own.astype(np.float64))
        users, items, contexts = arrays.dense
        dense = [*users[samples.user].T, *items[samples.item].T, *(one[samples.events] for one in contexts)]
        of_data = dict(zip(schema.dense_names, dense, strict=True))
        rates = {name: np.clip(one, _SMALL, 1 - _SMALL) for name, one in numbers.items() if _RATE.search(name)}
        logits = {name: np.log(one / (1 - one)) for name, one in rates.items()}
        return cls(of_data | numbers | logits, ids, half_lives)
