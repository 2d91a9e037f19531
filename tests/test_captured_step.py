"""Captured steps: buffers, capacities and eager fallbacks anywhere; graphs themselves on a GPU."""

import dataclasses
import math
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi import CapturedStep, JaggedEncoder, JaggedFeatureInteraction, PositionBias, SequenceFeatureConfig, WeightBias
from jfi.cuda_graphs import captured_step as module
from jfi.cuda_graphs.capture_check import why_not_captured
from jfi.cuda_graphs.static_batch import Buffers, CapacityBuckets, UnsupportedBatch, describe, to_device
from jfi.utils.context import padding_state

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
B, D, ROWS = 8, 4, 20
NO_FIXED_SHAPE = "the batch['names'] is of type ndarray, which has no fixed shape"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@dataclasses.dataclass
class Samples:
    dense: Tensor
    ids: KeyedJaggedTensor
    more: dict
    name: str = "train"


class Pair(NamedTuple):
    labels: Tensor
    nothing: None


def batch(history: list[int], seed: int = 0, weighted: bool = False, samples: int | None = None) -> Samples:
    """Histories of these lengths, and a target and dense features for each."""
    draw, count = torch.Generator().manual_seed(seed), len(history)
    lengths = torch.tensor([1] * count + history * 2)
    size = int(lengths.sum())
    ids = KeyedJaggedTensor(
        keys=["item", "history_item", "history_rating"],
        values=torch.randint(1, ROWS, (size,), generator=draw),
        weights=torch.rand(size, generator=draw) if weighted else None,
        lengths=lengths,
        stride=count,
        length_per_key=[count, sum(history), sum(history)],
    )
    labels = Pair((torch.rand(count, generator=draw) < 0.5).float(), None)
    return Samples(torch.rand(count, 3, generator=draw), ids, {"labels": [labels, torch.arange(count)]})


def histories(seed: int, mean: int, count: int = B) -> list[int]:
    return torch.randint(0, 2 * mean + 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_equal_parts(got: Samples, want: Samples) -> None:
    """Equal but for what lies behind the values of a key."""
    torch.testing.assert_close(got.dense, want.dense, rtol=0, atol=0)
    assert got.name == want.name and got.more.keys() == want.more.keys()
    pair, places = got.more["labels"]
    assert type(pair) is Pair and pair.nothing is None
    assert torch.equal(pair.labels, want.more["labels"][0].labels) and torch.equal(places, want.more["labels"][1])
    assert got.ids.keys() == want.ids.keys() and torch.equal(got.ids.lengths(), want.ids.lengths())
    for key, one in want.ids.to_dict().items():
        for found in (got.ids.to_dict()[key], got.ids[key]):
            count = len(one.values())
            assert torch.equal(found.values()[:count], one.values())
            assert torch.equal(found.offsets(), one.offsets())
            if one.weights_or_none() is not None:
                assert torch.equal(found.weights()[:count], one.weights())
                assert not found.weights()[count:].any()


@pytest.mark.parametrize("weighted", [False, True])
def test_buffers_hold_a_batch_and_padding_behind_it(weighted):
    first = batch([3, 0, 7, 1, 2, 0, 0, 4], weighted=weighted)
    described = describe(first)
    buffers = Buffers(described.structure, (B, 30, 41), {"history_item": -1}, CPU)
    block = buffers.new_block()
    for history, seed in (([3, 0, 7, 1, 2, 0, 0, 4], 0), ([0] * B, 1), ([30, 0, 0, 0, 0, 0, 0, 0], 2)):
        one = batch(history, seed, weighted)
        buffers.fill(block, describe(one))
        got = buffers.batch(block)
        assert_equal_parts(got, one)
        count = sum(history)
        assert got.ids.length_per_key() == [B, 30, 41]
        assert (got.ids["history_item"].values()[count:] == -1).all()
        assert (got.ids["history_rating"].values()[count:] == 0).all()
        assert len(got.ids["history_rating"].values()) == 41


def test_a_batch_over_a_block_shares_its_memory():
    one, other = batch([1] * B, 0), batch([1] * B, 1)
    buffers = Buffers(describe(one).structure, (B, 64, 64), {}, CPU)
    block = buffers.new_block()
    held = buffers.batch(block)
    buffers.fill(block, describe(other))
    assert_equal_parts(held, other)


@pytest.mark.parametrize("mean", [1, 40, 3000])
def test_capacities_are_a_few_sizes_of_the_batch_and_the_reference_alone(mean):
    buckets = CapacityBuckets(describe(batch(histories(0, mean))))
    sizes = set()
    for seed in range(200):
        one = describe(batch(histories(seed, mean), seed))
        capacities = buckets.fit(one)
        assert capacities[0] == B and capacities[1] == capacities[2]
        assert one.lengths[1] <= capacities[1] <= max(64, 1.25 * one.lengths[1] + 64)
        sizes.add(capacities)
        assert capacities == CapacityBuckets(describe(batch(histories(0, mean)))).fit(one)
    assert 1 <= len(sizes) <= 10


def test_what_does_not_fit_is_said():
    buckets = CapacityBuckets(describe(batch([5] * B)))
    assert buckets.fit(describe(batch([50] * B))) == "more values than the largest capacity"
    for other in (
        batch([5] * (B - 1)),
        dataclasses.replace(batch([5] * B), name="test"),
        batch([5] * B, weighted=True),
    ):
        assert buckets.fit(describe(other)) == "another number of samples, or another structure"
    one = batch([5] * B)
    lengths = one.ids.lengths().clone()
    lengths[0] = 0
    fewer = KeyedJaggedTensor(one.ids.keys(), one.ids.values()[1:], lengths=lengths, stride=B)
    assert "one value a sample in 'item'" in buckets.fit(describe(dataclasses.replace(one, ids=fewer)))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (JaggedTensor(torch.ones(2), lengths=torch.tensor([2])), r"the batch\['x'\]\[0\] is of type JaggedTensor"),
        (torch.ones(2, 2).to_sparse(), "sparse tensor"),
        (torch.ones(2, requires_grad=True), "requires a gradient"),
        (object(), "is of type object"),
    ],
)
def test_other_parts_are_named(part, message):
    with pytest.raises(UnsupportedBatch, match=message):
        describe({"x": [part]})


def test_every_part_is_moved():
    one = batch([2] * B, weighted=True)
    assert_equal_parts(to_device(one, CPU), one)
    got = to_device({"x": (torch.zeros(1), 3, numpy.ones(2))}, torch.device("meta"))
    assert got["x"][0].is_meta and got["x"][1] == 3 and got["x"][2].sum() == 2


class FakeGraphs:
    """Captures without executing, and executes at a replay, as CUDA does."""

    def __init__(self) -> None:
        self.captures = 0

    def reset(self) -> None: ...

    def load(self, bucket: module.CapacityBucket, described) -> None:
        bucket.buffers.fill(bucket.block, described)

    def run(self, step: Callable) -> dict:
        return step()

    def capture(self, step: Callable) -> tuple[Callable, dict]:
        self.captures += 1
        outputs: dict = {}
        return lambda: outputs.update(step()), outputs


def test_a_block_that_is_gone_leaves_no_events(monkeypatch):
    made = []

    class Event:
        def __init__(self) -> None:
            made.append(weakref.ref(self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    for _ in range(6):
        module.StagingBlock(SimpleNamespace(is_cuda=True))
    assert len(made) == 12 and not any(event() for event in made)


def tables(kind: type, config: type, *keys: str) -> nn.Module:
    configs = [config(name=f"t_{key}", embedding_dim=D, num_embeddings=ROWS, feature_names=[key]) for key in keys]
    return kind(tables=configs)


class Pooled(nn.Module):
    """Sums of histories by offsets, in plain torch, which skips the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = tables(EmbeddingCollection, EmbeddingConfig, "item", "history_item")
        self.over = nn.Linear(2 * D + 3, 1)

    def forward(self, one: Samples) -> Tensor:
        found = self.tables(one.ids)
        history = found["history_item"]
        sums = F.pad(history.values().cumsum(0), (0, 0, 1, 0))
        pooled = sums[history.offsets()[1:]] - sums[history.offsets()[:-1]]
        return self.over(torch.cat([one.dense, found["item"].values(), pooled], dim=1)).squeeze(1)


def stepper(model: nn.Module, device: torch.device = CPU) -> Callable[[Samples], dict]:
    on_device = device.type == "cuda"
    rate = torch.tensor(0.2, device=device) if on_device else 0.2
    # Not Adam, which makes a whole step of a rounding error where a gradient is zero.
    # fused: otherwise SGD reads a rate in a tensor on the host.
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5, fused=on_device)

    def step(one: Samples) -> dict:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(one), one.more["labels"][0].labels)
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach()}

    return step


def losses_of(step: Callable, batches: list[Samples]) -> list[float]:
    return [float(step(one)["loss"]) for one in batches]


def stream_of_batches(mean: int, count: int = 30) -> list[Samples]:
    """Of one size but for one with fewer samples and one that is much larger."""
    batches = [batch(histories(seed, mean), seed) for seed in range(count)]
    batches[12] = batch(histories(3, mean, B - 1), 12)
    batches[17] = batch([40 * mean] * B, 17)
    return batches


def test_losses_and_counts_through_stand_in_graphs():
    batches = stream_of_batches(12)
    torch.manual_seed(0)
    model = Pooled()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    want = losses_of(stepper(model), batches)
    assert max(want) - min(want) > 0.1
    model.load_state_dict(weights)
    captured = CapturedStep(stepper(model), model)
    captured._graphs = graphs = FakeGraphs()
    assert losses_of(captured, batches) == pytest.approx(want, rel=1e-5)
    reasons = dict(captured.eager)
    assert reasons.pop("another number of samples, or another structure") == 1
    assert reasons.pop("more values than the largest capacity") == 1
    assert reasons.keys() == {"as warm-up"} and reasons["as warm-up"] <= 2 * len(captured._buckets)
    assert captured.steps == 30 and captured.captured == 28 - reasons["as warm-up"] > 15
    assert 1 <= graphs.captures <= len(captured._buckets) <= 4
    assert f"{captured.captured} of 30 steps ran captured, in {graphs.captures} CUDA graph" in captured.summary()
    assert "1 more values than the largest capacity" in captured.summary()


def test_padding_is_known_within_a_padded_step_alone():
    seen = []
    captured = CapturedStep(lambda one: seen.append(padding_state.is_padded) or {}, nn.Linear(1, 1))
    captured._graphs = FakeGraphs()
    for one in (batch([5] * B), batch([900] * B)):
        captured(one)
    assert seen == [True, False] and not padding_state.is_padded


def test_a_batch_with_other_parts_runs_eagerly_and_warns_once():
    captured = CapturedStep(lambda one: one["x"].sum(), nn.Linear(1, 1))
    captured._graphs = FakeGraphs()
    one, reason = {"x": torch.ones(2), "names": numpy.array(["a"])}, NO_FIXED_SHAPE
    with pytest.warns(UserWarning, match="steps run eagerly and are not captured: ") as seen:
        assert [float(captured(one)) for _ in range(3)] == [2.0] * 3
    assert len(seen) == 1 and reason in str(seen[0].message) and captured.eager == {reason: 3}


def test_a_reference_that_was_refused_stays_the_reference():
    refused = {"x": torch.ones(2), "names": numpy.array(["a"])}
    captured = CapturedStep(lambda one: {}, nn.Linear(1, 1), reference=refused)
    captured._graphs = FakeGraphs()
    with pytest.warns(UserWarning, match="names"):
        for _ in range(3):
            captured(batch([3] * B))
    assert captured.captured == 0 and captured.eager == {NO_FIXED_SHAPE: 3}


def test_no_more_graphs_than_asked_for():
    captured = CapturedStep(lambda one: {}, nn.Linear(1, 1), reference=batch([100] * B), warmup_steps=1, max_graphs=2)
    captured._graphs = graphs = FakeGraphs()
    for length in (50, 100, 150, 300):
        for _ in range(3):
            captured(batch([length] * B))
    assert graphs.captures == 2 and captured.captured == 4
    assert captured.eager == Counter({"as warm-up": 4, "beyond 2 graphs": 4})


def test_without_a_gpu_every_step_is_eager():
    model = Pooled()
    captured = CapturedStep(stepper(model), model)
    losses_of(captured, [batch([3] * B)] * 2)
    assert captured.eager == Counter({"without a GPU": 2}) and captured.captured == 0
    assert captured.summary() == "0 of 2 steps ran captured, in 0 CUDA graphs; eagerly: 2 without a GPU"


@pytest.mark.parametrize(("name", "value"), [("warmup_steps", 0), ("max_graphs", 1.5)])
def test_wrong_counts_are_named(name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        CapturedStep(lambda one: one, nn.Linear(1, 1), **{name: value})


def layer(**options: object) -> JaggedFeatureInteraction:
    feature = SequenceFeatureConfig("taste", ["history_item"], ["item"], bias=options.pop("bias", None))
    return JaggedFeatureInteraction([feature], D, **options)


def bags(*keys: str) -> EmbeddingBagCollection:
    return tables(EmbeddingBagCollection, EmbeddingBagConfig, *keys)


FEATURES = [SequenceFeatureConfig(name, ["history_item"], ["item"]) for name in ("taste", "mood")]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: bags("item"), None),
        (lambda: bags("item", "history_item"), "the padding of 'history_item'"),
        (lambda: tables(EmbeddingCollection, EmbeddingConfig, "history_item"), None),
        (layer, None),
        (lambda: layer(num_heads=4, num_queries=4, bias=PositionBias(8)), None),
        (lambda: layer(num_heads=4, num_queries=5), "'taste' has 20 query rows"),
        (lambda: layer(bias=PositionBias(65)), "bias of 'taste'"),
        (lambda: layer(bias=WeightBias()), None),
        (lambda: JaggedFeatureInteraction(FEATURES, D), "features taste, mood"),
        (lambda: JaggedEncoder(FEATURES[:1], D, 1, 1), "JaggedEncoder"),
    ],
)
def test_what_in_a_model_prevents_it(make, reason):
    found = why_not_captured(nn.Sequential(make()), batch([3, 0] * (B // 2)))
    if reason is None:
        assert found is None
        return
    with pytest.raises(ValueError, match=f"the step cannot be captured: .*({reason})"):
        step = CapturedStep(lambda one: {}, nn.Sequential(make()))
        step._graphs = FakeGraphs()
        step(batch([3, 0] * (B // 2)))


def test_without_padding_nothing_prevents_it():
    """Histories of one event each are not padded."""
    assert (
        why_not_captured(nn.Sequential(bags("history_item"), layer(num_heads=4, num_queries=5)), batch([1] * B)) is None
    )


class Attended(nn.Module):
    """A model with the layer and TorchRec's collections; the history has two fields."""

    def __init__(self, bias: object, combine: str = "sum") -> None:
        super().__init__()
        self.tables = tables(EmbeddingCollection, EmbeddingConfig, "history_item", "history_rating")
        self.bags = bags("item")
        keys = ["history_item", "history_rating"]
        feature = SequenceFeatureConfig("taste", keys, ["item"], bias=bias, combine=combine)
        self.layer = JaggedFeatureInteraction([feature], D, 2, embedding_collection=self.tables)
        self.over = nn.Linear(2 * D + 3, 1)
        self.drop = nn.Dropout(0.0)

    def forward(self, one: Samples) -> Tensor:
        items = self.bags(one.ids)
        entries = [one.dense, items.values(), self.layer(one.ids, items).values()]
        return self.over(self.drop(torch.cat(entries, dim=1))).squeeze(1)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Kernels in the interpreter, and nobody reads the contents of tensors to check them."""
    monkeypatch.setattr("jfi.ops.absorbed_target_attention.default_impl", lambda *_: "triton")
    monkeypatch.setattr("jfi.ops.checks.may_read", lambda *_: False)
    monkeypatch.setattr("jfi.modules.validation.may_read", lambda _: False)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests on a GPU cover it")
@pytest.mark.parametrize("combine", ["sum", "concat"])
@pytest.mark.parametrize("bias", [None, PositionBias(8), WeightBias()], ids=["plain", "position", "weights"])
def test_kernels_leave_padding_alone(bias, combine, poisoned, as_on_a_gpu):
    """The layer on padded batches as on a GPU, where memory that nobody wrote is NaN."""
    batches = [batch(histories(seed, 6), seed, isinstance(bias, WeightBias)) for seed in range(6)]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Attended(bias, combine))
    want = losses_of(stepper(models[0]), batches)
    captured = CapturedStep(stepper(models[1]), models[1])
    captured._graphs = FakeGraphs()
    assert losses_of(captured, batches) == pytest.approx(want, rel=1e-6) and captured.captured >= 3
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, msg=name)


class InAnotherThread(torch.autograd.Function):
    """Calls `backward` of a tensor within so many nested passes that PyTorch runs the last ones in another thread."""

    @staticmethod
    def forward(ctx, start: Tensor, loss: list[Tensor], depth: int) -> Tensor:
        ctx.loss, ctx.depth = loss, depth
        return start.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        with torch.enable_grad():
            start = torch.ones((), requires_grad=True)
            inner = InAnotherThread.apply(start, ctx.loss, ctx.depth - 1) if ctx.depth else ctx.loss[0]
            inner.backward()
        return grad, None, None


class Checkpointed(Attended):
    """Whose attention is computed again in the backward pass."""

    def __init__(self, bias: object, **options: bool) -> None:
        super().__init__(bias)
        self.options, self.threads = options, []

    def forward(self, one: Samples) -> Tensor:
        items = self.bags(one.ids).values()
        pooled = checkpoint(self.pooled, items, one.ids, **self.options)
        return self.over(torch.cat([one.dense, items, pooled], dim=1)).squeeze(1)

    def pooled(self, items: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        self.threads.append(threading.get_ident())
        return self.layer(ids, {"item": items}).values()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests on a GPU cover it")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_autograd_recomputes_in_its_own_thread_knows_of_the_padding(use_reentrant, as_on_a_gpu, poisoned):
    """Activation checkpointing: on a GPU autograd computes that part of the forward pass again in another thread."""

    def step(one: Samples) -> dict:
        loss = F.binary_cross_entropy_with_logits(model(one), one.more["labels"][0].labels)
        start = torch.ones((), requires_grad=True)
        InAnotherThread.apply(start, [loss], 64).backward()
        return {"loss": loss.detach()}

    one = batch([3, 0, 4, 1, 0, 9, 2, 5])
    torch.manual_seed(0)
    plain = Attended(PositionBias(8))
    F.binary_cross_entropy_with_logits(plain(one), one.more["labels"][0].labels).backward()
    torch.manual_seed(0)
    model = Checkpointed(PositionBias(8), use_reentrant=use_reentrant)
    captured = CapturedStep(step, model)
    captured._graphs = FakeGraphs()
    captured(one)
    first, second = model.threads
    assert first == threading.get_ident() != second and captured.eager == {"as warm-up": 1}
    for (name, x), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(x.grad, want.grad, msg=name)


# --- On a GPU ---------------------------------------------------------------------------------------------------------
def pinned(one: Samples) -> Samples:
    labels, places = one.more["labels"]
    more = {"labels": [Pair(labels.labels.pin_memory(), None), places.pin_memory()]}
    return Samples(one.dense.pin_memory(), one.ids.pin_memory(), more)


def pair_of_models(make: Callable[[], nn.Module]) -> list[nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make().cuda())
    return models


@on_gpu
@pytest.mark.parametrize("place", ["cpu", "pinned", "cuda"])
@pytest.mark.parametrize("bias", [None, PositionBias(8), WeightBias()], ids=["plain", "position", "weights"])
def test_losses_equal_the_eager_steps(place, bias, device):
    weighted = isinstance(bias, WeightBias)
    batches = stream_of_batches(40)
    batches = [batch(one.ids["history_item"].lengths().tolist(), i, weighted) for i, one in enumerate(batches)]
    eager, model = pair_of_models(lambda: Attended(bias))
    want = losses_of(stepper(eager, device), [to_device(one, device) for one in batches])
    change = {"cpu": lambda x: x, "pinned": pinned, "cuda": lambda x: to_device(x, device)}[place]
    captured = CapturedStep(stepper(model, device), model)
    assert losses_of(captured, [change(one) for one in batches]) == pytest.approx(want, abs=2e-5)
    assert captured.captured >= 15 and captured.eager["more values than the largest capacity"] == 1
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name], atol=1e-3, rtol=1e-3, msg=name)


@on_gpu
def test_a_checkpointed_part_is_captured(device):
    batches = stream_of_batches(40)
    torch.manual_seed(0)
    eager = Attended(PositionBias(8)).to(device)
    want = losses_of(stepper(eager, device), [to_device(one, device) for one in batches])
    torch.manual_seed(0)
    # No generator can be read while a graph is captured.
    model = Checkpointed(PositionBias(8), use_reentrant=False, preserve_rng_state=False).to(device)
    captured = CapturedStep(stepper(model, device), model)
    assert losses_of(captured, batches) == pytest.approx(want, abs=2e-5)
    assert captured.captured >= 15 and len({*model.threads}) == 2


@on_gpu
def test_the_host_never_waits_in_the_steady_state(device):
    """Losses are read at the end alone, so the copies of later batches run beside the graphs of earlier ones."""
    batches = [pinned(batch(histories(seed % 7, 400), seed)) for seed in range(80)]
    eager, model = pair_of_models(lambda: Attended(PositionBias(8)))
    want = losses_of(stepper(eager, device), [to_device(one, device) for one in batches])
    captured, losses = CapturedStep(stepper(model, device), model), []
    for one in batches[:30]:
        losses.append(captured(one)["loss"].clone())
    assert captured.captured > 5
    torch.cuda.set_sync_debug_mode("error")
    try:
        for one in batches[30:]:
            losses.append(captured(one)["loss"].clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(losses).tolist() == pytest.approx(want, abs=5e-5)


@on_gpu
@pytest.mark.usefixtures("poisoned")
def test_the_same_batches_give_the_same_bits(device):
    """In PyTorch's deterministic mode, since its gradient of TorchRec's own tables adds with atomics otherwise."""
    runs = []
    for model in pair_of_models(lambda: Attended(PositionBias(8))):
        losses_of(CapturedStep(stepper(model, device), model), stream_of_batches(40))
        runs.append(model.state_dict())
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())


@on_gpu
def test_dropout_and_rates_are_those_of_each_step(device):
    """A replay draws anew, and reads the learning rate that the host has filled in."""
    weight = nn.Linear(64, 1).to(device)
    rate = torch.tensor(0.5, device=device)

    def step(x: Tensor) -> dict:
        return {"dropped": F.dropout(x, 0.5), "rate": rate * 1}

    captured, seen = CapturedStep(step, weight), []
    for i in range(8):
        rate.fill_(i)
        found = captured(torch.ones(64))
        assert found["rate"].item() == i
        seen.append(tuple(found["dropped"].tolist()))
    assert captured.captured == 6 and len(set(seen)) == 8


@on_gpu
def test_nan_passes_through(device):
    model = pair_of_models(lambda: Attended(None))[0]
    captured, one = CapturedStep(stepper(model, device), model), batch([5] * B)
    assert not any(map(math.isnan, losses_of(captured, [one] * 4)))
    one.dense[3, 1] = math.nan
    assert math.isnan(*losses_of(captured, [one])) and captured.captured == 3


@on_gpu
def test_a_step_that_waits_is_refused_with_the_reason(device):
    """In a process of its own: a capture that has failed leaves CUDA's generator behind."""
    code = """
import torch
from jfi import CapturedStep
model = torch.nn.Linear(4, 1).cuda()
step = CapturedStep(lambda x: model(x).sum().item(), model)
for _ in range(3):
    step(torch.ones(2, 4))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "RuntimeError: the step cannot be captured in a CUDA graph: " in done.stderr, done.stderr
    assert "captur" in done.stderr.split("in a CUDA graph: ")[1]


@on_gpu
def test_ids_beyond_a_table_are_found(device):
    """In a process of its own: the device's assertion ends it."""
    code = """
import sys
sys.path.insert(0, "tests")
import torch
from test_captured_step import Attended, B, batch, losses_of, stepper
from jfi import CapturedStep
model = Attended(None).cuda()
captured = CapturedStep(stepper(model, torch.device("cuda")), model)
losses_of(captured, [batch([5] * B)] * 4)
print(captured.captured, flush=True)
wrong = batch([5] * B)
wrong.ids.values()[-1] = 10**6
losses_of(captured, [wrong])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "2" and done.returncode != 0 and "assert" in done.stderr.lower(), done.stderr


def test_what_to_dict_has_found_does_not_stay_behind():
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.tensor([1, 1, 2, 0]))
    ids.to_dict()
    moved = to_device([ids], torch.device("meta"))[0]
    assert moved.values().is_meta and moved._jt_dict is None
    assert to_device(torch.zeros(2), torch.device("meta")).is_meta


@dataclasses.dataclass
class Movable:
    """A batch with a `to` of its own, as TorchRec's Pipelineable asks for."""

    ids: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Movable":
        return Movable(self.ids.to(device, non_blocking=non_blocking))


def test_an_eager_step_reads_the_ids_on_its_device_whatever_was_read_before():
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.tensor([1, 1, 2, 0]))
    ids.to_dict()
    found = []
    captured = CapturedStep(lambda batch: found.append(batch.ids), nn.Linear(1, 1, device="meta"))
    captured(Movable(ids))
    assert all(part.values().is_meta for part in found[0].to_dict().values())


def test_a_step_that_raises_is_not_counted():
    def fail(batch: Tensor) -> None:
        raise RuntimeError("no step")

    captured = CapturedStep(fail, nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="no step"):
        captured(torch.zeros(1))
    assert captured.steps == 0


@on_gpu
def test_what_follows_a_step_that_raised_waits_for_it(device):
    total = torch.zeros(1, device=device)

    def fail(batch: Tensor) -> None:
        torch.cuda._sleep(50_000_000)
        total.add_(batch)
        raise RuntimeError("no step")

    captured = CapturedStep(fail, nn.Linear(1, 1, device=device))
    for number in (1, 2, 4):
        with pytest.raises(RuntimeError, match="no step"):
            captured(torch.full((1,), float(number)))
    assert total.item() == 7
