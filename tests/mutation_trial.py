"""Puts single faults into the code (mutants.py) and runs the tests that reach them: how many does the suite catch?

    python tests/mutation_trial.py map                      which test reaches which line, from a run under coverage
    python tests/mutation_trial.py run --count 200 --seed 1 --out trial.json
    python tests/mutation_trial.py run --again trial.json   its faults once more, with --missed those not caught

On a quiet machine `map` takes some 10 minutes and those of tests/ops, `run` some 5 s for a fault that is caught and up
to `--seconds` of tests for another. A process that has imported torch and the like, but no jfi, forks for every fault;
the child runs the fault's tests, quick ones first, in a copy of the tree, so that the processes which tests start have
the fault too. A fault is caught if a test fails, or does not end. At the end the tests that caught one must pass
without faults.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from mutants import FOLDERS, Mutant, draw, find_mutants

ROOT = Path(__file__).parents[1]
MAP = ROOT / "build" / "mutation"
TESTS = ["tests/data", "tests/training", "tests/follow", "tests/modules", "tests/cpu", "tests/serving", "tests/models"]
TESTS += ["tests/ops", "tests/history_policies", "tests/semantic_ids", "tests/baselines", "tests/integration"]
TESTS += ["tests/distributed", "tests/tables", "tests/cli"]
TESTS += [f"tests/test_{name}.py" for name in ("encoding", "encodings", "exit_codes", "file_writing", "lockstep")]
TESTS += [f"jfi/{folder}" for folder in (*FOLDERS, "models", "ops")]
_OTHERS = ("aiohttp.web", "duckdb", "hypothesis", "matplotlib.pyplot", "pyarrow.compute", "pyarrow.csv")
_OTHERS += ("pyarrow.json", "pyarrow.parquet", "torch.distributed.checkpoint", "torch.utils.tensorboard", "yaml")
_OTHERS += ("torchrec.distributed", "torchrec.quant", "triton.language")
_RC = """[run]
source = {root}/jfi
data_file = {folder}/data
parallel = true
patch = _exit
sigterm = true
context = {context}
"""
_CHILD = "import os, coverage\nif 'JFI_TEST' in os.environ: coverage.process_startup()\n"


# The run under coverage. This file is its pytest plugin, too.


def make_map(tests: list[str]) -> None:
    """Runs the tests under coverage; writes which tests reach a line, and what they cost."""
    shutil.rmtree(MAP, ignore_errors=True)
    MAP.mkdir(parents=True)
    for name, context in (("rc", ""), ("child_rc", "${JFI_TEST-}")):
        (MAP / name).write_text(_RC.format(root=ROOT, folder=MAP, context=context))
    (MAP / "sitecustomize.py").write_text(_CHILD)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", MAP)))
    environment = {**os.environ, "PYTHONPATH": paths, "COVERAGE_PROCESS_START": str(MAP / "child_rc")}
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={MAP / 'rc'}", "-m", "pytest", "-m", "not slow"]
    subprocess.run([*command, "-p", "mutation_trial", *tests], cwd=ROOT, env=environment, check=True)
    write_map()


def write_map() -> None:
    import coverage

    data = coverage.CoverageData(str(MAP / "data"))
    for file in MAP.glob("data.*"):
        part = coverage.CoverageData(str(file))
        with contextlib.suppress(coverage.exceptions.DataError):  # of a process that a test killed
            part.read()
            data.update(part)
    lines: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        found = data.contexts_by_lineno(file)
        lines[str(Path(file).relative_to(ROOT))] = {line: sorted(filter(None, tests)) for line, tests in found.items()}
    (MAP / "lines.json").write_text(json.dumps(lines))


def _enter(item: pytest.Item, phase: str) -> None:
    import coverage

    os.environ["JFI_TEST"] = context = f"{item.nodeid}|{phase}"
    coverage.Coverage.current().switch_context(context)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _enter(item, "setup")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _enter(item, "call")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.passed:
        with (MAP / "seconds").open("a") as file:
            file.write(json.dumps([report.nodeid, report.duration]) + "\n")


# The choice of tests.


class Choice:
    """The tests of a fault."""

    def __init__(self) -> None:
        self._lines = json.loads((MAP / "lines.json").read_text())
        self.seconds: dict[str, float] = defaultdict(float)
        for line in (MAP / "seconds").read_text().splitlines():
            test, seconds = json.loads(line)
            self.seconds[test] += seconds
        self._modules = defaultdict(list)
        for test in self.seconds:
            self._modules[test.split("::")[0]].append(test)

    def tests(self, mutant: Mutant) -> list[str]:
        """Those that reach the statement; if it runs on import only, those that reach anything in the file.

        What a fixture runs may be checked by every test of the module.
        """
        lines = self._lines.get(mutant.path, {})
        reached = {context for line in mutant.lines for context in lines.get(str(line), [])}
        if not reached:
            reached = {context for contexts in lines.values() for context in contexts}
        tests = set()
        for context in reached:
            test, phase = context.rsplit("|", 1)
            tests.update([test] if phase == "call" else self._modules[test.split("::")[0]])
        return self._order(tests & self.seconds.keys(), mutant.path.split("/")[1])

    def _order(self, tests: set[str], folder: str) -> list[str]:
        """Those of the folder first, and quick ones, but a module's together, since they share fixtures."""
        cost = Counter()
        for test in tests:
            away = 1 if test.split("/")[1] == folder else 10
            cost[self._tier(test)] += away * (self.seconds[test] + 0.1)
        return sorted(tests, key=lambda test: (cost[self._tier(test)], self._tier(test), self.seconds[test], test))

    def _tier(self, test: str) -> tuple[str, bool]:
        return test.split("::")[0], self.seconds[test] > 0.5


# The run with faults.


def copy_tree(to: Path) -> Path:
    """A copy of what tests read."""
    skip = shutil.ignore_patterns(".git", ".venv", "build", "site", "runs", ".hypothesis", ".pytest_cache")
    return Path(shutil.copytree(ROOT, to, ignore=skip))


def import_others() -> None:
    """What takes seconds to import. Not jfi: every child imports it with its fault."""
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    # As in conftest.py, which comes too late: torch reads them when it is imported.
    os.environ |= {"AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0", "CXX": str(ROOT / "tests/cxx/g++")}
    if not importlib.import_module("torch").cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    for name in _OTHERS:
        importlib.import_module(name)
    assert "jfi" not in sys.modules


def start(tree: Path, tests: list[str], output: Path) -> int:
    """A process that runs the tests in the tree; it leads a group with the processes that tests start."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sys.path[:0] = [str(tree), str(tree / "tests")]
    code = 99
    try:
        os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        code = pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={tree}", f"--basetemp={tree}/tmp", *tests]
        )
    finally:
        sys.stdout.flush()
        os._exit(code)


def run(mutants: list[Mutant | None], choice: Choice, options: argparse.Namespace) -> list[dict]:
    """A record for each fault."""
    folder = Path(tempfile.mkdtemp(prefix="mutation-"))
    trees = [copy_tree(folder / str(worker)) for worker in range(options.workers)]
    waiting, going, records = list(enumerate(mutants)), {}, []
    while waiting or going:
        while waiting and trees:
            number, mutant = waiting.pop(0)
            tests = choice.tests(mutant) or ["tests/test_imports.py"]
            expected = 0.0
            for count, test in enumerate(tests, 1):
                expected += choice.seconds[test]
                if expected > options.seconds:
                    tests = tests[:count]
                    break
            tests = [*options.also, *tests]
            tree = trees.pop()
            (tree / mutant.path).write_text(mutant.apply((ROOT / mutant.path).read_text()))
            os.utime(tree / mutant.path, (number + 1, number + 1))  # compiled files go by the time
            going[start(tree, tests, folder / f"{number}.log")] = (number, mutant, tests, tree, time.time(), expected)
        time.sleep(0.05)
        for child, (number, mutant, tests, tree, began, expected) in list(going.items()):
            took = time.time() - began
            late = took > 120 + 8 * expected
            ended, status = (0, 0) if late else os.waitpid(child, os.WNOHANG)
            if not ended and not late:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            if late:
                os.waitpid(child, 0)
            code = "late" if late else os.waitstatus_to_exitcode(status)
            record = mutant.describe() | {"caught": code != 0, "code": code, "seconds": round(took, 1)}
            record |= {"tests": len(tests), "by": _failed((folder / f"{number}.log").read_text(errors="replace"))}
            records.append((number, record))
            print(f"{len(records):4}/{len(mutants)} {'caught' if code else 'MISSED'} {mutant.path}:{mutant.line} "
                  f"{mutant.kind} | {mutant.old[:60]!r} -> {mutant.new[:60]!r} | {code} {took:.0f} s, {len(tests)} "
                  f"tests | {record['by']}", flush=True)  # fmt: skip
            shutil.copy2(ROOT / mutant.path, tree / mutant.path)
            shutil.rmtree(tree / "tmp", ignore_errors=True)
            trees.append(tree)
            del going[child]
    tests = sorted({record["by"] for _, record in records if "::" in record["by"]})
    if tests:
        status = os.waitpid(start(trees[0], tests, folder / "none.log"), 0)[1]
        print("Without a fault, the tests that caught one:", (folder / "none.log").read_text()[-300:])
        assert status == 0, folder / "none.log"
    shutil.rmtree(folder)
    return [record for _, record in sorted(records, key=lambda pair: pair[0])]


def _failed(log: str) -> str:
    """The test that failed; a log line of level ERROR has more than one space behind it."""
    found = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", log, re.MULTILINE)
    return found[1] if found else ""


def find_again(records: list[dict]) -> list[Mutant]:
    """The faults of `records` in code that has moved within its file; those whose code is gone are told."""
    found = []
    for record in records:
        names = ("path", "kind", "old", "new")
        path = ROOT / record["path"]
        mutants = find_mutants(record["path"], path.read_text()) if path.exists() else []
        same = [one for one in mutants if all(getattr(one, name) == record[name] for name in names)]
        if same:
            found.append(min(same, key=lambda one: abs(one.line - record["line"])))
        else:
            print("gone:", record["path"], record["line"], record["old"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("map", "run"))
    parser.add_argument("--tests", nargs="*", default=TESTS, help="what `map` runs")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--least", type=int, default=15, help="faults in a folder, at least")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=100, help="of tests per fault")
    parser.add_argument("--again", type=Path, help="a file of --out: its faults")
    parser.add_argument("--missed", action="store_true", help="of --again: only those that were not caught")
    parser.add_argument("--also", nargs="*", default=[], help="test files that are newer than the map; they come first")
    parser.add_argument("--out", type=Path, default=MAP / "trial.json")
    options = parser.parse_args()
    if options.command == "map":
        return make_map(options.tests)
    import_others()
    mutants = draw(ROOT, options.count, options.seed, options.least)
    if options.again:
        faults = json.loads(options.again.read_text())["faults"]
        mutants = find_again([one for one in faults if not (options.missed and one["caught"])])
    records = run(mutants, Choice(), options)
    folders = {
        folder: {"faults": len(of), "caught": sum(r["caught"] for r in of)}
        for folder in FOLDERS
        for of in [[r for r in records if r["path"].startswith(f"jfi/{folder}/")]]
    }
    caught = sum(record["caught"] for record in records)
    told = {"seed": options.seed, "count": len(records), "caught": caught, "folders": folders, "faults": records}
    options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"caught {caught} of {len(records)}", folders)


if __name__ == "__main__":
    main()
