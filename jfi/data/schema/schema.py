"""The schema, determined by the training rows: the keys of a batch and how values become their ids; saved with a run.

A folder of a schema holds

schema.json          keys, quantile edges, means and deviations
vocabularies.parquet the known values of all columns and the items' titles: `column` and `value`, in the order of ids
codec.safetensors    with semantic IDs, the codec that gave them
SHA256SUMS           the checksum of each of these files
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet

from jfi.data.config import Task
from jfi.data.errors import DataError
from jfi.semantic_ids.codec import Codec
from jfi.utils.encoding import HashBuckets, HashedIds, Vocabulary
from jfi.utils.files import DamagedFileError, reading_file, sha256_of, verify, write_sums, writing_folder
from jfi.utils.json_files import decode_json

T = TypeVar("T")


class _Versioned(msgspec.Struct):
    format: str


def read_versioned(path: Path, kind: type[T], known: str, advice: str, verified: bool = True) -> T:
    """Returns the content of a JSON file, as `jfi.utils.json_files.read_json`.

    Args:
        path: of the file.
        kind: the type of the content.
        known: the value of its field `format` that this version of jfi reads.
        advice: what to do about a file of another version.
        verified: whether to verify its checksum.

    Raises:
        DataError: it is missing, damaged or of another format, as one line that names it.
    """
    with reading_file(path, DataError):
        content = path.read_bytes()
    found = decode_json(content, _Versioned, path, DataError).format
    if found != known:
        raise DataError(f"{path}: not a file of this version of jfi (its 'format' must be '{known}'); {advice}")
    if verified:
        verify(path.parent, [path.name], DataError)
    return decode_json(content, kind, path, DataError)


Role = Literal["user", "item", "context", "history", "bucket"]
Entity = Literal["user", "item", "event"]

_FORMAT = "jfi data schema 5"
_SMALL, _LARGE = "schema.json", "vocabularies.parquet"
#: The codec of semantic IDs in the folder of a schema, and in the folder next to a file of IDs.
CODEC = "codec.safetensors"
FILES = (_SMALL, _LARGE, CODEC)
#: The name of the titles among the columns of the Parquet file; no table's column has an empty name.
_TITLES = ""


@dataclass(frozen=True)
class FeatureSpec:
    """A key of `Batch.sparse_features`.

    Args:
        key: its name in the KeyedJaggedTensor.
        role: "user" and "item" keys describe the sample's user and target, and "context" keys the moment at which
            the target was shown; "history" keys are the aligned fields of the events; "bucket" is the aligned age of
            the events, whose ids do not index an embedding table.
        column: the table column it comes from.
        table: name of the embedding table, `jfi.utils.arguments.module_name` of the column, "" for a bucket. The
            sample's and the history's keys of a column share one.
        num_embeddings: all ids are below it, but for raw ids; id 0 is for a missing or unseen value.
        multi_valued: a sample may have any number of ids. Other user, item and context keys have one per
            sample, and history keys one per event.
        of: what has the column: a user, an item or an event.
        slot: of a history key of a multi-valued column, the number of the value that it has; else None.
        semantic: the values are semantic IDs of the schema's codec, which index no table: `table` is "", and
            `num_embeddings` that of all int64s.
        width: of the table's rows; None means `model.embedding_dim`.
        raw: the values are raw ids, any int64 from 0 to 2^63 - 2, and `num_embeddings` is the number of rows of a table
            that grows and forgets.
        history: of a "history" or "bucket" key the name of its history, else "".
    """

    key: str
    role: Role
    column: str
    table: str
    num_embeddings: int
    multi_valued: bool = False
    of: Entity = "event"
    slot: int | None = None
    semantic: bool = False
    width: int | None = None
    raw: bool = False
    history: str = ""

    @property
    def num_ids(self) -> int:
        """All ids of a batch are below it."""
        return 2**63 if self.raw else self.num_embeddings


@dataclass(frozen=True)
class LabelSpec:
    """A label that a model of the schema predicts.

    Args:
        name: "label" if it is the only one.
        task: "binary" for a logit, "regression" for a number on the label's scale.
        mean, deviation: of a regression's label in the training rows.
    """

    name: str = "label"
    task: Task = "binary"
    mean: float = 0.0
    deviation: float = 1.0


class Strings(Sequence[str]):
    """Strings in an Arrow array, which become Python's only when they are read: there may be millions.

    Args:
        array: of strings, without null.

    Example:
        >>> titles = Strings(pa.array(["Heat", "Alien"]))
        >>> len(titles), titles[1], list(titles)
        (2, 'Alien', ['Heat', 'Alien'])
    """

    def __init__(self, array: pa.Array) -> None:
        self.array = array.cast(pa.large_string())

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> str:  # type: ignore[override] # no slices
        return self.array[int(index)].as_py()

    def __iter__(self) -> Iterator[str]:
        return iter(self.array.to_numpy(zero_copy_only=False).tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.array.equals(as_array(other))


def as_array(values: Sequence[str]) -> pa.Array:
    """The strings as an Arrow array of `large_string`."""
    return values.array if isinstance(values, Strings) else pa.array(values, pa.large_string())


@dataclass(frozen=True)
class Encodings:
    """Encodings by column, determined by the training rows: enough to encode other values in the same way.

    Args:
        vocabularies: of categorical columns.
        edges: quantiles of the numeric columns that become ids, as `jfi.utils.encoding.quantile_ids` takes them.
        moments: mean and standard deviation of the numeric columns that become dense features.
        bounds: of statistics of the past, the range that values are clipped to; the mean twice for one left out.
        buckets: of categorical columns without a vocabulary, whose values share ids by their hash.
        defaults: the value or the number that stands for a missing one of a column.
        half_lives: of the statistics of popularity, in seconds.
        window: the newest events that the statistics `similar` compare a target with.
        capacities: of categorical columns without a vocabulary, whose tables grow and forget.
    """

    vocabularies: dict[str, Vocabulary] = field(default_factory=dict)
    edges: dict[str, np.ndarray] = field(default_factory=dict)
    moments: dict[str, tuple[float, float]] = field(default_factory=dict)
    buckets: dict[str, HashBuckets] = field(default_factory=dict)
    defaults: dict[str, str | float] = field(default_factory=dict)
    half_lives: list[float] = field(default_factory=list)
    window: int = 0
    capacities: dict[str, HashedIds] = field(default_factory=dict)
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)

    def scale(self, column: str) -> tuple[float, float, float | None, tuple[float, float] | None]:
        """Returns mean, deviation, default and bounds of a dense feature, as `standardize` takes them."""
        default = self.defaults.get(column)
        return (*self.moments[column], None if default is None else float(default), self.bounds.get(column))

    def ids_of(self, column: str) -> "Vocabulary | HashBuckets | HashedIds":
        """Returns what gives the values of a categorical column their ids."""
        if column in self.capacities:
            return self.capacities[column]
        return self.buckets[column] if column in self.buckets else self.vocabularies[column]


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    """The content of schema.json; `values` is how many values of the Parquet file a column has."""

    format: str
    features: list[FeatureSpec]
    dense_names: list[str]
    item_key: str
    histories: dict[str, int]
    edges: dict[str, list[float]]
    moments: dict[str, tuple[float, float]]
    buckets: dict[str, int]
    defaults: dict[str, str | float]
    values: dict[str, int]
    labels: list[LabelSpec]
    half_lives: list[float] = []
    window: int = 0
    num_auxiliary: int = 0
    codec: str | None = None
    capacities: dict[str, HashedIds] = {}
    bounds: dict[str, tuple[float, float]] = {}


@dataclass(frozen=True)
class DataSchema:
    """The keys of the batches and the encodings of their values; all that a model needs to know of its data.

    Args:
        features: the categorical keys, in the order of the batches, and last the ages of the events of each history.
        dense_names: the columns of the dense features, users' before items' before contexts'.
        item_key: key of the target's id.
        histories: the names of the histories, each with the most events that it has.
        encodings: the vocabularies, quantiles and moments of the training rows.
        titles: titles of the items, by their id under `item_key`, or None.
        codec: of the semantic IDs, or None without.
        labels: what is predicted, in the order of a model's outputs.
        num_auxiliary: number of labels behind them that a model has outputs for in training alone.

    Example::

        >>> import tempfile
        >>> import pyarrow as pa
        >>> from jfi.data import DataConfig, load_dataset
        >>> rows = {"user_id": [1, 2] * 20, "item_id": [*range(10)] * 4, "timestamp": [*range(40)]}
        >>> schema = load_dataset(DataConfig(interactions=pa.table(rows))).schema
        >>> folder = Path(tempfile.mkdtemp()) / "data"
        >>> schema.save(folder)
        >>> DataSchema.load(folder).features == schema.features
        True
    """

    features: list[FeatureSpec]
    dense_names: list[str]
    item_key: str
    histories: dict[str, int]
    encodings: Encodings
    titles: Sequence[str] | None = None
    codec: Codec | None = None
    labels: list[LabelSpec] = field(default_factory=lambda: [LabelSpec()])
    num_auxiliary: int = 0

    @property
    def max_history(self) -> int:
        """No history is longer."""
        return max(self.histories.values())

    @property
    def encoded(self) -> list[FeatureSpec]:
        """The keys but the ages: those that columns of a dataset have the ids of."""
        return self.features[: -len(self.histories)]

    def of_events(self) -> list[tuple[int, FeatureSpec]]:
        """The keys of events, each with its index among `features`: of several histories one for each column."""
        found: dict[tuple[str, int | None], tuple[int, FeatureSpec]] = {}
        for index, one in enumerate(self.features):
            if one.role == "history":
                found.setdefault((one.column, one.slot), (index, one))
        return [*found.values()]

    def save(self, folder: str | Path) -> None:
        """Writes the folder, which must be absent, completely or not at all.

        Raises:
            FileExistsError: it exists.
            OSError: it cannot be written.
        """
        with writing_folder(Path(folder)) as unfinished:
            self.write(unfinished)
            write_sums(unfinished, {path.name: sha256_of(path) for path in unfinished.iterdir()})

    def write(self, folder: Path) -> None:
        """Writes the files into an existing folder, to be renamed by the caller when all its files are there."""
        columns = self._columns()
        kind = pa.schema([("column", pa.string()), ("value", pa.large_string())])
        with pyarrow.parquet.ParquetWriter(folder / _LARGE, kind) as writer:
            for name, values in columns.items():
                names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(values), np.int32)), pa.array([name]))
                writer.write_table(pa.table([names.cast(pa.string()), as_array(values)], schema=kind))
        if self.codec is not None:
            self.codec.save(folder / CODEC)
        (folder / _SMALL).write_bytes(msgspec.json.format(msgspec.json.encode(self._content()), indent=1))

    def difference(self, other: "DataSchema") -> str | None:
        """Returns a part that another schema has otherwise, by its name in schema.json; titles are not compared."""
        ours, theirs = (msgspec.structs.asdict(one._content()) for one in (self, other))
        for parts, schema in ((ours, self), (theirs, other)):
            del parts["values"]
            parts |= {f"values of '{name}'": known.values for name, known in schema.encodings.vocabularies.items()}
        return next((name for name, part in ours.items() if part != theirs.get(name)), None)

    def _columns(self) -> dict[str, Sequence[str]]:
        """Returns the columns of the Parquet file: the values of the vocabularies, and the titles."""
        columns = {name: vocabulary.values for name, vocabulary in self.encodings.vocabularies.items()}
        return columns if self.titles is None else columns | {_TITLES: self.titles}

    def _content(self) -> _Content:
        """Returns the content of schema.json."""
        return _Content(
            format=_FORMAT,
            features=self.features,
            dense_names=self.dense_names,
            item_key=self.item_key,
            histories=self.histories,
            edges={name: edges.tolist() for name, edges in self.encodings.edges.items()},
            moments=self.encodings.moments,
            buckets={name: buckets.num_buckets for name, buckets in self.encodings.buckets.items()},
            defaults=self.encodings.defaults,
            half_lives=self.encodings.half_lives,
            window=self.encodings.window,
            values={name: len(values) for name, values in self._columns().items()},
            labels=self.labels,
            num_auxiliary=self.num_auxiliary,
            codec=None if self.codec is None else self.codec.fingerprint,
            capacities=self.encodings.capacities,
            bounds=self.encodings.bounds,
        )

    @classmethod
    def load(cls, folder: str | Path, verified: bool = True) -> "DataSchema":
        """The schema that `save` wrote.

        Args:
            folder: of the files.
            verified: whether SHA256SUMS has their checksums.

        Raises:
            DataError: a file is missing, damaged or of another kind, as one line that names it.
        """
        small, large = Path(folder) / _SMALL, Path(folder) / _LARGE
        advice = "prepare the dataset, or train the run, again"
        content = read_versioned(small, _Content, _FORMAT, advice, verified)
        if verified:
            verify(large.parent, [_LARGE], DataError)
        columns = _read_large(large, content)
        titles = columns.pop(_TITLES, None)
        return cls(
            features=content.features,
            dense_names=content.dense_names,
            item_key=content.item_key,
            histories=content.histories,
            encodings=Encodings(
                {name: Vocabulary(values) for name, values in columns.items()},
                {name: np.array(edges, np.float64) for name, edges in content.edges.items()},
                content.moments,
                {name: HashBuckets(count) for name, count in content.buckets.items()},
                content.defaults,
                content.half_lives,
                content.window,
                content.capacities,
                content.bounds,
            ),
            titles=titles,
            codec=None if content.codec is None else _read_codec(Path(folder) / CODEC, content.codec),
            labels=content.labels,
            num_auxiliary=content.num_auxiliary,
        )


def _read_codec(path: Path, fingerprint: str) -> Codec:
    try:
        codec = Codec.load(path)
    except DamagedFileError as fault:
        raise DataError(str(fault)) from None
    if codec.fingerprint != fingerprint:
        raise DataError(f"{path}: the codec {codec.fingerprint[:12]}, but {_SMALL} names {fingerprint[:12]}")
    return codec


def _read_large(path: Path, content: _Content) -> dict[str, Strings]:
    with reading_file(path, DataError):
        values = pyarrow.parquet.read_table(path, columns=["value"]).column("value")
    columns, start = {}, 0
    for name, count in content.values.items():
        columns[name] = Strings(values.slice(start, count).combine_chunks())
        start += count
    return columns
