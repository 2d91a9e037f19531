"""Ids outside of their tables in the modules: zeros without a gradient and a step, counted by table."""

import pytest
import torch
from ops.unchecked import as_on_a_gpu
from torch import nn
from torchrec import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.optim import RowWiseAdagrad

import jfi
from jfi import (
    CapturedStep,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    JaggedEncoder,
    JaggedFeatureInteraction,
    KeyBias,
    PositionBias,
    SemanticIDEmbedding,
    SequenceFeatureConfig,
)
from jfi.modules import outside_ids
from jfi.semantic_ids import DiscretePCA, ResidualKMeans

WIDTH, ROWS = 8, 4
#: Behind the table, where the rows of the next one are, and so far that addresses or an int32 overflow.
OUTSIDE = [ROWS, ROWS + 1, -2, 10**9, 2**31 - 1, 2**40, -(2**62)]
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 1.0}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1}),
}


def tables_of(kind=EmbeddingConfig, **options) -> list:
    """The key "both" reads a and c, which has another width than a and b where tables may have several."""
    keys = {"a": ["x", "y", "both"], "b": ["z"], "c": ["w", "both"]}
    sizes = {"a": (ROWS, WIDTH), "b": (ROWS, WIDTH), "c": (ROWS + 3, WIDTH if kind is EmbeddingConfig else 2 * WIDTH)}
    return [
        kind(name=name, num_embeddings=rows, embedding_dim=width, feature_names=keys[name], **options)
        for name, (rows, width) in sizes.items()
    ]


def features(device, dtype=torch.int64, weights: bool = False, **ids: list[int]) -> KeyedJaggedTensor:
    """Two samples of each key, the second of one id."""
    given = {"x": [1, 2], "y": [3], "z": [0, 1], "w": [1], "both": [2]} | ids
    values = torch.tensor([one for own in given.values() for one in own])
    lengths = [n for own in given.values() for n in (len(own) - 1, 1)]
    own = torch.rand(len(values)).to(device) if weights else None
    return KeyedJaggedTensor(list(given), values.to(device, dtype), own, lengths=torch.tensor(lengths, device=device))


def states_of(collection) -> dict[str, torch.Tensor]:
    """By name the tables and their optimizer's states."""
    fused = collection.fused_optimizer
    found = {name: weight.detach().clone() for name, weight in fused.params.items()}
    for name, weight in fused.params.items():
        states = fused.state.get(weight, {}).items()
        found |= {f"{name} {state}": value.clone() for state, value in states if state != "step"}
    return found


@pytest.mark.parametrize("outside", OUTSIDE)
def test_an_id_outside_steps_no_row(device, outside):
    collection = FusedEmbeddingCollection(tables_of(), torch.optim.SGD, {"lr": 1.0}, device=device)
    before = states_of(collection)
    dtype = torch.int32 if -(2**31) <= outside < 2**31 else torch.int64
    with as_on_a_gpu(device):
        rows = collection(features(device, dtype, x=[2, outside, 2, outside]))
        assert rows["x"].values()[[1, 3]].eq(0).all() and rows["x"].values()[[0, 2]].ne(0).all()
        sum(one.values().sum() for one in (rows["x"], rows["y"])).backward()
    expected = {name: value.clone() for name, value in before.items()}
    expected["embeddings.a.weight"][2] -= 2.0  # read twice by x
    expected["embeddings.a.weight"][3] -= 1.0  # once by y
    for name, value in states_of(collection).items():
        assert torch.equal(value, expected[name]), name
    assert outside_ids(collection) == {"a": 2}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["rows", "sum", "mean", "weighted"])
def test_a_batch_with_ids_outside_steps_as_one_with_missing_ids(device, name, kind):
    """In tables of two widths, of which two keys share one and a key reads two."""
    outside = {"x": [0, 99, 1], "z": [7, 3], "w": [2, 7, -9], "both": [3, 99, 2, 2**40]}
    missing = {"x": [0, -1, 1], "z": [-1, 3], "w": [2, -1, -1], "both": [3, -1, 2, -1]}
    found, keys = [], ("x", "z", "w", "both@a", "both@c")
    for batch in (outside, missing):
        torch.manual_seed(0)
        if kind == "rows":
            collection = FusedEmbeddingCollection(tables_of(), *OPTIMIZERS[name], device=device)
        else:
            configs = tables_of(EmbeddingBagConfig, pooling=PoolingType.MEAN if kind == "mean" else PoolingType.SUM)
            weighted = {"is_weighted": kind == "weighted"}
            collection = FusedEmbeddingBagCollection(configs, *OPTIMIZERS[name], **weighted, device=device)
        torch.manual_seed(1)
        with as_on_a_gpu(device):
            for _ in range(2):
                out = collection(features(device, weights=kind == "weighted", **batch))
                values = [out[key].values() if kind == "rows" else out[key] for key in keys]
                sum(one.square().sum() for one in values).backward()
        found.append([*values, *states_of(collection).values()])
        expected = {"a": 2 * (1 + 2), "b": 2 * 1, "c": 2 * (2 + 2)}
        assert outside_ids(collection) == (expected if batch is outside else {})
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_missing_id_counts_in_the_mean(device):
    configs = [
        EmbeddingBagConfig(
            name="a", num_embeddings=ROWS, embedding_dim=2, feature_names=["x"], pooling=PoolingType.MEAN
        )
    ]
    bags = FusedEmbeddingBagCollection(configs, torch.optim.SGD, {"lr": 1.0}, device=device)
    weight = bags.embedding_bags["a"].weight.detach().clone()
    ids = KeyedJaggedTensor(
        ["x"], torch.tensor([1, 9, 3, 9], device=device), lengths=torch.tensor([3, 1], device=device)
    )
    with as_on_a_gpu(device):
        pooled = bags(ids)["x"]
    torch.testing.assert_close(pooled, torch.stack([(weight[1] + weight[3]) / 3, torch.zeros_like(weight[0])]))


def test_frozen_rows_and_evaluation(device):
    """Whose rows are looked up in a mask of the table's size."""
    collection = FusedEmbeddingCollection(tables_of(), torch.optim.SGD, {"lr": 1.0}, device=device)
    collection.freeze_rows("a", torch.tensor([True, False, False, False], device=device))
    before = states_of(collection)
    with as_on_a_gpu(device):
        with torch.no_grad():
            assert collection(features(device, x=[0, 99]))["x"].values()[1].eq(0).all()
        collection(features(device, x=[0, 99, 1]))["x"].values().sum().backward()
    before["embeddings.a.weight"][1] -= 1.0
    for name, value in states_of(collection).items():
        assert torch.equal(value, before[name]), name
    assert outside_ids(nn.ModuleDict({"tables": collection})) == {"a": 2}


def test_an_id_of_minus_1_is_missing_and_not_counted(device):
    collection = FusedEmbeddingCollection(tables_of(), torch.optim.SGD, {"lr": 1.0}, device=device)
    with as_on_a_gpu(device):
        assert collection(features(device, x=[-1, 1]))["x"].values()[0].eq(0).all()
    assert outside_ids(collection) == {}


def test_validation_names_the_id(device):
    collection = FusedEmbeddingCollection(tables_of(), torch.optim.SGD, {"lr": 1.0}, device=device)
    with (
        jfi.ops.validation(),
        pytest.raises(ValueError, match=r"features\['x'\] must be from 0 to 3, rows of table 'a', got 9"),
    ):
        collection(features(device, x=[0, 9]))


FIELDS = ["seen", "seen_brand"]
LENGTHS = [3, 0, 17, 1]
HISTORY = {"item": (11, ["seen", "bought"]), "brand": (5, ["seen_brand"])}


def history(device, outside: bool) -> KeyedJaggedTensor:
    """With ids outside of both tables and of the buckets, or with -1 in their place."""
    torch.manual_seed(3)
    ids = {key: torch.randint(rows, (sum(LENGTHS),)) for rows, keys in HISTORY.values() for key in keys}
    ids |= {"bucket": torch.randint(4, (sum(LENGTHS),)), "bought_bucket": torch.randint(4, (sum(LENGTHS),))}
    far = {
        "seen": [11, 10**9, -5],
        "seen_brand": [5, 2**40],
        "bought": [12],
        "bucket": [4, 2**40],
        "bought_bucket": [7],
    }
    for key, numbers in far.items():
        ids[key][2 : 2 + len(numbers)] = torch.tensor(numbers if outside else [-1] * len(numbers))
    counts = torch.tensor(LENGTHS * len(ids))
    return KeyedJaggedTensor(list(ids), torch.cat(list(ids.values())).to(device), lengths=counts.to(device))


def seen(bias=None) -> SequenceFeatureConfig:
    return SequenceFeatureConfig("seen", FIELDS, ["target", "other"], combine="sum", bias=bias)


def alone(bias=None) -> SequenceFeatureConfig:
    return SequenceFeatureConfig("seen", ["seen"], ["target"], bias=bias)


def bought(bias=None) -> SequenceFeatureConfig:
    return SequenceFeatureConfig("bought", ["bought"], ["target"], bias=bias)


LAYERS = {
    "two fields": ([seen()], {}),
    "positions": ([seen(PositionBias(4))], {}),
    "buckets": ([seen(KeyBias("bucket", 4))], {}),
    "buckets of two features": ([alone(KeyBias("bucket", 4)), bought(KeyBias("bought_bucket", 4))], {}),
    "many queries": ([alone(KeyBias("bucket", 4))], {"num_queries": 12}),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_reads_zeros(device, case):
    """As plain embeddings and biases with a row of zeros behind the table, which ids outside name."""
    features, options = LAYERS[case]
    configs = [
        EmbeddingConfig(name=name, embedding_dim=WIDTH, num_embeddings=rows, feature_names=keys)
        for name, (rows, keys) in HISTORY.items()
    ]
    tables = FusedEmbeddingCollection(configs, torch.optim.SGD, {"lr": 1.0}, device=device)
    layer = JaggedFeatureInteraction(features, WIDTH, embedding_collection=tables, device=device, **options)
    bias = next((one for name, one in layer.named_parameters() if name.endswith("bucket_bias")), None)
    if bias is not None:
        nn.init.normal_(bias)
    before = {name: one.weight.detach().clone() for name, one in tables.embeddings.items()}
    target = {key: torch.randn(len(LENGTHS), WIDTH, device=device) for key in ("target", "other")}
    with as_on_a_gpu(device):
        out = layer(history(device, outside=True), target).values()
        out.square().sum().backward()
    assert outside_ids(layer) == {"item": 4, "brand": 2}

    # The same from embeddings: with a KeyBias without the table's own check of -1.
    ids = history(device, outside=False).to_dict()
    weights = {name: weight.clone().requires_grad_() for name, weight in before.items()}
    dense = {}
    for name, (_, keys) in HISTORY.items():
        for key in keys:
            index = ids[key].values()
            rows = weights[name][index.clamp(min=0)] * (index >= 0).unsqueeze(1)
            dense[key] = JaggedTensor(rows, lengths=ids[key].lengths())
    for key in ("bucket", "bought_bucket"):
        dense[key] = ids[key]
    plain = JaggedFeatureInteraction(features, WIDTH, device=device, **options)
    plain.load_state_dict({name: x for name, x in layer.state_dict().items() if "embedding_collection" not in name})
    with as_on_a_gpu(device, kernels=False):  # with the formulas, in which -1 is a missing bucket
        expected = plain(dense, target).values()
        expected.square().sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for name, weight in weights.items():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        step = before[name] - tables.embeddings[name].weight
        torch.testing.assert_close(step, gradient, rtol=1e-4, atol=1e-5)
    gradients = {name: one.grad for name, one in plain.named_parameters()}
    for name, one in layer.named_parameters():
        if "embedding_collection" not in name:
            torch.testing.assert_close(one.grad, gradients[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_bucket_outside_reads_no_other_features_bias(device):
    pair = [alone(KeyBias("bucket", 4)), bought(KeyBias("bought_bucket", 4))]
    layer = JaggedFeatureInteraction(pair, WIDTH, device=device)
    ids = history(device, outside=False).to_dict()
    events = {
        key: JaggedTensor(torch.randn(sum(LENGTHS), WIDTH, device=device), lengths=ids[key].lengths())
        for key in ("seen", "bought")
    }
    far = torch.full((sum(LENGTHS),), 4, device=device)  # the first bucket of the other feature
    events["bucket"] = JaggedTensor(far, lengths=ids["seen"].lengths())
    events["bought_bucket"] = JaggedTensor(torch.zeros_like(far), lengths=ids["bought"].lengths())
    target, found = {"target": torch.randn(len(LENGTHS), WIDTH, device=device)}, []
    biases = [one for name, one in layer.named_parameters() if name.endswith("bucket_bias")]
    assert len(biases) == 2
    for value in (0.0, 5.0):
        for bias in biases:
            bias.data.fill_(value)
            bias.grad = None
        with as_on_a_gpu(device):
            out = layer(events, target)["seen"]
            found.append(out.detach())
            out.sum().backward()
        assert all(bias.grad is None or bias.grad.eq(0).all() for bias in biases)
    torch.testing.assert_close(*found)


def test_an_encoder_has_no_bias_for_a_bucket_outside(device):
    encoder = JaggedEncoder([alone(KeyBias("bucket", 4))], WIDTH, num_heads=2, device=device)
    (bias,) = [one for name, one in encoder.named_parameters() if name.endswith("bucket_bias")]
    nn.init.normal_(bias)
    lengths = torch.tensor(LENGTHS, device=device)
    events = torch.randn(sum(LENGTHS), WIDTH, device=device)
    found = []
    for number in (10**9, 4, -1):
        buckets = torch.full((sum(LENGTHS),), number, device=device)
        with as_on_a_gpu(device, kernels=False):
            out = encoder(
                {"seen": JaggedTensor(events, lengths=lengths), "bucket": JaggedTensor(buckets, lengths=lengths)}
            )["seen"]
        found.append(out.values())
    bias.data.zero_()
    with as_on_a_gpu(device, kernels=False):
        sequences = {
            "seen": JaggedTensor(events, lengths=lengths),
            "bucket": JaggedTensor(torch.zeros_like(buckets), lengths=lengths),
        }
        expected = encoder(sequences)["seen"].values()
    for one in found:
        torch.testing.assert_close(one, expected)


CODECS = {"digits": DiscretePCA(num_digits=10), "decode": ResidualKMeans(2, 3)}


def test_codes_beyond_their_codebook(device):
    """Codes of three centroids take two bits, of which 3 is none."""
    codec = ResidualKMeans(2, 3).fit(torch.randn(40, 6))
    embedding = SemanticIDEmbedding(codec, WIDTH, ["item"], read="decode", device=device)
    ids = KeyedJaggedTensor(
        ["item"], torch.tensor([0b0110, 0b1101, -1, 0b0111]).to(device), lengths=torch.tensor([1, 3]).to(device)
    )
    with as_on_a_gpu(device):
        found = embedding(ids)["item"].values()
    assert found[0].ne(0).all() and found[[1, 3]].eq(0).all()
    torch.testing.assert_close(found[2], embedding.unknown)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
def test_captured_steps_count(device):
    """In the graph, where nothing is read from the device; padding is not counted."""
    bags = FusedEmbeddingBagCollection(tables_of(EmbeddingBagConfig), torch.optim.SGD, {"lr": 1.0}, device=device)
    before = states_of(bags)

    def step(batch):
        pooled = bags(batch)
        loss = pooled["x"].sum() + pooled["z"].sum()
        loss.backward()
        return loss.detach()

    captured = CapturedStep(step, bags, warmup_steps=2)
    for number in range(1, 7):
        captured(features("cpu", x=[1, 99, 10**9], z=[ROWS, 2**40]))
        assert outside_ids(bags) == {"a": 2 * number, "b": 2 * number}
    assert captured.captured == 4
    after = states_of(bags)
    before["embedding_bags.a.weight"][1] -= 6.0
    for name, value in before.items():
        torch.testing.assert_close(after[name], value)
    assert torch.equal(after["embedding_bags.b.weight"], before["embedding_bags.b.weight"])
