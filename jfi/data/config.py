"""The `data` section of a config: the files, the meaning of their columns, and how rows become samples.

Functions import what needs NumPy or Arrow: a help and a wrong setting do without them.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from jfi.data.errors import DataError
from jfi.data.feature_config import FeatureConfig, FeatureType, HistoryConfig, Of
from jfi.data.labels import ITEM, SESSION, USER, LabelConfig, LabelWindow, Task
from jfi.data.setting_types import Size, check_bounds
from jfi.events.groups import AUTO, BY_CATEGORY, Group, columns_of
from jfi.utils.files import absolute_path

AGE = "age"
#: Ids of `history_age`, which is 1 + floor(log2(age of the event in seconds)): the last one begins at 34 years.
NUM_AGE_BUCKETS = 32
#: The name of the history of a config that names none.
HISTORY = "history"
#: The most histories: each is a bit of a byte of a row.
MAX_HISTORIES = 7
#: The most events of a timeline, as a multiple of `max_history`; a user with more has several timelines, and each event
#: is looked up 4/3 times.
TIMELINE = 4
#: Intervals of a numeric feature of events, between quantiles of the training rows: each has rows enough to learn from.
NUM_QUANTILES = 16
#: The column of semantic IDs in their file, and in the names of their keys.
SID = "sid"
#: The column of weights among `SortedEvents.targets`, and what precedes the name of a label that is not the first.
WEIGHT, LABEL = "weight", "label_"
Batching = Literal["sample", "user"]
#: The settings that name tables.
FILES = ("interactions", "users", "items", "semantic_ids", "validation", "test")


@dataclass
class DataConfig:
    """The files with interactions, the meaning of their columns, and how rows become samples.

    The columns of a user (an item) come from the table `users` (`items`), whose id column has the same name as in
    `interactions`. Without that table they come from the user's (item's) first interaction in time.

    Args:
        interactions: file of interactions, one per row; or a folder of files, a glob such as `parts/*.parquet`, or a
            list of these. The layout follows from the name: `.parquet`, `.csv`, `.tsv`, `.jsonl`, RecBole's `.inter`,
            MovieLens' `ratings.dat` (`::`) and `u.data`; text also with `.gz` or `.zst`.
        users: files of users in the same forms, or None; also RecBole's `.user`, MovieLens' `users.dat` and `u.user`.
        items: files of items in the same forms, or None; also RecBole's `.item`, MovieLens' `movies.dat` and `u.item`.
        semantic_ids: file of the items' semantic IDs that `jfi semantic-ids` wrote, with its codec next to
            it, or None. It names the items in a column `item`, as the table of items does. Events get the key
            `history_sid`, and the target `item_sid`, with the ID -1 for an item that the file lacks.
        user: column of the user's id.
        item: column of the item's id, which is also the key of the target.
        timestamp: column of the time: a number, or a date and time.
        timestamp_unit: unit of a numeric timestamp.
        samples: a rule such as `event == view`, of the form of a label's: only rows where it holds are samples. All
            rows are events of histories and statistics. None means every row with a label.
        label: a column of 0 and 1, or a rule such as `rating >= 4` or `action in [buy, cart] and price > 0`, with the
            operators ==, !=, >=, <=, >, <, in [...], not in [...], and, or, not (...) and parentheses. A row with an
            empty label is only part of histories. None means implicit feedback: every row is a positive. The label's
            columns can be user or item columns only if the table `users` or `items` has them. It is the short form of
            `labels: [{name: label, label: RULE}]`. A label of what comes later is a window, such as
            `{event: event == buy, within: 1 h, of: item}`.
        labels: labels that one model predicts at once, in place of `label`. A row is a sample if it has the first
            one that is not auxiliary; where it lacks another, that one counts in no loss or metric.
        weight: column of the weight of a row in the loss, a positive number, or None. A sampled negative has that of
            its positive. Metrics do not read it.
        negatives: sampled negatives per positive, for implicit feedback only.
        features: the columns that the model reads, one entry each; the item's id is always read, and needs an entry
            only to change its settings.
        statistics: groups of dense features of the sample, made of strictly older rows: rates and counts of the `item`,
            of the `user`, of the user's events of the same item (`user_item`), of each category of the item
            (`user_category`) and of the user's events of items that the same users had (`similar`); the item's
            `popularity` of late; times since the first row of the item and the last events of the user (`age`); the
            target's category in the `session`; and means of the numbers and counts of the values of events
            (`event_values`). Without a label shares take the place of rates. "auto" stands for all with a binary label;
            for `item`, `user`, `popularity`, `age`, `user_category` and `session` without a label; and for none of a
            regression, and where a column that the config names has the name of one that they
            make. Values of a category of the item with a `capacity` are not counted: `user_category`, `session` and
            `event_values` are refused there, and "auto" leaves them out.
        title: column of the item that is shown to people, or None.
        split: "time" cuts the rows ordered by (timestamp, user, item) into `fractions`; "leave_one_out" tests on a
            user's last labeled row, validates on the one before, and trains on the rest; "user" puts all rows of a user
            into one split, chosen by a hash of the id; "column" reads it from `split_column`; "files" takes the
            training rows from `interactions`, and the others from `validation` and `test`.
        fractions: shares of training, validation and test: of the labeled rows with `split: time`, of the users with
            `split: user`.
        max_history: the number of newest events that a history keeps. The model's features get it as `max_seqlen`.
        batching: "sample" gives every sample of a batch its own history. With "user" the samples of a user share one
            timeline, which is looked up and moved once, and each sample sees the events that its history would have:
            the same predictions, in a fraction of the time if users have many samples.
        max_slots: values of a multi-valued column that an event keeps, under the keys `history_<column>_0`, `_1`, ...
        encoding: encoding of text files, by Python's name of it, such as gb18030, cp1252 or utf-16.
        quoting: whether `"` quotes fields of CSV and TSV; with false it is an ordinary character.
        delimiter: text between the fields of text files, such as `;` or `|`; several characters, such as `::`, or one
            outside of ASCII need files without quotes. None means a comma in `.csv` and a tab in `.tsv`. With it, files
            of any other name, such as `log.txt`, are text files too.
        header: by table, as `interactions`, `users` or `items`, the names of the columns of text files that have no
            header.
        missing_values: texts that mean a missing value in every column, such as `NULL` or `-1`. An empty text, null and
            NaN always do.
        null_ids: what to do with a row of interactions without a user or an item, and with one of `users` or `items`
            without its id: "refuse" raises an error that names the first one, "drop" leaves them out, also of tables to
            score; the summary and the log count them.
        split_column: column of the split, with `split: column`: train, validation (or val, valid, dev) or test.
        validation: files of the validation rows, as `interactions`, with `split: files`.
        test: files of the test rows, as `interactions`, with `split: files`.
        request_id: column of the id of a request or an impression, or None. The rows of a user with the same id are in
            one split.
        event_id: column of an id of a row, equal for one that is sent again: a row that comes later with the id of one
            of its user's rows counts once in a state of users. None means that rows with the same user, item and time
            are one.
        history: a rule such as `action == click`, of the form of a label's: only rows where it holds are events of
            histories. Other rows are samples, if they have a label. None means that every row is an event.
        histories: several histories by name, such as `{clicks: event == click, orders: {rule: event == buy,
            max_history: 50}}`, each a rule or settings. There are 2 to 7; a row may be an event of several. Each is an
            entry of the model's interaction, with the keys `<name>_<column>`. Statistics count events of any of them.
        dwell: column of how long the user stayed with the event, a number; or None. It is known after the event only,
            and enters `policy` alone, unless it is a feature of events too.
        dwell_unit: unit of `dwell`, "s" or "ms".
        surface: column of where the event happened, such as a tab, a feed or a kind of page, or None; as `dwell`.
        session: column of the session's id, or None: then a session ends where a user pauses for 30 minutes.
        policy: file of a `jfi.history_policies.Policy`, which selects among the newest `max_history` events of a
            history, by their dwell and surface and the user's segment, and gives them weights. None keeps all.
        prepared: folder that `jfi prepare` wrote. It replaces the tables, and the settings of this section are those
            that it was prepared with, except `max_history`, `batching`, `negatives` and `policy`, which a run may set.
    """

    interactions: str | list[str] | None = None
    users: str | list[str] | None = None
    items: str | list[str] | None = None
    semantic_ids: str | None = None
    user: str = "user_id"
    item: str = "item_id"
    timestamp: str = "timestamp"
    timestamp_unit: Literal["s", "ms", "us", "ns"] = "s"
    samples: str | None = None
    label: str | LabelWindow | None = None
    labels: list[LabelConfig] = field(default_factory=list)
    weight: str | None = None
    negatives: Annotated[int, Meta(ge=0, lt=2**31)] = 4
    features: list[FeatureConfig] = field(default_factory=list)
    statistics: list[Group] | Literal["auto"] = "auto"
    title: str | None = None
    split: Literal["time", "leave_one_out", "user", "column", "files"] = "time"
    fractions: list[float] = field(default_factory=lambda: [0.8, 0.1, 0.1])
    max_history: Size = 200
    batching: Batching = "sample"
    max_slots: Size = 8
    encoding: str = "utf-8"
    quoting: bool = True
    delimiter: str | None = None
    header: dict[str, list[str]] = field(default_factory=dict)
    missing_values: list[str] = field(default_factory=list)
    null_ids: Literal["refuse", "drop"] = "refuse"
    split_column: str | None = None
    validation: str | list[str] | None = None
    test: str | list[str] | None = None
    request_id: str | None = None
    event_id: str | None = None
    history: str | None = None
    histories: dict[str, str | HistoryConfig] = field(default_factory=dict)
    dwell: str | None = None
    dwell_unit: Literal["s", "ms"] = "s"
    surface: str | None = None
    session: str | None = None
    policy: str | None = None
    prepared: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "data.", DataError)

    def targets(self) -> list[LabelConfig]:
        """The labels that the model predicts: those of `labels`, or `label` as one named "label"."""
        found = [one for one in self.labels if one.task != "auxiliary"]
        task: Task = "regression" if isinstance(self.label, LabelWindow) and self.label.value is not None else "binary"
        return found or [LabelConfig("label", self.label, task)]  # type: ignore[arg-type] # None: no label

    def auxiliary_labels(self) -> list[LabelConfig]:
        """The labels that only the loss of the training rows reads."""
        return [one for one in self.labels if one.task == "auxiliary"]

    def trained_labels(self) -> list[LabelConfig]:
        """`targets()`, and behind them `auxiliary_labels()`."""
        return [*self.targets(), *self.auxiliary_labels()]

    def further_labels(self) -> dict[str, LabelConfig]:
        """The trained labels but the first, by the name of their column."""
        return {LABEL + one.name: one for one in self.trained_labels()[1:]}

    def target_names(self) -> list[str]:
        """The names of the columns `[E]` float32 of `SortedEvents.targets`."""
        return [*([] if self.weight is None else [WEIGHT]), *self.further_labels()]

    def labels_of(self, label: Any, targets: dict[str, Any]) -> list[Any]:
        """The column of each of `trained_labels()`, of the first label and `SortedEvents.targets`."""
        return [label, *(targets[name] for name in self.further_labels())]

    def label_windows(self) -> dict[str, LabelWindow]:
        """The trained labels that are windows, by the name of their column."""
        names = ["label", *self.further_labels()]
        labels = {name: one.label for name, one in zip(names, self.trained_labels(), strict=True)}
        return {name: one for name, one in labels.items() if isinstance(one, LabelWindow)}

    @property
    def is_raw_log(self) -> bool:
        """Says whether a rule chooses the samples, or labels are of what comes later."""
        return self.samples is not None or bool(self.label_windows())

    @property
    def label_delay(self) -> float:
        """The seconds after a row at which the first label is known."""
        first = self.targets()[0].label
        return first.seconds if isinstance(first, LabelWindow) else 0.0

    def window_columns(self) -> list[str]:
        """The columns of interactions that rows of label windows have in common."""
        found = dict.fromkeys(one.of for one in self.label_windows().values() if one.of not in (USER, ITEM, SESSION))
        return [name for name in found if self.items is None or name not in self.names("item", "category")]

    def named_histories(self) -> dict[str, HistoryConfig]:
        """The histories by name; the one of `history` is named "history"."""
        given = self.histories or {HISTORY: HistoryConfig(self.history)}
        return {name: HistoryConfig(one) if isinstance(one, str) else one for name, one in given.items()}

    def history_rules(self) -> list[tuple[str, str | None]]:
        """The settings of the rules of histories, each with its rule; none where all rows are events of one history."""
        if not self.histories:
            return [] if self.history is None else [("history", self.history)]
        return [(f"histories.{name}", one.rule) for name, one in self.named_histories().items()]

    def history_lengths(self) -> dict[str, int]:
        """The most events of each history, by name."""
        return {name: one.max_history or self.max_history for name, one in self.named_histories().items()}

    def sample_columns(self) -> list[str]:
        """The columns that the rule `samples` compares."""
        from jfi.data.schema.rules import parse_rule

        return [] if self.samples is None else parse_rule(self.samples).columns

    def interaction_settings(self) -> list[str]:
        """The settings that name the interactions, by split with `split: files`."""
        names = ["interactions", "validation", "test"] if self.split == "files" else ["interactions"]
        return [name for name in names if getattr(self, name) is not None]

    @property
    def is_implicit(self) -> bool:
        """True if there is no label, so that every row is a positive."""
        return self.targets()[0].label is None

    @property
    def task(self) -> str:
        """That of the first label."""
        return self.targets()[0].task

    def label_columns(self) -> list[str]:
        """The columns of all labels, auxiliary ones among them."""
        from jfi.data.schema.rules import label_columns

        labels = [] if self.is_implicit else self.trained_labels()
        found = [name for one in labels for name in label_columns(one.label)]
        return list(dict.fromkeys(found))

    def statistics_groups(self) -> list[Group]:
        """The groups of `statistics`, or those that "auto" stands for; the dataset has those of a prepared one."""
        if self.statistics != "auto":
            return self.statistics
        if self.prepared is not None or self.task == "regression":
            return []
        groups = [one for one in AUTO[self.is_implicit] if one not in BY_CATEGORY or not self.growing("item")]
        made = self._columns_of(groups)
        is_taken = len(set(made)) < len(made) or not {*self.columns(), *self.crosses()}.isdisjoint(made)
        return [] if is_taken else groups

    def resolved(self) -> "DataConfig":
        """The config with the groups that `statistics: auto` stands for, and their columns as features of contexts."""
        config = dataclasses.replace(self, statistics=self.statistics_groups())
        return config.with_context_numbers(config.statistics_columns())

    def with_context_numbers(self, names: list[str]) -> "DataConfig":
        """A copy whose features include numbers of contexts of these names."""
        known = self.names("context", "number")
        features = [FeatureConfig(name, "context", "number") for name in names if name not in known]
        return dataclasses.replace(self, features=[*self.features, *features])

    def statistics_columns(self) -> list[str]:
        """The names of the dense features that `statistics` makes."""
        return self._columns_of(self.statistics_groups())

    def _columns_of(self, groups: list[Group]) -> list[str]:
        return columns_of(groups, self.is_implicit, self.names("item", "category"), *self.event_values())

    def event_values(self) -> tuple[list[str], list[str]]:
        """The numbers and the categorical columns of events that statistics read."""
        return self.names("event", "number"), self.names("event", "category")

    def names(self, of: Of, type: FeatureType | None = None) -> list[str]:
        """The columns of the features of an entity and a type, None for both, without the item's id and crosses."""
        found = [one for one in self.features if one.of == of and type in (None, one.type) and not one.cross]
        return [one.name for one in found if (of, one.name) != ("item", self.item)]

    def feature(self, name: str) -> FeatureConfig:
        """The first entry of a name, or one with default settings, as of the item's id without an entry."""
        return next((one for one in self.features if one.name == name), FeatureConfig(name, "item"))

    def growing(self, of: Of) -> list[str]:
        """The columns of `names(of)` with a capacity."""
        return [name for name in self.names(of) if self.feature(name).capacity is not None]

    def crosses(self) -> dict[str, list[str]]:
        """The columns of each cross of events, by the name of the cross."""
        return {one.name: one.cross for one in self.features if one.cross}

    def separators(self) -> dict[str, str]:
        """The separators of multi-valued columns, by column."""
        return {one.name: one.separator for one in self.features if one.separator is not None}

    def defaults(self) -> dict[str, str | float]:
        """The text or the number that stands for a missing value, by column."""
        from jfi.utils.encoding import text_of

        return {
            one.name: float(one.default) if one.type == "number" else str(text_of(one.default))
            for one in self.features
            if one.default is not None
        }

    def columns(self, of_interactions: bool = False) -> set[str]:
        """The names of all columns to read, or of those that no table of users or items has."""
        from jfi.data.schema.rules import parse_rule

        tables = (("user", self.users), ("item", self.items))
        apart = {of for of, table in tables if of_interactions and table is not None}
        given = (self.request_id, self.split_column, self.weight, *self.engagement_columns())
        columns = {self.user, self.item, self.timestamp, *self.label_columns(), *self.sample_columns()}
        columns.update(self.window_columns())
        columns.update(name for name in (*given, None if "item" in apart else self.title) if name is not None)
        columns.update(one.name for one in self.features if not one.cross and one.of not in apart)
        columns -= set() if self.statistics == "auto" else {*self.statistics_columns()}
        rules = [rule for _, rule in self.history_rules() if rule is not None]
        return columns.union(*(parse_rule(rule).columns for rule in rules))

    def engagement_columns(self) -> list[str]:
        """The columns of `dwell`, `surface` and `session`, as far as they are set."""
        return [name for name in (self.dwell, self.surface, self.session) if name is not None]

    def with_absolute_paths(self) -> "DataConfig":
        """A copy whose files are named by absolute paths, so that it can be read in any working directory."""
        paths = {name: _absolute(getattr(self, name)) for name in (*FILES, "policy", "prepared")}
        return dataclasses.replace(self, **paths)

    def without_tables(self) -> "DataConfig":
        """A copy that can be written: of each table in memory it has the SHA-256."""
        from jfi.data.io.paths import name_tables

        named = {name: getattr(self, name) for name in FILES}
        return dataclasses.replace(self, **{name: name_tables(source) for name, source in named.items()})


def _absolute(path: Any) -> Any:
    if isinstance(path, list | tuple):
        return [_absolute(part) for part in path]
    if not isinstance(path, str | os.PathLike) or "://" in os.fspath(path):  # none, a table in memory, or a URL
        return path
    return absolute_path(os.fspath(path))
