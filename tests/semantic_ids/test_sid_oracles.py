"""Codecs against vector-quantize-pytorch, where it is installed: `pip install vector-quantize-pytorch`."""

import math

import pytest
import torch

from jfi.semantic_ids import FiniteScalar, ResidualKMeans

oracle = pytest.importorskip("vector_quantize_pytorch")


def test_codes_are_those_of_residual_vq():
    x = torch.randn(500, 6)
    codec = ResidualKMeans(num_levels=3, codebook_size=16, steps=5).fit(x)
    theirs = oracle.ResidualVQ(dim=6, num_quantizers=3, codebook_size=16).eval()
    for layer, codebook in zip(theirs.layers, codec.tensors["codebooks"], strict=True):
        layer._codebook.embed.data.copy_(codebook.float()[None])
        layer._codebook.initted.data.fill_(True)
    normalized = (x - codec.tensors["mean"].float()) / codec.tensors["scale"].float()
    quantized, codes, _ = theirs(normalized[None])
    sids = codec.encode(x)
    assert torch.equal(codec.digits(sids), codes[0])
    restored = quantized[0] * codec.tensors["scale"].float() + codec.tensors["mean"].float()
    torch.testing.assert_close(codec.decode(sids), restored, atol=1e-5, rtol=1e-5)


def test_digits_are_those_of_fsq():
    """FSQ rounds 1.001 tanh(z), so that its digits change where that is a half; here they change at half a step."""
    z = torch.randn(500, 7) * torch.linspace(0.3, 2.0, 7)
    codec = FiniteScalar(num_digits=7).fit(z)
    half = codec.tensors["steps"] / 2
    normalized = (z.double() - codec.tensors["mean"]) / codec.tensors["scale"]
    bounded = (normalized / half * math.atanh(0.5 / 1.001)).float()
    quantized = oracle.FSQ(levels=[3] * 7).eval()(bounded[None])[0]
    quantized = quantized[0] if quantized.dim() == 3 else quantized
    digits = codec.digits(codec.encode(z)).float()
    assert torch.equal(digits, quantized) and digits.abs().mean() > 0.2
