"""The semantic IDs of a catalogue of items: a codec with its files, and the IDs of items that are new."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from jfi.data.errors import DataError
from jfi.data.io.arrays import as_text, type_name
from jfi.data.io.table import SourceRows
from jfi.data.schema.schema import CODEC
from jfi.data.schema.semantic_ids import SemanticIDs
from jfi.semantic_ids.codec import Codec, Progress
from jfi.semantic_ids.content import Content
from jfi.semantic_ids.packing import UNKNOWN_SID
from jfi.semantic_ids.quality import SIDQuality, sid_quality
from jfi.utils.files import DamagedFileError, check_sum, read_sums, sha256_of, write_file, write_sums, writing_folder

CONTENT, OPTIONS = "content.safetensors", "options.json"
FIGURES, PICTURE = "quality.json", "quality.png"


class AddedItems(NamedTuple):
    """The IDs of a catalogue, those that a file had first.

    Attributes:
        items: all N items.
        sids: `[N]` int64.
        before: how many the file had.
        late: how many of these had no content and now have an ID.
    """

    items: pa.Array
    sids: Tensor
    before: int
    late: int


def fit_catalogue(
    folder: Path,
    codec: Codec,
    content: Content,
    table: SourceRows,
    device: str,
    options: dict,
    title: str,
    progress: Progress | None = None,
) -> SIDQuality:
    """Fits a codec to the content of a table of items and writes it to a folder with its figures; returns these.

    `content` learns from the table. The options, as JSON can hold them, are those that determine the IDs.

    Raises:
        DataError: the table has no content, or not enough for the codec.
    """
    from jfi.semantic_ids.plots import draw_quality

    content.learn(table)
    sources = [source.to(device) for source in content.sources(table)]
    labels = {name: values.to(device) for name, values in content.labels(table).items()}
    try:
        codec.fit(sources, labels, progress)
    except ValueError as error:
        raise DataError(f"{table.name}: {error}") from None
    quality = sid_quality(codec, sources, codec.encode(sources), labels)
    with writing_folder(folder) as unfinished:
        codec.save(unfinished / CODEC)
        content.save(unfinished / CONTENT)
        write_file(unfinished / OPTIONS, json.dumps(options, indent=1) + "\n")
        write_file(unfinished / FIGURES, json.dumps(asdict(quality), indent=1) + "\n")
        draw_quality(quality, content.source_names, title, unfinished / PICTURE)
        written = (CODEC, CONTENT, OPTIONS, FIGURES, PICTURE)
        write_sums(unfinished, {name: sha256_of(unfinished / name) for name in written})
    return quality


def load_catalogue(folder: Path, options: dict) -> tuple[Codec, Content]:
    """Returns the codec and the content that `fit_catalogue` wrote.

    Raises:
        DataError: a file is missing or damaged, or the folder was made with other options.
    """
    try:
        sums = read_sums(folder)
        for name in (OPTIONS, CODEC, CONTENT):
            check_sum(folder, name, sums)
        codec = Codec.load(folder / CODEC)
    except DamagedFileError as error:
        raise DataError(str(error)) from None
    before = json.loads((folder / OPTIONS).read_text(encoding="utf-8"))
    for name, value in options.items():
        if before.get(name) != value:
            option = "--" + name.replace("_", "-")
            what = f"{folder} was made with {before.get(name)!r}, not {value!r}"
            raise DataError(f"{option}: {what}; its IDs stay as they are, so name another --out")
    return codec, Content.load(folder / CONTENT)


def add_items(
    table: SourceRows, column: str, path: Path, codec: Codec, content: Content, progress: Progress | None = None
) -> AddedItems:
    """Returns the IDs of a file, unchanged, and those of the items of a table that the file lacks.

    A number is the same item as its text. An item of the file, which may not exist, without an ID gets one if it now
    has content.

    Raises:
        DataError: the file has IDs of another codec, or its type of items has no value for an item of the table.
    """
    items = table.column(column)
    known, old = items[:0], torch.empty(0, dtype=torch.int64)
    if path.exists():
        ids = SemanticIDs.read(path, column, "--out", codec)
        known, old = ids.items, torch.from_numpy(ids.sids)
    index = pc.fill_null(pc.index_in(as_text(items), value_set=as_text(known)), -1).to_numpy().astype(np.int64)
    new = np.flatnonzero(index < 0)
    late = np.flatnonzero(index >= 0)
    late = late[old.numpy()[index[late]] == UNKNOWN_SID]
    added = _in_type(known.type, path, table, column, new)
    rows = torch.from_numpy(np.concatenate([late, new]))
    encoded = codec.encode([source[rows] for source in content.sources(table)], progress)
    found, sids = encoded.split([len(late), len(new)])
    old[torch.from_numpy(index[late])] = found
    late_ones = int((found != UNKNOWN_SID).sum())
    return AddedItems(pa.concat_arrays([known, added]), torch.cat([old, sids]), len(known), late_ones)


def _in_type(kind: pa.DataType, path: Path, table: SourceRows, column: str, rows: np.ndarray) -> pa.Array:
    """Returns the items of some rows in the type of a file, where their texts must be the same."""
    items = table.column(column).take(pa.array(rows))
    texts = as_text(items)
    try:
        found = items.cast(kind)
    except pa.ArrowException:
        what = f"'{column}' has type {type_name(items.type)}, which does not go with {kind} of {path}"
        raise DataError(f"{table.name}: {what}") from None
    changed = pc.not_equal(as_text(found), texts).to_numpy(False)
    if changed.any():
        i = int(changed.argmax())
        what = f"'{column}' is '{texts[i]}', which as {kind}, the type of {path}, is '{as_text(found)[i]}'"
        raise table.fault(int(rows[i]), what)
    return found
