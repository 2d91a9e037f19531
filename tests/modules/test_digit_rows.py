"""The layer on digits of semantic IDs that attention reads itself, against the same layer on their embeddings."""

import contextlib
import importlib

import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from jfi import KeyBias, PositionBias, SemanticIDEmbedding, SequenceFeatureConfig, TimeBias, WeightBias
from jfi.cuda_graphs.capture_check import why_not_captured
from jfi.models import AttentionPooling, SequenceDLRM
from jfi.modules import JaggedFeatureInteraction, JaggedPooling
from jfi.ops import checks
from jfi.semantic_ids import UNKNOWN_SID, DiscretePCA, Layout
from jfi.tables.table_rows import DigitRows
from jfi.utils.context import padded_to_capacity
from jfi.utils.jagged import Timelines

WIDTH, ROOM = 8, 30
LENGTHS = [3, 0, 17, 1]
KEYS = ["seen", "seen_too", "bought"]


@pytest.fixture(params=["torch", "triton"])
def impl(request, device, monkeypatch) -> str:
    """On a CPU the kernels run too, through Triton's interpreter."""
    if device.type == "cpu" and request.param == "triton":
        for name in ("digit_attention", "jagged_attention"):
            module = importlib.import_module(f"jfi.ops.{name}")
            monkeypatch.setattr(module, "check_impl", lambda impl, like: checks.check_impl("triton", like))
    return request.param


def codec_of(num_digits: int) -> DiscretePCA:
    return DiscretePCA(num_digits).fit(torch.randn(60, 6))


def embedding_of(num_digits: int, device: torch.device, keys: list[str] = KEYS) -> SemanticIDEmbedding:
    embedding = SemanticIDEmbedding(codec_of(num_digits), WIDTH, keys, device=device)
    with torch.no_grad():
        for parameter in embedding.parameters():
            parameter.normal_(std=0.5)
    return embedding


def batch(num_digits: int, device: torch.device, weighted: bool = False) -> KeyedJaggedTensor:
    """IDs of which a third are unknown; all events of the last sample of `seen` are. Buckets belong to seen."""
    lengths = {"seen": LENGTHS, "seen_too": LENGTHS, "bought": LENGTHS[::-1], "bucket": LENGTHS}
    values = []
    for key in lengths:
        sids = Layout(num_digits).pack(torch.randint(-1, 2, (sum(LENGTHS), num_digits)))
        sids[torch.rand(len(sids)) < 1 / 3] = UNKNOWN_SID
        sids[-1] = UNKNOWN_SID
        values.append(torch.randint(4, (len(sids),)) if key == "bucket" else sids)
    weights = torch.rand(4 * sum(LENGTHS)).add(0.1).to(device) if weighted else None
    counts = torch.tensor(list(lengths.values())).flatten().to(device)
    return KeyedJaggedTensor(list(lengths), torch.cat(values).to(device), weights, counts)


def dense(found: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    """Embeddings that were made before the layer sees them."""
    return {
        key: JaggedTensor(one.values(), lengths=one.lengths(), weights=one.weights_or_none())
        for key, one in found.items()
    }


def run(
    layer: nn.Module, embedding: SemanticIDEmbedding, sequences: dict, targets: dict, counts=None, **times: object
) -> dict:
    """The output and the gradients of all parameters and of the targets, of which each sample has so many."""
    targets = {name: x.clone().requires_grad_() for name, x in targets.items()}
    given = targets
    if counts is not None:
        given = {name: JaggedTensor(x, lengths=counts) for name, x in targets.items()}
    out = layer(sequences, given, **times).values()
    leaves = {**targets, **dict(layer.named_parameters()), **dict(embedding.named_parameters())}
    grad = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    grads = torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def feature(name: str = "taste", keys: tuple[str, ...] = ("seen",), **options) -> SequenceFeatureConfig:
    return SequenceFeatureConfig(name, list(keys), ["target"], **options)


#: By name: digits, features, options of the layer, whether events have weights, and the keys whose embeddings are made.
CASES = {
    "one head": (12, [feature()], {}, False, set()),
    "31 digits": (31, [feature()], {"num_heads": 2}, False, set()),
    "40 digits, several queries": (40, [feature()], {"num_heads": 2, "num_queries": 3}, False, set()),
    "two targets": (25, [SequenceFeatureConfig("a", ["seen"], ["target", "other"], "concat")], {}, False, set()),
    "features in a group": (12, [feature(), feature("b", ["bought"])], {"num_heads": 4}, False, set()),
    "two groups": (12, [feature(), feature("b", ["bought"], bias=PositionBias())], {}, False, set()),
    "positions": (12, [feature(bias=PositionBias()), feature("b", ["bought"], bias=PositionBias())], {}, False, set()),
    "weights": (12, [feature(bias=WeightBias(), weighted_values=True)], {"num_heads": 2}, True, set()),
    "buckets": (12, [feature(bias=KeyBias("bucket", 4), weighted_values=True)], {"num_heads": 2}, True, set()),
    "two fields": (12, [feature(keys=("seen", "seen_too"))], {}, False, {"seen", "seen_too"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_layer_on_digits_is_that_on_embeddings(case, impl, device):
    num_digits, features, options, weighted, read = CASES[case]
    layer = JaggedFeatureInteraction(features, WIDTH, **options).to(device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    embedding, ids = embedding_of(num_digits, device), batch(num_digits, device, weighted)
    targets = {name: torch.randn(len(LENGTHS), WIDTH, device=device) for name in features[0].target_keys}
    buckets = {"bucket": ids["bucket"]}
    found = embedding(ids)
    want = run(layer, embedding, {**dense(embedding(ids)), **buckets}, targets)
    got = run(layer, embedding, {**found, **buckets}, targets)
    assert {key for key, one in found.items() if one.is_read} == read
    assert want["unknown"].ne(0).all() and want["projection.bias"].ne(0).any()
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    weights = layer.attention_weights({**embedding(ids), **buckets}, targets)
    for name, one in layer.attention_weights({**dense(embedding(ids)), **buckets}, targets).items():
        torch.testing.assert_close(weights[name].values(), one.values())


def test_in_double_precision(device):
    layer = JaggedFeatureInteraction([feature(bias=PositionBias())], WIDTH, 2).to(device).double()
    embedding, ids = embedding_of(25, device).double(), batch(25, device)
    targets = {"target": torch.randn(len(LENGTHS), WIDTH, device=device).double()}
    found = embedding(ids)
    got = run(layer, embedding, found, targets)
    assert found["seen"].is_read == (device.type == "cuda")  # no kernel takes float64
    torch.testing.assert_close(got, run(layer, embedding, dense(embedding(ids)), targets), rtol=1e-12, atol=1e-12)


def test_under_autocast_it_runs_in_half_precision(device):
    layer, embedding = JaggedFeatureInteraction([feature()], WIDTH, 2).to(device), embedding_of(25, device)
    ids, targets = batch(25, device), {"target": torch.randn(len(LENGTHS), WIDTH, device=device)}
    exact = layer(embedding(ids), targets).values()
    with torch.autocast(device.type, torch.bfloat16):
        found = embedding(ids)
        out = layer(found, targets).values()
        assert out.dtype == layer(dense(embedding(ids)), targets).values().dtype == torch.bfloat16
    assert found["seen"].rows.dtype == torch.bfloat16 and not found["seen"].is_read
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.05)
    out.float().sum().backward()
    assert embedding.projection.weight.grad.isfinite().all() and embedding.projection.weight.grad.ne(0).any()


def test_an_empty_history_gives_the_bias_of_the_output(device):
    layer, embedding = JaggedFeatureInteraction([feature()], WIDTH).to(device), embedding_of(12, device)
    nn.init.normal_(layer.attention.taste.output_bias)
    pooled = layer(embedding(batch(12, device)), {"target": torch.randn(len(LENGTHS), WIDTH, device=device)})
    torch.testing.assert_close(pooled["taste"][1], layer.attention.taste.output_bias)


def test_the_embedding_is_the_digits_times_their_weight(device):
    embedding, sids = embedding_of(12, device), batch(12, device)["seen"].values()
    digits = torch.zeros(len(sids), 14, device=device)
    unknown = sids == UNKNOWN_SID
    digits[:, :12] = embedding.layout.unpack(sids.cpu()).to(device).float()
    digits[unknown, :12] = 0
    digits[:, 12], digits[:, 13] = ~unknown, unknown
    torch.testing.assert_close(digits @ embedding.digit_weight().T, embedding.embed(sids))


def test_two_embeddings_are_not_read_in_one_launch(device):
    features = [feature(), feature("b", ["bought"])]
    layer = JaggedFeatureInteraction(features, WIDTH).to(device)
    one, other = embedding_of(12, device, ["seen"]), embedding_of(12, device, ["bought"])
    ids, targets = batch(12, device), {"target": torch.randn(len(LENGTHS), WIDTH, device=device)}
    found = {**one(ids), **other(ids)}
    torch.testing.assert_close(layer(found, targets).values(), layer(dense(found), targets).values())
    assert found["seen"].is_read and found["bought"].is_read


#: By name: features, options of the layer, whether events have weights, whether targets have times.
RAGGED = {
    "all events": ([feature()], {"num_heads": 2}, False, False),
    "buckets": ([feature(bias=KeyBias("bucket", 4), weighted_values=True)], {}, True, False),
    "older events": ([feature()], {"num_heads": 2, "num_queries": 2}, False, True),
    "positions": ([feature(bias=PositionBias()), feature("b", ["bought"], bias=PositionBias())], {}, False, True),
    "ages": ([feature(bias=TimeBias("age", 6)), feature("b", ["bought"], bias=WeightBias())], {}, True, True),
    "distances of weighted events": (
        [
            feature(bias=PositionBias(), weighted_values=True),
            feature("b", ["bought"], bias=PositionBias(), weighted_values=True),
        ],
        {},
        True,
        True,
    ),
    "projected": ([feature(bias=PositionBias())], {"num_heads": 2}, False, True),
}


@pytest.mark.parametrize("case", RAGGED)
def test_ragged_targets_share_a_history_of_digits(case, impl, device, monkeypatch):
    """Attention reads the words of its digits, and the embeddings are not made."""
    features, options, weighted, has_times = RAGGED[case]
    # By itself it projects on a CPU where candidates are many.
    monkeypatch.setattr("jfi.modules.ragged_attention.pays_to_project", lambda *_: case == "projected")
    layer = JaggedFeatureInteraction(features, WIDTH, **options).to(device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    embedding, ids = embedding_of(25, device), batch(25, device, weighted)
    targets, counts = {"target": torch.randn(11, WIDTH, device=device)}, torch.tensor([2, 0, 8, 1], device=device)
    times = {}
    if has_times:
        of_events = {key: torch.cat([torch.arange(n) // 2 for n in ids[key].lengths()]).to(device) for key in KEYS}
        times["event_times"] = {key: JaggedTensor(of_events[key], lengths=ids[key].lengths()) for key in KEYS}
        target_times = torch.tensor([0, 9, 0, 1, 2, 3, 3, 5, 8, 9, 4], device=device)
        times |= {"target_times": JaggedTensor(target_times, lengths=counts), "max_events": 7}
    buckets, found, read = {"bucket": ids["bucket"]}, embedding(ids), []
    module = importlib.import_module("jfi.ops.jagged_attention")
    attend = module._jagged_attention_fwd
    monkeypatch.setattr(module, "_jagged_attention_fwd", lambda *x: read.append((x[1].dtype, x[-1])) or attend(*x))
    got = run(layer, embedding, {**found, **buckets}, targets, counts, **times)
    ran = "triton" if device.type == "cuda" else impl
    assert set(read) == {(torch.float32 if case == "projected" else torch.int32, ran)}
    assert not any(found[key].is_read for key in KEYS)
    want = run(layer, embedding, {**dense(embedding(ids)), **buckets}, targets, counts, **times)
    assert want["unknown"].ne(0).any() and want["projection.bias"].ne(0).any()
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


def test_the_mean_of_ragged_targets_reads_the_embeddings(device):
    layer, embedding, ids = JaggedPooling([feature()], WIDTH), embedding_of(12, device), batch(12, device)
    candidates = {"target": JaggedTensor(torch.randn(5, WIDTH), lengths=torch.tensor([2, 0, 3, 0])).to(device)}
    found = embedding(ids)
    got = layer(found, candidates).values()
    torch.testing.assert_close(got, layer(dense(embedding(ids)), candidates).values())
    assert found["seen"].is_read


def test_room_behind_the_last_sample(impl, device, poisoned, monkeypatch):
    """As a captured step has it: IDs of 0, and events that no sample has."""
    for name in ("ops.checks.may_read", "ops.digit_attention.may_read", "modules.validation.may_read"):
        module = importlib.import_module("jfi." + name.rpartition(".")[0])
        monkeypatch.setattr(module, name.rpartition(".")[2], lambda *_: False)
    layer, embedding = JaggedFeatureInteraction([feature()], WIDTH, 2).to(device), embedding_of(25, device)
    events, targets = batch(25, device)["seen"], {"target": torch.randn(len(LENGTHS), WIDTH, device=device)}
    found, room = [], events.values().new_zeros(ROOM)
    for sids in (events.values(), torch.cat([events.values(), room])):
        rows = DigitRows(sids, embedding, torch.float32, events.lengths(), events.offsets())
        with padded_to_capacity() if found else contextlib.nullcontext():
            found.append(run(layer, embedding, {"seen": rows}, targets))
        assert not rows.is_read
    torch.testing.assert_close(*found)


def test_a_step_on_digits_is_captured(device):
    layer, embedding = JaggedFeatureInteraction([feature()], WIDTH, 2), embedding_of(25, torch.device("cpu"))
    assert why_not_captured(nn.ModuleList([layer, embedding]), batch(25, torch.device("cpu"))) is None


@pytest.mark.parametrize("beside", [None, "tags"])
def test_a_model_with_semantic_ids_alone_attends_to_digits(beside, device, monkeypatch):
    """The same logits, gradients and state_dict as with embeddings that are made first."""
    keys = ["item_sid", "history_sid"]
    tables = None
    if beside:
        tables = EmbeddingCollection(
            tables=[EmbeddingConfig(name="t", embedding_dim=WIDTH, num_embeddings=5, feature_names=[beside])],
            device=device,
        )
    embedding = embedding_of(25, device, keys)
    sizes = {"dense_in_features": 2, "dense_arch_layer_sizes": [WIDTH], "over_arch_layer_sizes": [4, 1]}
    model = SequenceDLRM(
        None,
        tables,
        [SequenceFeatureConfig("taste", ["history_sid"], ["item_sid"], bias=PositionBias())],
        **sizes,
        pooling=AttentionPooling(2, layers=2),
        semantic_ids=embedding,
    ).to(device)
    sids, counts = batch(25, device)["seen"].values(), [1, 1, 1, 1, *LENGTHS]
    values = [sids[:4], sids]
    if beside:
        keys, counts, values = [*keys, beside], [*counts, 1, 1, 1, 1], [*values, torch.arange(4, device=device)]
    ids = KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.tensor(counts, device=device))
    features, found, made = torch.randn(4, 2, device=device), [], []
    embed = SemanticIDEmbedding.embed
    monkeypatch.setattr(SemanticIDEmbedding, "embed", lambda own, one: made.append(len(one)) or embed(own, one))
    for traced in (False, True):  # a tracer gets dense embeddings
        monkeypatch.setattr("jfi.modules.semantic_id_embedding.is_traced", lambda traced=traced: traced)
        model.zero_grad()
        out = model(features, ids)
        out.square().sum().backward()
        found.append({"out": out.detach(), **{name: x.grad for name, x in model.named_parameters()}})
    assert made == [4, 4, len(sids)]  # the targets alone, then both
    # Elements of a gradient are sums of terms as large as its largest element.
    largest = {name: None if x is None else x.abs().max().clamp(min=1) for name, x in found[0].items()}
    scaled = [{name: x if x is None else x / largest[name] for name, x in one.items()} for one in found]
    torch.testing.assert_close(*scaled, rtol=1e-4, atol=1e-5)
    own = {name for name in model.state_dict() if name.startswith("semantic_ids.")}
    assert own == {
        f"semantic_ids.{name}" for name in ("projection.weight", "projection.bias", "unknown", "fingerprint")
    }


def test_a_model_with_timelines_attends_to_digits(device, monkeypatch):
    """Of a batch by user, with the same logits and gradients as with embeddings that are made first."""
    sids = batch(25, device)["seen"].values()
    embedding = embedding_of(25, device, ["item", "history"])
    model = SequenceDLRM(
        None,
        None,
        [SequenceFeatureConfig("taste", ["history"], ["item"], bias=TimeBias("age", 6))],
        2,
        [WIDTH],
        [4, 1],
        pooling=AttentionPooling(2, layers=2),
        semantic_ids=embedding,
    ).to(device)
    rows, events = [2, 0, 3, 1], sum(LENGTHS)
    items = torch.randint(len(sids), (sum(rows) + events,), device=device)
    lengths = torch.tensor([1] * sum(rows) + LENGTHS + [0, 0], device=device)
    ids = KeyedJaggedTensor(["item", "history"], sids[items], lengths=lengths)
    row_offsets = torch.tensor([0, 2, 2, 5, 6], device=device)
    event_times = torch.cat([torch.arange(n) for n in LENGTHS]).to(device)
    timelines = Timelines(row_offsets, torch.tensor([1, 9, 0, 4, 30, 2], device=device), event_times, max_events=9)
    found, made, embed = [], [], SemanticIDEmbedding.embed
    monkeypatch.setattr(SemanticIDEmbedding, "embed", lambda own, one: made.append(len(one)) or embed(own, one))
    for traced in (False, True):
        monkeypatch.setattr("jfi.modules.semantic_id_embedding.is_traced", lambda traced=traced: traced)
        model.zero_grad()
        out = model(torch.ones(sum(rows), 2, device=device), ids, timelines)
        out.square().sum().backward()
        found.append({"out": out.detach(), **{name: x.grad for name, x in model.named_parameters()}})
    assert made == [sum(rows), sum(rows), events]  # the targets alone, then both
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_compiler_gets_dense_embeddings(device):
    layer = JaggedFeatureInteraction([feature()], WIDTH, 2).to(device)
    embedding, events = embedding_of(12, device, ["seen"]), batch(12, device)["seen"]
    target = torch.randn(len(LENGTHS), WIDTH, device=device)

    def pool(sids: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ids = KeyedJaggedTensor(["seen"], sids, lengths=lengths)
        return layer(embedding(ids), {"target": target}).values()

    arguments = events.values(), events.lengths(), target
    found = torch.compile(pool, backend="aot_eager")(*arguments)
    torch.testing.assert_close(found, pool(*arguments))


def test_a_projection_that_is_more_than_its_weight_is_called(device):
    ids = batch(5, device)
    embedding = embedding_of(5, device)
    assert isinstance(embedding(ids)["seen"], DigitRows)
    handle = embedding.projection.register_forward_hook(lambda _, __, out: 2 * out)
    hooked = embedding(ids)["seen"]
    assert not isinstance(hooked, DigitRows)
    handle.remove()
    known = ids["seen"].values() != UNKNOWN_SID
    torch.testing.assert_close(hooked.values()[known], 2 * embedding(ids)["seen"].values()[known])


def test_shapes_on_the_meta_device():
    meta = torch.device("meta")
    embedding, ids = embedding_of(5, meta), batch(5, torch.device("cpu"))
    rows = DigitRows(
        ids["seen"].values().to(meta), embedding, torch.float32, ids["seen"].lengths().to(meta), None, None
    )
    layer = JaggedFeatureInteraction([feature()], WIDTH, 2, device=meta)
    targets = {"target": torch.empty(len(LENGTHS), WIDTH, device=meta)}
    assert layer({"seen": rows}, targets).values().shape == (len(LENGTHS), WIDTH)
