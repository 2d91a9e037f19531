"""Starts and resumes training runs."""

import dataclasses
from pathlib import Path

from jfi.data import InteractionDataset
from jfi.data.prepared import resolve
from jfi.training.config import Config
from jfi.training.distributed import World, join_world
from jfi.training.loop import Result, Trainer
from jfi.training.run_data import DataChanged, load_data, save_data
from jfi.training.run_folder import RunFolder, check_new
from jfi.training.shared_data import load_shared


def train(config: Config, dataset: InteractionDataset | None = None) -> Result:
    """Trains a new run in `config.training.run_dir`.

    Under torchrun, which restarts the command after a process has died, it continues the run of an equal config there.

    Args:
        config: the whole config.
        dataset: the dataset of `config.data`, if it is loaded already.

    Raises:
        ConfigError, DataError: a fault in the config or the data; nothing has been written.
        FloatingPointError: the loss is not finite.
        Interrupted: SIGINT or SIGTERM; the state has been saved.
    """
    config = dataclasses.replace(config, data=resolve(config.data.with_absolute_paths()))
    run_dir = config.training.run_dir
    with join_world(config.training.device) as world:
        begun = world.launched and world.on_first(lambda: RunFolder.holds(config))
        if not begun and run_dir is not None:
            world.on_first(lambda: check_new(Path(run_dir)))
        if begun:
            return _continue(RunFolder(Path(run_dir)), config, world, "refuse")
        dataset = load_shared(config.data, world) if dataset is None else dataset
        trainer = Trainer(config, dataset, world)
        run = world.on_first(lambda: _create(config, dataset))
        return trainer.fit(run)


def resume(run_dir: str | Path, data_changed: DataChanged = "refuse") -> Result:
    """Continues the run in `run_dir` from its last complete checkpoint, or from the start if there is none.

    It encodes the data with the vocabularies, quantiles and means that the run has learnt at its start.

    Args:
        run_dir: the run folder.
        data_changed: "refuse" raises an error if rows, values or splits are not those that the run was started with;
            "accept" goes on with the data as it is now. A value that the run does not know counts as unknown.

    Raises:
        ConfigError, DataError: as `train`; also if `run_dir` is not a run folder, or is a damaged one, or if the data
            has changed.
        FloatingPointError, Interrupted: as `train`.
    """
    run, config = RunFolder.open(run_dir)
    with join_world(config.training.device) as world:
        return _continue(run, config, world, data_changed)


def _create(config: Config, dataset: InteractionDataset) -> RunFolder:
    run = RunFolder.create(config)
    save_data(run, dataset, config)
    return run


def _continue(run: RunFolder, config: Config, world: World, data_changed: DataChanged) -> Result:
    trainer = Trainer(config, load_data(run, config, world, data_changed), world)
    trainer.restore(run)
    return trainer.fit(run)
