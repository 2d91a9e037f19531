"""Discrete PCA: content as a sum of directions, each taken once forward, once backward or not at all."""

import torch
from torch import Tensor

from jfi.semantic_ids.codec import Codec, FitInputs
from jfi.semantic_ids.decoders import SumOfDirections
from jfi.semantic_ids.packing import Layout, check_num_digits, pack_trits
from jfi.semantic_ids.stages import Ternary, fit_stages, nearest_trit


class DiscretePCA(Codec):
    """Discrete PCA (DPCA) of Ramasamy et al. 2025: x is approximated by mean + Σ_l t_l b_l with t_l in {-1, 0, 1}.

    Each direction b_l is the first principal component of what the digits before have left, so a strong direction
    comes again, in finer steps. 40 digits fit an int64. Several sources count alike, whatever their widths and scales.

    Args:
        num_digits: L, from 1 to 40.
        seed: of the rows that are drawn where there are more than `max_rows`.
        max_rows: most rows that `fit` looks at.

    Raises:
        ValueError: `num_digits` or `max_rows` is out of range.

    Example:
        >>> content = torch.randn(100, 8)
        >>> codec = DiscretePCA(num_digits=20).fit(content)
        >>> sids = codec.encode(content)
        >>> sids.shape, sids.dtype
        (torch.Size([100]), torch.int64)
        >>> codec.digits(sids).shape, codec.decode(sids).shape
        (torch.Size([100, 20]), torch.Size([100, 8]))
        >>> bool((codec.decode(sids) - content).square().sum() < 0.3 * content.square().sum())
        True
    """

    def __init__(self, num_digits: int = 25, seed: int = 0, max_rows: int = 2**17) -> None:
        check_num_digits(num_digits)
        super().__init__({"num_digits": num_digits, "seed": seed, "max_rows": max_rows}, seed, max_rows)
        self.num_digits = num_digits

    @property
    def layout(self) -> Layout:
        return Layout(self.num_digits)

    def decoder(self, dtype: torch.dtype = torch.float32) -> SumOfDirections:
        return SumOfDirections(self.tensors["basis"].to(dtype))

    def _fit(self, given: FitInputs) -> None:
        stages = fit_stages(given.x.double(), [Ternary()] * self.num_digits, given.progress)
        self.tensors["basis"] = torch.cat(stages)

    def _encode(self, x: Tensor) -> Tensor:
        # The residual's product with b_l is x·b_l - Σ_{j<l} t_j b_j·b_l: D is summed over once, not once a digit.
        basis = self.tensors["basis"]
        products, gram = basis @ x.T, basis @ basis.T  # [L, N], so that a digit's products are adjacent
        for digit in range(self.num_digits):
            trit = nearest_trit(products[digit], gram[digit, digit])
            products[digit + 1 :].addr_(gram[digit + 1 :, digit], trit, alpha=-1)
            products[digit] = trit
        return pack_trits(products.T.to(torch.int8))
