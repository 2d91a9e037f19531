"""Files that may not be read, or whose storage fails: one line that names the file, and the storage's exit code."""

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from data_configs import read_blocks
from synthetic_data import synthetic_data

from jfi.data import DataConfig, DataSchema, load_dataset
from jfi.data.io.blocks import read_table
from jfi.data.prepared.prepare import prepare_dataset
from jfi.training import train
from jfi.training.config import Config
from jfi.training.config_parser import load_config, save_config
from jfi.utils.exit_codes import run_command

#: Capabilities with which root reads any file.
_OVERRIDE, _READ_SEARCH = 1, 2
_VERSION_3 = 0x20080522


@contextmanager
def without_override() -> Iterator[None]:
    """Within the block the rights of files hold for root too."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert not libc.capget(header, before)
    fewer = (ctypes.c_uint32 * 6)(*before)
    fewer[0] &= ~(1 << _OVERRIDE | 1 << _READ_SEARCH)
    assert not libc.capset(header, fewer)
    try:
        yield
    finally:
        assert not libc.capset(header, before)


SYNTHETIC = synthetic_data(num_users=30, num_items=20, mean_length=20)


def write_csv(path: Path) -> None:
    path.write_text("user,item\n1,2\n")


def write_json(path: Path) -> None:
    path.write_text(json.dumps({"user": 1, "item": 2}) + "\n")


def write_parquet(path: Path) -> None:
    pa.parquet.write_table(pa.table({"user": [1], "item": [2]}), path)


TABLES = {"t.csv": write_csv, "t.jsonl": write_json, "t.parquet": write_parquet}


def in_folder(path: Path) -> None:
    path.mkdir()
    write_csv(path / "part.csv")


def schema_of(path: Path) -> None:
    load_dataset(SYNTHETIC).schema.save(path.parent)


def prepared(path: Path) -> None:
    prepare_dataset(SYNTHETIC, path.parent)


def read(path: Path) -> None:
    read_table(str(path), ["user", "item"])


def iterate(path: Path) -> None:
    list(read_blocks(str(path), ["user", "item"]))


def load_schema(path: Path) -> None:
    DataSchema.load(path.parent)


def load_settings(path: Path) -> None:
    load_config(path)


def load_prepared(path: Path) -> None:
    load_dataset(DataConfig(prepared=str(path.parent)))


CASES = {
    **{f"read {name}": (name, write, read) for name, write in TABLES.items()},
    **{f"iterate {name}": (name, write, iterate) for name, write in TABLES.items()},
    "folder": ("parts", in_folder, read),
    "schema": ("s/schema.json", schema_of, load_schema),
    "vocabularies": ("s/vocabularies.parquet", schema_of, load_schema),
    "config": ("config.yaml", lambda path: save_config(Config(SYNTHETIC), path), load_settings),
    "manifest": ("p/manifest.json", prepared, load_prepared),
    "events": ("p/events.arrow", prepared, load_prepared),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_may_not_be_read_is_a_fault_of_the_storage(case, tmp_path, capsys):
    name, write, load = CASES[case]
    path = tmp_path / name
    write(path)
    assert run_command(lambda: load(path)) == 0
    path.chmod(0)
    with without_override():
        assert run_command(lambda: load(path)) == 3
    assert capsys.readouterr().err == f"error: {path}: Permission denied\n"
    path.chmod(0o700)


@pytest.mark.parametrize("name", TABLES)
def test_a_file_that_does_not_exist_is_wrong_input(name, tmp_path, capsys):
    assert run_command(lambda: read(tmp_path / name)) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / name}: no such file or directory\n"


@pytest.mark.parametrize("name", ["", "runs/new"])
def test_a_place_for_a_run_that_may_not_be_written_is_named_before_the_tables_are_read(name, tmp_path, capsys):
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    config = Config(DataConfig(interactions="no table")).with_training(run_dir=str(folder / name))
    with without_override():
        assert run_command(lambda: train(config)) == 3
    assert capsys.readouterr().err == f"error: {folder}: Permission denied\n"
    config = config.with_training(run_dir=str(tmp_path / "other"))
    assert run_command(lambda: train(config)) == 2
    assert not (tmp_path / "other").exists()


def test_an_io_error_is_a_fault_of_the_storage(tmp_path, capsys):
    path = tmp_path / "t.parquet"
    path.symlink_to("/proc/self/mem")  # reading it from its start is an I/O error
    assert run_command(lambda: read(path)) == 3
    assert capsys.readouterr().err == f"error: {path}: Input/output error\n"
