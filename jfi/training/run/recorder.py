"""Records the metrics of a run, in `metrics.jsonl` and for TensorBoard."""

import hashlib
import json
import math
import os
from pathlib import Path

from jfi.training.config import ConfigError
from jfi.training.run.logger import Tracker
from jfi.training.run.run_folder import RunFolder
from jfi.utils.files import naming

#: The key of a line's speed; all other values of a line are the same in every repetition of a run.
SPEED = "samples_per_second"
#: The key that names a line's data, see `jfi.training.run.run_data.name_data`.
DATA = "data"


class LineFile:
    """A file of JSON objects, one a line, that is appended to.

    Args:
        path: of the file, which is made if it is not there.
        length: bytes of it to keep.
    """

    def __init__(self, path: Path, length: int) -> None:
        self._path = path
        path.touch()
        self._file = path.open("r+b")
        self._digest = hashlib.sha256(self._file.read(length))
        self._file.truncate(length)
        self._file.seek(length)

    def append(self, record: dict) -> None:
        """Appends a line."""
        line = (json.dumps(record) + "\n").encode()
        with naming(self._path):
            self._file.write(line)
            self._file.flush()
        self._digest.update(line)

    def length(self) -> int:
        """Flushes the file to the disk and returns its length in bytes."""
        with naming(self._path):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def sha256(self) -> str:
        """Returns the checksum of the file, in hexadecimal."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Recorder:
    """Appends metrics to `metrics.jsonl`, truncated to the length in the checkpoint first, and to TensorBoard.

    A resumed run ends with the same file as an uninterrupted one, but for the speeds (`SPEED`).

    Args:
        run: the run folder.
        length: bytes of metrics.jsonl to keep.
        step: TensorBoard's events from this step on are discarded.
        data: names the data that the metrics are of; each line has it.
        tracker: gets the metrics too.
    """

    def __init__(self, run: RunFolder, length: int, step: int, data: str, tracker: Tracker | None = None):
        # Imported here: it takes seconds, and faults in the input should be reported before.
        from torch.utils.tensorboard import SummaryWriter

        self._data, self._tracker = data, tracker
        #: metrics.jsonl.
        self.file = LineFile(run.metrics, length)
        self._board = SummaryWriter(str(run.tensorboard), purge_step=step)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, fault: object, *_: object) -> None:
        self.file.close()
        self._board.close()
        if self._tracker is not None:
            self._tracker.close(fault is not None)

    def metrics(self, split: str, epoch: float, step: int, metrics: dict[str, float], speed: float) -> None:
        """Appends a line; a metric that is not finite becomes null. `speed` is in samples a second."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        record = {"split": split, "epoch": epoch, "step": step, **finite, SPEED: round(speed, 1), DATA: self._data}
        self.file.append(record)
        for name, value in {**metrics, SPEED: speed}.items():
            self._board.add_scalar(f"{name}/{split}", value, step)
        if self._tracker is not None:
            self._tracker.metrics(split, {**metrics, SPEED: speed}, step)


def read_metrics(path: Path, length: int | None = None) -> list[dict]:
    """The lines of a `metrics.jsonl`, of its first `length` bytes if that is given; 0 bytes need no file.

    Raises:
        ConfigError: a line is damaged; the message names the file and the line.
    """
    return [] if length == 0 else parse_metrics(path, path.read_bytes()[:length])


def parse_metrics(path: Path, content: bytes) -> list[dict]:
    """The lines of a `metrics.jsonl` of this content; `path` is for messages. Raises as `read_metrics`."""
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not {"split", "epoch", "step"} <= record.keys():
            raise ConfigError(f"{path}:{number}: damaged, not a line of metrics")
        records.append(record)
    return records


def describe_earlier(log: list[dict], data: str) -> str | None:
    """A line about the epochs that were validated on other data than `data`, None if there are none.

    Example:
        >>> log = [{"split": "validation", "epoch": epoch, "data": name} for epoch, name in enumerate("aab", 1)]
        >>> print(describe_earlier(log, "b"))
        the data has changed: the metrics of epochs 1, 2 are of the data before, not comparable with others or a test
    """
    epochs = [f"{line['epoch']:.4g}" for line in log if line["split"] == "validation" and line.get(DATA, data) != data]
    if not epochs:
        return None
    which = f"epoch{'s' * (len(epochs) > 1)} {', '.join(epochs)}"
    return f"the data has changed: the metrics of {which} are of the data before, not comparable with others or a test"
