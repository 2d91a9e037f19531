"""Faults in the settings of `data` that are known before a table is read."""

import math
from typing import TYPE_CHECKING

from jfi.data.errors import DataError
from jfi.data.io.decode import check_encoding
from jfi.data.schema.labels import label_columns
from jfi.data.schema.rules import only_column, parse_rule
from jfi.data.settings import AGE, HISTORY, MAX_COUNT, SID, STATISTICS
from jfi.utils.suggest import suggest

if TYPE_CHECKING:
    from jfi.data.config import DataConfig


def check_settings(config: "DataConfig") -> None:
    """Raises DataError for settings that are wrong for any table."""
    for name in ("max_history", "max_slots", "num_quantiles", "num_age_buckets"):
        if not 1 <= getattr(config, name) <= MAX_COUNT:
            bound = "at least 1" if getattr(config, name) < 1 else f"at most {MAX_COUNT}"
            raise DataError(f"data.{name} is {getattr(config, name)}; it must be {bound}")
    if config.max_timeline is not None and not config.max_history <= config.max_timeline <= MAX_COUNT:
        bounds = f"from data.max_history, {config.max_history}, to {MAX_COUNT}"
        raise DataError(f"data.max_timeline is {config.max_timeline}; it must be {bounds}, or null")
    check_encoding(config.encoding)
    for name in ("num_users", "num_items", "num_categories", "mean_length"):
        if not 1 <= getattr(config.synthetic, name) <= MAX_COUNT:
            bound = "at least 1" if getattr(config.synthetic, name) < 1 else f"at most {MAX_COUNT}"
            raise DataError(f"data.synthetic.{name} is {getattr(config.synthetic, name)}; it must be {bound}")
    if config.synthetic.seed < 0:
        raise DataError(f"data.synthetic.seed is {config.synthetic.seed}; it must be at least 0")
    _check_targets(config)
    if config.label is None and config.negatives < 1:
        raise DataError(f"data.negatives is {config.negatives}; without a label it must be at least 1")
    if config.negatives > MAX_COUNT:
        raise DataError(f"data.negatives is {config.negatives}; it must be at most {MAX_COUNT}")
    whole = math.isclose(sum(config.fractions), 1.0, abs_tol=1e-6)
    if len(config.fractions) != 3 or min(config.fractions) <= 0 or not whole:
        raise DataError(f"data.fractions is {config.fractions}; it must hold three positive numbers that sum to 1")
    if config.source == "table" and config.interactions is None and config.prepared is None:
        raise DataError(
            "data.interactions is not set; it must name the file of interactions (or set data.source: synthetic)"
        )
    _check_statistics(config)
    _check_roles(config)
    keys = [
        *config.user_categorical,
        *config.user_dense,
        config.item,
        *config.item_categorical,
        *config.item_dense,
        *config.event_categorical,
        *config.event_dense,
        *config.impression_categorical,
        *config.impression_dense,
    ]
    shared = {*config.event_categorical} & {*config.impression_categorical}
    for name in keys:
        if keys.count(name) > 1 + (name in shared):
            raise DataError(f"data lists the column '{name}' twice; a column can have one role only")
    if config.semantic_ids is not None and SID in keys:
        raise DataError(f"data lists the column '{SID}', which is that of data.semantic_ids; rename the column")
    _check_leak(config)
    _check_split(config)
    _check_ids(config)
    _check_engagement(config)
    for name in (config.item, *config.item_categorical, *config.event_categorical, *config.event_dense):
        if name == AGE:
            raise DataError(
                f"column '{name}' needs the key '{HISTORY}{AGE}', which is the age of the events; rename the column"
            )
    for name, separator in config.separators.items():
        if not separator:
            raise DataError(f"data.separators.{name} is ''; it must be the separator of the values")
        if name not in (
            *config.user_categorical,
            *config.item_categorical,
            *config.event_categorical,
            *config.impression_categorical,
        ):
            raise DataError(f"data.separators has '{name}', which is not a categorical column of this config")


def _check_roles(config: "DataConfig") -> None:
    """Raises DataError if one column is to be two of the user, the item, the time, the split, the weight and labels."""
    names = ("user", "item", "timestamp", "split_column", "weight")
    roles = {role: name for role in names if (name := getattr(config, role)) is not None}
    for setting in ("impression_categorical", "impression_dense"):
        for role, name in roles.items():
            if name in getattr(config, setting):
                raise DataError(f"data.{setting} lists '{name}', which is data.{role}; it must list other columns")
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
    if config.items is None and config.user in (*config.item_categorical, *config.item_dense):
        raise DataError(f"data.item_* lists '{config.user}', the column of the user; an item has many users")


def _meaning(label: str) -> object:
    """Equal for labels that differ in spaces and quotes alone."""
    return only_column(label) or parse_rule(label).root


def _check_targets(config: "DataConfig") -> None:
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


def _check_ids(config: "DataConfig") -> None:
    """Raises DataError for settings of ids and crosses that no table fits."""
    items = [config.item, *config.item_categorical]
    for columns in config.event_crosses:
        if len(columns) < 2:
            raise DataError(f"data.event_crosses has {columns}; a cross needs at least two columns")
        for name in columns:
            if name not in (*items, *config.event_categorical):
                known = suggest(name, [*items, *config.event_categorical])
                raise DataError(f"data.event_crosses has '{name}', which is no such column of this config; {known}")
    for cross in config.crosses():
        if cross in config.columns():
            raise DataError(f"data.event_crosses makes '{cross}', which is a column of this config; rename the column")
    known = [*config.user_categorical, *items, *config.event_categorical, *config.crosses()]
    known += [name for name in config.impression_categorical if name not in known]
    for setting in ("min_count", "hash_buckets"):
        for name, number in getattr(config, setting).items():
            if name not in known:
                raise DataError(f"data.{setting} has '{name}', no categorical column; {suggest(name, known)}")
            if number < 1:
                raise DataError(f"data.{setting}.{name} is {number}; it must be at least 1")
    if both := config.min_count.keys() & config.hash_buckets.keys():
        raise DataError(f"data.min_count and data.hash_buckets both have '{min(both)}'; buckets need no count")
    if config.eval_negatives < 1:
        raise DataError(f"data.eval_negatives is {config.eval_negatives}; it must be at least 1")
    if not 0 <= config.unknown_share < 1:
        raise DataError(f"data.unknown_share is {config.unknown_share}; it must be in [0, 1)")


def _check_engagement(config: "DataConfig") -> None:
    """Raises DataError for columns of dwell, surface and session that no table fits, or that would leak."""
    given = {"dwell": config.dwell, "surface": config.surface, "session": config.session}
    given = {setting: name for setting, name in given.items() if name is not None}
    for setting, name in given.items():
        for role in ("user", "item", "timestamp", "split_column"):
            if getattr(config, role) == name:
                raise DataError(f"data.{setting} and data.{role} are both '{name}'; they must be different columns")
        if list(given.values()).count(name) > 1:
            raise DataError(f"data.{setting} is '{name}', which another of dwell, surface and session is too")
    for setting in ("user_categorical", "user_dense", "item_categorical", "item_dense"):
        if config.dwell in getattr(config, setting):
            raise DataError(f"data.{setting} lists '{config.dwell}', which is data.dwell; it differs by event")
    for setting in ("impression_categorical", "impression_dense"):
        if config.dwell in getattr(config, setting):
            why = "it is known only after the event; event_dense shows it in the history only"
            raise DataError(f"data.{setting} lists '{config.dwell}', which is data.dwell; {why}")
    if config.conversion is not None:
        label_columns(config.conversion)
    elif config.policy is not None and config.task == "regression":
        raise DataError("data.conversion is not set, and data.task is regression; it must say which events count")
    engaged = config.dwell is not None or config.surface is not None
    if config.policy is not None and not engaged and config.source == "table" and config.prepared is None:
        raise DataError("data.policy is set, but neither data.dwell nor data.surface; it goes by them")


def _check_statistics(config: "DataConfig") -> None:
    for name in config.statistics:
        if name not in STATISTICS:
            raise DataError(f"data.statistics has '{name}'; {suggest(name, STATISTICS)}")
    if config.statistics and config.label is None and config.source == "table" and config.prepared is None:
        raise DataError("data.statistics counts positives, so that it needs data.label")
    if config.statistics and config.task == "regression":
        raise DataError("data.statistics counts positives, and data.task is regression; it needs a binary label")
    for name in config.statistics_columns():
        if name in (*config.user_dense, *config.item_dense):
            raise DataError(f"data.statistics makes '{name}', which is a column of this config; rename the column")


def _check_split(config: "DataConfig") -> None:
    """Raises DataError for a given split that is not given whole."""
    for name, split in (("split_column", "column"), ("validation", "files"), ("test", "files")):
        if config.split == split and getattr(config, name) is None:
            raise DataError(f"data.{name} is not set; data.split: {split} needs it")
        if config.split != split and getattr(config, name) is not None:
            raise DataError(f"data.{name} is set, but data.split is {config.split}; set data.split: {split} to use it")
    if config.split in ("column", "files") and config.source == "synthetic":
        raise DataError(f"data.split is {config.split}; the synthetic table has no given split")
    if not 0 <= config.split_seed < 2**32:
        raise DataError(f"data.split_seed is {config.split_seed}; it must be in [0, 2**32)")
    if config.history is not None:
        parse_rule(config.history)


def _check_leak(config: "DataConfig") -> None:
    defining = config.label_columns()
    if not defining:
        return
    for setting in ("impression_categorical", "impression_dense"):
        leak = next((name for name in defining if name in getattr(config, setting)), None)
        if leak is not None:
            raise DataError(
                f"column '{leak}' defines the label, so data.{setting} must not list it; event_categorical and "
                "event_dense show it in the history only"
            )
    for entity, table, names in (
        ("user", config.users, [*config.user_categorical, *config.user_dense]),
        ("item", config.items, [*config.item_categorical, *config.item_dense]),
    ):
        leak = next((name for name in defining if table is None and name in names), None)
        if leak is not None:
            raise DataError(
                f"column '{leak}' defines the label, so data.{entity}_* must not list it (unless "
                f"data.{entity}s is a table that has it); event_categorical and event_dense show it in the history "
                "only"
            )
