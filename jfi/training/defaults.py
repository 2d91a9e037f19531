"""Settings that a config leaves to its other settings, the table and the processes."""

import dataclasses
import operator

from jfi.data import InteractionDataset
from jfi.data.config import AGE, HISTORY
from jfi.training.config import Config
from jfi.training.distributed.processes import World
from jfi.training.distributed.sharding import with_exchange

#: Training samples from which on a step has more of them.
_LARGE = 150_000
#: Standard deviation of the normal prior of a table's elements, from which `weight_decay: auto` follows: the sum of the
#: mean loss of N samples and w² / (2 N _PRIOR²) is least at the most probable tables.
_PRIOR = 0.2


def with_bias(config: Config) -> Config:
    """Returns the config with the biases that `model.bias: auto` stands for.

    They are heads by age and, where there are several heads, by recency.

    Args:
        config: with the settings of its prepared dataset, see `jfi.data.prepared.manifest.resolve`.
    """
    if config.model.bias != "auto":
        return config
    biases = [HISTORY + AGE, *(["recency"] if config.model.num_heads > 1 else [])]
    if config.model.pooling != "attention":
        biases = []
    if config.encoder.num_layers:
        biases = biases[:1]
    bias = biases if len(biases) > 1 else next(iter(biases), None)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, bias=bias))


def with_decay(config: Config, of_tables: float) -> Config:
    """Returns the config with this `weight_decay` of the tables where it is `auto`.

    It is 0 with pretrained rows that are trained: these should not decay towards zero.
    """
    group = config.optimizer.embeddings
    if group.weight_decay != "auto":
        return config
    if any(not one.frozen for one in config.model.pretrained.values()):
        of_tables = 0.0
    optimizer = dataclasses.replace(config.optimizer, embeddings=dataclasses.replace(group, weight_decay=of_tables))
    return dataclasses.replace(config, optimizer=optimizer)


def settled_as(config: Config, known: Config) -> Config:
    """Returns the config with what it leaves open as another one of the same table and processes has it."""
    training, optimizer = config.training, config.optimizer
    if training.batch_size is None:
        training = dataclasses.replace(training, batch_size=known.training.batch_size)
    if training.rows_after == "auto":
        training = dataclasses.replace(training, rows_after=known.training.rows_after)
    if optimizer.ema_decay == "auto":
        optimizer = dataclasses.replace(optimizer, ema_decay=known.optimizer.ema_decay)
    data, sharding = config.data.with_statistics(), config.sharding
    if sharding.exchange == "auto":
        sharding = dataclasses.replace(sharding, exchange=known.sharding.exchange)
    config = dataclasses.replace(config, data=data, training=training, optimizer=optimizer, sharding=sharding)
    return with_bias(with_decay(config, known.optimizer.embeddings.decay))


def settle(
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
    training, optimizer = config.training, config.optimizer
    if training.batch_size is None:
        size = 512 if dataset.num_samples("train") < _LARGE else 1024
        training = dataclasses.replace(training, batch_size=max(size, training.gradient_accumulation_steps))
    if optimizer.ema_decay == "auto":
        none = world.launched or training.publish_every is not None
        optimizer = dataclasses.replace(optimizer, ema_decay=None if none else 0.98)
    if world.launched and (config.sharding.exchange == "rows" or config.sharding.group_size is not None):
        decay = 0.0  # FBGEMM does not decay rows that a batch lacks; an average mixes rows with and without a penalty
    elif decay is None:
        decay = float(f"{1 / (_PRIOR**2 * max(dataset.num_samples('train'), 1)):.3g}")
    data = config.data.with_statistics()
    settled = dataclasses.replace(config, data=data, training=training, optimizer=optimizer)
    settled = with_bias(with_decay(settled, decay))
    chosen = []
    for section, name in (
        ("data", "statistics"),
        ("model", "bias"),
        ("optimizer", "ema_decay"),
        ("optimizer.embeddings", "weight_decay"),
        ("sharding", "exchange"),
        ("training", "batch_size"),
    ):
        before, after = (operator.attrgetter(f"{section}.{name}")(of) for of in (was, settled))
        if before != after:
            reason = f" ({why})" if name == "exchange" and why else ""
            chosen.append(f"{section}.{name}: {'null' if after is None else after}{reason}")
    return settled, f"defaults: {', '.join(chosen)}" if chosen else None
