"""One copy of a dataset for all processes of a host."""

import dataclasses
import shutil
import tempfile
from pathlib import Path

from jfi.data import DataConfig, DataSchema, InteractionDataset, load_dataset
from jfi.data.prepared import open_prepared
from jfi.data.prepared_write import write_prepared
from jfi.data.source import column_settings
from jfi.files import naming
from jfi.training.distributed import World


def load_shared(config: DataConfig, world: World, schema: DataSchema | None = None) -> InteractionDataset:
    """The dataset of a config; under torchrun one process of each host reads the tables, and all map what it made.

    That process writes a prepared dataset to the folder for temporary files (`TMPDIR`). It is removed as soon as all
    processes have mapped it: the files' memory lives as long as the maps.

    Args:
        config: the tables, or a prepared dataset, which is mapped as it is.
        world: the processes that call this together.
        schema: of a run that goes on.

    Raises:
        DataError: as `load_dataset`, on every process.
        OSError: the temporary files cannot be written.
    """
    if not world.launched or config.prepared is not None:
        return load_dataset(config, schema)
    folder = world.on_each_host(lambda: _write(config, schema))
    try:
        dataset = open_prepared(dataclasses.replace(column_settings(config), prepared=folder), verify=False)
        world.max(0)  # all have mapped it
    finally:
        world.on_each_host(lambda: shutil.rmtree(folder, ignore_errors=True))
    dataset.folder = None
    return dataset


def _write(config: DataConfig, schema: DataSchema | None) -> str:
    folder = tempfile.mkdtemp(prefix="jfi-dataset-")
    try:
        dataset = load_dataset(config, schema)
        with naming(Path(folder)):
            write_prepared(dataset, config, Path(folder), temporary=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
