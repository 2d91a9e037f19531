"""Decides whether the training steps of a run are launched as CUDA graphs."""

from collections.abc import Callable

from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from jfi.cuda_graphs.capture_check import why_not_captured
from jfi.cuda_graphs.captured_step import CapturedStep
from jfi.data import Batch, InteractionDataset
from jfi.distributed import CapturedShardedStep
from jfi.training.config import Config, require
from jfi.training.distributed.processes import World


def check_graphs(config: Config, world: World) -> None:
    """Checks of `training.cuda_graph: always` what the config tells, before anything is written.

    Raises:
        ConfigError: the steps cannot be captured.
    """
    training, size = config.training, config.training.batch_size
    if training.cuda_graph != "always":
        return
    reason = _why_not(config, world)
    if world.device.type != "cuda":
        reason = "there is no GPU; auto takes one if there is one"
    elif world.launched and size is not None and size % world.size:
        reason = f"training.batch_size, {size}, is no multiple of the number of processes, {world.size}"
    require(reason is None, "training.cuda_graph", "always", f"auto or never, since {reason}")


def _why_not(config: Config, world: World) -> str | None:
    """Why steps cannot be captured, whatever the data."""
    if world.launched and config.training.cuda_graph != "always":
        return "the run is under torchrun, where training.cuda_graph must be always"
    if world.launched and config.sharding.group_size is not None:
        return "sharding.group_size is set"
    if (parts := config.training.gradient_accumulation_steps) != 1:
        return f"training.gradient_accumulation_steps is {parts}, so that a step has several backward passes"
    if config.data.batching == "user":
        return "data.batching is user, whose batches have any number of timelines"
    return None


def capture(
    step: Callable[[Batch], object],
    model: nn.Module,
    optimizer: CombinedOptimizer,
    config: Config,
    dataset: InteractionDataset,
    world: World,
) -> CapturedStep | CapturedShardedStep | str:
    """A training step that is captured, or why it cannot be.

    Args:
        step: the step; under torchrun it averages the gradients of the dense parameters itself.
        model: of the run.
        optimizer: of its tables, then of all other parameters.
        config: the whole config.
        dataset: whose first batch gives the capacities. After a resume it is the same batch, so that the capacities,
            and with them the rounding, stay as they were.
        world: the processes of the run.

    Raises:
        ConfigError: `training.cuda_graph` is always and the step cannot be captured.
    """
    reason, training = _why_not(config, world), config.training
    # Those of the tables step in the backward pass.
    dense = [one for _, one in optimizer.optimizers if isinstance(one, KeyedOptimizerWrapper)]
    if reason is None and not all(group.get("capturable") for one in dense for group in one.param_groups):
        name = config.optimizer.dense.name
        reason = f"optimizer.dense.name is {name}; of torch.optim only adam and adamw can be captured"
    if reason is None:
        options = {"shuffle": True, "seed": training.seed, "rank": world.rank, "world_size": world.size}
        first = dataset.batches("train", training.batch_size, **options)[0]
        try:
            if world.launched:
                return CapturedShardedStep(step, model, reference=first)
            reason = why_not_captured(model, first)
            if reason is None:
                return CapturedStep(step, model, reference=first)
        except ValueError as error:
            reason = str(error)
    require(training.cuda_graph != "always", "training.cuda_graph", "always", f"auto or never, since {reason}")
    return reason
