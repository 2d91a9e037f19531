"""Learning-rate schedules: the rates of a step depend on the step and the run's length alone, so a run can be resumed.

With base rate r, W = `optimizer.warmup_steps` and N steps in the run, the rate of step t = 0, 1, ... N - 1 is

    t < W       r (t + 1) / W
    constant    r
    cosine      r (1 + cos(pi (t - W) / (N - W))) / 2     (Loshchilov and Hutter, "SGDR", ICLR 2017; no restarts)
"""

import math

from torch import Tensor
from torchrec.optim.keyed import KeyedOptimizer

from jfi.training.config import ConfigError, OptimizerConfig


class LearningRates:
    """Sets the learning rates of an optimizer's groups.

    A rate that is a tensor is filled in place, which a CUDA graph that was captured before sees.

    Args:
        config: the section `optimizer`.
        optimizer: whose groups have the base rates now.
        num_steps: about the steps of the run.

    Raises:
        ConfigError: the run is over before the warm-up is.
    """

    def __init__(self, config: OptimizerConfig, optimizer: KeyedOptimizer, num_steps: int) -> None:
        if config.warmup_steps and config.warmup_steps >= num_steps:
            got = f"optimizer.warmup_steps: got {config.warmup_steps}"
            raise ConfigError(f"{got}, must be below the run's {num_steps} steps (training.epochs, batch_size)")
        self._config = config
        self._groups = [(group, float(group["lr"])) for group in optimizer.param_groups]
        self._factor = 1.0

    def set(self, step: int, num_steps: int) -> None:
        """Sets the rates of a step.

        Args:
            step: steps of the run before it.
            num_steps: of the whole run.
        """
        factor = rate_factor(self._config, step, num_steps)
        if factor == self._factor:
            return
        self._factor = factor
        for group, rate in self._groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor


def rate_factor(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The learning rate of a step, as a multiple of the base rate.

    Example:
        >>> config = OptimizerConfig(schedule="cosine", warmup_steps=2)
        >>> [rate_factor(config, step, 6) for step in range(4)]
        [0.5, 1.0, 1.0, 0.8535533905932737]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    return (1 + math.cos(math.pi * min(1.0, done))) / 2
