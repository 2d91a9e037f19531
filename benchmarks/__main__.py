"""Measure jfi beside the peers that are installed, write the results and draw them."""

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from benchmarks import figures, measure, report
from benchmarks.run import Case, Rates, run

#: The module of each suite, imported when its turn comes: some need TorchRec, and the others do without.
GPU_SUITES = {
    "headline": "headline",
    "target": "target",
    "table1": "table1",
    "lengths": "lengths",
    "self": "self_attention",
    "self_lengths": "self_lengths",
    "same_bits": "same_bits",
    "layer": "layer",
    "rows": "rows",
    "digits": "digits",
    "step": "training_step",
    "timeline": "timeline",
    "parts": "model_parts",
}
CPU_SUITES = {"cpu": "cpu", "timeline": "timeline", "table_size": "table_size", "parts": "model_parts"}
SUITES = GPU_SUITES | CPU_SUITES
SECONDS, QUICK_SECONDS = 0.25, 0.06  # on one figure of a GPU
SUITE_SECONDS = {
    "headline": 0.1,
    "self": 0.1,
    "self_lengths": 0.1,
    "same_bits": 0.1,
    "layer": 0.1,
    "step": 0.6,
    "timeline": 0.1,
}  # of calls that take milliseconds
CPU_SECONDS, QUICK_CPU_SECONDS = 2.0, 0.2  # on one column of a case, all implementations together


CPU_THREADS = {"cpu": measure.CPU_THREADS, "timeline": 2, "table_size": 1, "parts": 1}


def suites_of(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SUITES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SUITES)}")
    return names


def movielens(text: str) -> Path:
    for name in ("ml-100k.inter", "ml-100k.item"):
        if not (Path(text) / name).is_file():
            raise argparse.ArgumentTypeError(f"{text} has no file {name}")
    return Path(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("--only", type=suites_of, metavar="SUITE,...", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter measurements")
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results/<device>, with -quick)"
    )
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument(
        "--movielens", type=movielens, metavar="FOLDER", help="of ml-100k.inter and ml-100k.item, for timeline on a CPU"
    )
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    return parser.parse_args()


def load(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{SUITES[name]}")


def cases_of(name: str, options: argparse.Namespace) -> Sequence:
    """The cases of a suite: a `Case` of an operator, or one that the suite's own `run` takes."""
    own = {"movielens": options.movielens} if name == "timeline" else {}
    return load(name).cases(options.quick, **own)


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
    for case in cases_of(name, options):
        if isinstance(case, Case):
            measured = run(case, device, rates, seconds)
        else:
            own = {"rates": rates} if name in ("rows", "digits") else {}
            measured = load(name).run(case, device, seconds, **own)
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
    names = options.only or list(GPU_SUITES if gpu else CPU_SUITES)
    if options.list:
        for name in importable(names):
            print(*(f"{name}: {case.name}" for case in cases_of(name, options)), sep="\n")
        return 0
    if not gpu:
        if needy := [name for name in names if name not in CPU_SUITES]:
            print(f"error: no GPU here, for {', '.join(needy)}; --only {','.join(CPU_SUITES)} measures the CPU")
            return 2
        print("No GPU here: measuring the CPU implementations.")
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, for everyone
    for name in importable(names):
        device = torch.device("cuda" if gpu and name in GPU_SUITES else "cpu")
        if device.type == "cpu":
            torch.set_num_threads(CPU_THREADS[name])
        rates = measured_rates(device)
        where = report.environment(device, rates, options.commit)
        folder = report.folder_name(device) + ("-quick" if options.quick else "")  # beside whole results, not over them
        out = options.out or Path(__file__).parent / "results" / folder
        run_suite(name, device, rates, where, argparse.Namespace(**vars(options) | {"out": out}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
