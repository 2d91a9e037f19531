"""The layer with an EmbeddingCollection inside, and under TorchRec's tracers."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.train_pipeline.tracing import Tracer as PipelineTracer
from torchrec.fx import symbolic_trace
from torchrec.inference.modules import quantize_embeddings
from torchrec.models.dlrm import InteractionArch, OverArch
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantizedCollection

from jfi import JaggedFeatureInteraction, KeyBias, PositionBias, SequenceFeatureConfig, WeightBias
from jfi.modules import JaggedPooling

from .conftest import EMBEDDING_DIM, LENGTHS

FEATURES = [
    SequenceFeatureConfig("aged", ["history", "rating"], ["item"], bias=KeyBias("age", 4)),
    SequenceFeatureConfig("weighted", ["history", "rating"], ["item"], bias=WeightBias(), combine="concat"),
    SequenceFeatureConfig("near", ["rating"], ["item"], bias=PositionBias()),
    SequenceFeatureConfig("scaled", ["rating"], ["item"], bias=PositionBias(), weighted_values=True),
    SequenceFeatureConfig("aged and scaled", ["history"], ["item"], bias=KeyBias("age", 4), weighted_values=True),
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
    for key in ("history", "rating"):
        sequences[key]._weights = ids[key].weights()
    sequences["age"] = ids["age"]
    got, want = layer(ids, targets), without_collection(layer)(sequences, targets)
    assert got.keys() == want.keys() == [feature.name for feature in FEATURES]
    torch.testing.assert_close(got.values(), want.values(), rtol=0, atol=0)


@pytest.mark.parametrize("count", [len(LENGTHS), 0])
def test_a_quantized_collection(layer, ids, targets, count):
    """Given to a layer, or put in the place of the one that it has; also for a batch of no samples."""
    if not count:
        ids = KeyedJaggedTensor(ids.keys(), ids.values()[:0], ids.weights()[:0], lengths=ids.lengths()[:0])
        targets = {"item": targets["item"][:0]}
    kinds = {"additional_qconfig_spec_keys": [EmbeddingCollection]}
    kinds["additional_mapping"] = {EmbeddingCollection: QuantizedCollection}
    swapped = quantize_embeddings(layer, torch.qint8, inplace=False, **kinds)
    collection = swapped.embedding_collection
    assert type(collection) is QuantizedCollection
    given = JaggedFeatureInteraction(FEATURES, EMBEDDING_DIM, 2, 2, embedding_collection=collection)
    given.attention.load_state_dict(layer.attention.state_dict())
    found = [one(ids, targets).values() for one in (swapped, given)]
    torch.testing.assert_close(*found, rtol=0, atol=0)
    torch.testing.assert_close(found[0], layer(ids, targets).values(), rtol=0.1, atol=0.1)


def test_a_bias_may_read_ids_that_another_feature_embeds(ids, targets):
    def features(key):
        bias = KeyBias(key, 4)
        return [SequenceFeatureConfig("aged", ["history"], ["item"], bias=bias), FEATURES[2]]

    collection = EmbeddingCollection(tables=two_tables())
    layer = JaggedFeatureInteraction(features("rating"), EMBEDDING_DIM, embedding_collection=collection)
    nn.init.normal_(layer.attention.aged.bucket_bias)
    other = JaggedFeatureInteraction(features("rating_ids"), EMBEDDING_DIM)
    other.load_state_dict(layer.state_dict(), strict=False)
    sequences = {**collection(ids), "rating_ids": ids["rating"]}
    got, want = layer(ids, targets), other(sequences, targets)
    torch.testing.assert_close(got.values(), want.values(), rtol=0, atol=0)
    weights = layer.attention_weights(ids, targets)["aged"], other.attention_weights(sequences, targets)["aged"]
    torch.testing.assert_close(weights[0].values(), weights[1].values(), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"sequences\['rating'\] must hold bucket ids from 0 to 3 .*, got 4"):
        layer(KeyedJaggedTensor(ids.keys(), ids.values() + 1, lengths=ids.lengths()), targets)


@pytest.mark.parametrize("option", [{"bias": WeightBias()}, {"weighted_values": True}], ids=["bias", "values"])
def test_weights_of_a_key_of_two_tables(option, ids, targets):
    """A collection names such embeddings `<key>@<table>`."""
    tables = [replace(one, feature_names=["history"]) for one in two_tables()]
    collection = EmbeddingCollection(tables=tables)
    names = ["history@table_history", "history@table_rating"]
    features = [SequenceFeatureConfig(name, [name], ["item"], **option) for name in names]
    features.append(SequenceFeatureConfig("both", names, ["item"], **option))
    layer = JaggedFeatureInteraction(features, EMBEDDING_DIM, embedding_collection=collection)
    other = JaggedFeatureInteraction(features, EMBEDDING_DIM)
    other.load_state_dict(layer.state_dict(), strict=False)
    sequences = collection(ids)
    for name in names:
        events = sequences[name]
        sequences[name] = JaggedTensor(events.values(), lengths=events.lengths(), weights=ids["history"].weights())
    got, want = layer(ids, targets), other(sequences, targets)
    torch.testing.assert_close(got.values(), want.values(), rtol=0, atol=0)


def test_tables_and_parameters_get_gradients_and_keep_their_names(layer, ids, targets):
    layer(ids, targets).values().sum().backward()
    names = set(layer.state_dict())
    assert {"embedding_collection.embeddings.table_rating.weight", "attention.weighted.query_weight"} <= names
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
    mean = JaggedPooling(FEATURES, EMBEDDING_DIM)
    sequences = {"history": events(), "rating": events()}
    torch.testing.assert_close(symbolic_trace(mean)(sequences).values(), mean(sequences).values(), rtol=0, atol=0)


def test_the_train_pipelines_tracer_finds_the_collection_fed_by_the_batch_alone(layer):
    graph = PipelineTracer(leaf_modules=["embedding_collection"]).trace(layer)
    calls = {node.target: node for node in graph.nodes if node.op == "call_module"}
    assert set(calls) == {"embedding_collection"}
    assert [argument.op for argument in calls["embedding_collection"].args] == ["placeholder"]


TWO_KEYS = [SequenceFeatureConfig("taste", ["history", "rating"], ["item"], bias=PositionBias())]


def two_tables():
    return [
        EmbeddingConfig(name=f"table_{key}", embedding_dim=EMBEDDING_DIM, num_embeddings=10, feature_names=[key])
        for key in ("history", "rating")
    ]


class OwnCollection(torch.nn.Module):
    """Plain tensors in and out, as torch.export wants them."""

    def __init__(self):
        super().__init__()
        collection = EmbeddingCollection(tables=two_tables())
        self.layer = JaggedFeatureInteraction(TWO_KEYS, EMBEDDING_DIM, 2, embedding_collection=collection)

    def forward(self, values, lengths, item):
        ids = KeyedJaggedTensor(["history", "rating"], values, lengths=lengths)
        return self.layer(ids, {"item": item}).values()


def own_inputs(lengths):
    values = torch.randint(10, (2 * sum(lengths),))
    return values, torch.tensor(lengths * 2), torch.randn(len(lengths), EMBEDDING_DIM)


def test_a_layer_with_its_own_collection_compiles_to_one_graph():
    torch._dynamo.reset()
    model = OwnCollection()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    inputs = own_inputs([3, 0, 1, 5])
    torch.testing.assert_close(compiled(*inputs), model(*inputs))


def test_a_layer_with_its_own_collection_exports():
    model = OwnCollection()
    inputs = own_inputs([3, 0, 1, 5])
    dynamic = ({0: torch.export.Dim.DYNAMIC}, {}, {})
    program = torch.export.export(model, inputs, dynamic_shapes=dynamic, strict=False)
    for lengths in ([3, 0, 1, 5], [2, 2, 7, 0]):
        inputs = own_inputs(lengths)
        torch.testing.assert_close(program.module()(*inputs), model(*inputs))


def test_a_managed_collision_collection(targets):
    """Ids of any size: the collection maps them to its rows and returns the embeddings beside the new ids."""
    tables = two_tables()
    modules = {
        table.name: MCHManagedCollisionModule(
            zch_size=10, device=torch.device("cpu"), eviction_interval=2, eviction_policy=DistanceLFU_EvictionPolicy()
        )
        for table in tables
    }
    for returns in (False, True):
        managed = ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(tables=tables), ManagedCollisionCollection(modules, tables), returns
        )
        layer = JaggedFeatureInteraction(TWO_KEYS, EMBEDDING_DIM, 2, embedding_collection=managed)
        keys = ["history", "rating"]
        values = torch.randint(2**40, (2 * sum(LENGTHS),))
        ids = KeyedJaggedTensor(keys, values, lengths=torch.tensor(LENGTHS * 2))
        pooled = layer(ids, targets)["taste"]
        pooled.sum().backward()
        assert pooled.shape == (len(LENGTHS), EMBEDDING_DIM)
        assert all(x.grad is not None for x in layer.attention.parameters())


def test_compiles_to_one_graph_for_every_number_of_events(layer, targets):
    compilations = torch._dynamo.testing.CompileCounter()
    other = without_collection(layer)

    def interact(history, rating, weights, ages, offsets, item):
        sequences = {
            "history": JaggedTensor(history, weights=weights, offsets=offsets),
            "rating": JaggedTensor(rating, weights=weights, offsets=offsets),
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


class DensePart(torch.nn.Module):
    """Everything after the look-ups: the layer, InteractionArch and OverArch."""

    def __init__(self):
        super().__init__()
        features = [
            SequenceFeatureConfig("clicks", ["clicks"], ["item"], bias=PositionBias()),
            SequenceFeatureConfig("orders", ["orders"], ["item"], bias=PositionBias()),
            SequenceFeatureConfig("aged clicks", ["clicks"], ["item"], bias=KeyBias("clicks_age", 4)),
            SequenceFeatureConfig("aged orders", ["orders"], ["item"], bias=KeyBias("orders_age", 3)),
            SequenceFeatureConfig("scaled", ["orders"], ["item"], bias=WeightBias(), weighted_values=True),
        ]
        self.layer = JaggedFeatureInteraction(features, EMBEDDING_DIM, 2)
        self.interaction = InteractionArch(len(features))
        self.over = OverArch(EMBEDDING_DIM + 15, [4, 1])

    def forward(self, rows, lengths, weights, ages, dense, item):
        sequences = {}
        for key in ("clicks", "orders"):
            sequences[key] = JaggedTensor(rows[key], lengths=lengths[key], weights=weights[key])
            sequences[f"{key}_age"] = JaggedTensor(ages[key], lengths=lengths[key])
        pooled = self.layer(sequences, {"item": item}).values()
        return self.over(self.interaction(dense, pooled.unflatten(1, (-1, EMBEDDING_DIM))))


def test_the_dense_part_of_a_model_compiles_once_for_a_hundred_batches():
    compilations = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    model = DensePart()
    compiled = torch.compile(model, backend=compilations, dynamic=True, fullgraph=True)
    for step in range(100):
        lengths = {key: torch.randint(9, (6,)) + torch.tensor([2, 0, 0, 0, 0, 0]) for key in ("clicks", "orders")}
        counts = {key: int(rows.sum()) for key, rows in lengths.items()}
        rows = {key: torch.randn(count, EMBEDDING_DIM, requires_grad=True) for key, count in counts.items()}
        weights = {key: torch.rand(count) for key, count in counts.items()}
        ages = {key: torch.randint(3, (count,)) for key, count in counts.items()}
        inputs = rows, lengths, weights, ages, torch.randn(6, EMBEDDING_DIM), torch.randn(6, EMBEDDING_DIM)
        got = compiled(*inputs)
        leaves = [*rows.values(), *model.parameters()]
        gradients = torch.autograd.grad(got.sum(), leaves)
        if step % 33 == 0:
            want = model(*inputs)
            torch.testing.assert_close(got, want)
            for gradient, wanted in zip(gradients, torch.autograd.grad(want.sum(), leaves), strict=True):
                torch.testing.assert_close(gradient, wanted)
    assert compilations.frame_count == 1
