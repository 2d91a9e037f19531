"""One copy of a dataset for all processes of a host."""

import dataclasses
from pathlib import Path

from jfi.data import DataConfig, DataSchema, InteractionDataset, load_dataset
from jfi.data.prepared.open_dataset import open_prepared
from jfi.data.prepared.source import column_settings
from jfi.data.prepared.write_dataset import write_prepared
from jfi.training.distributed import World, shared_folder
from jfi.utils.files import naming


def load_shared(config: DataConfig, world: World, schema: DataSchema | None = None) -> InteractionDataset:
    """The dataset of a config; under torchrun one process of each host reads the tables, and all map what it made.

    That process writes a prepared dataset, see `shared_folder`.

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

    def write(folder: Path) -> None:
        dataset = load_dataset(config, schema)
        with naming(folder):
            write_prepared(dataset, config, folder, temporary=True)

    with shared_folder(world, "jfi-dataset-", write) as folder:
        dataset = open_prepared(dataclasses.replace(column_settings(config), prepared=str(folder)), verify=False)
    dataset.folder = None
    return dataset
