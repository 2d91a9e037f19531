"""Outputs of a SequenceDLRM with several labels: a bottom that they share, and a tower for each output.

With the interaction's output x and the layer sizes h, ..., 1 of the over arch, output l is t_l(b(x)): the bottom b has
size h, and the tower t_l all sizes but the first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import OverArch
from torchrec.modules.mlp import MLP

from jfi.utils.arguments import check_int, check_type, shown


@dataclass(frozen=True)
class Heads:
    """The outputs of a model.

    Args:
        count: number of outputs.
        moments: by output a mean and a standard deviation that it is scaled to, such as those of a regression's label;
            (0, 1) leaves it as it is. None for all as they are.
        auxiliary: number of further outputs, behind the others, that a model has in training mode alone.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> Heads(2, auxiliary=1)
        Heads(count=2, moments=None, auxiliary=1)
    """

    count: int = 1
    moments: Sequence[tuple[float, float]] | None = None
    auxiliary: int = 0

    def __post_init__(self) -> None:
        check_int("count", self.count)
        check_int("auxiliary", self.auxiliary, least=0)
        if self.moments is None:
            return
        check_type("moments", self.moments, (list, tuple), "a list of means and standard deviations, or None")
        if len(self.moments) != self.count:
            raise ValueError(f"moments must have {self.count} entries, one for each output, got {len(self.moments)}")
        for i, moment in enumerate(self.moments):
            is_pair = isinstance(moment, list | tuple) and len(moment) == 2
            if not is_pair or not all(isinstance(x, Real) and math.isfinite(x) for x in moment):
                raise ValueError(f"moments[{i}] must be a finite mean and deviation, got {shown(moment)}")

    @property
    def trained(self) -> int:
        """Returns the number of outputs in training."""
        return self.count + self.auxiliary

    def arch(self, width: int, layer_sizes: list[int]) -> nn.Module:
        """Returns the module from [B, width] to [B, count], in training mode [B, trained]; `layer_sizes` end in 1."""
        arch = OverArch if self.trained == 1 else TaskArch
        options = {} if self.trained == 1 else {"heads": self}
        made = arch(width, layer_sizes, **options)
        return made if self.moments is None else nn.Sequential(made, OutputScale(self.moments))


class TaskArch(nn.Module):
    """Maps [B, in_features] to [B, heads.count], in training mode to [B, heads.trained].

    The layer sizes are that of the bottom, then those of each tower, which end in 1.
    """

    def __init__(self, in_features: int, layer_sizes: list[int], *, heads: Heads) -> None:
        super().__init__()
        first, *tower = layer_sizes
        self.bottom = MLP(in_features, [first], bias=True, activation="relu")
        self.count = heads.count
        self.towers = nn.ModuleList(
            OverArch(first, tower) if len(tower) > 1 else nn.Linear(first, 1) for _ in range(heads.trained)
        )

    def forward(self, features: Tensor) -> Tensor:
        shared = self.bottom(features)
        towers = self.towers if self.training else self.towers[: self.count]
        return torch.cat([tower(shared) for tower in towers], dim=1)


class OutputScale(nn.Module):
    """Multiplies the first L outputs by a deviation and adds a mean; both are buffers, which a saved model has."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, moments: Sequence[tuple[float, float]]) -> None:
        super().__init__()
        means, deviations = zip(*moments, strict=True)
        self.register_buffer("mean", torch.tensor(means, dtype=torch.float32))
        self.register_buffer("deviation", torch.tensor(deviations, dtype=torch.float32))

    def forward(self, outputs: Tensor) -> Tensor:
        count = len(self.mean)
        scaled = outputs[:, :count] * self.deviation + self.mean
        return torch.cat([scaled, outputs[:, count:]], dim=1) if outputs.shape[1] > count else scaled
