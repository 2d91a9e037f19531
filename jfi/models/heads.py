"""Outputs of a SequenceDLRM with several labels: a shared bottom or a mixture of experts, and a tower for each output.

With the interaction's output x, the layer sizes h, ..., 1 of the over arch, and towers t_l of all sizes but the first:

    shared bottom   y_l = t_l(b(x))                                b of size h
    MMoE            y_l = t_l(sum_e softmax(W_l x)_e b_e(x))       experts b_1, ..., b_n of size h

(Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", KDD 2018)
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
        experts: of a mixture, at least 2 and with at least 2 outputs; 0 for a shared bottom.
        moments: by output a mean and a standard deviation that it is scaled to, such as those of a regression's label;
            (0, 1) leaves it as it is. None for all as they are.
        auxiliary: number of further outputs, behind the others, that a model has in training mode alone.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> Heads(2, experts=4)
        Heads(count=2, experts=4, moments=None, auxiliary=0)
    """

    count: int = 1
    experts: int = 0
    moments: Sequence[tuple[float, float]] | None = None
    auxiliary: int = 0

    def __post_init__(self) -> None:
        check_int("count", self.count)
        check_int("auxiliary", self.auxiliary, least=0)
        check_int("experts", self.experts, least=0)
        if self.experts == 1 or (self.experts and self.trained == 1):
            raise ValueError(f"experts must be 0, or at least 2 with at least 2 outputs, got {self.experts}")
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

    The layer sizes are that of the bottom (or of an expert), then those of each tower, which end in 1.
    """

    def __init__(self, in_features: int, layer_sizes: list[int], *, heads: Heads) -> None:
        super().__init__()
        first, *tower = layer_sizes
        self.experts = nn.ModuleList(
            MLP(in_features, [first], bias=True, activation="relu") for _ in range(heads.experts or 1)
        )
        self.count = heads.count
        gates = heads.trained if heads.experts else 0
        self.gates = nn.ModuleList(nn.Linear(in_features, heads.experts) for _ in range(gates))
        self.towers = nn.ModuleList(
            OverArch(first, tower) if len(tower) > 1 else nn.Linear(first, 1) for _ in range(heads.trained)
        )

    def forward(self, features: Tensor) -> Tensor:
        outputs = [expert(features) for expert in self.experts]
        count = len(self.towers) if self.training else self.count
        towers, gates = self.towers[:count], self.gates[:count]
        if not gates:
            return torch.cat([tower(outputs[0]) for tower in towers], dim=1)
        stacked = torch.stack(outputs, dim=1)  # [B, experts, first]
        mixed = [(gate(features).softmax(dim=1).unsqueeze(2) * stacked).sum(dim=1) for gate in gates]
        return torch.cat([tower(x) for tower, x in zip(towers, mixed, strict=True)], dim=1)


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
