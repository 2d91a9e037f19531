"""A fingerprint of a dataset, by which a run notices that its data has changed."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jfi.data.batches.assemble import Arrays
from jfi.data.batches.dataset import InteractionDataset
from jfi.data.errors import DataError
from jfi.utils.files import DamagedFileError, read_sums
from jfi.utils.jagged import blocks

#: The file's name in a prepared dataset and in a run; it has the layout of SHA256SUMS.
NAME = "fingerprint.sha256"
#: Its entries: of all arrays, of the training samples, and of what a user's events are cut into timelines by.
DATA, TRAIN, TIMELINES = "data", "train", "timelines"


def fingerprint_of(dataset: InteractionDataset) -> dict[str, str]:
    """SHA-256 by entry of the arrays of a dataset that is a map of files; reads each array once.

    They are of the values as the schema encodes them, which is all that training sees: another file format, or a value
    that is unknown before and after, makes no difference. Those of a prepared dataset were computed when it was
    prepared.
    """
    if dataset.folder is not None and (dataset.folder / NAME).is_file():
        return read_fingerprint(dataset.folder)
    arrays, events = dataset.arrays(), dataset.arrays().events
    rows, train = [] if events.rows is None else [events.rows], arrays.samples["train"]
    own = (events.user, events.item, events.time, events.label)
    samples = (part[train[begin:end]] for part in own for begin, end in blocks(len(train)))
    timelines = (events.user, events.time, *rows)
    every = list(_all_of(arrays))
    kinds = np.frombuffer(str([(part.dtype.str, part.shape) for part in every]).encode(), np.uint8)
    return {DATA: _digest([kinds, *every]), TRAIN: _digest(samples), TIMELINES: _digest(timelines)}


def read_fingerprint(folder: Path) -> dict[str, str]:
    """The fingerprint of a prepared dataset, or that in a run.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        return read_sums(folder, NAME)
    except DamagedFileError as fault:
        raise DataError(str(fault)) from None


def _all_of(arrays: Arrays) -> Iterator[np.ndarray]:
    events, (users, items, contexts) = arrays.events, arrays.dense
    yield from (events.user, events.item, events.time, events.label, *events.targets.values(), *arrays.samples.values())
    yield from [] if events.rows is None else [events.rows]
    for column in arrays.columns:
        yield from [column.ids] if column.offsets is None else [column.ids, column.offsets]
    yield from (users, items, *contexts)
    if (fields := arrays.engagement) is not None:
        yield from (fields.dwell, fields.surface, *([] if fields.session is None else [fields.session]))


def _digest(parts: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()
