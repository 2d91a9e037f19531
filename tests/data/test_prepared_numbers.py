"""Numbers as ids and settings that a prepared dataset is opened with."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from data_configs import data_config

from jfi.data import DataConfig, DataError, load_dataset
from jfi.data.prepared.prepare import prepare_dataset


def write_rows(folder: Path, users: list[float]) -> DataConfig:
    columns = {"user_id": users, "item_id": [i % 2 for i in range(len(users))], "timestamp": list(range(len(users)))}
    pa.parquet.write_table(pa.table(columns), folder / "rows.parquet")
    return data_config(interactions=str(folder / "rows.parquet"), user_categorical=["user_id"])


def test_negative_ids_beside_fractions_are_the_ids_of_the_table(tmp_path):
    config = write_rows(tmp_path, [-2.0, -1.5, -0.0, 2.5, 1e10, 1e16, *range(3, 30)])
    prepare_dataset(config, tmp_path / "prepared")
    schemas = [load_dataset(one).schema for one in (config, DataConfig(prepared=str(tmp_path / "prepared")))]
    values = [list(schema.encodings.vocabularies["user_id"].values) for schema in schemas]
    assert values[0] == values[1] and {"-2", "-1.5", "0", "10000000000", "1" + "0" * 16} <= set(values[0])


def test_settings_are_checked_where_a_prepared_dataset_is_opened(tmp_path):
    prepare_dataset(write_rows(tmp_path, list(range(30))), tmp_path / "prepared")
    with pytest.raises(DataError, match=r"^data\.max_history: got 0, must be an integer in"):
        load_dataset(DataConfig(prepared=str(tmp_path / "prepared"), max_history=0))
