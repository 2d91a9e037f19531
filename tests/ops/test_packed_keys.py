"""Jagged attention to packed digits against the plain formula over rows of the digits' numbers."""

import pytest
import torch
from ops.budget import compare
from ops.ragged import LENGTHS, SLOW_HERE, offsets_of

import jfi.ops
from jfi import reference
from jfi.cpu import attention_chunks
from jfi.kernels.plan import H200
from jfi.semantic_ids import pack_words

pytestmark = pytest.mark.usefixtures("poisoned")
IMPLS = ["triton", "torch"]


def check(
    queries,
    events,
    device,
    impl,
    num_digits=25,
    num_heads=4,
    dtype=torch.float32,
    weights=False,
    key_bias=False,
    bias=None,  # "time" or "position"
    has_times=False,
    **options,
):
    query_offsets, key_offsets = offsets_of(queries, device), offsets_of(events, device, torch.int32)
    rows, count = sum(queries), sum(events)
    digits = torch.randint(-1, 2, (count, num_digits), device=device)
    given = {"query_offsets": query_offsets, "key_offsets": key_offsets, "scale": 1.3 * num_digits**-0.5}
    inputs = {"query": torch.randn(rows, num_heads, num_digits, device=device).to(dtype)}
    if key_bias:
        inputs["key_bias"] = torch.randn(count, num_heads, device=device).to(dtype)
    if bias is not None:
        inputs[f"{bias}_bias"] = torch.randn(6, num_heads, device=device).to(dtype)
    if weights:
        given["value_scale"] = torch.rand(count, device=device).to(dtype)
    times = None
    if has_times:
        parts = [[torch.randint(0, 90, (n,)).sort().values for n in [*lengths, 0]] for lengths in (queries, events)]
        times = tuple(torch.cat(part).to(device) for part in parts)
        given |= {"query_time": times[0], "key_time": times[1]}

    def public(*tensors):
        own = dict(zip(inputs, tensors, strict=True))
        return jfi.ops.jagged_attention(key=pack_words(digits), **own, **given, **options, impl=impl)

    def plain(*tensors):
        own = {"key_bias": None} | dict(zip(inputs, tensors, strict=True))
        key = digits[:, None].to(own["query"].dtype)
        value = key * given["value_scale"][:, None, None].to(key.dtype) if weights else None
        return reference.jagged_attention(
            own["query"],
            key,
            value,
            query_offsets,
            key_offsets,
            options.get("causal", False),
            options.get("window_size"),
            own["key_bias"],
            given["scale"],
            times,
            options.get("max_visible"),
            own.get("time_bias"),
            own.get("position_bias"),
        )[0]

    compare(public, plain, list(inputs.values()))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", LENGTHS)
def test_lengths(case, impl, device):
    check([1 + n % 3 for n in LENGTHS[case]], LENGTHS[case], device, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_digits", [1, 16, 17, 34, 66, 130])
def test_digits(num_digits, impl, device):
    check([5, 0, 2], [70, 3, 1], device, impl, num_digits)


#: By name the options of `check`.
CASES = {
    "key_bias": {"key_bias": True},
    "weights": {"weights": True},
    "weights_and_bias": {"weights": True, "key_bias": True},
    "one_head": {"num_heads": 1, "weights": True},
    "causal": {"causal": True, "key_bias": True},
    "window": {"window_size": (7, 2)},
    "older": {"has_times": True, "max_visible": 9, "weights": True},
    "ages": {"has_times": True, "bias": "time"},
    "distances": {"has_times": True, "bias": "position", "key_bias": True},
    "causal_distances": {"causal": True, "bias": "position"},
}
#: Where queries must be those of events.
SAME = ("causal", "window", "causal_distances")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", CASES)
def test_options(case, impl, device):
    events = [70, 3, 0, 20]
    check(events if case in SAME else [5, 0, 1, 33], events, device, impl, **CASES[case])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [pytest.param("weights_and_bias", marks=SLOW_HERE), "ages"])
def test_half_precision(case, dtype, impl, device):
    check([5, 0, 33], [70, 3, 20], device, impl, dtype=dtype, **CASES[case])


def test_chunks_on_a_cpu(monkeypatch):
    """A bias table's gradient is the sum over chunks of queries."""
    monkeypatch.setattr(attention_chunks, "CHUNK_QUERIES", 7)
    monkeypatch.setattr(attention_chunks, "BATCH_ELEMENTS", 2**12)
    device = torch.device("cpu")
    check([5, 0, 1, 33], [70, 3, 20, 8], device, "torch", **CASES["ages"])
    check([5, 0, 1, 33], [70, 3, 20, 8], device, "torch", **CASES["weights_and_bias"])


def test_the_log_sum_exp_is_differentiable(device):
    query = torch.randn(4, 2, 20, device=device, requires_grad=True)
    digits, offsets = torch.randint(-1, 2, (9, 20), device=device), offsets_of([3, 1], device)
    options = {"query_offsets": offsets, "key_offsets": offsets_of([5, 4], device), "return_lse": True}
    found = []
    for key in (pack_words(digits), digits[:, None].float()):
        out, lse = jfi.ops.jagged_attention(query, key, **options)
        found.append((out, lse, *torch.autograd.grad((out * out).sum() + lse.sin().sum(), query)))
    torch.testing.assert_close(*found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a GPU's memory")
def test_no_rows_of_numbers_are_made(device):
    """16 candidates of each of 64 users with 4,000 events of 66 digits: rows of bfloat16 would take 34 MB."""
    query = torch.randn(1024, 4, 66, device=device, dtype=torch.bfloat16, requires_grad=True)
    digits = pack_words(torch.randint(-1, 2, (256_000, 66), device=device))
    options = {"query_offsets": offsets_of([16] * 64, device), "key_offsets": offsets_of([4000] * 64, device)}
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = jfi.ops.jagged_attention(query, digits, **options)
        out.backward(torch.ones_like(out))
        used = torch.cuda.max_memory_allocated() - before
        del out
    assert used < 6 * 2**20


def test_the_plan_names_what_reads_digits():
    query, digits = torch.empty(10, 4, 64, dtype=torch.bfloat16), torch.zeros(20, 4, dtype=torch.int32)
    given = {"query_offsets": torch.tensor([0, 10]), "key_offsets": torch.tensor([0, 20])}
    plan = jfi.ops.explain(jfi.ops.jagged_attention, query, digits, **given, device=H200)
    assert plan.family == "jagged_triton" and "keys are packed digits" in plan.reason
    plan = jfi.ops.explain(jfi.ops.jagged_attention, query, digits, **given, impl="torch")
    assert "padded flash attention" in str(plan)


def test_autocast_stays_on():
    query, digits = torch.randn(4, 2, 20, requires_grad=True), torch.zeros(9, 2, dtype=torch.int32)
    offsets = {"query_offsets": torch.tensor([0, 3, 4]), "key_offsets": torch.tensor([0, 5, 9])}
    with torch.autocast("cpu", torch.bfloat16):
        out = jfi.ops.jagged_attention(query, digits, **offsets, impl="torch")
        assert torch.is_autocast_enabled("cpu")
        out.sum().backward()
        assert torch.is_autocast_enabled("cpu")


ERRORS = {
    "a value": ({"value": torch.zeros(5, 1, 20)}, ValueError, "value must be None where key is packed digits"),
    "words": (
        {"key": torch.zeros(5, 1, dtype=torch.int32)},
        ValueError,
        "key must have W = 2 for the query's L = 20 digits, got 1",
    ),
    "shape": ({"key": torch.zeros(5, 1, 2, dtype=torch.int32)}, ValueError, r"key must be \[S, W\]"),
    "no digit": ({"key": torch.full((5, 2), 2, dtype=torch.int32)}, ValueError, r"got -2 \(0b10\) in row 0"),
    "weights": ({"value_scale": torch.ones(4)}, ValueError, "value_scale must have S = 5, got 4"),
    "trained weights": ({"value_scale": torch.ones(5, requires_grad=True)}, ValueError, "must not require a gradient"),
    "bias": ({"key_bias": torch.zeros(5, 3)}, ValueError, "key_bias must have H = 2, got 3"),
    "another dtype": ({"key": torch.zeros(5, 2, dtype=torch.int64)}, TypeError, "key must be float32"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    wrong, error, message = ERRORS[case]
    given = {"query": torch.zeros(3, 2, 20), "key": torch.zeros(5, 2, dtype=torch.int32)}
    given |= {"query_offsets": torch.tensor([0, 3]), "key_offsets": torch.tensor([0, 5])}
    with pytest.raises(error, match=message):
        jfi.ops.jagged_attention(**given | wrong)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_scale_of_values_of_rows(impl, device):
    """With rows in the place of digits it is a product with the values, and has a gradient."""
    query, key = torch.randn(4, 2, 8, device=device), torch.randn(9, 1, 8, device=device)
    scale = torch.rand(9, device=device, requires_grad=True)
    offsets = {"query_offsets": offsets_of([3, 1], device), "key_offsets": offsets_of([5, 4], device)}
    out = jfi.ops.jagged_attention(query, key, value_scale=scale, **offsets, impl=impl)
    want = jfi.ops.jagged_attention(query, key, key * scale[:, None, None], **offsets, impl=impl)
    torch.testing.assert_close(out, want)
    found = [torch.autograd.grad((x * x).sum(), scale)[0] for x in (out, want)]
    torch.testing.assert_close(*found)
