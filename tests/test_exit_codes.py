"""An error that a user can cause is one line and has the exit code of its kind; any other error is raised."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from jfi.cli import COMMANDS
from jfi.cli.settings import ALL
from jfi.data import DataError
from jfi.data.io.blocks import read_table
from jfi.utils.errors import InputError
from jfi.utils.exit_codes import EXIT_CODES, MEMORY, STORAGE, WRONG_INPUT, run_command

ROOT = Path(__file__).parents[1]
#: What a command needs to begin.
NEEDED = {
    "predict": ["--run run --interactions rows.csv --out scores.csv"],
    "evaluate": ["--run run --interactions rows.csv"],
    "export": ["--run run"],
    "serve": ["--artifact artifact"],
    "audit": ["--run run --requests requests"],
    "state": ["load --run run --state users"],
    "semantic-ids": ["--items items.csv --out sids.parquet"],
}
#: Stands in for torch: says that its import has begun, takes long, and catches what interrupts it.
# Short sleeps: Python handles a signal that comes just before a sleep only when the sleep ends.
SLOW_TORCH = """
import os, time
print(os.environ["OMP_WAIT_POLICY"], flush=True)
try:
    for _ in range(600):
        time.sleep(0.1)
except KeyboardInterrupt:
    raise ImportError("torch is broken")
"""


def allocate_numpy() -> None:
    np.empty(2**62, np.uint8)


def allocate_torch() -> None:
    torch.empty(2**62, dtype=torch.uint8)


def allocate_cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")


def no_memory() -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def allocate_arrow() -> None:
    pa.allocate_buffer(2**62)


def start_thread() -> None:
    raise RuntimeError("can't start new thread")


def limit_duckdb() -> None:
    with duckdb.connect(config={"memory_limit": "1MB"}) as connection:
        connection.sql("SELECT string_agg(i::VARCHAR || repeat('x', 99), '') FROM range(1000000) t(i)").fetchall()


def read_parquet(size: int | None = None) -> None:
    """Reads a good file while Arrow finds no memory, or cannot start a thread."""
    error = pa.ArrowMemoryError(f"realloc of size {size} failed")
    if size is None:
        error = pa.ArrowException("Unknown error: Failed to launch worker thread: Resource temporarily unavailable")

    def fail(*_: object, **__: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        pyarrow.parquet.write_table(pa.table({"user": [1]}), f"{folder}/table.parquet")
        patch.setattr(pyarrow.parquet, "ParquetFile", fail)
        read_table(f"{folder}/table.parquet", ["user"])


def lacks_memory_in_a_damaged_file() -> None:
    try:
        allocate_torch()
    except RuntimeError:
        raise DataError("codec.safetensors is damaged") from None


LACKING = [allocate_numpy, allocate_torch, allocate_cuda, no_memory, allocate_arrow, start_thread, limit_duckdb]


@pytest.mark.parametrize("act", [*LACKING, read_parquet, lambda: read_parquet(2**20), lacks_memory_in_a_damaged_file])
def test_out_of_memory_is_4(capsys, act):
    assert run_command(act) == MEMORY == 4
    line = capsys.readouterr().err
    assert line.startswith("error: out of memory") and line.count("\n") == 1 and "documentation" not in line


def test_a_damaged_file_that_asks_for_more_memory_than_there_is_is_wrong_input(capsys):
    assert run_command(lambda: read_parquet(2**60)) == 2
    assert "table.parquet: a damaged Parquet file" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError(), ImportError("x.so: failed to map segment from shared object")])
def test_memory_that_an_import_lacks_is_one_line(capsys, error):
    def imports() -> None:
        raise error

    assert run_command(lambda: 0, imports) == 4
    line = capsys.readouterr().err
    assert line.startswith("error: out of memory") and line.count("\n") == 1


def test_out_of_memory_in_one_process_of_many_is_said_by_it(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert run_command(allocate_torch) == 4
    assert capsys.readouterr().err.endswith("(process 3 of this host)\n")


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda folder: (folder / "file" / "run").mkdir(), "Not a directory"),
        (lambda folder: (folder / "absent" / "run").mkdir(), "No such file or directory"),
        (lambda folder: os.mkdir("/sys/jfi"), "Operation not permitted|Permission denied|Read-only file system"),
        (lambda folder: open("/dev/full", "wb", 0).write(b"x"), "No space left on device"),  # noqa: SIM115
    ],
)
def test_storage_is_3(tmp_path, capsys, act, reason):
    (tmp_path / "file").write_text("")
    assert run_command(lambda: act(tmp_path) and None) == STORAGE == 3
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    assert any(part in line for part in reason.split("|")), line


def test_wrong_input_is_2_and_a_long_message_is_cut(capsys):
    def fail() -> None:
        raise InputError("a\n fault" + "t" * 5000)

    assert run_command(fail) == WRONG_INPUT == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and len(line) < 600


def test_an_error_of_the_program_is_raised():
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="size"):
        run_command(lambda: torch.dot(torch.ones(2), torch.ones(3)))


def test_a_code_that_the_command_returns_is_its_exit_code():
    assert [run_command(lambda code=code: code) for code in (None, 0, 2)] == [0, 0, 2]


def test_a_thread_that_cannot_write_prints_no_traceback(capsys):
    def work() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def main() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert run_command(main) == 0
    assert capsys.readouterr().err == ""


def test_the_help_lists_every_code():
    assert all(f"  {code}: " in EXIT_CODES for code in range(6))


@pytest.mark.parametrize(
    ("command", "policy"),
    [*((name, None) for name in sorted(COMMANDS.keys() - {"config"})), ("predict", "ACTIVE")],
)
def test_ctrl_c_while_a_command_imports_is_one_line_and_waiting_threads_sleep(tmp_path, command, policy):
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "LOCAL_RANK")}
    env = {**kept, "PYTHONPATH": f"{tmp_path}:{ROOT}", **({} if policy is None else {"OMP_WAIT_POLICY": policy})}
    # Help needs no torch, the work of a right config does.
    options = f"--data.interactions x.csv --out {tmp_path}/out" if command == "prepare" else "--data.interactions x.csv"
    if command == "policy":
        options += f" --out {tmp_path}/policy.json"
    elif command not in ("train", "prepare", "compare"):
        options = " ".join(NEEDED.get(command, [ALL]))
    started = [sys.executable, "-m", "jfi", command, *options.split()]
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout.readline().strip() == (policy or "PASSIVE")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "stopped by SIGINT\n")


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("SIGINT", None, (130, "cleaned up\n", "stopped by SIGINT\n")),
        ("SIGTERM", None, (143, "cleaned up\n", "stopped by SIGTERM\n")),
        # torchrun stops processes that may wait in C++ for one that has failed.
        ("SIGINT", "0", (130, "cleaned up\n", "stopped by SIGINT\n")),
        ("SIGTERM", "0", (-15, "", "")),
    ],
)
def test_a_signal_lets_a_command_that_has_begun_clean_up(name, rank, expected, tmp_path):
    """Also within `exec`, after which Python would end a module with SIGINT, whatever its exit code is."""
    (tmp_path / "command.py").write_text(f"""
import signal, sys
from jfi.utils.exit_codes import begin_command, run_command

def main():
    try:
        exec("signal.raise_signal(signal.{name})")
    finally:
        print("cleaned up")

begin_command()
sys.exit(run_command(main))
""")
    env = {key: value for key, value in os.environ.items() if key != "LOCAL_RANK"}
    env |= {"PYTHONPATH": f"{tmp_path}:{ROOT}"} | ({} if rank is None else {"LOCAL_RANK": rank})
    run = subprocess.run([sys.executable, "-m", "command"], capture_output=True, text=True, env=env)
    assert (run.returncode, run.stdout, run.stderr) == expected
