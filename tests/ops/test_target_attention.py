"""Target attention, Triton and the CPU path: output and gradients within the budget on every kind of batch."""

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops.budget import compare
from ops.overrides import FAMILIES, override
from ops.ragged import CASES, LENGTHS, ON_HOPPER, offsets_of
from triton import language as tl

import jfi.ops
from jfi import reference
from jfi.kernels.common.stream_k import RANKS, longest_first

pytestmark = pytest.mark.usefixtures("poisoned")
IMPLS = ["triton", "torch"]


@pytest.fixture(autouse=True)
def short_ranges():
    """Small test histories are split as long ones are, unless their longest is known: then a program handles each."""
    with override(MIN_CHUNK=128, num_sms=64, PROGRAM_PER_SAMPLE_ROWS=2**30, PROGRAM_PER_SAMPLE_BYTES=2**30):
        yield


def check(
    lengths,
    device,
    impl,
    dtype=torch.float32,
    num_queries=1,
    num_heads=1,
    num_kv_heads=1,
    width=16,
    value_width=None,
    bias=None,
):
    for max_seqlen in (None, max(lengths, default=0)) if impl == "triton" else (None,):
        compare_with_reference(
            lengths, device, impl, dtype, num_queries, num_heads, num_kv_heads, width, value_width, bias, max_seqlen
        )


def compare_with_reference(
    lengths, device, impl, dtype, num_queries, num_heads, num_kv_heads, width, value_width, bias, max_seqlen
):
    scale = 1.3 * width**-0.5
    offsets = offsets_of(lengths, device, torch.int32 if len(lengths) % 2 else torch.int64)

    def random(*shape: int):
        return torch.randn(shape, device=device).to(dtype)

    inputs = [random(len(lengths), num_queries, num_heads, width), random(sum(lengths), num_kv_heads, width)]
    if value_width is not None:
        inputs.append(random(sum(lengths), num_kv_heads, value_width))
    if bias is not None:
        inputs.append(random(sum(lengths), num_heads))
        if bias == "hidden":
            inputs[-1][torch.rand(sum(lengths), num_heads) < 0.5] = -torch.inf
            inputs[-1][: sum(lengths) // 2, 0] = -torch.inf

    def operands(tensors):
        rest = list(tensors[2:])
        value = rest.pop(0) if value_width is not None else None
        return tensors[0], tensors[1], value, (rest.pop(0) if bias is not None else None)

    def public(*tensors):
        query, key, value, event_bias = operands(tensors)
        hints = {"max_seqlen": max_seqlen, "impl": impl}
        return jfi.ops.target_attention(query, key, value, offsets=offsets, key_bias=event_bias, scale=scale, **hints)

    def plain(*tensors):
        query, key, value, event_bias = operands(tensors)
        return reference.target_attention(query, key, value, offsets, event_bias, scale)

    compare(public, plain, inputs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_ragged(case, dtype, impl, device):
    check(LENGTHS[case], device, impl, dtype)
    check(LENGTHS[case], device, impl, dtype, num_queries=2, num_heads=2, value_width=8, bias="finite")


@pytest.mark.parametrize("most", [0, 2**30])
def test_a_program_per_sample_in_their_order_or_in_that_of_their_lengths(most, device):
    with override(LONGEST_FIRST_SAMPLES_PER_SM=most):
        lengths = torch.randint(0, 12, (RANKS.value + 3,)).tolist()
        compare_with_reference(lengths, device, "triton", torch.float32, 1, 1, 1, 16, None, None, max(lengths))


@triton.jit
def _sample_kernel(offsets_ptr, sample_ptr, batch):
    tl.store(sample_ptr + tl.program_id(0), longest_first(tl.program_id(0), offsets_ptr, batch))


@pytest.mark.parametrize(
    ("samples", "dtype"),
    [
        *((1, torch.int64), (32, torch.int32), (33, torch.int64), (65, torch.int32)),
        *(pytest.param(n, x, marks=pytest.mark.slow) for n in (31, 64, 97) for x in (torch.int32, torch.int64)),
    ],
)
def test_programs_take_each_sample_once_and_the_long_ones_first(samples, dtype, device):
    lengths = torch.randint(0, 9, (samples,))
    sample = torch.empty(samples, dtype=torch.int64, device=device)
    _sample_kernel[(samples,)](offsets_of(lengths.tolist(), device, dtype), sample, samples)
    assert sorted(sample.tolist()) == list(range(samples))
    stride = -(-samples // RANKS.value)
    for members in (sample[i::stride] for i in range(stride)):
        assert lengths[members.cpu()].diff().le(0).all()


@pytest.mark.parametrize("longest", [0, 2**30])
@pytest.mark.parametrize(("width", "value_width"), [(32, None), (64, None), (64, 64), (128, None)])
def test_steps_of_short_histories_and_of_long_ones(width, value_width, longest, device):
    with override(SHORT_ROWS=longest):
        check([3, 0, 150, 65], device, "triton", num_heads=2, width=width, value_width=value_width)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("num_queries", "num_heads", "num_kv_heads", "bias"),
    [
        *((1, 2, 2, "hidden"), (3, 6, 2, None), (3, 6, 2, "hidden"), (16, 1, 1, None)),
        *((17, 1, 1, None), (17, 3, 1, "hidden"), (70, 2, 1, None), (35, 6, 2, "hidden")),
        *(
            pytest.param(*shape, marks=pytest.mark.slow)
            for shape in (
                *((1, 4, 4, None), (1, 4, 4, "hidden"), (16, 1, 1, "hidden"), (17, 1, 1, "hidden"), (17, 3, 1, None)),
                *((70, 2, 1, "hidden"), (70, 6, 2, None), (70, 6, 2, "hidden")),
            )
        ),
    ],
)
def test_queries_and_heads(num_queries, num_heads, num_kv_heads, bias, impl, device):
    check(
        [5, 0, 200, 1],
        device,
        impl,
        num_queries=num_queries,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        value_width=12,
        bias=bias,
    )


HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES if torch.cuda.is_available() else HALVES[:1])
@pytest.mark.parametrize(
    ("num_queries", "num_heads", "num_kv_heads", "width", "value_width"),
    [
        (24, 1, 1, 64, None),
        (8, 6, 1, 128, 32),
        (70, 1, 1, 128, None),
        (35, 4, 2, 17, None),
        pytest.param(24, 1, 1, 24, 40, marks=pytest.mark.slow),
        pytest.param(8, 6, 1, 64, None, marks=pytest.mark.slow),
        pytest.param(70, 1, 1, 256, None, marks=pytest.mark.slow),
        pytest.param(35, 4, 2, 128, 32, marks=pytest.mark.slow),
    ],
)
def test_many_queries_in_half_precision(num_queries, num_heads, num_kv_heads, width, value_width, dtype, device):
    """One sweep or two backward, rows fetched by descriptors where the GPU has them, samples of several chunks."""
    shape = {
        "num_queries": num_queries,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "width": width,
        "value_width": value_width,
    }
    check([5, 0, 300, 64], device, "triton", dtype, bias="finite" if value_width else None, **shape)


@pytest.mark.skipif(not ON_HOPPER, reason="needs Hopper")
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "bias"), [(1, 1, "finite"), (2, 1, None), (2, 2, "hidden")])
@pytest.mark.parametrize(("width", "shared"), [(64, True), (128, False)])
def test_many_candidates_are_jagged_attention(num_heads, num_kv_heads, bias, width, shared, device):
    shape = {
        "num_queries": 300,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "width": width,
        "value_width": None if shared else width,
    }
    with override(**FAMILIES["jagged_sm90"]):
        query = torch.empty(4, 300, num_heads, width, dtype=torch.bfloat16, device=device)
        key = torch.empty(369, num_kv_heads, width, dtype=torch.bfloat16, device=device)
        offsets = offsets_of([5, 0, 300, 64], device)
        value = None if shared else key
        assert jfi.ops.explain(jfi.ops.target_attention, query, key, value, offsets=offsets).family == "jagged_sm90"
        check([5, 0, 300, 64], device, "triton", torch.bfloat16, bias=bias, **shape)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32])
@pytest.mark.parametrize(("num_kv_heads", "value_width"), [(1, None), (2, 12)])
@pytest.mark.parametrize("longest", [None, 70])
@pytest.mark.parametrize(("num_queries", "rows"), [(2, 7), (2, 100), (20, 7)])
def test_bias_by_bucket_and_scaled_values(num_queries, rows, longest, num_kv_heads, value_width, dtype, impl, device):
    """A table so small that the sweep sums its gradient, and one whose events are sorted; few queries and many."""
    lengths = [5, 0, 70, 3]
    offsets = offsets_of(lengths, device)
    events = sum(lengths)
    buckets = torch.randint(-1, rows, (events + 1,), device=device, dtype=torch.int32)[1:].clamp(0)
    value_scale = torch.rand(events, device=device)
    inputs = [torch.randn(4, num_queries, 4, 16, device=device), torch.randn(events, num_kv_heads, 16, device=device)]
    inputs += [] if value_width is None else [torch.randn(events, num_kv_heads, value_width, device=device)]
    inputs = [*(x.to(dtype) for x in inputs), torch.randn(rows, 4, device=device)]

    def public(query, key, *rest):
        value, table = (None, *rest) if value_width is None else rest
        each = {"key_bias": table, "key_bias_index": buckets, "value_scale": value_scale}
        return jfi.ops.target_attention(query, key, value, offsets=offsets, **each, max_seqlen=longest, impl=impl)

    def plain(query, key, *rest):
        value, table = (key, *rest) if value_width is None else rest
        value = value * value_scale[:, None, None].to(value)
        return reference.target_attention(query, key, value, offsets, table[buckets].to(query), 0.25)

    compare(public, plain, inputs)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_scale_of_values_has_a_gradient(impl, device):
    offsets = offsets_of([5, 0, 7], device)
    inputs = [
        torch.randn(3, 1, 2, 8, device=device),
        torch.randn(12, 1, 8, device=device),
        torch.rand(12, device=device),
    ]
    compare(
        lambda query, key, scale: jfi.ops.target_attention(query, key, offsets=offsets, value_scale=scale, impl=impl),
        lambda query, key, scale: reference.target_attention(
            query, key, key * scale[:, None, None], offsets, None, 8**-0.5
        ),
        inputs,
    )


def test_buckets_and_scales_that_do_not_fit_are_refused(device):
    query, key, offsets = (
        torch.randn(1, 1, 2, 8, device=device),
        torch.randn(3, 1, 8, device=device),
        offsets_of([3], device),
    )
    table, buckets = torch.randn(4, 2, device=device), torch.tensor([0, 3, 1], device=device)

    def attend(**each):
        jfi.ops.target_attention(query, key, offsets=offsets, **each)

    for fault, each, message in (
        (ValueError, {"key_bias_index": buckets}, "key_bias must be a table"),
        (ValueError, {"key_bias_index": buckets[:2], "key_bias": table}, "key_bias_index must have S = 3, got 2"),
        (TypeError, {"key_bias_index": buckets.float(), "key_bias": table}, "key_bias_index must be int32 or int64"),
        (ValueError, {"key_bias_index": buckets, "key_bias": table[:, :1]}, "key_bias must have H = 2, got 1"),
        (ValueError, {"value_scale": table}, r"value_scale must be \[S\]"),
        (TypeError, {"value_scale": buckets}, "value_scale must be float32"),
    ):
        with pytest.raises(fault, match=message):
            attend(**each)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="key_bias_index must be from 0 to 2, rows of key_bias, got 0 to 3"):
            attend(key_bias_index=buckets, key_bias=table[:3])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_queries", [2, 17])
@pytest.mark.parametrize("scale", [0.0, 1e-46, -0.7])
def test_any_scale(scale, num_queries, impl, device):
    lengths = [5, 0, 70]
    offsets = offsets_of(lengths, device)
    inputs = [torch.randn(3, num_queries, 1, 16, device=device), torch.randn(75, 1, 16, device=device)]
    compare(
        lambda query, key: jfi.ops.target_attention(query, key, offsets=offsets, scale=scale, impl=impl),
        lambda query, key: reference.target_attention(query, key, None, offsets, None, scale),
        inputs,
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("width", "value_width"),
    [
        *((1, 1), (17, None), (100, None), (256, None), (400, 3)),
        pytest.param(96, 5, marks=pytest.mark.slow),
        pytest.param(256, 300, marks=pytest.mark.slow),
    ],
)
def test_widths(width, value_width, impl, device):
    check([3, 0, 150, 1], device, impl, num_queries=2, width=width, value_width=value_width)
    check([3, 0, 40], device, impl, num_queries=70, width=width, value_width=value_width)


def test_rows_wider_than_a_tile_are_refused(device):
    query, key = torch.randn(1, 1, 1, 513, device=device), torch.randn(3, 1, 513, device=device)
    with pytest.raises(ValueError, match=r"key and value must be at most 512 wide for impl='triton'.*, got 513"):
        jfi.ops.target_attention(query, key, offsets=offsets_of([3], device), impl="triton")


any_shape = given(
    lengths=st.lists(st.integers(0, 180), max_size=5),
    num_queries=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    width=st.integers(1, 40),
    value_width=st.none() | st.integers(1, 40),
    bias=st.sampled_from([None, "finite", "hidden"]),
)


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@any_shape
def test_any_shape(lengths, num_queries, heads, width, value_width, bias, impl, device):
    check(lengths, device, impl, torch.float32, num_queries, *heads, width, value_width, bias)


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@any_shape
def test_many_shapes(lengths, num_queries, heads, width, value_width, bias, impl, device):
    check(lengths, device, impl, torch.float32, num_queries, *heads, width, value_width, bias)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_fully_hidden_history_counts_as_empty(impl, device):
    offsets = offsets_of([300, 2, 0], device)
    query = torch.randn(3, 1, 2, 8, device=device, requires_grad=True)
    key = torch.randn(302, 1, 8, device=device, requires_grad=True)
    bias = torch.zeros(302, 2, device=device)
    bias[:300] = -torch.inf
    out = jfi.ops.target_attention(query, key, offsets=offsets, key_bias=bias, impl=impl)
    out.sum().backward()
    assert out[0].eq(0).all() and out[2].eq(0).all() and out[1].ne(0).all()
    assert query.grad[0].eq(0).all() and query.grad[2].eq(0).all()
    assert key.grad[:300].eq(0).all() and key.grad[300:].ne(0).any()


@pytest.mark.parametrize("impl", IMPLS)
def test_scores_far_from_zero_do_not_overflow(impl, device):
    offsets = offsets_of([150], device)
    query, key = torch.ones(1, 1, 1, 4, device=device), torch.randn(150, 1, 4, device=device)
    for shift in (-1e4, 1e4):
        bias = torch.full((150, 1), shift, device=device)
        shifted = jfi.ops.target_attention(query, key, offsets=offsets, key_bias=bias, impl=impl)
        plain = jfi.ops.target_attention(query, key, offsets=offsets, impl=impl)
        torch.testing.assert_close(shifted, plain, atol=2e-3, rtol=2e-3)


#: (num_queries, bias_rows, max_seqlen): the interpreter runs one program after another, so most are slow ones.
SAME_BITS = [(2, 7, None), (2, 100, 300), (20, 395, None)]
SLOW_SAME_BITS = [(2, None, None), (2, 395, None), (2, 100, None), (20, 7, None)]
SLOW_SAME_BITS += [(2, None, 300), (2, 395, 300), (2, 7, 300), (20, 395, 300), (20, 7, 300)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("num_queries", "bias_rows", "max_seqlen"),
    [*SAME_BITS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_SAME_BITS)],
)
def test_the_same_inputs_give_the_same_bits(num_queries, bias_rows, max_seqlen, impl, device):
    offsets = offsets_of([300, 5, 0, 90], device)
    query = torch.randn(4, num_queries, 2, 16, device=device, requires_grad=True)
    key = torch.randn(395, 1, 16, device=device, requires_grad=True)
    leaves, events = [query, key], {}
    if bias_rows is not None:
        leaves.append(torch.randn(bias_rows, 2, device=device, requires_grad=True))
        events["key_bias"] = leaves[-1]
    if bias_rows in (7, 100):  # a table, of which many events name each row
        events["key_bias_index"] = torch.randint(bias_rows, (395,), device=device)
    runs = []
    for _ in range(2):
        out = jfi.ops.target_attention(query, key, offsets=offsets, **events, max_seqlen=max_seqlen, impl=impl)
        runs.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
