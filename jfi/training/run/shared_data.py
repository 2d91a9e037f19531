"""One copy of a dataset for all processes of a host."""

from jfi.data import DataConfig, DataSchema, InteractionDataset, load_dataset
from jfi.data.prepared.prepare import open_temporary, prepare_into
from jfi.training.distributed.processes import World, shared_folder


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
    with shared_folder(world, "jfi-dataset-", lambda folder: prepare_into(config, folder, schema)) as folder:
        return open_temporary(config, folder, schema)
