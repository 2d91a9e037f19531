"""Faults in the settings of `data` that are known before a table is read."""

import codecs
import math

from jfi.data.config import AGE, HISTORY, MAX_HISTORIES, SID, DataConfig
from jfi.data.errors import DataError
from jfi.data.feature_config import FeatureConfig
from jfi.data.labels import LabelWindow
from jfi.data.schema.rules import label_columns, only_column, parse_rule
from jfi.events.groups import BY_CATEGORY
from jfi.utils.encoding import LARGEST_NUMBER, text_of
from jfi.utils.errors import suggest

#: The settings of an entry beyond its name, what has the column, and its type.
_SETTINGS = ("width", "max_values", "min_count", "hash_buckets", "capacity", "separator", "default", "cross")


def check_data_config(config: DataConfig) -> None:
    """Raises DataError for settings that are wrong for any table."""
    _check_files(config)
    _check_targets(config)
    if config.is_implicit and config.negatives < 1:
        raise DataError(f"data.negatives is {config.negatives}; without a label it must be at least 1")
    whole = math.isclose(sum(config.fractions), 1.0, abs_tol=1e-6)
    if len(config.fractions) != 3 or min(config.fractions) <= 0 or not whole:
        raise DataError(f"data.fractions is {config.fractions}; it must hold three positive numbers that sum to 1")
    if config.interactions is None and config.prepared is None:
        raise DataError("data.interactions is not set; it must name the file of interactions")
    _check_statistics(config)
    _check_roles(config)
    _check_features(config)
    _check_leaks(config)
    _check_split(config)
    _check_histories(config)


def _check_files(config: DataConfig) -> None:
    try:
        # Codecs such as rot13 and base64 are not for text: str.encode refuses them.
        "a".encode(config.encoding)
        codecs.getincrementaldecoder(config.encoding)
    except (LookupError, ValueError) as error:
        raise DataError(
            f"data.encoding is '{config.encoding}'; it must be an encoding that Python knows, such as utf-8, gb18030, "
            "latin-1, cp1252 or utf-16"
        ) from error
    if config.delimiter is not None and (not config.delimiter or any(sign in config.delimiter for sign in '"\r\n')):
        raise DataError(f"data.delimiter is {config.delimiter!r}; it must be a character such as ';', and no quote")
    for name, columns in config.header.items():
        if name not in ("interactions", "users", "items"):
            raise DataError(f"data.header has '{name}'; it must have interactions, users or items")
        if not columns or len(set(columns)) < len(columns):
            raise DataError(f"data.header.{name} is {columns}; it must be the names of columns, each once")


def _check_features(config: DataConfig) -> None:
    """Raises DataError for an entry that no table fits, and for entries that exclude each other."""
    names, seen = [one.name for one in config.features], {}
    if "" in names:
        raise DataError(f"data.features[{names.index('')}].name is ''; it must name a column")
    items = [one for one in config.features if (one.of, one.name) == ("item", config.item)]
    for one in [*([] if items else [FeatureConfig(config.item, "item")]), *config.features]:
        key = f"data.features '{one.name}'"
        _check_values(one, key)
        if one in items and (one.type == "number" or one.separator is not None or one.default is not None):
            raise DataError(f"{key} is the item's id; it must be a category without a separator or a default")
        if (other := seen.get(one.name)) is not None:
            if {one.of, other.of} != {"event", "context"} or {one.type, other.type} != {"category"}:
                both = "as a category of event and one of context"
                raise DataError(f"data.features lists the column '{one.name}' twice; it may do so only {both}")
            for setting in _SETTINGS[:-1]:
                if getattr(one, setting) != getattr(other, setting):
                    raise DataError(f"{key}: {setting} must be equal in its entry of event and that of context")
        seen[one.name] = one
        if one.name == SID and config.semantic_ids is not None:
            raise DataError(f"data.features lists '{SID}', which is the column of data.semantic_ids; rename the column")
        if one.name == AGE and one.of in ("item", "event"):
            raise DataError(f"{key} needs the key '{HISTORY}_{AGE}', which is the age of the events; rename the column")
        if one.cross:
            _check_cross(one, key, config)


def _check_values(one: FeatureConfig, key: str) -> None:
    """Raises DataError for settings of an entry that do not fit its type or each other."""
    changed = [name for name in _SETTINGS if getattr(one, name) != getattr(FeatureConfig("", "item"), name)]
    if one.type == "number":
        allowed = ("default", "width") if one.of == "event" else ("default",)
        for setting in changed:
            if setting not in allowed:
                raise DataError(f"{key}: {setting} is of features of type category; this one is of type number")
    for setting in ("min_count", "max_values"):
        if setting in changed and one.hash_buckets is not None:
            raise DataError(f"{key} has both {setting} and hash_buckets; buckets need none")
    for setting in ("max_values", "hash_buckets"):
        if setting in changed and one.capacity is not None:
            raise DataError(f"{key} has both {setting} and capacity; a table that grows needs none")
    if one.default is not None:
        if one.cross or one.separator is not None:
            raise DataError(f"{key} has a default; it must be a column with single values")
        if one.type == "number":
            if isinstance(one.default, str) or not abs(one.default) <= LARGEST_NUMBER:
                raise DataError(f"{key}: default is {one.default!r}; it must be a finite number of float32")
        elif text_of(one.default) is None:
            raise DataError(f"{key}: default is {one.default!r}, which counts as missing")
    if one.separator == "":
        raise DataError(f"{key}: separator is ''; it must be the separator of the values")


def _check_cross(one: FeatureConfig, key: str, config: DataConfig) -> None:
    known = [config.item, *config.names("item", "category"), *config.names("event", "category")]
    if one.of != "event" or one.separator is not None:
        raise DataError(f"{key} is a cross; it must be of event, without a separator")
    if len(one.cross) < 2:
        raise DataError(f"{key}: cross is {one.cross}; it must have at least two columns")
    for name in one.cross:
        if name not in known:
            raise DataError(f"{key}: cross has '{name}', which is no such category; {suggest(name, known)}")
    if one.name in config.columns():
        raise DataError(f"{key} is a cross, but a column has that name; rename the cross")


def _check_roles(config: DataConfig) -> None:
    """Raises DataError if a column has two roles that exclude each other."""
    keys = {name: getattr(config, name) for name in ("user", "item", "timestamp", "split_column")}
    engagement = {name: getattr(config, name) for name in ("dwell", "surface", "session")}
    rules = {f"labels[{index}]": one.label for index, one in enumerate(config.labels)}
    rules |= {} if config.label is None else {"label": config.label}
    losses = {
        setting: str(label) if isinstance(label, LabelWindow) else only_column(label) or parse_rule(label).root
        for setting, label in rules.items()
    }
    for roles in (keys | {"weight": config.weight} | losses, keys | engagement):
        seen: dict[object, str] = {}
        for role, column in roles.items():
            if column is not None and (other := seen.setdefault(column, role)) != role:
                shown = column if isinstance(column, str) else rules[role]
                raise DataError(
                    f"data.{other} and data.{role} are both '{shown}'; they must be different columns or rules"
                )
    for role, column in (keys | {"weight": config.weight}).items():
        if column in config.names("context"):
            raise DataError(f"data.features lists '{column}' of context, which is data.{role}; list other columns")
    if config.items is None and config.user in config.names("item"):
        raise DataError(f"data.features lists '{config.user}' of item, which is data.user; an item has many users")


def _check_leaks(config: DataConfig) -> None:
    """Raises DataError if a feature shows the sample's own label, or what is known only after its event."""
    for of, table in (("context", None), ("user", config.users), ("item", config.items)):
        names = config.names(of)
        for leak in config.label_columns() if table is None else ():
            if leak in names:
                unless = "" if of == "context" else f" (unless data.{of}s is a table that has it)"
                raise DataError(
                    f"column '{leak}' defines the label, so data.features must not list it of {of}{unless}; "
                    "`of: event` shows it in the history only"
                )
        if config.dwell in names:
            why = "it is known only after the event; `of: event` shows it in the history only"
            why = why if of == "context" else "it differs by event"
            raise DataError(f"data.features lists '{config.dwell}' of {of}, which is data.dwell; {why}")


def _check_targets(config: DataConfig) -> None:
    """Raises DataError for labels, weights and a policy that no table fits."""
    if config.labels and config.label is not None:
        raise DataError("data.label and data.labels are both set; name the label among data.labels, with label null")
    if config.labels and config.is_implicit:
        raise DataError("data.labels has auxiliary ones alone; one must not be, for the model to predict")
    names = [one.name for one in config.labels]
    for index, one in enumerate(config.labels):
        key = f"data.labels[{index}]"
        if not one.name.isidentifier() or not one.name.isascii():
            raise DataError(f"{key}.name is '{one.name}'; it must be of letters, digits and _, a letter first")
        if names.count(one.name) > 1:
            raise DataError(f"data.labels has the name '{one.name}' twice; names must differ")
        if isinstance(one.label, LabelWindow):
            if (one.task == "regression") != (one.label.value is not None):
                what = "a label with a value is of task regression, one without is not"
                raise DataError(f"{key}.task is {one.task}, and label '{one.label}': {what}")
        elif one.task == "regression" and only_column(one.label) is None:
            raise DataError(f"label '{one.label}' is a rule; with task regression it must be a column of numbers")
    for window in config.label_windows().values():
        label_columns(window)
        if window.of in (config.user, config.timestamp):
            raise DataError(f"data.label.of is '{window.of}'; it must be item, session, user or a column of rows")
    if config.samples is not None:
        parse_rule(config.samples)
        if config.is_implicit:
            raise DataError("data.samples is set, but no label; name a label, or the rows of histories by data.history")
    if config.policy is not None and config.dwell is None and config.surface is None and config.prepared is None:
        raise DataError("data.policy is set, but neither data.dwell nor data.surface; it goes by them")


def _check_statistics(config: DataConfig) -> None:
    if config.statistics_groups() and config.task == "regression":
        raise DataError("data.statistics counts positives, and the label is a regression; it needs a binary one")
    for name in config.statistics_groups():
        if name in BY_CATEGORY and (growing := config.growing("item")):
            what = f"counts by '{growing[0]}', which has a capacity; leave the group or the capacity out"
            raise DataError(f"data.statistics has '{name}', which {what}")
    made = config.statistics_columns()
    if twice := next((name for name in made if made.count(name) > 1), None):
        raise DataError(f"data.statistics makes '{twice}' twice, by a category of the item; rename the column")
    for name in made:
        if name in (*config.names("user", "number"), *config.names("item", "number")):
            raise DataError(f"data.statistics makes '{name}', which is a column of this config; rename the column")


def _check_split(config: DataConfig) -> None:
    """Raises DataError for a given split that is not given whole."""
    for name, split in (("split_column", "column"), ("validation", "files"), ("test", "files")):
        if config.split == split and getattr(config, name) is None:
            raise DataError(f"data.{name} is not set; data.split: {split} needs it")
        if config.split != split and getattr(config, name) is not None:
            raise DataError(f"data.{name} is set, but data.split is {config.split}; set data.split: {split} to use it")


def _check_histories(config: DataConfig) -> None:
    """Raises DataError for histories that no table fits, and for settings that take one history alone."""
    for _, rule in config.history_rules():
        if rule is not None:
            parse_rule(rule)
    if config.histories and config.history is not None:
        raise DataError("data.history and data.histories are both set; move the rule into data.histories")
    if not config.histories:
        return
    if not 2 <= len(config.histories) <= MAX_HISTORIES:
        advice = f"there can be 2 to {MAX_HISTORIES}; data.history is the rule of one"
        raise DataError(f"data.histories has {len(config.histories)}; {advice}")
    columns = [config.item, *(one.name for one in config.features if one.of in ("item", "event")), SID]
    for name, one in config.named_histories().items():
        key = f"data.histories.{name}"
        if not name.isidentifier() or not name.isascii() or name in ("user", "item", "context", "number"):
            raise DataError(f"{key}: the name must be of letters, digits and _, and not user, item, context or number")
        for column in one.features or []:
            if column not in columns:
                raise DataError(f"{key}.features has '{column}', which no event has; {suggest(column, columns)}")
        if one.features == []:
            raise DataError(f"{key}.features is []; an event must have a column")
    if config.batching == "user":
        raise DataError("data.batching is user, and data.histories has several; timelines have one: set it to sample")
    if config.policy is not None:
        raise DataError("data.policy is set, and data.histories has several; a policy takes one")
