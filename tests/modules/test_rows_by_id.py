"""The layer on rows that its kernels read by id, against the same layer on embeddings that were looked up before."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torchrec import EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from jfi import FusedEmbeddingCollection, KeyBias, PositionBias, SequenceFeatureConfig, WeightBias
from jfi.modules import JaggedFeatureInteraction, TableRows

WIDTH, LR = 8, 0.5
LENGTHS = [3, 0, 17, 1]
ROWS = {"item": 11, "brand": 5}
TABLE = {"seen": "item", "bought": "item", "seen_brand": "brand"}
FIELDS = ["seen", "seen_brand"]


@pytest.fixture(autouse=True)
def kernels(device, monkeypatch):
    """On a CPU too the layer takes the kernels, through Triton's interpreter."""
    if device.type == "cuda":
        return
    for name in ("ops.absorbed_target_attention", "tables.gather_rows"):
        monkeypatch.setattr(importlib.import_module(f"jfi.{name}"), "default_impl", lambda like: "triton")
    for name in ("ops.target_attention", "tables.gather_rows", "tables.step_rows"):
        module = importlib.import_module(f"jfi.{name}")
        check = module.check_impl
        monkeypatch.setattr(module, "check_impl", lambda impl, like, check=check: check("triton", like))


@pytest.fixture
def reads(monkeypatch):
    """The calls that read rows of a history into memory."""
    module, calls = importlib.import_module("jfi.tables.gather_rows"), []
    read = module.gather_bounded
    monkeypatch.setattr(module, "gather_bounded", lambda *args, **options: calls.append(args) or read(*args, **options))
    return calls


def configs() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name=name,
            embedding_dim=WIDTH,
            num_embeddings=rows,
            feature_names=[key for key, table in TABLE.items() if table == name],
        )
        for name, rows in ROWS.items()
    ]


def batch(device, weighted: bool = False) -> KeyedJaggedTensor:
    """Keys seen and seen_brand are aligned, bought is not; buckets belong to seen."""
    lengths = {"seen": LENGTHS, "seen_brand": LENGTHS, "bought": LENGTHS[::-1], "bucket": LENGTHS}
    ids = [torch.randint(0, ROWS[TABLE[key]] if key in TABLE else 4, (sum(LENGTHS),)) for key in lengths]
    weights = torch.rand(4 * sum(LENGTHS)).add(0.1).to(device) if weighted else None
    counts = torch.tensor(list(lengths.values())).flatten().to(device)
    return KeyedJaggedTensor(list(lengths), torch.cat(ids).to(device), weights, counts)


def dense(ids: KeyedJaggedTensor, tables: dict) -> dict[str, JaggedTensor]:
    """What a collection gives: embeddings with a gradient to the tables; ids under the key of biases."""
    found = {}
    for key, one in ids.to_dict().items():
        values = F.embedding(one.values(), tables[TABLE[key]]) if key in TABLE else one.values()
        found[key] = JaggedTensor(values, lengths=one.lengths(), weights=one.weights_or_none())
    return found


def run(layer, sequences, targets) -> dict:
    """The output and the gradients of parameters and targets."""
    targets = {name: x.clone().requires_grad_() for name, x in targets.items()}
    out = layer(sequences, targets).values()
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out))
    own = {name: x for name, x in layer.named_parameters() if "embedding_collection" not in name}
    return {"out": out.detach(), **{name: x.grad for name, x in (*targets.items(), *own.items())}}


def feature(name="taste", keys=FIELDS, **options) -> SequenceFeatureConfig:
    return SequenceFeatureConfig(name, keys, ["target"], **options)


#: By name: features, options of the layer, whether events have weights, and how many histories are read into memory.
CASES = {
    "one field": ([feature(keys=["seen"])], {}, False, 0),
    "two fields": ([feature()], {}, False, 0),
    "two fields, longest known": ([feature(max_seqlen=17)], {}, False, 0),
    "concatenated": ([SequenceFeatureConfig("taste", FIELDS, ["target", "other"], "concat")], {}, False, 2),
    "one table": ([feature(keys=["seen"]), feature("buys", ["bought"])], {}, False, 0),
    "several tables": ([feature(keys=["seen"]), feature("buys", ["seen_brand"])], {}, False, 2),
    "two groups": ([feature(), feature("buys", ["bought"], bias=PositionBias())], {}, False, 0),
    "weights": ([feature(bias=WeightBias(), weighted_values=True)], {}, True, 0),
    "buckets": ([feature(bias=KeyBias("bucket", 4), weighted_values=True)], {}, True, 0),
    "several queries": ([feature()], {"num_queries": 2, "num_heads": 2}, False, 0),
    "many queries": ([feature()], {"num_queries": 10, "num_heads": 2}, False, 1),
}


def compare(case, collection, device, reads, step) -> None:
    """The layer with the collection against the same layer on dense embeddings; ``step`` gives the tables after it."""
    features, options, weighted, expected_reads = CASES[case]
    layer = JaggedFeatureInteraction(features, WIDTH, embedding_collection=collection, **options).to(device)
    plain = JaggedFeatureInteraction(features, WIDTH, **options).to(device)
    with torch.no_grad():
        for parameter in layer.attention.parameters():
            parameter.normal_()
    plain.load_state_dict({name: x for name, x in layer.state_dict().items() if "embedding_collection" not in name})
    ids = batch(device, weighted)
    targets = {name: torch.randn(len(LENGTHS), WIDTH, device=device) for name in ("target", "other")}
    targets = {name: x for name, x in targets.items() if name in features[0].target_keys}
    tables = {name: one.weight.detach().clone().requires_grad_() for name, one in collection.embeddings.items()}
    want = run(plain, dense(ids, tables), targets)
    got = run(layer, ids, targets)
    assert len(reads) == expected_reads
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    after = step(collection)
    for name, table in tables.items():
        gradient = torch.zeros_like(table) if table.grad is None else table.grad
        torch.testing.assert_close(after[name], table.detach() - LR * gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[pytest.mark.slow] if one == "many queries" else []) for one in CASES]
)
def test_tables_that_step_their_rows(case, device, reads):
    collection = FusedEmbeddingCollection(configs(), torch.optim.SGD, {"lr": LR}, device=device)
    compare(case, collection, device, reads, lambda own: {name: x.weight for name, x in own.embeddings.items()})


@pytest.mark.parametrize("case", ["two fields", "one table", "buckets", "several queries"])
def test_attention_weights(case, device):
    features, options, weighted, _ = CASES[case]
    collection = FusedEmbeddingCollection(configs(), torch.optim.SGD, {"lr": LR}, device=device)
    layer = JaggedFeatureInteraction(features, WIDTH, embedding_collection=collection, **options).to(device)
    plain = JaggedFeatureInteraction(features, WIDTH, **options).to(device)
    plain.load_state_dict({name: x for name, x in layer.state_dict().items() if "embedding_collection" not in name})
    ids, target = batch(device, weighted), {"target": torch.randn(len(LENGTHS), WIDTH, device=device)}
    tables = {name: one.weight for name, one in collection.embeddings.items()}
    want = plain.attention_weights(dense(ids, tables), target)
    for name, got in layer.attention_weights(ids, target).items():
        torch.testing.assert_close(got.values(), want[name].values(), rtol=1e-4, atol=1e-6)
        assert torch.equal(got.lengths(), want[name].lengths())


def test_frozen_tables_and_evaluation(device, reads):
    collection = FusedEmbeddingCollection(configs(), torch.optim.SGD, {"lr": LR}, device=device)
    layer = JaggedFeatureInteraction([feature()], WIDTH, embedding_collection=collection).to(device)
    before = {name: one.weight.detach().clone() for name, one in collection.embeddings.items()}
    ids, target = batch(device), torch.randn(len(LENGTHS), WIDTH, device=device, requires_grad=True)
    with torch.no_grad():
        out = layer(ids, {"target": target}).values()
    collection.embeddings["item"].weight.requires_grad_(False)
    again = layer(ids, {"target": target}).values()
    torch.testing.assert_close(again, out)
    again.sum().backward()
    assert not reads and target.grad.ne(0).any()
    assert torch.equal(collection.embeddings["item"].weight, before["item"])
    assert not torch.equal(collection.embeddings["brand"].weight, before["brand"])


def test_tables_and_layers_that_were_made_in_inference_mode(device, reads):
    """Their tensors have no versions; tables of them serve layers that are trained too, as frozen ones."""
    ids, target = batch(device), {"target": torch.randn(len(LENGTHS), WIDTH, device=device)}
    with torch.inference_mode():
        collection = FusedEmbeddingCollection(configs(), torch.optim.SGD, {"lr": LR}, device=device)
        collection.requires_grad_(False)
        layer = JaggedFeatureInteraction([feature()], WIDTH, embedding_collection=collection, device=device)
        out = layer(ids, target).values()
    trained = JaggedFeatureInteraction([feature()], WIDTH, device=device)
    trained.attention.load_state_dict(layer.attention.state_dict())
    ids = KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths())  # without what the other one has cached
    again = trained(collection(ids), target).values()
    again.sum().backward()
    torch.testing.assert_close(again, out.clone())
    assert not reads and all(x.grad is not None for x in trained.parameters() if x.numel())


def test_rows_that_are_also_read(device, reads):
    """Values that something else has read add their gradient to that of the kernel."""
    collection = FusedEmbeddingCollection(configs(), torch.optim.SGD, {"lr": LR}, device=device)
    layer = JaggedFeatureInteraction([feature(keys=["seen"])], WIDTH).to(device)
    ids, target = batch(device), {"target": torch.randn(len(LENGTHS), WIDTH, device=device)}
    table = collection.embeddings["item"].weight.detach().clone().requires_grad_()
    for sequences in ({"seen": dense(ids, {"item": table, "brand": table})["seen"]}, collection(ids)):
        out = layer({"seen": sequences["seen"]}, target).values()
        (out.sum() + sequences["seen"].values().square().sum()).backward()
    assert type(sequences["seen"]) is TableRows and len(reads) == 1
    torch.testing.assert_close(
        collection.embeddings["item"].weight.detach(), table.detach() - LR * table.grad, rtol=1e-4, atol=1e-5
    )
