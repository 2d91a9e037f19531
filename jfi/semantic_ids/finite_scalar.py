"""Finite scalar quantization: each dimension of the content rounded to three levels."""

import torch
from torch import Tensor

from jfi.semantic_ids.codec import Codec, FitInputs
from jfi.semantic_ids.decoders import SumOfDirections
from jfi.semantic_ids.packing import Layout, check_num_digits, pack_trits
from jfi.semantic_ids.stages import nearest_trit, ternary_step


class FiniteScalar(Codec):
    """Finite scalar quantization (FSQ) with three levels: x_d is approximated by mean_d + a_d t_d, t_d in {-1, 0, 1}.

    There is no codebook: a digit is one dimension, rounded. Mentzer et al. (ICLR 2024) bound the dimensions by tanh;
    here the step a_d is fitted to each, by Lloyd's algorithm. It is for the latent of `VQFusion`, whose encoder can
    spread the content evenly over the dimensions; content as it is has few dimensions that matter.

    Args:
        num_digits: L, the width of the content, from 1 to 40.
        seed: of the rows that are drawn where there are more than `max_rows`.
        max_rows: most rows that `fit` looks at.

    Raises:
        ValueError: `num_digits` or `max_rows` is out of range; or in `fit`, the content is not `num_digits` wide.

    Example:
        >>> content = torch.randn(100, 8)
        >>> codec = FiniteScalar(num_digits=8).fit(content)
        >>> codec.digits(codec.encode(content)).shape
        torch.Size([100, 8])
    """

    def __init__(self, num_digits: int = 25, seed: int = 0, max_rows: int = 2**17) -> None:
        check_num_digits(num_digits)
        super().__init__({"num_digits": num_digits, "seed": seed, "max_rows": max_rows}, seed, max_rows)
        self.num_digits = num_digits

    @property
    def layout(self) -> Layout:
        return Layout(self.num_digits)

    def decoder(self, dtype: torch.dtype = torch.float32) -> SumOfDirections:
        return SumOfDirections(torch.diag(self.tensors["steps"].to(dtype)))

    def _fit(self, given: FitInputs) -> None:
        if given.x.shape[1] != self.num_digits:
            raise ValueError(f"num_digits is {self.num_digits}, but the content is {given.x.shape[1]} wide")
        self.tensors["steps"] = torch.stack([ternary_step(column.abs()) for column in given.x.double().T])

    def _encode(self, x: Tensor) -> Tensor:
        steps = self.tensors["steps"]
        return pack_trits(nearest_trit(x * steps, steps.square()).to(torch.int8))
