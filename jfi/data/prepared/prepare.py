"""Turns tables of any length into a prepared dataset, in bounded memory.

The stages are: read (`read`), sort and split (`sort`), then learn the schema, encode and write. Each leaves its result
in a folder next to the dataset, so a process that was killed continues with the stage it was in. The folder gets the
dataset's name when all is written.
"""

import dataclasses
import errno
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.batches.batch import Arrays
from jfi.data.batches.dataset import InteractionDataset
from jfi.data.batches.negatives import NegativeSampler
from jfi.data.config import DataConfig
from jfi.data.config_checks import check_data_config
from jfi.data.errors import DataError
from jfi.data.io.blocks import count_rows, describe_left_out, identify_files
from jfi.data.prepared.manifest import check_equal, check_fits, resolve
from jfi.data.prepared.stages.column_files import (
    SCRATCH,
    ColumnWriter,
    map_to_write,
    read_columns,
    remove_columns,
    write_arrow,
    write_true_rows,
)
from jfi.data.prepared.stages.columns import Columns, read_engagement
from jfi.data.prepared.stages.encode_columns import encode_dense, encode_features, known_items, learn_schema
from jfi.data.prepared.stages.read import RowReader, SourceTables, open_tables, read_warnings
from jfi.data.prepared.stages.sort import (
    MemoryLimitError,
    check_memory,
    order_and_split,
    read_order_and_split,
    sort_rows,
)
from jfi.data.prepared.stages.splits import SPLITS, choose_samples
from jfi.data.prepared.stages.statistics import compute_statistics
from jfi.data.prepared.stages.windows import make_labels, read_left_out
from jfi.data.prepared.store import BY_ITEM, EVENTS, event_table, open_prepared, write_files
from jfi.data.prepared.summary import summarize
from jfi.data.schema.schema import DataSchema
from jfi.events.events import SortedEvents, index_type, order_by_item
from jfi.utils.display import Display
from jfi.utils.files import SUMS, locking, naming, sha256_of, sync, temporary_folder

Advance = Callable[[int], None]
#: Says what the stages of a folder are of, and that it is one of stages.
_STATE = ".jfi-preparing.json"


def prepare_dataset(
    config: DataConfig, out: str | Path, memory: str | None = None, schema: DataSchema | None = None, show: bool = True
) -> None:
    """Writes the tables of a config as a prepared dataset, which `data.prepared` names.

    Memory grows with the distinct ids and values and with `memory`, not with the rows. Killed at any point and called
    again with the same arguments, it continues; where the config or a file has changed, it starts over.

    Args:
        config: the tables and their columns.
        out: folder to write, must not exist. Beside it the folder `.<name>.preparing` holds up to five times its size.
        memory: most that sorting holds in memory, such as "4GB"; None is half of what is free.
        schema: of a run with these columns, to encode the tables with; None learns one.
        show: whether to show the progress on stderr: a bar on a terminal, and elsewhere a line every 30 seconds.

    Raises:
        DataError: a fault in the config or the tables, or another process is preparing the same folder.
        OSError: the disk is full, or `out` exists.

    Example::

        prepare_dataset(DataConfig(interactions="clicks.parquet", label="action == buy"), "clicks.prepared")
        dataset = load_dataset(DataConfig(prepared="clicks.prepared"))
    """
    out, config = Path(out), config.with_absolute_paths()
    check_data_config(config)
    if config.prepared is not None:
        raise DataError(f"data.prepared is {config.prepared}; to prepare tables, leave it unset")
    if config.policy is not None:
        raise DataError("data.policy is a run's own; to prepare tables, leave it unset, and set it for the run")
    work = out.parent / f".{out.name}.preparing"
    is_done = all((work / name).exists() for name in (_STATE, "result.done")) and not (work / "result").exists()
    if out.exists() and is_done:
        shutil.rmtree(work, ignore_errors=True)  # killed when all was done; another call may remove it too
        return
    if out.exists():
        raise FileExistsError(errno.EEXIST, "file exists", str(out))
    stages = Stages(work, show, memory=memory)
    if schema is not None:
        check_fits(schema, config.resolved())
    with naming(work), _locked(work, config, schema), _keeping(work):
        make_dataset(config, schema, stages)
        (work / "result").rename(out)
        sync(out.parent)


def make_dataset(config: DataConfig, schema: DataSchema | None, stages: "Stages") -> DataSchema:
    """Writes a prepared dataset into the folder `result` of the stages; returns its schema.

    Args:
        config: the tables and their columns, checked.
        schema: to encode the tables with; None learns one.
        stages: those that are done are not done again.
    """
    given = open_tables(config)
    if schema is not None and schema.codec is not None and given.sids is not None:
        given.sids.check_codec(schema.codec, "the run")
    read_and_sort(given, stages)
    with stages.run("result", None, "encode and write") as advance:
        if advance is not None:
            schema = write_prepared(given, schema, stages.folder, stages.durable)
    return schema or DataSchema.load(stages.folder / "result", verified=False)


def read_and_sort(given: SourceTables, stages: "Stages", check: bool = True) -> None:
    """Writes the folders `read`, `rows` and `order` of the stages; with `check` all labels must vary."""
    work, config, memory = stages.folder, given.config, stages.memory
    with stages.run("read", count_rows(given.files)) as advance:
        if advance is not None:
            reader = RowReader(config, work / "read")
            reader.read(given.interactions(), advance)
            if not reader.rows:
                raise DataError(f"{given.name}: no rows")
            if check:
                reader.check(given.name, given.blocks)
    count = len(read_columns(work / ("rows" if stages.is_done("rows") else "read"))["user"])
    with stages.run("rows", 2 * count, "sort") as advance:
        if advance is not None:
            sort_rows(work, config, memory, advance)
            make_labels(work, given)
    remove_columns(work / "read")
    with stages.run("order", 2 * count, "split") as advance:
        if advance is not None:
            order_and_split(work, config, memory, advance, given.blocks)


def sorted_events(
    config: DataConfig, work: Path, split: np.ndarray | None = None, event: np.ndarray | None = None
) -> SortedEvents:
    """The events of `read_and_sort`, as maps of its files.

    Args:
        config: the meaning of the columns.
        work: the folder of the stages.
        split: `[E]` int8; None for that of the stages.
        event: `[E]` int8, the histories that each row is an event of, a bit each; None for those of the rules.
    """
    columns = read_columns(work / "rows")
    split = read_order_and_split(work)[1] if split is None else split
    event = columns.get("event") if event is None else event
    rows, of_histories = None, []
    if event is not None:
        rows = write_true_rows(work / SCRATCH / "histories", event)
        folders = [work / SCRATCH / f"history-{name}" for name in config.histories]
        of_histories = [write_true_rows(folder, event, 1 << i) for i, folder in enumerate(folders)]
    targets = {name: columns[name] for name in config.target_names()}
    user, item, time, label = (columns[name] for name in ("user", "item", "time", "label"))
    return SortedEvents(user, item, time, label, split, rows, targets, config.label_delay, of_histories)


def write_prepared(given: SourceTables, schema: DataSchema | None, work: Path, durable: bool) -> DataSchema:
    """Writes the dataset of the sorted rows into the folder `result` of the stages; returns its schema.

    Each column is written once.
    """
    config, out = given.config, work / "result"
    events, order = sorted_events(config, work), read_order_and_split(work)[0]
    columns = Columns(given, work, events)
    schema = schema or learn_schema(columns)
    write_arrow(out / EVENTS, event_table(columns, schema))
    columns.written = map_to_write(out / EVENTS)
    ids, engagement = encode_features(columns, schema), read_engagement(columns)
    items = known_items(schema, ids, events)
    known = np.zeros(columns.count("item"), bool)
    known[items] = True
    (folder := work / SCRATCH / "samples").mkdir()
    writer, negatives = ColumnWriter(folder, dict.fromkeys(SPLITS, index_type(len(order)))), None
    columns.notes.extend(read_left_out(work) + choose_samples(events, order, known, config, writer.append))
    writer.close()
    if config.is_implicit:
        write_arrow(out / BY_ITEM, {"event": np.zeros(len(order), index_type(len(order)))})
        by_item = order_by_item(events, map_to_write(out / BY_ITEM)["event"])
        negatives = NegativeSampler(events, by_item, items, config.negatives)
    statistics = compute_statistics(columns, schema, ids, negatives) if config.statistics_groups() else None
    dense, samples = encode_dense(columns, schema), read_columns(folder)
    arrays = Arrays(events, ids, dense, samples, negatives, engagement, statistics)
    summary = summarize(arrays, schema, columns)
    summary.warnings.extend(read_warnings(work / "read"))
    for table in [one for one in (given.users, given.items) if one is not None]:
        summary.warnings.extend(describe_left_out(table.name, len(table), table.left_out))
    write_files(out, arrays, schema, summary, config, durable)
    return schema


class Stages:
    """The stages that are finished, in a folder each.

    Args:
        folder: of all stages; it exists when the first one runs.
        show: whether to show the progress.
        durable: whether what is finished must outlive the process.
        memory: most that sorting holds in memory, such as "4GB"; None is half of what is free.

    Raises:
        DataError: `memory` is no amount.
    """

    def __init__(self, folder: Path, show: bool = True, durable: bool = True, memory: str | None = None) -> None:
        if memory is not None:
            check_memory(memory)
        self.folder, self._show, self.durable, self.memory = folder, show, durable, memory

    def is_done(self, name: str) -> bool:
        """Returns whether a stage is finished."""
        return (self.folder / f"{name}.done").exists()

    @contextmanager
    def run(self, name: str, total: int | None, label: str | None = None) -> Iterator[Advance | None]:
        """Yields what to call with the number of rows done, or None if the stage is finished already.

        When the block begins the folder `name` is empty, and so is that for temporary files.

        Args:
            name: of the stage.
            total: the number of rows to expect, if known.
            label: what the progress is of; the name if it is None.
        """
        if self.is_done(name):
            yield None
            return
        folder = self.folder / name
        for left in (folder, self.folder / SCRATCH):
            shutil.rmtree(left, ignore_errors=True)
            left.mkdir()
        with Display(label or name, total, unit="rows", silent=not self._show, ticking=True) as display:
            yield display.update
        pa.default_memory_pool().release_unused()
        if self.durable:
            for path in (*folder.iterdir(), folder):
                sync(path)
        (self.folder / f"{name}.done").touch()
        if self.durable:
            sync(self.folder)


@contextmanager
def _locked(work: Path, config: DataConfig, schema: DataSchema | None) -> Iterator[None]:
    """Locks the folder of the stages, empties it if it is of another config or other files, removes it at the end."""
    state = {
        "config": dataclasses.asdict(config.without_tables()),
        "inputs": identify_files(config),
        "schema": None if schema is None else _digest(schema),
    }
    work.mkdir(parents=True, exist_ok=True)
    with locking(work, lambda holder: DataError(f"{work}: {holder} is preparing this dataset")):
        path, text, found = work / _STATE, json.dumps(state, sort_keys=True), [*work.iterdir()]
        if found and path not in found:
            raise DataError(f"{work}: has files, and none of `jfi prepare`; move it away")
        if not found or path.read_text() != text:
            for left in found:
                if left != path:  # the last one, which says whose folder it is
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            path.write_text(text)
        yield
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _keeping(work: Path) -> Iterator[None]:
    """Removes the stages after an error that another call would meet again, and says of others that they are kept."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, DataError) and not isinstance(error, MemoryLimitError):
            shutil.rmtree(work, ignore_errors=True)  # the tables or the config must change, and everything starts over
        else:
            print(f"{work} keeps what is done; call again to continue, or remove it", file=sys.stderr)
        raise


def _digest(schema: DataSchema) -> str:
    with temporary_folder("jfi-schema-") as folder:
        schema.save(folder / "schema")
        return sha256_of(folder / "schema" / SUMS)


def load_dataset(config: DataConfig, schema: DataSchema | None = None, memory: str | None = None) -> InteractionDataset:
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
        memory: most that sorting tables holds in memory, such as "4GB"; None is half of what is free.

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
        schema = prepare_into(config, folder, schema, memory)
        return open_temporary(config, folder, schema)


def prepare_into(
    config: DataConfig, folder: Path, schema: DataSchema | None = None, memory: str | None = None
) -> DataSchema:
    """Prepares the tables of a config below an empty folder, for `open_temporary`; returns the schema."""
    check_data_config(config)
    if schema is not None:
        check_fits(schema, config.resolved())
    with naming(folder):
        return make_dataset(config, schema, Stages(folder, durable=False, memory=memory))


def open_temporary(config: DataConfig, folder: Path, schema: DataSchema | None = None) -> InteractionDataset:
    """The dataset of `prepare_into`, which is left when its files are removed."""
    config = dataclasses.replace(config.resolved(), prepared=str(folder / "result"))
    dataset = open_prepared(config, verified=False, schema=schema)
    dataset.folder = None
    return dataset
