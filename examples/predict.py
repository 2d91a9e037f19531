"""Scores every row of a table with a trained run, and evaluates the scores where the rows have labels or are positives.

python examples/predict.py --run runs/20250101-120000 --interactions new.parquet --out scores.parquet
python examples/predict.py --run runs/20250101-120000 --interactions today.csv --history log.parquet --out scores.csv
python examples/predict.py --run runs/20250101-120000 --interactions test.parquet --evaluate metrics.json --by device

A row's history is what its user did before it, in --history and in --interactions. The table may lack the label, and it
may have users and items that training has not seen.
"""

from jfi.utils.exit_codes import begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import argparse
import json
import sys
from pathlib import Path

import torch

from jfi.training import ConfigError
from jfi.training.cli import run_cli
from jfi.training.saved_run import PREDICTED, load_run
from jfi.training.scores import check_out, check_place, check_results
from jfi.training.unknown import UnknownShares
from jfi.utils.display import fit_cells
from jfi.utils.exit_codes import EXIT_CODES, raise_on_sigterm
from jfi.utils.files import writing_file
from jfi.utils.options import OptionParser, at_least_one

SHOWN = ("samples", "loss", "ne", "auc", "user_auc", "mean_label", "mean_prediction", "calibration")
GROUPS = 20
#: Cells of a terminal for the name of a group.
NAMES = 30


def arguments() -> argparse.Namespace:
    parser = OptionParser(description=__doc__, epilog=EXIT_CODES)
    parser.add_argument("--run", required=True, help="folder of a run of examples/train_dlrm.py")
    parser.add_argument("--interactions", required=True, help="the rows to score, with the columns of training")
    parser.add_argument("--history", help="rows before them, which are only part of histories")
    parser.add_argument("--users", help="table of users (default: the run's data.users)")
    parser.add_argument("--items", help="table of items (default: the run's data.items)")
    sids = "file of semantic IDs of the run's codec (default: the run's data.semantic_ids)"
    parser.add_argument("--semantic-ids", metavar="FILE", help=sids)
    columns = "ids, time, --by, score (logit) and probability, or prediction of a regression"
    parser.add_argument("--out", help=f"file to write, .parquet or .csv: {columns}")
    parser.add_argument("--evaluate", metavar="FILE", help="print the rows' metrics, and write them as JSON")
    parser.add_argument("--by", nargs="+", default=[], metavar="COLUMN", help="with --evaluate: also by these columns")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of the model (default: cpu)")
    parser.add_argument(
        "--batch-size", type=at_least_one, default=4096, help="rows per call of the model (default: 4096)"
    )
    parser.add_argument(
        "--output",
        choices=PREDICTED,
        default=PREDICTED[0],
        help="what a probability is: the logit's sigmoid, or by the run's calibration (default: probabilities)",
    )
    return parser.parse_args()


def table(metrics: dict) -> str:
    """The metrics as text, one line overall and one for each of the largest groups."""

    known = metrics["overall"]
    shown = [name for name in (*SHOWN, *(name for name in known if name not in (*SHOWN, "ranked"))) if name in known]
    widths = [max(10, len(name) + 2) for name in shown]

    def line(name: str, cells: list[str]) -> str:
        return fit_cells(name, NAMES) + "".join(f"{cell:>{width}s}" for cell, width in zip(cells, widths, strict=True))

    def row(name: str, record: dict) -> str:
        cells = ["-" if record[key] is None else f"{record[key]:.4f}" for key in shown[1:]]
        return line(name, [f"{record['samples']:,d}", *cells])

    lines = [line("", shown), row("all", metrics["overall"])]
    for name, groups in metrics["by"].items():
        lines += [row(f"{name} {group['value']}", group) for group in groups[:GROUPS]]
        if len(groups) > GROUPS:
            lines.append(f"{name}: {len(groups) - GROUPS} smaller groups are in the JSON file")
    return "\n".join(lines)


def main() -> None:
    options = arguments()
    # Check the options before loading the run, which takes seconds.
    check_out(options.out)
    if options.out is None and options.evaluate is None:
        raise ConfigError("name a file to write: --out for the scores, --evaluate for their metrics")
    if options.by and options.evaluate is None:
        raise ConfigError("--by belongs to --evaluate")
    if options.evaluate is not None:
        check_place("--evaluate", Path(options.evaluate))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU here")
    with raise_on_sigterm():
        score(options)
    for path in (options.out, options.evaluate):
        if path is not None:
            print(f"wrote {path}")


def score(options: argparse.Namespace) -> None:
    tables = {name: getattr(options, name) for name in ("history", "users", "items", "semantic_ids")}
    check_results(
        {"--out": options.out, "--evaluate": options.evaluate},
        {
            f"--{name.replace('_', '-')}": paths
            for name, paths in {"interactions": options.interactions, **tables}.items()
        },
    )
    run = load_run(options.run, options.device, "--run")
    output = {"output": options.output}
    if options.evaluate is None:
        print(run.predict(options.interactions, **tables, out=options.out, batch_size=options.batch_size, **output))
    else:
        metrics = run.evaluate(
            options.interactions, **tables, by=options.by, out=options.out, batch_size=options.batch_size, **output
        )
        with writing_file(Path(options.evaluate)) as unfinished:
            unfinished.write_text(
                json.dumps(metrics, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
            )
        print(table(metrics))
        print(UnknownShares(metrics["rows"], metrics["unknown"]))


if __name__ == "__main__":
    sys.exit(run_cli(main))
