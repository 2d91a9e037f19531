"""Jagged attention by time: what a query sees, the bias by age or distance, and their gradients, on every path."""

import math

import pytest
import torch
from ops.budget import compare
from ops.overrides import FAMILIES, override, splits
from ops.ragged import ON_HOPPER, SLOW_HERE, offsets_of
from torch.utils._pytree import tree_leaves

import jfi.ops
from jfi import reference

pytestmark = pytest.mark.usefixtures("poisoned")
IMPLS = ["triton", "torch"]


def sorted_times(lengths, most, dtype, device):
    """Times with ties: integers below ``most``, halves of them for float64."""
    parts = [torch.randint(0, most, (n,)).sort().values for n in lengths]
    times = torch.cat([*parts, torch.empty(0, dtype=torch.int64)])
    return (times.double() / 2 if dtype == torch.float64 else times.to(dtype)).to(device)


def check(
    queries,
    keys,
    device,
    impl,
    dtype=torch.float32,
    num_heads=2,
    num_kv_heads=1,
    width=16,
    value_width=None,  # None: value = key
    most=1000,  # times are below it
    time_dtype=torch.int64,
    bias="time",  # or "position" or None
    num_buckets=8,
    max_visible=None,
    key_bias=False,
    causal=False,
):
    index = torch.int32 if len(keys) % 2 else torch.int64
    key_offsets = offsets_of(keys, device, index)
    query_offsets = key_offsets if queries is None else offsets_of(queries, device, index)
    rows, events = sum(keys if queries is None else queries), sum(keys)
    key_time = sorted_times(keys, most, time_dtype, device)
    query_time = key_time if queries is None else sorted_times(queries, most, time_dtype, device)
    scale = 1.3 * width**-0.5

    def random(*shape):
        return torch.randn(shape, device=device).to(dtype)

    inputs = {"query": random(rows, num_heads, width), "key": random(events, num_kv_heads, width)}
    if value_width is not None:
        inputs["value"] = random(events, num_kv_heads, value_width)
    if key_bias:
        inputs["key_bias"] = random(events, num_heads)
    if bias is not None:
        inputs[f"{bias}_bias"] = random(num_buckets, num_heads)

    def public(*tensors):
        given = dict(zip(inputs, tensors, strict=True))
        return jfi.ops.jagged_attention(
            **given,
            query_offsets=query_offsets,
            key_offsets=key_offsets,
            query_time=query_time,
            key_time=key_time,
            max_visible=max_visible,
            causal=causal,
            scale=scale,
            impl=impl,
        )

    def plain(*tensors):
        given = {"value": None, "key_bias": None} | dict(zip(inputs, tensors, strict=True))
        return reference.jagged_attention(
            given["query"],
            given["key"],
            given["value"],
            query_offsets,
            key_offsets,
            causal,
            None,
            given["key_bias"],
            scale,
            (query_time, key_time),
            max_visible,
            given.get("time_bias"),
            given.get("position_bias"),
        )[0]

    compare(public, plain, list(inputs.values()))


CASES = {
    "timelines": ([5, 0, 3, 17, 1, 40], [70, 4, 0, 1, 64, 130]),
    "one_user": ([33], [150]),
    "no_event": ([3, 1], [0, 0]),
    "no_query": ([0, 0], [5, 0]),
    "no_samples": ([], []),
}


@pytest.mark.parametrize(
    ("case", "bias", "impl"),
    [
        pytest.param(case, bias, impl, marks=SLOW_HERE if (case, bias, impl) == ("timelines", "time", "triton") else [])
        for case in CASES
        for bias in ("time", "position", None)
        for impl in IMPLS
    ],
)
def test_queries_of_a_timeline(case, bias, impl, device):
    check(*CASES[case], device, impl, bias=bias)
    check(*CASES[case], device, impl, bias=bias, max_visible=9, most=40)


@pytest.mark.parametrize("bias", ["time", "position"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "impl"),
    [
        pytest.param(*heads, impl, marks=SLOW_HERE if (*heads, impl) == (6, 2, "triton") else [])
        for heads in ((1, 1), (4, 4), (6, 2), (3, 1))
        for impl in IMPLS
    ],
)
def test_heads(num_heads, num_kv_heads, bias, impl, device):
    check([40, 2], [90, 70], device, impl, num_heads=num_heads, num_kv_heads=num_kv_heads, value_width=24, bias=bias)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("bias", "max_visible"),
    [
        ("time", 20),
        ("position", None),
        # The interpreter takes long.
        *(pytest.param(*one, marks=SLOW_HERE) for one in (("time", None), ("position", 20))),
    ],
)
def test_self_attention_with_a_relative_bias(max_visible, bias, impl, device):
    check(None, [5, 0, 140, 1], device, impl, bias=bias, causal=True, num_kv_heads=2, value_width=16)
    check(None, [5, 0, 140, 1], device, impl, bias=bias, causal=True, max_visible=max_visible)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("time_dtype", [torch.int32, torch.int64, torch.float64])
@pytest.mark.parametrize("num_buckets", [1, 2, 31, 64])
def test_times_and_buckets(num_buckets, time_dtype, impl, device):
    most = 2**31 - 1 if time_dtype == torch.int32 else 2**50
    check([9, 12], [80, 30], device, impl, time_dtype=time_dtype, num_buckets=num_buckets, most=most)
    check([9, 12], [80, 30], device, impl, time_dtype=time_dtype, num_buckets=num_buckets, most=60, key_bias=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_times_beside_half_precision(impl, device):
    check([9, 12], [80, 30], device, impl, torch.float16, bias="time")


@pytest.mark.skipif(not ON_HOPPER, reason="the splits are those of the Hopper kernels")
@pytest.mark.parametrize("num_splits", [1, 2, 4, 8])
@pytest.mark.parametrize("bias", ["time", "position", None])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 1)])
@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (128, None)])
def test_splits_of_the_keys(width, value_width, num_heads, num_kv_heads, bias, num_splits, device):
    """A split begins in the midst of a query's buckets; splits of short samples and of what is hidden are empty."""
    options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "width": width, "value_width": value_width}
    queries, keys = [0, 1, 64, 130, 5, 40], [7, 650, 64, 530, 0, 1]
    with override(num_sms=2, **splits(num_splits)):
        for most, max_visible in ((10**6, None), (300, 250)):
            limits = {"most": most, "max_visible": max_visible, "num_buckets": 32}
            check(queries, keys, device, "triton", torch.bfloat16, bias=bias, **limits, **options)
        if bias is not None:
            check(None, keys, device, "triton", torch.bfloat16, bias=bias, num_buckets=32, causal=True, **options)


@pytest.mark.parametrize(
    ("family", "short"),
    [("jagged_sm90", 0), ("jagged_sm90", 2**30), ("jagged_triton", 0)] if ON_HOPPER else [("jagged_triton", 0)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16])
@pytest.mark.parametrize(
    "bias",
    [
        # The interpreter takes long.
        pytest.param("time", marks=SLOW_HERE),
        pytest.param("position", marks=SLOW_HERE),
        None,
    ],
)
@pytest.mark.parametrize(
    ("width", "value_width", "num_heads", "num_kv_heads"),
    [
        (64, None, 3, 1),
        *(
            # The interpreter takes minutes for them.
            pytest.param(*widths, *heads, marks=SLOW_HERE)
            for widths in ((64, 64), (64, None), (128, None))
            for heads in ((2, 2), (4, 1), (3, 1))
            if (*widths, *heads) != (64, None, 3, 1)
        ),
    ],
)
def test_half_precision(width, value_width, num_heads, num_kv_heads, bias, dtype, family, short, device):
    """The shapes of the Hopper kernels, with so few programs that each takes many tiles."""
    options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "width": width, "value_width": value_width}
    queries, keys = [0, 1, 64, 130, 5, 40], [7, 400, 64, 300, 0, 1]
    if not torch.cuda.is_available():
        queries, keys = queries[1:3], keys[1:3]
    with override(num_sms=2, SM90_SHORT_KEYS={64: short, 128: short}, **FAMILIES[family]):
        for most, max_visible in ((10**6, None), (300, 70)):
            limits = {"most": most, "max_visible": max_visible}
            check(queries, keys, device, "triton", dtype, bias=bias, num_buckets=32, **limits, **options)
        if bias is not None:
            check(None, keys, device, "triton", dtype, bias=bias, num_buckets=32, causal=True, **options)


def attend(**changes):
    given = {
        "query": torch.zeros(3, 2, 8),
        "key": torch.zeros(5, 1, 8),
        "query_offsets": torch.tensor([0, 1, 3]),
        "key_offsets": torch.tensor([0, 3, 5]),
        "query_time": torch.tensor([9, 4, 6]),
        "key_time": torch.tensor([1, 1, 8, 2, 6]),
        "time_bias": torch.zeros(4, 2),
    } | changes
    return jfi.ops.jagged_attention(given.pop("query"), given.pop("key"), **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"query_time": torch.tensor([9, 6, 4])},
            "query_time must not decrease within a sample, got 6 then 4 at entry 2",
        ),
        (
            {"key_time": torch.tensor([1, 8, 1, 2, 6])},
            "key_time must not decrease within a sample, got 8 then 1 at entry 2",
        ),
        ({"key_time": torch.tensor([1, 1, 8, 2])}, "key_time must have S = 5, got 4"),
        ({"query_time": torch.zeros(3, 1).long()}, r"query_time must be \[R\], got a tensor of shape \[3, 1\]"),
        ({"query_time": None}, "query_time and key_time must both be tensors or None, got query_time of NoneType"),
        ({"query_time": torch.zeros(3)}, "query_time must be int32, int64 or float64, got torch.float32"),
        (
            {"key_time": torch.zeros(5).double()},
            "key_time must have the dtype of query_time, torch.int64, got torch.float64",
        ),
        (
            {"query_time": torch.zeros(3).double(), "key_time": torch.tensor([0, 0, torch.nan, 0, 0]).double()},
            "key_time must be finite, got nan",
        ),
        ({"time_bias": torch.zeros(4, 3)}, "time_bias must have H = 2, got 3"),
        ({"time_bias": torch.zeros(65, 2)}, "time_bias must have 1 to 64 rows, got 65"),
        ({"time_bias": torch.zeros(4, 2).half()}, "time_bias must have the dtype of query, torch.float32, got"),
        ({"position_bias": torch.zeros(4, 2)}, "time_bias and position_bias must not both be given"),
        ({"query_time": None, "key_time": None}, "time_bias needs query_time and key_time, got None"),
        (
            {"query_time": None, "key_time": None, "time_bias": None, "position_bias": torch.zeros(4, 2)},
            "position_bias needs causal=True or times",
        ),
        ({"max_visible": 0}, "max_visible must be at least 1, got 0"),
        ({"max_visible": 2.0}, "max_visible must be an int or None, got float"),
        ({"window_size": (3, None)}, "window_size counts positions: with times give max_visible"),
        (
            {"causal": True, "window_size": (3, None), "max_visible": 2},
            "max_visible and window_size must not both be given",
        ),
        (
            {"query_time": None, "key_time": None, "time_bias": None, "max_visible": 2},
            "max_visible needs causal=True or times",
        ),
    ],
)
def test_wrong_arguments(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        attend(**changes)


@pytest.mark.parametrize("read", [True, False])
def test_the_longest_sample_is_bounded_and_not_the_batch(read, monkeypatch):
    """Edges are positions within a sample. Where offsets are not read, the device refuses: this test is on a CPU."""
    monkeypatch.setattr("jfi.ops._visibility.MAX_KEYS", 5)
    if not read:
        monkeypatch.setattr("jfi.ops._visibility.may_read", lambda _: False)

    def attend(lengths):
        offsets, rows, time = offsets_of(lengths, "cpu"), torch.randn(sum(lengths), 1, 8), torch.arange(sum(lengths))
        return jfi.ops.jagged_attention(rows, rows, query_offsets=offsets, query_time=time, key_time=time)

    assert attend([5, 4, 5]).isfinite().all()
    with pytest.raises(ValueError if read else RuntimeError, match="at most 5 rows a sample"):
        attend([5, 6])


def test_targets_older_than_every_event_see_nothing():
    out = attend(query_time=torch.tensor([1, 2, 3]), key=torch.ones(5, 1, 8))
    assert out[0].eq(0).all() and out[1].eq(0).all() and out[2].eq(1).all()


def test_at_most_the_newest_are_seen_by_position_alone(device):
    """max_visible without times is a causal window."""
    x, offsets = torch.randn(9, 1, 8, device=device), offsets_of([9], device)
    got = jfi.ops.jagged_attention(x, x, query_offsets=offsets, causal=True, max_visible=3)
    torch.testing.assert_close(
        got, jfi.ops.jagged_attention(x, x, query_offsets=offsets, causal=True, window_size=(2, 0))
    )


@pytest.mark.slow  # the interpreter runs one program after another
@pytest.mark.parametrize("impl", IMPLS)
def test_the_same_inputs_give_the_same_bits(impl, device):
    offsets, times = offsets_of([150, 0, 40], device), sorted_times([150, 0, 40], 10**5, torch.int64, device)
    leaves = [
        torch.randn(190, 2, 16, device=device).requires_grad_(),
        torch.randn(12, 2, device=device).requires_grad_(),
    ]
    runs = []
    for _ in range(2):
        out = jfi.ops.jagged_attention(
            leaves[0],
            leaves[0],
            query_offsets=offsets,
            query_time=times,
            key_time=times,
            time_bias=leaves[1],
            impl=impl,
        )
        runs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("width", "dtype", "num_kv_heads"), [(16, torch.float32, 1), pytest.param(64, torch.float16, 2, marks=SLOW_HERE)]
)
@pytest.mark.parametrize("bias", ["time", "position"])
def test_sums_by_bucket_take_bounded_memory(bias, width, dtype, num_kv_heads, device, monkeypatch):
    """Query rows are taken in parts, however many there are, and in the same order every time."""
    from jfi.kernels.common.launch import Launcher
    from jfi.kernels.jagged_attention import visibility

    lengths, num_buckets, rows_of_a_part = [20, 0, 3, 21, 1], 8, 16
    offsets, rows = offsets_of(lengths, device), sum(lengths)
    leaves = [
        torch.randn(rows, 2, width, device=device).to(dtype).requires_grad_(),
        torch.randn(rows, num_kv_heads, width, device=device).to(dtype).requires_grad_(),
        torch.randn(num_buckets, 2, device=device).to(dtype).requires_grad_(),
    ]
    times = sorted_times(lengths, 300, torch.int64, device)
    given = {"causal": True} if bias == "position" else {"query_time": times, "key_time": times}

    def gradients(most: int) -> list[torch.Tensor]:
        monkeypatch.setattr(visibility, "MAX_BUCKET_SUMS", most)
        out = jfi.ops.jagged_attention(
            *leaves[:2], query_offsets=offsets, **given, **{f"{bias}_bias": leaves[2]}, impl="triton"
        )
        sizes.clear()
        return torch.autograd.grad(out.square().sum(), leaves)

    launch, sizes = Launcher.__call__, []

    def record(self, grid, tensors, *rest):
        sizes.extend(x.numel() for x in tree_leaves(tensors) if x is not None and x.shape[1:] == (2, num_buckets))
        return launch(self, grid, tensors, *rest)

    monkeypatch.setattr(Launcher, "__call__", record)
    want = gradients(visibility.MAX_BUCKET_SUMS)
    assert sizes == [rows * 2 * num_buckets]
    got = gradients(rows_of_a_part * 2 * num_buckets)
    assert sizes == [count * 2 * num_buckets for count in (16, 16, rows - 32)]
    torch.testing.assert_close(got, want)
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(rows_of_a_part * 2 * num_buckets), strict=True))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("dtype", "query_time", "key_time"),
    [
        # In float64 -0.9 - 1 is -1.9, but -0.9 + 1.9 is less than 1.
        (torch.float64, [-0.9, 3.1], [-5.0, -1.9, -1.1, 2.1]),
        (torch.int32, [-5, 2**31 - 5], [-(2**31), -6, 2**31 - 9]),
        # The oldest integer, by which other libraries mark a time that is missing.
        (torch.int64, [1_700_000_000, 1_700_000_001], [-(2**63), 1_600_000_000, 1_700_000_000]),
    ],
)
def test_ages_that_round_or_overflow(dtype, query_time, key_time, impl, device):
    query_time, key_time = (torch.tensor(x, dtype=dtype, device=device) for x in (query_time, key_time))
    query = torch.randn(len(query_time), 2, 16, device=device)
    key = torch.randn(len(key_time), 1, 16, device=device)
    time_bias = torch.randn(64, 2, device=device)
    offsets = [torch.tensor([0, len(x)], device=device) for x in (query, key)]

    # The plain formula in the integers and floats of Python.
    bucket = [
        [min(max(math.frexp(t - k)[1] if t > k else 0, 0), 63) for k in key_time.tolist()] for t in query_time.tolist()
    ]
    scores = torch.einsum("qhd,kd->qhk", query, key[:, 0]) / 4 + time_bias[torch.tensor(bucket)].transpose(1, 2)
    scores = scores.masked_fill((key_time >= query_time[:, None])[:, None], -torch.inf)
    expected = torch.einsum("qhk,kd->qhd", scores.softmax(2), key[:, 0])

    times = {"query_time": query_time, "key_time": key_time, "time_bias": time_bias}
    out = jfi.ops.jagged_attention(query, key, query_offsets=offsets[0], key_offsets=offsets[1], impl=impl, **times)
    plain, _ = reference.jagged_attention(
        query, key, None, *offsets, False, None, None, 0.25, (query_time, key_time), time_bias=time_bias
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(plain, expected)


def test_a_key_that_is_younger_than_a_causal_query_has_the_first_bucket():
    query, key, time_bias = torch.randn(2, 1, 8), torch.randn(3, 1, 8), torch.randn(8, 1)
    offsets, times = (torch.tensor([0, 2]), torch.tensor([0, 3])), (torch.tensor([10, 20]), torch.tensor([5, 90, 95]))
    out = jfi.ops.jagged_attention(
        query,
        key,
        query_offsets=offsets[0],
        key_offsets=offsets[1],
        causal=True,
        query_time=times[0],
        key_time=times[1],
        time_bias=time_bias,
        scale=1.0,
    )
    plain, _ = reference.jagged_attention(query, key, None, *offsets, True, None, None, 1.0, times, time_bias=time_bias)
    scores = query[0, 0] @ key[:2, 0].T + time_bias[torch.tensor([3, 0]), 0]
    torch.testing.assert_close(out[0, 0], scores.softmax(0) @ key[:2, 0])
    torch.testing.assert_close(plain, out)
