"""The rows of tables to score, of any size: spread over files by user, so that one file's users fit in memory.

A user's history is in the file of the user, whatever table it comes from. Values are parsed before they are written, so
a fault names its line in the table. Where the items' columns are in the interactions, an item's first row in time is
kept in memory.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.batches.dataset import InteractionDataset
from jfi.data.batches.events import order_by_item
from jfi.data.batches.negatives import NegativeSampler
from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.features.semantic_ids import SemanticIDs
from jfi.data.io.arrays import type_name
from jfi.data.io.blocks import read_blocks, read_table
from jfi.data.io.table import Table
from jfi.data.prepared.arrange import sort_and_split
from jfi.data.prepared.known_items import KnownItems
from jfi.data.prepared.load import build_scoring
from jfi.data.prepared.scoring_rows import estimate_rows, find_repeated, hash_ids, take_first_rows
from jfi.data.prepared.source import Columns, Tables
from jfi.data.schema.encode import check_kind, has_lists
from jfi.data.schema.labels import label_columns, read_labels
from jfi.data.schema.rules import parse_rule
from jfi.data.schema.schema import DataSchema
from jfi.history import Policy
from jfi.sid.packing import UNKNOWN_SID
from jfi.utils.display import Display

_log = logging.getLogger(__name__)

#: About the number of rows of a file.
_PART = 1 << 19
_MAX_PARTS = 256
#: Columns of the files that no table can have.
_ROW, _EVENT, _TIME = "\0row", "\0event", "\0time"


#: Files as `read_table` takes them, or a table in memory.
Source = str | list[str] | pa.Table


@dataclass(frozen=True)
class Sources:
    """The tables to score.

    Args:
        interactions: the rows to score: a file, or an Arrow table.
        history: rows before them, which are only part of histories, or None.
        users, items: tables of users and of items, or None.
        semantic_ids: file of the items' semantic IDs, or None.
    """

    interactions: Source
    history: Source | None = None
    users: str | list[str] | None = None
    items: str | list[str] | None = None
    semantic_ids: str | None = None


@dataclass(frozen=True)
class Part:
    """Some users' rows.

    Args:
        dataset: its split "rows" has the rows to score.
        rows: `[B]` int64, the number of each sample's row in the table of interactions.
        negatives: draws negatives, where the rows are positives to evaluate.
    """

    dataset: InteractionDataset
    rows: np.ndarray
    negatives: NegativeSampler | None = None


class ScoringParts:
    """Reads the sources once and writes their rows to files in `folder`; then iterates over the parts.

    Args:
        sources: what to score.
        folder: an empty folder for the files, which together are about as large as the sources.
        schema: of the run.
        config: the section `data` of the run.
        by: further columns of the interactions to keep, for groups.
        positives: whether the rows are positives to evaluate: the parts can draw negatives then, the same however the
            rows are spread over parts.
        policy: of the run, or None.

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
    ) -> None:
        if policy is None:  # nothing else reads these columns
            config = replace(config, dwell=None, surface=None, session=None)
        self._folder, self._schema, self._by = folder, schema, list(dict.fromkeys(by))
        self._config, self._policy = config, policy
        wanted, settings = config.columns(), config.file_settings()
        self._users = None if sources.users is None else read_table(sources.users, wanted, settings, "users")
        self._items = None if sources.items is None else read_table(sources.items, wanted, settings, "items")
        self._sids: SemanticIDs | None = None
        if schema.codec is not None:
            self._sids = SemanticIDs.read(sources.semantic_ids, config.item, "semantic_ids")
            self._sids.check_codec(schema.codec, "the run", "semantic_ids")
        elif sources.semantic_ids is not None:
            raise DataError(f"semantic_ids: got {sources.semantic_ids!r}, but the run has no semantic IDs")
        self._item_columns = config.names("item") if sources.items is None else []
        self._first_rows: pa.Table | None = None
        self.known_items = KnownItems(schema, seen_only=bool(self._item_columns)) if positives else None
        self._warned: set[str] = set()
        self._labels: list[np.ndarray] = []
        #: Why rows have no label, where a file lacks a column of it.
        self.no_label: str | None = None
        self.num_rows = self.num_repeated = self.num_without_sid = 0
        named = {"interactions": sources.interactions, "history": sources.history}
        count = sum(estimate_rows(source, name) for name, source in named.items() if source is not None)
        self._writers: list = [None] * min(_MAX_PARTS, 1 + count // _PART)
        self._keys = None
        try:
            with Display("read", None, unit="rows", ticking=True) as display:
                if sources.history is not None:
                    for table in _tables(sources.history, wanted, config, "history"):
                        self._write(table, scored=False)
                        display.update(len(table))
                for table in _tables(sources.interactions, wanted | set(self._by), config, "interactions"):
                    self._write(table, scored=True)
                    display.update(len(table))
        finally:
            for writer in (*self._writers, self._keys):
                if writer is not None:
                    writer.close()
        if not self.num_rows:
            name = "the table" if isinstance(sources.interactions, pa.Table) else sources.interactions
            raise DataError(f"{name}: no rows")

    @property
    def labels(self) -> np.ndarray:
        """`[N]` float32, or `[N, L]` of L labels; NaN where there is none, and for a positive of an unknown item."""
        return np.concatenate(self._labels)

    def key_batches(self) -> Iterator[pa.RecordBatch]:
        """The ids, the times and the columns `by` of the rows to score, as the table has them, in its order."""
        with pa.memory_map(str(self._folder / "keys")) as file, pa.ipc.open_file(file) as reader:
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)

    def __iter__(self) -> Iterator[Part]:
        for number, writer in enumerate(self._writers):
            if writer is None:
                continue
            path = self._folder / str(number)
            with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
                data = reader.read_all()
            yield from self._part(data)
            path.unlink()
        if self.num_repeated:
            what = "rows to score are in the history too; each counts as one event"
            _log.warning("%s %s", f"{self.num_repeated:,}", what)
        if self.num_without_sid:
            what = f"have an item without a semantic ID in {self._sids.path}, which counts as unknown"
            _log.warning("%s rows to score %s", f"{self.num_without_sid:,}", what)

    def _part(self, data: pa.Table) -> Iterator[Part]:
        place = data.column(_ROW).to_numpy()
        if not (place >= 0).any():
            return
        config = replace(self._config, label=None, task="binary", labels=[], auxiliary_labels=[], weight=None)
        config = replace(config, split="time", timestamp=_TIME, timestamp_unit="s", title=None)
        config = replace(config, group=None, history=None)
        items = self._items
        if items is None and self._first_rows is not None:
            columns = [config.item, *self._item_columns]
            items = Table("items", self._first_rows.select(columns), columns, line=lambda row: row + 1)
        interactions = Table("interactions", data, data.column_names, line=lambda row: row + 1)
        rows = sort_and_split(interactions, config)
        place = place[rows.order]
        event = None if self._config.history is None else data.column(_EVENT).to_numpy()[rows.order]
        if (place < 0).any():
            repeated = find_repeated(rows, place < 0)
            self.num_repeated += int(repeated.sum())
            event = ~repeated if event is None else event & ~repeated
        rows = replace(rows, event=event)
        if self.known_items is not None:
            rows, candidates = self.known_items.append_to(rows)
        columns = Columns(Tables(interactions, self._users, items, sids=self._sids), rows, config, few=True)
        chosen = np.flatnonzero(place >= 0)
        if self._sids is not None:
            self.num_without_sid += int((columns.item_sids()[rows.item[chosen]] == UNKNOWN_SID).sum())
        dataset, negatives = build_scoring(columns, rows, chosen, self._schema, config, self._policy), None
        if self.known_items is not None:
            events = dataset.arrays().events
            negatives = NegativeSampler(events, order_by_item(events), candidates, config.negatives)
        yield Part(dataset, place[chosen], negatives)

    def _write(self, table: Table, scored: bool) -> None:
        if not len(table):
            return
        whole = self._fill(table, scored)
        data = self._parse(whole)
        known = None if self.known_items is None else self.known_items.add(data.column(self._config.item))
        if scored:
            names = list(dict.fromkeys([self._config.user, self._config.item, self._config.timestamp, *self._by]))
            for name in self._by:
                if pa.types.is_nested(table.column(name).type):
                    raise DataError(f"{table.name}: column '{name}' has lists; groups need one value a row")
                table.strings(name)  # before any row is scored: groups are named by their text
            self._write_keys(table.name, pa.table({name: table.column(name) for name in names}))
            labels = self._read_labels(table) if known is None else np.where(known, 1, np.nan).astype(np.float32)
            self._labels.append(labels)
            place = np.arange(self.num_rows, self.num_rows + len(table))
            self.num_rows += len(table)
        else:
            place = np.full(len(table), -1)
        if self._item_columns:
            names = [self._config.item, self._config.user, _TIME]
            of_items = data.select([*names, *self._item_columns])
            self._first_rows = take_first_rows([self._first_rows, of_items], *names)
            data = data.drop_columns(self._item_columns)
        data = data.append_column(_ROW, pa.array(place))
        if self._config.history is not None:
            data = data.append_column(_EVENT, pa.array(self._is_event(whole)))
        part = hash_ids(data.column(self._config.user).combine_chunks()) % len(self._writers)
        order = np.argsort(part, kind="stable")
        ends = np.cumsum(np.bincount(part, minlength=len(self._writers)))
        for number, end in enumerate(ends):
            start = ends[number - 1] if number else 0
            if end > start:
                if self._writers[number] is None:
                    self._writers[number] = pa.ipc.new_file(self._folder / str(number), data.schema)
                self._writers[number].write_table(data.take(pa.array(order[start:end])))

    def _is_event(self, table: Table) -> np.ndarray:
        """`[N]` bool: the rows that enter histories. Without labels there are none where a label decides."""
        return parse_rule(self._config.history).holds(table) == 1

    def _fill(self, table: Table, scored: bool) -> Table:
        """The table with empty columns in place of those that it may lack.

        They are the label's; in a table to score all that tell what happened, which is an input of later rows alone;
        and in the history those of contexts, which are inputs of the rows to score alone.
        """
        config, optional = self._config, set(self._label_columns)
        of_users = config.names("user") if self._users is None else []
        needed = {config.user, config.item, config.timestamp, *of_users, *self._item_columns}
        of_contexts = {*config.names("context")}
        if scored:
            needed |= of_contexts
            if made := next((name for name in config.statistics_columns() if name not in table.known), None):
                raise DataError(
                    f"{table.name}: no column '{made}' of data.statistics; make it with examples/add_statistics.py of "
                    "a table with the past"
                )
            rule = [] if config.history is None else parse_rule(config.history).columns
            happened = {*config.names("event"), *config.engagement_columns(), *rule}
            happened -= needed | optional
            optional |= happened
            if lacking := sorted(happened - set(table.known) - self._warned):
                self._warned.update(lacking)
                names = ", ".join(f"'{name}'" for name in lacking)
                _log.warning("%s: no column %s; it counts as missing in the rows' events", table.name, names)
        else:
            optional |= of_contexts - {*config.names("event", "category")}
        lacking = sorted(optional - needed - set(table.known))
        data = table.data
        for name in lacking:
            data = data.append_column(name, pa.nulls(len(table), self._kind(name)))
        return replace(table, data=data, known=[*table.known, *lacking])

    @property
    def _label_columns(self) -> list[str]:
        return self._config.label_columns()

    def _parse(self, table: Table) -> pa.Table:
        """The columns in use as the types that the schema encodes: strings, lists of strings, or float64."""
        config = self._config
        data = {
            config.user: table.ids(config.user).cast(pa.large_string()),
            config.item: table.ids(config.item).cast(pa.large_string()),
            _TIME: pa.array(table.times(config.timestamp, config.timestamp_unit)),
        }
        of_users = config.names("user") if self._users is None else []
        of_events = [*config.names("event"), *config.engagement_columns()]
        of_events += config.names("context")
        for name in (*of_users, *self._item_columns, *of_events):
            if name in data:
                continue
            if pa.types.is_floating(self._kind(name)):
                data[name] = pa.array(table.numbers(name))
            else:
                column = table.categories(name, config.separators())
                if column.null_count == len(column):  # of JSON Lines, empty lists without a list among them are text
                    column = pa.nulls(len(column), self._kind(name))
                check_kind(self._schema, name, column)
                data[name] = column.cast(self._kind(name))
        return pa.table(data)

    def _kind(self, name: str) -> pa.DataType:
        numeric = {self._config.dwell, *self._schema.encodings.edges, *self._schema.encodings.moments}
        if name in numeric:
            return pa.float64()
        return pa.large_list(pa.large_string()) if has_lists(self._schema, name) else pa.large_string()

    def _read_labels(self, table: Table) -> np.ndarray:
        found, targets = [], self._config.targets()
        for one in targets:
            columns = [] if one.label is None else label_columns(one.label)
            lacking = next((name for name in columns if name not in table.known), None)
            if lacking is not None:
                self.no_label = self.no_label or f"{table.name}: no column '{lacking}', which the label needs"
            if one.label is None or lacking is not None:
                found.append(np.full(len(table), np.nan, np.float32))
            else:
                found.append(read_labels(table, one.label, one.task))
        return found[0] if len(targets) == 1 else np.stack(found, axis=1)

    def _write_keys(self, name: str, keys: pa.Table) -> None:
        if self._keys is None:
            self._keys = pa.ipc.new_file(self._folder / "keys", keys.schema)
            self._keys_schema = keys.schema
        try:
            self._keys.write_table(keys.cast(self._keys_schema))
        except pa.ArrowException as error:
            now = ", ".join(f"{field.name} {type_name(field.type)}" for field in keys.schema)
            before = ", ".join(f"{field.name} {type_name(field.type)}" for field in self._keys_schema)
            raise DataError(f"{name}: the types of columns ({now}) are not those before ({before})") from error


def _tables(source: Source, wanted: set[str], config: DataConfig, setting: str) -> Iterator[Table]:
    """The source as tables of some rows each."""
    return read_blocks(source, wanted, config.file_settings(), setting)
