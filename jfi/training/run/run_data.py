"""Stores what a run has learnt from its data, and on which data: the folder `data` of the run folder.

schema.json, vocabularies.parquet    the schema, see `jfi.data.schema.schema`
policy.json                          with `data.policy` a copy of that file, which the run goes on with
SHA256SUMS                           the checksums of these files, which stay as they are from the start of a run on
fingerprint.sha256                   the fingerprint of the data, see `jfi.data.prepared.store`: it follows data
                                     that is accepted, and has a checksum of its own
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jfi.data import DataConfig, DataError, DataSchema, InteractionDataset, load_dataset
from jfi.data.config import FILES, TIMELINE
from jfi.data.prepared.manifest import RUN_SETTINGS, resolve
from jfi.data.prepared.prepare import open_temporary, prepare_into
from jfi.data.prepared.store import DATA, FINGERPRINT, TIMELINES, TRAIN, fingerprint_of, read_fingerprint
from jfi.training.checkpoints.checkpoint import latest_checkpoint
from jfi.training.config import Config, ConfigError
from jfi.training.distributed.processes import World, shared_folder
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.run_position import load_progress
from jfi.utils.files import sha256_of, verify, write_sums, writing_folder

_POLICY = "policy.json"
#: What to do where the data of a run has changed.
DataChanged = Literal["refuse", "accept"]


def load_shared(
    config: DataConfig, world: World, schema: DataSchema | None = None, memory: str | None = None
) -> InteractionDataset:
    """The dataset of a config; under torchrun one process of each host reads the tables, and all map what it made.

    That process writes a prepared dataset, see `shared_folder`.

    Args:
        config: the tables, or a prepared dataset, which is mapped as it is.
        world: the processes that call this together.
        schema: of a run that goes on.
        memory: most that sorting tables holds in memory; None is half of what is free.

    Raises:
        DataError: as `load_dataset`, on every process.
        OSError: the temporary files cannot be written.
    """
    if not world.launched or config.prepared is not None:
        return load_dataset(config, schema, memory)
    with shared_folder(world, "jfi-dataset-", lambda folder: prepare_into(config, folder, schema, memory)) as folder:
        return open_temporary(config, folder, schema)


def save_data(run: RunFolder, dataset: InteractionDataset) -> None:
    """Writes the summary and the folder, each completely or not at all."""
    _save_summary(run, dataset)
    fingerprint = fingerprint_of(dataset)
    with writing_folder(run.data) as unfinished:
        dataset.schema.write(unfinished)
        if dataset.policy is not None:
            dataset.policy.save(unfinished / _POLICY)
        write_sums(unfinished, {path.name: sha256_of(path) for path in unfinished.iterdir()})
        write_sums(unfinished, fingerprint, FINGERPRINT)


def own_policy(run: RunFolder, config: Config) -> Config:
    """The config with the run's own copy of its policy, whatever became of the file that `data.policy` names."""
    if config.data.policy is None:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, policy=str(run.data / _POLICY)))


def learnt_files(run: RunFolder) -> dict[str, str]:
    """SHA-256 by name of the files of `run.data` that a run never changes; each checkpoint has them.

    Raises:
        DataError: one of them is missing or damaged.
    """
    return verify(run.data, None, DataError)


def load_schema(run: RunFolder) -> DataSchema:
    """The schema of a run, after the files that it has learnt, its policy among them, are verified.

    Raises:
        ConfigError: a file is not what it was at the last checkpoint.
        DataError: a file is missing or damaged.
    """
    schema, found, last = DataSchema.load(run.data), learnt_files(run), latest_checkpoint(run.checkpoints)
    if last is not None:
        known = load_progress(last).files
        for name in sorted({*known, *found}):
            if found.get(name) != known.get(name):
                raise ConfigError(f"{run.data / name} has changed since the checkpoint; restore it")
    return schema


def load_data(
    run: RunFolder, config: Config, world: World, changed: DataChanged = "refuse", memory: str | None = None
) -> InteractionDataset:
    """The dataset of a run that goes on, encoded with the run's own schema.

    A run that was killed before it had written its schema learns it now.

    Args:
        run: the run.
        config: its config.
        world: the processes that call this together.
        changed: "refuse" raises an error if the data is not the data that the run was started with; "accept" goes on
            with it, prints its summary, and remembers both.
        memory: most that sorting tables holds in memory; None is half of what is free.

    Raises:
        ConfigError: the data has changed.
        DataError: a fault in the data, or a damaged schema.
    """
    if world.on_first(lambda: not run.data.exists() and latest_checkpoint(run.checkpoints) is None):
        dataset = load_shared(config.data, world, memory=memory)
        world.on_first(lambda: save_data(run, dataset))
        return dataset
    schema = load_schema(run)
    try:
        world.on_first(lambda: _check_prepared(run, config))
        dataset = load_shared(own_policy(run, config).data, world, schema, memory)
    except DataError as fault:
        raise DataError(f"--resume {run.path}: {fault}") from fault
    world.on_first(lambda: _compare(run, config, dataset, changed))
    return dataset


def check_tables(run: RunFolder, config: Config, advice: str) -> None:
    """Checks that the tables of a run are those that it was trained on, whatever was prepared of them.

    Args:
        run: the run.
        config: its config.
        advice: end of the message.

    Raises:
        ConfigError: they have changed.
        DataError: a fault in the tables, or a damaged schema.
    """
    data = dataclasses.replace(own_policy(run, config).data, prepared=None)
    dataset = load_dataset(data, load_schema(run))
    _compare(run, dataclasses.replace(config, data=data), dataset, "refuse", advice)


def describe_batches(run: RunFolder, config: Config, dataset: InteractionDataset) -> dict[str, object]:
    """Returns what determines the batches of an epoch, besides its number: where it is equal, so are they.

    Raises:
        DataError: the run's fingerprint is missing or damaged.
    """
    known, training, timelines = read_fingerprint(run.data), config.training, {}
    if config.data.batching == "user":
        timelines = {"the longest timeline": TIMELINE * config.data.max_history}
        timelines["the SHA-256 of the events' users and times"] = known[TIMELINES]
    return {
        "the number of training samples": dataset.num_samples("train"),
        "the SHA-256 of the training samples": known[TRAIN],
        "training.batch_size": training.batch_size,
        "data.batching": config.data.batching,
        **timelines,
        "training.seed": training.seed,
        **({} if training.rows_after in (None, "auto") else {"training.rows_after": training.rows_after}),
    }


def name_data(run: RunFolder) -> str:
    """A short name of the data that the run goes on with: other data has another name."""
    return read_fingerprint(run.data)[DATA][:8]


def _check_prepared(run: RunFolder, config: Config) -> None:
    """Raises ConfigError if a prepared dataset was made again with other settings than the run has."""
    for name, was, now in _differences(config.data, resolve(config.data)):
        raise ConfigError(
            f"--resume {run.path}: data.{name} was {was!r}, but {config.data.prepared} was prepared again with "
            f"{now!r}; prepare it as it was"
        )


def check_settings(run: RunFolder, was: DataConfig, now: DataConfig) -> None:
    """Checks that a run with the settings `was` could go on with a dataset that is prepared with `now`.

    Raises:
        ConfigError: it could not, as one line that names the setting.
    """
    for name, old, new in _differences(was, now):
        raise ConfigError(f"--run {run.path}: data.{name} is {new!r}, but the run was started with {old!r}")


def _differences(was: DataConfig, now: DataConfig) -> Iterator[tuple[str, object, object]]:
    """The settings with two values, but for names of tables and those that are a run's own."""
    was, now = was.resolved(), now.resolved()  # a manifest has these
    for name in [one.name for one in dataclasses.fields(now) if one.name not in (*FILES, *RUN_SETTINGS, "prepared")]:
        if getattr(was, name) != getattr(now, name):
            yield name, getattr(was, name), getattr(now, name)


def _compare(
    run: RunFolder,
    config: Config,
    dataset: InteractionDataset,
    changed: DataChanged,
    advice: str = "restore it, or go on with --data-changed accept",
) -> None:
    now = fingerprint_of(dataset)
    if read_fingerprint(run.data) == now:
        return
    if changed != "accept":
        named = config.data.prepared or config.data.interactions
        data = f"the data {named}" if named else "the data"
        what = dataset.summary.changes_since(run.summary)
        raise ConfigError(f"--resume {run.path}: {data} has changed{what and f': {what}'}; {advice}")
    # The fingerprint last: killed before, the run asks again.
    _save_summary(run, dataset)
    write_sums(run.data, now, FINGERPRINT)
    if dataset.summary is not None:
        print(dataset.summary, flush=True)


def _save_summary(run: RunFolder, dataset: InteractionDataset) -> None:
    if dataset.summary is not None:
        dataset.summary.save(run.summary)
