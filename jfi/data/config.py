"""The `data` section of a config: the files, the meaning of their columns, and how rows become samples."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from jfi.data.config_checks import check_settings
from jfi.data.schema.labels import label_columns
from jfi.data.schema.rules import parse_rule
from jfi.data.settings import AGE, FILES, HISTORY, SID, STATISTICS, Batching, LabelConfig, SyntheticConfig, Task
from jfi.utils.files import absolute_path

__all__ = ["AGE", "FILES", "HISTORY", "SID", "STATISTICS", "Batching", "DataConfig", "LabelConfig", "SyntheticConfig"]


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
        task: of the label: "binary", or "regression" for a column of real numbers, which the model predicts by their
            squared error.
        labels: several labels that one model predicts at once, at least two; `label` and `task` are those of the first.
            A row is a sample if it has the first one; where it lacks another, that one counts in no loss or metric.
        auxiliary_labels: further columns of 0 and 1, or rules, whose losses help to train the model: with the label
            `rating >= 4`, `rating >= 3` and `rating >= 5`. The model predicts none of them, and no metric reads them. A
            row that lacks one counts in no loss of it.
        auxiliary_weight: of the loss of each auxiliary label beside that of a label.
        weight: column of the weight of a row in the loss, a positive number, or None. A sampled negative has that of
            its positive. Metrics do not read it.
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
    task: Task = "binary"
    labels: list[LabelConfig] = field(default_factory=list)
    auxiliary_labels: list[str] = field(default_factory=list)
    auxiliary_weight: float = 0.5
    weight: str | None = None
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

    def __post_init__(self) -> None:
        if self.labels and self.label is None:
            self.label, self.task = self.labels[0].label, self.labels[0].task

    def targets(self) -> list[LabelConfig]:
        """`labels`, or the only label as one named "label"."""
        return self.labels or [LabelConfig("label", self.label, self.task)]

    def trained_labels(self) -> list[LabelConfig]:
        """`targets()`, and behind them `auxiliary_labels`, which only the loss of the training rows reads."""
        weight = self.auxiliary_weight
        others = [LabelConfig(f"auxiliary-{i}", one, weight=weight) for i, one in enumerate(self.auxiliary_labels)]
        return [*self.targets(), *others]

    def label_columns(self) -> list[str]:
        """The columns of all labels, auxiliary ones among them."""
        labels = [] if self.label is None else self.trained_labels()
        found = [name for one in labels for name in label_columns(one.label)]
        return list(dict.fromkeys(found))

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
        columns.update(self.label_columns())
        columns |= {name for name in (self.title, self.group, self.split_column, self.weight) if name is not None}
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
        columns.update(self.label_columns())
        columns.update([] if self.history is None else label_columns(self.history))
        columns |= {name for name in (self.group, self.split_column, self.weight) if name is not None}
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
        check_settings(self)


def _absolute(path: str | list[str] | None) -> str | list[str] | None:
    if isinstance(path, list):
        return [absolute_path(part) for part in path]
    return path if path is None or "://" in path else absolute_path(path)
