"""Ragged targets against dense ones, for which every candidate brings its own history, cut to what it sees."""

import re

import pytest
import torch
from torch._dynamo import testing
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.fx import symbolic_trace

from jfi import JaggedFeatureInteraction, KeyBias, PositionBias, SequenceFeatureConfig, TimeBias, WeightBias
from jfi.ops.dispatch import operators
from jfi.utils.encoding import age_buckets

from .conftest import EMBEDDING_DIM
from .test_jagged_feature_interaction import check_gradients, leaves_of, randomise, taste

#: Users without candidates, without events, without either, and with one of each.
COUNTS, EVENTS, CLICKS = [4, 0, 3, 0, 1, 9], [6, 3, 0, 0, 1, 20], [0, 2, 5, 0, 3, 1]


def jagged(values, lengths, **kwargs):
    return JaggedTensor(values=values, lengths=torch.tensor(lengths, dtype=torch.long), **kwargs)


def sorted_times(lengths, most, dtype=torch.int64):
    """Times with ties, and for float64 with fractions."""
    parts = [torch.randint(4 * most, (n,)).sort().values for n in lengths]
    times = torch.cat(parts)
    return jagged((times / 4).to(dtype) if dtype == torch.float64 else (times // 4).to(dtype), lengths)


def visible_events(events, event_times, counts, target_times, max_events):
    """By candidate the rows of the events that it sees; times of None hide nothing."""
    seen, first, row = [], 0, 0
    for length, count in zip(events, counts, strict=True):
        for _ in range(count):
            rows = range(first, first + length)
            if target_times is not None:
                rows = [j for j in rows if event_times.values()[j] < target_times.values()[row]]
            seen.append(list(rows)[-max_events:] if max_events else list(rows))
            row += 1
        first += length
    return seen


def expand(sequences, seen, ages=None):
    """The histories of each candidate, by key; `ages` are the keys of age buckets, with times and number of buckets."""
    expanded = {}
    for key, one in sequences.items():
        rows = seen[key]
        index = torch.tensor([j for of_one in rows for j in of_one], dtype=torch.long)
        weights = one.weights_or_none()
        values = one.values()[index]
        if ages is not None and key in ages:
            event_times, target_times, num_buckets = ages[key]
            candidate = [row for row, of_one in enumerate(rows) for _ in of_one]
            age = target_times.values()[candidate] - event_times.values()[index]
            values = torch.from_numpy(age_buckets(age.double().numpy(), num_buckets))
        lengths = [len(of_one) for of_one in rows]
        expanded[key] = jagged(values, lengths, weights=None if weights is None else weights[index])
    return expanded


def kinds(has_times):
    """Features of every kind, most of them in twos over histories of other lengths."""
    other = {"sequence_keys": ["clicks"], "target_keys": ["genre"]}
    of_ages = [
        taste(name="age", bias=TimeBias("history_age", 6)),
        taste(name="clicks age", bias=TimeBias("clicks_age", 6), **other),
    ]
    return [
        taste(name="plain"),
        taste(name="position", bias=PositionBias(3)),
        taste(name="many positions", bias=PositionBias(80)),
        taste(name="wide", sequence_keys=["history", "rating"], target_keys=["item", "genre"], combine="concat"),
        taste(name="weighted", bias=WeightBias()),
        taste(name="scaled", weighted_values=True),
        taste(name="clicks", **other),
        taste(name="clicks position", bias=PositionBias(3), **other),
        taste(name="scaled by position", bias=PositionBias(4), weighted_values=True),
        taste(name="both", sequence_keys=["history", "rating"], bias=WeightBias(), weighted_values=True),
        *of_ages,
        *([] if has_times else [taste(name="rated", bias=KeyBias("history_age", 6))]),
    ]


def batch(time_dtype=torch.int64, most=40):
    lengths = {"history": EVENTS, "rating": EVENTS, "clicks": CLICKS}
    sequences = {}
    for key, one in lengths.items():
        weights = (torch.rand(sum(one), dtype=torch.float64) + 0.1).requires_grad_()
        values = torch.randn(sum(one), EMBEDDING_DIM, dtype=torch.float64, requires_grad=True)
        sequences[key] = jagged(values, one, weights=None if key != "history" else weights)
    sequences["history_age"] = jagged(torch.randint(6, (sum(EVENTS),)), EVENTS)
    sequences["clicks_age"] = jagged(torch.randint(6, (sum(CLICKS),)), CLICKS)
    values = [
        torch.randn(sum(COUNTS), EMBEDDING_DIM, dtype=torch.float64, requires_grad=True) for _ in ("item", "genre")
    ]
    dense = dict(zip(("item", "genre"), values, strict=True))
    targets = {key: jagged(value, COUNTS) for key, value in dense.items()}
    event_times = {key: sorted_times(lengths[key], most, time_dtype) for key in ("history", "clicks")}
    target_times = sorted_times(COUNTS, most, time_dtype)
    # Of the first user one candidate is older than all events, and one is as old as an event.
    target_times.values()[0], target_times.values()[1] = 0, event_times["history"].values()[3]
    target_times.values()[:4] = target_times.values()[:4].sort().values
    return sequences, dense, targets, target_times, event_times


def dense_equivalent(sequences, target_times, event_times, max_events=None):
    seen = {}
    for key in sequences:
        clicks = key.startswith("clicks")
        events, times = (CLICKS if clicks else EVENTS), event_times["clicks" if clicks else "history"]
        seen[key] = visible_events(events, times, COUNTS, target_times, max_events)
    ages = None
    if target_times is not None:
        ages = {f"{key}_age": (times, target_times, 6) for key, times in event_times.items()}
    return seen, expand(sequences, seen, ages)


@pytest.mark.parametrize("projects", [False, True])
@pytest.mark.parametrize(
    ("has_times", "max_events", "time_dtype"),
    [(False, None, torch.int64), (True, None, torch.int64), (True, 3, torch.float64), (True, 1, torch.int32)],
)
def test_outputs_and_gradients_are_those_of_dense_targets_with_cut_histories(
    has_times, max_events, time_dtype, projects, monkeypatch
):
    monkeypatch.setattr("jfi.modules.ragged_attention.pays_to_project", lambda *_: projects)
    sequences, dense, targets, target_times, event_times = batch(time_dtype)
    features = kinds(has_times)
    layer = JaggedFeatureInteraction(features, EMBEDDING_DIM, 2, 2).double()
    randomise(layer)
    assert any(len(group.features) > 1 for group in layer.groups) and len(layer.groups) > 4
    options = {"target_times": target_times, "event_times": event_times, "max_events": max_events}
    if not has_times:
        options, target_times = {}, None
    seen, expanded = dense_equivalent(sequences, target_times, event_times, max_events)
    assert not (has_times and seen["history"][0])  # older than everything
    got, want = layer(sequences, targets, **options), layer(expanded, dense)
    assert got.keys() == want.keys() and got.values().shape == (sum(COUNTS), got.values().size(1))
    torch.testing.assert_close(got.values(), want.values())
    check_gradients(got.values(), want.values(), leaves_of(layer, sequences, dense))

    weights, dense_weights = layer.attention_weights(sequences, targets, **options), None
    dense_weights = layer.attention_weights(expanded, dense)
    for feature in features:
        one, many = weights[feature.name], dense_weights[feature.name]
        lengths, key = (CLICKS if "clicks" in feature.name else EVENTS), feature.sequence_keys[0]
        pairs = [length for length, count in zip(lengths, COUNTS, strict=True) for _ in range(count)]
        assert one.lengths().tolist() == pairs
        first = [
            start
            for start, count in zip([0, *torch.tensor(lengths).cumsum(0).tolist()], COUNTS, strict=False)
            for _ in range(count)
        ]
        places = torch.cat(
            [
                torch.tensor([begin + j - start for j in rows], dtype=torch.long)
                for rows, start, begin in zip(seen[key], first, one.offsets().tolist(), strict=False)
            ]
        )
        torch.testing.assert_close(one.values()[places], many.values())
        hidden = torch.ones(sum(pairs), dtype=torch.bool).index_fill_(0, places, False)
        assert one.values()[hidden].eq(0).all()


def test_a_batch_by_user_equals_the_batch_by_sample_for_the_same_weights_of_ages():
    """TimeBias reads ids under its key where there are no times, and KeyBias has parameters of the same names."""
    sequences, dense, targets, target_times, event_times = batch(most=3000)
    by_user = JaggedFeatureInteraction([taste(bias=TimeBias("history_age", 6))], EMBEDDING_DIM, 2).double()
    randomise(by_user)
    by_sample = JaggedFeatureInteraction([taste(bias=KeyBias("history_age", 6))], EMBEDDING_DIM, 2).double()
    by_sample.load_state_dict(by_user.state_dict())
    _, expanded = dense_equivalent(sequences, target_times, event_times)
    del sequences["history_age"]  # not read
    want = by_user(expanded, dense).values()
    torch.testing.assert_close(by_user(sequences, targets, target_times, event_times["history"]).values(), want)
    torch.testing.assert_close(by_sample(expanded, dense).values(), want, rtol=0, atol=0)


def test_a_candidate_older_than_every_event_gets_the_output_of_an_empty_history():
    layer = randomise(JaggedFeatureInteraction([taste(bias=PositionBias())], EMBEDDING_DIM, 2))
    sequences = {"history": jagged(torch.randn(2, EMBEDDING_DIM), [2])}
    targets = {"item": jagged(torch.randn(3, EMBEDDING_DIM), [3])}
    times = jagged(torch.tensor([4, 5, 6]), [3]), jagged(torch.tensor([5, 5]), [2])
    out = layer(sequences, targets, *times)["taste"]
    torch.testing.assert_close(out[:2], layer.attention.taste.output_bias.expand(2, -1))
    assert not torch.allclose(out[2], layer.attention.taste.output_bias)


@pytest.mark.parametrize("has_times", [False, True])
@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_a_batch_without_candidates(counts, has_times):
    layer = JaggedFeatureInteraction([taste(), taste(name="position", bias=PositionBias())], EMBEDDING_DIM)
    events = [2 for _ in counts]
    sequences = {"history": jagged(torch.randn(sum(events), EMBEDDING_DIM), events)}
    targets = {"item": jagged(torch.randn(0, EMBEDDING_DIM), counts)}
    times = ()
    if has_times:
        times = jagged(torch.zeros(0).long(), counts), jagged(torch.zeros(sum(events)).long(), events)
    out = layer(sequences, targets, *times)
    assert out.values().shape == (0, 2 * EMBEDDING_DIM)
    out.values().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert layer.attention_weights(sequences, targets, *times)["taste"].values().shape == (0, 1, 1)


class Awaitable:
    """What a sharded EmbeddingCollection returns has a mapping's methods and is no dict."""

    def __init__(self, tensors):
        self.items = tensors.items


def test_candidates_may_be_looked_up_by_a_sharded_collection():
    sequences, _, targets, target_times, event_times = batch()
    layer = JaggedFeatureInteraction(kinds(True), EMBEDDING_DIM).double()
    got, want = (layer(sequences, x, target_times, event_times).values() for x in (Awaitable(targets), targets))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def with_collection(features):
    tables = [
        EmbeddingConfig(name=f"table_{key}", embedding_dim=EMBEDDING_DIM, num_embeddings=50, feature_names=[key])
        for key in ("history", "clicks")
    ]
    collection = EmbeddingCollection(tables=tables)
    return JaggedFeatureInteraction(features, EMBEDDING_DIM, 2, embedding_collection=collection)


def test_a_timeline_is_looked_up_once_and_its_table_gets_the_gradient_of_all_candidates():
    _, dense, targets, target_times, event_times = batch()
    dense = {key: value.detach().float() for key, value in dense.items()}
    targets = {key: jagged(value, COUNTS) for key, value in dense.items()}
    layer = with_collection([*kinds(True)[1:3], taste(name="age", bias=TimeBias("history_age", 6))])
    ids = jagged(torch.randint(50, (sum(EVENTS),)), EVENTS)
    no_clicks = torch.zeros(len(EVENTS), dtype=torch.long)
    timeline = KeyedJaggedTensor(["history", "clicks"], ids.values(), lengths=torch.cat([ids.lengths(), no_clicks]))
    rows = []
    layer.embedding_collection.register_forward_hook(lambda *args: rows.append(args[2]["history"].values().size(0)))
    seen, expanded = dense_equivalent({"history": ids, "history_age": ids}, target_times, event_times)
    copies = KeyedJaggedTensor(
        ["history", "clicks", "history_age"],
        torch.cat([expanded["history"].values(), expanded["history_age"].values()]),
        lengths=torch.cat(
            [expanded["history"].lengths(), torch.zeros(sum(COUNTS)).long(), expanded["history_age"].lengths()]
        ),
    )
    got = layer(timeline, targets, target_times, event_times["history"]).values()
    want = layer(copies, dense).values()
    assert rows == [sum(EVENTS), sum(map(len, seen["history"]))]
    torch.testing.assert_close(got, want)
    check_gradients(got, want, {name: x for name, x in layer.named_parameters() if "clicks" not in name})


def test_half_precision_and_autocast_keep_the_dtypes_of_dense_targets():
    sequences, dense, targets, target_times, event_times = batch()
    features = [feature for feature in kinds(True) if "weight" not in feature.name]
    layer = randomise(JaggedFeatureInteraction(features, EMBEDDING_DIM, 2))
    _, expanded = dense_equivalent(sequences, target_times, event_times)

    def halved(tensors):
        return {
            key: jagged(one.values().bfloat16(), one.lengths().tolist(), weights=one.weights_or_none())
            if one.values().is_floating_point()
            else one
            for key, one in tensors.items()
        }

    dense = {key: value.float() for key, value in dense.items()}
    targets = {key: jagged(value, COUNTS) for key, value in dense.items()}
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = layer(halved(sequences), targets, target_times, event_times).values()
            want = layer(halved(expanded), dense).values()
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0.1, atol=0.5)


def test_features_of_a_group_without_a_bias_by_pair_share_one_call(monkeypatch):
    calls = []
    attend = operators.jagged_attention_fwd
    module = __import__("sys").modules["jfi.ops.jagged_attention"]
    monkeypatch.setattr(module, "_jagged_attention_fwd", lambda *args: calls.append(len(args[0])) or attend(*args))
    sequences, _, targets, target_times, event_times = batch()
    plain = [taste(), taste(name="clicks", sequence_keys=["clicks"])]
    layer = JaggedFeatureInteraction(plain, EMBEDDING_DIM).double()
    layer(sequences, targets, target_times, event_times)
    assert calls == [2 * sum(COUNTS)]


def test_torchrecs_tracer_takes_dense_and_ragged_targets_in_one_graph():
    sequences, dense, targets, target_times, event_times = batch()
    layer = randomise(JaggedFeatureInteraction(kinds(True), EMBEDDING_DIM, 2).double())
    traced = symbolic_trace(layer)
    options = (target_times, event_times, 4)
    torch.testing.assert_close(
        traced(sequences, targets, *options).values(), layer(sequences, targets, *options).values()
    )
    _, expanded = dense_equivalent(sequences, target_times, event_times, 4)
    torch.testing.assert_close(traced(expanded, dense).values(), layer(expanded, dense).values())


def test_compiles_to_one_graph_for_every_number_of_candidates_and_events():
    torch._dynamo.reset()
    compilations = testing.CompileCounter()
    features = [taste(bias=TimeBias("age")), taste(name="plain"), taste(name="other", bias=PositionBias())]
    layer = randomise(JaggedFeatureInteraction(features, EMBEDDING_DIM, 2))

    def interact(history, offsets, item, target_offsets, times, event_times):
        sequences = {"history": JaggedTensor(history, offsets=offsets)}
        targets = {"item": JaggedTensor(item, offsets=target_offsets)}
        times = JaggedTensor(times, offsets=target_offsets), JaggedTensor(event_times, offsets=offsets)
        return layer(sequences, targets, *times, 5).values()

    compiled = torch.compile(interact, backend=compilations, dynamic=True, fullgraph=True)
    for events, candidates in ((9, 7), (4, 20), (31, 5)):
        arguments = (
            torch.randn(events, EMBEDDING_DIM),
            torch.tensor([0, 2, 2, events]),
            torch.randn(candidates, EMBEDDING_DIM),
            torch.tensor([0, 3, 4, candidates]),
            torch.arange(candidates),
            torch.arange(events),
        )
        torch.testing.assert_close(compiled(*arguments), interact(*arguments))
    assert compilations.frame_count == 1


def item(lengths, width=EMBEDDING_DIM):
    return jagged(torch.zeros(max(sum(lengths), 0), width), lengths)


def whole(*times):
    return jagged(torch.tensor(times), [2, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"genre": item([1, 2])}, "targets['genre'] must be aligned with 'item', got other lengths in at least one"),
        ({"genre": item([2, 2])}, "targets['genre'] must be aligned with 'item', which has 3 candidates, got 4"),
        ({"genre": torch.zeros(3, 8)}, "targets['genre'] must be a JaggedTensor like 'item', got Tensor: ragged and"),
        ({"item": torch.zeros(2, 8)}, "max_events need ragged targets: targets['item'] must be a JaggedTensor, got"),
        (
            {"item": torch.zeros(2, 8), "target_times": None, "event_times": None},
            "targets['genre'] must be a Tensor, got JaggedTensor",
        ),
        ({"genre": None}, "targets must hold the key 'genre', got none of that name; known: ['item']"),
        ({"genre": item([2, 1], 4)}, "targets['genre'] must have shape [3, 8] (rows, embedding_dim), got [3, 4]"),
        (
            {"item": jagged(torch.zeros(3, 8), [4, -1]), "genre": jagged(torch.zeros(3, 8), [4, -1])},
            "targets['item'] must have lengths of at least 0, got -1",
        ),
        (
            {"item": jagged(torch.zeros(3, 8), [2, 2])},
            "targets['item'] must have offsets from 0 to 3, the number of its candidates, got 0 to 4",
        ),
        (
            {"item": item([1, 1, 1]), "genre": item([1, 1, 1]), "target_times": None, "event_times": None},
            "targets['item'] must have 2 users like sequences['history'], got 3",
        ),
        ({"target_times": jagged(torch.arange(4), [3, 1])}, "target_times must be aligned with 'item', which has 3 ca"),
        ({"target_times": jagged(torch.arange(3), [1, 2])}, "target_times must be aligned with 'item', got other leng"),
        (
            {"target_times": whole(5, 4, 1)},
            "target_times must not decrease within a sample, got 5 then 4 at candidate 1",
        ),
        (
            {"target_times": whole(5.0, 6.0, 1.0)},
            "target_times must hold times of shape [R], int32, int64 or float64, got torch.fl",
        ),
        ({"target_times": torch.arange(3)}, "target_times must be a JaggedTensor, got Tensor"),
        ({"target_times": None}, "target_times must be given with event_times, got None"),
        ({"event_times": None}, "event_times must be given with target_times, got None"),
        ({"event_times": torch.arange(5)}, "event_times must be a JaggedTensor or a dict of them, got Tensor"),
        ({"event_times": {"clicks": whole(1, 2, 3)}}, "event_times must hold the key 'history', got none of that name"),
        ({"event_times": {"history": 3}}, "event_times['history'] must be a JaggedTensor, got int"),
        (
            {"event_times": {"history": jagged(torch.tensor([1, 2, 9, 4, 6]), [1, 4])}},
            "event_times['history'] must not decrease within a sample, got 9 then 4 at event 3",
        ),
        (
            {"event_times": jagged(torch.arange(4), [1, 3])},
            "event_times must be aligned with 'history', which has 5 events, got 4",
        ),
        (
            {"event_times": jagged(torch.arange(5).int(), [1, 4])},
            "event_times must be torch.int64 like target_times, got torch.int32",
        ),
        (
            {"target_times": jagged(torch.tensor([1, torch.inf, 3]).double(), [2, 1])},
            "target_times must be finite, got inf",
        ),
        ({"max_events": 0}, "max_events must be at least 1, got 0"),
        ({"max_events": 2.0}, "max_events must be an int, got 2.0"),
        (
            {"max_events": 2, "target_times": None, "event_times": None},
            "max_events needs target_times, which say what lies before a candidate, got None",
        ),
        (
            {"bias": KeyBias("age", 4)},
            "target_times must be None for feature 'taste' with KeyBias(key='age', num_buckets=4), whose ids are the",
        ),
        (
            {"bias": TimeBias("age", 4), "target_times": None, "event_times": None},
            "sequences must hold the key 'age', got none of that name",
        ),
    ],
)
def test_wrong_ragged_targets(changes, message):
    given = {
        "item": item([2, 1]),
        "genre": item([2, 1]),
        "target_times": whole(4, 5, 1),
        "event_times": jagged(torch.tensor([7, 1, 2, 2, 8]), [1, 4]),
        "max_events": None,
        "bias": None,
    } | changes
    targets = {key: given[key] for key in ("item", "genre") if given[key] is not None}
    feature = taste(target_keys=["item", "genre"], bias=given["bias"])
    layer = JaggedFeatureInteraction([feature], EMBEDDING_DIM)
    sequences = {"history": jagged(torch.zeros(5, EMBEDDING_DIM), [1, 4])}
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        layer(sequences, targets, given["target_times"], given["event_times"], given["max_events"])


def test_time_bias_has_as_many_buckets_as_the_operator():
    assert SequenceFeatureConfig("taste", ["history"], ["item"], bias=TimeBias("age", 64)).num_buckets == 64
    with pytest.raises(ValueError, match="num_buckets of TimeBias must be at most 64, got 65"):
        TimeBias("age", 65)
    with pytest.raises(TypeError, match="key of TimeBias must be a str, got 32"):
        TimeBias(32)


@pytest.mark.parametrize(("count", "projects"), [(1, False), (20, True)])
def test_many_candidates_of_a_user_share_projected_events(count, projects, monkeypatch):
    key_heads = []
    attend = operators.jagged_attention_fwd
    module = __import__("sys").modules["jfi.ops.jagged_attention"]
    monkeypatch.setattr(module, "_jagged_attention_fwd", lambda *x: key_heads.append(x[1].shape[1]) or attend(*x))
    layer = randomise(JaggedFeatureInteraction([taste()], EMBEDDING_DIM, 2).double())
    history = torch.randn(7, EMBEDDING_DIM, dtype=torch.float64)
    target = torch.randn(2 * count, EMBEDDING_DIM, dtype=torch.float64)
    sequences = {"history": jagged(history, [3, 4])}
    got = layer(sequences, {"item": jagged(target, [count, count])}).values()
    assert key_heads == [2 if projects else 1]
    copies = [history[:3]] * count + [history[3:]] * count
    expanded = {"history": jagged(torch.cat(copies), [3] * count + [4] * count)}
    torch.testing.assert_close(got, layer(expanded, {"item": target}).values())


def test_targets_that_no_feature_reads_are_not_read():
    class Unread(JaggedTensor):
        def values(self):
            raise AssertionError("read")

    layer = JaggedFeatureInteraction([taste()], EMBEDDING_DIM, 2)
    events = jagged(torch.randn(4, EMBEDDING_DIM), [3, 1])
    item = jagged(torch.randn(3, EMBEDDING_DIM), [1, 2])
    other = Unread(torch.randn(3, EMBEDDING_DIM), lengths=torch.tensor([1, 2]))
    targets = {key: item for key in layer.features[0].target_keys}
    sequences = {key: events for key in layer.features[0].sequence_keys}
    assert layer(sequences, targets | {"unread": other}).values().shape[0] == 3
