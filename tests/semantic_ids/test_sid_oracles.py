"""Codecs against vector-quantize-pytorch, where it is installed: `pip install vector-quantize-pytorch`."""

import pytest
import torch

from jfi.semantic_ids import ResidualKMeans

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
