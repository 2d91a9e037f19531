"""Starts and resumes training runs."""

from pathlib import Path

from jfi.data import InteractionDataset, load_dataset
from jfi.training.config import Config
from jfi.training.distributed import join_world
from jfi.training.loop import Result, Trainer
from jfi.training.run_folder import RunFolder, check_new


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
        if dataset is None:
            dataset = load_dataset(config.data)
            if world.is_first:
                print(dataset.summary, flush=True)
        trainer = Trainer(config, dataset, world)
        if begun:
            run = RunFolder(Path(run_dir))
            trainer.restore(run)
        else:
            run = world.on_first(lambda: RunFolder.create(config))
            if dataset.summary is not None:
                world.on_first(lambda: dataset.summary.save(run.summary))
        return trainer.fit(run)


def resume(run_dir: str | Path) -> Result:
    """Continues the run in `run_dir` from its last complete checkpoint, or from the start if there is none.

    Raises:
        ConfigError, DataError: as `train`; also if `run_dir` is not a run folder, or is a damaged one.
        FloatingPointError, Interrupted: as `train`.
    """
    run, config = RunFolder.open(run_dir)
    with join_world(config.training.device) as world:
        trainer = Trainer(config, load_dataset(config.data), world)
        trainer.restore(run)
        return trainer.fit(run)
