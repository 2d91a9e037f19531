"""Starts and resumes training runs."""

from pathlib import Path
from typing import Literal

from jfi.data import InteractionDataset, load_dataset
from jfi.training.config import Config
from jfi.training.distributed import join_world
from jfi.training.loop import Result, Trainer
from jfi.training.progress import check_config
from jfi.training.run_folder import RunFolder, check_new, new_run_dir
from jfi.training.run_lock import writing_run


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
    run_dir = config.training.run_dir
    with join_world(config.training.device) as world:
        begun = world.launched and world.on_first(lambda: RunFolder.holds(config))
        if not begun and run_dir is not None:
            world.on_first(lambda: check_new(Path(run_dir)))
        trainer = Trainer(config, load_dataset(config.data) if dataset is None else dataset, world)
        path = world.on_first(lambda: Path(run_dir or new_run_dir()))
        with writing_run(path, world):
            run = RunFolder(path)
            if begun:
                trainer.restore(run)
            else:
                world.on_first(lambda: RunFolder.create(config, path))
            return trainer.fit(run)


def resume(run_dir: str | Path, config_changed: Literal["refuse", "accept"] = "refuse") -> Result:
    """Continues the run in `run_dir` from its last complete checkpoint, or from the start if there is none.

    Args:
        run_dir: folder of the run.
        config_changed: whether to go on if config.yaml was changed since the checkpoint, with what it says now.

    Raises:
        ConfigError, DataError: as `train`; also if `run_dir` is not a run folder, or is a damaged one, or another
            process writes it.
        FloatingPointError, Interrupted: as `train`.
    """
    run, config = RunFolder.open(run_dir)
    with join_world(config.training.device) as world, writing_run(run.path, world):
        if config_changed != "accept":
            world.on_first(lambda: check_config(run, config))
        trainer = Trainer(config, load_dataset(config.data), world)
        trainer.restore(run)
        return trainer.fit(run)
