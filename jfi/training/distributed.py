"""The processes of a run: one alone, or those that torchrun has launched.

Each rank of a launched run has one device and its part of every batch. Tensors travel between devices over NCCL, or
over gloo where there is no GPU; Python objects and flags always travel over gloo, which no GPU has to be waited for.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from jfi.training.config import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among those of its run.

    Args:
        device: where it computes.
        rank, size: its number, and how many there are.
        launched: whether by torchrun; then the tables are sharded, over one process too.
        control: the gloo group of all processes; None where the run was not launched.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    size: int = 1
    launched: bool = False
    control: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    def on_first(self, act: Callable[[], T]) -> T:
        """What `act` returns on rank 0, on every rank; what it raises there is raised on every rank."""
        if not self.launched:
            return act()
        outcome: list = [None, None]
        if self.is_first:
            try:
                outcome[0] = act()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def gather(self, item: T) -> list[T]:
        """Every rank's `item` on rank 0; an empty list on the others."""
        if not self.launched:
            return [item]
        items = [None] * self.size if self.is_first else None
        dist.gather_object(item, items, dst=0, group=self.control)
        return items or []

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's `tensor`, which lies on its device; a new tensor."""
        total = tensor.clone()
        if self.launched:
            dist.all_reduce(total)
        return total

    def max(self, number: int) -> int:
        """The greatest of every rank's `number`."""
        if not self.launched:
            return number
        flag = torch.tensor(number)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.control)
        return int(flag)


def launched() -> bool:
    """Whether torchrun, or what sets the same environment, has started this process."""
    return "WORLD_SIZE" in os.environ


@contextmanager
def join_world(device_name: str) -> Iterator[World]:
    """Joins the processes of a launched run, where this is one.

    Args:
        device_name: `training.device`; with GPUs each process takes the one of its local rank.

    Raises:
        ConfigError: the device is not there.
    """
    device = _device(device_name)
    if not launched():
        yield World(device)
        return
    _check_restarts()
    if device.type == "cuda":
        processes, count = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if processes > count:
            fault = f"must be 'cpu', or this host's {processes} processes no more than its {count} GPUs"
            raise ConfigError(f"training.device: got '{device_name}', {fault}")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        _meet("nccl")
        control = dist.new_group(backend="gloo")
    else:
        _meet("gloo")
        control = dist.group.WORLD
    yield World(device, dist.get_rank(), dist.get_world_size(), launched=True, control=control)
    # Not after an error: the others may be inside of a collective, and torchrun ends them when this process has ended.
    dist.destroy_process_group()


def _hosts() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


def _check_restarts() -> None:
    """Over several hosts each counts its own restarts: in one store nothing would tell the attempts apart."""
    may_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    if _hosts() > 1 and may_restart and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError("torchrun --max_restarts over several hosts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")


def _meet(backend: str) -> None:
    store, rank, size = next(dist.rendezvous("env://"))
    # torchrun keeps its store when it restarts, with the addresses of dead processes in it; on one host the number of
    # restarts tells the attempts apart.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _hosts() == 1 else "0"
    store = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("training.device: got 'cuda', must be 'cpu' or 'auto' where there is no GPU")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
