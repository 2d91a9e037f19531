"""What semantic IDs bring on Amazon Office: an item's id alone, and beside it its content in several forms.

python -m benchmarks.quality.fetch --out data/quality amazon_office
python -m benchmarks.quality.semantic_ids

The codecs are fitted and the IDs written by `jfi semantic-ids`, to data/quality/semantic_ids. Users are
split 8 : 1 : 1, and a tenth of the items is in no row of the training users, so that test rows have new items. Every
form has four trials of learning rates; the one with the best NE on the validation rows is trained with three seeds.
Results go to benchmarks/results/quality/semantic_ids.json after each training; another call goes on from there.
"""

from jfi.utils.exit_codes import EXIT_CODES, begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import csv
import statistics
import subprocess
import sys
import zlib
from pathlib import Path

import torch

from benchmarks import table as markdown
from benchmarks.quality.fuxictr import Peers
from benchmarks.quality.models import Model, grid
from benchmarks.quality.page import RESULTS, where
from benchmarks.quality.results import Results, chosen, final_runs, of_model
from benchmarks.quality.run import Task, run_table, train_ours
from benchmarks.quality.tables import DATA, TABLES, Table
from benchmarks.sid_tables import draw_gains
from jfi.cli.options import OptionError, OptionParser
from jfi.data import DataError, InteractionDataset
from jfi.training.metrics.label_metrics import Predictions
from jfi.utils.errors import suggest
from jfi.utils.exit_codes import run_command

NAME = "semantic_ids"
_OFFICE = TABLES["amazon_office"]
SPLITS = ("interactions", "validation", "test")
_FILES = {setting: f"{NAME}/{setting}.csv" for setting in SPLITS} | {"items": _OFFICE.folds[0]["items"]}
TABLE = Table(_OFFICE.title, _OFFICE.config, [_FILES])
#: Users 0 of 10 test, 1 validate; items 0 of 10 are new: by CRC-32.
_PARTS = 10
_BOTH = ["--text", "title,description"]
#: By the name of their file, the options of `jfi semantic-ids`.
CODECS: dict[str, list[str]] = {
    "rq": [*_BOTH, "--codec", "rq"],
    "dpca": [*_BOTH, "--codec", "dpca"],
    "raw": [*_BOTH, "--codec", "rq", "--levels", "1", "--codebook-size", "3459"],  # a code for each item
    "vq_title": ["--text", "title"],
    "vq": _BOTH,
    "vq_brand": [*_BOTH, "--categorical", "brand"],
}


def _sids(codec: str, read: str, **model: object) -> dict[str, object]:
    more = {f"model.{name}": value for name, value in model.items()}
    return {"data.semantic_ids": f"{NAME}/{codec}.parquet", "model.semantic_ids": read} | more


def _of_item(*columns: str) -> list[dict[str, str]]:
    return [{"name": column, "of": "item"} for column in columns]


#: By name what differs from the table's config, and the bytes of an event's fields in a batch.
FORMS: dict[str, tuple[dict[str, object], int]] = {
    "id alone": ({}, 8),
    "brand": ({"data.features": _of_item("brand")}, 16),
    "published RQ-VAE, tables": ({"data.features": _of_item("code_0", "code_1", "code_2")}, 32),
    "RQ, decoded": (_sids("rq", "decode"), 16),
    "raw embeddings": (_sids("raw", "decode"), 16),
    "discrete PCA, digits": (_sids("dpca", "digits"), 16),
    "VQ fusion of titles, digits": (_sids("vq_title", "digits"), 16),
    "VQ fusion, digits": (_sids("vq", "digits"), 16),
    "VQ fusion with brands, digits": (_sids("vq_brand", "digits"), 16),
    "VQ fusion with brands, decoded": (_sids("vq_brand", "decode"), 16),
    "RQ, decoded, no id": (_sids("rq", "decode", item_id=False), 8),
    "raw embeddings, no id": (_sids("raw", "decode", item_id=False), 8),
    "discrete PCA, digits, no id": (_sids("dpca", "digits", item_id=False), 8),
    "VQ fusion, digits, no id": (_sids("vq", "digits", item_id=False), 8),
    "VQ fusion with brands, digits, no id": (_sids("vq_brand", "digits", item_id=False), 8),
}
BASE = "id alone"
#: Of all forms.
_SETTINGS = {"data.features": [], "data.split": "files", "training.monitor": "ne"}
_TRIALS = grid(optimizer__dense__learning_rate=[0.001, 0.003], optimizer__embeddings__learning_rate=[0.02, 0.1])
MODELS = {name: Model("ours", _SETTINGS | settings, _TRIALS, "ne") for name, (settings, _) in FORMS.items()}


def part(text: str) -> int:
    """A number below `_PARTS` that depends on the text alone."""
    return zlib.crc32(text.encode()) % _PARTS


def split_rows(data: Path) -> None:
    """Writes the rows of training, validation and test users, the first without the new items, if they are missing."""
    paths = [data / _FILES[setting] for setting in SPLITS]
    if all(path.exists() for path in paths):
        return
    with open(data / _OFFICE.folds[0]["interactions"], newline="") as file:
        names, *rows = csv.reader(file)
    user, item = names.index("user"), names.index("item")
    kept: dict[str, list] = {setting: [names] for setting in SPLITS}
    for row in rows:
        split = {0: "test", 1: "validation"}.get(part(row[user]), "interactions")
        if split != "interactions" or part(f"item {row[item]}"):
            kept[split].append(row)
    for setting, path in zip(SPLITS, paths, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(kept[setting])


def make_ids(data: Path) -> None:
    """Writes the IDs that are missing, by the command."""
    folder = data / NAME
    for name, options in CODECS.items():
        out = folder / f"{name}.parquet"
        if out.exists():
            continue
        items = data / TABLE.folds[0]["items"]
        command = [sys.executable, "-m", "jfi", "semantic-ids", "--items", items, *options, "--out", out]
        done = subprocess.run([str(one) for one in command], capture_output=True, text=True)
        if done.returncode:
            raise DataError(f"{out}: {done.stderr.strip()[-400:]}")
        print(f"wrote {out}", flush=True)


def run_form(task: Task, name: str, settings: dict, seed: int) -> dict:
    """Trains a form."""
    found, model, dataset = train_ours(task, settings, seed)
    return found | {"slices": slices(model, dataset)}


@torch.no_grad()
def slices(model: torch.nn.Module, dataset: InteractionDataset) -> dict[str, dict[str, float]]:
    """Metrics of the test rows whose item has been in a training row, `warm`, and of the others, `cold`."""
    model.eval()
    found = {True: Predictions(), False: Predictions()}
    for batch in dataset.batches("test", 4096):
        logits = model(batch.dense_features, batch.sparse_features, batch.timelines).squeeze(-1)
        known = batch.sparse_features[dataset.schema.item_key].values() > 0
        for warm, predictions in found.items():
            rows = known == warm
            predictions.add(logits[rows], batch.labels[rows], batch.users[rows])
    return {name: found[warm].metrics() for name, warm in (("warm", True), ("cold", False))}


def finals(cells: list[dict], name: str) -> list[dict]:
    """The trainings of a form that count; none while one is missing."""
    runs = final_runs(TABLE)
    settings = chosen(cells, name, MODELS[name], runs)
    found = {} if settings is None else of_model(cells, name, settings)
    return [found[run] for run in runs] if all(run in found for run in runs) else []


def figures(cells: list[dict]) -> dict[str, dict]:
    """By form that is done its NE gains over the id alone, in percent by seed, and the cells that count."""
    done = {name: found for name in FORMS if (found := finals(cells, name))}
    base = statistics.fmean(cell["test"]["ne"] for cell in done[BASE])
    gains = {name: [100 * (1 - cell["test"]["ne"] / base) for cell in found] for name, found in done.items()}
    return {name: {"gains": gains[name], "cells": found} for name, found in done.items()}


def page(folder: Path = RESULTS) -> str:
    """The table of docs/semantic_ids.md.

    Raises:
        FileNotFoundError: there are no results.
    """
    path = folder / f"{NAME}.json"
    if not path.exists():
        raise FileNotFoundError(path)
    found = figures(Results(path).cells)
    titles = ["in addition to the id", "NE gain, %", "test NE", "AUC", "AUC of new items", "bytes an event"]
    lines = [[*titles, "parameters"]]
    for name, one in sorted(found.items(), key=lambda pair: -statistics.fmean(pair[1]["gains"])):
        cells = one["cells"]
        auc, cold = (
            statistics.fmean(cell[part]["auc"] for cell in flat)
            for part, flat in (("test", cells), ("cold", [cell["slices"] for cell in cells]))
        )
        ne = statistics.fmean(cell["test"]["ne"] for cell in cells)
        gain = f"{statistics.fmean(one['gains']):.1f} ± {statistics.pstdev(one['gains']):.1f}"
        size = f"{cells[0]['parameters']:,}"
        lines.append([name, gain, f"{ne:.4f}", f"{auc:.4f}", f"{cold:.4f}", str(FORMS[name][1]), size])
    note = f"Mean and standard deviation over {len(found[BASE]['cells'])} seeds."
    return f"{markdown.as_markdown(lines)}\n\n{note} {where([cell for one in found.values() for cell in one['cells']])}"


def draw(folder: Path = RESULTS) -> Path | None:
    """The picture of docs/semantic_ids.md, beside the results; None where there are none."""
    path = folder / f"{NAME}.json"
    if not path.exists():
        return None
    draw_gains(figures(Results(path).cells), BASE, path.with_suffix(".png"))
    return path.with_suffix(".png")


def main(arguments: list[str] | None = None) -> None:
    parser = OptionParser(prog=f"python -m benchmarks.quality.{NAME}", description=__doc__, epilog=EXIT_CODES)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), help=f"some of: {', '.join(FORMS)}")
    parser.add_argument("--data", type=Path, default=DATA, help="folder that benchmarks.quality.fetch wrote")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    for name in options.forms:
        if name not in FORMS:
            raise OptionError(f"--forms: unknown {name!r}; {suggest(name, FORMS)}")
    split_rows(options.data)
    make_ids(options.data)
    results = Results(options.out / f"{NAME}.json")
    run_table(TABLE, results, options.forms, options.data, Peers(), {"ours": run_form}, MODELS)


if __name__ == "__main__":
    sys.exit(run_command(main))
