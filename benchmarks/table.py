"""Print a results file as Markdown tables: ``python -m benchmarks.table benchmarks/results/h200/target.json``."""

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


#: Forward, and both passes.
COLUMNS = ("forward_us", "forward_backward_us")
#: Peers that self-attention is compared with one by one: a heading, and the prefix of their names.
SELF_PEERS = {"varlen_attn": "torch varlen_attn", "padded SDPA": "padded SDPA", "dense": "dense"}


def best(rows: dict[str, dict], column: str, named: str = "") -> dict | None:
    """The row of the fastest peer whose name starts with `named`."""
    peers = [row for name, row in rows.items() if name.startswith(named) and not row["ours"] and row.get(column)]
    return min(peers, key=lambda row: row[column], default=None)


def best_cell(rows: dict[str, dict]) -> str:
    peers = [(best(rows, column), column) for column in COLUMNS]
    return " \\| ".join(
        f"{report.microseconds(peer[column])} ({peer['implementation']})" if peer else "-" for peer, column in peers
    )


def gain(rows: dict[str, dict], mine: dict, column: str, named: str = "") -> str:
    """Time of the best peer whose name starts with `named`, over the time of jfi."""
    peer, own = best(rows, column, named), mine.get(column)
    return f"{peer[column] / own:.1f}x" if peer and own else "-"


def gains(rows: dict[str, dict], mine: dict, named: str = "") -> str:
    return " \\| ".join(gain(rows, mine, column, named) for column in COLUMNS)


def rates(mine: dict) -> str:
    """Useful TFLOP/s, forward and both passes."""
    parts = [mine.get("forward_tflops"), mine.get("forward_backward_tflops")]
    return " \\| ".join("-" if part is None else f"{part:.0f}" for part in parts)


def memory(mine: dict) -> str:
    """Peak memory of a forward, and its ratio to output and log-sum-exp."""
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
    """Peak memory of both passes, and its ratio to the gradient of the history."""
    if row is None or "memory_training_mb" not in row:
        return "-"
    return f"{row['memory_training_mb']:.0f} ({row['memory_training_mb'] / row['history_mb']:.2f})"


def layer_lines(cases: dict[str, dict[str, dict]]) -> list[list[str]]:
    """The layer and its one baseline."""
    columns = ("forward_backward_us", "one_thread_us", "kernel_forward_backward_us")
    gain_columns = [f"gain, {way}" for way in ("eager", "one thread", "CUDA graph")]
    lines = [["case", "jfi", "baseline", *gain_columns, "MB, jfi", "MB, baseline"]]
    for case, rows in cases.items():
        mine = next(row for row in rows.values() if row["ours"])
        peer = next((row for row in rows.values() if not row["ours"]), None)
        gained = [ratio(peer, mine, column) for column in columns]
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


def operator_lines(cases: dict[str, dict[str, dict]], brief: bool) -> list[list[str]]:
    """Every implementation, or in brief jfi and the best peer."""
    names = list(dict.fromkeys(name for rows in cases.values() for name in rows))
    everything = [row for rows in cases.values() for row in rows.values()]
    timed, threaded = (any(key in row for row in everything) for key in ("efficiency_forward", "one_thread_us"))
    shown = ["jfi", "best peer"] if brief else names
    lines = [["case", *shown, "gain", *(["gain, one thread"] * threaded), *(["floor / kernels"] * timed)]]
    for case, rows in cases.items():
        mine = next(row for row in rows.values() if row["ours"])
        cells = [case, *([cell(mine), best_cell(rows)] if brief else [cell(rows.get(name)) for name in names])]
        cells.append(gains(rows, mine))
        cells += [gain(rows, mine, "one_thread_us")] * threaded + [efficiency(mine)] * timed
        lines.append(cells)
    return lines


def peer_lines(cases: dict[str, dict[str, dict]]) -> list[list[str]]:
    """Self-attention against each kind of peer, its useful operations and its memory."""
    lines = [["case", *(f"against {peer}" for peer in SELF_PEERS), "useful TFLOP/s", "MB, forward"]]
    for case, rows in cases.items():
        mine = next(row for row in rows.values() if row["ours"])
        lines.append([case, *(gains(rows, mine, named) for named in SELF_PEERS.values()), rates(mine), memory(mine)])
    return lines


def as_markdown(lines: list[list[str]]) -> str:
    rows = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]])


def by_case(results: dict) -> dict[str, dict[str, dict]]:
    """The headline rows: by case, then by implementation."""
    cases: dict[str, dict[str, dict]] = {}
    for row in results["rows"]:
        if row["headline"]:
            cases.setdefault(row["case"], {})[row["implementation"]] = row
    return cases


def measured(results: dict) -> str:
    """Where and with what a file was measured."""
    where = results["environment"]
    versions = ", ".join(f"{name} {found}" for name, found in where["versions"].items())
    speed = where["copy_bytes_per_second"]
    text = f"{where['device']}, {versions}, commit {where['commit']}, {where['date'][:10]}"
    threads = f"{where['threads']} thread" + ("s" if where["threads"] > 1 else "")
    return f"{text}; copy {speed / 1e12:.2f} TB/s" if speed else f"{text}, {threads}"


def markdown(results: dict, brief: bool = False) -> str:
    """A line per case, or in suite "step" a line per model; "layer" and "step" have one form."""
    cases, suite = by_case(results), results["rows"][0].get("suite")
    unit = "Microseconds, eager, forward \\| forward + backward"
    if suite == "step":
        tables, unit = [step_lines(cases)], "MB above model and optimizer"
    elif suite == "layer":
        tables = [layer_lines(cases)]
        unit += "; gains in both passes; MB above the inputs, in brackets its ratio to the history's gradient"
    else:
        tables = [operator_lines(cases, brief), *([peer_lines(cases)] if suite == "self" else [])]
        unit += "; gain: time of the best peer over time of jfi"
    if any("one_thread_us" in row for row in results["rows"]):
        unit += "; one thread: both passes, the backward on the calling thread as in `jfi.training`"
    return "\n\n".join([*map(as_markdown, tables), f"{unit}. {measured(results)}."])


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
