"""The synthetic tables of examples/ as files, each written once, and configs of them."""

import atexit
import functools
import inspect
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from examples import synthetic_tables
from jfi.data import DataConfig
from jfi.training.config_parser import parse_config

CONFIGS = Path(__file__).parents[1] / "configs"
#: By kind what makes the tables, and the config that names their columns.
KINDS = {"taste": (synthetic_tables.taste, "quickstart"), "dwell": (synthetic_tables.dwell, "dwell")}


@functools.cache
def _root() -> Path:
    root, process = Path(tempfile.mkdtemp(prefix="jfi-synthetic-")), os.getpid()
    atexit.register(lambda: os.getpid() == process and shutil.rmtree(root, ignore_errors=True))
    return root


@functools.cache
def tables(kind: str = "taste", **arguments: float) -> Path:
    """Returns the folder with `interactions.parquet` and `items.parquet`, which no test may change."""
    folder = _root() / "-".join([kind, *(f"{name}={value}" for name, value in sorted(arguments.items()))])
    synthetic_tables.write(folder, KINDS[kind][0](**arguments))
    return folder


def synthetic_data(kind: str = "taste", **settings: object) -> DataConfig:
    """Returns the config of a synthetic table.

    Args:
        kind: "taste" or "dwell".
        settings: arguments of what makes the table, and settings of `DataConfig`.
    """
    make, name = KINDS[kind]
    arguments = {name: settings.pop(name) for name in inspect.signature(make).parameters if name in settings}
    data = parse_config(["--config", str(CONFIGS / f"{name}.yaml")])[0].data
    return replace(data, **files(tables(kind, **arguments)) | {"max_history": DataConfig.max_history} | settings)


def files(folder: Path) -> dict[str, str]:
    return {name: str(folder / f"{name}.parquet") for name in ("interactions", "items")}


def options(**arguments: float) -> list[str]:
    """Returns what names the tables of "taste" on a command line, beside `--config configs/quickstart.yaml`."""
    return [word for name, path in files(tables(**arguments)).items() for word in (f"--data.{name}", path)]
