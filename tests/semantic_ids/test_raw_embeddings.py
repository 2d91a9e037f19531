"""Content embeddings in the place of a codec: IDs are rows of the table of all content."""

import pytest
import torch
from torchrec import KeyedJaggedTensor

from jfi import SemanticIDEmbedding
from jfi.semantic_ids import UNKNOWN_SID, Codec, RawEmbeddings, sid_quality
from jfi.semantic_ids import raw_embeddings as module

NAN = float("nan")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 16)
    monkeypatch.setattr(module, "_ROWS", 8)


def content(device) -> list[torch.Tensor]:
    """Of 60 items: 2 are alike, 1 has no content, 2 lack a source, and 2 differ by the sign of a zero."""
    generator = torch.Generator().manual_seed(0)
    title, image = torch.randn(60, 5, generator=generator), 40 + 9 * torch.randn(60, 3, generator=generator)
    title[7], image[7] = title[3], image[3]
    title[9:11], image[10:12] = NAN, NAN
    return [title.to(device), image.to(device)]


def test_an_id_is_the_content(device, tmp_path):
    sources = content(device)
    codec = RawEmbeddings().fit(sources)
    sids = codec.encode(sources)
    assert sids[10] == UNKNOWN_SID and sids[3] == sids[7] and len(sids.unique()) == 59  # with that of no content
    known = torch.arange(60, device=device) != 10
    decoded, wanted = codec.decode(sids), torch.cat(sources, 1)
    wanted = torch.where(wanted.isnan(), codec.tensors["mean"].float(), wanted)  # what an item lacks counts as the mean
    torch.testing.assert_close(decoded, wanted, atol=1e-5, rtol=1e-6)
    quality = sid_quality(codec, sources, sids)
    assert quality.reconstruction_error < 1e-10 and quality.distinct == 58 and quality.unknown == 1
    # Content of blocks and devices of its own, and content that nobody had before.
    assert torch.equal(codec.encode([source[known][5:31] for source in sources]), sids[known][5:31])
    assert torch.equal(codec.encode([source + 1e-4 for source in sources]), sids)
    new = [torch.randn(40, 5, device=device), 40 + 9 * torch.randn(40, 3, device=device)]
    flat = [(torch.cat(new, 1) - codec.tensors["mean"]), wanted[known] - codec.tensors["mean"]]
    scale = codec.tensors["scale"].repeat_interleave(torch.tensor(codec.widths, device=device))
    nearest = torch.cdist(*(one.double() / scale for one in flat)).argmin(1)
    assert torch.equal(codec.decode(codec.encode(new)), decoded[known][nearest])
    codec.save(tmp_path / "codec.safetensors")
    loaded = Codec.load(tmp_path / "codec.safetensors")
    assert loaded.fingerprint == codec.fingerprint and torch.equal(
        loaded.encode([one.cpu() for one in sources]), sids.cpu()
    )


def test_a_model_reads_the_content_itself(device):
    sources = content(device)
    codec = RawEmbeddings().fit(sources)
    sids = codec.encode(sources)
    embedding = SemanticIDEmbedding(codec, 4, ["sid"], "decode", device=device)
    found = embedding(KeyedJaggedTensor(["sid"], sids, lengths=torch.tensor([60], device=device)))["sid"].values()
    centred = torch.cat(sources, 1) - codec.tensors["mean"]
    scale = codec.tensors["scale"] / torch.tensor([5.0, 3.0], device=device).sqrt()
    rows = (centred / scale.repeat_interleave(torch.tensor([5, 3], device=device))).float().nan_to_num(0)
    wanted = rows @ embedding.projection.weight.T + embedding.projection.bias
    wanted[10] = embedding.unknown
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert {name for name, _ in embedding.named_parameters()} == {"projection.weight", "projection.bias", "unknown"}
    with pytest.raises(ValueError, match="read must not be 'digits' for a codec of 1 codes below 58"):
        SemanticIDEmbedding(codec, 4, ["sid"])


def test_a_row_of_an_equal_hash_is_another_row(monkeypatch):
    monkeypatch.setattr(module, "_hashes", lambda rows: torch.zeros(len(rows), dtype=torch.int64))
    source = torch.randn(20, 3)
    source[5], source[6, 0], source[7] = source[4], 0.0, source[0]
    codec = RawEmbeddings().fit(source)
    torch.testing.assert_close(codec.decode(codec.encode(source)), source)


def test_refused():
    with pytest.raises(RuntimeError, match="the RawEmbeddings is not fitted"):
        RawEmbeddings().encode(torch.randn(3, 2))
    with pytest.raises(RuntimeError, match="not fitted"):
        SemanticIDEmbedding(RawEmbeddings(), 4, ["sid"], "decode")
    codec = RawEmbeddings()
    with pytest.raises(ValueError, match="sources must have at least 2 different rows with content, got 1"):
        codec.fit(torch.ones(4, 2))
    with pytest.raises(RuntimeError, match="not fitted"):
        codec.encode(torch.ones(4, 2))
