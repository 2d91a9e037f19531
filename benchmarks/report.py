"""The environment of a run, its rows as JSON and CSV, and one printed line per row."""

import csv
import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
from pathlib import Path

import torch

from benchmarks.run import Rates

PACKAGES = ("torch", "triton", "fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly", "torchrec", "flash-attn-4")
#: Columns of the CSV that come first; whatever else a row has follows.
FIRST = ("suite", "case", "implementation", "status", "forward_us", "forward_backward_us")


def run_command(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def commit() -> str | None:
    root = Path(__file__).parent
    found = run_command("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changed = run_command(
        "git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", "../jfi", ":(glob)*.py"
    )
    return f"{found} with changes" if found and changed else found


def environment(device: torch.device, rates: Rates, revision: str | None) -> dict[str, object]:
    gpu = device.type == "cuda"
    driver = run_command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None
    return {
        "device": torch.cuda.get_device_name() if gpu else cpu_name(),
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda,
        "processor": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {package: found for package in PACKAGES if (found := version(package))},
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "copy_bytes_per_second": rates.copy,
        "matmul_flops_per_second": rates.matmul,
        "commit": revision or commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def folder_name(device: torch.device) -> str:
    """ "NVIDIA H200" -> "h200"; any CPU -> "cpu"."""
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def write(folder: Path, suite: str, where: dict[str, object], rows: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{suite}.json").write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")
    names = dict.fromkeys([*FIRST, *(name for row in rows for name in row)])
    with (folder / f"{suite}.csv").open("w", newline="") as file:
        names = [name for name in names if not any(isinstance(row.get(name), list) for row in rows)]
        writer = csv.DictWriter(file, names, restval="", extrasaction="ignore")  # a list is for the JSON alone
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def microseconds(value: float | None) -> str:
    """Three digits, and milliseconds from ten thousand on."""
    if value is None:
        return "-"
    return f"{value / 1e3:.1f} ms" if value >= 1e4 else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def line(row: dict) -> str:
    """What is printed of a row; a speed only where the result was right."""
    text = f"  {row['implementation']:24s}"
    if row["status"] not in ("ok", "forward only", "wrong gradient"):
        return f"{text}{row['status']}: {row['note']}"
    if "samples_per_second" in row:
        return text + from_the_table(row)
    if "table_step_us" in row:
        times = f"{row['table_step_us'] / 1e3:8.1f} ms a step, {row['over_smallest']:.2f}x the smallest table's"
        return f"{text}{times}, {row['distinct_rows']:,} distinct rows"
    if "part_step_us" in row:
        share = f", attention {row['attention_share']:.0%} of the kernels" if "attention_share" in row else ""
        times = f"{row['part_step_us'] / 1e3:8.2f} ms a step, {row['over_target_attention']:.2f}x target attention's"
        return f"{text}{times}, {row['rows_per_second']:,.0f} rows/s{share}"
    if "distinct_rows" in row:
        return text + read_by_id(row)
    if "step_us" in row:
        return text + step(row)
    text += f"{microseconds(row.get('forward_us')):>10s} |{microseconds(row.get('forward_backward_us')):>10s}"
    if "one_thread_us" in row:
        text += f" (one thread {microseconds(row['one_thread_us'])})"
    if "kernel_forward_us" in row:
        text += f"   kernels {microseconds(row['kernel_forward_us'])} ({row['efficiency_forward']:.2f})"
    if "kernel_backward_us" in row:
        text += f" + {microseconds(row['kernel_backward_us'])} ({row['efficiency_backward']:.2f})"
    if "kernel_forward_backward_us" in row:
        both = row["kernel_forward_backward_us"]
        text += f" | {microseconds(both)} ({row['efficiency_forward_backward']:.2f})"
    if "host_us" in row:
        text += f"   host {row['host_us']:.0f}"
    if "forward_tflops" in row:
        training = f"{row['forward_backward_tflops']:.3g}" if "forward_backward_tflops" in row else "-"
        text += f"   TFLOP/s {row['forward_tflops']:.3g} | {training}"
    if "memory_forward_mb" in row:
        training = f"{row['memory_training_mb']:.0f}" if "memory_training_mb" in row else "-"
        text += f"   MB {row['memory_forward_mb']:.1f} | {training}"
    return f"{text}   {row['status']}: {row['note']}" if row.get("note") else text


def step(row: dict) -> str:
    """A training step: speed and memory, and the kernels that take most of it."""
    text = f"{row['step_us'] / 1e3:8.2f} ms {row['queries_per_second']:12,.0f} queries/s {row['peak_mb']:8.0f} MB"
    if "kernel_count" in row:
        text += f"   {row['kernel_count']:.0f} kernels of {row['kernels_us'] / 1e3:.2f} ms"
        text += f", the step {row['step_over_kernels']:.2f} times that"
    for peer in ("padded", "mean", "jfi", "padded_captured"):
        if f"speed_over_{peer}" in row:
            text += f"   against {peer} {row[f'speed_over_{peer}']:.2f}x, memory {row[f'memory_over_{peer}']:.2f}x"
    if "summary" in row:
        text += f"\n      {row['summary']}"
    for kernel in row.get("kernels", []):
        text += f"\n      {kernel['us']:8.0f} us {kernel['calls']:6.1f} calls  {kernel['name'][:100]}"
    return text


def read_by_id(row: dict) -> str:
    """Kernels of look-up and attention, and of a whole step, each with the share that the least bytes would take."""
    text = f"{microseconds(row['kernel_forward_us'])} ({row['efficiency_forward']:.2f})"
    both = f"{microseconds(row['kernel_forward_backward_us'])} ({row['efficiency_forward_backward']:.2f})"
    text += f" | {both}   {row['peak_mb']:.0f} MB"
    for peer in ("fbgemm", "fbgemm_bfloat16"):
        if f"memory_over_{peer}" in row:
            speed = row[f"forward_backward_speed_over_{peer}"]
            text += f"   against {peer} {speed:.2f}x, memory {row[f'memory_over_{peer}']:.2f}x"
    return text


def from_the_table(row: dict) -> str:
    """Training from the table on: speed, and what a sample costs."""
    text = f"{row['samples_per_second']:12,.0f} samples/s, {row['loading_share']:4.0%} loading"
    if row.get("speed_over_sample"):
        text += f", {row['speed_over_sample']:.2f}x by sample"
    text += f"   a sample: {row['events_per_sample']:,.1f} events, {row['ids_per_sample']:,.1f} ids"
    text += f", {row['copied_bytes_per_sample']:,.0f} bytes copied"
    if row["peak_mb"] is not None:
        text += f"   {row['peak_mb']:,.0f} MB, {row['step_us'] / 1e3:.2f} ms a step without loading"
    return text


def heading(row: dict) -> str:
    text = f"{row['suite']}: {row['case']}"
    if row.get("floor_forward_us") is not None:
        floors = [row[name] for name in ("floor_forward_us", "floor_backward_us") if name in row]
        text += f"   (floors {' + '.join(map(microseconds, floors))} us)"
    return text
