"""Runs `jfi semantic-ids`."""

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from jfi.data import DataError
from jfi.data.config import SID
from jfi.data.features.semantic_ids import codec_folder, read_sids, write_sids
from jfi.data.io.arrays import as_text, type_name
from jfi.data.io.blocks import read_table
from jfi.data.io.table import Table
from jfi.data.schema.schema import CODEC
from jfi.semantic_ids import (
    UNKNOWN_SID,
    Codec,
    DiscretePCA,
    ResidualKMeans,
    VQFusion,
    sid_quality,
)
from jfi.semantic_ids.content import Content
from jfi.semantic_ids.plots import draw_quality
from jfi.training import ConfigError
from jfi.training.run.scores import check_place, check_results
from jfi.utils.display import Display
from jfi.utils.exit_codes import raise_on_sigterm
from jfi.utils.files import (
    DamagedFileError,
    check_sum,
    locking_folder,
    read_sums,
    sha256_of,
    write_file,
    write_sums,
    writing_folder,
)

CONTENT, OPTIONS = "content.safetensors", "options.json"
FIGURES, PICTURE = "quality.json", "quality.png"
#: Of scikit-learn.
MOST_SEED = 2**32 - 1


def new_codec(options: argparse.Namespace) -> Codec:
    try:
        if options.codec == "rq":
            return ResidualKMeans(options.levels, options.codebook_size, seed=options.seed)
        dpca = DiscretePCA(options.digits, seed=options.seed)
        return dpca if options.codec == "dpca" else VQFusion(dpca, steps=options.steps, seed=options.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from None


class Progress:
    """Shows the progress of a codec's `fit` or `encode`."""

    def __init__(self, task: str, unit: str) -> None:
        self.task, self.unit, self.display = task, unit, None

    def __call__(self, done: int, total: int) -> None:
        if self.display is None:
            self.display = Display(self.task, total, unit=self.unit)
        self.display.update(done - self.display.done)
        if done == total:
            self.display.__exit__()


def chosen(options: argparse.Namespace) -> dict:
    """The options that determine the IDs."""
    names = ["item", "text", "embeddings", "categorical", "codec", "text_width", "seed"]
    own = {"rq": ["levels", "codebook_size"], "dpca": ["digits"], "vq": ["digits", "steps"]}
    return {name: getattr(options, name) for name in [*names, *own[options.codec]]}


def load(folder: Path, options: argparse.Namespace) -> tuple[Codec, Content]:
    """The codec of an earlier run, which must have had the same options."""
    try:
        sums = read_sums(folder)
        for name in (OPTIONS, CODEC, CONTENT):
            check_sum(folder, name, sums)
        codec = Codec.load(folder / CODEC)
    except DamagedFileError as error:
        raise DataError(str(error)) from None
    before = json.loads((folder / OPTIONS).read_text(encoding="utf-8"))
    for name, value in chosen(options).items():
        if before.get(name) != value:
            option = "--" + name.replace("_", "-")
            what = f"{folder} was made with {before.get(name)!r}, not {value!r}"
            raise ConfigError(f"{option}: {what}; its IDs stay as they are, so name another --out")
    return codec.to(options.device), Content.load(folder / CONTENT)


def make(folder: Path, options: argparse.Namespace, table: Table) -> tuple[Codec, Content]:
    """Fits a codec to a catalogue, and writes it with its figures."""
    content = Content(options.text, options.embeddings, options.categorical, options.text_width, options.seed)
    content.learn(table)
    sources = [source.to(options.device) for source in content.sources(table)]
    labels = {name: values.to(options.device) for name, values in content.labels(table).items()}
    try:
        codec = new_codec(options).fit(sources, labels, Progress("fit", "steps"))
    except ValueError as error:
        raise DataError(f"{table.name}: {error}") from None
    quality = sid_quality(codec, sources, codec.encode(sources), labels)
    print(quality)
    with writing_folder(folder) as unfinished:
        codec.save(unfinished / CODEC)
        content.save(unfinished / CONTENT)
        write_file(unfinished / OPTIONS, json.dumps(chosen(options), indent=1) + "\n")
        write_file(unfinished / FIGURES, json.dumps(quality.as_dict(), indent=1) + "\n")
        draw_quality(quality, content.source_names, f"{type(codec).__name__} {options.out.stem}", unfinished / PICTURE)
        written = (CODEC, CONTENT, OPTIONS, FIGURES, PICTURE)
        write_sums(unfinished, {name: sha256_of(unfinished / name) for name in written})
    print(f"wrote {folder}")
    return codec, content


def rows_of(table: Table, column: str, items: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a table that hold one of some items, and its place among these, `[M]` int64 each.

    A number is the same item as its text.

    Args:
        table: of items.
        column: its column of the items.
        items: to look for, each once.
    """
    texts = as_text(table.column(column)).cast(pa.large_string())
    positions = pc.index_in(texts, value_set=as_text(items).cast(pa.large_string()))
    rows = np.flatnonzero(positions.is_valid().to_numpy(zero_copy_only=False))
    return rows, positions.take(pa.array(rows)).to_numpy().astype(np.int64)


def new_items(table: Table, column: str, known: pa.Array, path: Path) -> tuple[np.ndarray, pa.Array]:
    """The rows `[M]` int64 of a table whose items `known` lacks, and these items `[M]` in the type of `known`.

    A number is the same item as its text.

    Args:
        table: of the items.
        column: its column of the items.
        known: items of a file of IDs.
        path: of that file, for messages.

    Raises:
        DataError: an item has no value of that type with the same text, such as "007" among integers.
    """
    items = table.column(column)
    texts = as_text(items).cast(pa.large_string())
    rows = np.flatnonzero(pc.invert(pc.is_in(texts, as_text(known).cast(pa.large_string()))).to_numpy(False))
    items, texts = items.take(pa.array(rows)), texts.take(pa.array(rows))
    try:
        found = items.cast(known.type)
    except pa.ArrowException:
        what = f"'{column}' has type {type_name(items.type)}, which does not go with {known.type} of {path}"
        raise DataError(f"{table.name}: {what}") from None
    changed = pc.not_equal(as_text(found).cast(pa.large_string()), texts).to_numpy(False)
    if changed.any():
        i = int(changed.argmax())
        what = f"'{column}' is '{texts[i]}', which as {known.type}, the type of {path}, is '{as_text(found)[i]}'"
        raise table.fault(int(rows[i]), what)
    return rows, found


def add(table: Table, options: argparse.Namespace, codec: Codec, content: Content) -> tuple[pa.Array, Tensor, int, int]:
    """All items and IDs, those of the file first, how many were there, and how many of these now have content."""
    known, old = table.column(options.item)[:0], torch.empty(0, dtype=torch.int64)
    if options.out.exists():
        known, old = read_sids(options.out, options.item, codec)
    rows, items = new_items(table, options.item, known, options.out)
    unknown = (old == UNKNOWN_SID).nonzero()[:, 0]  # -1 is no ID of an item, so content that comes later gives one
    again, positions = rows_of(table, options.item, known.take(pa.array(unknown.numpy())))
    chosen = torch.from_numpy(np.concatenate([again, rows]))
    sids = codec.encode([source[chosen] for source in content.sources(table)], Progress("encode", "items"))
    late, new = sids.split([len(again), len(rows)])
    old[unknown[torch.from_numpy(positions)]] = late
    return pa.concat_arrays([known, items]), torch.cat([old, new]), len(known), int((late != UNKNOWN_SID).sum())


def main(options: argparse.Namespace) -> None:
    """Makes the IDs, or adds those of new items."""
    if not options.text and not options.embeddings:
        raise ConfigError("name the content: --text, --embeddings or both")
    if options.item == SID:
        raise ConfigError(f"--item {SID}: the file of IDs has a column of this name; rename the items' column")
    if options.out.suffix != ".parquet":
        raise ConfigError(f"--out {options.out}: the name must end in .parquet")
    repeated = {name for name in options.text if name in options.embeddings}
    if repeated:
        raise ConfigError(f"--embeddings: '{min(repeated)}' is in --text too")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU here")
    if not 0 <= options.seed <= MOST_SEED:
        raise ConfigError(f"--seed: got {options.seed}, must be from 0 to {MOST_SEED}")
    check_place("--out", options.out)
    if Path(options.items).is_dir() and options.out.resolve().is_relative_to(Path(options.items).resolve()):
        raise ConfigError(f"--out {options.out}: is in the folder {options.items} of --items, which would read it next")
    check_results({"--out": options.out}, {"--items": options.items})
    new_codec(options)  # refuses wrong options before the table is read
    with raise_on_sigterm(), locking_folder(options.out.parent) as alone:
        if not alone:
            raise ConfigError(f"--out {options.out}: another process is writing in its folder")
        run(options)


def run(options: argparse.Namespace) -> None:
    folder = codec_folder(options.out)
    if options.out.exists() and not folder.exists():
        raise ConfigError(f"--out {options.out} exists, but its codec {folder} does not; name a new file")
    columns = [*options.text, *options.embeddings, *options.categorical]
    table = read_table(options.items, [options.item, *columns], setting="--items")
    for name in (options.item, *columns):
        table.column(name)  # refuses a column that is not there before the long work
    table.unique_ids(options.item)
    codec, content = load(folder, options) if folder.exists() else make(folder, options, table)
    items, sids, before, found = add(table, options, codec, content)
    write_sids(options.out, options.item, items, sids, codec)
    new = sids[before:]
    unknown = int((new == UNKNOWN_SID).sum())
    late = f"{found:,} that had no content and now have an ID, " if found else ""
    print(
        f"wrote {options.out}: {before - found:,} items as they were, {late}{len(new):,} new, "
        f"of which {unknown:,} without content have the ID {UNKNOWN_SID}"
    )
