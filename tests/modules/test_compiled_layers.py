"""Every layer under torch.compile(fullgraph=True, dynamic=True), forward and backward: one graph for all batches."""

from dataclasses import replace

import docs_models
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from jfi import (
    JaggedEncoder,
    JaggedFeatureInteraction,
    KeyBias,
    PositionBias,
    SemanticIDEmbedding,
    SequenceFeatureConfig,
    TimeBias,
    WeightBias,
)
from jfi.modules import JaggedPooling
from jfi.semantic_ids import DiscretePCA, Layout

WIDTH, ROWS = 8, 20
TASTE = SequenceFeatureConfig("taste", ["history"], ["item"])


def taste(name: str = "taste", **changes: object) -> SequenceFeatureConfig:
    return replace(TASTE, name=name, **changes)


def pool(*features: SequenceFeatureConfig, **options: object) -> JaggedFeatureInteraction:
    return JaggedFeatureInteraction(list(features), WIDTH, **{"num_heads": 2, **options})


def encoder(*features: SequenceFeatureConfig, **options: object) -> JaggedEncoder:
    return JaggedEncoder(list(features), WIDTH, **{"num_heads": 2, "num_layers": 2, **options})


SUMMED = {"sequence_keys": ["history", "rating"]}
DENSE = {
    "plain": lambda: pool(taste()),
    "two fields": lambda: pool(taste(**SUMMED)),
    "two fields side by side": lambda: pool(taste(**SUMMED, target_keys=["item", "genre"], combine="concat")),
    "a bias by position": lambda: pool(taste(bias=PositionBias(5))),
    "a bias by weight": lambda: pool(taste(bias=WeightBias(), weighted_values=True)),
    "a bias by key": lambda: pool(taste(bias=KeyBias("bucket", 4))),
    "a bias by buckets of age": lambda: pool(taste(bias=TimeBias("bucket", 4))),
    "weighted values": lambda: pool(taste(weighted_values=True)),
    "two queries": lambda: pool(taste(bias=PositionBias(5)), num_queries=2),
    "many queries": lambda: pool(taste(), num_queries=20),
    "the longest history": lambda: pool(taste(max_seqlen=40)),
    "several features": lambda: pool(
        taste(), taste("again"), taste("rated", **SUMMED), taste("weighted", bias=WeightBias())
    ),
    "means": lambda: JaggedPooling([taste(), taste("rated", **SUMMED)], WIDTH),
    "frozen": lambda: pool(taste(**SUMMED, bias=PositionBias(5))).requires_grad_(False),
}
RAGGED = {
    "plain": lambda: pool(taste()),
    "two fields": lambda: pool(taste(**SUMMED)),
    "a bias by position": lambda: pool(taste(bias=PositionBias(5))),
    "a bias by age": lambda: pool(taste(bias=TimeBias("bucket", 6))),
    "a bias by key": lambda: pool(taste(bias=KeyBias("bucket", 4))),
    "a bias by weight": lambda: pool(taste(bias=WeightBias())),
    "weighted values": lambda: pool(taste(weighted_values=True)),
    "two queries": lambda: pool(taste(), num_queries=2),
    "means": lambda: JaggedPooling([taste()], WIDTH),
}
ENCODERS = {
    "plain": lambda: encoder(taste()),
    "causal": lambda: encoder(taste(), causal=True),
    "two fields": lambda: encoder(taste(**SUMMED, combine="concat")),
    "a bias by position": lambda: encoder(taste(bias=PositionBias(5))),
    "a bias by key": lambda: encoder(taste(bias=KeyBias("bucket", 4))),
    "a bias by distance": lambda: encoder(taste(relative_bias=PositionBias(4)), causal=True),
    "a bias by time": lambda: encoder(taste(relative_bias=TimeBias("time", 4)), causal=True),
}


def compare(model: nn.Module, function, batches: list[tuple]) -> None:
    """Outputs and gradients, compiled once and eagerly."""
    torch._dynamo.reset()
    parameters = [x for x in model.parameters() if x.requires_grad]
    with torch.no_grad():
        for x in parameters:
            x.add_(torch.randn_like(x), alpha=0.2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        for batch in batches:
            leaves = [*parameters, *[x for x in batch if x.requires_grad]]
            results = []
            for attempt in (compiled, function):
                out = attempt(*batch)
                results.append((out, torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)))
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def events(count: int, offsets: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "history": torch.randn(count, WIDTH, requires_grad=True),
        "rating": torch.randn(count, WIDTH, requires_grad=True),
        "weights": torch.rand(count) + 0.1,
        "bucket": torch.randint(4, (count,)),
        "time": torch.arange(count),
        "offsets": offsets,
    }


def sequences_of(history, rating, weights, bucket, time, offsets) -> dict[str, JaggedTensor]:
    return {
        "history": JaggedTensor(history, weights=weights, offsets=offsets),
        "rating": JaggedTensor(rating, weights=weights, offsets=offsets),
        "bucket": JaggedTensor(bucket, offsets=offsets),
        "time": JaggedTensor(time, offsets=offsets),
    }


#: Ends of the histories and of the candidates of batches of users.
BATCHES = [
    ([0, 2, 2, 9], [0, 3, 4, 7]),
    ([0, 0, 14, 15, 21, 40], [0, 1, 9, 9, 10, 13]),
    ([0, 5, 5, 5, 31], [0] * 4 + [6]),
]


@pytest.mark.parametrize("name", DENSE)
def test_one_target_a_sample(name):
    model = DENSE[name]()

    def interact(item, genre, *of_events):
        return model(sequences_of(*of_events), {"item": item, "genre": genre}).values()

    batches = []
    for ends, _ in BATCHES:
        item = [torch.randn(len(ends) - 1, WIDTH, requires_grad=True) for _ in range(2)]
        batches.append((*item, *events(ends[-1], torch.tensor(ends)).values()))
    compare(model, interact, batches)


@pytest.mark.parametrize("name", ["plain", "two fields", "a bias by position", "several features"])
def test_a_layer_is_one_operator_each_way(name):
    """Its small products and views would cost the host more than the attention."""
    torch._dynamo.reset()
    model, names = DENSE[name](), []

    def count(graph, _):
        of_jfi = [str(node.target) for node in graph.graph.nodes if str(node.target).startswith("jfi.")]
        names.append((of_jfi, sum("mm" in str(node.target) for node in graph.graph.nodes)))
        return make_boxed_func(graph.forward)

    def interact(item, genre, *of_events):
        return model(sequences_of(*of_events), {"item": item, "genre": genre}).values()

    item = [torch.randn(3, WIDTH, requires_grad=True) for _ in range(2)]
    batch = *item, *events(9, torch.tensor([0, 2, 2, 9])).values()
    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    torch.compile(interact, backend=backend, fullgraph=True)(*batch).sum().backward()
    (fwd, fwd_products), (bwd, bwd_products) = names
    assert fwd_products == bwd_products == 0
    for found, way in ((fwd, "fwd"), (bwd, "bwd")):
        assert {one.partition("::")[0] for one in found} == {f"jfi.absorbed_target_attention_{way}.default"}


@pytest.mark.parametrize(
    ("name", "timed"),
    # A bias by key has the same ids whatever the time, and takes none.
    [(name, timed) for name in RAGGED for timed in (False, True) if not (timed and name == "a bias by key")],
)
def test_ragged_targets(name, timed):
    model = RAGGED[name]()

    def interact(item, target_offsets, target_time, *of_events):
        sequences = sequences_of(*of_events)
        times = (JaggedTensor(target_time, offsets=target_offsets), sequences["time"]) if timed else ()
        return model(sequences, {"item": JaggedTensor(item, offsets=target_offsets)}, *times).values()

    batches = []
    for ends, candidates in BATCHES:
        item = torch.randn(candidates[-1], WIDTH, requires_grad=True)
        targets = (item, torch.tensor(candidates), torch.arange(candidates[-1]) * 5)
        batches.append((*targets, *events(ends[-1], torch.tensor(ends)).values()))
    compare(model, interact, batches)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in ("plain", "a bias by distance") else pytest.mark.slow) for x in ENCODERS]
)
def test_encoders(name):
    model = ENCODERS[name]()

    def encode(*of_events):
        return model(sequences_of(*of_events))["taste"].values()

    compare(model, encode, [tuple(events(ends[-1], torch.tensor(ends)).values()) for ends, _ in BATCHES])


@pytest.mark.parametrize("read", ["collection", "digits", "decode"])
def test_ids(read):
    """The ids of a KeyedJaggedTensor, read by a collection of the layer's own or by a SemanticIDEmbedding before it."""
    if read == "collection":
        keys = ["history", "rating"]
        tables = [
            EmbeddingConfig(name=key, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[key]) for key in keys
        ]
        layer = pool(taste(**SUMMED), embedding_collection=EmbeddingCollection(tables=tables))
        model, embed = layer, lambda ids: ids
    else:
        keys, codec = ["history"], DiscretePCA(num_digits=10).fit(torch.randn(60, 6))
        layer, embed = pool(taste()), SemanticIDEmbedding(codec, WIDTH, ["history"], read=read)
        model = nn.ModuleList([layer, embed])

    def interact(values, lengths, item):
        return layer(embed(KeyedJaggedTensor(keys, values, lengths=lengths)), {"item": item}).values()

    batches = []
    for ends, _ in BATCHES:
        lengths = torch.tensor(ends).diff().repeat(len(keys))
        item = torch.randn(len(ends) - 1, WIDTH, requires_grad=True)
        count = len(keys) * ends[-1]
        sids = Layout(10).pack(torch.randint(-1, 2, (count, 10)))
        batches.append((torch.randint(ROWS, (count,)) if read == "collection" else sids, lengths, item))
    compare(model, interact, batches)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i > 1 else ()) for i, name in enumerate(docs_models.MODELS)]
)
def test_models_of_the_docs(name):
    model, dense, ids = docs_models.MODELS[name]()
    module = docs_models.OfTensors(model, ids.keys())
    given = dense, ids.values(), ids.lengths()
    compare(module, module, [given, docs_models.other_batch(dense, ids)])
