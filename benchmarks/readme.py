"""The README's table and figure and the tables of docs/, from committed results: ``python -m benchmarks.readme``.

In the Markdown files a table is between ``<!-- table: NAME -->`` and ``<!-- end -->``; NAME is a key of `TABLES`.
"""

import argparse
import hashlib
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import dwell_page, figures, report, sid_tables, state_page, table
from benchmarks.quality import cost, semantic_ids
from benchmarks.quality import page as quality
from benchmarks.quality.tables import TABLES as QUALITY_TABLES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = (
    "README.md",
    "docs/dynamic_histories.md",
    "docs/performance.md",
    "docs/quality.md",
    "docs/scaling.md",
    "docs/semantic_ids.md",
    "docs/serving.md",
)
#: The GPU of the README's figures.
DEVICE = "h200"
FIGURE = RESULTS / DEVICE / "speed.png"
#: The cases of `benchmarks.headline` by name, and what they are; the first four are drawn.
HEADLINES = {
    "B=1024 N=4096 D=128 T=1 bfloat16, one read": "Target attention, 1,024 users, up to 4,096 events, D = 128",
    "B=64 N=16384 D=64 T=1 bfloat16, one read": "Target attention, 64 users, up to 16,384 events, D = 64",
    "B=64 N=2048 D=64 H=4 bfloat16": "Self-attention, 64 users, up to 2,048 events, 4 heads of 64",
    "B=4096 N=512 D=64 H=4 T=1 bfloat16": "Whole layer, 4,096 users, up to 512 events, D = 64, 4 heads",
    "B=16 N=8192 D=128 H=4 bfloat16, causal": "Causal self-attention, 16 users, up to 8,192 events, 4 heads of 128",
    "B=32 N=2048 D=128 H=2 T=4096 float16, full": "64 candidates of 64 query rows for 32 users of 2,048 events",
}
#: Columns of the README's table: a heading, and the implementations that it takes, the first that is there.
PEERS = {
    "torch varlen_attn": ("torch varlen_attn", "nn.Linear + varlen_attn"),
    "FlashAttention 4": ("FlashAttention 4",),
    "FBGEMM sll": ("sll, unfused", "sll, multi-head"),
}
#: Kernels for one of the shapes alone.
OTHERS = ("HSTU, no softmax", "IKBO, Triton")
POOLINGS = {"none": "none", "mean": "mean of the events", "sum": "sum of the events", "attention": "target attention"}


def read(name: str) -> dict:
    return report.read(RESULTS / f"{name}.json")


def headline_rows() -> list[tuple[str, dict[str, dict]]]:
    """Title and rows by implementation of each of `HEADLINES`."""
    found = table.by_case(read(f"{DEVICE}/headline"))
    return [(title, found[case]) for case, title in HEADLINES.items()]


def where() -> str:
    """GPU, versions and commit of the README's figures."""
    found = read(f"{DEVICE}/headline")["environment"]
    return f"{found['device']}, torch {found['versions']['torch']}, commit {found['commit']}"


def _times(row: dict) -> str:
    return table.cell(row) if row["status"] == "ok" else f"{report.microseconds(row['forward_us'])}, forward only"


def headlines() -> str:
    title = "microseconds, forward \\| forward + backward"
    lines = [[title, "jfi", "its kernels alone", *PEERS, "another", "gain over the best of these"]]
    for title, rows in headline_rows():
        mine = next(row for row in rows.values() if row["ours"])
        forward = mine["kernel_forward_us"]
        both = mine.get("kernel_forward_backward_us") or forward + mine["kernel_backward_us"]
        kernels = " \\| ".join(map(report.microseconds, (forward, both)))
        peers = [next((rows[name] for name in names if name in rows), None) for names in PEERS.values()]
        another = "".join(f"{_times(rows[name])} ({name})" for name in OTHERS if name in rows)
        cells = [table.cell(mine), kernels, *map(table.cell, peers), another, table.gains(rows, mine)]
        lines.append([title, *cells])
    note = (
        "Eager calls; kernels alone are replays of a CUDA graph. Target attention has value = key; jfi reads it once. "
        "The layer's peer is nn.Linear on keys and values, varlen_attn and an output projection. Lengths are uniform "
        f"from 0, but full in the last row. {where()}."
    )
    return f"{table.as_markdown(lines)}\n\n{note}"


def movielens() -> str:
    found = read("cpu/movielens_100k")
    lines = [["histories", "test AUC", "test NE", "AUC per user"]]
    for pooling, title in POOLINGS.items():
        cells = [found["summary"][pooling][f"test_{metric}"] for metric in ("auc", "ne", "user_auc")]
        lines.append([title, *(f"{cell['mean']:.4f} ± {cell['std']:.4f}" for cell in cells)])
    note = f"Mean and standard deviation over {len(found['seeds'])} seeds; commit {found['commit']}."
    return f"{table.as_markdown(lines)}\n\n{note}"


def scaling(name: str) -> str:
    """Times of a step by case, exchange and number of GPUs, all of one machine."""
    found = read(name)
    lines = [["histories", "exchange", "GPUs", "ms a step", "samples/s", "weak scaling"]]
    for row in found["rows"]:
        length, width = re.search(r"mean \d+", row["case"])[0], re.search(r"D=\d+", row["case"])[0]
        spent = [row[key] / 1e3 for key in ("step_us", "fastest_us", "slowest_us")]
        efficiency = "" if row["efficiency"] is None else f"{row['efficiency']:.2f}"
        spread = "{:.2f} ({:.2f} to {:.2f})".format(*spent)
        rate = f"{row['queries_per_second']:,.0f}"
        lines.append([f"{length}, {width}", row["exchange"], str(row["processes"]), spread, rate, efficiency])
    where = found["environment"]
    return f"{table.as_markdown(lines)}\n\n{where['device']}, commit {where['commit']}, {where['date'][:10]}."


def scaling_bytes() -> str:
    """Bytes that a process sends for each sample of a step, by case and exchange."""
    found = read("cpu/scaling_bytes")
    lines = [["histories", "exchange", "bytes a sample", "fraction of rows"]]
    for case in dict.fromkeys(row["case"] for row in found["rows"]):
        rows = sorted((row for row in found["rows"] if row["case"] == case), key=lambda row: -row["sent_bytes"])
        for row in rows:
            length, width, sent = re.search(r"mean \d+", case)[0], re.search(r"D=\d+", case)[0], row["sent_bytes"]
            share = f"1/{rows[0]['sent_bytes'] / sent:.3g}"
            exchange = row["exchange"].removeprefix("unique ")  # fbgemm finds unique ids on GPUs alone
            lines.append([f"{length}, {width}", exchange, f"{sent:,.0f}", share])
    where = found["environment"]
    return f"{table.as_markdown(lines)}\n\nTwo processes over gloo, commit {where['commit']}, {where['date'][:10]}."


def milliseconds(value: float) -> str:
    return f"{value / 1e3:,.0f}" if value >= 1e5 else f"{value / 1e3:.3g}"


def serving(name: str) -> str:
    """Latencies p50 | p99 in ms of the dense part, a column per kind of request."""
    found = read(name)
    by_case: dict[str, dict[str, dict]] = {}
    for row in found["rows"]:
        by_case.setdefault(row["case"], {})[row["measured"]] = row
    lines = [["p50 \\| p99, ms", *by_case]]
    for measured in ("dense part", "history read once a candidate"):
        rows = [rows[measured] for rows in by_case.values()]
        lines.append([measured, *(f"{milliseconds(row['p50_us'])} \\| {milliseconds(row['p99_us'])}" for row in rows)])
    where = found["environment"]
    threads = f", {where['threads']} threads"
    return f"{table.as_markdown(lines)}\n\n{where['device']}{threads}, commit {where['commit']}, {where['date'][:10]}."


TABLES: dict[str, Callable[[], str]] = {
    "headlines": headlines,
    "target": lambda: table.markdown(read("h200/target"), brief=True),
    "self": lambda: table.markdown(read("h200/self"), brief=True),
    "same bits": lambda: table.markdown(read("h200/same_bits")),
    "layer": lambda: table.markdown(read("h200/layer")),
    "rows": lambda: table.markdown(read("h200/rows")),
    "step": lambda: table.markdown(read("h200/step")),
    "table1": lambda: table.markdown(read("h200/table1"), brief=True),
    "cpu": lambda: table.markdown(read("cpu/cpu")),
    "movielens": movielens,
    "timeline h200": lambda: table.markdown(read("h200/timeline")),
    "timeline cpu": lambda: table.markdown(read("cpu/timeline")),
    "parts h200": lambda: table.markdown(read("h200/parts")),
    "parts cpu": lambda: table.markdown(read("cpu/parts")),
    "digits": lambda: sid_tables.digits(read("h200/digits")),
    "sid_step": lambda: sid_tables.steps(read("h200/sid_step")),
    "semantic ids": semantic_ids.page,
    "scaling": lambda: scaling("h200/scaling"),
    "scaling_captured": lambda: scaling("h200/scaling_captured"),
    "scaling_captured h100": lambda: scaling("h100/scaling_captured"),
    "scaling_bytes": scaling_bytes,
    "serving h200": lambda: serving("h200/serving"),
    "serving cpu": lambda: serving("cpu/serving"),
    "serving state h100": lambda: state_page.serving_state(read("h100/serving_state")),
    "serving state cpu": lambda: state_page.serving_state(read("cpu/serving_state")),
    "state parts h100": lambda: state_page.state_parts(read("h100/serving_state")),
    "state parts cpu": lambda: state_page.state_parts(read("cpu/serving_state")),
    "state writes h100": lambda: state_page.state_writes(read("h100/serving_state")),
    "state writes cpu": lambda: state_page.state_writes(read("cpu/serving_state")),
    "user state": lambda: state_page.user_state(read("cpu/user_state")),
    "dwell": lambda: dwell_page.table(dwell_page.read()),
    "quality": quality.overview,
    "quality attention": quality.gains,
    "quality cost": cost.page,
    **{f"quality {name}": partial(quality.quality, name) for name in QUALITY_TABLES},
    **{f"quality others {name}": partial(quality.others, name) for name in QUALITY_TABLES},
}


def made(name: str) -> str:
    """The table of that name, with its notes wrapped; a line where its results are not there."""
    try:
        lines = TABLES[name]().splitlines()
    except FileNotFoundError:
        return "Not measured yet."
    return "\n".join(line if line.startswith("|") else _wrap(line) for line in lines)


def _wrap(note: str) -> str:
    """The note in lines of at most 120 characters; none begins with a plus, which Markdown takes for a list."""
    return textwrap.fill(note.replace(" + ", "\0+\0"), 120).replace("\0", " ")


def with_tables(text: str) -> str:
    """`text` with every marked table made anew."""
    return re.sub(
        r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{made(found[2])}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


def draw(path: Path) -> None:
    """The README's figure: the four shapes, jfi and its fastest peers."""
    panels = [(title, list(rows.values())) for title, rows in headline_rows()[:4]]
    figures.against_peers(panels, where(), path, drawn_from())


def drawn_from() -> str:
    """What the figure carries to tell the results that it shows."""
    shown = {title: [row.get("forward_backward_us") for row in rows.values()] for title, rows in headline_rows()}
    return hashlib.sha256(f"{where()} {shown}".encode()).hexdigest()


def main() -> None:
    argparse.ArgumentParser("python -m benchmarks.readme", description=__doc__.splitlines()[0]).parse_args()
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text()))
        print(f"updated {page}")
    draw(FIGURE)
    print(f"drew {FIGURE.relative_to(ROOT)}")
    if dwell_page.RESULTS.exists():
        dwell_page.draw(dwell_page.read())
        print(f"drew {dwell_page.PICTURE.relative_to(ROOT)}")
    for results in sorted(RESULTS.glob("*/serving_state.json")):
        for picture in figures.serving_state(read(f"{results.parent.name}/serving_state"), results.parent):
            print(f"drew {picture.relative_to(ROOT)}")
    for picture in (semantic_ids.draw(), cost.draw()):
        if picture is not None:
            print(f"drew {picture.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
