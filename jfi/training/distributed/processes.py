"""The processes of a run: a single one, or those that torchrun launches; and the signals that stop them.

Each rank has one device and a part of every batch. Tensors are exchanged with NCCL, or with gloo on CPUs. Python
objects and flags are always exchanged with gloo, which does not synchronize with the GPU.
"""

import atexit
import gc
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from jfi.training.config import ConfigError
from jfi.utils.files import temporary_folder

T = TypeVar("T")
#: Numbers of the groups of processes that this process joins, one after the other.
_groups = itertools.count()


@dataclass(frozen=True)
class World:
    """This process and the other processes of its run.

    Args:
        device: of this process.
        rank: number of this process.
        size: number of processes.
        launched: whether torchrun started the run; its tables are sharded then, also for a single process.
        control: gloo group of all processes; None without torchrun.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    size: int = 1
    launched: bool = False
    control: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Returns whether this is the process that writes files and prints."""
        return self.rank == 0

    def say(self, *lines: object) -> None:
        """Prints lines, above a bar of progress, in the process that does; None is no line."""
        for line in lines:
            if line is not None and self.is_first:
                with tqdm.external_write_mode():
                    print(line, flush=True)

    def on_first(self, act: Callable[[], T]) -> T:
        """Calls `act` on rank 0; returns its result, or raises its exception, on every rank."""
        if not self.launched:
            return act()
        outcome: list[Any] = _attempt(act) if self.is_first else [None, None]
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def on_all(self, act: Callable[[], T], acts: bool = True) -> list[T]:
        """Returns on every rank what `act` returns on those that act, else None; or raises the first exception."""
        outcomes: list[Any] = [_attempt(act) if acts else [None, None]]
        if self.launched:
            (own,), outcomes = outcomes, [None] * self.size
            dist.all_gather_object(outcomes, own, group=self.control)
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]

    def on_each_host(self, act: Callable[[], T]) -> T:
        """Calls `act` on one process of each host, whose result all processes of the host return.

        What it raises on one host is raised on every process of all hosts.
        """
        host, rank = os.environ.get("GROUP_RANK", "0"), os.environ.get("LOCAL_RANK", str(self.rank))
        results = self.on_all(lambda: (host, act()), not self.launched or rank == "0")
        return next(one[1] for one in results if one is not None and one[0] == host)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows `[N, ...]` of all ranks, in their order, on rank 0; the own ones on the others. On the CPU."""
        if not self.launched:
            return rows
        counts = [torch.tensor(0) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor(len(rows)), group=self.control)
        if not self.is_first:
            dist.send(rows.contiguous(), 0, group=self.control)
            return rows
        parts = [rows, *(rows.new_empty(int(count), *rows.shape[1:]) for count in counts[1:])]
        for rank in range(1, self.size):
            dist.recv(parts[rank], rank, group=self.control)
        return torch.cat(parts)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor`, which is on each rank's device, over the ranks; a new tensor."""
        total = tensor.clone()
        if self.launched:
            dist.all_reduce(total)
        return total

    def max(self, number: int) -> int:
        """The maximum of `number` over the ranks."""
        if not self.launched:
            return number
        flag = torch.tensor(number)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.control)
        return int(flag)


def _attempt(act: Callable[[], object]) -> list:
    """Returns the result of `act` and its exception, one of them None."""
    try:
        return [act(), None]
    except Exception as error:
        return [None, error]


@contextmanager
def shared_folder(world: World, prefix: str, write: Callable[[Path], None]) -> Iterator[Path]:
    """Yields a folder that one process of each host has written for all of them, to map its files.

    It is in the folder for temporary files (`TMPDIR`), and is removed as soon as all processes have left the block: the
    files' memory lives as long as the maps.

    Args:
        world: the processes that call this together.
        prefix: of the folder's name.
        write: fills the empty folder.
    """

    with ExitStack() as stack:

        def make() -> Path:
            folder = stack.enter_context(temporary_folder(prefix))
            write(folder)
            return folder

        yield world.on_each_host(make)
        world.max(0)  # all have mapped it


def launched() -> bool:
    """Returns whether torchrun started this process (or a launcher that sets the same environment)."""
    return "WORLD_SIZE" in os.environ


@contextmanager
def join_world(device_name: str) -> Iterator[World]:
    """Joins the processes of the run; under torchrun it initializes torch.distributed.

    Args:
        device_name: `training.device`; each process uses the GPU with its local rank.

    Raises:
        ConfigError: the device is missing, or restarts over several hosts would share a store.
    """
    device = _device(device_name)
    if not launched():
        yield World(device)
        return
    may_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    # Each host counts its own restarts, so the keys of two attempts in a shared store would be the same.
    if _hosts() > 1 and may_restart and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError("torchrun --max_restarts on several hosts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    if device.type == "cuda":
        processes, count = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if processes > count:
            fix = f"lower --nproc_per_node to {count} or set training.device to cpu"
            raise ConfigError(f"training.device: {processes} processes on a host with {count} GPUs; {fix}")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        _init_process_group("nccl")
        control = dist.new_group(backend="gloo")
    else:
        _init_process_group("gloo")
        control = dist.group.WORLD
    yield World(device, dist.get_rank(), dist.get_world_size(), launched=True, control=control)
    # Not after an error: other ranks may be in a collective, and torchrun stops them when this process exits.
    dist.destroy_process_group()
    # A group ends with its last reference, such as that of a model in a cycle. Its threads must not outlive Python: one
    # that releases a tensor during the interpreter's end aborts the process.
    atexit.register(gc.collect)


def _hosts() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


def _init_process_group(backend: str) -> None:
    store, rank, size = next(dist.rendezvous("env://"))
    # torchrun keeps its store over restarts, with the addresses of dead processes in it. On one host the number of the
    # restart gives each attempt its own keys. So does the number of the group, where a process trains several times.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _hosts() == 1 else "0"
    store = dist.PrefixStore(f"attempt-{attempt}-{next(_groups)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("training.device: got 'cuda', but there is no GPU; set it to cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


class Interrupted(Exception):
    """A signal stopped training; the state of a run has been saved."""

    def __init__(self, signum: int, run_dir: object):
        super().__init__(f"stopped by {signal.Signals(signum).name}; continue with --resume {run_dir}")
        self.exit_code = 128 + signum


@contextmanager
def stop_on_signals(run_dir: object, world: World) -> Iterator[Callable[[], None]]:
    """Records the first SIGINT or SIGTERM; the second one has its previous handler.

    It yields what raises Interrupted, which names the folder of the run, on all processes of `world` if one got a
    signal. All processes must call that together.
    """
    signals: list[int] = []
    previous: dict[int, Any] = {}

    def record(signum: int, frame: object) -> None:
        signals.append(signum)
        restore()

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def check() -> None:
        if signum := world.max(max(signals, default=0)):
            raise Interrupted(signum, run_dir)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, record)
    try:
        yield check
    finally:
        restore()
