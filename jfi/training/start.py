"""Starts and resumes training runs."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jfi.data import DataError, InteractionDataset
from jfi.data.config import FILES
from jfi.data.prepared.manifest import prepared_config, resolve
from jfi.training.checkpoints.checkpoint import latest_checkpoint
from jfi.training.config import Config, ConfigError
from jfi.training.config_parser import save_config
from jfi.training.distributed.processes import World, join_world
from jfi.training.distributed.sharding import check_sharded
from jfi.training.loop.captured_steps import check_graphs
from jfi.training.loop.trainer import Trainer
from jfi.training.metrics.label_metrics import Result
from jfi.training.metrics.unknown_values import expected_shares
from jfi.training.run.recorder import Logger, check_packages
from jfi.training.run.run_data import DataChanged, describe_batches, learnt_files, load_data, load_shared, save_data
from jfi.training.run.run_folder import RunFolder, check_new, check_writable, new_run_dir, writing_run
from jfi.training.run.run_position import check_config, config_changes, last_progress
from jfi.training.run.warm_start import check_warm_start
from jfi.utils.files import absolute_path


def train(
    config: Config,
    dataset: InteractionDataset | None = None,
    logger: Logger | None = None,
    memory: str | None = None,
) -> Result:
    """Trains a new run in `config.training.run_dir`.

    Under torchrun, which restarts the command after a process has died, it continues the run of an equal config there.

    Args:
        config: the whole config.
        dataset: the dataset of `config.data`, if it is loaded already.
        logger: gets the config and the metrics, instead of the one that `training.logger` names: any object with
            the three methods of `jfi.training.run.recorder.Logger`, such as a logger of Lightning.
        memory: most that sorting tables holds in memory, such as "4GB"; None is half of what is free.

    Raises:
        ConfigError, DataError: a fault in the config or the data; nothing has been written.
        OSError: the folder cannot be written.
        FloatingPointError: the loss is not finite.
        Interrupted: SIGINT or SIGTERM; the state has been saved.
    """
    data, model = resolve(config.data.with_absolute_paths()), config.model.with_absolute_paths()
    config = dataclasses.replace(config, data=data, model=model)
    if config.training.warm_start is not None:
        config = config.with_training(warm_start=absolute_path(config.training.warm_start))
    run_dir = config.training.run_dir
    with join_world(config.training.device) as world:
        _check_processes(world, config, {"--resume": None})
        begun = world.launched and world.on_first(lambda: RunFolder.holds(config))
        if begun and run_dir is not None:
            run, config = RunFolder.open(run_dir, {name: getattr(config.data, name) for name in FILES})
            with writing_run(run.path, world):
                world.on_first(lambda: check_config(run, config))
                return _continue(run, config, world, "refuse", logger=logger, memory=memory)
        config = world.on_first(lambda: _check_before_reading(config))
        if dataset is None:
            dataset = load_shared(config.data, world, memory=memory)
            world.say(dataset.summary)
        _check_weights(config, dataset)
        trainer = Trainer(config, dataset, world, config.training.warm_start)
        world.say(trainer.defaults_line)
        trainer.load_pretrained()
        path = world.on_first(lambda: Path(run_dir) if run_dir else new_run_dir())
        with writing_run(path, world):
            return _fit(trainer, world.on_first(lambda: _create(trainer.config, path, dataset)), logger)


def resume(
    run_dir: str | Path,
    *,
    prepared: str | Path | None = None,
    tables: Mapping[str, Any] | None = None,
    data_changed: DataChanged = "refuse",
    config_changed: Literal["refuse", "accept"] = "refuse",
    logger: Logger | None = None,
    memory: str | None = None,
) -> Result:
    """Continues the run in `run_dir` from its last complete checkpoint, or from the start if there is none.

    It encodes the data with the vocabularies, quantiles and means that the run has learnt at its start. Where an
    accepted change makes other batches, an epoch that has begun starts anew with the weights so far, and a line on
    stdout says so.

    Args:
        run_dir: the run folder.
        prepared: a prepared dataset to go on with from now on, or None for the data of config.yaml. Of other rows it
            must have been prepared with the run's schema (`jfi prepare --run`).
        tables: where tables of the run are now, by their settings of `data`, such as `{"items": "s3://bucket/items"}`;
            None for those of config.yaml, of which URLs are refused, since somebody else may have written it.
        data_changed: "refuse" raises an error if rows, values or splits are not those that the run was started with;
            "accept" goes on with the data as it is now. A value that the run does not know counts as unknown.
        config_changed: whether to go on if config.yaml was changed since the checkpoint, with what it says now.
        logger: as of `train`.
        memory: likewise.

    Raises:
        ConfigError, DataError: as `train`; also if `run_dir` is not a run folder, or is a damaged one, if the data or
            the config has changed, or if another process writes the run.
        FloatingPointError, Interrupted: as `train`.
    """
    run, config = RunFolder.open(run_dir, tables)
    run.check_links()
    options: dict[str, object] = {"--resume": run.path, "--data.prepared": prepared, **(tables or {})}
    options |= {"--data-changed": data_changed, "--config-changed": config_changed}
    with join_world(config.training.device) as world:
        _check_processes(world, config, options)
        with writing_run(run.path, world):
            if config_changed != "accept":
                world.on_first(lambda: check_config(run, config))
            if world.on_first(lambda: last_progress(run)[1].follow):
                raise ConfigError(f"--resume {run.path}: the run follows a log; go on with --follow FOLDER")
            if prepared is None:
                return _continue(run, config, world, data_changed, logger=logger, memory=memory)
            config = _with_prepared(run, config, prepared)
            dataset = load_data(run, config, world, data_changed, memory)
            world.on_first(lambda: save_config(config, run.config))
            return _continue(run, config, world, data_changed, dataset, logger)


def _check_processes(world: World, config: Config, options: dict[str, object]) -> None:
    """Checks that all processes were started alike, and that so many can do what the config says.

    Raises:
        ConfigError: on every process, of the first difference or fault.
    """
    if not world.launched:
        check_graphs(config, world)
        return

    (first, given), *others = world.on_all(lambda: (config, options))
    for rank, (other, own) in enumerate(others, 1):
        differ = [(name, given.get(name), own.get(name)) for name in given | own]
        changes = [f"{name} was {was} and is {now}" for name, was, now in differ if was != now]
        changes += [line for _, line in config_changes(dataclasses.asdict(first), other)]
        if changes:
            fault = f"process {rank} was started with other settings than process 0: {', '.join(changes)}"
            raise ConfigError(fault)
    check_sharded(config, world)
    check_graphs(config, world)


def _check_before_reading(config: Config) -> Config:
    """Checks what can be checked of a new run before tables are read; returns it with what a warm start settles."""
    if config.training.run_dir is not None:
        check_new(Path(config.training.run_dir))
    check_writable(Path(config.training.run_dir or "runs"))
    check_packages(config.training)
    if (warm_start := config.training.warm_start) is not None:
        lines, config = check_warm_start(warm_start, config)
        for line in lines:
            print(line, flush=True)
    return config


def _check_weights(config: Config, dataset: InteractionDataset) -> None:
    """Checks that the model reads the weights of events if the policy has some, and only then."""
    given = dataset.policy is not None and dataset.policy.is_weighted
    read = "weights" in config.model.biases() and config.model.pooling == "attention"
    if given and not read:
        raise ConfigError("data.policy has weights of events; set model.bias: weights, or fit it without boost")
    if read and not given:
        raise ConfigError("model.bias: weights are those of data.policy, which gives none; fit one with boost")


def _create(config: Config, path: Path, dataset: InteractionDataset) -> RunFolder:
    run = RunFolder.create(config, path)
    save_data(run, dataset)
    return run


def _with_prepared(run: RunFolder, config: Config, prepared: str | Path) -> Config:
    """The config with another dataset; `load_data` checks that it was prepared with the same settings."""
    prepared = absolute_path(str(prepared))
    try:
        made = prepared_config(prepared)
    except DataError as fault:
        raise DataError(f"--resume {run.path}: {fault}") from fault
    data = dataclasses.replace(config.data, prepared=prepared, **{name: getattr(made, name) for name in FILES})
    return dataclasses.replace(config, data=data)


def _continue(
    run: RunFolder,
    config: Config,
    world: World,
    data_changed: DataChanged,
    dataset: InteractionDataset | None = None,
    logger: Logger | None = None,
    memory: str | None = None,
) -> Result:
    dataset = dataset or load_data(run, config, world, data_changed, memory)
    # A run that was killed before its first checkpoint begins as a new one does.
    begins = world.on_first(lambda: latest_checkpoint(run.checkpoints) is None)
    trainer = Trainer(config, dataset, world, config.training.warm_start if begins else None)
    if trainer.config != config:  # config.yaml was changed, and leaves settings open
        world.on_first(lambda: save_config(trainer.config, run.config))
        world.say(trainer.defaults_line)
    trainer.restore(run)
    if begins:
        trainer.load_pretrained()
    return _fit(trainer, run, logger)


def _fit(trainer: Trainer, run: RunFolder, logger: Logger | None) -> Result:
    progress, dataset, world = trainer.progress, trainer.dataset, trainer.world
    progress.files = world.on_first(lambda: learnt_files(run))
    progress.unknown = world.on_first(lambda: expected_shares(dataset, trainer.config.model.item_id))
    batches = world.on_first(lambda: describe_batches(run, trainer.config, dataset))
    world.say(_doubt_held_out_rows(trainer, batches))
    progress.newest = max(progress.newest, dataset.newest())
    world.say(progress.use_batches(batches))
    return trainer.fit(run, logger)


def _doubt_held_out_rows(trainer: Trainer, batches: dict) -> str | None:
    """A warning of rows of validation and test that the run may have trained on, where training rows have changed."""
    progress, samples = trainer.progress, "the SHA-256 of the training samples"
    if trainer.config.data.split != "time" or progress.batches.get(samples, batches[samples]) == batches[samples]:
        return None
    counts = {split: trainer.dataset.num_until(split, progress.newest) for split in ("validation", "test")}
    if not any(counts.values()):
        return None
    rows = " and ".join(f"{count:,} rows of {split}" for split, count in counts.items())
    return (
        f"warning: {rows} are not newer than the newest row that the run has trained on, so it may have trained on "
        "them: the metrics are too good; start a new run, or name a table with newer rows"
    )
