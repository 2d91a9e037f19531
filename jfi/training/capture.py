"""Whether the training steps of a run are launched as CUDA graphs."""

from collections.abc import Callable

from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from jfi.capturable import why_not_captured
from jfi.captured_step import CapturedStep
from jfi.data import Batch, InteractionDataset
from jfi.training.config import Config
from jfi.training.distributed import World


def capture(
    step: Callable[[Batch], object],
    model: nn.Module,
    optimizer: CombinedOptimizer,
    config: Config,
    dataset: InteractionDataset,
    world: World,
) -> CapturedStep | str:
    """A training step that is captured, or why it cannot be.

    Args:
        step: the step.
        model: of the run.
        optimizer: of its tables, then of all other parameters.
        config: the whole config.
        dataset: whose first batch gives the capacities. After a resume it is the same batch, so that the capacities,
            and with them the rounding, stay as they were.
        world: the processes of the run.
    """
    if world.launched:
        return "the run is under torchrun"
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
    first = next(dataset.batches("train", training.batch_size, shuffle=True, seed=training.seed))
    reason = why_not_captured(model, first)
    return CapturedStep(step, model, reference=first) if reason is None else reason
