"""Whether the training steps of a run are launched as CUDA graphs."""

from collections.abc import Callable

import torch
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from jfi.capturable import why_not_captured
from jfi.captured_step import CapturedStep
from jfi.data import Batch, InteractionDataset
from jfi.sharded import CapturedShardedStep
from jfi.sharded.captured import routed_collections
from jfi.training.config import Config, ConfigError
from jfi.training.distributed import World


def captures_shards(config: Config) -> bool:
    """Whether the steps of a run under torchrun are to be captured."""
    return config.training.cuda_graph == "always"


def check_graphs(config: Config, device: torch.device) -> None:
    """Raises a ConfigError if captured steps are asked for without a GPU."""
    if config.training.cuda_graph == "always" and device.type != "cuda":
        raise ConfigError("training.cuda_graph: got 'always', which needs a GPU; auto takes one if there is one")


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
    found = _captured(step, model, optimizer, config, dataset, world)
    if isinstance(found, str) and config.training.cuda_graph == "always":
        raise ConfigError(f"training.cuda_graph: got 'always', but {found}")
    return found


def _captured(
    step: Callable[[Batch], object],
    model: nn.Module,
    optimizer: CombinedOptimizer,
    config: Config,
    dataset: InteractionDataset,
    world: World,
) -> CapturedStep | CapturedShardedStep | str:
    if world.launched and not captures_shards(config):
        return "the run is under torchrun, where training.cuda_graph must be always"
    if world.launched and config.sharding.group_size is not None:
        return "sharding.group_size is set"
    if config.training.accumulate != 1:
        return f"training.accumulate is {config.training.accumulate}, so that a step has several backward passes"
    if dataset.batching == "user":
        return "data.batching is user, whose batches have any number of timelines"
    # Those of the tables step in the backward pass.
    dense = [one for _, one in optimizer.optimizers if isinstance(one, KeyedOptimizerWrapper)]
    # The second is that of learned tables of semantic IDs.
    for key, one in zip(("dense", "embeddings"), dense, strict=False):
        if not all(group.get("capturable") for group in one.param_groups):
            name = getattr(config.optimizer, key).name
            return f"optimizer.{key}.name is {name}; of torch.optim only adam and adamw can be captured"
    training = config.training
    options = {"shuffle": True, "seed": training.seed, "rank": world.rank, "world_size": world.size}
    first = next(dataset.batches("train", training.batch_size, **options))
    if not world.launched:
        reason = why_not_captured(model, first)
        return CapturedStep(step, model, reference=first) if reason is None else reason
    try:
        routed_collections(model)
    except ValueError:
        return "the run exchanges rows; sharding.exchange: attention can be captured"
    # What reads the collections' output; ids do not get there.
    parts = [part for part in model.module.children() if part not in list(routed_collections(model))]
    reason = next(filter(None, (why_not_captured(part, first) for part in parts)), None)
    return CapturedShardedStep(step, model, reference=first) if reason is None else reason
