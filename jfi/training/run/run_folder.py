"""The run folder.

config.yaml     every field of the resolved config
versions.json   versions of jfi and torch, and the commit of jfi's checkout, when the run began
summary.json    the data in numbers: rows, splits, lengths of histories, missing and unseen values, warnings
data/           what the run has learnt from its data, and the data's fingerprint, see `jfi.training.run.run_data`
metrics.jsonl   one JSON object per line: training lines, a validation line per epoch, a test line at the end
checkpoints/    the last and the best checkpoint, see `jfi.training.checkpoints.checkpoint`
tensorboard/    the same metrics for TensorBoard
curves.png      metrics over the epochs
attention.png   the attention of a few test samples, unless none of them has a history
follow/         of a run that follows a log: its metrics, and the state of the log, see `jfi.follow.state`
.lock           held by the process that writes the run, see `writing_run`
"""

import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from jfi.training.config import Config, ConfigError
from jfi.training.config_parser import load_config, save_config
from jfi.training.defaults import resolved_as
from jfi.training.distributed.processes import World
from jfi.utils.files import LOCK, locking, unfinished_name, write_file
from jfi.utils.json_files import read_json
from jfi.utils.versions import versions

#: Seconds that a restarted process waits for the one that it replaces to be gone.
_PATIENCE = 30.0


class RunFolder:
    """The paths of a run; `create` makes a new folder, `open` opens an existing one."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"
        self.versions = path / "versions.json"
        self.summary = path / "summary.json"
        self.data = path / "data"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.curves = path / "curves.png"
        self.attention = path / "attention.png"

    @classmethod
    def create(cls, config: Config, path: Path | None = None) -> "RunFolder":
        """Makes the folder `path`, or else of `config.training.run_dir`, and writes the config into it.

        Raises:
            ConfigError: the folder is not empty.
        """
        path = path or Path(config.training.run_dir or new_run_dir())
        check_new(path)
        path.mkdir(parents=True, exist_ok=True)
        run = cls(path)
        save_config(config, run.config)
        write_file(run.versions, json.dumps(versions()))
        return run

    @classmethod
    def open(cls, path: str | Path, tables: Mapping[str, Any] | None = None) -> "tuple[RunFolder, Config]":
        """An existing run and its config.

        Args:
            path: the folder.
            tables: where tables are now, by their settings of `data`. URLs of config.yaml itself are never opened.

        Raises:
            ConfigError: `path` is not a run folder.
        """
        run = cls(Path(path))
        if not run.config.is_file():
            runs = [one.parent for one in run.path.glob("*/config.yaml")]
            newest = max(runs, key=lambda one: one.stat().st_mtime, default=None)
            hint = f"; the newest run in it is {newest}" if newest else ""
            raise ConfigError(f"--resume {path}: not a run folder, {run.config} is missing{hint}")
        config = load_config(run.config)
        if tables:
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, **tables).with_absolute_paths())
        return run, config.with_training(run_dir=str(path))

    def read_versions(self) -> dict[str, str | None] | None:
        """Returns the versions with which the run began, None for a run of an earlier version."""
        return read_json(self.versions, dict[str, str | None], ConfigError) if self.versions.exists() else None

    def check_links(self) -> None:
        """Raises ConfigError if a file or folder that training writes is a link, which may lead out of the run."""
        written = [self.path / LOCK, *(path for path in vars(self).values() if path != self.path)]
        for folder in (self.data, self.checkpoints, self.tensorboard):
            written += folder.glob("*")
        for path in written:
            if path.is_symlink():
                raise ConfigError(f"--resume {self.path}: {path} is a link; a run that goes on holds none")

    @classmethod
    def holds(cls, config: Config) -> bool:
        """Returns whether `config.training.run_dir` is the folder of a run with this config, once it is resolved."""
        path = config.training.run_dir
        if path is None or not cls(Path(path)).config.is_file():
            return False
        known = load_config(cls(Path(path)).config)
        return resolved_as(config, known) == known


def new_run_dir(prefix: str = "") -> Path:
    """Makes `runs/<prefix><date>-<time>`, with a number after it where another run has begun in the same second."""
    path = first = Path(f"runs/{prefix}{datetime.now():%Y%m%d-%H%M%S}")
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            path = first.with_name(f"{first.name}-{number}")


def check_new(path: Path, advice: str = ", or continue with --resume {}") -> None:
    """Raises ConfigError if `path` is not a new or empty folder, but for what a process leaves that died at once."""
    begun = (LOCK, unfinished_name(RunFolder(path).config).name)
    if path.exists() and (not path.is_dir() or not all(entry.name.startswith(begun) for entry in path.iterdir())):
        raise ConfigError(f"training.run_dir: {path} is not empty; name a new folder{advice.format(path)}")


def check_writable(path: Path) -> None:
    """Raises OSError, which names the folder, if `path`, or the folder to make it in, takes no file."""
    folder = next(one for one in (path, *path.absolute().parents) if one.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error


@contextmanager
def writing_run(path: Path, world: World) -> Iterator[None]:
    """Makes the folder `path` and holds its lock; under torchrun the first process holds it for all.

    Raises:
        ConfigError: another process holds it; the message names the process and the host.
    """
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    def lock() -> None:
        path.mkdir(parents=True, exist_ok=True)
        patience = _PATIENCE if restarted else 0.0
        held.enter_context(locking(path / LOCK, lambda by: ConfigError(f"{path}: {by} is writing this run"), patience))

    with ExitStack() as held:
        world.on_first(lock)
        yield
