"""Exit codes of commands: one line on stderr for every error that a user can cause, and an exit code by its kind."""

import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from jfi.utils.errors import InputError, import_line, memory_cause, memory_line, shorten
from jfi.utils.files import naming

SUCCESS, DIVERGED, WRONG_INPUT, STORAGE, MEMORY, DIFFERS = range(6)
#: For `--help`; 130 is Ctrl-C.
EXIT_CODES = """\
exit codes:
  0: success;
  1: training diverged, the last finite checkpoint is kept;
  2: wrong input or config;
  3: storage is full, read-only, out of reach or without rights;
  4: out of memory, or of threads;
  5: `jfi audit` has found a request that was served otherwise than training reads it;
  128 + n: stopped by signal n; a run's state is saved, and any other file is written whole or not at all"""


def begin_command() -> None:
    """Prepares a command's process, before torch and other packages are imported, which takes seconds.

    Until `run_command` calls `main`, Ctrl-C ends the process at once: an import that is interrupted may catch an
    exception. After that SIGTERM is an exception as Ctrl-C is, so that unfinished files are removed. Threads of OpenMP
    that wait will sleep, unless the user has set OMP_WAIT_POLICY: spinning ones keep two jobs on the same cores from
    getting on. A warning of torch.fx that TorchRec causes in every process is not logged.
    What stdout cannot encode is printed as escapes, as on stderr.
    """
    fx = logging.getLogger("torch.fx._symbolic_trace")
    fx.addFilter(lambda record: "is_fx_tracing will" not in record.getMessage())
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is None where it was closed
        sys.stdout.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell ignores it for a job
        signal.signal(signal.SIGINT, _exit_at_once)


def _exit_at_once(signum: int, frame: object) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, f"stopped by {signal.Signals(signum).name}\n".encode())
    os._exit(128 + signum)


class _Stopped(KeyboardInterrupt):
    """A signal that ends a command; after a plain KeyboardInterrupt out of `exec` Python ignores the exit code."""


def _interrupt(signum: int, frame: object) -> None:
    raise _Stopped(signum)


def run_command(main: Callable[[], int | None], imports: Callable[[], object] = lambda: None) -> int:
    """Runs `main`; reports errors that a user can cause as one line on stderr, and returns the exit code.

    Under torchrun one process per host writes the line, unless the error is of one process alone.

    Args:
        main: what the command does; it returns an exit code, or None for success. An `InputError` is of its input.
        imports: imports what `main` needs, before it.
    """
    threading.excepthook = _report_thread
    try:
        imports()
        if signal.getsignal(signal.SIGINT) is _exit_at_once:
            signal.signal(signal.SIGINT, _interrupt)
            if "LOCAL_RANK" not in os.environ:  # torchrun stops processes that may wait in C++ for one that has failed
                signal.signal(signal.SIGTERM, _interrupt)
        code = int(main() or SUCCESS)
        with naming(Path("stdout")):
            print(end="", flush=True)  # now, since Python ignores an error of its own flush at the end
        return code
    except (Exception, KeyboardInterrupt) as error:
        line, code = _describe(error)
        distributed = sys.modules.get("torch.distributed")
        is_in_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
        if code is None:
            if not is_in_group:
                raise
            traceback.print_exc()
            code = 1
    rank = os.environ.get("LOCAL_RANK", "0")
    if line and (rank == "0" or code == MEMORY):
        print(shorten(line) + ("" if rank == "0" else f" (process {rank} of this host)"), file=sys.stderr)
    try:  # at exit Python would report again that stdout cannot be written
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if is_in_group:
        # Threads of the group may abort the process in the interpreter's end. To destroy the group would join them, but
        # they may wait for other processes, which wait for this one.
        sys.stderr.flush()
        os._exit(code)
    return code


def _describe(error: BaseException) -> tuple[str, int | None]:
    """Returns the line and the exit code of an error; "" and None for one of the program."""
    if isinstance(error, KeyboardInterrupt):
        signum = signal.Signals(next(iter(error.args), signal.SIGINT))
        return f"stopped by {signum.name}", 128 + signum
    is_input = isinstance(error, InputError)
    if (reason := memory_cause(error) if is_input else memory_line(error)) is not None:
        return f"error: out of memory{f' ({reason})' if reason else ''}; nothing that was saved is lost", MEMORY
    if hasattr(error, "exit_code"):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        if error.errno is not None and "[errno " in reason:  # Arrow's: "Error writing bytes to file. Detail: [..."
            reason = os.strerror(error.errno)
        return f"error: {reason if error.filename is None else f'{error.filename}: {reason}'}", STORAGE
    if isinstance(error, FloatingPointError):
        return f"error: {error}", DIVERGED
    line = str(error) if is_input else import_line(error)
    return ("", None) if line is None else (f"error: {line}", WRONG_INPUT)


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """Drops OSErrors of threads: TensorBoard's writer raises its thread's error in the main thread again."""
    if not issubclass(failed.exc_type, OSError):
        threading.__excepthook__(failed)
