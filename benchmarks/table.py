"""Print a results file as a Markdown table, for README: ``python -m benchmarks.table results/h200/target.json``."""

import argparse
from pathlib import Path

from benchmarks import report


def cell(row: dict | None) -> str:
    if row is None:
        return ""
    if row["status"] not in ("ok", "forward only", "wrong gradient"):
        return row["status"]
    both = row.get("forward_backward_us")
    return f"{report.microseconds(row['forward_us'])} \\| {report.microseconds(both) if both else 'fails'}"


#: Forward, both passes, and both with the backward on the calling thread, which GPUs alone are asked for.
COLUMNS = ("forward_us", "forward_backward_us", "one_thread_us")
#: What the table of self-attention compares with one by one: a heading, and how the peers' names begin.
SELF_PEERS = {"varlen_attn": "torch varlen_attn", "padded SDPA": "padded SDPA", "dense": "dense"}


def best(rows: dict[str, dict], column: str, named: str = "") -> dict | None:
    """The row of the fastest peer, of those whose name begins so."""
    peers = [row for name, row in rows.items() if name.startswith(named) and not row["ours"] and row.get(column)]
    return min(peers, key=lambda row: row[column], default=None)


def best_cell(rows: dict[str, dict]) -> str:
    peers = [(best(rows, column), column) for column in ("forward_us", "forward_backward_us")]
    return " \\| ".join(
        f"{report.microseconds(peer[column])} ({peer['implementation']})" if peer else "-" for peer, column in peers
    )


def gain(rows: dict[str, dict], mine: dict, column: str, named: str = "") -> str:
    """How many times as fast as the best peer, of those whose name begins so."""
    peer, own = best(rows, column, named), mine.get(column)
    return f"{peer[column] / own:.1f}x" if peer and own else "-"


def gains(rows: dict[str, dict], mine: dict, named: str = "") -> str:
    columns = COLUMNS if "one_thread_us" in mine else COLUMNS[:2]
    return " \\| ".join(gain(rows, mine, column, named) for column in columns)


def rates(mine: dict) -> str:
    """Useful TFLOP/s, forward and in both passes."""
    parts = [mine.get("forward_tflops"), mine.get("forward_backward_tflops")]
    return " \\| ".join("-" if part is None else f"{part:.0f}" for part in parts)


def memory(mine: dict) -> str:
    """Of a forward, and how much that is of output and log-sum-exp."""
    if "memory_forward_mb" not in mine:
        return "-"
    return f"{mine['memory_forward_mb']:.0f} ({mine['memory_forward_mb'] / mine['floor_memory_forward_mb']:.2f})"


def efficiency(mine: dict) -> str:
    """Floor over kernel time, forward and backward."""
    parts = [mine.get("efficiency_forward"), mine.get("efficiency_backward")]
    return " \\| ".join("-" if part is None else f"{part:.2f}" for part in parts)


def ratio(peer: dict | None, mine: dict, column: str) -> str:
    return f"{peer[column] / mine[column]:.1f}x" if peer and column in peer and column in mine else "-"


def training_memory(row: dict | None) -> str:
    """Of both passes, and how many times the gradient of the history that is."""
    if row is None or "memory_training_mb" not in row:
        return "-"
    return f"{row['memory_training_mb']:.0f} ({row['memory_training_mb'] / row['history_mb']:.2f})"


def layer_lines(cases: dict[str, dict[str, dict]]) -> list[list[str]]:
    """The layer and its one baseline."""
    lines = [["case", "jfi", "baseline", "eager", "one thread", "CUDA graph", "MB, jfi", "MB, baseline"]]
    for case, rows in cases.items():
        mine = next(row for row in rows.values() if row["ours"])
        peer = next((row for row in rows.values() if not row["ours"]), None)
        gained = [ratio(peer, mine, column) for column in (*COLUMNS[1:], "kernel_forward_backward_us")]
        lines.append([case, cell(mine), cell(peer), *gained, training_memory(mine), training_memory(peer)])
    return lines


def step_lines(cases: dict[str, dict[str, dict]]) -> list[list[str]]:
    """A line a model."""
    lines = [["case", "model", "ms", "queries/s", "MB", "against padded: speed, MB", "against mean: speed, MB"]]
    for case, rows in cases.items():
        for name, row in rows.items():
            if row["status"] != "ok":
                lines.append([case, name, row["status"], "-", "-", "-", "-"])
                continue
            cells = [f"{row['step_us'] / 1e3:.2f}", f"{row['queries_per_second']:,.0f}", f"{row['peak_mb']:.0f}"]
            for peer in ("padded", "mean"):
                speed, memory = row.get(f"speed_over_{peer}"), row.get(f"memory_over_{peer}")
                cells.append(f"{speed:.2f}x, {memory:.2f}x" if speed else "-")
            lines.append([case, name, *cells])
    return lines


def operator_lines(cases: dict[str, dict[str, dict]], brief: bool, of_self: bool) -> list[list[str]]:
    """Every implementation, or in brief jfi and the best peer."""
    names = list(dict.fromkeys(name for rows in cases.values() for name in rows))
    timed = any("efficiency_forward" in row for rows in cases.values() for row in rows.values())
    shown = ["jfi", "best peer"] if brief else names
    columns = ["case", *shown, *(["floor / kernels"] if timed else []), "against the best peer"]
    if of_self:
        columns += [*(f"against {peer}" for peer in SELF_PEERS), "useful TFLOP/s", "MB, forward"]
    lines = [columns]
    for case, rows in cases.items():
        mine = next(row for row in rows.values() if row["ours"])
        cells = [case, *([cell(mine), best_cell(rows)] if brief else [cell(rows.get(name)) for name in names])]
        cells += [efficiency(mine)] if timed else []
        cells.append(gains(rows, mine))
        if of_self:
            cells += [*(gains(rows, mine, named) for named in SELF_PEERS.values()), rates(mine), memory(mine)]
        lines.append(cells)
    return lines


def markdown(results: dict, brief: bool = False) -> str:
    """A line a case, or of the suite "step" a line a model; "layer" and "step" are brief as they are."""
    cases: dict[str, dict[str, dict]] = {}
    for row in results["rows"]:
        if row["headline"]:
            cases.setdefault(row["case"], {})[row["implementation"]] = row
    suite = results["rows"][0].get("suite")
    unit = "Microseconds, eager, forward \\| forward + backward"
    one_thread = "with the backward on the calling thread, as the example trains"
    if suite == "step":
        lines, unit = step_lines(cases), "MB above model and optimiser"
    elif suite == "layer":
        lines = layer_lines(cases)
        unit += (
            f"; gains in both passes, 'one thread' {one_thread}; MB above the inputs, and times the history's gradient"
        )
    else:
        lines = operator_lines(cases, brief, of_self=suite == "self")
    if suite != "layer" and any("one_thread_us" in row for row in results["rows"]):
        unit += f"; gains forward \\| forward + backward \\| the same {one_thread}"
    rule = "|---" * len(lines[0]) + "|"
    rows = ["| " + " | ".join(cells) + " |" for cells in lines]
    where = results["environment"]
    versions = ", ".join(f"{name} {found}" for name, found in where["versions"].items())
    speed = where["copy_bytes_per_second"]
    measured = f"{where['device']}, {versions}, commit {where['commit']}, {where['date'][:10]}"
    measured += f"; copy {speed / 1e12:.2f} TB/s" if speed else f", {where['threads']} threads"
    return "\n".join([rows[0], rule, *rows[1:], "", f"{unit}. {measured}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--brief", action="store_true", help="jfi and the best peer alone")
    options = parser.parse_args()
    try:
        results = report.read(options.results)
    except (OSError, ValueError) as error:
        parser.error(f"{options.results}: {error}")
    if not all("headline" in row for row in results.get("rows", [{}])):
        parser.error(f"{options.results} is no results file of python -m benchmarks")
    print(markdown(results, options.brief))


if __name__ == "__main__":
    main()
