"""SemanticIDEmbedding against the codec and plain PyTorch: each way to read an ID, unknown IDs, state, refusals."""

import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from jfi import JaggedFeatureInteraction, SemanticIDEmbedding, SequenceFeatureConfig
from jfi.models import AttentionPooling, SequenceDLRM
from jfi.semantic_ids import UNKNOWN_SID, DiscretePCA, ResidualKMeans, VQFusion

WIDTH = 5
KEYS = ["item_sid", "history_sid"]
CODECS = {
    "dpca": lambda: DiscretePCA(12),
    "rq": lambda: ResidualKMeans(2, 12, steps=5),
    "vq": lambda: VQFusion(DiscretePCA(7), latent=4, hidden=8, steps=20),
    "vq_rq": lambda: VQFusion(ResidualKMeans(3, 4), latent=4, hidden=8, steps=20, refit_every=10),
}


@pytest.fixture(scope="module", params=CODECS)
def fitted(request):
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randn(200, width, generator=generator) * size + 3 for width, size in ((6, 2), (3, 50))]
    codec = CODECS[request.param]().fit(sources)
    return codec, codec.encode(sources)


@pytest.fixture(scope="module")
def dpca():
    content = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    codec = DiscretePCA(12).fit(content)
    return codec, codec.encode(content)


def batch(sids) -> KeyedJaggedTensor:
    """Three samples: targets, of which the second is unknown, and histories of 3, 0 and 2 events, one unknown."""
    values = torch.cat([sids[:1], torch.tensor([UNKNOWN_SID]), sids[1:5], torch.tensor([UNKNOWN_SID]), sids[5:6]])
    return KeyedJaggedTensor(KEYS, values, lengths=torch.tensor([1, 1, 1, 3, 0, 2]))


def test_digits_are_projected(dpca):
    codec, sids = dpca
    embedding = SemanticIDEmbedding(codec, WIDTH, KEYS)
    found = embedding.embed(sids)
    wanted = codec.digits(sids).float() @ embedding.projection.weight.T + embedding.projection.bias
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    torch.testing.assert_close(
        embedding.projection.weight.grad, codec.digits(sids).float().sum(0).expand(WIDTH, codec.layout.num_digits)
    )


def test_content_is_decoded_as_it_was_fitted(fitted):
    codec, sids = fitted
    embedding = SemanticIDEmbedding(codec, WIDTH, KEYS, "decode")
    scale = codec.tensors["scale"].repeat_interleave(torch.tensor(codec.widths))
    widths = torch.tensor([float(width) for width in codec.widths for _ in range(width)])
    normalized = (codec.decode(sids) - codec.tensors["mean"]) / scale * widths.sqrt()
    wanted = normalized.float() @ embedding.projection.weight.T + embedding.projection.bias
    torch.testing.assert_close(embedding.embed(sids), wanted, atol=1e-4, rtol=1e-4)
    lost = 1.0 if isinstance(codec, VQFusion) else 0.7  # of content that is random in every direction
    assert 1 - lost < normalized.square().mean() < 1.1
    trained = {name for name, _ in embedding.named_parameters()}
    assert trained == {"projection.weight", "projection.bias", "unknown"}  # the codec is frozen


@pytest.mark.parametrize("read", ["digits", "decode"])
def test_keys_lengths_and_unknown_ids(dpca, read):
    codec, sids = dpca
    embedding = SemanticIDEmbedding(codec, WIDTH, KEYS, read)
    assert not embedding.unknown.any()
    torch.nn.init.normal_(embedding.unknown)
    found = embedding(batch(sids))
    assert found["history_sid"].lengths().tolist() == [3, 0, 2]
    torch.testing.assert_close(found["item_sid"].values()[0], embedding.embed(sids[:1])[0])
    assert torch.equal(found["item_sid"].values()[1], embedding.unknown)
    assert torch.equal(found["history_sid"].values()[3], embedding.unknown)
    torch.testing.assert_close(found["history_sid"].values()[:3], embedding.embed(sids[2:5]))
    found["history_sid"].values().sum().backward()
    torch.testing.assert_close(embedding.unknown.grad, torch.ones(WIDTH))  # of the one unknown event
    assert all(parameter.grad is not None for parameter in embedding.parameters())
    empty = KeyedJaggedTensor(KEYS, sids[:0], lengths=torch.zeros(0, dtype=torch.int64))
    assert embedding(empty)["item_sid"].values().shape == (0, WIDTH)


@pytest.mark.parametrize("read", ["digits", "decode"])
def test_a_state_dict_is_complete(dpca, read):
    codec, sids = dpca
    saved = SemanticIDEmbedding(codec, WIDTH, KEYS, read)
    torch.nn.init.normal_(saved.unknown)
    loaded = SemanticIDEmbedding(codec, WIDTH, KEYS, read, device="meta")
    loaded.to_empty(device="cpu").reset_parameters()
    assert loaded.embed(sids).isfinite().all()  # its buffers are those of the codec again
    loaded.load_state_dict(saved.state_dict())
    ids = batch(sids)
    for key in KEYS:
        assert torch.equal(loaded(ids)[key].values(), saved(ids)[key].values())
    assert torch.equal(loaded.fingerprint, saved.fingerprint)
    with torch.no_grad():  # as a checkpoint is loaded, in place
        loaded.fingerprint.zero_()
    with pytest.raises(RuntimeError, match="fingerprint is of the codec 000000000000, but"):
        loaded.load_state_dict(loaded.state_dict())
    other = DiscretePCA(12).fit(torch.randn(50, 6))
    with pytest.raises(RuntimeError, match=f"of the codec {codec.fingerprint[:12]}, but .* {other.fingerprint[:12]}"):
        SemanticIDEmbedding(other, WIDTH, KEYS, read).load_state_dict(saved.state_dict())


def test_forty_digits_use_the_sign(device):
    codec = DiscretePCA(40).fit(torch.randn(100, 6))
    sids = codec.encode(torch.randn(100, 6))
    assert (sids < 0).any() and not (sids == UNKNOWN_SID).any()
    embedding = SemanticIDEmbedding(codec, WIDTH, KEYS).to(device)
    wanted = codec.digits(sids).float() @ embedding.projection.weight.T.cpu() + embedding.projection.bias.cpu()
    torch.testing.assert_close(embedding.embed(sids.to(device)).cpu(), wanted)


@pytest.mark.parametrize("combine", ["sum", "concat"])
def test_it_stands_beside_a_collection(dpca, combine):
    codec, sids = dpca
    tables = EmbeddingCollection(
        tables=[EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=9, feature_names=["item", "history"])]
    )
    ids = KeyedJaggedTensor(
        ["item", "history", *KEYS],
        torch.cat([torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), batch(sids).values()]),
        lengths=torch.tensor([1, 1, 1, 3, 0, 2] * 2),
    )
    feature = SequenceFeatureConfig("taste", ["history", "history_sid"], ["item", "item_sid"], combine=combine)
    embedding = SemanticIDEmbedding(codec, 4, KEYS)
    sizes = {
        "dense_in_features": 2,
        "dense_arch_layer_sizes": [4],
        "over_arch_layer_sizes": [4, 1],
        "pooling": AttentionPooling(2),
    }
    model = SequenceDLRM(None, tables, [feature], **sizes, semantic_ids=embedding)
    layer = JaggedFeatureInteraction([feature], 4, 2)
    layer.load_state_dict(model.sequence_arch.pooling.state_dict())
    events = {**tables(ids), **embedding(ids)}
    targets = {key: events[key].values() for key in ("item", "item_sid")}
    pooled = layer(events, targets)["taste"]
    entries = torch.stack([*targets.values(), pooled], 1)
    dense = torch.rand(3, 2)
    wanted = model.over_arch(model.inter_arch(model.dense_arch(dense), entries))
    torch.testing.assert_close(model(dense, ids), wanted)
    alone = SequenceFeatureConfig("taste", ["history_sid"], ["item_sid"])
    assert SequenceDLRM(None, None, [alone], **sizes, semantic_ids=embedding)(dense, ids).shape == (3, 1)


def test_refused(dpca):
    codec, sids = dpca
    with pytest.raises(ValueError, match="read must be 'decode' for a codec of 2 codes below 12"):
        SemanticIDEmbedding(ResidualKMeans(2, 12), 4, KEYS)
    with pytest.raises(ValueError, match="read must be 'digits' or 'decode', got 'digit'"):
        SemanticIDEmbedding(codec, 4, KEYS, "digit")
    with pytest.raises(ValueError, match=r"feature_names must be a list of distinct keys, at least one, got \[\]"):
        SemanticIDEmbedding(codec, 4, [])
    with pytest.raises(RuntimeError, match="the DiscretePCA is not fitted"):
        SemanticIDEmbedding(DiscretePCA(3), 4, KEYS)
    embedding = SemanticIDEmbedding(codec, 4, KEYS)
    ids = batch(sids)
    with pytest.raises(ValueError, match="features must hold the key 'item_sid'"):
        embedding(KeyedJaggedTensor(["item"], sids[:1], lengths=torch.tensor([1])))
    with pytest.raises(TypeError, match=r"features\['item_sid'\] must be int64 semantic IDs, got torch.int32"):
        embedding(KeyedJaggedTensor(KEYS, ids.values().int(), lengths=ids.lengths()))
    wrong = ids.values().clone()
    wrong[3] = 2**60
    with pytest.raises(ValueError, match=r"features\['history_sid'\]\[0\] is .* no ID of 12 ternary digits"):
        embedding(KeyedJaggedTensor(KEYS, wrong, lengths=ids.lengths()))
    sizes = {"dense_in_features": 2, "dense_arch_layer_sizes": [8], "over_arch_layer_sizes": [4, 1]}
    feature = SequenceFeatureConfig("taste", ["history_sid"], ["item_sid"])
    with pytest.raises(
        ValueError, match="semantic_ids must be as wide as the last of dense_arch_layer_sizes, 8, got 4"
    ):
        SequenceDLRM(None, None, [feature], **sizes, semantic_ids=embedding)
