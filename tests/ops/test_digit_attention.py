"""Attention over packed digits against plain formulas over the digits themselves."""

import pytest
import torch
from ops.overrides import override
from ops.ragged import LENGTHS, offsets_of

from jfi import ops as jfi_ops
from jfi import reference
from jfi.kernels import plan
from jfi.kernels.plan import A100, H200
from jfi.semantic_ids import Layout, pack_words

IMPLEMENTATIONS = ["triton", "torch"]


def make(lengths, num_digits, queries=(1, 4), dtype=torch.float32, device="cpu", bias=None, weights=False):
    """(query, digits [S, L] of the events, arguments of the operator)."""
    offsets = offsets_of(lengths, device)
    events, batch = int(offsets[-1]), len(lengths)
    digits = torch.randint(-1, 2, (events, num_digits), device=device)
    query = torch.randn(batch, *queries, num_digits, device=device).to(dtype).requires_grad_()
    given = {"offsets": offsets}
    if bias == "event":
        given["key_bias"] = torch.randn(events, queries[1], device=device).to(dtype).requires_grad_()
    elif bias is not None:
        given["key_bias"] = torch.randn(bias, queries[1], device=device).requires_grad_()
        given["key_bias_index"] = torch.randint(0, bias, (events,), device=device)
    if weights:
        given["value_scale"] = torch.rand(events, device=device)
    return query, digits, pack_words(digits), given


def plain(query, digits, given, dtype):
    """Output and gradients of query and bias by target attention's plain formula over rows of digits in a dtype."""
    query = query.detach().to(dtype).requires_grad_()
    bias = given.get("key_bias")
    bias = None if bias is None else bias.detach().to(dtype).requires_grad_()
    rows = bias[given["key_bias_index"]] if "key_bias_index" in given else bias
    key = digits[:, None].to(dtype)
    scale = given.get("value_scale")
    value = None if scale is None else key * scale[:, None, None].to(dtype)
    out = reference.target_attention(query, key, value, given["offsets"], rows, query.shape[3] ** -0.5)
    return out, *torch.autograd.grad(out, [query] if bias is None else [query, bias], gradient_of(out))


def gradient_of(out):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator).bfloat16().to(out)


def check(query, digits, words, given, impl):
    """Each result's error is at most twice that of the plain formula in the same dtype, plus roundings, in norm."""
    out = jfi_ops.digit_attention(query, words, **given, impl=impl)
    leaves = [query] + ([given["key_bias"]] if "key_bias" in given else [])
    found = out.detach(), *torch.autograd.grad(out, leaves, gradient_of(out))
    truth, same = (plain(query, digits, given, dtype) for dtype in (torch.float64, query.dtype))
    # The backward takes Δ = Σ dO·O from the rounded output: it is off by half a rounding of each term.
    eps, wide = torch.finfo(query.dtype).eps, truth[0].detach()
    delta = eps / 2 * (gradient_of(wide) * wide).abs().sum(-1, keepdim=True)
    saved = [0.0, float((delta * wide).norm()) * query.shape[3] ** -0.5, float(delta.norm())]
    longest = max(float(x.detach().norm()) for x in truth) * max(query.shape[3], 16) ** 0.5
    for got, leaf, near, true, more in zip(found, [out, *leaves], same, truth, saved[: len(found)], strict=True):
        assert got.dtype == leaf.dtype and got.shape == true.shape and torch.isfinite(got).all()
        allowed = (
            2 * (near.double() - true).norm() + eps * true.norm() + torch.finfo(torch.float32).eps * longest + more
        )
        assert (got.double() - true).norm() <= allowed


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", LENGTHS)
def test_lengths(case, impl, device, poisoned):
    check(*make(LENGTHS[case], 25, device=device), impl)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_digits", [1, 16, 17, 32, 40, 64, 100, 128])
def test_digits(num_digits, impl, device, poisoned):
    check(*make([3, 0, 70, 1], num_digits, device=device), impl)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("queries", [(1, 1), (3, 1), (5, 3), (4, 4), (9, 2)], ids=str)
@pytest.mark.parametrize("bias", [None, "event", 7], ids=str)
def test_queries_and_biases(queries, bias, impl, device, poisoned):
    check(*make([3, 0, 70, 1], 32, queries, device=device, bias=bias), impl)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("bias", [None, 7, 70], ids=str)
@pytest.mark.parametrize("weights", [False, True], ids=["", "weights"])
def test_biases_and_weights(bias, weights, impl, device, poisoned):
    check(*make([3, 0, 70, 1], 40, device=device, bias=bias, weights=weights), impl)


#: (digits, queries, bias, weights): each number of words and each kind of bias.
HALVES = {
    "a_word": (7, (1, 1), None, False),
    "two_words": (25, (1, 16), "event", False),
    "three_words": (40, (2, 4), 7, True),
    "four_words": (64, (1, 4), None, True),
    "four_words_by_bucket": (64, (4, 4), 40, False),
    "sixteen_heads_by_bucket": (64, (1, 16), 32, True),
    "seven_words": (100, (3, 5), None, False),
    "eight_words": (128, (1, 4), "event", True),
    "many_queries": (32, (5, 7), 7, False),
    "a_bias_for_many_queries": (32, (5, 7), "event", False),
    "large_table": (20, (1, 4), 70, False),
    "ten_words": (150, (1, 4), None, False),
}


@pytest.mark.parametrize("case", HALVES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, case, device, poisoned):
    num_digits, queries, bias, weights = HALVES[case]
    check(*make([3, 0, 150, 1, 64], num_digits, queries, dtype, device, bias, weights), "triton")


@pytest.mark.parametrize("case", LENGTHS)
def test_lengths_in_half_precision(case, device, poisoned):
    check(*make(LENGTHS[case], 64, (1, 3), torch.bfloat16, device), "triton")


def test_offsets_and_indices_of_32_bits(device, poisoned):
    query, digits, words, given = make([3, 0, 150], 40, dtype=torch.bfloat16, device=device, bias=7)
    given |= {name: given[name].int() for name in ("offsets", "key_bias_index")}
    check(query, digits, words, given, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("bias", [None, 7], ids=str)
@pytest.mark.parametrize("num_digits", [32, 64])
def test_long_histories_in_half_precision(num_digits, bias, device, poisoned):
    with override(MIN_CHUNK=64, num_sms=1):
        check(*make([3, 3000, 0, 40, 2000], num_digits, (2, 9), torch.bfloat16, device, bias), "triton")


@pytest.mark.parametrize("bias", [None, 7], ids=str)
def test_long_histories_are_split_and_combined(bias, device, poisoned):
    with override(MIN_CHUNK=64, num_sms=2):
        check(*make([3, 300, 0, 40, 200], 25, (2, 9), device=device, bias=bias), "triton")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_hidden_events(impl, device, poisoned):
    query, digits, words, given = make([5, 4], 25, device=device, bias="event")
    with torch.no_grad():
        given["key_bias"][:6] = -torch.inf
    out = jfi_ops.digit_attention(query, words, **given, impl=impl)
    assert (out[0] == 0).all()
    alone = reference.target_attention(
        query[1:], digits[6:, None].float(), None, torch.tensor([0, 3], device=device), given["key_bias"][6:], 0.2
    )
    torch.testing.assert_close(out[1:], alone)
    grads = torch.autograd.grad(out.sum(), [query, given["key_bias"]])
    assert all(x.isfinite().all() for x in grads) and (grads[0][0] == 0).all() and (grads[1][:6] == 0).all()


def test_hidden_rows_of_a_table_in_half_precision(device, poisoned):
    """Events of these rows are as if they were not there, before, between and behind others, and alone."""
    query, digits, words, given = make([40, 150, 3, 9], 40, dtype=torch.bfloat16, device=device, bias=7)
    table, index = given["key_bias"], given["key_bias_index"]
    with torch.no_grad():
        table[2:5] = -torch.inf
        table[5] = -3000.0  # far below others, and not hidden
    index[:40], index[40:120], index[190:193] = 3, torch.arange(2, 6, device=device).repeat(20), 5
    out = jfi_ops.digit_attention(query, words, **given, impl="triton")
    found = out, *torch.autograd.grad(out, [query, table], gradient_of(out))
    seen = (index < 2) | (index > 4)
    assert (out[0] == 0).all() and (found[1][0] == 0).all() and (found[2][2:5] == 0).all()
    samples = torch.repeat_interleave(torch.arange(4, device=device), given["offsets"].diff())
    offsets = torch.cat([torch.zeros(1, device=device).long(), samples[seen].bincount(minlength=4).cumsum(0)])
    alone = {"offsets": offsets, "key_bias": table, "key_bias_index": index[seen]}
    assert (out[2] != 0).any()
    for x, y in zip(found, plain(query, digits[seen], alone, torch.float64), strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x.double()[y != 0], y[y != 0], atol=0.03, rtol=0.03)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_same_bits_again(impl, device):
    query, _, words, given = make([3, 300, 0, 40], 40, device=device, bias=7)
    with override(MIN_CHUNK=64, num_sms=2):
        outs = [jfi_ops.digit_attention(query, words, **given, impl=impl) for _ in range(2)]
        grads = [torch.autograd.grad(out.square().sum(), [query, given["key_bias"]]) for out in outs]
    assert torch.equal(*outs) and all(map(torch.equal, *grads))


def test_bits_behind_the_last_digit_are_not_read(device):
    query, _, words, given = make([3, 0, 70], 25, device=device)
    for impl in IMPLEMENTATIONS:
        out = jfi_ops.digit_attention(query, words, **given, impl=impl)
        words[:, 1] |= -1 << 18
        assert torch.equal(jfi_ops.digit_attention(query, words, **given, impl=impl), out)


def test_words_of_the_reference(device):
    digits = torch.randint(-1, 2, (9, 70), device=device)
    assert torch.equal(reference.unpack_digits(pack_words(digits), 70), digits.to(torch.int8))
    assert (Layout(40).unpack(torch.tensor([-1])) == 0).all()


def good() -> dict:
    return {
        "query": torch.randn(2, 1, 4, 20),
        "digits": torch.zeros(5, 2, dtype=torch.int32),
        "offsets": torch.tensor([0, 2, 5]),
    }


BAD = {
    "query": ({"query": torch.randn(2, 4, 20)}, ValueError, r"query must be \[B, T, H, L\], got"),
    "integers": ({"query": torch.ones(2, 1, 4, 20, dtype=torch.int64)}, TypeError, "query must be float32"),
    "dtype": ({"digits": torch.zeros(5, 2, dtype=torch.int64)}, TypeError, "digits must be int32, got torch.int64"),
    "no tensor": ({"digits": None}, TypeError, "digits must be a Tensor, got NoneType"),
    "words": (
        {"digits": torch.zeros(5, 1, dtype=torch.int32)},
        ValueError,
        "digits must have W = 2 for the query's L = 20 digits, got 1",
    ),
    "no digit": (
        {"digits": torch.tensor([[0, 0]] * 3 + [[0, 2], [0, 0]], dtype=torch.int32)},
        ValueError,
        r"digits must be of 2-bit numbers -1, 0 and 1, got -2 \(0b10\) in row 3",
    ),
    "offsets": ({"offsets": torch.tensor([0, 2, 4])}, ValueError, "offsets must end at 5, the rows of digits, got 4"),
    "bias heads": ({"key_bias": torch.randn(5, 2)}, ValueError, "key_bias must have H = 4, got 2"),
    "bias events": ({"key_bias": torch.randn(4, 4)}, ValueError, "key_bias must have S = 5, got 4"),
    "bias dtype": ({"key_bias": torch.randn(5, 4).half()}, TypeError, "key_bias must have the dtype of query"),
    "learned scale": (
        {"value_scale": torch.rand(5, requires_grad=True)},
        ValueError,
        "value_scale must not require a gradient",
    ),
    "impl": ({"impl": "cuda"}, ValueError, "impl must be one of"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_argument_is_named(case):
    change, error, message = BAD[case]
    arguments = good() | change
    with pytest.raises(error, match=message):
        jfi_ops.digit_attention(arguments.pop("query"), arguments.pop("digits"), **arguments)


def test_too_many_digits_for_triton(device):
    words = torch.zeros(5, 33, dtype=torch.int32, device=device)
    query, offsets = torch.randn(1, 1, 1, 520, device=device), torch.tensor([0, 5], device=device)
    with pytest.raises(ValueError, match="query must have at most 512 digits for impl='triton', got 520"):
        jfi_ops.digit_attention(query, words, offsets=offsets, impl="triton")


def kernels_of(device=H200, dtype=torch.bfloat16, queries=(1, 4), num_digits=40, **arguments):
    """(family, forward kernel, backward kernel) of a call."""
    query, _, words, given = make([2, 3], num_digits, queries, dtype, bias=arguments.pop("bias", None))
    chosen = jfi_ops.explain(jfi_ops.digit_attention, query, words, **given, **arguments, device=device)
    return chosen.family, chosen.forward[0].kernel, chosen.backward[0].kernel


IN_REGISTERS = ("digits_registers", "digit_attention_registers_fwd", "digit_attention_registers_bwd")
BY_ELEMENT = ("target_single_tile", "target_attention_single_tile_fwd", "target_attention_single_tile_bwd")


def test_explain_names_the_kernels():
    assert kernels_of() == kernels_of(bias="event") == kernels_of(bias=7, queries=(2, 4)) == IN_REGISTERS
    # By event the gradient of a bias is summed over the queries by the other kernel alone.
    assert kernels_of(bias="event", queries=(2, 4)) == (*IN_REGISTERS[:2], BY_ELEMENT[2])
    refused = [{"dtype": torch.float32}, {"num_digits": 130}, {"scale": -0.5}, {"scale": 0}, {"device": A100}]
    assert all(kernels_of(**arguments) == BY_ELEMENT for arguments in refused)
    # A table of biases is divided by the scale.
    small = {"bias": 7, "scale": 2.0**-20}
    assert kernels_of(**small) == BY_ELEMENT and kernels_of(**small | {"scale": 2.0**-19}) == IN_REGISTERS
    assert kernels_of(device=plan.CPU)[0] == "cpu"
