"""A bias of a user, in one file: a slope for each head times the distance between a query and an event.

It is ALiBi (Press et al., "Train Short, Test Long", 2022). A softmax ignores what all events of a query share, so that
the distance may be counted from the newest event of a sample instead of from each query.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from jfi import PositionBias


@dataclass(frozen=True)
class LinearBias(PositionBias):
    """A bias with a bucket for each distance; events at least num_buckets - 1 away share the last one.

    Attributes:
        num_buckets: rows of the table; as many as the longest history has events, for a bias that nothing cuts off.
        steepness: factor of all slopes.
    """

    num_buckets: int = 64
    steepness: float = 1.0

    def buckets(self, count: Tensor) -> Tensor:
        return (count - 1).clamp(0, self.num_buckets - 1).int()

    def initial_table(self, num_heads: int) -> Tensor:
        return table_of(self.steepness * 2.0 ** -torch.linspace(8 / num_heads, 8, num_heads), self.num_buckets)


class Slopes(nn.Module):
    """Makes a table with a parameter for each head; without it each number of the table is a parameter."""

    def __init__(self, num_buckets: int) -> None:
        super().__init__()
        self.num_buckets = num_buckets

    def forward(self, slopes: Tensor) -> Tensor:
        return table_of(slopes, self.num_buckets)

    def right_inverse(self, table: Tensor) -> Tensor:
        return -table[1]


def table_of(slopes: Tensor, num_buckets: int) -> Tensor:
    """Returns the biases [num_buckets, H] of slopes [H]."""
    distance = torch.arange(num_buckets, device=slopes.device, dtype=slopes.dtype)
    return -distance.unsqueeze(1) * slopes


def learn_slopes(module: nn.Module) -> None:
    """Lets all biases of a layer or an encoder learn slopes in the place of tables."""
    for part in list(module.modules()):
        if getattr(part, "bucket_bias", None) is not None:
            parametrize.register_parametrization(part, "bucket_bias", Slopes(part.bucket_bias.size(0)))
