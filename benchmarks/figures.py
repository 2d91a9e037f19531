"""Figures of results: time and memory over lengths, Table 1 with the paper and the floor, jfi and its fastest peers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

OURS, PAPER, FLOOR = "#c1272d", "#8a8a8a", "#d9d9d9"
PEERS = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#5d3a9b")
MARKERS = "osD^vP"
SHOWN = 4  # bars of a panel: jfi and its three fastest peers


def caption(results: dict) -> str:
    where = results["environment"]
    return f"{where['device']}, torch {where['versions'].get('torch', '?')}, {where['date'][:10]}"


def plain_ticks(axis: Axis) -> None:
    """1, 2, 5, 10 ... instead of powers."""
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def by_reading(row: dict) -> str:
    """Label of a row's line; jfi has two, value = key and distinct values."""
    if not row["ours"]:
        return row["implementation"]
    return row["implementation"] + (", value = key" if row["shared"] else ", distinct value")


def by_implementation(row: dict) -> str:
    return row["implementation"]


def series(rows: list[dict], label: Callable[[dict], str]) -> dict[str, list[dict]]:
    """Rows by line, ordered by N."""
    lines: dict[str, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["N"]):
        lines.setdefault(label(row), []).append(row)
    return lines


def draw_lengths(axes: Axes, lines: dict[str, list[dict]], value: Callable[[dict], float | None]) -> None:
    peers = iter(zip(PEERS, MARKERS, strict=True))
    for name, rows in lines.items():
        colour, marker = (OURS, "o") if rows[0]["ours"] else next(peers)
        style = "--" if name.endswith("distinct value") else "-"
        points = [(row["N"], value(row)) for row in rows if value(row)]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=colour, marker=marker, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)
    axes.set_xlabel("longest length N (lengths uniform in [0, N])")
    axes.grid(True, which="major", alpha=0.3)


def against_lengths(results: dict, label: Callable[[dict], str], what: str, folder: Path, prefix: str) -> list[Path]:
    """<prefix>latency.png and <prefix>memory.png, forward and training side by side."""
    lines = series(results["rows"], label)
    pictures = {
        "latency": ("microseconds", "forward_us", "forward_backward_us"),
        "memory": ("MB above the inputs", "memory_forward_mb", "memory_training_mb"),
    }
    paths = []
    for name, (unit, forward, training) in pictures.items():
        figure, panels = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
        for axes, column, title in zip(panels, (forward, training), ("forward", "forward + backward"), strict=True):
            draw_lengths(axes, lines, lambda row, column=column: row.get(column))
            axes.set_title(title)
        panels[0].set_ylabel(unit)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        figure.suptitle(f"{what}\n{caption(results)}", fontsize=10)
        paths.append(folder / f"{prefix}{name}.png")
        figure.savefig(paths[-1], dpi=130)
        plt.close(figure)
    return paths


def lengths(results: dict, folder: Path) -> list[Path]:
    shape = results["rows"][0]
    what = f"Target attention, B={shape['B']}, D={shape['D']}, T={shape['T']}, {shape['dtype']}"
    return against_lengths(results, by_reading, what, folder, "")


def self_lengths(results: dict, folder: Path) -> list[Path]:
    shape = results["rows"][0]
    what = f"Self-attention, B={shape['B'] * shape['N']:,} / N, D={shape['D']}, H={shape['H']}, {shape['dtype']}"
    return against_lengths(results, by_implementation, what, folder, "figure2_self_")


def speedups(rows: list[dict], column: str, floor: Callable[[dict], float]) -> dict[str, list[float]]:
    """Speed-up over padded torch by implementation, a number per operator; 0 where a time is missing."""
    by_case: dict[str, dict[str, dict]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["implementation"]] = row
    names = [name for name in next(iter(by_case.values())) if name != "padded torch"]
    bars: dict[str, list[float]] = {name: [] for name in names}
    bars["floor"] = []
    for found in by_case.values():
        padded = found["padded torch"].get(column)
        for name in names:
            time = found[name].get(column)
            bars[name].append(padded / time if padded and time else 0)
        bars["floor"].append(padded / floor(found["jfi"]) if padded else 0)
    return bars


def table1(results: dict, folder: Path) -> list[Path]:
    """table1.png: speed-up over padded PyTorch."""
    rows = results["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    forward = speedups(rows, "forward_us", lambda row: row["floor_forward_us"])
    paper = {row["case"]: row["paper_speedup"] for row in rows}
    forward = {"paper's claim": [paper[case] for case in cases]} | forward
    training = speedups(rows, "forward_backward_us", lambda row: row["floor_forward_us"] + row["floor_backward_us"])
    figure, panels = plt.subplots(2, 1, figsize=(11, 7.2), layout="constrained")
    peers = iter(PEERS)
    colours = {"paper's claim": PAPER, "floor": FLOOR, "jfi": OURS}
    for axes, bars, title in zip(panels, (forward, training), ("forward", "forward + backward"), strict=True):
        width = 0.84 / len(bars)
        for i, (name, values) in enumerate(bars.items()):
            colour = colours.setdefault(name, next(peers, "black"))
            places = [at + (i - (len(bars) - 1) / 2) * width for at in range(len(cases))]
            drawn = axes.bar(places, values, width, label=name, color=colour)
            axes.bar_label(drawn, [f"{value:.1f}" if value else "" for value in values], fontsize=7, padding=1)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(cases)), [case.replace("_jagged_out", "\n_jagged_out") for case in cases])
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
        axes.set_ylabel("times faster than padded torch")
        axes.set_title(title, fontsize=10)
        axes.grid(True, axis="y", which="major", alpha=0.3)
        axes.set_axisbelow(True)
        axes.margins(y=0.12)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(forward), fontsize=8, frameon=False, loc="outside lower center")
    shape = rows[0]
    what = f"The paper's Table 1: B={shape['B']}, N={shape['N']}, D={shape['D']}, T={shape['T']}, {shape['dtype']}"
    figure.suptitle(f"{what}\n{caption(results)}", fontsize=10)
    path = folder / "table1.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path]


def timeline(results: dict, folder: Path) -> list[Path]:
    """timeline.png: by batches and max_history samples a second, and events looked up for a sample."""
    cases: dict[str, list[dict]] = {}
    for row in results["rows"]:
        if "samples_per_second" in row:
            cases.setdefault(row["case"], []).append(row)
    if not cases:
        return []
    heights = [len(rows) + 0.8 for rows in cases.values()]
    size = (11, 1.1 + 0.36 * sum(heights))
    figure, grid = plt.subplots(
        len(cases), 2, figsize=size, height_ratios=heights, sharey="row", squeeze=False, layout="constrained"
    )
    columns = {"samples_per_second": "samples a second", "events_per_sample": "events looked up a sample, logarithmic"}
    for line, (case, rows) in zip(grid, cases.items(), strict=True):
        for axes, column in zip(line, columns, strict=True):
            values = [row[column] for row in rows]
            colours = [OURS if row["ours"] else PAPER for row in rows]
            axes.barh(range(len(rows)), values, color=colours)
            for place, value in enumerate(values):
                shown = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
                axes.annotate(shown, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
            axes.margins(x=0.18)
            axes.tick_params(axis="x", labelsize=8)
            axes.tick_params(axis="y", length=0)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        line[0].set_yticks(range(len(rows)), [row["implementation"] for row in rows], fontsize=9)
        line[0].invert_yaxis()
        line[1].set_xscale("log")
        line[1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        line[1].set_xlim(0.1, max(row["events_per_sample"] for row in rows) * 8)
        line[0].set_title(case, fontsize=10, loc="left", fontweight="bold")
    for axes, title in zip(grid[-1], columns.values(), strict=True):
        axes.set_xlabel(title, fontsize=9)
    figure.suptitle(f"Training with batches by sample and by user\n{caption(results)}", fontsize=10)
    path = folder / "timeline.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path]


def rows(results: dict, folder: Path) -> list[Path]:
    """rows.png: kernels of a step by case, rows by id beside fbgemm's look-up, and the least time."""
    cases: dict[str, list[dict]] = {}
    for row in results["rows"]:
        if "kernel_forward_backward_us" in row:
            cases.setdefault(row["case"], []).append(row)
    if not cases:
        return []
    heights = [len(found) + 0.8 for found in cases.values()]
    size = (9, 1.1 + 0.27 * sum(heights))
    figure, grid = plt.subplots(len(cases), 1, figsize=size, height_ratios=heights, squeeze=False, layout="constrained")
    for axes, (case, found) in zip(grid[:, 0], cases.items(), strict=True):
        bars(axes, found, "kernel_forward_backward_us", 1e-3, "{:.2f} ms")
        axes.axvline(found[0]["floor_forward_backward_us"] / 1e3, color="black", linewidth=1, linestyle="--")
        axes.set_title(case, fontsize=9, loc="left", fontweight="bold")
    grid[-1, 0].set_xlabel("ms of kernels, look-up to update; dashed: the least bytes at copy speed", fontsize=9)
    figure.suptitle(f"History rows read by id, and written by a look-up\n{caption(results)}", fontsize=10)
    path = folder / "rows.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path]


def step(results: dict, folder: Path) -> list[Path]:
    """step.png: queries a second by model and case."""
    cases: dict[str, list[dict]] = {}
    for row in results["rows"]:
        if row["status"] == "ok":
            cases.setdefault(row["case"], []).append(row)
    if not cases:
        return []
    heights = [len(found) + 0.8 for found in cases.values()]
    size = (9, 1.1 + 0.3 * sum(heights))
    figure, grid = plt.subplots(len(cases), 1, figsize=size, height_ratios=heights, squeeze=False, layout="constrained")
    for axes, (case, found) in zip(grid[:, 0], cases.items(), strict=True):
        bars(axes, found, "queries_per_second", 1e-6, "{:.2f}")
        axes.set_title(case, fontsize=9, loc="left", fontweight="bold")
    grid[-1, 0].set_xlabel("million queries a second", fontsize=9)
    figure.suptitle(f"A training step\n{caption(results)}", fontsize=10)
    path = folder / "step.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path]


def bars(axes: Axes, found: list[dict], column: str, scale: float, text: str) -> None:
    """A bar a row."""
    values = [row[column] * scale for row in found]
    axes.barh(range(len(found)), values, color=[OURS if row["ours"] else PAPER for row in found])
    for place, value in enumerate(values):
        axes.text(value, place, f"  {text.format(value)}", va="center", fontsize=8)
    axes.set_yticks(range(len(found)), [row["implementation"] for row in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(values))
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def against_peers(panels: Sequence[tuple[str, list[dict]]], where: str, path: Path, description: str) -> None:
    """Bars of forward and backward time, a panel per (title, rows of a case): jfi, then its fastest peers.

    The PNG carries `description`.
    """
    height = 1.0 + 0.27 * sum(min(len(rows), SHOWN) + 1.4 for _, rows in panels)
    heights = [min(len(rows), SHOWN) + 0.4 for _, rows in panels]
    figure, grid = plt.subplots(len(panels), 1, figsize=(8.4, height), height_ratios=heights, layout="constrained")
    for axes, (title, rows) in zip(grid, panels, strict=True):
        rows = sorted(
            (row for row in rows if row.get("forward_backward_us")), key=lambda row: row["forward_backward_us"]
        )
        mine = [row for row in rows if row["implementation"] == "jfi"]
        rows = (mine + [row for row in rows if not row["ours"]])[:SHOWN]
        for place, row in enumerate(rows):
            colour = OURS if row["ours"] else PAPER
            forward, both = row["forward_us"] / 1e3, row["forward_backward_us"] / 1e3
            axes.barh(place, forward, color=colour)
            axes.barh(place, both - forward, left=forward, color=colour, alpha=0.45)
            axes.text(both, place, f"  {both:.2f} ms", va="center", fontsize=9)
        axes.set_yticks(range(len(rows)), [row["implementation"] for row in rows], fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(row["forward_backward_us"] for row in rows) / 1e3)
        axes.tick_params(axis="x", labelsize=8)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title, fontsize=10, loc="left", fontweight="bold")
    grid[-1].set_xlabel(f"ms; dark: forward, light: backward. {where}", fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Description": description})
    plt.close(figure)


def serving_state(results: dict, folder: Path) -> list[Path]:
    """serving_state.png: latency with one client and requests a second with several, by way to send a history."""
    found = [row for row in results["rows"] if "history" in row]
    most = max((row["clients"] for row in found), default=0)
    if most < 2:
        return []
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for axes, clients, column, scale, title in (
        (panels[0], 1, "p50_us", 1e-3, "median latency, 1 client, ms"),
        (panels[1], most, "requests_per_second", 1, f"requests a second, {most} clients"),
    ):
        for number, way in enumerate(dict.fromkeys(row["way"] for row in found)):
            rows = [row for row in found if (row["way"], row["clients"]) == (way, clients)]
            own = sorted((row["history"], row[column] * scale) for row in rows)
            if own:
                colour = (PAPER, PEERS[0], OURS, PEERS[2])[number]
                axes.plot(*zip(*own, strict=True), color=colour, marker=MARKERS[number], markersize=4, label=way)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(sorted({row["history"] for row in found}))
        axes.set_xlabel("events of a history")
        axes.set_title(title, fontsize=10)
        axes.grid(True, which="major", alpha=0.3)
    panels[0].legend(frameon=False, fontsize=9)
    figure.suptitle(f"Requests of 1,000 candidates\n{caption(results)}", fontsize=10)
    path = folder / "serving_state.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path]


DRAW: dict[str, Callable[[dict, Path], list[Path]]] = {
    "lengths": lengths,
    "self_lengths": self_lengths,
    "table1": table1,
    "rows": rows,
    "step": step,
    "timeline": timeline,
    "serving_state": serving_state,
}
