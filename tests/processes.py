"""Processes of tests, forked from one that has imported what takes seconds.

Without a GPU, whose driver cannot be forked, and not under coverage (mutation_trial.py), where the environment of each
process says its test.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext

import torch

_IMPORTED = ["torchrec.distributed", "jfi.training.start", "jfi.state.state"]


def context() -> BaseContext:
    """Returns how processes are started."""
    if torch.cuda.is_available() or "JFI_TEST" in os.environ:
        return multiprocessing.get_context("spawn")
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(_IMPORTED)
    return forking


def in_processes(function: Callable, *arguments: object, count: int = 2, seconds: float = 240) -> None:
    """Calls a function of the rank and the arguments in so many processes; raises what one of them raises."""
    method = context().get_start_method()
    running = torch.multiprocessing.start_processes(function, arguments, count, join=False, start_method=method)
    end = time.monotonic() + seconds
    while not running.join(max(0.0, end - time.monotonic())):
        if time.monotonic() >= end:
            for process in running.processes:
                process.kill()
            raise TimeoutError(f"{function.__name__} takes more than {seconds} s")
