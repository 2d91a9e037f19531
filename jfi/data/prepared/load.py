"""Loads the dataset of a config."""

import dataclasses
from pathlib import Path

from jfi.data.batches.dataset import InteractionDataset
from jfi.data.config import DataConfig
from jfi.data.config_checks import check_data_config
from jfi.data.prepared.fits import check_equal, check_fits
from jfi.data.prepared.manifest import resolve
from jfi.data.prepared.prepare import Stages, make_dataset
from jfi.data.prepared.sources import column_settings
from jfi.data.prepared.store import open_prepared
from jfi.data.schema.schema import DataSchema
from jfi.utils.files import naming, temporary_folder


def load_dataset(config: DataConfig, schema: DataSchema | None = None) -> InteractionDataset:
    """Makes samples with histories of the tables that a config names.

    Tables are prepared (see `prepare_dataset`) into a temporary folder, whose files the dataset maps: they are gone
    when the dataset is.

    Vocabularies, quantiles and means come from the training rows only, or from `schema`. A history holds the user's
    events strictly before the sample, whichever split those rows belong to, since they are known by then.

    Without a label, negatives are drawn from the items of the training split. Held-out positives whose item is not in
    the training split are dropped, since an unseen id would reveal the label; the count is logged. They remain in the
    histories.

    Args:
        config: the tables and their columns, or a prepared dataset.
        schema: of a run with these columns. With it nothing is learnt from the tables, and a value that it does not
            know gets id 0.

    Raises:
        DataError: a fault in the files or in the config, as one line that names file and line or the setting, or a
            config that does not fit the schema.
        OSError: the temporary folder is full.

    Example::

        >>> import pyarrow as pa
        >>> from jfi.data import DataConfig, load_dataset
        >>> rows = {"user_id": [1, 2] * 20, "item_id": [*range(10)] * 4, "timestamp": [*range(40)], "like": [1, 0] * 20}
        >>> config = DataConfig(interactions=pa.table(rows), label="like")
        >>> dataset = load_dataset(config)
        >>> [spec.key for spec in dataset.features]
        ['item_id', 'history_item_id', 'history_age']
        >>> load_dataset(config, dataset.schema).schema is dataset.schema
        True
    """
    if config.prepared is not None:
        config = resolve(config)
        check_data_config(config)
        dataset = open_prepared(config)
        if schema is not None:
            check_equal(schema, dataset.schema, config.prepared)
        return dataset
    with temporary_folder("jfi-dataset-") as folder:
        prepare_into(config, folder, schema)
        return open_temporary(config, folder, schema)


def prepare_into(config: DataConfig, folder: Path, schema: DataSchema | None = None) -> None:
    """Prepares the tables of a config below an empty folder, for `open_temporary`."""
    check_data_config(config)
    if schema is not None:
        check_fits(schema, column_settings(config))
    with naming(folder):
        make_dataset(config, schema, folder, Stages(folder, durable=False))


def open_temporary(config: DataConfig, folder: Path, schema: DataSchema | None = None) -> InteractionDataset:
    """The dataset of `prepare_into`, which is left when its files are removed."""
    config = dataclasses.replace(column_settings(config), prepared=str(folder / "result"))
    dataset = open_prepared(config, verified=False, schema=schema)
    dataset.folder = None
    return dataset
