"""Validation AUC against seconds of training: boosting, mean pooling and attention in three sizes, epoch by epoch.

python -m benchmarks.quality.cost --data data/quality --procs 12

Trainings run side by side, each on one thread of the CPU and, where there is one, on the GPU, and end after `--epochs`
or `--limit` seconds. Each result is written to benchmarks/results/quality/cost.json as it comes, and the picture at the
end; `python -m benchmarks.readme` writes the table of docs/quality.md.
"""

from jfi.utils.exit_codes import EXIT_CODES, begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import contextlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from benchmarks import report
from benchmarks import table as markdown
from benchmarks.figures import OURS, PAPER, PEERS, plain_ticks, plt
from benchmarks.quality.page import RESULTS
from benchmarks.quality.run import environment
from benchmarks.quality.tables import DATA, TABLES
from jfi.baselines import run_baselines
from jfi.cli.options import OptionParser
from jfi.data import DataConfig, load_dataset
from jfi.utils.exit_codes import run_command
from jfi.utils.files import write_file

COMPARED = ("amazon_office",)
POOLINGS = {"mean": PEERS[0], "attention": OURS}
#: By embedding_dim its line.
SIZES = {16: ":", 64: "-", 128: "--"}
BOOSTING, MARGIN = "boosting", 0.005
PATH = RESULTS / "cost.json"
PICTURE = "![Validation AUC against seconds of training](../benchmarks/results/quality/cost.png)"


def jfi(arguments: list[object], limit: float | None = None) -> None:
    """Runs a command of jfi; one that reaches the limit is ended, which is no error."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        command = [sys.executable, "-m", "jfi", *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, timeout=limit)


def measure(run: dict, scratch: Path, epochs: int, limit: float) -> dict:
    """Returns the run with the validation AUC after each epoch, and the seconds of training up to then."""
    prepared = scratch / run["table"]
    dataset = load_dataset(DataConfig(prepared=str(prepared)))
    if run["model"] == BOOSTING:
        (found,) = run_baselines(dataset)["gradient boosting"]
        return run | {"auc": [found.validation["auc"]], "seconds": [found.train_seconds]}
    folder = scratch / "-".join(map(str, run.values()))
    settings = {"data.prepared": prepared, "model.pooling": run["model"], "model.embedding_dim": run["size"]}
    device = "cuda" if run["device"] == "GPU" else "cpu"
    training = {"epochs": epochs, "patience": "null", "device": device, "run_dir": folder}
    settings |= {f"training.{name}": value for name, value in training.items()}
    jfi(["train", *(f"--{name}={value}" for name, value in settings.items())], limit)
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    auc = [line["auc"] for line in log if line["split"] == "validation"]
    lines = [line for line in log if line["split"] == "train"]
    a_step = dataset.num_samples("train") * len(auc) / lines[-1]["step"]  # samples
    seconds, before = [0.0] * len(auc), 0
    for line in lines:
        seconds[line["epoch"] - 1] += (line["step"] - before) * a_step / line["samples_per_second"]
        before = line["step"]
    return run | {"auc": auc, "seconds": list(itertools.accumulate(seconds))}


def reached(run: dict, runs: list[dict]) -> float | None:
    """Seconds until the first epoch whose AUC is `MARGIN` above that of boosting on the table; None for never."""
    goal = next(one["auc"][0] for one in runs if one["model"] == BOOSTING and one["table"] == run["table"]) + MARGIN
    return next((s for s, auc in zip(run["seconds"], run["auc"], strict=True) if auc >= goal), None)


def page(path: Path = PATH) -> str:
    """The picture and the table of docs/quality.md; `FileNotFoundError` without results."""
    found = json.loads(path.read_text())
    titles = ["seconds an epoch", "best validation AUC", "epochs until it", f"seconds to boosting + {MARGIN:g}"]
    lines = [["table", "model", "embedding_dim", "device", *titles]]
    for run in found["runs"]:
        best, count, time = max(run["auc"]), len(run["auc"]), reached(run, found["runs"])
        shown = [f"{run['seconds'][-1] / count:.1f}", f"{best:.4f}", f"{run['auc'].index(best) + 1} of {count}"]
        shown = [str(run["size"]), run["device"], *shown, f"{time:.1f}" if time else "-"]
        if run["model"] == BOOSTING:
            shown = ["", run["device"], f"{run['seconds'][0]:.1f} in all", f"{best:.4f}", "", ""]
        lines.append([TABLES[run["table"]].title, run["model"], *shown])
    where = found["environment"]
    made = f"on a thread of {where['cpu']}" + (f" or on {where['device']}" if where["device"] != where["cpu"] else "")
    note = f"Seed 0; {where['procs']} trainings at a time, {made}. torch {where['torch']}, commit {where['commit']}."
    return f"{PICTURE}\n\n{markdown.as_markdown(lines)}\n\n{note}"


def draw(path: Path = PATH) -> Path | None:
    """The picture of docs/quality.md beside the results, a panel for each table and device; None without results."""
    if not path.exists():
        return None
    runs = json.loads(path.read_text())["runs"]
    tables, devices = (list(dict.fromkeys(run[name] for run in runs)) for name in ("table", "device"))
    figure, grid = plt.subplots(len(devices), len(tables), sharey="col", squeeze=False, layout="constrained")
    figure.set_size_inches(5.5 * len(tables), 4.2 * len(devices))
    for (device, table), axes in zip(itertools.product(devices, tables), grid.flat, strict=True):
        boosting = next(run for run in runs if run["model"] == BOOSTING and run["table"] == table)
        (seconds,), (auc,) = boosting["seconds"], boosting["auc"]
        axes.axhline(auc + MARGIN, color=PAPER, linewidth=1, linestyle="--", label=f"boosting + {MARGIN:g}")
        axes.plot(seconds, auc, "*", color="black", markersize=12, label="boosting, CPU", linestyle="none")
        for run in runs:
            if (run["table"], run["device"]) == (table, device) and run["model"] != BOOSTING:
                style = {"color": POOLINGS[run["model"]], "linestyle": SIZES[run["size"]], "marker": "."}
                axes.plot(run["seconds"], run["auc"], **style, label=f"{run['model']}, width {run['size']}")
        axes.set_xscale("log")
        best = max(auc + MARGIN, *(max(run["auc"]) for run in runs if run["table"] == table))
        axes.set_ylim(auc - 0.02, best + 0.002)  # first epochs and overfitted ones may lie far below
        plain_ticks(axes.xaxis)
        axes.set(title=TABLES[table].title, xlabel=f"{device} seconds of training", ylabel="validation AUC")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path.with_suffix(".png"), dpi=130)
    plt.close(figure)
    return path.with_suffix(".png")


def main(arguments: list[str] | None = None) -> None:
    parser = OptionParser(prog="python -m benchmarks.quality.cost", description=__doc__, epilog=EXIT_CODES)
    parser.add_argument("--data", type=Path, default=DATA, help="folder that benchmarks.quality.fetch wrote")
    parser.add_argument("--out", type=Path, default=PATH, help="file of the results")
    parser.add_argument("--tables", nargs="+", default=list(COMPARED), choices=list(TABLES), help="what is trained on")
    parser.add_argument("--epochs", type=int, default=20, help="of a training")
    parser.add_argument("--limit", type=float, default=150, help="seconds after which a training is ended")
    parser.add_argument("--procs", type=int, default=4, help="trainings at a time")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    devices = ["CPU", "GPU"] if torch.cuda.is_available() else ["CPU"]
    trained = itertools.product(reversed(options.tables), POOLINGS, SIZES, devices)
    named = [*((table, BOOSTING, None, "CPU") for table in options.tables), *trained]
    runs = [dict(zip(("table", "model", "size", "device"), one, strict=True)) for one in named]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(options.procs, context) as pool:
        scratch = Path(folder)
        files = {scratch / table: TABLES[table].arguments(0, options.data) for table in options.tables}
        list(pool.map(jfi, (["prepare", *one, "--data.statistics=auto", "--out", to] for to, one in files.items())))
        where, found = environment() | {"procs": options.procs, "cpu": report.cpu_name()}, []
        for run in as_completed(pool.submit(measure, run, scratch, options.epochs, options.limit) for run in runs):
            found += [run.result()] if run.result()["auc"] else []  # one that is ended in its first epoch has none
            found.sort(key=lambda one: (options.tables.index(one["table"]), one["device"], one["model"] != BOOSTING))
            write_file(options.out, json.dumps({"environment": where, "runs": found}, indent=1) + "\n")
    print(f"wrote {options.out} and {draw(options.out)}")


if __name__ == "__main__":
    sys.exit(run_command(main))
