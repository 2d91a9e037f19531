"""Runs `jfi semantic-ids`."""

import argparse
from pathlib import Path

import torch

from jfi.data.config import SID
from jfi.data.io.blocks import read_table
from jfi.data.schema.semantic_ids import codec_folder, write_sids
from jfi.semantic_ids import UNKNOWN_SID, Codec, DiscretePCA, ResidualKMeans, VQFusion
from jfi.semantic_ids.catalogue import add_items, fit_catalogue, load_catalogue
from jfi.semantic_ids.codec import Progress
from jfi.semantic_ids.content import Content
from jfi.training import ConfigError
from jfi.training.run.scores import check_place, check_results
from jfi.utils.display import Display
from jfi.utils.files import locking

#: Of scikit-learn.
MOST_SEED = 2**32 - 1
NAMES = {"vq": "VQ fusion", "dpca": "discrete PCA", "rq": "residual k-means"}


def new_codec(options: argparse.Namespace) -> Codec:
    try:
        if options.codec == "rq":
            return ResidualKMeans(options.levels, options.codebook_size, seed=options.seed)
        dpca = DiscretePCA(options.digits, seed=options.seed)
        return dpca if options.codec == "dpca" else VQFusion(dpca, steps=options.steps, seed=options.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def showing(task: str, unit: str) -> Progress:
    """Returns what shows the progress of a codec's `fit` or `encode`."""
    displays: list[Display] = []

    def show(done: int, total: int) -> None:
        display = displays[0] if displays else Display(task, total, unit=unit)
        displays[:] = [] if done == total else [display]
        display.update(done - display.n)
        if done == total:
            display.close()

    return show


def chosen(options: argparse.Namespace) -> dict:
    """The options that determine the IDs."""
    names = ["item", "text", "embeddings", "categorical", "codec", "text_width", "seed"]
    own = {"rq": ["levels", "codebook_size"], "dpca": ["digits"], "vq": ["digits", "steps"]}
    return {name: getattr(options, name) for name in [*names, *own[options.codec]]}


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
    what = "is writing in its folder"
    with locking(options.out.parent, lambda by: ConfigError(f"--out {options.out}: {by} {what}")):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Fits a codec, or takes that of an earlier run, and writes the IDs of all items."""
    folder = codec_folder(options.out)
    if options.out.exists() and not folder.exists():
        raise ConfigError(f"--out {options.out} exists, but its codec {folder} does not; name a new file")
    columns = [*options.text, *options.embeddings, *options.categorical]
    table = read_table(options.items, [options.item, *columns], setting="--items")
    for name in (options.item, *columns):
        table.column(name)  # refuses a column that is not there before the long work
    table.unique_ids(options.item)
    if folder.exists():
        codec, content = load_catalogue(folder, chosen(options))
        codec.to(options.device)
    else:
        content = Content(options.text, options.embeddings, options.categorical, options.text_width, options.seed)
        title = f"Semantic IDs of {options.out.name}, by {NAMES[options.codec]}"
        codec, progress = new_codec(options), showing("fit", "steps")
        print(fit_catalogue(folder, codec, content, table, options.device, chosen(options), title, progress))
        print(f"wrote {folder}")
    added = add_items(table, options.item, options.out, codec, content, showing("encode", "items"))
    write_sids(options.out, options.item, added.items, added.sids, codec)
    unknown = int((added.sids[added.before :] == UNKNOWN_SID).sum())
    late = f"{added.late:,} that had no content and now have an ID, " if added.late else ""
    print(
        f"wrote {options.out}: {added.before - added.late:,} items as they were, {late}"
        f"{len(added.sids) - added.before:,} new, of which {unknown:,} without content have the ID {UNKNOWN_SID}"
    )
