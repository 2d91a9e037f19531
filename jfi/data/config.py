import math
from dataclasses import dataclass, field
from typing import Literal

from jfi.data.errors import DataError
from jfi.data.labels import label_column

AGE = "age"
HISTORY = "history_"


@dataclass
class SyntheticConfig:
    """A table with a planted taste that attention over the history can find and the mean of the history cannot.

    Args:
        num_users: users.
        num_items: items, drawn by Zipf's law.
        num_categories: categories of items; a user likes or dislikes each one independently.
        mean_length: mean number of events a user; the lengths are log-normal, and every user starts with none.
        taste: weight of the user's taste for the category in the logit of a like.
        seed: of everything drawn.
    """

    num_users: int = 1000
    num_items: int = 500
    num_categories: int = 10
    mean_length: float = 60.0
    taste: float = 2.5
    seed: int = 0


@dataclass
class DataConfig:
    """Where the interactions lie, what their columns mean, and how they become samples.

    A column of a user (an item) is looked up in the table ``users`` (``items``), whose id column has the same name as
    that of ``interactions``; without that table the first interaction of the user (item) in time gives it.

    Args:
        source: "table" reads the files named below; "synthetic" makes a table and needs none of the column settings.
        interactions: file of interactions, one a row. By its name: ``.csv``, ``.tsv``, ``.parquet``, RecBole's
            ``.inter``, MovieLens' ``ratings.dat`` (``::``) and ``u.data``.
        users: file of users, or None; also RecBole's ``.user``, MovieLens' ``users.dat`` and ``u.user``.
        items: file of items, or None; also RecBole's ``.item``, MovieLens' ``movies.dat`` and ``u.item``.
        user: column of the user's id.
        item: column of the item's id, and the key of the target.
        timestamp: column of the time: a number, or a date and time.
        timestamp_unit: unit of a numeric timestamp.
        label: a column of 0 and 1, or a rule such as ``rating >= 4`` or ``action == buy``. A row whose column is empty
            is history only. None: implicit feedback, every row is a positive. Its column is no user or item column
            unless ``users`` or ``items`` gives that.
        negatives: sampled negatives a positive, for implicit feedback alone.
        user_categorical: columns of the user that become keys.
        user_dense: numeric columns of the user that become columns of the dense features.
        item_categorical: columns of the item that become a key of the target and a ``history_`` key of the events.
        item_dense: numeric columns of the target that become columns of the dense features.
        event_categorical: columns of the event that become ``history_`` keys. The sample's own are not an input.
        event_dense: numeric columns of the event, cut into quantiles of the training part to become ``history_`` keys.
        separators: the multi-valued columns among the categorical ones, and what separates their values. RecBole's
            ``token_seq`` and the genres of MovieLens need no entry.
        title: column of the item shown to people, or None.
        split: "time" cuts the rows ordered by (timestamp, user, item) into ``fractions``; "leave_one_out" tests on a
            user's last labelled row, validates on the one before, and trains on the rest.
        fractions: parts of the rows for training, validation and test, under ``split: time``.
        max_history: events kept of a history, the newest ones.
        max_slots: values kept of a multi-valued column in the history: keys ``history_<column>_0``, ``_1``, ...
        num_quantiles: ids of a column of ``event_dense``.
        num_age_buckets: ids of ``history_age``, the floor of log2 of an event's age in seconds, plus one.
        synthetic: what ``source: synthetic`` makes.
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

    def columns(self) -> set[str]:
        """Every column the config names."""
        columns = {self.user, self.item, self.timestamp, *self.user_categorical, *self.user_dense}
        columns |= {*self.item_categorical, *self.item_dense, *self.event_categorical, *self.event_dense}
        if self.label is not None:
            columns.add(label_column(self.label))
        if self.title is not None:
            columns.add(self.title)
        return columns

    def check(self) -> None:
        """Raises DataError for settings that no table could make right."""
        for name in ("max_history", "max_slots", "num_quantiles", "num_age_buckets"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("num_users", "num_items", "num_categories", "mean_length"):
            if getattr(self.synthetic, name) < 1:
                raise DataError(f"synthetic.{name} is {getattr(self.synthetic, name)}; it must be at least 1")
        if self.synthetic.seed < 0:
            raise DataError(f"synthetic.seed is {self.synthetic.seed}; it must be at least 0")
        if self.label is None and self.negatives < 1:
            raise DataError(f"negatives is {self.negatives}; without a label it must be at least 1")
        whole = math.isclose(sum(self.fractions), 1.0, abs_tol=1e-6)
        if len(self.fractions) != 3 or min(self.fractions) <= 0 or not whole:
            raise DataError(f"fractions is {self.fractions}; it must be three positive numbers that sum to 1")
        if self.source == "table" and self.interactions is None:
            raise DataError("interactions is not set; it must name the file of interactions (or set source: synthetic)")
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
                raise DataError(f"column '{name}' is listed twice; each column has one place")
        self._check_leak()
        for name in (self.item, *self.item_categorical, *self.event_categorical, *self.event_dense):
            if name == AGE:
                raise DataError(f"column '{name}' would take the key '{HISTORY}{AGE}' of the events' age; rename it")
        for name, separator in self.separators.items():
            if not separator:
                raise DataError(f"separators.{name} is ''; it must be what separates the values")
            if name not in (*self.user_categorical, *self.item_categorical, *self.event_categorical):
                raise DataError(f"separators names '{name}', which is no categorical column of this config")

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
                    f"column '{column}' makes the label, so it is no column of the {entity} (unless a table {entity}s "
                    "gives it); event_categorical and event_dense show it in the history alone"
                )
