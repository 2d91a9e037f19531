"""The layer with an EmbeddingCollection inside, and under TorchRec's tracers."""

import pytest
import torch
import torch._dynamo.testing
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.train_pipeline.tracing import Tracer as PipelineTracer
from torchrec.fx import symbolic_trace

from jfi import JaggedFeatureInteraction, SequenceFeatureConfig
from jfi.modules import JaggedMeanPooling

from .conftest import EMBEDDING_DIM, LENGTHS

FEATURES = [
    SequenceFeatureConfig("aged", ["history", "rating"], ["item"], bias="age", num_buckets=4),
    SequenceFeatureConfig("weighted", ["history", "rating"], ["item"], bias="weights", combine="concat"),
    SequenceFeatureConfig("near", ["rating"], ["item"], bias="position"),
]


@pytest.fixture
def layer():
    tables = [
        EmbeddingConfig(name=f"table_{key}", embedding_dim=EMBEDDING_DIM, num_embeddings=10, feature_names=[key])
        for key in ("history", "rating")
    ]
    collection = EmbeddingCollection(tables=tables)
    return JaggedFeatureInteraction(FEATURES, EMBEDDING_DIM, 2, 2, embedding_collection=collection)


@pytest.fixture
def ids():
    keys = ["age", "history", "rating"]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.randint(4, (len(keys) * sum(LENGTHS),)),
        lengths=torch.tensor(LENGTHS * len(keys)),
        weights=torch.rand(len(keys) * sum(LENGTHS)),
    )


@pytest.fixture
def targets(target):
    return {"item": target(dtype=torch.float32)}


def without_collection(layer):
    other = JaggedFeatureInteraction(FEATURES, EMBEDDING_DIM, 2, 2)
    other.load_state_dict(layer.state_dict(), strict=False)
    return other


def test_ids_and_embeddings_give_the_same(layer, ids, targets):
    sequences = layer.embedding_collection(ids)
    sequences["history"]._weights = ids["history"].weights()
    sequences["age"] = ids["age"]
    got, want = layer(ids, targets), without_collection(layer)(sequences, targets)
    assert got.keys() == want.keys() == ["aged", "weighted", "near"]
    torch.testing.assert_close(got.values(), want.values(), rtol=0, atol=0)


def test_tables_and_parameters_get_gradients_and_keep_their_names(layer, ids, targets):
    layer(ids, targets).values().sum().backward()
    names = set(layer.state_dict())
    assert {"embedding_collection.embeddings.table_rating.weight", "groups.1.query_weight"} <= names
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_reset_parameters_leaves_the_tables_alone(layer):
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.reset_parameters()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name.startswith("embedding_collection") or "bias" in name), name


def test_torchrecs_tracer_goes_all_the_way_through(layer, ids, targets):
    traced = symbolic_trace(layer)
    torch.testing.assert_close(traced(ids, targets).values(), layer(ids, targets).values(), rtol=0, atol=0)


def test_torchrecs_tracer_traces_the_mean(events):
    mean = JaggedMeanPooling(FEATURES, EMBEDDING_DIM)
    sequences = {"history": events(), "rating": events()}
    torch.testing.assert_close(symbolic_trace(mean)(sequences).values(), mean(sequences).values(), rtol=0, atol=0)


def test_the_train_pipelines_tracer_finds_the_collection_fed_by_the_batch_alone(layer):
    graph = PipelineTracer(leaf_modules=["embedding_collection", "groups.0", "groups.1"]).trace(layer)
    calls = {node.target: node for node in graph.nodes if node.op == "call_module"}
    assert set(calls) == {"embedding_collection", "groups.0", "groups.1"}
    assert [argument.op for argument in calls["embedding_collection"].args] == ["placeholder"]


def test_compiles_to_one_graph_for_every_number_of_events(layer, targets):
    compilations = torch._dynamo.testing.CompileCounter()
    other = without_collection(layer)

    def interact(history, rating, weights, ages, offsets, item):
        sequences = {
            "history": JaggedTensor(history, weights=weights, offsets=offsets),
            "rating": JaggedTensor(rating, offsets=offsets),
            "age": JaggedTensor(ages, offsets=offsets),
        }
        return other(sequences, {"item": item}).values()

    compiled = torch.compile(interact, backend=compilations, dynamic=True, fullgraph=True)
    for count in (9, 4, 31, 12):
        offsets = torch.tensor([0, 1, 1, 3, count])
        fields = [torch.randn(count, EMBEDDING_DIM) for _ in range(2)]
        arguments = [*fields, torch.rand(count), torch.randint(4, (count,)), offsets, targets["item"]]
        torch.testing.assert_close(compiled(*arguments), interact(*arguments))
    assert compilations.frame_count == 1
