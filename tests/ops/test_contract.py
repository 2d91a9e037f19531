"""What every operator promises beside its numbers: schemas, no synchronisation, errors."""

import itertools

import pytest
import torch
from ops.overrides import override
from ops.ragged import SLOW_HERE, offsets_of

import jfi.ops as ops
from jfi import table1

X, Y = [0, 3, 1, 20], [2, 0, 5, 7]
OPERATORS = vars(ops) | vars(table1)


def calls(device: torch.device, impl: str, factor: int = 1) -> dict:
    """name -> (function, inputs) of every operator; factor makes another S, B and longest length."""
    x_lengths, y_lengths = X * factor, Y * factor
    x_lengths[-1] *= factor
    x_offsets, y_offsets = offsets_of(x_lengths, device), offsets_of(y_lengths, device)
    s, r, b = sum(x_lengths), sum(y_lengths), len(x_lengths)
    pairs = sum(n * m for n, m in zip(x_lengths, y_lengths, strict=True))

    def random(*shape: int):
        return torch.randn(shape, device=device, requires_grad=True)

    def half(*shape: int):
        return torch.randn(shape, device=device).half().requires_grad_()

    def call(name):
        return lambda *inputs: OPERATORS[name](*inputs, impl=impl)

    return {
        "jagged_dense_bmm": (call("jagged_dense_bmm"), (random(s, 16), x_offsets, random(b, 16, 4))),
        "jagged_jagged_bmm": (call("jagged_jagged_bmm"), (random(s, 16), random(s, 4), x_offsets)),
        "jagged_softmax": (call("jagged_softmax"), (random(s, 4), x_offsets)),
        "jagged_jagged_bmm_jagged_out": (
            lambda *inputs: table1.jagged_jagged_bmm_jagged_out(*inputs[:4], out_size=inputs[4], impl=impl),
            (random(s, 16), random(r, 16), x_offsets, y_offsets, pairs),
        ),
        "jagged2_softmax": (call("jagged2_softmax"), (random(pairs), x_offsets, y_offsets)),
        "array_jagged_bmm_jagged_out": (
            lambda *inputs: table1.array_jagged_bmm_jagged_out(*inputs[:4], out_rows=inputs[4], impl=impl),
            (random(pairs), random(r, 16), x_offsets, y_offsets, s),
        ),
        "target_attention": (
            lambda *inputs: ops.target_attention(*inputs[:3], offsets=inputs[3], key_bias=inputs[4], impl=impl),
            (random(b, 2, 4, 16), random(s, 2, 16), random(s, 2, 10), x_offsets, random(s, 4)),
        ),
        "target_attention, longest known": (
            lambda *inputs: ops.target_attention(*inputs[:3], offsets=inputs[3], max_seqlen=64, impl=impl),
            (random(b, 2, 4, 16), random(s, 2, 16), None, x_offsets),
        ),
        "target_attention, by bucket": (
            lambda *inputs: ops.target_attention(
                *inputs[:3],
                offsets=inputs[3],
                key_bias=inputs[4],
                key_bias_index=inputs[5],
                value_scale=inputs[6],
                impl=impl,
            ),
            (
                *(random(b, 2, 4, 16), random(s, 2, 16), None, x_offsets, random(5, 4)),
                *(torch.randint(0, 5, (s,), device=device), torch.rand(s, device=device)),
            ),
        ),
        "digit_attention": (
            lambda *inputs: ops.digit_attention(*inputs[:2], offsets=inputs[2], key_bias=inputs[3], impl=impl),
            (
                random(b, 2, 4, 20),
                torch.tensor([1, 3, 12, 0], dtype=torch.int32, device=device)[torch.randint(0, 4, (s, 2))],
                *(x_offsets, random(s, 4)),
            ),
        ),
        "digit_attention, by bucket": (
            lambda *inputs: ops.digit_attention(
                *inputs[:2],
                offsets=inputs[2],
                key_bias=inputs[3],
                key_bias_index=inputs[4],
                value_scale=inputs[5],
                impl=impl,
            ),
            (
                *(random(b, 1, 4, 40), torch.ones(s, 3, dtype=torch.int32, device=device), x_offsets, random(5, 4)),
                *(torch.randint(0, 5, (s,), device=device), torch.rand(s, device=device)),
            ),
        ),
        "digit_attention, half precision": (
            lambda *inputs: ops.digit_attention(*inputs[:2], offsets=inputs[2], impl=impl),
            (half(b, 1, 4, 40), torch.ones(s, 3, dtype=torch.int32, device=device), x_offsets),
        ),
        "target_attention, many queries": (
            lambda *inputs: ops.target_attention(*inputs[:3], offsets=inputs[3], impl=impl),
            (random(b, 20, 2, 16), random(s, 2, 16), None, x_offsets),
        ),
        "jagged_attention": (
            lambda *inputs: ops.jagged_attention(
                *inputs[:3],
                query_offsets=inputs[3],
                key_offsets=inputs[4],
                key_bias=inputs[5],
                causal=True,
                return_lse=True,
                impl=impl,
            )[0],
            (random(r, 4, 16), random(s, 2, 16), random(s, 2, 10), y_offsets, x_offsets, random(s, 4)),
        ),
        "jagged_attention, half precision": (
            lambda *inputs: ops.jagged_attention(
                *inputs[:3], query_offsets=inputs[3], key_offsets=inputs[4], window_size=(9, None), impl=impl
            ),
            (half(s, 2, 64), half(s, 2, 64), half(s, 2, 64), x_offsets, x_offsets),
        ),
        "jagged_attention, packed digits": (
            lambda *inputs: ops.jagged_attention(
                *inputs[:2],
                query_offsets=inputs[2],
                key_offsets=inputs[3],
                key_bias=inputs[4],
                value_scale=inputs[5],
                impl=impl,
            ),
            (
                *(random(r, 4, 20), torch.ones(s, 2, dtype=torch.int32, device=device), y_offsets, x_offsets),
                *(random(s, 4), torch.rand(s, device=device)),
            ),
        ),
        "jagged_attention, by time": (
            lambda *inputs: ops.jagged_attention(
                *inputs[:2],
                query_offsets=inputs[2],
                key_offsets=inputs[3],
                query_time=inputs[4],
                key_time=inputs[5],
                time_bias=inputs[6],
                max_visible=30,
                impl=impl,
            ),
            (
                *(random(r, 4, 16), random(s, 1, 16), y_offsets, x_offsets),
                *(torch.arange(rows, device=device) for rows in (r, s)),
                random(8, 4),
            ),
        ),
    }


NAMES = list(calls(torch.device("cpu"), "torch"))
#: Tables and their indices, of rows by id.
NO_ROWS = ([], [])
SCHEMAS = {
    "jagged_dense_bmm": [(torch.ops.jfi.jagged_dense_bmm, lambda x, o, d: (x, o, d, False, "triton"))],
    "jagged_jagged_bmm": [(torch.ops.jfi.jagged_jagged_bmm, lambda *i: (*i, "triton"))],
    "jagged_softmax": [
        (torch.ops.jfi.jagged_softmax, lambda x, o: (x, o, "triton")),
        (torch.ops.jfi.jagged_softmax_bwd, lambda x, o: (x.detach(), x.detach(), o, "triton")),
    ],
    "jagged_jagged_bmm_jagged_out": [(torch.ops.jfi.jagged_jagged_bmm_jagged_out, lambda *i: (*i, "triton"))],
    "jagged2_softmax": [
        (torch.ops.jfi.jagged2_softmax, lambda *i: (*i, "triton")),
        (torch.ops.jfi.jagged2_softmax_bwd, lambda a, *o: (a.detach(), a.detach(), *o, "triton")),
    ],
    "array_jagged_bmm_jagged_out": [(torch.ops.jfi.array_jagged_bmm_jagged_out, lambda *i: (*i, False, "triton"))],
    "target_attention": [
        (
            torch.ops.jfi.target_attention_fwd,
            lambda q, k, v, o, b: (q, k, v, o, b, None, None, None, *NO_ROWS, 0.3, 20, "triton"),
        ),
        (
            torch.ops.jfi.target_attention_fwd,
            lambda q, k, v, o, b: (q, k, None, o, None, None, None, None, *NO_ROWS, 0.3, None, "triton"),
        ),
    ],
    "target_attention, longest known": [
        (
            torch.ops.jfi.target_attention_fwd,
            lambda q, k, v, o: (q, k, v, o, None, None, None, None, *NO_ROWS, 0.3, 64, "triton"),
        ),
    ],
    "target_attention, by bucket": [
        (torch.ops.jfi.target_attention_fwd, lambda *i: (*i, None, *NO_ROWS, 0.3, None, "triton")),
        (
            torch.ops.jfi.target_attention_fwd,
            lambda q, k, *i: (
                torch.cat([q, q], 3),
                k[:, :1] + 1,
                *i,
                k[:, 1] + 1,
                *NO_ROWS,
                0.3,
                64,
                "triton",
            ),  # halves
        ),
    ],
    "digit_attention": [
        (
            torch.ops.jfi.target_attention_fwd,
            lambda q, d, o, b: (q, d.unsqueeze(1), None, o, b, None, None, None, [], [], 0.3, None, "triton"),
        ),
        (
            torch.ops.jfi.target_attention_bwd,
            lambda q, d, o, b: (
                *(q.detach(), None, q.detach(), d.unsqueeze(1), None, o, b.detach(), None, None, None, *NO_ROWS),
                # A lower log-sum-exp would overflow.
                *(0.3, None, q.detach(), q[..., 0].detach() + 50, [True, False, False, True, False], "triton"),
            ),
        ),
    ],
    "digit_attention, by bucket": [
        (
            torch.ops.jfi.target_attention_fwd,
            lambda q, d, o, *events: (q, d.unsqueeze(1), None, o, *events, None, [], [], 0.3, None, "triton"),
        ),
    ],
    "digit_attention, half precision": [
        (
            torch.ops.jfi.target_attention_fwd,
            lambda q, d, o: (q, d.unsqueeze(1), None, o, *(None,) * 4, [], [], 0.3, None, "triton"),
        ),
    ],
    "target_attention, many queries": [
        (
            torch.ops.jfi.target_attention_fwd,
            lambda q, k, v, o: (q, k, v, o, None, None, None, None, *NO_ROWS, 0.3, None, "triton"),
        ),
    ],
    "jagged_attention": [
        (torch.ops.jfi.jagged_attention_fwd, lambda *i: (*i, *(None,) * 4, 0.3, None, 0, False, "triton")),
    ],
    "jagged_attention, half precision": [
        (torch.ops.jfi.jagged_attention_fwd, lambda *i: (*i, *(None,) * 5, 0.3, 9, None, False, "triton")),
        (
            torch.ops.jfi.jagged_attention_fwd,
            lambda q, k, v, *o: (q, k, None, *o, *(None,) * 5, 0.3, None, 0, False, "triton"),
        ),
        (
            torch.ops.jfi.jagged_attention_bwd,
            lambda q, k, v, *o: (
                *(x.detach() for x in (q, q[..., 0].float(), q, k, v)),
                *(*o, *(None,) * 5, 0.3, None, 0, False),
                # A log-sum-exp below the scores would overflow.
                *(q.detach(), q[..., 0].detach().float() + 50, [True, False, True, False, False], "triton"),
            ),
        ),
    ],
    "jagged_attention, packed digits": [
        (
            torch.ops.jfi.jagged_attention_fwd,
            lambda q, d, y, x, b, w: (q, d, w, y, x, b, *(None,) * 4, 0.3, None, None, False, "triton"),
        ),
        (
            torch.ops.jfi.jagged_attention_bwd,
            lambda q, d, y, x, b, w: (
                *(q.detach(), q[..., 0].detach(), q.detach(), d, w, y, x, b.detach(), *(None,) * 4),
                *(0.3, None, None, False, q.detach(), q[..., 0].detach() + 50),
                *([True, False, False, True, False], "triton"),
            ),
        ),
    ],
    "jagged_attention, by time": [
        (
            torch.ops.jfi.bucket_edges,
            lambda q, k, y, x, t, u, b: (y, x, t, u, q.shape[0], False, 30, 8, True, "triton"),
        ),
        (
            torch.ops.jfi.jagged_attention_fwd,
            lambda q, k, y, x, t, u, b: (
                *(q, k, None, y, x, None),
                torch.ops.jfi.bucket_edges(y, x, t, u, q.shape[0], False, 30, 8, True, "triton"),
                *(b, t, u, 0.3, None, None, False, "triton"),
            ),
        ),
        (
            torch.ops.jfi.jagged_attention_bwd,
            lambda q, k, y, x, t, u, b: (
                *(q.detach(), q[..., 0].detach().float(), q.detach(), k.detach(), None, y, x, None),
                torch.ops.jfi.bucket_edges(y, x, t, u, q.shape[0], False, 30, 8, True, "triton"),
                *(b.detach(), t, u, 0.3, None, None, False, q.detach(), q[..., 0].detach().float() + 50),
                *([True, True, False, False, True], "triton"),
            ),
        ),
    ],
}


@pytest.mark.parametrize(
    # The operator of "target_attention" with another longest length.
    "name",
    [pytest.param(name, marks=SLOW_HERE if name == "target_attention, longest known" else []) for name in NAMES],
)
def test_opcheck(name, device):
    _, inputs = calls(device, "triton")[name]
    for op, arguments in SCHEMAS[name]:
        torch.library.opcheck(op.default, arguments(*inputs))


def test_opcheck_on_the_cpu_path():
    q, k, v, offsets, bias = calls(torch.device("cpu"), "torch")["target_attention"][1]
    torch.library.opcheck(
        torch.ops.jfi.target_attention_fwd.default,
        (q, k, v, offsets, bias, None, None, None, *NO_ROWS, 0.3, None, "torch"),
    )
    inputs = calls(torch.device("cpu"), "torch")["jagged_attention"][1]
    torch.library.opcheck(
        torch.ops.jfi.jagged_attention_fwd.default, (*inputs, *(None,) * 4, 0.3, None, 0, False, "torch")
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has nothing to synchronize with")
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_no_synchronisation(name, impl, device):
    if impl == "torch" and name.startswith("jagged_attention"):
        pytest.skip("reads the number of pairs, as its docstring says")
    function, inputs = calls(device, impl)[name]
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    torch.autograd.grad(function(*inputs).sum(), leaves)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(function(*inputs).sum(), leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", NAMES)
def test_new_sizes_compile_no_kernel(name, device, monkeypatch):
    from triton import knobs

    function, _ = calls(device, "triton")[name]
    compiled = []
    for factor in (32, 2, 3, 16):  # the largest first: its histories are split and combined as well
        _, inputs = calls(device, "triton", factor)[name]
        leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.autograd.grad(function(*inputs).sum(), leaves)
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **kernel: compiled.append(kernel["repr"]))
    assert not compiled


@pytest.mark.parametrize("name", [name for name in NAMES if "," not in name])
def test_a_hundred_thousand_samples_fit_the_grid(name, device, monkeypatch):
    """CUDA takes 2**31 - 1 programs in a grid's first dimension and 65,535 in the others."""
    from jfi.kernels.common.launch import Launcher

    grids = []
    monkeypatch.setattr(Launcher, "__call__", lambda launcher, grid, *_: grids.append(grid))
    batch = 100_000
    offsets = torch.arange(batch + 1, device=device)
    x, dense, a = (torch.zeros(batch, *rest, device=device) for rest in ((4,), (4, 1), ()))
    inputs = {
        "jagged_dense_bmm": (x, offsets, dense),
        "jagged_jagged_bmm": (x, x, offsets),
        "jagged_softmax": (x, offsets),
        "jagged_jagged_bmm_jagged_out": (x, x, offsets),
        "jagged2_softmax": (a, offsets),
        "array_jagged_bmm_jagged_out": (a, x, offsets),
        "target_attention": (x[:, None, None], x[:, None]),
        "digit_attention": (x[:, None, None], torch.zeros(batch, 1, dtype=torch.int32, device=device)),
        "jagged_attention": (x[:, None], x[:, None]),
    }[name]
    of_attention = {"offsets": offsets}
    by_name = {
        "target_attention": of_attention,
        "digit_attention": of_attention,
        "jagged_attention": {"query_offsets": offsets},
    }.get(name, {})
    OPERATORS[name](*inputs, **by_name, impl="triton")
    assert grids and all(size <= 65_535 for grid in grids for size in grid[1:])


def test_a_million_queries_fit_the_grid(device, monkeypatch):
    """A catalogue scored for one user whose history is split."""
    from jfi.kernels.common.launch import Launcher

    grids = []
    monkeypatch.setattr(Launcher, "__call__", lambda launcher, grid, *_: grids.append(grid))
    query = torch.zeros(1, 1_100_000, 1, 1, device=device, requires_grad=True)
    key, offsets = torch.zeros(1000, 1, 1, device=device), torch.tensor([0, 1000], device=device)
    with override(MIN_CHUNK=1, num_sms=2**24):
        out = ops.target_attention(query, key, offsets=offsets, impl="triton")
        out.sum().backward()
    assert len(grids) >= 4 and all(size <= 65_535 for grid in grids for size in grid[1:])


def good() -> dict:
    return {
        "query": torch.randn(2, 1, 4, 8),
        "key": torch.randn(5, 2, 8),
        "value": torch.randn(5, 2, 3),
        "offsets": torch.tensor([0, 2, 5]),
        "key_bias": torch.randn(5, 4),
    }


BAD = {
    "query of 3 dimensions": (
        {"query": torch.randn(2, 4, 8)},
        ValueError,
        r"query must be \[B, T, H, D\], got .*\[2, 4, 8\]",
    ),
    "width": ({"key": torch.randn(5, 2, 7)}, ValueError, "key must have D = 8, got 7"),
    "heads": (
        {"key": torch.randn(5, 3, 8)},
        ValueError,
        "key must have G heads that divide the query's H = 4, got G = 3",
    ),
    "value rows": ({"value": torch.randn(4, 2, 3)}, ValueError, "value must have S = 5, got 4"),
    "value heads": ({"value": torch.randn(5, 1, 3)}, ValueError, "value must have G = 2, got 1"),
    "bias heads": ({"key_bias": torch.randn(5, 2)}, ValueError, "key_bias must have H = 4, got 2"),
    "no width": ({"query": torch.randn(2, 1, 4, 0)}, ValueError, "query must be .* with no width of 0"),
    "dtype": (
        {"key": torch.randn(5, 2, 8).half()},
        TypeError,
        "key must have the dtype of query, torch.float32, got torch.float16",
    ),
    "integers": (
        {"query": torch.ones(2, 1, 4, 8, dtype=torch.int64)},
        TypeError,
        "query must be float32, .*, got torch.int64",
    ),
    "no tensor": ({"key_bias": 3.0}, TypeError, "key_bias must be a Tensor, got float"),
    "offsets dtype": (
        {"offsets": torch.tensor([0.0, 2, 5])},
        TypeError,
        "offsets must be int32 or int64, got torch.float32",
    ),
    "offsets size": ({"offsets": torch.tensor([0, 5])}, ValueError, r"offsets must have B\+1 = 3 entries, got 2"),
    "offsets start": ({"offsets": torch.tensor([1, 2, 5])}, ValueError, "offsets must start at 0, got 1"),
    "offsets end": ({"offsets": torch.tensor([0, 2, 4])}, ValueError, "offsets must end at 5, the rows of key, got 4"),
    "offsets order": (
        {"offsets": torch.tensor([0, 6, 5])},
        ValueError,
        "offsets must not decrease, got 6 then 5 at entry 2",
    ),
    "longest of another type": ({"max_seqlen": 3.0}, TypeError, "max_seqlen must be an int or None, got float"),
    "longest below zero": ({"max_seqlen": -1}, ValueError, "max_seqlen must be at least 0, got -1"),
    "impl": ({"impl": "cuda"}, ValueError, "impl must be one of 'auto', 'triton', 'torch', got 'cuda'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_argument_is_named(case):
    change, error, message = BAD[case]
    arguments = good() | change
    positional = [arguments.pop(name) for name in ("query", "key", "value")]
    with pytest.raises(error, match=message):
        ops.target_attention(*positional, **arguments)


def test_auto_takes_triton_on_a_gpu_and_pytorch_elsewhere(device):
    from jfi.ops.checks import check_impl

    x = torch.zeros(1, device=device)
    assert check_impl("auto", x) == ("triton" if device.type == "cuda" else "torch")
    assert check_impl("auto", x.double()) == "torch"
    assert [check_impl(impl, x) for impl in ("triton", "torch")] == ["triton", "torch"]


def test_the_other_operators_name_wrong_arguments_too():
    x, offsets = torch.randn(5, 4), torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match="dense must have D = 4, got 3"):
        table1.jagged_dense_bmm(x, offsets, torch.randn(2, 3, 2))
    with pytest.raises(ValueError, match="y must have S = 5, got 4"):
        table1.jagged_jagged_bmm(x, torch.randn(4, 2), offsets)
    with pytest.raises(ValueError, match="offsets must end at 5"):
        table1.jagged_softmax(x, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="out_size must have Σ L·M = 13, got 12"):
        table1.jagged_jagged_bmm_jagged_out(x, x, offsets, out_size=12)
    with pytest.raises(ValueError, match="a must have Σ L·M = 13, got 12"):
        table1.jagged2_softmax(torch.randn(12), offsets)
    with pytest.raises(ValueError, match="y_offsets must have B\\+1 = 3 entries, got 2"):
        table1.array_jagged_bmm_jagged_out(torch.randn(13), x, offsets, torch.tensor([0, 5]))
    with pytest.raises(TypeError, match="impl='triton' takes float32, bfloat16 or float16"):
        table1.jagged_softmax(x.double(), offsets, impl="triton")
    with pytest.raises(TypeError, match=r"window_size must be a pair \(left, right\) or None, got 5"):
        ops.jagged_attention(x[:, None], x[:, None], query_offsets=offsets, window_size=5)
    with pytest.raises(TypeError, match="scale must be a float or None, got str"):
        ops.jagged_attention(x[:, None], x[:, None], query_offsets=offsets, scale="a")
    query, words = torch.randn(2, 1, 1, 4), torch.zeros(5, 1, dtype=torch.int32)
    calls = [
        lambda scale: ops.target_attention(query, x[:, None], offsets=offsets, scale=scale),
        lambda scale: ops.digit_attention(query, words, offsets=offsets, scale=scale),
        lambda scale: ops.jagged_attention(x[:, None], x[:, None], query_offsets=offsets, scale=scale),
    ]
    for call, scale in itertools.product(calls, (float("nan"), float("inf"))):
        call(-0.5)
        with pytest.raises(ValueError, match=f"scale must be finite, got {scale}"):
            call(scale)
    with pytest.raises(ValueError, match=r"x_offsets must end at 4, the rows of the output \(out_rows\), got 5"):
        table1.array_jagged_bmm_jagged_out(torch.randn(13), x, offsets, out_rows=4)
    with pytest.raises(ValueError, match=r"left of window_size \(None: no bound\) must be at least 0, got -1"):
        ops.jagged_attention(x[:, None], x[:, None], query_offsets=offsets, window_size=(-1, None))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CPU offsets are always checked")
def test_validation_checks_offsets_on_a_gpu(device):
    x, wrong = torch.randn(5, 4, device=device), torch.tensor([0, 2, 4], device=device)
    table1.jagged_softmax(x, wrong)
    with ops.validation(), pytest.raises(ValueError, match="offsets must end at 5"):
        table1.jagged_softmax(x, wrong)
    table1.jagged_softmax(x, wrong)
