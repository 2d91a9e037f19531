"""Features of one group as one jagged batch: the same numbers, a fixed number of kernels, and no copy of neighbours."""

import re
import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import JaggedTensor, KeyedJaggedTensor

from jfi import JaggedFeatureInteraction, KeyBias, PositionBias, SequenceFeatureConfig, WeightBias
from jfi.modules import events, validation
from jfi.modules.sequence_configs import FeatureGroup
from jfi.tables import table_rows
from jfi.utils import compat

from .conftest import EMBEDDING_DIM, LENGTHS

KINDS = {
    "plain": {},
    "position": {"bias": PositionBias(3)},
    "buckets": {"bias": KeyBias("age{f}", 4)},
    "weights": {"bias": WeightBias()},
    "weighted values": {"weighted_values": True},
    "fields": {"sequence_keys": ["history{f}", "rating{f}"], "target_keys": ["item", "item{f}"], "combine": "concat"},
}


class Operations(TorchDispatchMode):
    """What is called, and with what output."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.outputs.append((func.overloadpacket.__name__, output))
        return output

    def counts(self):
        return Counter(name for name, _ in self.outputs)


@pytest.fixture
def contents_are_not_read(monkeypatch):
    """As on a GPU: the checks of contents would count as operations."""
    monkeypatch.setattr(validation, "may_read", lambda tensor: False)


@pytest.fixture(autouse=True)
def counting_is_no_tracing(monkeypatch):
    """What is counted is the eager call, though a dispatch mode looks on."""
    for module in (table_rows, sys.modules["jfi.ops.absorbed_target_attention"]):
        monkeypatch.setattr(module, "is_traced", lambda: False)
    monkeypatch.setattr(compat, "profiler_enabled", lambda: True)  # the attention is counted by its name


def configs(kind, count):
    def of(f, value):
        if isinstance(value, list):
            return [of(f, one) for one in value]
        if isinstance(value, KeyBias):
            return KeyBias(value.key.format(f=f), value.num_buckets)
        return value.format(f=f) if isinstance(value, str) else value

    defaults = {"sequence_keys": ["history{f}"], "target_keys": ["item{f}"], "max_seqlen": 9}
    options = {**defaults, **KINDS[kind]}
    return [
        SequenceFeatureConfig(name=str(f), **{name: of(f, value) for name, value in options.items()})
        for f in range(count)
    ]


def lengths_of(f):
    return torch.tensor(LENGTHS).roll(f) + f % 3


def inputs_of(count, adjoined=True, dtype=torch.float64, batch=None):
    """Sequences and targets for any kind; fields that adjoin are split from one tensor as by an EmbeddingCollection."""
    lengths = torch.stack([lengths_of(f)[:batch] for f in range(count)])
    events = lengths.sum(1).tolist()

    def parts(joined_rows):
        return joined_rows.split(events) if adjoined else [part.clone() for part in joined_rows.split(events)]

    leaves = {
        key: torch.randn(sum(events), EMBEDDING_DIM, dtype=dtype).requires_grad_() for key in ("history", "rating")
    }
    weights = parts(torch.rand(sum(events), dtype=dtype) + 0.1)
    sequences = {}
    for key, leaf in leaves.items():
        rows = parts(leaf * 1)
        for f in range(count):
            sequences[f"{key}{f}"] = JaggedTensor(rows[f], lengths=lengths[f], weights=weights[f])
    ages = parts(torch.randint(3, (sum(events),)))
    for f in range(count):
        sequences[f"age{f}"] = JaggedTensor(ages[f], lengths=lengths[f])
    targets = {f"item{f}": torch.randn(lengths.size(1), EMBEDDING_DIM, dtype=dtype) for f in range(count)}
    return sequences, targets | {"item": targets["item0"]}, leaves


@pytest.mark.parametrize("adjoined", [False, True])
@pytest.mark.parametrize("batch", [None, 0], ids=["samples", "no sample"])
def test_joined_features_equal_layers_of_their_own(batch, adjoined):
    """Mixed kinds, three features each, one history of which is empty."""
    features = [feature for kind in KINDS for feature in configs(kind, 3)]
    for place, feature in enumerate(features):
        feature.name = str(place)
    options = {"embedding_dim": EMBEDDING_DIM, "num_heads": 2, "num_queries": 2}
    layer = JaggedFeatureInteraction(features[::-1], **options).double()
    assert len(layer.groups) == len(KINDS)
    sequences, targets, leaves = inputs_of(3, adjoined, batch=batch)
    if batch is None and not adjoined:
        for key in ("history1", "rating1", "age1"):
            empty = sequences[key]
            sequences[key] = JaggedTensor(
                empty.values()[:0], lengths=empty.lengths() * 0, weights=torch.empty(0, dtype=torch.float64)
            )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()

    got = layer(sequences, targets)
    want, attended = [], layer.attention_weights(sequences, targets)
    for group in layer.groups:
        for feature in group.features:
            alone = JaggedFeatureInteraction([feature], **options).double()
            alone.load_state_dict(layer.state_dict(), strict=False)
            want.append(alone(sequences, targets)[feature.name])
            torch.testing.assert_close(got[feature.name], want[-1])
            weights = alone.attention_weights(sequences, targets)[feature.name]
            torch.testing.assert_close(attended[feature.name].values(), weights.values())
            assert torch.equal(attended[feature.name].lengths(), weights.lengths())
    names = [feature.name for group in layer.groups for feature in group.features]
    both = sum(got[name].sum() for name in names), sum(one.sum() for one in want)
    gradients = [torch.autograd.grad(one, leaves.values(), retain_graph=True) for one in both]
    for gradient, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("given", ["offsets", "some of each"])
def test_offsets_in_place_of_lengths(given):
    layer = JaggedFeatureInteraction(configs("position", 3), EMBEDDING_DIM).double()
    sequences, targets, _ = inputs_of(3)
    want = layer(sequences, targets).values()
    for f in range(3 if given == "offsets" else 2):
        rows = sequences[f"history{f}"]
        sequences[f"history{f}"] = JaggedTensor(rows.values(), offsets=rows.offsets().int())
    torch.testing.assert_close(layer(sequences, targets).values(), want, rtol=0, atol=0)


@pytest.mark.parametrize("adjoined", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_operations_does_not_grow_with_that_of_the_features(kind, adjoined, contents_are_not_read):
    counts = []
    for features in (2, 26):
        layer = JaggedFeatureInteraction(configs(kind, features), EMBEDDING_DIM, 2).double()
        assert len(layer.groups) == 1
        sequences, targets, _ = inputs_of(features, adjoined)
        with Operations() as forward:
            output = layer(sequences, targets)
        counts.append(forward.counts())
        assert output.values().shape == (len(LENGTHS), features * EMBEDDING_DIM)
    assert counts[0] == counts[1] and counts[0]["target_attention_fwd"] == 1


def test_the_gradients_of_a_group_are_views_of_one_tensor():
    """Autograd would copy the gradient of each feature's parameter if its layout were another."""
    layer = JaggedFeatureInteraction(configs("position", 3), EMBEDDING_DIM, 2).double()
    sequences, targets, _ = inputs_of(3)
    layer(sequences, targets).values().sum().backward()
    gradients = {}
    for name, parameter in layer.named_parameters():
        storages = gradients.setdefault(name.rpartition(".")[2], set())
        storages.add(parameter.grad.untyped_storage().data_ptr())
    assert {name: len(storages) for name, storages in gradients.items()} == dict.fromkeys(gradients, 1)


def large(operations, numel):
    """Names of operations that wrote a tensor of that many elements or more, in memory of its own."""
    known, names = set(), []
    for name, output in operations.outputs:
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= numel:
                storage = tensor.untyped_storage().data_ptr()
                if not tensor._is_view() and storage not in known:
                    names.append(name)
                known.add(storage)
    return names


def test_neighbours_are_read_where_they_lie(contents_are_not_read):
    """The layer writes no tensor of the history's size, other than its gradient."""
    layer = JaggedFeatureInteraction(configs("plain", 3), EMBEDDING_DIM).double()
    lengths = torch.tensor([[900, 400], [0, 0], [300, 700]])
    looked_up = torch.randn(2300, EMBEDDING_DIM, dtype=torch.float64, requires_grad=True) * 1
    parts = looked_up.split([1300, 0, 1000])
    sequences = {f"history{f}": JaggedTensor(parts[f], lengths=lengths[f]) for f in range(3)}
    targets = {f"item{f}": torch.randn(2, EMBEDDING_DIM, dtype=torch.float64) for f in range(3)}
    with Operations() as forward:
        loss = layer(sequences, targets).values().square().sum()
    assert large(forward, looked_up.numel()) == []
    with Operations() as backward:
        gradient = torch.autograd.grad(loss, [looked_up, *layer.parameters()])[0]
    # Past the attention's, whatever cut the histories apart puts their gradients together again.
    assert large(backward, looked_up.numel()) == ["target_attention_bwd", "cat"] and gradient.any(1).all()


class Flat(torch.autograd.Function):
    """What TorchRec's all-to-all returns: a view of a buffer that autograd does not know."""

    @staticmethod
    def forward(ctx, rows):
        return rows.flatten().clone().view(-1, rows.size(1))

    @staticmethod
    def backward(ctx, grad):
        return grad


class Reversed(torch.autograd.Function):
    """Gradient reversal as it is usually written: a view of its input, with a gradient of its own."""

    @staticmethod
    def forward(ctx, rows):
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def split(rows):
    return list(rows.split([2, 0, 3]))


JOINS = {
    # name: parts of rows [5, 3], and whether they are joined without a copy
    "all parts of a tensor": (lambda rows: split(rows * 1), True),
    "all parts of a view of a tensor": (lambda rows: split((rows * 1).view(-1).view(5, 3)), True),
    "parts of what an all-to-all returns": (lambda rows: split(Flat.apply(rows)), True),
    "some parts of a tensor": (lambda rows: split(torch.cat([rows[:1], rows, rows[:2]])[1:6]), True),
    "parts of a leaf": (lambda rows: split(rows), True),
    "parts with a gradient of their own": (lambda rows: [Reversed.apply(part) for part in split(rows * 1)], True),
    "parts without a gradient": (lambda rows: [part.detach() for part in split(rows)], True),
    "parts of which one has no gradient": (lambda rows: [rows[:2].detach(), *split(rows * 1)[1:]], False),
    "an empty one from elsewhere": (lambda rows: [rows[:2], rows.new_empty(0, 3), rows[2:]], True),
    "in another order": (lambda rows: split(rows * 1)[::-1], False),
    "with a gap": (lambda rows: [rows[:2], rows[3:]], False),
    "columns": (lambda rows: [(rows * 1)[:2, :2], (rows * 1)[2:, :2]], False),
    "all empty": (lambda rows: [rows[:0], rows[:0]], False),
    "tensors of their own": (lambda rows: [rows[:2] * 1, rows[2:] * 1], False),
}


@pytest.mark.parametrize("name", JOINS)
def test_join_is_cat_with_its_gradient(name):
    make, in_place = JOINS[name]
    rows = torch.randn(5, 3, requires_grad=True)
    parts = make(rows)
    got = table_rows.join(parts)
    want = torch.cat(parts)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    first = next((part for part in parts if part.numel()), parts[0])
    if want.numel():
        assert (got.data_ptr() == first.data_ptr()) is in_place
    assert got.requires_grad == want.requires_grad
    if want.requires_grad:
        weight = torch.randn_like(want)
        gradients = [torch.autograd.grad((one * weight).sum(), rows, retain_graph=True)[0] for one in (got, want)]
        torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_a_part_that_somebody_looks_at_gets_its_gradient():
    """A gradient of its own, or through a hook, or as a leaf."""
    whole = torch.randn(5, 3, requires_grad=True) * 1
    seen = []
    parts = list(whole.split([2, 3]))
    parts[0].retain_grad()
    parts[1].register_hook(seen.append)
    got = table_rows.join(parts)
    assert got.data_ptr() == whole.data_ptr()
    got.sum().backward()
    assert parts[0].grad is not None and len(seen) == 1

    with torch.no_grad():
        leaves = [part.requires_grad_() for part in torch.randn(5, 3).requires_grad_()[:].chunk(2)]
    table_rows.join(leaves).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


def test_join_under_no_grad_and_inference():
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            rows = torch.randn(5, 3)
            got = table_rows.join(split(rows))
            assert torch.equal(got, rows) and got.data_ptr() == rows.data_ptr()


def test_histories_of_several_dtypes():
    layer = JaggedFeatureInteraction(configs("plain", 2), EMBEDDING_DIM)
    sequences, targets, _ = inputs_of(2, adjoined=False, dtype=torch.float32)
    rows = sequences["history1"]
    sequences["history1"] = JaggedTensor(rows.values().bfloat16(), lengths=rows.lengths())
    message = (
        "sequences['history1'] must be torch.float32 like 'history0', since both are read in one launch, "
        "got torch.bfloat16"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(sequences, targets)


def test_histories_of_several_numbers_of_samples():
    layer = JaggedFeatureInteraction(configs("plain", 2), EMBEDDING_DIM)
    sequences, targets, _ = inputs_of(2, adjoined=False, dtype=torch.float32)
    sequences["history1"] = JaggedTensor(torch.randn(2, EMBEDDING_DIM), lengths=torch.tensor([2, 0, 0]))
    message = "sequences['history1'] must have 4 samples like 'history0', since both enter one output, got 3"
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(sequences, targets)


def test_the_longest_history_is_passed_on_if_every_feature_has_one():
    features = configs("plain", 3)
    features[1].max_seqlen = 20
    assert FeatureGroup(features, EMBEDDING_DIM).max_seqlen == 20
    features[2].max_seqlen = None
    assert FeatureGroup(features, EMBEDDING_DIM).max_seqlen is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "position", "buckets", "weights"])
def test_under_autocast_the_forward_writes_nothing_of_the_historys_size(kind, dtype, contents_are_not_read):
    layer = JaggedFeatureInteraction(configs(kind, 1), EMBEDDING_DIM, 2)
    count = 4000
    history = torch.randn(count, EMBEDDING_DIM, dtype=dtype, requires_grad=True)
    lengths = torch.tensor([count - 7, 7])
    sequences = {
        "history0": JaggedTensor(history, lengths=lengths, weights=torch.rand(count)),
        "age0": JaggedTensor(torch.randint(4, (count,)), lengths=lengths),
    }
    with torch.autocast("cpu", dtype=torch.bfloat16), Operations() as forward:
        pooled = layer(sequences, {"item0": torch.randn(2, EMBEDDING_DIM)})
    assert pooled.values().dtype == torch.bfloat16
    assert large(forward, history.numel()) == []
    pooled.values().float().sum().backward()
    assert history.grad.dtype == dtype and history.grad.isfinite().all()


def test_neighbours_in_a_keyed_jagged_tensor():
    """Lengths, ids and weights of keys that follow one another are read where they lie."""
    keys = ["history0", "history1", "age0", "age1"]
    lengths = torch.tensor(LENGTHS * 4)
    ids = KeyedJaggedTensor(keys, torch.arange(36), lengths=lengths, weights=torch.rand(36))
    parts = [ids[key] for key in keys]
    assert table_rows.join([part.values() for part in parts[2:]]).data_ptr() == parts[2].values().data_ptr()
    assert table_rows.join([part.weights() for part in parts[:2]]).data_ptr() == parts[0].weights().data_ptr()
    assert table_rows.join([part.lengths() for part in parts[:2]]).data_ptr() == lengths.data_ptr()
    assert events.join_offsets(parts[:2]).tolist() == [0, 3, 3, 4, 9, 12, 12, 13, 18]


def test_log2_is_rounded_down_next_to_every_power_of_two():
    for dtype, bits in ((torch.int32, 31), (torch.int64, 63)):
        powers = [2**exponent for exponent in range(1, bits)]
        counts = [count for power in powers for count in (power - 1, power, power + 1)]
        for rows in (1, 5, 100):
            want = [min(count.bit_length(), rows) - 1 for count in counts]
            assert events.floor_log2(torch.tensor(counts, dtype=dtype), rows).tolist() == want
