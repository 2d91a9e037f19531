"""Measure jfi beside the peers that are installed, write the results and draw them."""

import argparse
import importlib
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

from benchmarks import figures, measure, report
from benchmarks.run import Rates, run

#: The module of each suite, imported when its turn comes: some need TorchRec, and the others do without.
GPU_SUITES = {
    "target": "target",
    "table1": "table1",
    "lengths": "lengths",
    "self": "self_attention",
    "self_lengths": "self_lengths",
    "layer": "layer",
    "step": "training_step",
}
SUITES = GPU_SUITES | {"cpu": "cpu"}
SECONDS, QUICK_SECONDS = 0.25, 0.06  # on one figure of a GPU
SUITE_SECONDS = {"self": 0.1, "self_lengths": 0.1, "layer": 0.1, "step": 0.6}  # of calls that take milliseconds
CPU_SECONDS, QUICK_CPU_SECONDS = 2.0, 0.2  # on one column of a case, all implementations together


def suites_of(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SUITES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SUITES)}")
    return names


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("--only", type=suites_of, metavar="SUITE,...", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter measurements")
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results/<device>, with -quick)"
    )
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    return parser.parse_args()


def load(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{SUITES[name]}")


def importable(names: list[str]) -> list[str]:
    """The suites whose packages are installed; a line about any other."""
    kept = []
    for name in names:
        try:
            load(name)
            kept.append(name)
        except ImportError as error:
            print(f"{name}: not measured: {error}")
    return kept


def measured_rates(device: torch.device) -> Rates:
    if device.type == "cpu":
        return Rates()
    rates = Rates(measure.copy_bytes_per_second(), measure.matmul_flops_per_second())
    torch.cuda.empty_cache()
    print(f"copy {rates.copy / 1e12:.2f} TB/s, bfloat16 matrix product {rates.matmul / 1e12:.0f} TFLOP/s")
    return rates


def run_suite(name: str, device: torch.device, rates: Rates, where: dict, options: argparse.Namespace) -> None:
    start, rows = time.perf_counter(), []
    if device.type == "cuda":
        seconds = QUICK_SECONDS if options.quick else SUITE_SECONDS.get(name, SECONDS)
    else:
        seconds = QUICK_CPU_SECONDS if options.quick else CPU_SECONDS
    suite = load(name)
    for case in suite.cases(options.quick):
        measured = suite.run(case, device, seconds) if name == "step" else run(case, device, rates, seconds)
        for i, row in enumerate(measured):
            rows.append({"suite": name} | row)
            if i == 0:
                print(report.heading(rows[-1]))
            print(report.line(rows[-1]), flush=True)
        report.write(options.out, name, where, rows)  # after each case: what was measured is kept whatever comes
    if name in figures.DRAW:
        for path in figures.DRAW[name]({"environment": where, "rows": rows}, options.out):
            print(f"drew {path}")
    print(f"{name}: {time.perf_counter() - start:.0f} s, in {options.out}\n", flush=True)


def main() -> int:
    options = arguments()
    gpu = torch.cuda.is_available()
    names = options.only or (list(GPU_SUITES) if gpu else ["cpu"])
    if options.list:
        for name in importable(names):
            print(*(f"{name}: {case.name}" for case in load(name).cases(options.quick)), sep="\n")
        return 0
    if not gpu:
        if needy := [name for name in names if name != "cpu"]:
            print(f"error: no GPU here, for {', '.join(needy)}; --only cpu measures the CPU")
            return 2
        print("No GPU here: measuring the CPU implementations.")
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, for everyone
    for name in importable(names):
        device = torch.device("cuda" if gpu and name != "cpu" else "cpu")
        if device.type == "cpu":
            torch.set_num_threads(measure.CPU_THREADS)
        rates = measured_rates(device)
        where = report.environment(device, rates, options.commit)
        folder = report.folder_name(device) + ("-quick" if options.quick else "")  # beside whole results, not over them
        out = options.out or Path(__file__).parent / "results" / folder
        run_suite(name, device, rates, where, argparse.Namespace(**vars(options) | {"out": out}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
