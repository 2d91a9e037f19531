"""Runs `jfi evaluate`."""

import argparse
import json
import unicodedata
from pathlib import Path

from jfi.cli.predict import open_run, scoring
from jfi.training.metrics.unknown_values import UnknownShares
from jfi.training.run.scores import check_out, check_place
from jfi.utils.files import write_file

SHOWN = ("samples", "loss", "ne", "auc", "user_auc", "mean_label", "mean_prediction", "calibration")
GROUPS = 20
#: Cells of a terminal for the name of a group.
NAMES = 30


def main(options: argparse.Namespace) -> None:
    """Scores a table, and prints the metrics of the scores."""
    check_out(options.scores, "--scores")
    if options.out is not None:
        check_place("--out", Path(options.out))
    run = open_run(options, {"--out": options.out, "--scores": options.scores})
    shown = {"by": options.by, "importance": options.importance}
    metrics = run.evaluate(options.interactions, out=options.scores, **shown, **scoring(options))
    if options.out is not None:
        text = json.dumps(metrics, indent=1, ensure_ascii=False, allow_nan=False)
        write_file(Path(options.out), text + "\n")
    print(table(metrics))
    if options.importance:
        found = metrics["importance"]
        print(
            f"{found['metric']} {found['value']:.4f} of {found['samples']:,} samples falls where an input is shuffled"
        )
        width = max([NAMES, *(len(name) + 2 for name in found["drops"])])  # names may differ at their ends
        for name, drop in found["drops"].items():
            print(f"  {fit_cells(name, width)}{drop:8.4f}")
    print(UnknownShares(metrics["rows"], metrics["unknown"]))
    for path in (options.scores, options.out):
        if path is not None:
            print(f"wrote {path}")


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


def fit_cells(text: str, cells: int) -> str:
    """The text on one line, cut or filled up to a number of a terminal's cells; a Chinese character takes two.

    tqdm's `disp_trim` counts a combining mark as a cell.

    >>> fit_cells("tea", 5), fit_cells("tea\u8336", 4)
    ('tea  ', 'tea ')
    """
    shown = ""
    for character in " ".join(text.split()):
        width = 1 + (unicodedata.east_asian_width(character) in "WF")
        if unicodedata.category(character) in ("Mn", "Me", "Cf"):  # marks on the character before, and invisible ones
            width = 0
        if width > cells:
            break
        shown, cells = shown + character, cells - width
    return shown + " " * cells
