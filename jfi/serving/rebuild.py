"""Rebuilds by the training code what a model reads of logged requests: a row of a table for each candidate."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.data import Batch, DataConfig, DataSchema, InteractionDataset
from jfi.data.io.blocks import count_rows, find_table, read_files
from jfi.data.io.paths import File
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.data.prepared.stages.column_files import new_map
from jfi.data.prepared.stages.encode_columns import has_lists
from jfi.data.schema.columns import CodedColumn, encode
from jfi.history_policies import Policy
from jfi.serving.request_log import LENGTH, WEIGHTS, Line, digest, user_of
from jfi.serving.validation import sids
from jfi.state.deletions import PartInfo, info_of, read_deletions
from jfi.utils.encoding import PER_SECOND, standardize, text_of
from jfi.utils.files import temporary_folder
from jfi.utils.jagged import ranges

#: Rows of requests that are written together.
_ROWS = 1 << 16


class Asked(NamedTuple):
    """A logged request as rows of a table.

    Args:
        items: texts of the candidates' ids.
        columns: values that it gives, of each candidate.
    """

    line: Line
    user: str
    items: list[str]
    columns: dict[str, list]
    now: float


def deleted_users(log: list[File]) -> set[str]:
    """Returns the digests of the users on the lists of deletions beside the parts of a log, in hexadecimal."""
    folders = {Path(file.path).parent for file in log if file.table is None and "://" not in file.path}
    return {one.user for folder in folders for one in read_deletions(folder)}


def asked_of(line: Line, config: DataConfig) -> Asked | None:
    """Returns a logged request; None if its user or a candidate has no id."""
    body = msgspec.json.decode(line.request)
    given, user = body["candidates"], user_of(body, config.user)
    if isinstance(given, list):
        by_row = isinstance(given[0], dict)
        given = {name: [row[name] for row in given] for name in given[0]} if by_row else {config.item: given}
    count = len(next(iter(given.values())))
    shared = body.get("context", {}) | (body["user"] if isinstance(body["user"], dict) else {})
    columns = {name: [value] * count for name, value in shared.items()} | given
    items = list(map(text_of, columns.get(config.item, [None])))
    return None if user is None or None in items else Asked(line, user, items, columns, line.now)


class Rebuilt:
    """Gives what the training code makes of a request.

    Args:
        rows: of the batch, those of its candidates.
        logits: `[R, L]` of the model.
    """

    def __init__(self, batch: "_Arrays", rows: slice, logits: np.ndarray) -> None:
        self._batch, self._rows, self.logits = batch, rows, logits

    def values(self, name: str) -> list[np.ndarray]:
        """Returns the values of a feature, and of one with several how many each candidate has; none if unknown."""
        return self._batch.values(name, self._rows)

    def digest(self, name: str) -> str | None:
        """Returns the digest of a feature as a line has it, None for an unknown one."""
        found = self.values(name)
        return str(len(found[0])) if name == LENGTH else digest(*found) if found else None


class _Arrays:
    """The features of a batch by name."""

    def __init__(self, batch: Batch, schema: DataSchema) -> None:
        sparse = batch.sparse_features
        self._specs = {spec.key: spec for spec in schema.features}
        self._values, weights = sparse.values().numpy(), sparse.weights_or_none()
        self._weights = None if weights is None else weights.numpy()
        lengths = sparse.lengths().numpy().reshape(len(self._specs), -1)
        starts = np.append(0, lengths.sum(axis=1).cumsum())
        self._lengths = dict(zip(self._specs, lengths, strict=True))
        ends = zip(lengths.cumsum(axis=1), starts, strict=False)
        self._ends = {
            key: [start, *(own + start).tolist()] for key, (own, start) in zip(self._specs, ends, strict=True)
        }
        self._dense = {
            name: np.ascontiguousarray(one)
            for name, one in zip(schema.dense_names, batch.dense_features.numpy().T, strict=False)
        }
        self._age = schema.features[-1].key

    def values(self, name: str, rows: slice) -> list[np.ndarray]:
        """Returns the values of a feature in rows of a request, see Rebuilt."""
        if name in self._dense:
            return [self._dense[name][rows]]
        spec = self._specs.get(self._age if name in (LENGTH, WEIGHTS) else name)
        if spec is None:
            return []
        ends, last = self._ends[spec.key], rows.stop if spec.role in ("item", "context") else rows.start + 1
        own = slice(ends[rows.start], ends[last])
        if name == WEIGHTS and self._weights is None:
            return [np.ones(own.stop - own.start, np.float32)]
        found = [self._weights[own] if name == WEIGHTS else self._values[own]]
        return found + ([self._lengths[spec.key][rows.start : last]] if spec.multi_valued else [])


@dataclass(frozen=True)
class Rebuilder:
    """Rebuilds requests for a run.

    Args:
        config: the section `data` of the run, with the tables of users and items to use.
        score: gives the logits `[B, L]` of a batch.
        own: the files of the run's own interactions.
        log: the files of the log, whose first rows a state has had, in their order.
        batch_size: rows of a call of the model.
    """

    schema: DataSchema
    config: DataConfig
    policy: Policy | None
    score: Callable[[Batch], np.ndarray]
    own: list[File]
    log: list[File]
    batch_size: int = 4096

    def __call__(
        self, read: Callable[[], Iterable[Asked]], history: list[File] | None = None
    ) -> Iterator[tuple[Asked, Rebuilt]]:
        """Yields requests and what they are rebuilt to, in memory that does not grow with their number.

        Args:
            read: gives the requests, twice.
            history: the rows before them; None means all of the run's own interactions and of the log.
        """
        config = self.config
        with temporary_folder("jfi-audit-") as folder:
            table, rows = folder / "rows.parquet", folder / "files"
            rows.mkdir()
            if not self._write(read(), table):
                return
            files = self.own + self.log if history is None else history
            sources = Sources(str(table), files or None, config.users, config.items, config.semantic_ids)
            made = ScoringRows(sources, rows, self.schema, config, policy=self.policy, are_events=False)
            arrays = made.dataset.arrays()
            order = new_map(rows / "order.npy", np.int64, made.num_rows)
            order[made.rows] = arrays.samples["rows"]
            dataset, given, end = made.dataset, np.fromfile(table.with_name("oldest")), 0
            if (given > -np.inf).any():  # statistics, which are made already, count events that have expired
                oldest = new_map(rows / "oldest.npy", np.float64, len(arrays.events))
                oldest[:] = -np.inf
                oldest[arrays.samples["rows"]] = given[made.rows]
                arrays = replace(arrays, events=replace(arrays.events, oldest=oldest))
                dataset = InteractionDataset(arrays, self.schema, policy=self.policy)
            for part in _batches(read(), self.batch_size):
                begin, end = end, end + sum(len(one.items) for one in part)
                chosen, first = order[begin:end], 0
                batch = dataset.batch_of(chosen, arrays.events.item[chosen].astype(np.int64))
                batch = self._with_given(batch, part)
                logits, found = self.score(batch), _Arrays(batch, self.schema)
                for one in part:
                    own = slice(first, first + len(one.items))
                    yield one, Rebuilt(found, own, logits[own])
                    first = own.stop

    def _with_given(self, batch: Batch, part: list[Asked]) -> Batch:
        """Returns a batch in which the columns of users and items that requests give have their values."""
        given, first, schema, config = dict[str, tuple[list[int], list]](), 0, self.schema, self.config.resolved()
        numbers, categories = (
            [*config.names("user", kind), *config.names("item", kind)] for kind in ("number", "category")
        )
        for one in part:
            for name, values in one.columns.items():
                rows, given_values = given.setdefault(name, ([], []))
                rows += range(first, first + len(one.items))
                given_values += values
            first += len(one.items)
        categories += [spec.column for spec in schema.features if spec.semantic]
        place = lambda row, name: f"candidate {row}: '{name}'"  # noqa: E731
        if given.keys().isdisjoint(numbers + categories):
            return batch
        dense, sparse, known = batch.dense_features.clone(), batch.sparse_features, schema.encodings
        for name in given.keys() & numbers:
            own = torch.from_numpy(standardize(np.array(given[name][1], np.float64), *known.scale(name)))
            dense[given[name][0], schema.dense_names.index(name)] = own
        keys = sparse.to_dict()
        for spec in schema.features:
            if spec.role in ("user", "item") and spec.column in categories and spec.column in given:
                rows, values = given[spec.column]
                if spec.semantic:
                    ids = keys[spec.key].values().clone()
                    ids[rows] = torch.from_numpy(sids(spec.column, asdict(schema.codec.layout), values, place))
                    keys[spec.key] = JaggedTensor(ids, keys[spec.key].weights_or_none(), keys[spec.key].lengths())
                    continue
                kind = pa.list_(pa.string()) if has_lists(schema, spec.column) else pa.string()
                texts = CodedColumn.of(pa.array([_plain(value, kind) for value in values], kind))
                found = encode(texts, known.ids_of(spec.column), default=known.defaults.get(spec.column))
                parts = [*torch.split(keys[spec.key].values(), keys[spec.key].lengths().tolist())]
                counts = found.counts(np.arange(len(rows))).tolist()
                for row, ids in zip(rows, torch.split(torch.from_numpy(found.ids).long(), counts), strict=True):
                    parts[row] = ids
                weights = None if sparse.weights_or_none() is None else torch.ones(sum(map(len, parts)))
                keys[spec.key] = JaggedTensor(torch.cat(parts), weights, torch.tensor([*map(len, parts)]))
        return replace(batch, dense_features=dense, sparse_features=KeyedJaggedTensor.from_jt_dict(keys))

    def _write(self, asked: Iterable[Asked], path: Path) -> int:
        """Writes the rows of requests as a table, and beside it what has expired for them; returns their number."""
        config = self.config.resolved()
        tables = {"user": config.users, "item": config.items, "context": None}
        names = [(of, name) for of, table in tables.items() if table is None for name in config.names(of)]
        kinds = {config.user: pa.string(), config.item: pa.string(), config.timestamp: pa.float64()}
        for of, name in names:
            if name not in config.statistics_columns() and name not in kinds:
                text = pa.list_(pa.string()) if has_lists(self.schema, name) else pa.string()
                kinds[name] = pa.float64() if name in config.names(of, "number") else text
        schema, rows = pa.schema(kinds), 0
        with pq.ParquetWriter(path, schema) as writer, open(path.with_name("oldest"), "wb") as oldest:
            columns: dict[str, list] = {name: [] for name in kinds}

            def write() -> int:
                own = columns | {config.timestamp: _in_unit(columns[config.timestamp], config.timestamp_unit)}
                writer.write_table(pa.table({name: pa.array(own[name], kind) for name, kind in kinds.items()}, schema))
                return len(own[config.user])

            for one in asked:
                count = len(one.items)
                np.full(count, -np.inf if one.line.oldest is None else one.line.oldest).tofile(oldest)
                for name, kind in kinds.items():
                    if name == config.user:
                        columns[name] += [one.user] * count
                    elif name == config.item:
                        columns[name] += one.items
                    elif name == config.timestamp:
                        columns[name] += [one.now] * count
                    else:
                        columns[name] += [_plain(value, kind) for value in one.columns.get(name, [None] * count)]
                if len(columns[config.user]) >= _ROWS:
                    rows += write()
                    columns = {name: [] for name in kinds}
            rows += write()
        return rows

    def at_positions(self, asked: list[Asked]) -> tuple[list[Asked], list[File]]:
        """Returns requests of users of their own, and a history that has of each what its state had of its user."""
        config, tables = self.config.resolved(), list[pa.Table]()
        users = pa.array(sorted({one.user for one in asked}), pa.large_string())
        own = pc.index_in(pa.array([one.user for one in asked], users.type), value_set=users).to_numpy()
        position, names = np.array([one.line.position for one in asked]), np.array([str(i) for i in range(len(asked))])
        for files in (self.own, self.log):
            first, last, info, count = 0, None, None, 0
            for file, part in read_files(files, config.columns(of_interactions=True), config) if files else ():
                if file is not last:
                    first += count if info is None else info.num_rows
                    last, info, count = file, _info_of(file), 0
                codes = pc.index_in(part.ids(config.user), value_set=users).fill_null(-1).to_numpy(zero_copy_only=False)
                order = np.argsort(codes, kind="stable")
                begin, end = (np.searchsorted(codes[order], own, side) for side in ("left", "right"))
                rows, owner = order[ranges(begin, end - begin)], np.repeat(np.arange(len(own)), end - begin)
                if files is self.log:
                    numbers = count + rows if info is None else info.rows()[count + rows]
                    is_there = first + numbers < position[owner]
                    rows, owner = rows[is_there], owner[is_there]
                count += len(part)
                if len(rows) or not tables:
                    at = part.data.column_names.index(config.user)
                    tables.append(part.data.take(rows).set_column(at, config.user, pa.array(names[owner], pa.string())))
        renamed = [one._replace(user=name) for one, name in zip(asked, names.tolist(), strict=True)]
        return renamed, find_table(tables, "--log", config)

    def history_at(self, position: int) -> list[File]:
        """Returns the run's own interactions and the first rows of the log."""
        config, found, left = self.config.resolved(), [*self.own], position
        wanted = config.columns(of_interactions=True)
        for file in self.log:
            info = _info_of(file)
            count = count_rows([file]) if info is None else info.num_rows
            if count is not None and count <= left:
                found, left = [*found, file], left - count
                continue
            left = left if info is None else int(np.searchsorted(info.rows(), left))
            for _, part in read_files([file], wanted, config):
                if left:
                    found += find_table(part.data.slice(0, left), "--log", config)
                    left -= min(left, len(part))
            if count is not None:
                break
        return found


def _info_of(file: File) -> PartInfo | None:
    """Returns the metadata of a server's part, None for another file."""
    is_part = file.layout.format == "parquet" and "://" not in file.path
    return info_of(Path(file.path)) if is_part else None


def _batches(asked: Iterable[Asked], size: int) -> Iterator[list[Asked]]:
    """Yields requests of at most `size` rows together, or one that has more."""
    part, count = list[Asked](), 0
    for one in asked:
        if part and count + len(one.items) > size:
            yield part
            part, count = [], 0
        part.append(one)
        count += len(one.items)
    if part:
        yield part


def _plain(value: Any, kind: pa.DataType) -> object:
    """Returns a value of a request as a table of that kind has it."""
    if pa.types.is_floating(kind) or value is None:
        return None if value is None else float(value)  # Arrow takes no integer that float64 rounds
    return [text for one in value if (text := text_of(one)) is not None] if pa.types.is_list(kind) else text_of(value)


def _in_unit(times: list[float], unit: str) -> np.ndarray:
    """Returns numbers that training reads as these times in seconds, as far as there are some."""
    seconds = np.array(times, np.float64)
    found, many = seconds * PER_SECOND[unit], PER_SECOND[unit]
    for other in (np.nextafter(found, -np.inf), np.nextafter(found, np.inf)):
        found = np.where((found / many != seconds) & (other / many == seconds), other, found)
    return found
