"""A layer with its own EmbeddingCollection and two sequence keys: compiled, exported; other collections and batches."""

import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from jfi import JaggedFeatureInteraction, SequenceFeatureConfig

D, ROWS = 8, 20
KEYS = ["history_item", "history_rating"]


def collection() -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(name=f"t_{key}", embedding_dim=D, num_embeddings=ROWS, feature_names=[key]) for key in KEYS
    ]
    return EmbeddingCollection(tables=tables)


def layer_over(inner: nn.Module) -> JaggedFeatureInteraction:
    feature = SequenceFeatureConfig("taste", KEYS, ["item"])
    return JaggedFeatureInteraction([feature], D, num_heads=2, embedding_collection=inner)


class OnTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer_over(collection())

    def forward(self, values, lengths, item):
        ids = KeyedJaggedTensor(KEYS, values, lengths=lengths)
        return self.layer(ids, {"item": item}).values()


def inputs(*history: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = torch.randint(ROWS, (2 * sum(history),))
    return values, torch.tensor([*history, *history]), torch.randn(len(history), D)


def test_compiles_to_one_graph():
    torch._dynamo.reset()
    model = OnTensors()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for history in ((2, 0, 3), (1, 7, 2)):
        arguments = inputs(*history)
        torch.testing.assert_close(compiled(*arguments), model(*arguments))


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_exports(strict):
    model = OnTensors().eval()
    count = torch.export.Dim("count", min=2, max=1000)
    exported = torch.export.export(
        model, inputs(2, 0, 3), dynamic_shapes=({0: 2 * count}, None, None), strict=strict
    ).module()
    for history in ((2, 0, 3), (1, 7, 2)):
        arguments = inputs(*history)
        torch.testing.assert_close(exported(*arguments), model(*arguments))


def test_a_managed_collision_collection_inside():
    inner = collection()
    modules = {
        f"t_{key}": MCHManagedCollisionModule(
            zch_size=ROWS,
            device=torch.device("cpu"),
            eviction_interval=1,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        for key in KEYS
    }
    managed = ManagedCollisionCollection(modules, inner.embedding_configs())
    layer = layer_over(ManagedCollisionEmbeddingCollection(inner, managed))
    values, lengths, item = inputs(2, 0, 3)
    ids = KeyedJaggedTensor(KEYS, values + 10**9, lengths=lengths)  # far beyond the tables' rows
    pooled = layer(ids, {"item": item})["taste"]
    pooled.sum().backward()
    assert pooled.shape == (3, D) and all(parameter.grad is not None for parameter in inner.parameters())


def test_variable_batch_sizes_are_refused():
    ids = KeyedJaggedTensor(
        keys=KEYS,
        values=torch.tensor([1, 2, 3, 4, 5]),
        lengths=torch.tensor([2, 1, 1, 1]),
        stride_per_key_per_rank=[[1], [3]],
        inverse_indices=(KEYS, torch.tensor([[0, 0, 0], [0, 1, 2]])),
    )
    with pytest.raises(ValueError, match="must be aligned with 'history_item'"):
        layer_over(collection())(ids, {"item": torch.randn(3, D)})


def test_meta_tensors_give_shapes():
    layer = JaggedFeatureInteraction([SequenceFeatureConfig("taste", KEYS, ["item"])], D, num_heads=2, device="meta")
    offsets = torch.empty(4, dtype=torch.long, device="meta")
    rows = torch.empty(7, D, device="meta", requires_grad=True)
    events = {key: JaggedTensor(rows, offsets=offsets) for key in KEYS}
    pooled = layer(events, {"item": torch.empty(3, D, device="meta")})["taste"]
    (gradient,) = torch.autograd.grad(pooled.sum(), rows)
    assert pooled.is_meta and pooled.shape == (3, D) and gradient.is_meta and gradient.shape == (7, D)
