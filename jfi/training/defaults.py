"""Settings that a config leaves to its other settings, the table and the processes."""

import dataclasses
import operator
from typing import Any

from jfi.data import InteractionDataset
from jfi.data.config import AGE, HISTORY
from jfi.training.config import Config
from jfi.training.distributed.processes import World
from jfi.training.distributed.sharding import with_exchange

#: By setting that a config may leave open the value that does so.
_OPEN = {
    "data.statistics": "auto",
    "model.bias": "auto",
    "optimizer.ema_decay": "auto",
    "optimizer.embeddings.weight_decay": "auto",
    "sharding.exchange": "auto",
    "training.batch_size": None,
    "training.rows_after": "auto",
}
#: Training samples from which on a step has more of them.
_LARGE = 150_000
#: Standard deviation of the normal prior of a table's elements, from which `weight_decay: auto` follows: the sum of the
#: mean loss of N samples and w² / (2 N _PRIOR²) is least at the most probable tables.
_PRIOR = 0.2


def with_setting(section: Any, setting: str, value: object) -> Any:
    """Returns a config, or a section of one, with another value of a setting such as `optimizer.ema_decay`."""
    name, _, inner = setting.partition(".")
    return dataclasses.replace(
        section, **{name: with_setting(getattr(section, name), inner, value) if inner else value}
    )


def _with_open(config: Config, values: dict[str, object]) -> Config:
    """Returns the config with these values of the settings that it leaves open."""
    for setting, value in values.items():
        if operator.attrgetter(setting)(config) == _OPEN[setting]:
            config = with_setting(config, setting, value)
    return config


def with_bias(config: Config) -> Config:
    """Returns the config with the biases that `model.bias: auto` stands for.

    They are heads by age and, where there are several heads, by recency.

    Args:
        config: with the settings of its prepared dataset, see `jfi.data.prepared.manifest.resolve`.
    """
    if config.model.bias != "auto":
        return config
    biases = [f"{HISTORY}_{AGE}", *(["recency"] if config.model.num_heads > 1 else [])]
    if config.model.pooling != "attention":
        biases = []
    if config.encoder.num_layers:
        biases = biases[:1]
    return with_setting(config, "model.bias", biases if len(biases) > 1 else next(iter(biases), None))


def resolved_as(config: Config, known: Config) -> Config:
    """Returns the config with what it leaves open as another one of the same table and processes has it."""
    values = {setting: operator.attrgetter(setting)(known) for setting in _OPEN if setting != "model.bias"}
    return with_bias(_with_open(config, values))


def resolve_defaults(
    config: Config, dataset: InteractionDataset, world: World, decay: float | None = None
) -> tuple[Config, str | None]:
    """Returns the config with a value for each setting that it leaves open, and a line that says which; None for none.

    Args:
        config: of a run.
        dataset: of the run.
        world: the processes of the run.
        decay: of the tables of the run of `training.warm_start`, which `weight_decay: auto` keeps: fewer samples would
            decay what that run has learned. None for a run that starts anew.

    Raises:
        ConfigError: tables cannot be sharded as the config says.
    """
    was, why = config, None
    if world.launched:
        config, why = with_exchange(config, dataset.schema)
    training, samples = config.training, dataset.num_samples("train")
    has_average = not world.launched and training.publish_every is None
    if world.launched and (config.sharding.exchange == "rows" or config.sharding.group_size is not None):
        decay = 0.0  # FBGEMM does not decay rows that a batch lacks; an average mixes rows with and without a penalty
    elif any(not one.frozen for one in config.model.pretrained.values()):
        decay = 0.0  # pretrained rows that are trained should not decay towards zero
    elif decay is None:
        decay = float(f"{1 / (_PRIOR**2 * max(samples, 1)):.3g}")
    values = {
        "data.statistics": config.data.statistics_groups(),
        "optimizer.ema_decay": 0.98 if has_average else None,
        "optimizer.embeddings.weight_decay": decay,
        "training.batch_size": max(512 if samples < _LARGE else 1024, training.gradient_accumulation_steps),
    }
    config, chosen = with_bias(_with_open(config, values)), []
    for setting in _OPEN:
        before, after = (operator.attrgetter(setting)(of) for of in (was, config))
        if before != after:
            reason = f" ({why})" if setting == "sharding.exchange" and why else ""
            chosen.append(f"{setting}: {'null' if after is None else after}{reason}")
    return config, f"defaults: {', '.join(chosen)}" if chosen else None
