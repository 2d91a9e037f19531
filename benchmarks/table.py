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
SELF_PEERS = {
    "varlen_attn": "torch varlen_attn",
    "FlashAttention 4": "FlashAttention 4",
    "padded SDPA": "padded SDPA",
    "dense": "dense",
}


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


def rates(mine: dict, *columns: str) -> str:
    """Useful TFLOP/s."""
    parts = [mine.get(column) for column in columns]
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


#: What a model of suite "step" is compared with, by the name in the columns.
STEP_PEERS = {"padded": "padded", "mean": "mean", "jfi": "jfi", "padded_captured": "captured padded"}


def step_lines(cases: dict[str, dict[str, dict]]) -> list[list[str]]:
    """A line a model; peers and kernels that no model of the file has are left out."""
    everything = [row for rows in cases.values() for row in rows.values()]
    peers = [peer for peer in STEP_PEERS if any(f"speed_over_{peer}" in row for row in everything)]
    profiled = any("kernel_count" in row for row in everything)
    titles = [*["kernels", "ms of kernels", "step / kernels"] * profiled]
    titles += [f"against {STEP_PEERS[peer]}: speed, MB" for peer in peers]
    lines = [["case", "model", "ms", "queries/s", "MB", *titles]]
    for case, rows in cases.items():
        for name, row in rows.items():
            if row["status"] != "ok":
                lines.append([case, name, row["status"], *["-"] * (2 + len(titles))])
                continue
            cells = [f"{row['step_us'] / 1e3:.2f}", f"{row['queries_per_second']:,.0f}", f"{row['peak_mb']:.0f}"]
            if profiled:
                cells += [f"{row['kernel_count']:.0f}", f"{row['kernels_us'] / 1e3:.2f}"]
                cells.append(f"{row['step_over_kernels']:.2f}")
            for peer in peers:
                speed, memory = row.get(f"speed_over_{peer}"), row.get(f"memory_over_{peer}")
                cells.append(f"{speed:.2f}x, {memory:.2f}x" if speed else "-")
            lines.append([case, name, *cells])
    return lines


def part_lines(cases: dict[str, dict[str, dict]]) -> list[list[str]]:
    """A line a part of the model; on a GPU with its kernels."""
    everything = [row for rows in cases.values() for row in rows.values()]
    profiled = any("attention_share" in row for row in everything)
    lines = [["part", "ms", "rows/s", "step / target attention's", *["attention, of the kernels' time"] * profiled]]
    for rows in cases.values():
        for name, row in rows.items():
            cells = [f"{row['part_step_us'] / 1e3:.2f}", f"{row['rows_per_second']:,.0f}"]
            cells.append(f"{row['over_target_attention']:.2f}")
            if profiled:
                cells.append(f"{row['attention_share']:.0%}")
            lines.append([name, *cells])
    return lines


def rows_lines(cases: dict[str, dict[str, dict]]) -> list[list[str]]:
    """Returns the table of rows by id beside fbgemm's."""
    title = "B, mean events, D; table; ids"
    lines = [[title, "way", "floor", "kernels", "floor / kernels", "MB", "against float32: speed, MB", "bfloat16"]]
    columns = ("forward", "forward_backward")
    for case, rows in cases.items():
        for name, row in rows.items():
            cells = [case, name, " \\| ".join(report.microseconds(row[f"floor_{column}_us"]) for column in columns)]
            if row["status"] != "ok":
                lines.append([*cells, row["status"], *["-"] * (len(lines[0]) - 4)])
                continue
            cells.append(" \\| ".join(report.microseconds(row[f"kernel_{column}_us"]) for column in columns))
            cells.append(" \\| ".join(f"{row[f'efficiency_{column}']:.2f}" for column in columns))
            cells.append(f"{row['peak_mb']:.0f}")
            for peer in ("fbgemm", "fbgemm_bfloat16"):
                speeds = [row.get(f"{column}_speed_over_{peer}") for column in columns]
                text = " \\| ".join(f"{speed:.2f}x" for speed in speeds if speed)
                cells.append(f"{text}, {row[f'memory_over_{peer}']:.2f}x" if text else "-")
            lines.append(cells)
    return lines


def training_lines(cases: dict[str, dict[str, dict]]) -> list[list[str]]:
    """A line for each way of making batches."""
    costs = [f"{what} a sample" for what in ("events", "ids", "bytes copied")]
    lines = [["case", "batches", "samples/s", "against by sample", "loading", *costs, "MB", "ms, loaded"]]
    for case, rows in cases.items():
        for name, row in rows.items():
            if row["status"] != "ok":
                lines.append([case, name, row["status"], *["-"] * 7])
                continue
            speed, step = row.get("speed_over_sample"), row.get("step_us")
            cells = [f"{row['samples_per_second']:,.0f}", f"{speed:.2f}x" if speed else "-"]
            cells += [f"{row['loading_share']:.0%}", f"{row['events_per_sample']:,.1f}"]
            cells += [f"{row['ids_per_sample']:,.1f}", f"{row['copied_bytes_per_sample']:,.0f}"]
            cells += ["-" if row["peak_mb"] is None else f"{row['peak_mb']:,.0f}", f"{step / 1e3:.2f}" if step else "-"]
            lines.append([case, name, *cells])
    return lines


def kernels(row: dict) -> list[tuple[float, float] | None]:
    """Microseconds and useful TFLOP/s of the kernels, forward and both passes; None where they were not measured."""
    found: dict[str, tuple[float, float]] = {}
    for column in ("forward", "backward", "forward_backward"):
        if f"kernel_{column}_us" in row:
            found[column] = row[f"kernel_{column}_us"], row[f"kernel_{column}_tflops"]
    if {"forward", "backward"} <= found.keys():
        (forward, rate), (backward, other) = found["forward"], found["backward"]
        whole = forward + backward
        found["forward_backward"] = whole, (forward * rate + backward * other) / whole
    return [found.get("forward"), found.get("forward_backward")]


def timed_lines(cases: dict[str, dict[str, dict]]) -> list[list[str]]:
    """Jagged attention by time: a line for what targets see, beside the same shape with times and without a bias."""
    rows = {case: next(iter(found.values())) for case, found in cases.items()}
    older = {case.removesuffix(row["kind"]): kernels(row) for case, row in rows.items() if row["kind"] == "older"}
    lines = [["case", "kernels", "useful TFLOP/s", "time over older without bias"]]
    for case, row in rows.items():
        own, plain = kernels(row), older.get(case.removesuffix(row["kind"]), [None, None])
        cells = [
            [report.microseconds(one[0] if one else None) for one in own],
            [f"{one[1]:.0f}" if one else "-" for one in own],
            [f"{one[0] / other[0]:.2f}" if one and other else "-" for one, other in zip(own, plain, strict=True)],
        ]
        note = "" if row["status"] == "ok" else f" ({row['status']})"
        lines.append([case + note, *(" \\| ".join(pair) for pair in cells)])
    return lines


def timeline_tables(cases: dict[str, dict[str, dict]]) -> list[list[list[str]]]:
    """Training and attention, those of the two that were measured."""
    is_training = {case: any("batching" in row for row in rows.values()) for case, rows in cases.items()}
    training, timed = ({case: cases[case] for case in cases if is_training[case] == one} for one in (True, False))
    return [*([training_lines(training)] if training else []), *([timed_lines(timed)] if timed else [])]


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
    """Self-attention against each kind of peer, its useful operations, also of the kernels alone, and its memory."""
    timed = any("kernel_forward_tflops" in row for rows in cases.values() for row in rows.values())
    titles = [
        *(f"against {peer}" for peer in SELF_PEERS),
        "useful TFLOP/s",
        *(["kernels, forward \\| backward"] * timed),
    ]
    lines = [["case", *titles, "MB, forward"]]
    for case, rows in cases.items():
        mine = next(row for row in rows.values() if row["ours"])
        cells = [*(gains(rows, mine, named) for named in SELF_PEERS.values())]
        cells.append(rates(mine, "forward_tflops", "forward_backward_tflops"))
        cells += [rates(mine, "kernel_forward_tflops", "kernel_backward_tflops")] * timed
        lines.append([case, *cells, memory(mine)])
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
    """A line per case, in suites "rows", "step" and "timeline" a line per row; these and "layer" have one form."""
    cases, suite = by_case(results), results["rows"][0].get("suite")
    unit = "Microseconds, eager, forward \\| forward + backward"
    if suite == "step":
        tables, unit = [step_lines(cases)], "MB above model and optimizer"
    elif suite == "parts":
        tables = [part_lines(cases)]
        unit = results["rows"][0]["case"]
    elif suite == "rows":
        tables = [rows_lines(cases)]
        unit = "Microseconds of kernels, forward \\| forward + backward + update; MB above model and optimizer"
    elif suite == "timeline":
        tables = timeline_tables(cases)
        unit = "MB above model and optimizer; ms, loaded: a step whose batch is on the device"
        if any("kind" in row for row in results["rows"]):
            unit += "; kernels: microseconds, forward \\| forward + backward"
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
