"""The rows of tables to score, of any size."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.batches.batch import Arrays
from jfi.data.batches.dataset import InteractionDataset
from jfi.data.batches.negatives import NegativeSampler
from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.io.arrays import as_text, as_type, common_type
from jfi.data.io.blocks import (
    count_rows,
    describe_left_out,
    existing_interactions,
    find_table,
    name_files,
    read_files,
)
from jfi.data.io.paths import File
from jfi.data.io.table import SourceRows
from jfi.data.labels import SESSION
from jfi.data.prepared.prepare import Stages, sorted_events
from jfi.data.prepared.stages.column_files import SCRATCH, new_map, read_columns, remove_columns, write_true_rows
from jfi.data.prepared.stages.columns import Columns, read_engagement
from jfi.data.prepared.stages.encode_columns import encode_dense, encode_features, has_lists
from jfi.data.prepared.stages.read import RowReader, open_tables
from jfi.data.prepared.stages.sort import ROW, read_ids, sort_rows
from jfi.data.prepared.stages.statistics import compute_statistics
from jfi.data.prepared.stages.windows import make_labels
from jfi.data.schema.columns import Categorical
from jfi.data.schema.schema import DataSchema, as_array
from jfi.events.events import first_rows, order_by_item, user_blocks
from jfi.events.groups import SESSIONS
from jfi.history_policies import Policy
from jfi.semantic_ids.packing import UNKNOWN_SID
from jfi.utils.jagged import blocks

_log = logging.getLogger(__name__)

#: Files as `read_table` takes them, a table in memory, or what `find_table` has found.
Source = str | list[str] | pa.Table | list[File]
#: The number of the history's rows; those to score have the next one.
HISTORY = 0
#: Makes the columns `[E]` of statistics, by name, of the raw columns, the result of `encode_features`, the rows to
#: score `[N]`, and their indices in the table.
MakeStatistics = Callable[[Columns, list[Categorical], np.ndarray, np.ndarray], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Sources:
    """The tables to score.

    Args:
        interactions: the rows to score: a file, or an Arrow table.
        history: rows before them, which are only part of histories, or None, which stands for the run's own
            interactions where statistics are made of it.
        users, items: tables of users and of items, or None.
        semantic_ids: file of the items' semantic IDs, or None.
    """

    interactions: Source
    history: Source | None = None
    users: Source | None = None
    items: Source | None = None
    semantic_ids: str | None = None

    def find(self, config: DataConfig) -> "Sources":
        """Returns the sources as files; each is looked for once, and what has been found stays.

        Raises:
            DataError: a table is missing, or nothing has the past of all users where statistics are made of it.
        """
        found = {
            name: find_table(source, f"--{name}", config)
            for name in ("interactions", "history", "users", "items")
            if (source := getattr(self, name)) is not None
        }
        if "history" not in found and config.statistics_groups():
            found["history"] = existing_interactions(config)
            if not found["history"]:
                raise DataError(
                    "no history is given for data.statistics, and the run's own interactions are not there; give a "
                    "table with the past of all users as the history (`history`, --history), or train the run with "
                    "data.statistics: []"
                )
            what = "statistics are made of the run's own interactions, since no history is given"
            _log.warning("%s: %s", what, name_files(found["history"]))
        return replace(self, **found)


class ScoringRows:
    """A dataset of two files, the history and the rows to score, which are its split "rows".

    It is read, sorted and encoded as one with `split: files`, with the vocabularies of the run, into files in `folder`,
    so memory does not grow with the rows.

    Args:
        sources: what to score.
        folder: an empty folder for the files, which together are a few times as large as the sources.
        schema: of the run.
        config: the section `data` of the run.
        by: further columns of the interactions to keep, for groups.
        positives: whether the rows are positives to evaluate; negatives can be drawn then.
        policy: of the run, or None.
        trains: whether the rows are to be trained on: they keep their weights and auxiliary labels.
        past: makes the statistics of the rows in place of the history; or None.
        are_events: whether the rows are events for the histories and statistics of later ones, too.
        memory: most that sorting holds in memory; None is half of what is free.

    Raises:
        DataError: a table is missing or malformed, as one line that names the place.
    """

    def __init__(
        self,
        sources: Sources,
        folder: Path,
        schema: DataSchema,
        config: DataConfig,
        by: Iterable[str] = (),
        positives: bool = False,
        policy: Policy | None = None,
        trains: bool = False,
        past: MakeStatistics | None = None,
        are_events: bool = True,
        memory: str | None = None,
    ) -> None:
        sources = sources.find(config)
        #: Whether a log is there of what happened before the rows, given or the run's own.
        self.has_history = sources.history is not None
        self._config = config = _config_of(config.resolved(), sources, policy is not None, trains)
        self._wanted, self._past = config.columns(of_interactions=True), past
        self._folder, self._schema, self._by, self._policy = folder, schema, list(dict.fromkeys(by)), policy
        self._warned, self._are_events = set[str](), are_events
        #: Why rows have no label, where a file lacks a column of it.
        self.no_label: str | None = None
        #: The rows to score that the history has too.
        self._repeated = np.zeros(0, np.int64)
        #: The number of rows to score.
        self.num_rows = 0
        #: The types of the columns of each of the files of keys.
        self._keys: list[pa.Schema] = []
        if schema.codec is None and sources.semantic_ids is not None:
            raise DataError(f"semantic_ids: got {sources.semantic_ids!r}, but the run has no semantic IDs")
        self._tables = replace(open_tables(config, "semantic_ids"), are_complete=False)
        if self._tables.sids is not None:
            self._tables.sids.check_codec(schema.codec, "the run", "semantic_ids")
        lists = {spec.column for spec in schema.features if has_lists(schema, spec.column)}
        #: The split "rows" has the rows to score; None if there are none.
        self.dataset: InteractionDataset | None = None
        #: `[N]` int64, the number of each sample's row in the table of interactions.
        self.rows = np.zeros(0, np.int64)
        #: Draws negatives of positives.
        self.negatives: NegativeSampler | None = None
        #: `[N]` float32, or `[N, L]` of L labels; NaN where there is none, and for a positive of an unknown item.
        self.labels = np.zeros((0, len(config.targets())) if len(config.targets()) > 1 else 0, np.float32)
        stages = Stages(folder, durable=False, memory=memory)
        with stages.run("read", count_rows(self._tables.files)) as advance:
            reader = RowReader(config, folder / "read", lists)
            reader.read(self._interactions(), advance)
        if not self.num_rows:
            return
        with stages.run("rows", 2 * reader.rows, "sort") as advance:
            sort_rows(folder, config, memory, advance)
            repeated = _repeated_rows(read_columns(folder / "rows")) if config.label_windows() else None
            make_labels(folder, self._tables, repeated)
        remove_columns(folder / "read")
        self._open(positives)

    def key_batches(self) -> Iterator[pa.RecordBatch]:
        """The ids, the times and the columns `by` of the rows to score, as the table has them, in its order."""
        kinds = [common_type(set(types)) for types in zip(*(schema.types for schema in self._keys), strict=True)]
        schema = pa.schema(zip(self._keys[0].names, kinds, strict=True))
        for number in range(len(self._keys)):
            with pa.memory_map(str(self._folder / f"keys-{number}")) as file, pa.ipc.open_file(file) as reader:
                for i in range(reader.num_record_batches):
                    columns = map(as_type, reader.get_batch(i).columns, kinds)
                    yield pa.RecordBatch.from_arrays(list(columns), schema=schema)
        if not self.num_rows:
            yield pa.RecordBatch.from_pylist([], schema)

    def _open(self, positives: bool) -> None:
        """Maps the sorted rows."""
        config, schema, folder = self._config, self._schema, self._folder
        columns, item_ids, candidates = read_columns(folder / "rows"), read_ids(folder, "item"), None
        first = len(columns[ROW]) - self.num_rows  # the rows to score are the last ones that were read
        if positives:
            item_ids, candidates, known = _with_candidates(item_ids, schema, self._tables.items is not None)
        split = np.broadcast_to(np.int8(0), len(columns[ROW]))
        events = sorted_events(config, folder, split, self._events_of_histories(columns))
        # Users and items without a table have the columns of their first event.
        since = events.time if self._are_events else np.where(columns["split"] == HISTORY, events.time, np.inf)
        raw = Columns(self._tables, folder, events, item_ids, since)
        ids, engagement, statistics = encode_features(raw, schema), None, None
        if self._policy is not None and (engagement := read_engagement(raw)) is not None:
            # Of an event on a surface that the policy does not know nothing is known, as of any unseen value.
            engagement = engagement.on_surfaces(self._policy.surfaces)
        samples = write_true_rows(folder / SCRATCH / "samples", columns["split"])
        if self._past is not None:
            raw.computed |= self._past(raw, ids, samples, columns[ROW][samples] - first)
        elif config.statistics_groups():
            statistics = compute_statistics(raw, schema, ids, rows=samples, repeated=self._repeated)
        arrays = Arrays(events, ids, encode_dense(raw, schema), {"rows": samples}, None, engagement, statistics)
        self.dataset = InteractionDataset(arrays, schema, config.batching, self._policy)
        self.rows = raw.new("rows", np.int64, len(samples))
        self.labels = raw.new("labels", np.float32, (self.num_rows, *self.labels.shape[1:]))
        labels = config.labels_of(events.label, events.targets)[: len(config.targets())]
        for begin, end in blocks(len(samples)):
            chosen = samples[begin:end]
            self.rows[begin:end] = columns[ROW][chosen] - first
            found = np.squeeze(np.stack([one[chosen] for one in labels], axis=1), axis=() if len(labels) > 1 else 1)
            if config.is_implicit:
                is_known = False if candidates is None else known[events.item[chosen]]
                found = np.where(is_known, found, np.float32(np.nan))
            self.labels[self.rows[begin:end]] = found
        if candidates is not None:
            self.negatives = NegativeSampler(events, order_by_item(events), candidates, config.negatives)
        if self._tables.sids is not None:
            without = int((raw.item_sids()[events.item[samples]] == UNKNOWN_SID).sum())
            if without:
                what = f"have an item without a semantic ID in {self._tables.sids.path}, which counts as unknown"
                _log.warning("%s rows to score %s", f"{without:,}", what)

    def _events_of_histories(self, columns: dict[str, np.ndarray]) -> np.ndarray | None:
        """`[E]` int8, what each row is an event of: one that is scored and in the history counts once; None for all."""
        if self.num_rows == len(columns[ROW]) and self._are_events:
            return None
        event = new_map(self._folder / SCRATCH / "is_event.npy", np.int8, len(columns["user"]))
        event[:] = columns.get("event", 1)
        if not self._are_events:
            self._repeated = np.flatnonzero(columns["split"] != HISTORY)
            event[self._repeated] = 0
            return event
        self._repeated = _repeated_rows(columns)
        event[self._repeated] = 0
        if len(self._repeated):
            what = "rows to score are in the history too; each counts as one event"
            _log.warning("%s %s", f"{len(self._repeated):,}", what)
        return event

    def _interactions(self) -> Iterator[tuple[int, SourceRows]]:
        """The rows of the history, then those to score, whose keys are written; each after the number of its file."""
        for number, files in enumerate((self._config.interactions, self._config.test)):
            left_out, rows, by = 0, 0, self._by if number != HISTORY else []
            for _, table in () if files is None else read_files(files, self._wanted.union(by), self._config):
                left_out, rows = left_out + table.left_out, rows + len(table)
                if number != HISTORY:
                    self._write_keys(table)
                    self.num_rows = rows
                yield number, self._with_missing(table, number)
            for line in describe_left_out(("the history", "the rows to score")[number], rows, left_out):
                _log.warning("%s", line)

    def _with_missing(self, table: SourceRows, number: int) -> SourceRows:
        """The table with empty columns in place of those that its file may lack.

        They are the label's, but for a history that statistics are made of; in a table to score all that tell what
        happened, which is an input of later rows alone; and in the history those of contexts, which are inputs of the
        rows to score alone.
        """
        config = self._config
        label = {*config.label_columns(), *config.sample_columns(), *config.window_columns(), config.weight}
        for name in (config.user, config.item, config.timestamp):  # before columns that the file lacks are known too
            table.require(name)
        optional = self._wanted - {config.user, config.item, config.timestamp}
        optional -= {name for of in ("user", "item") if getattr(config, f"{of}s") is None for name in config.names(of)}
        if number != HISTORY:
            optional -= {*config.names("context")}
        else:
            optional &= {*config.names("context")} - {*config.names("event", "category")} | label
            optional -= label if config.statistics_groups() and self._past is None else set()
        lacking = sorted(optional - {*table.known})
        if number != HISTORY and (first := next((name for name in lacking if name in label), None)):
            self.no_label = self.no_label or f"{table.name}: no column '{first}', which the label needs"
        if (
            self._are_events
            and number != HISTORY
            and (happened := [name for name in lacking if name not in label | self._warned])
        ):
            self._warned.update(happened)
            names = ", ".join(f"'{name}'" for name in happened)
            _log.warning("%s: no column %s; it counts as missing in the rows' events", table.name, names)
        for name in lacking:
            table = table.with_column(name, None)
        return table

    def _write_keys(self, table: SourceRows) -> None:
        for name in self._by:
            others = [one for one in (self._tables.users, self._tables.items) if one is not None and name in one.known]
            note = f"; groups are by columns of the interactions, and it is one of {others[0].name}" if others else ""
            table.require(name, note)
            if pa.types.is_nested(table.column(name).type):
                raise DataError(f"{table.name}: column '{name}' has lists; groups need one value a row")
            table.strings(name)  # before any row is scored: groups are named by their text
        names = dict.fromkeys([self._config.user, self._config.item, self._config.timestamp, *self._by])
        keys = pa.table({name: table.column(name) for name in names})
        if self._keys:
            kinds = self._keys[-1].types
            keys = pa.table(
                [_as_before(*pair) for pair in zip(map(table.column, names), kinds, strict=True)], list(names)
            )
        with pa.ipc.new_file(self._folder / f"keys-{len(self._keys)}", keys.schema) as file:
            file.write_table(keys)
        self._keys.append(keys.schema)


def _config_of(config: DataConfig, sources: Sources, has_policy: bool, trains: bool) -> DataConfig:
    """The config of the dataset of history and rows, without the columns of a run that scoring does not read."""
    changes: dict[str, object] = {"interactions": sources.history, "validation": None, "test": sources.interactions}
    changes |= {"users": sources.users, "items": sources.items, "semantic_ids": sources.semantic_ids}
    changes |= {"split": "files", "split_column": None, "request_id": None, "title": None}
    if not trains:
        changes |= {"weight": None, "labels": config.targets() if config.labels else []}
    if not has_policy:  # nothing else reads these columns
        reads_sessions = not {*SESSIONS}.isdisjoint(config.statistics_groups())
        reads_sessions |= any(one.of == SESSION for one in config.label_windows().values())
        changes |= {"dwell": None, "surface": None, "session": config.session if reads_sessions else None}
    return replace(config, **changes)


def _as_before(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns a column in the type of the rows before, if its values have the same texts in it, else as it is."""
    try:
        cast = column.cast(kind)
    except pa.ArrowException:
        return column
    return cast if column.type == kind or as_text(cast).equals(as_text(column)) else column


def _with_candidates(items: pa.Array, schema: DataSchema, is_table: bool) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """The items with further ones that negatives are drawn from, the index `[C]` of each of these, and which are known.

    Candidates are the items that training knows. Those that no table has the columns of are left out, where these come
    from the interactions. A run that hashes item ids knows all items of the tables.

    Args:
        items: the distinct items of the rows.
        schema: of the run.
        is_table: whether a table of items has their columns.
    """
    items, known = items.cast(pa.large_string()), schema.encodings.vocabularies.get(schema.item_key)
    if known is None:
        return items, np.arange(len(items)), np.ones(len(items), bool)
    values = as_array(known.values)
    if any(spec.of == "item" and spec.column != schema.item_key for spec in schema.features) and not is_table:
        values = values.filter(pc.is_in(values, value_set=items))
    items = pa.concat_arrays([items, values.filter(pc.invert(pc.is_in(values, value_set=items)))])
    candidates = pc.index_in(values, value_set=items).to_numpy().astype(np.int64)
    is_known = np.zeros(len(items), bool)
    is_known[candidates] = True
    return items, candidates, is_known


def _repeated_rows(columns: dict[str, np.ndarray]) -> np.ndarray:
    """`[R]` int64, the sorted rows to score that the history has too."""
    repeated = [np.zeros(0, np.int64)]
    for begin, end in user_blocks(first_rows(columns["user"])):
        keys = [columns[name][begin:end] for name in ("user", "time", "item")]
        repeated.append(begin + np.flatnonzero(_find_repeated(keys, columns["split"][begin:end] == HISTORY)))
    return np.concatenate(repeated)


def _find_repeated(keys: list[np.ndarray], history: np.ndarray) -> np.ndarray:
    """`[E]` bool: the rows to score that the history has too, with the same user, item and time; one for each of its.

    The row of the history stays an event, since it may tell what happened where the row to score does not.

    Args:
        keys: `[E]` the users, times and items of sorted rows, in which equal rows of the history come first.
        history: `[E]` bool, whether the row is of the history.
    """
    first = np.append(True, np.any([key[1:] != key[:-1] for key in keys], axis=0))
    group = np.cumsum(first) - 1
    position = np.arange(len(history)) - np.flatnonzero(first)[group]
    count = np.bincount(group, history).astype(np.int64)[group]
    return ~history & (position - count < count)
