"""The `data` section of a config: the files, the meaning of their columns, and how rows become samples."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from jfi.data.decode import check_encoding
from jfi.data.errors import DataError
from jfi.data.labels import label_columns
from jfi.data.rules import only_column, parse_rule
from jfi.files import absolute_path
from jfi.suggest import suggest

AGE = "age"
HISTORY = "history_"
#: The column of semantic IDs in their file, and in the names of their keys.
SID = "sid"
Batching = Literal["sample", "user"]
#: By value of `data.statistics` the dense features that it makes; see `jfi.data.statistics`.
STATISTICS = {
    "item": ["past_item_rate", "past_item_count"],
    "user": ["past_user_rate", "past_user_count", *(f"past_user_newest_{most}" for most in (3, 10, 30))],
    "user_item": ["past_user_item_rate", "past_user_item_count", "past_user_item_newest_3"],
    "similar": ["past_similarity", "past_similar_rate", "past_agreement"],
}
#: The settings that name tables.
FILES = ("interactions", "users", "items", "semantic_ids", "validation", "test")
_MAX_COUNT = 2**31 - 1


@dataclass
class SyntheticConfig:
    """The synthetic table: it has a pattern that attention over the history can find and the mean cannot.

    Args:
        kind: "taste" is the table of `jfi.data.synthetic`; "dwell" is a log with dwell times, of which only the long
            ones of active users count, see `jfi.data.synthetic_dwell`.
        num_users: number of users.
        num_items: number of items, drawn by Zipf's law.
        num_categories: number of item categories; a user likes or dislikes each one independently.
        mean_length: mean number of events per user; the numbers are log-normal, and every user starts without events.
        taste: weight of the user's taste for the category in the logit of a like; of "taste" alone.
        active_share: probability with which a user is active; of "dwell" alone, as those below.
        horizon: the number of events after which an event counts no more.
        labeled: the number of newest events of each user that have a label.
        seed: seed of all random numbers.
    """

    kind: Literal["taste", "dwell"] = "taste"
    num_users: int = 1000
    num_items: int = 500
    num_categories: int = 10
    mean_length: float = 60.0
    taste: float = 2.5
    active_share: float = 0.5
    horizon: int = 1000
    labeled: int = 16
    seed: int = 0


@dataclass
class DataConfig:
    """The files with interactions, the meaning of their columns, and how rows become samples.

    The columns of a user (an item) come from the table `users` (`items`), whose id column has the same name as in
    `interactions`. Without that table they come from the user's (item's) first interaction in time.

    Args:
        source: "table" reads the files below; "synthetic" generates a table, and ignores the column settings.
        interactions: file of interactions, one per row; or a folder of files, a glob such as `parts/*.parquet`, or a
            list of these. The layout follows from the name: `.parquet`, `.csv`, `.tsv`, `.jsonl`, RecBole's `.inter`,
            MovieLens' `ratings.dat` (`::`) and `u.data`; text also with `.gz`.
        users: the same of users, or None; also RecBole's `.user`, MovieLens' `users.dat` and `u.user`.
        items: the same of items, or None; also RecBole's `.item`, MovieLens' `movies.dat` and `u.item`.
        semantic_ids: file of the items' semantic IDs that examples/make_semantic_ids.py wrote, with its codec beside
            it, or None. It names the items in a column `item`, as the table of items does. Events get the key
            `history_sid`, and the target `item_sid`, with the ID -1 for an item that the file lacks.
        user: column of the user's id.
        item: column of the item's id, which is also the key of the target.
        timestamp: column of the time: a number, or a date and time.
        timestamp_unit: unit of a numeric timestamp.
        label: a column of 0 and 1, or a rule such as `rating >= 4` or `action in [buy, cart] and price > 0`, with the
            operators ==, !=, >=, <=, >, <, in [...], not in [...], and, or, and parentheses. A row with an empty label
            is only part of histories. None means implicit feedback: every row is a positive. The label's columns can
            be user or item columns only if the table `users` or `items` has them.
        negatives: sampled negatives per positive, for implicit feedback only.
        user_categorical: columns of the user that become keys.
        user_dense: numeric columns of the user that become dense features.
        item_categorical: columns of the item that become a key of the target and a `history_` key of the events.
        item_dense: numeric columns of the target that become dense features.
        event_categorical: columns of the event that become `history_` keys. A sample's own values are not an input,
            unless `impression_categorical` lists the column too.
        event_dense: numeric columns of the event that become `history_` keys, cut at quantiles of the training rows.
        impression_categorical: columns of the interaction that are known when the item is shown, such as the device or
            the position; they become keys of the sample. One that `event_categorical` lists too has a key of the
            sample and a `history_` key of the events, which share a table.
        impression_dense: numeric columns of the interaction that are known when the item is shown, such as the price;
            they become dense features of the sample.
        statistics: which rates and counts of strictly older labeled rows become dense features of the sample: of the
            `item`, of the `user`, of the user's events of the same item (`user_item`), or of the user's events of
            items that the same users had (`similar`). Needs a label.
        separators: by multi-valued categorical column the separator of its values. RecBole's `token_seq` and the genres
            of MovieLens need no entry.
        title: column of the item that is shown to people, or None.
        split: "time" cuts the rows ordered by (timestamp, user, item) into `fractions`; "leave_one_out" tests on a
            user's last labeled row, validates on the one before, and trains on the rest; "user" puts all rows of a user
            into one split, chosen by a hash of the id; "column" reads it from `split_column`; "files" takes the
            training rows from `interactions`, and the others from `validation` and `test`.
        fractions: for training, validation and test: of the labeled rows with `split: time`, of the users with
            `split: user`.
        max_history: the number of newest events that a history keeps. The model's features get it as `max_seqlen`.
        batching: "sample" gives every sample of a batch a history of its own. With "user" the samples of a user share
            one timeline, which is looked up and moved once for all of them, and each sample sees of it what its own
            history would have: the same predictions, in a fraction of the time where users have many samples.
        max_timeline: with `batching: user`, the most events of a timeline, at least `max_history`; the samples of a
            user with more have several timelines. None means 4 times `max_history`.
        max_slots: values of a multi-valued column that an event keeps, under the keys `history_<column>_0`, `_1`, ...
        num_quantiles: number of quantiles of an `event_dense` column.
        num_age_buckets: number of ids of `history_age`, which is 1 + floor(log2(age of the event in seconds)).
        synthetic: settings for `source: synthetic`.
        encoding: encoding of text files, by Python's name of it, such as gb18030, cp1252 or utf-16.
        quoting: whether `"` quotes fields of CSV and TSV; with false it is an ordinary character.
        split_column: column of the split, with `split: column`: train, validation (or val, valid, dev) or test.
        split_seed: another seed assigns users to other splits, with `split: user`.
        validation: files of the validation rows, as `interactions`, with `split: files`.
        test: files of the test rows, as `interactions`, with `split: files`.
        group: column of an impression's or request's id, or None. The rows of a user with the same id are in one split.
        min_count: by categorical column the number of training rows that a value needs; a rarer one counts as unseen.
        hash_buckets: by categorical column a number of ids, which all of its values share by their hash, in place of an
            id for each value of training.
        unknown_share: share of the known ids of a training batch that are replaced by that of an unknown value, so that
            training reaches it; 0 for none. Held-out batches keep theirs.
        eval_negatives: sampled candidates that HR@k and NDCG@k rank a held-out positive among, for implicit feedback.
        event_crosses: lists of single-valued columns among the item's id, `item_categorical` and `event_categorical`,
            whose values together become one `history_` key of the events, named like item_id_x_action.
        history: a rule such as `action == click`, of the form of a label's: only rows where it holds are events of
            histories. Other rows are samples, if they have a label. None means that every row is an event.
        dwell: column of how long the user stayed with the event, a number; or None. It is known after the event only,
            and enters `policy` alone, unless `event_dense` lists it too.
        dwell_unit: unit of `dwell`, "s" or "ms".
        surface: column of where the event happened, such as a tab, a feed or a kind of page, or None; as `dwell`.
        session: column of the session's id, or None: then a session ends where a user pauses for 30 minutes.
        conversion: a column of 0 and 1 or a rule, as `label`, for the events that a policy is fitted to. Nothing else
            reads it. None means `label`.
        policy: file of a `jfi.history.Policy`: which of the newest `max_history` events of a history a model computes,
            by their dwell and surface and the segment of the user, and their weights. None keeps all.
        prepared: folder that `examples/prepare_data.py` wrote. It replaces the tables, and the settings of this section
            are those that it was prepared with, but for `max_history`, `max_timeline`, `batching`, `negatives`,
            `eval_negatives`, `unknown_share` and `policy`, which are the run's own.
    """

    source: Literal["table", "synthetic"] = "table"
    interactions: str | list[str] | None = None
    users: str | list[str] | None = None
    items: str | list[str] | None = None
    semantic_ids: str | None = None
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
    impression_categorical: list[str] = field(default_factory=list)
    impression_dense: list[str] = field(default_factory=list)
    statistics: list[Literal["item", "user", "user_item", "similar"]] = field(default_factory=list)
    separators: dict[str, str] = field(default_factory=dict)
    title: str | None = None
    split: Literal["time", "leave_one_out", "user", "column", "files"] = "time"
    fractions: list[float] = field(default_factory=lambda: [0.8, 0.1, 0.1])
    max_history: int = 200
    batching: Batching = "sample"
    max_timeline: int | None = None
    max_slots: int = 8
    num_quantiles: int = 16
    num_age_buckets: int = 32
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    encoding: str = "utf-8"
    quoting: bool = True
    split_column: str | None = None
    split_seed: int = 0
    validation: str | list[str] | None = None
    test: str | list[str] | None = None
    group: str | None = None
    history: str | None = None
    min_count: dict[str, int] = field(default_factory=dict)
    hash_buckets: dict[str, int] = field(default_factory=dict)
    unknown_share: float = 0.0
    event_crosses: list[list[str]] = field(default_factory=list)
    eval_negatives: int = 100
    dwell: str | None = None
    dwell_unit: Literal["s", "ms"] = "s"
    surface: str | None = None
    session: str | None = None
    conversion: str | None = None
    policy: str | None = None
    prepared: str | None = None

    @property
    def longest_timeline(self) -> int:
        """The most events of a timeline in a batch by user."""
        return 4 * self.max_history if self.max_timeline is None else self.max_timeline

    def statistics_columns(self) -> list[str]:
        """The names of the dense features that `statistics` makes."""
        return [column for name in STATISTICS if name in self.statistics for column in STATISTICS[name]]

    def crosses(self) -> dict[str, list[str]]:
        """The columns of each cross of events, by the name of the cross."""
        return {"_x_".join(columns): columns for columns in self.event_crosses}

    def columns(self) -> set[str]:
        """The names of all columns in use."""
        columns = {self.user, self.item, self.timestamp, *self.user_categorical, *self.user_dense}
        columns |= {*self.item_categorical, *self.item_dense, *self.event_categorical, *self.event_dense}
        columns |= {*self.impression_categorical, *self.impression_dense}
        if self.label is not None:
            columns.update(label_columns(self.label))
        columns |= {name for name in (self.title, self.group, self.split_column) if name is not None}
        columns.update(self.engagement_columns())
        if self.history is not None:
            columns.update(parse_rule(self.history).columns)
        return columns

    def interaction_columns(self) -> set[str]:
        """The names of the columns in use that the interactions have, and not the tables of users or items."""
        columns = self.columns()
        if self.users is not None:
            columns -= {*self.user_categorical, *self.user_dense} - {self.user}
        if self.items is not None:
            columns -= {*self.item_categorical, *self.item_dense, *([] if self.title is None else [self.title])}
        columns |= {self.user, self.item, self.timestamp, *self.event_categorical, *self.event_dense}
        columns |= {*self.impression_categorical, *self.impression_dense}
        for rule in (self.label, self.history):
            columns.update([] if rule is None else label_columns(rule))
        columns |= {name for name in (self.group, self.split_column) if name is not None}
        return columns | {*self.engagement_columns()}

    def engagement_columns(self) -> list[str]:
        """The columns of `dwell`, `surface` and `session`, as far as they are set."""
        return [name for name in (self.dwell, self.surface, self.session) if name is not None]

    def with_absolute_paths(self) -> "DataConfig":
        """A copy whose files are named by absolute paths, so that it can be read in any working directory."""
        names = (*FILES, "policy", "prepared")
        paths = {name: getattr(self, name) for name in names}
        return dataclasses.replace(self, **{name: _absolute(path) for name, path in paths.items()})

    def check(self) -> None:
        """Raises DataError for settings that are wrong for any table."""
        for name in ("max_history", "max_slots", "num_quantiles", "num_age_buckets"):
            if not 1 <= getattr(self, name) <= _MAX_COUNT:
                bound = "at least 1" if getattr(self, name) < 1 else f"at most {_MAX_COUNT}"
                raise DataError(f"data.{name} is {getattr(self, name)}; it must be {bound}")
        if self.max_timeline is not None and not self.max_history <= self.max_timeline <= _MAX_COUNT:
            bounds = f"from data.max_history, {self.max_history}, to {_MAX_COUNT}"
            raise DataError(f"data.max_timeline is {self.max_timeline}; it must be {bounds}, or null")
        check_encoding(self.encoding)
        for name in ("num_users", "num_items", "num_categories", "mean_length"):
            if not 1 <= getattr(self.synthetic, name) <= _MAX_COUNT:
                bound = "at least 1" if getattr(self.synthetic, name) < 1 else f"at most {_MAX_COUNT}"
                raise DataError(f"data.synthetic.{name} is {getattr(self.synthetic, name)}; it must be {bound}")
        if self.synthetic.seed < 0:
            raise DataError(f"data.synthetic.seed is {self.synthetic.seed}; it must be at least 0")
        if self.label is None and self.negatives < 1:
            raise DataError(f"data.negatives is {self.negatives}; without a label it must be at least 1")
        if self.negatives > _MAX_COUNT:
            raise DataError(f"data.negatives is {self.negatives}; it must be at most {_MAX_COUNT}")
        whole = math.isclose(sum(self.fractions), 1.0, abs_tol=1e-6)
        if len(self.fractions) != 3 or min(self.fractions) <= 0 or not whole:
            raise DataError(f"data.fractions is {self.fractions}; it must hold three positive numbers that sum to 1")
        if self.source == "table" and self.interactions is None and self.prepared is None:
            raise DataError(
                "data.interactions is not set; it must name the file of interactions (or set data.source: synthetic)"
            )
        self._check_statistics()
        self._check_roles()
        keys = [
            *self.user_categorical,
            *self.user_dense,
            self.item,
            *self.item_categorical,
            *self.item_dense,
            *self.event_categorical,
            *self.event_dense,
            *self.impression_categorical,
            *self.impression_dense,
        ]
        shared = {*self.event_categorical} & {*self.impression_categorical}
        for name in keys:
            if keys.count(name) > 1 + (name in shared):
                raise DataError(f"data lists the column '{name}' twice; a column can have one role only")
        if self.semantic_ids is not None and SID in keys:
            raise DataError(f"data lists the column '{SID}', which is that of data.semantic_ids; rename the column")
        self._check_leak()
        self._check_split()
        self._check_ids()
        self._check_engagement()
        for name in (self.item, *self.item_categorical, *self.event_categorical, *self.event_dense):
            if name == AGE:
                raise DataError(
                    f"column '{name}' needs the key '{HISTORY}{AGE}', which is the age of the events; rename the column"
                )
        for name, separator in self.separators.items():
            if not separator:
                raise DataError(f"data.separators.{name} is ''; it must be the separator of the values")
            if name not in (
                *self.user_categorical,
                *self.item_categorical,
                *self.event_categorical,
                *self.impression_categorical,
            ):
                raise DataError(f"data.separators has '{name}', which is not a categorical column of this config")

    def _check_roles(self) -> None:
        """Raises DataError if one column is to be two of the user, the item, the time, the split and the label."""
        roles = {"user": self.user, "item": self.item, "timestamp": self.timestamp, "split_column": self.split_column}
        for setting in ("impression_categorical", "impression_dense"):
            for role, name in roles.items():
                if name in getattr(self, setting):
                    raise DataError(f"data.{setting} lists '{name}', which is data.{role}; it must list other columns")
        roles["label"] = None if self.label is None else only_column(self.label)
        seen: dict[str, str] = {}
        for role, name in roles.items():
            if name in seen:
                raise DataError(f"data.{seen[name]} and data.{role} are both '{name}'; they must be different columns")
            if name is not None:
                seen[name] = role
        if self.items is None and self.user in (*self.item_categorical, *self.item_dense):
            raise DataError(f"data.item_* lists '{self.user}', the column of the user; an item has many users")

    def _check_ids(self) -> None:
        """Raises DataError for settings of ids and crosses that no table fits."""
        items = [self.item, *self.item_categorical]
        for columns in self.event_crosses:
            if len(columns) < 2:
                raise DataError(f"data.event_crosses has {columns}; a cross needs at least two columns")
            for name in columns:
                if name not in (*items, *self.event_categorical):
                    known = suggest(name, [*items, *self.event_categorical])
                    raise DataError(f"data.event_crosses has '{name}', which is no such column of this config; {known}")
        for cross in self.crosses():
            if cross in self.columns():
                raise DataError(
                    f"data.event_crosses makes '{cross}', which is a column of this config; rename the column"
                )
        known = [*self.user_categorical, *items, *self.event_categorical, *self.crosses()]
        known += [name for name in self.impression_categorical if name not in known]
        for setting in ("min_count", "hash_buckets"):
            for name, number in getattr(self, setting).items():
                if name not in known:
                    raise DataError(f"data.{setting} has '{name}', no categorical column; {suggest(name, known)}")
                if number < 1:
                    raise DataError(f"data.{setting}.{name} is {number}; it must be at least 1")
        if both := self.min_count.keys() & self.hash_buckets.keys():
            raise DataError(f"data.min_count and data.hash_buckets both have '{min(both)}'; buckets need no count")
        if self.eval_negatives < 1:
            raise DataError(f"data.eval_negatives is {self.eval_negatives}; it must be at least 1")
        if not 0 <= self.unknown_share < 1:
            raise DataError(f"data.unknown_share is {self.unknown_share}; it must be in [0, 1)")

    def _check_engagement(self) -> None:
        """Raises DataError for columns of dwell, surface and session that no table fits, or that would leak."""
        given = {"dwell": self.dwell, "surface": self.surface, "session": self.session}
        given = {setting: name for setting, name in given.items() if name is not None}
        for setting, name in given.items():
            for role in ("user", "item", "timestamp", "split_column"):
                if getattr(self, role) == name:
                    raise DataError(f"data.{setting} and data.{role} are both '{name}'; they must be different columns")
            if list(given.values()).count(name) > 1:
                raise DataError(f"data.{setting} is '{name}', which another of dwell, surface and session is too")
        for setting in ("user_categorical", "user_dense", "item_categorical", "item_dense"):
            if self.dwell in getattr(self, setting):
                raise DataError(f"data.{setting} lists '{self.dwell}', which is data.dwell; it differs by event")
        for setting in ("impression_categorical", "impression_dense"):
            if self.dwell in getattr(self, setting):
                why = "it is known only after the event; event_dense shows it in the history only"
                raise DataError(f"data.{setting} lists '{self.dwell}', which is data.dwell; {why}")
        if self.conversion is not None:
            label_columns(self.conversion)
        engaged = self.dwell is not None or self.surface is not None
        if self.policy is not None and not engaged and self.source == "table" and self.prepared is None:
            raise DataError("data.policy is set, but neither data.dwell nor data.surface; it goes by them")

    def _check_statistics(self) -> None:
        for name in self.statistics:
            if name not in STATISTICS:
                raise DataError(f"data.statistics has '{name}'; {suggest(name, STATISTICS)}")
        if self.statistics and self.label is None and self.source == "table" and self.prepared is None:
            raise DataError("data.statistics counts positives, so that it needs data.label")
        for name in self.statistics_columns():
            if name in (*self.user_dense, *self.item_dense):
                raise DataError(f"data.statistics makes '{name}', which is a column of this config; rename the column")

    def _check_split(self) -> None:
        """Raises DataError for a given split that is not given whole."""
        for name, split in (("split_column", "column"), ("validation", "files"), ("test", "files")):
            if self.split == split and getattr(self, name) is None:
                raise DataError(f"data.{name} is not set; data.split: {split} needs it")
            if self.split != split and getattr(self, name) is not None:
                raise DataError(
                    f"data.{name} is set, but data.split is {self.split}; set data.split: {split} to use it"
                )
        if self.split in ("column", "files") and self.source == "synthetic":
            raise DataError(f"data.split is {self.split}; the synthetic table has no given split")
        if not 0 <= self.split_seed < 2**32:
            raise DataError(f"data.split_seed is {self.split_seed}; it must be in [0, 2**32)")
        if self.history is not None:
            parse_rule(self.history)

    def _check_leak(self) -> None:
        if self.label is None:
            return
        defining = label_columns(self.label)
        for setting in ("impression_categorical", "impression_dense"):
            leak = next((name for name in defining if name in getattr(self, setting)), None)
            if leak is not None:
                raise DataError(
                    f"column '{leak}' defines the label, so data.{setting} must not list it; event_categorical and "
                    "event_dense show it in the history only"
                )
        for entity, table, names in (
            ("user", self.users, [*self.user_categorical, *self.user_dense]),
            ("item", self.items, [*self.item_categorical, *self.item_dense]),
        ):
            leak = next((name for name in defining if table is None and name in names), None)
            if leak is not None:
                raise DataError(
                    f"column '{leak}' defines the label, so data.{entity}_* must not list it (unless "
                    f"data.{entity}s is a table that has it); event_categorical and event_dense show it in the history "
                    "only"
                )


def _absolute(path: str | list[str] | None) -> str | list[str] | None:
    if isinstance(path, list):
        return [absolute_path(part) for part in path]
    return path if path is None or "://" in path else absolute_path(path)
