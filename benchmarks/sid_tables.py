"""The tables and the picture of docs/semantic_ids.md, from results."""

import statistics
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks import report
from benchmarks.table import as_markdown, by_case, measured
from jfi.utils.operands import ceil_div


def digits(results: dict) -> str:
    """Kernels of attention over packed digits beside those over rows, and what training takes."""
    lines = [["case", "words", "digits, us", "rows, us", "MB of training: digits", "rows"]]
    for case, rows in by_case(results).items():
        if rows["jfi, digits"].get("items"):  # of a table by id, which operators took at that time
            continue
        cells = [case, str(ceil_div(rows["jfi, digits"]["D"], 16))]
        for row in rows.values():
            times = (row[f"kernel_{way}_us"] for way in ("forward", "backward"))
            cells.append(" \\| ".join(map(report.microseconds, times)))
        lines.append(cells + [f"{row['memory_training_mb']:.0f}" for row in rows.values()])
    return f"{as_markdown(lines)}\n\nKernels, forward \\| backward; MB above the inputs. {measured(results)}."


def steps(results: dict) -> str:
    """Training steps on long histories: semantic IDs beside rows by id."""
    cases: dict[str, dict[str, dict]] = {}
    for row in results["rows"]:
        cases.setdefault(row["case"], {})[row["implementation"]] = row
    lines = [["case", "history", "ms, captured", "ms, eager", "MB above the inputs", "MB of a batch"]]
    for case, rows in cases.items():
        for name, row in rows.items():
            if row["status"] != "ok":
                lines.append([case, name, row["status"], *["-"] * 3])
                continue
            captured = "-" if row["graph_us"] is None else f"{row['graph_us'] / 1e3:.2f}"
            sizes = [f"{row['memory_mb']:,.0f}", f"{row['batch_bytes'] / 1e6:.1f}"]
            lines.append([case, name, captured, f"{row['eager_us'] / 1e3:.2f}", *sizes])
    return f"{as_markdown(lines)}\n\n{measured(results)}."


def draw_gains(found: dict[str, dict], base: str, path: Path) -> None:
    """NE gain of each form over the id alone, with its spread over the seeds.

    Args:
        found: what `benchmarks.quality.semantic_ids.figures` returns.
        base: name of the form with the id alone.
        path: of the PNG.
    """
    shown = {name: one for name, one in found.items() if name != base}
    names = sorted(shown, key=lambda name: statistics.fmean(shown[name]["gains"]))
    gains = [shown[name]["gains"] for name in names]
    colours = ["tab:red" if "no id" in name else "tab:blue" for name in names]
    figure, axes = plt.subplots(figsize=(7, 0.27 * len(names) + 1), layout="constrained")
    spread = [statistics.pstdev(one) for one in gains]
    axes.barh(names, [statistics.fmean(one) for one in gains], xerr=spread, color=colours, capsize=2)
    axes.set_xlabel("NE gain over the id alone, %; red: without the id")
    axes.grid(True, axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", labelsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
