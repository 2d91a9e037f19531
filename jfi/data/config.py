"""The `data` section of a config: the files, the meaning of their columns, and how rows become samples."""

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Literal

from jfi.data.errors import DataError
from jfi.data.labels import label_column

AGE = "age"
HISTORY = "history_"


@dataclass
class SyntheticConfig:
    """The synthetic table: it has a pattern that attention over the history can find and the mean cannot.

    Args:
        num_users: number of users.
        num_items: number of items, drawn by Zipf's law.
        num_categories: number of item categories; a user likes or dislikes each one independently.
        mean_length: mean number of events per user; the numbers are log-normal, and every user starts without events.
        taste: weight of the user's taste for the category in the logit of a like.
        seed: seed of all random numbers.
    """

    num_users: int = 1000
    num_items: int = 500
    num_categories: int = 10
    mean_length: float = 60.0
    taste: float = 2.5
    seed: int = 0


@dataclass
class DataConfig:
    """The files with interactions, the meaning of their columns, and how rows become samples.

    The columns of a user (an item) come from the table `users` (`items`), whose id column has the same name as in
    `interactions`. Without that table they come from the user's (item's) first interaction in time.

    Args:
        source: "table" reads the files below; "synthetic" generates a table, and ignores the column settings.
        interactions: file of interactions, one per row. The layout follows from the name: `.csv`, `.tsv`, `.parquet`,
            RecBole's `.inter`, MovieLens' `ratings.dat` (`::`) and `u.data`.
        users: file of users, or None; also RecBole's `.user`, MovieLens' `users.dat` and `u.user`.
        items: file of items, or None; also RecBole's `.item`, MovieLens' `movies.dat` and `u.item`.
        user: column of the user's id.
        item: column of the item's id, which is also the key of the target.
        timestamp: column of the time: a number, or a date and time.
        timestamp_unit: unit of a numeric timestamp.
        label: a column of 0 and 1, or a rule such as `rating >= 4` or `action == buy`. A row with an empty label is
            only part of histories. None means implicit feedback: every row is a positive. The label's column can be a
            user or item column only if the table `users` or `items` has it.
        negatives: sampled negatives per positive, for implicit feedback only.
        user_categorical: columns of the user that become keys.
        user_dense: numeric columns of the user that become dense features.
        item_categorical: columns of the item that become a key of the target and a `history_` key of the events.
        item_dense: numeric columns of the target that become dense features.
        event_categorical: columns of the event that become `history_` keys. A sample's own values are not an input.
        event_dense: numeric columns of the event that become `history_` keys, cut at quantiles of the training rows.
        separators: by multi-valued categorical column the separator of its values. RecBole's `token_seq` and the genres
            of MovieLens need no entry.
        title: column of the item that is shown to people, or None.
        split: "time" cuts the rows ordered by (timestamp, user, item) into `fractions`; "leave_one_out" tests on a
            user's last labeled row, validates on the one before, and trains on the rest.
        fractions: fractions of the rows for training, validation and test, with `split: time`.
        max_history: the number of newest events that a history keeps. The model's features get it as `max_seqlen`.
        max_slots: values of a multi-valued column that an event keeps, under the keys `history_<column>_0`, `_1`, ...
        num_quantiles: number of quantiles of an `event_dense` column.
        num_age_buckets: number of ids of `history_age`, which is 1 + floor(log2(age of the event in seconds)).
        synthetic: settings for `source: synthetic`.
        prepared: folder that `examples/prepare_data.py` wrote. It replaces the tables, and all settings of this section
            are those that it was prepared with; a run may choose `max_history` and `negatives`.
    """

    source: Literal["table", "synthetic"] = "table"
    interactions: str | None = None
    users: str | None = None
    items: str | None = None
    user: str = "user_id"
    item: str = "item_id"
    timestamp: str = "timestamp"
    timestamp_unit: Literal["s", "ms", "us", "ns"] = "s"
    label: str | None = None
    negatives: int = 4
    user_categorical: list[str] = field(default_factory=list)
    user_dense: list[str] = field(default_factory=list)
    item_categorical: list[str] = field(default_factory=list)
    item_dense: list[str] = field(default_factory=list)
    event_categorical: list[str] = field(default_factory=list)
    event_dense: list[str] = field(default_factory=list)
    separators: dict[str, str] = field(default_factory=dict)
    title: str | None = None
    split: Literal["time", "leave_one_out"] = "time"
    fractions: list[float] = field(default_factory=lambda: [0.8, 0.1, 0.1])
    max_history: int = 200
    max_slots: int = 8
    num_quantiles: int = 16
    num_age_buckets: int = 32
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    prepared: str | None = None

    def columns(self) -> set[str]:
        """The names of all columns in use."""
        columns = {self.user, self.item, self.timestamp, *self.user_categorical, *self.user_dense}
        columns |= {*self.item_categorical, *self.item_dense, *self.event_categorical, *self.event_dense}
        if self.label is not None:
            columns.add(label_column(self.label))
        if self.title is not None:
            columns.add(self.title)
        return columns

    def with_absolute_paths(self) -> "DataConfig":
        """A copy whose files are named by absolute paths, so that it can be read in any working directory."""
        paths = {name: getattr(self, name) for name in ("interactions", "users", "items", "prepared")}
        return dataclasses.replace(self, **{name: _absolute(path) for name, path in paths.items()})

    def check(self) -> None:
        """Raises DataError for settings that are wrong for any table."""
        for name in ("max_history", "max_slots", "num_quantiles", "num_age_buckets"):
            if getattr(self, name) < 1:
                raise DataError(f"data.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("num_users", "num_items", "num_categories", "mean_length"):
            if getattr(self.synthetic, name) < 1:
                raise DataError(f"data.synthetic.{name} is {getattr(self.synthetic, name)}; it must be at least 1")
        if self.synthetic.seed < 0:
            raise DataError(f"data.synthetic.seed is {self.synthetic.seed}; it must be at least 0")
        if self.label is None and self.negatives < 1:
            raise DataError(f"data.negatives is {self.negatives}; without a label it must be at least 1")
        whole = math.isclose(sum(self.fractions), 1.0, abs_tol=1e-6)
        if len(self.fractions) != 3 or min(self.fractions) <= 0 or not whole:
            raise DataError(f"data.fractions is {self.fractions}; it must hold three positive numbers that sum to 1")
        if self.source == "table" and self.interactions is None and self.prepared is None:
            raise DataError(
                "data.interactions is not set; it must name the file of interactions (or set data.source: synthetic)"
            )
        keys = [
            *self.user_categorical,
            *self.user_dense,
            self.item,
            *self.item_categorical,
            *self.item_dense,
            *self.event_categorical,
            *self.event_dense,
        ]
        for name in keys:
            if keys.count(name) > 1:
                raise DataError(f"data lists the column '{name}' twice; a column can have one role only")
        self._check_leak()
        for name in (self.item, *self.item_categorical, *self.event_categorical, *self.event_dense):
            if name == AGE:
                raise DataError(
                    f"column '{name}' needs the key '{HISTORY}{AGE}', which is the age of the events; rename the column"
                )
        for name, separator in self.separators.items():
            if not separator:
                raise DataError(f"data.separators.{name} is ''; it must be the separator of the values")
            if name not in (*self.user_categorical, *self.item_categorical, *self.event_categorical):
                raise DataError(f"data.separators has '{name}', which is not a categorical column of this config")

    def _check_leak(self) -> None:
        if self.label is None:
            return
        column = label_column(self.label)
        for entity, table, names in (
            ("user", self.users, [*self.user_categorical, *self.user_dense]),
            ("item", self.items, [*self.item_categorical, *self.item_dense]),
        ):
            if table is None and column in names:
                raise DataError(
                    f"column '{column}' defines the label, so data.{entity}_* must not list it (unless "
                    f"data.{entity}s is a table that has it); event_categorical and event_dense show it in the history "
                    "only"
                )


def _absolute(path: str | list[str] | None) -> str | list[str] | None:
    if isinstance(path, list):
        return [os.path.abspath(part) for part in path]
    return None if path is None else os.path.abspath(path)
