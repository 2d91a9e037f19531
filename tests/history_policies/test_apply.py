"""Which events stay against loops: in packed histories, KeyedJaggedTensors, timelines, and with a capacity."""

import dataclasses
import inspect
from functools import cache

import numpy as np
import pytest
import torch
from history_policies.logs import EVENTS, planted
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jfi.history_policies import EventLog, Policy, PolicyModule, fit
from jfi.history_policies.apply import find_cells, select_on_device
from jfi.history_policies.select import CellTables

HISTORY = ["history_item", "history_rating"]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@cache
def fitted(num_bins: int = 10) -> Policy:
    events, conversion, _ = planted()
    return fit(events, conversion, remove=0.4, boost=["active"], num_bins=num_bins, newest=2)


@cache
def made(newest: int, caps: tuple, weighted: bool) -> Policy:
    """A policy of one bin more on one surface than on the others, with these settings."""
    policy = fitted(6)
    surfaces = tuple(
        one if weighted else replace(one, weight=(1.0,) * len(one.weight)) for one in policy.surface_reports
    )
    first, *others = policy.edges
    columns = ("events", "conversions", "log_odds", "keep", "weight")
    surfaces = tuple(
        one if one.surface == "feed" else replace(one, **{name: getattr(one, name)[1:] for name in columns})
        for one in surfaces
    )
    segments = tuple(replace(one, cap=cap) for one, cap in zip(policy.segment_reports, caps, strict=True))
    edges = (first, *(one[1:] for one in others))
    return replace(policy, newest=newest, edges=edges, segment_reports=segments, surface_reports=surfaces)


def loop_cell(policy: Policy, surface: int, dwell: float) -> int | None:
    """The bin in the report of the surface, or None for a surface that the policy does not know."""
    if surface < 0:
        return None
    edges = policy.edges[surface]
    return sum(np.float32(dwell) >= edge for edge in edges) if dwell == dwell else len(edges) + 1


def loop_stays(policy: Policy, segment: int, events: list[tuple]) -> list[tuple[int, float]]:
    """Places and weights of the events (surface, dwell) of one history that stay."""
    found = []
    for place, (surface, dwell) in enumerate(events):
        bin_ = loop_cell(policy, surface, dwell)
        keep, weight = True, 1.0
        if bin_ is not None:
            report = policy.surface_reports[segment * len(policy.surfaces) + surface]
            keep, weight = report.keep[bin_], report.weight[bin_]
        if keep or place >= len(events) - policy.newest:
            found.append((place, weight))
    cap = policy.segment_reports[segment].cap
    return found if cap is None else found[-cap:]


DWELL = st.sampled_from([np.nan, -1.0, 0.0, 3.0, 8.0, 14.0, 20.0, 30.0, 50.0, 120.0, 1e9, np.inf])
HISTORIES = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.tuples(st.integers(-1, 2), DWELL), max_size=12)), min_size=1, max_size=6
)
POLICIES = st.builds(
    made,
    newest=st.integers(0, 3),
    caps=st.sampled_from([(None, None), (3, None), (4, 7), (50, 50)]),
    weighted=st.booleans(),
)


def packed(histories: list[tuple]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Surfaces and dwell of all events, segments and lengths of the histories."""
    events = [one for _, history in histories for one in history]
    surface, dwell = np.array(events, np.float64).reshape(-1, 2).T
    lengths = np.array([len(history) for _, history in histories])
    return surface.astype(np.int64), dwell, np.array([segment for segment, _ in histories]), lengths


def batch(lengths: np.ndarray, weights: bool = False) -> KeyedJaggedTensor:
    """Two aligned keys of a history between other keys; every value is different."""
    count, samples = int(lengths.sum()), len(lengths)
    ones = torch.ones(samples, dtype=torch.int64)
    of = torch.from_numpy(lengths)
    sizes = [samples, count, samples, count]
    values = torch.arange(sum(sizes)) + 100
    return KeyedJaggedTensor(
        keys=["item", HISTORY[0], "user", HISTORY[1]],
        values=values,
        weights=values.float() / 64 if weights else None,
        lengths=torch.cat([ones, of, ones, of]),
        stride=samples,
        length_per_key=sizes,
    )


def check(policy: Policy, histories: list[tuple], features: KeyedJaggedTensor, found: KeyedJaggedTensor) -> None:
    """`found` is `features` with the events that a loop keeps, and nothing else of it has changed."""
    stays = [loop_stays(policy, *history) for history in histories]
    assert found.keys() == features.keys() and found.stride() == features.stride()
    weighted = policy.is_weighted or features.weights_or_none() is not None
    assert (found.weights_or_none() is not None) == weighted
    for key in features.keys():  # noqa: SIM118
        old, new = features[key], found[key]
        for i, stay in enumerate(stays):
            begin, end = old.offsets()[i : i + 2].tolist()
            places = [place for place, _ in stay] if key in HISTORY else range(end - begin)
            factors = [weight for _, weight in stay] if key in HISTORY else [1.0] * (end - begin)
            part = slice(*new.offsets()[i : i + 2].tolist())
            assert new.values()[part].tolist() == [old.values()[begin + place].item() for place in places]
            if weighted:
                own = old.weights() if features.weights_or_none() is not None else torch.ones(len(old.values()))
                expected = [own[begin + place].item() * w for place, w in zip(places, factors, strict=True)]
                assert new.weights()[part].tolist() == pytest.approx(expected, rel=1e-6)


@settings(max_examples=80)
@given(policy=POLICIES, histories=HISTORIES, weights=st.booleans(), room=st.integers(0, 5))
def test_what_stays_is_that_of_a_loop(policy, histories, weights, room):
    surface, dwell, segments, lengths = packed(histories)
    stay = policy.select(policy.cells(surface, dwell), segments, lengths)
    expected, begin = [], 0
    for (segment, history), length in zip(histories, lengths, strict=True):
        expected += [(begin + place, weight) for place, weight in loop_stays(policy, segment, history)]
        begin += length
    assert stay.rows.tolist() == [place for place, _ in expected]
    assert stay.lengths.tolist() == [len(loop_stays(policy, *history)) for history in histories]
    if policy.is_weighted:
        assert stay.weights.tolist() == pytest.approx([weight for _, weight in expected], rel=1e-6)
    else:
        assert stay.weights is None

    features = batch(lengths, weights)
    inputs = torch.from_numpy(surface), torch.from_numpy(dwell), torch.from_numpy(segments)
    found = PolicyModule(policy, HISTORY)(features, *inputs)
    check(policy, histories, features, found)

    # With a capacity the same, and zeros behind it; room among the inputs belongs to nobody.
    capacity = int(lengths.sum()) + room
    if not capacity:
        return
    module = PolicyModule(policy, HISTORY, capacity)

    def with_tail(of: str) -> torch.Tensor:
        parts = [getattr(features[key], of)() for key in features.keys()]  # noqa: SIM118
        return torch.cat([torch.nn.functional.pad(part, (0, room), value=-9) for part in parts])

    with_room = KeyedJaggedTensor(
        keys=features.keys(),
        values=with_tail("values"),
        weights=with_tail("weights") if weights else None,
        lengths=features.lengths(),
        stride=features.stride(),
        length_per_key=[count + room for count in features.length_per_key()],
    )
    padded = [torch.nn.functional.pad(one, (0, room)) for one in inputs[:2]]
    fixed = module(with_room, *padded, inputs[2])
    check(policy, histories, features, fixed_to_exact(fixed))
    assert fixed.length_per_key()[1] == capacity and module.left_out == 0
    behind = fixed.values()[fixed.offset_per_key()[1] : fixed.offset_per_key()[2]][len(expected) :]
    assert not behind.any()
    if fixed.weights_or_none() is not None:
        weights_behind = fixed.weights()[fixed.offset_per_key()[1] : fixed.offset_per_key()[2]][len(expected) :]
        assert not weights_behind.any()


def fixed_to_exact(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch without its room."""
    lengths, stride = features.lengths(), features.stride()
    sizes = lengths.view(-1, stride).sum(1).tolist()
    starts = features.offset_per_key()
    weights = features.weights_or_none()

    def cut(x):
        return torch.cat([x[start : start + size] for start, size in zip(starts, sizes, strict=False)])

    return KeyedJaggedTensor(
        features.keys(), cut(features.values()), None if weights is None else cut(weights), lengths, stride=stride
    )


@given(policy=POLICIES, events=st.lists(st.tuples(st.integers(-1, 2), DWELL), max_size=30))
@settings(max_examples=40)
def test_cells_on_a_device_are_those_on_the_host(policy, events):
    surface, dwell, _, _ = packed([(0, events)])
    edges = PolicyModule(policy, HISTORY).get_buffer("_edges")
    found = find_cells(edges, torch.from_numpy(surface), torch.from_numpy(dwell))
    assert found.tolist() == policy.cells(surface, dwell).tolist()


def test_beyond_the_capacity_events_are_left_out_and_counted():
    policy = made(0, (None, None), True)
    histories = [(1, [(-1, 5.0)] * 4), (0, [(-1, 5.0)] * 3), (1, [(-1, 5.0)] * 2)]
    surface, dwell, segments, lengths = map(torch.from_numpy, packed(histories))
    module = PolicyModule(policy, HISTORY, capacity=6)
    found = module(batch(lengths.numpy()), surface, dwell, segments)
    assert found["history_item"].lengths().tolist() == [4, 2, 0]
    assert found["history_item"].values().tolist() == [103, 104, 105, 106, 107, 108]
    assert module.left_out == 3
    module(batch(lengths.numpy()), surface, dwell, segments)
    assert module.left_out == 6


@pytest.mark.parametrize("capacity", [None, 4])
def test_batches_without_samples_and_without_events(capacity):
    policy = made(2, (4, 7), True)
    for lengths in (np.zeros(0, np.int64), np.zeros(3, np.int64)):
        nothing = torch.zeros(0), torch.zeros(0), torch.zeros(len(lengths), dtype=torch.int64)
        found = PolicyModule(policy, HISTORY, capacity)(batch(lengths), nothing[0].long(), *nothing[1:])
        assert found.stride() == len(lengths) and found.lengths().sum() == 2 * len(lengths)
        assert found.length_per_key()[1] == (capacity or 0)


def test_a_policy_that_keeps_all_changes_no_bit():
    events, conversion, _ = planted()
    policy = fit(events, conversion)
    assert policy.keeps_all and not policy.is_weighted
    surface, dwell, segments, lengths = packed([(0, [(0, 1.0)] * 5), (1, []), (1, [(2, np.nan)])])
    features = batch(lengths, weights=True)
    arguments = [torch.from_numpy(one) for one in (surface, dwell, segments)]
    assert PolicyModule(policy, HISTORY)(features, *arguments) is features
    fixed = PolicyModule(policy, HISTORY, capacity=6)(features, *arguments)
    assert torch.equal(fixed.values(), features.values()) and torch.equal(fixed.lengths(), features.lengths())
    assert torch.equal(fixed.weights(), features.weights())
    stay = policy.select(policy.cells(surface, dwell), segments, lengths)
    assert stay.rows.tolist() == [*range(6)] and stay.lengths.tolist() == lengths.tolist() and stay.weights is None


@settings(max_examples=40)
@given(policy=POLICIES, rows=EVENTS, now=st.integers(1, 40), data=st.data())
def test_no_future_event_and_no_conversion_changes_what_a_sample_sees(policy, rows, now, data):
    """From the log to the events that stay: for a sample at `now`, what comes later has no part in it."""

    def sees(events: list[tuple]) -> tuple:
        """What a sample of user 0 sees, whose row is one of the log's."""
        sample = (0, now, 0, 7.0, False)
        user, time, surface, dwell, _ = map(np.array, zip(*events, sample, strict=True))
        log = EventLog(user, time * 600.0, surface, dwell, list(policy.surfaces))
        past = [i for i, row in enumerate(events) if row[0] == 0 and row[1] < now]
        past.sort(key=lambda i: (events[i][1], i))
        cells = policy.cells(surface[past], dwell[past])
        stay = policy.select(cells, policy.segments_before(log)[-1:], np.array([len(past)]))
        return [events[past[place]][:4] for place in stay.rows.tolist()], stay.weights

    past = [row for row in rows if row[1] < now]
    future = data.draw(EVENTS.map(lambda new: [(row[0], row[1] + now, *row[2:]) for row in new]))
    other = [(*row[:4], not row[4]) for row in past] + future
    (one, of_one), (two, of_two) = sees(rows), sees(other)
    assert str(one) == str(two)
    assert (of_one is None and of_two is None) or (of_one == of_two).all()


def test_conversions_are_an_input_of_fitting_alone():
    for function in (
        EventLog,
        Policy.cells,
        Policy.select,
        Policy.segments_before,
        PolicyModule.forward,
    ):
        names = inspect.signature(function).parameters
        assert not any("conver" in name or "label" in name for name in names), function


def module_call(policy: Policy, **changes: object) -> object:
    surface, dwell, segments, lengths = packed([(0, [(0, 1.0)] * 3), (1, [(1, 9.0)])])
    given = {"features": batch(lengths), "surface": surface, "dwell": dwell, "segments": segments, **changes}
    given = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    return PolicyModule(policy, given.pop("keys", HISTORY))(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": ["history"]}, "'history' is missing"),
        ({"keys": []}, "keys must be different names"),
        ({"keys": ["item", "history_item"]}, r"features\['history_item'\] must have 2 events like 'item', got 4"),
        ({"surface": np.zeros(3, int)}, r"surface must be \[4\], the events of 'history_item', got \[3\]"),
        ({"dwell": np.zeros((4, 1))}, r"dwell must be \[4\]"),
        ({"segments": np.zeros(3, int)}, r"segments must be \[2\], the samples, got \[3\]"),
        ({"segments": np.array([0, 2])}, "segments must be from 0 to 1, got 2"),
    ],
)
def test_wrong_batches_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        module_call(fitted(), **changes)


def test_surfaces_other_than_the_policys_are_refused_by_name():
    policy = fitted()
    assert policy.surface_ids(["live", None, "feed"]).tolist() == [2, -1, 0]
    with pytest.raises(
        ValueError, match="other surfaces than the data's: it has no surface 'sear'; did you mean 'search'"
    ):
        policy.surface_ids(["feed", "sear"])
    log = planted(3)[0]
    with pytest.raises(ValueError, match="surfaces of the log must be the policy's"):
        policy.segments_before(dataclasses.replace(log, surfaces=["search", "feed", "live"]))
    with pytest.raises(ValueError, match="surface must be from -1 to 2, got 3"):
        policy.cells(np.array([0, 3]), np.zeros(2))
    with pytest.raises(ValueError, match=r"cells must be \[3\], the sum of lengths"):
        policy.select(np.zeros(2, np.int16), np.zeros(1, np.int8), np.array([3]))


def test_the_layer_reads_the_weights():
    """An event that the policy gives weight w counts as w events for a WeightBias."""
    from torchrec import EmbeddingCollection, EmbeddingConfig

    from jfi import JaggedFeatureInteraction, SequenceFeatureConfig, WeightBias

    torch.manual_seed(0)
    tables = [EmbeddingConfig(name=name, embedding_dim=8, num_embeddings=200, feature_names=[name]) for name in HISTORY]
    collection = EmbeddingCollection(tables=tables, device=torch.device("cpu"))
    feature = SequenceFeatureConfig("taste", HISTORY, ["item"], bias=WeightBias())
    layer = JaggedFeatureInteraction([feature], 8, 2, embedding_collection=collection)
    policy = made(1, (None, None), True)
    histories = [(1, [(0, 3.0), (0, 120.0), (1, 20.0)]), (0, [(2, 8.0)])]
    surface, dwell, segments, lengths = map(torch.from_numpy, packed(histories))
    found = PolicyModule(policy, HISTORY)(batch(lengths.numpy()), surface, dwell, segments)
    targets = {"item": torch.randn(2, 8)}
    weights = layer.attention_weights(found, targets)["taste"].values()
    plain = KeyedJaggedTensor(found.keys(), found.values(), torch.ones_like(found.weights()), found.lengths())
    expected = (
        layer.attention_weights(plain, targets)["taste"].values() * found["history_item"].weights()[:, None, None]
    )
    of = torch.repeat_interleave(torch.arange(2), found["history_item"].lengths())
    expected /= torch.zeros(2, *expected.shape[1:]).index_add(0, of, expected)[of]
    torch.testing.assert_close(weights, expected)


def test_the_module_has_no_state_and_says_what_it_is():
    module = PolicyModule(fitted(), HISTORY, capacity=64).to("cpu")
    assert not module.state_dict() and not list(module.parameters())
    assert fitted().fingerprint[:12] in repr(module) and "capacity=64" in repr(module)


@on_gpu
def test_a_captured_module_gives_what_the_cpu_gives():
    policy, device = made(2, (4, 7), True), torch.device("cuda")
    generator = np.random.default_rng(0)

    def inputs(lengths: np.ndarray) -> tuple:
        """A batch with room: the same shapes whatever its lengths."""
        count = 64
        surface = torch.from_numpy(generator.integers(-1, 3, count))
        dwell = torch.from_numpy(generator.lognormal(3, 1, count)).float()
        segments = torch.from_numpy(generator.integers(0, 2, len(lengths)))
        values, of = torch.from_numpy(generator.integers(1, 99, 2 * count)), torch.from_numpy(lengths)
        sizes = {"length_per_key": [count, count], "offset_per_key": [0, count, 2 * count]}
        kjt = KeyedJaggedTensor(HISTORY, values, lengths=torch.cat([of, of]), stride=len(lengths), **sizes)
        return kjt, surface, dwell, segments

    on_cpu, module = PolicyModule(policy, HISTORY, 64), PolicyModule(policy, HISTORY, 64, device)
    static = [one.to(device) for one in inputs(np.array([9, 0, 30, 4]))]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            module(*static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = module(*static)
    for lengths in ([9, 0, 30, 4], [0, 0, 0, 0], [16, 16, 16, 16], [1, 40, 2, 3]):
        new = inputs(np.array(lengths))
        static[0].values().copy_(new[0].values())
        static[0].lengths().copy_(new[0].lengths())
        for to, value in zip(static[1:], new[1:], strict=True):
            to.copy_(value)
        graph.replay()
        expected = on_cpu(*new)
        for got, of in ((result.values(), expected.values()), (result.lengths(), expected.lengths())):
            assert torch.equal(got.cpu(), of)
        assert torch.equal(result.weights().cpu(), expected.weights())


def test_a_capacity_reads_nothing_from_the_device():
    """On fake tensors, which have no contents: a step that read one would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    tables = made(2, (4, 7), True).tables
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        arrays = (mode.from_tensor(torch.from_numpy(x)) for x in tables[:3])
        tables = CellTables(*arrays, tables.newest)
        cells, segments = torch.empty(20, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
        found = select_on_device(tables, cells, segments, torch.empty(4, dtype=torch.int64), capacity=16)
        assert found.rows.shape == (16,) and found.weights.shape == (16,) and found.lengths.shape == (3,)
