"""Settings that a config leaves to the table and the processes."""

import dataclasses

from jfi.data import InteractionDataset
from jfi.training.config import Config
from jfi.training.distributed import World

#: Training samples from which on a step has more of them.
_LARGE = 150_000


def settled_as(config: Config, known: Config) -> Config:
    """Returns the config with what it leaves open as another one of the same table and processes has it."""
    training, optimizer = config.training, config.optimizer
    if training.batch_size is None:
        training = dataclasses.replace(training, batch_size=known.training.batch_size)
    if optimizer.average == "auto":
        optimizer = dataclasses.replace(optimizer, average=known.optimizer.average)
    return dataclasses.replace(config, training=training, optimizer=optimizer)


def settle(config: Config, dataset: InteractionDataset, world: World) -> tuple[Config, str | None]:
    """Returns the config with a value for `training.batch_size` and `optimizer.average`, and a line that says which.

    The line names the other defaults of the model too; it is None where the config leaves nothing open.

    Args:
        config: of a run.
        dataset: of the run.
        world: the processes of the run.
    """
    chosen: dict[str, object] = {}
    training, optimizer = config.training, config.optimizer
    if training.batch_size is None:
        size = 512 if dataset.num_samples("train") < _LARGE else 1024
        training = dataclasses.replace(training, batch_size=max(size, training.accumulate))
        chosen["training.batch_size"] = training.batch_size
    if optimizer.average == "auto":
        optimizer = dataclasses.replace(optimizer, average=None if world.launched else 0.98)
        chosen["optimizer.average"] = optimizer.average
    if not chosen:
        return config, None
    chosen |= {"model.bias": config.model.bias} if config.model.pooling == "attention" else {}
    line = ", ".join(f"{key}: {'null' if value is None else value}" for key, value in chosen.items())
    return dataclasses.replace(config, training=training, optimizer=optimizer), f"chosen by the table: {line}"
