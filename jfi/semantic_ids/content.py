"""Columns of a table of items -> content embeddings and labels: what the codecs read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from jfi.data.errors import DataError
from jfi.data.io.arrays import is_list, is_text, text_lists, type_name
from jfi.data.io.table import SourceRows
from jfi.semantic_ids.tensor_file import read_tensors, write_tensors

_FORMAT = "jfi content 2"
#: What the user chooses, as the file names the first fields of `Content`.
_CHOSEN = ("text", "embeddings", "categorical", "text-width", "seed")
#: Most words of a text column, the most frequent ones.
_MOST_WORDS = 50_000
_BLOCK = 2**14


@dataclass
class TextEmbedding:
    """TF-IDF and truncated SVD of a text column: V words, `idf [V]` and `components [width, V]` in float64."""

    words: list[str]
    idf: Tensor
    components: Tensor


@dataclass
class Content:
    """Describes how the columns of a table of items become sources and labels; `learn` determines it from a catalogue.

    Args:
        texts: columns of text, each a source.
        embeddings: columns of lists of numbers, each a source.
        categorical: columns whose values are labels.
        width: of the embedding of a text.
        seed: of the SVD.
    """

    texts: list[str]
    embeddings: list[str]
    categorical: list[str]
    width: int = 64
    seed: int = 0
    by_text: dict[str, TextEmbedding] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    categories: dict[str, list[str]] = field(default_factory=dict)

    @property
    def source_names(self) -> list[str]:
        """The columns of the sources, in their order."""
        return [*self.texts, *self.embeddings]

    def learn(self, table: SourceRows) -> None:
        """Takes the words, widths and categories of a catalogue.

        Raises:
            DataError: a column is not there or of a wrong type, lists differ in width, or a text column has no words.
        """
        for name in self.texts:
            self.by_text[name] = _learn_text(table, name, self.width, self.seed)
        for name in self.embeddings:
            self.widths[name] = read_lists(table, name).shape[1]
        for name in self.categorical:
            counts = table.strings(name).drop_null().value_counts()
            # A value of one item says nothing of another.
            self.categories[name] = sorted(one["values"].as_py() for one in counts if one["counts"].as_py() > 1)
            if not self.categories[name]:
                raise DataError(f"{table.name}: no two rows have the same '{name}', so it cannot be a label")

    def sources(self, table: SourceRows) -> list[Tensor]:
        """The sources, `[N, D_i]` float32 each; a row is NaN where the item has no such content.

        A text has no content if it has none of the words that `learn` found.

        Raises:
            DataError: as in `learn`, or a list has another width than there.
        """
        texts = [_embed(_texts(table, name), self.by_text[name]) for name in self.texts]
        return texts + [torch.from_numpy(read_lists(table, name, self.widths[name])) for name in self.embeddings]

    def labels(self, table: SourceRows) -> dict[str, Tensor]:
        """The labels, `[N]` int64 each; -1 where a value is missing, or `learn` has not found it twice."""
        found = {}
        for name, values in self.categories.items():
            codes = pc.index_in(table.strings(name).cast(pa.string()), value_set=pa.array(values, pa.string()))
            found[name] = torch.from_numpy(codes.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64))
        return found

    def save(self, path: Path) -> None:
        """Writes one file of safetensors, with JSON in its header."""
        tensors = {f"{name}.idf": text.idf for name, text in self.by_text.items()}
        tensors |= {f"{name}.components": text.components for name, text in self.by_text.items()}
        chosen = (self.texts, self.embeddings, self.categorical, self.width, self.seed)
        learnt = {
            **dict(zip(_CHOSEN, chosen, strict=True)),
            "words": {name: text.words for name, text in self.by_text.items()},
            "widths": self.widths,
            "categories": self.categories,
        }
        write_tensors(path, tensors, {"format": _FORMAT, "content": learnt})

    @classmethod
    def load(cls, path: Path) -> "Content":
        """Loads what `save` wrote.

        Raises:
            DataError: the file is missing, damaged, or another one.
        """
        try:
            tensors, description = read_tensors(path, DataError)
            if description["format"] != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT!r}")
            learnt = description["content"]
            made = cls(*(learnt[name] for name in _CHOSEN))
            made.widths, made.categories = learnt["widths"], learnt["categories"]
            for name, words in learnt["words"].items():
                made.by_text[name] = TextEmbedding(words, tensors[f"{name}.idf"], tensors[f"{name}.components"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: not the content of a codec, or damaged: {error}") from None
        return made


def _texts(table: SourceRows, name: str) -> list[str]:
    """A column of texts, or of lists of texts, which are joined; "" where empty."""
    column = table.column(name)
    if is_list(column.type) and is_text(column.type.value_type):
        return [" ".join(filter(None, texts or ())) for texts in text_lists(column).to_pylist()]
    return table.strings(name).fill_null("").to_pylist()


def _vectorizer(**settings: object):
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError:
        raise DataError("--text needs scikit-learn: pip install 'jfi[train]'") from None
    return TfidfVectorizer(sublinear_tf=True, **settings)


def _learn_text(table: SourceRows, name: str, width: int, seed: int) -> TextEmbedding:
    texts = _texts(table, name)
    vectorizer = _vectorizer(max_features=_MOST_WORDS)
    try:
        matrix = vectorizer.fit_transform(texts)
    except ValueError:  # "empty vocabulary"
        raise DataError(f"{table.name}: column '{name}' has no words") from None
    words, components = vectorizer.get_feature_names_out().tolist(), np.ones((1, 1))
    if len(words) > 1:  # of a single word there is nothing to decompose
        from sklearn.decomposition import TruncatedSVD

        with np.errstate(divide="ignore", invalid="ignore"):  # texts that are all the same have no variance
            components = TruncatedSVD(min(width, min(matrix.shape)), random_state=seed).fit(matrix).components_
    return TextEmbedding(words, torch.from_numpy(vectorizer.idf_), torch.from_numpy(components))


def _embed(texts: Sequence[str], embedding: TextEmbedding) -> Tensor:
    """`[N, width]` float32 of length 1; NaN where a text has no word that is known."""
    vectorizer = _vectorizer(vocabulary=embedding.words)
    vectorizer.idf_ = embedding.idf.numpy()
    components = embedding.components.numpy().T
    rows = np.empty((len(texts), components.shape[1]), np.float32)
    for begin in range(0, len(texts), _BLOCK):
        matrix = vectorizer.transform(texts[begin : begin + _BLOCK])
        rows[begin : begin + _BLOCK] = matrix @ components
        rows[begin : begin + _BLOCK][np.diff(matrix.indptr) == 0] = np.nan
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    # Words that the components leave out give a vector of zeros, which says nothing either.
    return torch.from_numpy(np.divide(rows, lengths, out=np.full_like(rows, np.nan), where=lengths > 0))


def read_lists(table: SourceRows, name: str, width: int | None = None) -> np.ndarray:
    """`[N, width]` float32 of a column of lists, NaN where a list is missing or empty; without a width the first's."""
    column = table.column(name)
    if not is_list(column.type):
        what = f"has type {type_name(column.type)}, but must hold lists of numbers"
        hint = "; text files have none, so give Parquet or JSON Lines" if is_text(column.type) else ""
        raise DataError(f"{table.name}: column '{name}' {what}{hint}")
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    filled = np.flatnonzero(counts)
    if not len(filled):
        raise DataError(f"{table.name}: column '{name}' has no list with numbers")
    expected = int(counts[filled[0]]) if width is None else width
    for row in filled[counts[filled] != expected][:1].tolist():
        other = f"that of {table.location(int(filled[0]))}" if width is None else "the codec's"
        raise table.fault(row, f"'{name}' has {counts[row]} numbers, and {other} has {expected}")
    try:
        values = column.flatten().cast(pa.float64())
    except pa.ArrowException:
        kind = type_name(column.type)
        raise DataError(f"{table.name}: column '{name}' has type {kind}, but must hold numbers") from None
    with np.errstate(over="ignore"):  # a number beyond float32's range is refused below
        numbers = values.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, expected)
    wrong = ~np.isfinite(numbers).all(1)
    if wrong.any():
        raise table.fault(int(filled[wrong.argmax()]), f"'{name}' holds a number that is missing or not finite")
    rows = np.full((len(counts), expected), np.nan, np.float32)
    rows[filled] = numbers
    return rows
