"""A model of the user's own that holds the layer, compiled and run without jfi."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

import jfi.ops
import jfi.serving
from jfi import JaggedFeatureInteraction, KeyBias, SequenceFeatureConfig
from jfi.serving.artifact import ArtifactError
from jfi.serving.own_module import _target_attention

HISTORY = ["history_item", "history_rating"]


class Own(nn.Module):
    """Not a SequenceDLRM."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(name=f"{key}_table", embedding_dim=16, num_embeddings=30, feature_names=[key])
            for key in HISTORY
        ]
        item = EmbeddingBagConfig(name="item_table", embedding_dim=16, num_embeddings=30, feature_names=["item"])
        self.bags = EmbeddingBagCollection(tables=[item])
        feature = SequenceFeatureConfig("taste", HISTORY, ["item"], bias=KeyBias("history_age", num_buckets=8))
        collection = EmbeddingCollection(tables=tables)
        self.layer = JaggedFeatureInteraction([feature], 16, num_heads=2, embedding_collection=collection)
        self.head = nn.Linear(32, 1)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        ids = KeyedJaggedTensor(["item", *HISTORY, "history_age"], values, lengths=lengths)
        pooled = self.bags(ids)
        return self.head(torch.cat([pooled.values(), self.layer(ids, pooled).values()], dim=1)).squeeze(1)


def batch(*lengths: int) -> tuple[Tensor, Tensor]:
    own = torch.tensor([1] * len(lengths) + [*lengths] * 3)
    return torch.randint(0, 8, (int(own.sum()),)), own


DYNAMIC = {0: torch.export.Dim.DYNAMIC}


@pytest.mark.slow  # compiling takes half a minute
def test_a_package_of_an_own_model_runs_without_jfi(tmp_path):
    torch.manual_seed(0)
    model = Own().eval()
    nn.init.normal_(model.layer.attention["taste"].bucket_bias)
    package = tmp_path / "own.pt2"
    others = jfi.serving.export_module(model, batch(2, 0, 3, 5), package, dynamic_shapes=(DYNAMIC, DYNAMIC))
    assert others == []
    with torch.no_grad():
        batches = [
            (*one, model(*one)) for one in (batch(2, 0, 3, 5), batch(7), batch(*range(40)), batch(0, 1), batch(0, 0))
        ]
    assert batches[2][-1].std() > 0.02
    torch.save(batches, tmp_path / "batches.pt")
    script = [sys.executable, Path(__file__).with_name("own_model.py"), package, tmp_path / "batches.pt"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    with pytest.raises(ArtifactError, match=r"own.pt2 exists already"):
        jfi.serving.export_module(model, batch(2, 3), package)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batches.pt", "own.pt2"]


@pytest.mark.parametrize("groups", [1, 4])
def test_the_form_without_python_is_the_operator(groups):
    offsets = torch.tensor([0, 3, 3, 8, 9])
    query, key, value = torch.randn(4, 2, 4, 8), torch.randn(9, groups, 8), torch.randn(9, groups, 5)
    table, buckets, scale = torch.randn(3, 4), torch.randint(0, 3, (9,)), torch.rand(9)
    table[1, 2] = -torch.inf
    for of_value, bias, index, value_scale in (
        (None, None, None, None),
        (value, table[buckets], None, scale),
        (None, table, buckets, None),
    ):
        rest = (None, [], [], 0.3, None, "torch")
        found, _ = _target_attention(query, key, of_value, offsets, bias, index, value_scale, *rest)
        options = {"key_bias": bias, "key_bias_index": index, "value_scale": value_scale, "scale": 0.3}
        wanted = jfi.ops.target_attention(query, key, of_value, offsets=offsets, **options)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_what_needs_python_is_refused_by_name(tmp_path):
    class Encodes(nn.Module):
        def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
            return jfi.ops.jagged_attention(x, x, x, query_offsets=offsets)

    with pytest.raises(ValueError, match="uses jfi::jagged_attention_fwd, which cannot be exported"):
        jfi.serving.export_module(Encodes(), (torch.randn(5, 2, 8), torch.tensor([0, 2, 5])), tmp_path / "x.pt2")
    with pytest.raises(AttributeError, match="no attribute 'export_models'"):
        jfi.serving.export_models  # noqa: B018
    assert not list(tmp_path.iterdir())
