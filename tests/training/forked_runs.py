"""Runs in processes that are forked from one that has imported everything: python forked_runs.py reads jobs from stdin.

A job is a line of JSON: {"config": FILE, "run": FOLDER} trains, or continues what is there; and with
"follow": PATH it follows the parts there until it is idle, with the arguments "options"; `FOLLOWING` counts too
"kill": n      SIGKILL before (n even) or after (n odd) call n // 2 of those that order writes (`ORDERING`)
"full": n      the storage is full: from call n on, all of them raise ENOSPC
"fsize": n     no file may grow beyond n bytes
The answer is a line of JSON: the exit code, what the process wrote to stderr, and its number of such calls.
"""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from unittest import mock

#: What makes earlier writes durable, or later ones visible.
ORDERING = ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "ftruncate")
#: What a run that follows a log does between those writes.
FOLLOWING = (
    "jfi.state.stores.LmdbStore.update",
    "jfi.state.stores.LmdbStore.put",
    "jfi.training.loop.steps.Steps._step",
    "jfi.training.run.recorder.LineFile.append",
    "jfi.follow.state.LogState.end_part",
)


@dataclass
class Outcome:
    """The end of a process."""

    code: int
    errors: str
    calls: int


class ForkedRuns:
    """The client."""

    def __init__(self, process: subprocess.Popen):
        self._process = process

    def do(self, config: Path, run: Path, **disturbance: object) -> Outcome:
        """Trains or resumes `run` in a process of its own, which `disturbance` may end."""
        job = {"config": str(config), "run": str(run), **disturbance}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))


@contextmanager
def forked_runs() -> Iterator[ForkedRuns]:
    """Starts the server, which takes the seconds that importing takes."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with process:
        yield ForkedRuns(process)
        process.stdin.close()


def disturb(job: dict) -> list[int]:
    """Replaces the functions of `ORDERING` by ones that count and do as the job says; returns the count."""
    calls = [0]

    def wrap(function):
        def wrapped(*arguments, **options):
            number = calls[0]
            calls[0] += 1
            if number >= job.get("full", number + 1):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if job.get("kill") == 2 * number:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*arguments, **options)
            finally:  # also after a call that failed, such as mkdir of what exists
                if job.get("kill") == 2 * number + 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    for name in ORDERING:
        setattr(os, name, wrap(getattr(os, name)))
    for name in FOLLOWING if "follow" in job else ():
        owner, _, method = name.rpartition(".")
        owner = resolve_name(owner)
        setattr(owner, method, wrap(getattr(owner, method)))
    if "fsize" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["fsize"], job["fsize"]))
    return calls


def main() -> None:
    from jfi.utils.exit_codes import begin_command

    begin_command()
    import torch.utils.tensorboard  # noqa: F401 for the forked ones

    from jfi.follow.start import follow
    from jfi.training import TrainingConfig, resume, train
    from jfi.training.config_parser import load_config
    from jfi.utils.exit_codes import run_command
    from jfi.utils.files import write_file

    TrainingConfig.log_every = 4  # as in test_disturbed_runs, whose runs these are

    def do() -> None:
        run = Path(job["run"])
        if "follow" in job:
            follow(run, job["follow"], until_idle=True, **job.get("options", {}))
        elif (run / "config.yaml").is_file():
            resume(run)
        else:
            train(load_config(job["config"]).with_training(run_dir=job["run"]))

    def picture(*arguments: object) -> None:
        path = arguments[-1]
        write_file(path, b"a picture")

    reports = Path(tempfile.mkdtemp())
    for line in sys.stdin:
        job, errors, count = json.loads(line), reports / "errors", reports / "calls"
        child = os.fork()
        if not child:
            with errors.open("w") as file, open(os.devnull, "w") as nothing:
                os.dup2(file.fileno(), 2)
                os.dup2(nothing.fileno(), 1)
            pictures = {"draw_curves": picture, "draw_attention": picture}
            with (
                count.open("w") as file,
                mock.patch.multiple("jfi.training.run.plots", **pictures),
                mock.patch("jfi.follow.plot.draw_windows", picture),
                mock.patch("jfi.tables.map_ids.interprets", lambda: False),  # the interpreter takes long
            ):
                calls = disturb(job)
                try:
                    code = run_command(do)
                except BaseException:
                    code = 99
                    sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
                file.write(str(calls[0]))
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        calls = int(count.read_text() or 0)
        print(json.dumps({"code": code, "errors": errors.read_text(), "calls": calls}), flush=True)
    shutil.rmtree(reports)


if __name__ == "__main__":
    main()
