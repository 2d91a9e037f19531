"""Turns tables of any length into a prepared dataset, in bounded memory.

The stages are: read (`read`), sort and split (`sort`), then learn the schema, encode and write. Each leaves its result
in a folder beside the dataset, so a process that was killed continues with the stage it was in. The folder gets the
dataset's name when all is written.
"""

import dataclasses
import errno
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.batches.assemble import Arrays, Dense
from jfi.data.batches.dataset import InteractionDataset
from jfi.data.batches.engagement import Engagement
from jfi.data.batches.events import Events, index_type, order_by_item
from jfi.data.batches.negatives import NegativeSampler
from jfi.data.config import DataConfig
from jfi.data.config_checks import check_data_config
from jfi.data.errors import DataError
from jfi.data.features.statistics import make_statistics
from jfi.data.io.blocks import count_rows, input_files
from jfi.data.prepared.column_files import ColumnWriter, new_map, read_columns, remove_columns, write_true_rows
from jfi.data.prepared.columns import Columns
from jfi.data.prepared.encode import encode_dense, encode_features, known_items
from jfi.data.prepared.engagement import read_engagement
from jfi.data.prepared.external_sort import MemoryLimitError, check_memory
from jfi.data.prepared.fits import check_fits
from jfi.data.prepared.learn import learn_schema
from jfi.data.prepared.read import check_rows, read_rows, read_warnings
from jfi.data.prepared.rows import Rows
from jfi.data.prepared.samples import choose_samples
from jfi.data.prepared.sort import order_and_split, read_ids, read_order_and_split, sort_rows
from jfi.data.prepared.sources import Tables, column_settings, open_tables
from jfi.data.prepared.splits import SPLITS
from jfi.data.prepared.store import write_prepared
from jfi.data.prepared.summarize import summarize
from jfi.data.schema.columns import Categorical
from jfi.data.schema.labels import target_names
from jfi.data.schema.schema import DataSchema, as_array
from jfi.utils.display import Display
from jfi.utils.files import naming, sync
from jfi.utils.lock import locking_folder

Advance = Callable[[int], None]
_SCRATCH = "scratch"


def prepare_dataset(
    config: DataConfig, out: str | Path, memory: str = "1GB", schema: DataSchema | None = None, show: bool = True
) -> None:
    """Writes the tables of a config as a prepared dataset, which `data.prepared` names.

    Memory grows with the distinct ids and values and with `memory`, not with the rows. Killed at any point and called
    again with the same arguments, it continues; where the config or a file has changed, it starts over.

    Args:
        config: the tables and their columns.
        out: folder to write, must not exist. Beside it the folder `.<name>.preparing` holds up to five times its size.
        memory: most that the sorting engine holds in memory, such as "4GB".
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
    if out.exists() and (work / "result.done").exists() and not (work / "result").exists():
        shutil.rmtree(work, ignore_errors=True)  # killed when all was done; another call may remove it too
        return
    if out.exists():
        raise FileExistsError(errno.EEXIST, "file exists", str(out))
    check_memory(memory)
    if schema is not None:
        check_fits(schema, column_settings(config))
    with naming(work), _locked(work, config, schema), _keeping(work):
        make_dataset(config, schema, work, Stages(work, show), memory)
        (work / "result").rename(out)
        sync(out.parent)


def make_dataset(
    config: DataConfig, schema: DataSchema | None, work: Path, stages: "Stages", memory: str = "1GB"
) -> None:
    """Writes a prepared dataset into the folder `result` of the stages.

    Args:
        config: the tables and their columns, checked.
        schema: to encode the tables with; None learns one.
        work: the folder of the stages.
        stages: those that are done are not done again.
        memory: most that the sorting engine holds in memory.
    """
    given = open_tables(config)
    if schema is not None and given.sids is not None:
        given.sids.check_codec(schema.codec, "the run")
    read_and_sort(given, work, stages, memory)
    with stages.run("result", None, "encode and write") as advance:
        if advance is not None:
            dataset = _encode(given, schema, work, work / _SCRATCH)
            write_prepared(dataset, given.config, work / "result", stages.durable)


def read_and_sort(given: Tables, work: Path, stages: "Stages", memory: str = "1GB", check: bool = True) -> None:
    """Writes the folders `read`, `rows` and `order` of the stages; with `check` all labels must vary."""
    read, rows, order = (work / name for name in ("read", "rows", "order"))
    config, scratch = given.config, work / _SCRATCH
    with stages.run("read", count_rows(config) if given.parts is None else None) as advance:
        if advance is not None:
            reader = read_rows(given.interactions(), config, read, advance)
            if reader is None:
                raise DataError(f"{given.name}: no rows")
            if check:
                check_rows(reader, given.name, given.blocks)
    count = len(read_columns(rows if stages.is_done("rows") else read)["user"])
    with stages.run("rows", 2 * count, "sort") as advance:
        if advance is not None:
            sort_rows(read, rows, config, memory, scratch, advance)
    remove_columns(read)
    with stages.run("order", 2 * count, "split") as advance:
        if advance is not None:
            order_and_split(rows, order, config, memory, scratch, advance, given.blocks)


def sorted_rows(config: DataConfig, work: Path, histories: np.ndarray | None = None) -> Rows:
    """The rows of `read_and_sort`, as maps of its files; `histories` are the rows of `data.history`, if it is set."""
    columns, split = read_columns(work / "rows"), read_order_and_split(work / "order")[1]
    targets = {name: columns[name] for name in target_names(config)}
    own = [columns[name] for name in ("user", "item", "time", "label")]
    ids = [read_ids(work / "rows", name) for name in ("user", "item")]
    return Rows(*ids, Events(*own, split, histories, targets))


def _encode(given: Tables, schema: DataSchema | None, work: Path, folder: Path) -> InteractionDataset:
    """The dataset of the sorted rows; `folder` gets the files that its arrays map."""
    config, histories = given.config, None
    if config.history is not None:
        histories = write_true_rows(folder / "histories", read_columns(work / "rows")["event"])
    rows, order = sorted_rows(config, work, histories), read_order_and_split(work / "order")[0]
    computed = make_statistics(rows.events, config.statistics, config.max_history) if config.statistics else {}
    tables = {"user": given.users, "item": given.items}
    columns = Columns(work / "read", work / "rows", rows, config, folder, tables, given.sids, given.name, computed)
    schema = schema or learn_schema(columns, rows, config)
    ids, dense, engagement = encode_columns(columns, rows, schema, config, folder)
    items = known_items(schema, ids, rows.events)
    samples = _write_samples(rows, order, items, config, folder)
    negatives = None
    if config.label is None:
        by_item = order_by_item(rows.events, new_map(folder / "by_item.npy", index_type(len(order)), len(order)))
        negatives = NegativeSampler(rows.events, by_item, items, config.negatives)
    dataset = InteractionDataset(Arrays(rows.events, ids, dense, samples, negatives, engagement), schema)
    dataset.summary = summarize(dataset, config, columns)
    dataset.summary.warnings.extend(read_warnings(work / "read"))
    return dataset


def encode_columns(
    columns: Columns, rows: Rows, schema: DataSchema, config: DataConfig, folder: Path
) -> tuple[list[Categorical], Dense, Engagement | None]:
    """The columns of a dataset as the schema encodes them.

    Args:
        columns: the raw columns of the rows.
        rows: the sorted rows.
        schema: the encodings.
        config: the meaning of the columns.
        folder: gets the files that the arrays of events map.
    """

    def new_column(name: str, kind: type, count: int) -> np.ndarray:
        return new_map(folder / f"{name}.npy", kind, count)

    ids, dense = encode_features(columns, schema, new_column), encode_dense(columns, schema, config, new_column)
    return ids, dense, read_engagement(columns, config, new_column)


def _write_samples(
    rows: Rows, order: np.ndarray, items: np.ndarray, config: DataConfig, folder: Path
) -> dict[str, np.ndarray]:
    known = np.zeros(len(rows.item_ids), bool)
    known[items] = True
    writers = {}
    for name in SPLITS:
        (folder / name).mkdir()
        writers[name] = ColumnWriter(folder / name, {"event": index_type(len(order))})
    choose_samples(rows.events, order, known, config, lambda name, chosen: writers[name].append("event", chosen))
    for writer in writers.values():
        writer.close()
    return {name: read_columns(folder / name)["event"] for name in SPLITS}


class Stages:
    """The stages that are finished, in a folder each.

    Args:
        work: the folder of all stages, which exists.
        show: whether to show the progress.
        durable: whether what is finished must outlive the process.
    """

    def __init__(self, work: Path, show: bool = True, durable: bool = True) -> None:
        self._work, self._show, self.durable = work, show, durable

    def is_done(self, name: str) -> bool:
        """Returns whether a stage is finished."""
        return (self._work / f"{name}.done").exists()

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
        folder = self._work / name
        for left in (folder, self._work / _SCRATCH):
            shutil.rmtree(left, ignore_errors=True)
            left.mkdir()
        with Display(label or name, total, unit="rows", silent=not self._show, ticking=True) as display:
            yield display.update
        pa.default_memory_pool().release_unused()
        if self.durable:
            sync(folder)
        (self._work / f"{name}.done").touch()
        if self.durable:
            sync(self._work)


@contextmanager
def _locked(work: Path, config: DataConfig, schema: DataSchema | None) -> Iterator[None]:
    """Locks the folder of the stages, empties it if it is of another config or other files, removes it at the end."""
    state = {
        "config": dataclasses.asdict(config.without_tables()),
        "inputs": _state_of_files(config),
        "schema": _digest(schema),
    }
    work.mkdir(parents=True, exist_ok=True)
    with locking_folder(work) as is_first:
        if not is_first:
            raise DataError(f"{work}: another process is preparing this dataset")
        path, text = work / "state.json", json.dumps(state, sort_keys=True)
        if not path.exists() or path.read_text() != text:
            for left in work.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            path.write_text(text)
        yield
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _keeping(work: Path) -> Iterator[None]:
    """Removes the stages after an error that another call would meet again, and says of others that they are kept."""
    kept = f"{work} keeps what is done; call again to continue, or remove it"
    try:
        yield
    except MemoryLimitError as error:
        raise MemoryLimitError(f"{error}; {kept}") from error
    except DataError:
        # The tables or the config must change, and then everything starts over.
        shutil.rmtree(work, ignore_errors=True)
        raise
    except OSError as error:
        error.strerror = f"{error.strerror or 'failed'}; {kept}"
        raise
    except KeyboardInterrupt:
        print(kept, file=sys.stderr)
        raise


def _state_of_files(config: DataConfig) -> list[tuple[str, int, int]]:
    if config.source == "synthetic":
        return []
    found = [(str(path), path.stat()) for path in input_files(config) if path.exists()]
    return [(path, state.st_size, state.st_mtime_ns) for path, state in found]


def _digest(schema: DataSchema | None) -> str | None:
    if schema is None:
        return None
    digest, encodings = hashlib.sha256(), schema.encodings
    digest.update(repr((schema.features, schema.dense_names, schema.labels, encodings.moments)).encode())
    digest.update(b"" if schema.codec is None else schema.codec.fingerprint.encode())
    digest.update(repr({name: edges.tolist() for name, edges in encodings.edges.items()}).encode())
    digest.update(repr({name: known.num_buckets for name, known in encodings.buckets.items()}).encode())
    for vocabulary in encodings.vocabularies.values():
        digest.update("\0".join(as_array(vocabulary.values).to_pylist()).encode())
    return digest.hexdigest()
