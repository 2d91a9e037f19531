"""The gradients of a step, computed in parts of its batch, one after another."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import get_module

from jfi.distributed.sharded_tables import ShardedTables
from jfi.modules import defer_steps

Output = TypeVar("Output")


class NoSteps:
    """Replaces the optimizer of a train pipeline whose batches are parts of one: it makes no step."""

    def zero_grad(self) -> None:
        """Does nothing."""

    def step(self) -> None:
        """Does nothing."""


def run_parts(model: nn.Module, run_part: Callable[[], Output], count: int) -> Output:
    """Runs forward and backward of `count` parts; the gradients, and the steps of sharded tables, are those of all.

    The steps of fused collections that are not sharded wait for `step()` of their optimizer.

    Args:
        model: of the run, without tables that FBGEMM steps in each backward pass.
        run_part: forward and backward of the next part. All processes have as many of them.
        count: parts, at least one.

    Returns:
        That of the last part.
    """
    replicated = get_module(model)
    with defer_steps(model), ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, ShardedTables):
                stack.enter_context(module.local_shard.deferring())
        for number in range(count):
            # The mean over processes of what already is a mean does not change it, so any part may be followed by one.
            # The first must be: without it the static graph of TorchRec's DistributedDataParallel is never set up.
            waits = 0 < number < count - 1 and isinstance(replicated, DistributedDataParallel)
            with replicated.no_sync() if waits else nullcontext():
                output = run_part()
    return output
