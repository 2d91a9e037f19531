"""Exit codes of commands: one line on stderr for every error that a user can cause, and an exit code by its kind."""

import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import TracebackType

from jfi.utils.errors import InputError, import_line, memory_cause, memory_line
from jfi.utils.files import naming


class ExitCode(IntEnum):
    """The exit codes; 128 + n stands for a stop by signal n with the state saved, such as 130 for Ctrl-C."""

    SUCCESS = 0
    DIVERGED = 1
    WRONG_INPUT = 2
    STORAGE = 3
    MEMORY = 4


#: For `--help`.
EXIT_CODES = """\
exit codes:
  0: success;
  1: training diverged, the last finite checkpoint is kept;
  2: wrong input or config;
  3: storage is full, read-only, out of reach or without rights;
  4: out of memory, or of threads;
  128 + n: stopped by signal n; a run's state is saved, and any other file is written whole or not at all"""
_LONGEST = 500


class Terminated(BaseException):
    """SIGTERM, where a command has asked for it with `raise_on_sigterm`; no `except Exception` stops it."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise Terminated, so that unfinished files are removed as after any other error."""

    def stop(signum: int, frame: object) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def begin_command() -> None:
    """Prepares a command's process; to be called before torch and other packages are imported, which takes seconds.

    Until `run_command` takes over, Ctrl-C ends the process at once with the line and the code of `run_command`. Threads
    of OpenMP that wait will sleep, unless the user has set OMP_WAIT_POLICY: spinning ones keep two jobs on the same
    cores from getting on. A warning of torch.fx that TorchRec causes in every process, and that users can do nothing
    about, is not logged. What stdout cannot encode is printed as escapes, as on stderr, such as a column's name in
    another script where the locale has only ASCII.
    """
    fx = logging.getLogger("torch.fx._symbolic_trace")
    fx.addFilter(lambda record: "is_fx_tracing will" not in record.getMessage())
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is None where it was closed
        sys.stdout.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell ignores it for a job
        signal.signal(signal.SIGINT, _exit_at_once)
    sys.excepthook = _report_uncaught


def _exit_at_once(signum: int, frame: object) -> None:
    # No exception: an import that is interrupted may catch it, or report another error.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, f"stopped by {signal.Signals(signum).name}\n".encode())
    os._exit(128 + signum)


def run_command(main: Callable[[], int | None]) -> int:
    """Runs `main`; reports errors that a user can cause as one line on stderr, and returns the exit code.

    Under torchrun one process per host writes the line, unless the error is of one process alone.

    Args:
        main: what the command does; it returns an exit code, or None for success. An `InputError` is of its input.

    Example:
        >>> run_command(lambda: None)
        0
    """
    threading.excepthook = _report_thread
    try:
        if signal.getsignal(signal.SIGINT) is _exit_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = int(main() or ExitCode.SUCCESS)
        if sys.stdout is not None:
            with naming(Path("stdout")):
                sys.stdout.flush()  # now, since Python ignores an error of its own flush at the end
        return code
    except (KeyboardInterrupt, Terminated) as stop:
        signum = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
        line, code = f"stopped by {signum.name}", 128 + signum
    except Exception as error:
        memory = memory_line(error)
        if isinstance(error, InputError):
            memory = memory_cause(error)
        if memory is not None:
            line, code = _out_of_memory(memory), ExitCode.MEMORY
        elif isinstance(error, InputError):
            line, code = f"error: {error}", ExitCode.WRONG_INPUT
        elif isinstance(error, FloatingPointError):
            line, code = f"error: {error}", ExitCode.DIVERGED
        elif hasattr(error, "exit_code"):
            line, code = str(error), error.exit_code
        elif isinstance(error, OSError):
            line, code = f"error: {_storage(error)}", ExitCode.STORAGE
        elif (reason := import_line(error)) is not None:
            line, code = f"error: {reason}", ExitCode.WRONG_INPUT
        else:
            if _is_in_group():
                traceback.print_exc()
                _end_at_once(1)
            raise
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank == "0" or code == ExitCode.MEMORY:
        print(shorten(line) + ("" if rank == "0" else f" (process {rank} of this host)"), file=sys.stderr)
    _drop_unwritten()
    if _is_in_group():
        _end_at_once(code)
    return int(code)


def _out_of_memory(reason: str) -> str:
    return f"error: out of memory{f' ({reason})' if reason else ''}; nothing that was saved is lost"


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ends the process with the line and the code of `run_command` where packages cannot be imported.

    They find no memory, are missing, or do not fit one another.
    """
    if isinstance(error, Exception) and (memory := memory_line(error)) is not None:
        print(shorten(_out_of_memory(memory)), file=sys.stderr)
        _end_at_once(ExitCode.MEMORY)
    if (reason := import_line(error)) is not None:
        print(shorten(f"error: {reason}"), file=sys.stderr)
        _end_at_once(ExitCode.WRONG_INPUT)
    sys.__excepthook__(kind, error, trace)


def _drop_unwritten() -> None:
    """Redirects stdout to os.devnull if it cannot be written: at exit Python would report the error again."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_in_group() -> bool:
    """Returns whether an error has left this process in a process group of torch.distributed."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _end_at_once(code: int) -> None:
    """Ends the process without the interpreter's end.

    Threads of the process group may hold tensors, and aborted the process when they released one during the
    interpreter's end: "terminate called without an active exception". To destroy the group would join them, but they
    may wait for other processes, which wait for this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def shorten(text: str) -> str:
    """The text in one line of at most 500 characters."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def _storage(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno is not None and "[errno " in reason:  # Arrow's, such as "Error writing bytes to file. Detail: [..."
        reason = os.strerror(error.errno)
    return reason if error.filename is None else f"{error.filename}: {reason}"


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """Drops OSErrors of threads: TensorBoard's writer raises its thread's error in the main thread again."""
    if not issubclass(failed.exc_type, OSError):
        threading.__excepthook__(failed)
