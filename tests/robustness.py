"""Counts what jfi survives: runs the tests that damage files, kill processes and fill disks, the slow ones too.

python tests/robustness.py [GROUP ...] [--out benchmarks/results/cpu/robustness.json]

A test that tries many cases records their number as the property `cases`; another one is a case. Those of a test that
fails count as failures. Groups that are not named keep their numbers in the file.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: By group the tests, as arguments of pytest.
GROUPS = {
    "damaged_runs": ["tests/training/test_damaged_runs.py", "tests/training/test_edited_runs.py"],
    "damaged_datasets": ["tests/data/test_prepared_files.py", "tests/test_file_writing.py"],
    "malformed_tables": ["tests/data/test_malformed.py", "tests/data/test_faults.py"],
    "kills": [
        "tests/training/test_deaths.py",
        "tests/training/test_disturbed_runs.py",
        "tests/training/test_run.py",
        "tests/data/test_prepare.py",
        "tests/training/test_predict_command.py",
        "tests/test_file_writing.py",
        "-k",
        "kill or dies or signal",
    ],
    "full_disks": [
        "tests/training/test_full_disk.py",
        "tests/training/test_disturbed_runs.py",
        "tests/training/test_unreadable.py",
        "tests/test_exit_codes.py",
        "-k",
        "full or space or grow or read_only or unreadable or storage or memory",
    ],
    "hostile_values": ["tests/training/test_hostile_runs.py", "tests/serving/test_forged_artifacts.py"],
}


def run(arguments: list[str]) -> dict[str, float]:
    """Runs tests; returns the numbers of cases, failures and skipped tests, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report, begin = Path(folder) / "report.xml", time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
        command += [f"--junitxml={report}", *arguments]
        subprocess.run(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False)
        seconds, counts = time.perf_counter() - begin, {"count": 0, "failures": 0, "skipped": 0}
        for test in ElementTree.parse(report).iter("testcase"):
            recorded = [int(one.get("value")) for one in test.iter("property") if one.get("name") == "cases"]
            if test.find("skipped") is not None:
                counts["skipped"] += 1
                continue
            counts["count"] += sum(recorded) or 1
            counts["failures"] += test.find("failure") is not None or test.find("error") is not None
    return {**counts, "seconds": round(seconds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu/robustness.json")
    options = parser.parse_args()
    if unknown := set(options.groups) - GROUPS.keys():
        parser.error(f"unknown group {min(unknown)}; groups are {', '.join(GROUPS)}")
    known = json.loads(options.out.read_text()) if options.out.is_file() else {}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    result = {
        "what": "python tests/robustness.py; a failure is a traceback, more than one line, or another result",
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        **{name: known[name] for name in GROUPS if name in known},
    }
    for name in options.groups or GROUPS:
        result[name] = {**run(GROUPS[name]), "commit": commit.stdout.strip()}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(name, result[name], flush=True)
    return int(any(one["failures"] for one in result.values() if isinstance(one, dict)))


if __name__ == "__main__":
    sys.exit(main())
