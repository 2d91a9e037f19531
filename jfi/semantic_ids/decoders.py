"""Decoders from digits to content: the frozen part of a codec that a model reads, as modules without parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Decoder(nn.Module):
    """The base of all decoders, which map digits `[N, L]`, as a codec's `digits` gives them, to content `[N, D]`.

    The digits of an unknown item give any finite row.
    """

    #: D, of the content.
    width: int


class SumOfDirections(Decoder):
    """Σ_l t_l b_l for ternary digits t_l.

    Args:
        basis: `[L, D]`, the b_l.
    """

    def __init__(self, basis: Tensor) -> None:
        super().__init__()
        self.width = basis.shape[1]
        self.register_buffer("basis", basis)

    def forward(self, digits: Tensor) -> Tensor:
        return digits.to(self.basis.dtype) @ self.basis


class SumOfCentroids(Decoder):
    """Σ_l c_l, the centroids that codes name.

    Args:
        codebooks: `[L, K, D]`.
    """

    def __init__(self, codebooks: Tensor) -> None:
        super().__init__()
        self.width = codebooks.shape[2]
        self.register_buffer("codebooks", codebooks)

    def forward(self, digits: Tensor) -> Tensor:
        codes = digits.clamp(min=0)
        return sum(F.embedding(codes[:, level], codebook) for level, codebook in enumerate(self.codebooks))


class FusionDecoder(Decoder):
    """The decoders of a VQ fusion, each a two-layer perceptron, of the latent that digits stand for.

    Args:
        quantizer: digits to the normalized latent.
        mean, scale: `[latent]`, of the latent.
        weights: of each source the weight and bias of the hidden layer, and those of the output.
    """

    def __init__(self, quantizer: Decoder, mean: Tensor, scale: Tensor, weights: Sequence[Sequence[Tensor]]) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.width, self._num_sources = sum(one[2].shape[0] for one in weights), len(weights)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        for number, one in enumerate(weights):
            for name, tensor in zip(_WEIGHTS, one, strict=True):
                self.register_buffer(f"{name}_{number}", tensor)

    def forward(self, digits: Tensor) -> Tensor:
        latent = self.quantizer(digits) * self.scale + self.mean
        parts = []
        for number in range(self._num_sources):
            hidden, hidden_bias, out, bias = (getattr(self, f"{name}_{number}") for name in _WEIGHTS)
            parts.append(F.linear(F.silu(F.linear(latent, hidden, hidden_bias)), out, bias))
        return torch.cat(parts, 1)


_WEIGHTS = ("hidden_weight", "hidden_bias", "weight", "bias")
