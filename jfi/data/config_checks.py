"""Faults in the settings of `data` that are known before a table is read."""

import math

from jfi.data.config import AGE, HISTORY, SID, STATISTICS, DataConfig, FeatureConfig
from jfi.data.errors import DataError
from jfi.data.schema.rules import label_columns, only_column, parse_rule
from jfi.utils.encoding import LARGEST_NUMBER, text_of
from jfi.utils.suggest import suggest

MAX_COUNT = 2**31 - 1
#: By setting its least and its greatest value.
_BOUNDS = {
    **dict.fromkeys(("max_history", "max_slots", "num_quantiles", "num_age_buckets"), (1, MAX_COUNT)),
    **{f"synthetic.{name}": (1, MAX_COUNT) for name in ("num_users", "num_items", "num_categories", "mean_length")},
    "synthetic.seed": (0, math.inf),
    "negatives": (-math.inf, MAX_COUNT),
    "eval_negatives": (1, math.inf),
    "split_seed": (0, 2**32 - 1),
}
#: The settings that a column's entry of event and its entry of context share.
_OF_VALUES = ("type", "width", "max_values", "min_count", "hash_buckets", "separator", "default")

#: By setting of an entry its greatest value; the least is 1. A hash has 32 bits.
_MAX_OF_VALUES = {"width": 2**16, "max_values": MAX_COUNT, "min_count": MAX_COUNT, "hash_buckets": 2**32}


def check_data_config(config: DataConfig) -> None:
    """Raises DataError for settings that are wrong for any table."""
    for setting, (least, most) in _BOUNDS.items():
        section, _, name = setting.rpartition(".")
        _check_bound(setting, getattr(getattr(config, section) if section else config, name), least, most)
    if config.max_timeline is not None and not config.max_history <= config.max_timeline <= MAX_COUNT:
        bounds = f"from data.max_history, {config.max_history}, to {MAX_COUNT}"
        raise DataError(f"data.max_timeline is {config.max_timeline}; it must be {bounds}, or null")
    config.file_settings().check()
    _check_targets(config)
    if config.label is None and config.negatives < 1:
        raise DataError(f"data.negatives is {config.negatives}; without a label it must be at least 1")
    if not 0 <= config.unknown_share < 1:
        raise DataError(f"data.unknown_share is {config.unknown_share}; it must be in [0, 1)")
    whole = math.isclose(sum(config.fractions), 1.0, abs_tol=1e-6)
    if len(config.fractions) != 3 or min(config.fractions) <= 0 or not whole:
        raise DataError(f"data.fractions is {config.fractions}; it must hold three positive numbers that sum to 1")
    if config.source == "table" and config.interactions is None and config.prepared is None:
        raise DataError(
            "data.interactions is not set; it must name the file of interactions (or set data.source: synthetic)"
        )
    _check_statistics(config)
    _check_roles(config)
    _check_features(config)
    _check_leak(config)
    _check_split(config)
    _check_engagement(config)


def _check_bound(setting: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        bound = f"at most {most}" if value > most else f"at least {least}"
        raise DataError(f"data.{setting} is {value}; it must be {bound}")


def _check_features(config: DataConfig) -> None:
    """Raises DataError for an entry that no table fits, and for entries that exclude each other."""
    seen = {config.item: FeatureConfig(config.item, "item")}
    for place, one in enumerate(config.features):
        key = f"data.features '{one.name}'"
        if not one.name:
            raise DataError(f"data.features[{place}].name is ''; it must name a column")
        _check_values(one, key)
        if one.name == config.item and one.of == "item":
            if one.type == "number" or one.separator is not None or one.default is not None:
                raise DataError(f"{key} is the item's id; it must be a category without a separator or a default")
            if sum((other.of, other.name) == ("item", config.item) for other in config.features) > 1:
                raise DataError(f"data.features lists the column '{one.name}' twice")
            continue
        if (other := seen.get(one.name)) is not None:
            if {one.of, other.of} != {"event", "context"} or {one.type, other.type} != {"category"}:
                both = "as a category of event and one of context"
                raise DataError(f"data.features lists the column '{one.name}' twice; it may do so only {both}")
            for setting in _OF_VALUES:
                if getattr(one, setting) != getattr(other, setting):
                    raise DataError(f"{key}: {setting} must be equal in its entry of event and that of context")
        seen[one.name] = one
        if one.name == SID and config.semantic_ids is not None:
            raise DataError(f"data.features lists '{SID}', which is the column of data.semantic_ids; rename the column")
        if one.name == AGE and (one.of in ("item", "event")):
            raise DataError(f"{key} needs the key '{HISTORY}{AGE}', which is the age of the events; rename the column")
    _check_crosses(config)


def _check_values(one: FeatureConfig, key: str) -> None:
    """Raises DataError for settings of an entry that do not fit its type or each other."""
    if one.type == "number":
        settings = ["max_values", "min_count", "hash_buckets", "separator", "cross"]
        for setting in settings if one.of == "event" else ["width", *settings]:
            if getattr(one, setting) != getattr(FeatureConfig("", "item"), setting):
                raise DataError(f"{key}: {setting} is of features of type category; this one is of type number")
    for setting, most in _MAX_OF_VALUES.items():
        value = getattr(one, setting)
        if value is not None and not 1 <= value <= most:
            raise DataError(f"{key}: {setting} is {value}; it must be from 1 to {most}")
    for setting, is_set in (("min_count", one.min_count > 1), ("max_values", one.max_values is not None)):
        if one.hash_buckets is not None and is_set:
            raise DataError(f"{key} has both {setting} and hash_buckets; buckets need none")
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


def _check_crosses(config: DataConfig) -> None:
    known = [config.item, *config.names("item", "category"), *config.names("event", "category")]
    for one in config.features:
        if not one.cross:
            continue
        key = f"data.features '{one.name}'"
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
    """Raises DataError if one column is to be two of the user, the item, the time, the split, the weight and labels."""
    names = ("user", "item", "timestamp", "split_column", "weight")
    roles = {role: name for role in names if (name := getattr(config, role)) is not None}
    for role, name in roles.items():
        if name in config.names("context"):
            raise DataError(f"data.features lists '{name}' of context, which is data.{role}; list other columns")
    labels = [] if config.label is None else [one.label for one in config.targets()]
    settings = {f"labels[{place}]" if config.labels else "label": label for place, label in enumerate(labels)}
    settings |= {f"auxiliary_labels[{place}]": label for place, label in enumerate(config.auxiliary_labels)}
    for setting, label in settings.items():
        if (name := only_column(label)) is not None:
            roles[setting] = name
    seen: dict[str, str] = {}
    for role, name in roles.items():
        if name in seen:
            raise DataError(f"data.{seen[name]} and data.{role} are both '{name}'; they must be different columns")
        seen[name] = role
    if config.items is None and config.user in config.names("item"):
        raise DataError(f"data.features lists '{config.user}' of item, which is data.user; an item has many users")


def _meaning(label: str) -> object:
    """Equal for labels that differ in spaces and quotes alone."""
    return only_column(label) or parse_rule(label).root


def _check_targets(config: DataConfig) -> None:
    """Raises DataError for labels and weights that no table fits."""
    own = {"task": config.task != "binary", "labels": bool(config.labels), "weight": config.weight is not None}
    own["auxiliary_labels"] = bool(config.auxiliary_labels)
    if config.source == "synthetic" and any(own.values()):
        setting = next(name for name, is_set in own.items() if is_set)
        raise DataError(f"data.{setting} is set, but the synthetic table has a label of its own, and no weights")
    if config.task == "regression" and config.label is None and config.prepared is None:
        raise DataError("data.task is regression, but data.label is not set; it must name a column of numbers")
    if len(config.labels) == 1:
        raise DataError("data.labels has one label; it must have at least two, or use data.label")
    for place, one in enumerate(config.labels):
        key = f"data.labels[{place}]"
        if not one.name.isidentifier() or not one.name.isascii():
            raise DataError(f"{key}.name is '{one.name}'; it must be of letters, digits and _, a letter first")
        if [other.name for other in config.labels].count(one.name) > 1:
            raise DataError(f"data.labels has the name '{one.name}' twice; names must differ")
        if not 0 < one.weight < math.inf:
            raise DataError(f"{key}.weight is {one.weight}; it must be positive and finite")
    if config.labels and (config.label, config.task) != (config.labels[0].label, config.labels[0].task):
        first = f"'{config.labels[0].label}', {config.labels[0].task}"
        raise DataError(
            f"data.label and data.task are '{config.label}', {config.task}, but the first of data.labels is {first}; "
            "leave data.label out, or make them equal"
        )
    if config.auxiliary_labels and config.label is None and config.prepared is None:
        raise DataError("data.auxiliary_labels is set, but data.label is not; they are beside a label")
    if not 0 < config.auxiliary_weight < math.inf:
        raise DataError(f"data.auxiliary_weight is {config.auxiliary_weight}; it must be positive and finite")
    found = [_meaning(one.label) for one in config.targets() if one.label is not None]
    for label in config.auxiliary_labels:
        if _meaning(label) in found:
            raise DataError(f"data.auxiliary_labels has '{label}', which is there already; each must be another label")
        found.append(_meaning(label))
    for one in [] if config.label is None else config.targets():
        if one.task == "regression" and only_column(one.label) is None:
            raise DataError(f"label '{one.label}' is a rule; with task regression it must be a column of numbers")


def _check_engagement(config: DataConfig) -> None:
    """Raises DataError for columns of dwell, surface and session that no table fits, or that would leak."""
    given = {"dwell": config.dwell, "surface": config.surface, "session": config.session}
    given = {setting: name for setting, name in given.items() if name is not None}
    for setting, name in given.items():
        for role in ("user", "item", "timestamp", "split_column"):
            if getattr(config, role) == name:
                raise DataError(f"data.{setting} and data.{role} are both '{name}'; they must be different columns")
        if list(given.values()).count(name) > 1:
            raise DataError(f"data.{setting} is '{name}', which another of dwell, surface and session is too")
    for of, why in (
        ("user", "it differs by event"),
        ("item", "it differs by event"),
        ("context", "it is known only after the event; `of: event` shows it in the history only"),
    ):
        if config.dwell in config.names(of):
            raise DataError(f"data.features lists '{config.dwell}' of {of}, which is data.dwell; {why}")
    if config.conversion is not None:
        label_columns(config.conversion)
    elif config.policy is not None and config.task == "regression":
        raise DataError("data.conversion is not set, and data.task is regression; it must say which events count")
    engaged = config.dwell is not None or config.surface is not None
    if config.policy is not None and not engaged and config.source == "table" and config.prepared is None:
        raise DataError("data.policy is set, but neither data.dwell nor data.surface; it goes by them")


def _check_statistics(config: DataConfig) -> None:
    for name in config.statistics:
        if name not in STATISTICS:
            raise DataError(f"data.statistics has '{name}'; {suggest(name, STATISTICS)}")
    if config.statistics and config.label is None and config.source == "table" and config.prepared is None:
        raise DataError("data.statistics counts positives, so that it needs data.label")
    if config.statistics and config.task == "regression":
        raise DataError("data.statistics counts positives, and data.task is regression; it needs a binary label")
    for name in config.statistics_columns():
        if name in (*config.names("user", "number"), *config.names("item", "number")):
            raise DataError(f"data.statistics makes '{name}', which is a column of this config; rename the column")


def _check_split(config: DataConfig) -> None:
    """Raises DataError for a given split that is not given whole."""
    for name, split in (("split_column", "column"), ("validation", "files"), ("test", "files")):
        if config.split == split and getattr(config, name) is None:
            raise DataError(f"data.{name} is not set; data.split: {split} needs it")
        if config.split != split and getattr(config, name) is not None:
            raise DataError(f"data.{name} is set, but data.split is {config.split}; set data.split: {split} to use it")
    if config.split in ("column", "files") and config.source == "synthetic":
        raise DataError(f"data.split is {config.split}; the synthetic table has no given split")
    if config.history is not None:
        parse_rule(config.history)


def _check_leak(config: DataConfig) -> None:
    """Raises DataError if a feature shows the sample's own label."""
    defining = config.label_columns()
    for of, table in (("context", None), ("user", config.users), ("item", config.items)):
        leak = next((name for name in defining if table is None and name in config.names(of)), None)
        if leak is not None:
            unless = "" if of == "context" else f" (unless data.{of}s is a table that has it)"
            raise DataError(
                f"column '{leak}' defines the label, so data.features must not list it of {of}{unless}; `of: event` "
                "shows it in the history only"
            )
