"""Jagged attention, Triton and the CPU path: output and gradients within the budget on every kind of batch."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops.budget import compare
from ops.overrides import FAMILIES, override
from ops.ragged import CASES, LENGTHS, ON_HOPPER, SLOW_HERE, offsets_of

import jfi.ops
from jfi import reference
from jfi.utils.operands import JaggedAttentionInputs

pytestmark = pytest.mark.usefixtures("poisoned")
IMPLS = ["triton", "torch"]
# The interpreter takes long for many heads and shapes.
MANY_HEADS = pytest.param(70, 1, marks=SLOW_HERE)
EXAMPLES = 12 if torch.cuda.is_available() else 6
WINDOWS = [(False, None), (True, None), (False, (7, 3)), (True, (20, None)), (False, (None, 5)), (False, (0, 0))]


def check(
    lengths,
    device,
    impl,
    dtype=torch.float32,
    queries=None,  # None: self-attention
    num_heads=1,
    num_kv_heads=1,
    width=16,
    value_width=16,  # None: value = key
    bias=None,
    causal=False,
    window=None,
    family=None,  # of the kernels that must run
):
    scale = 1.3 * width**-0.5
    index = torch.int32 if len(lengths) % 2 else torch.int64
    key_offsets = offsets_of(lengths, device, index)
    query_offsets = key_offsets if queries is None else offsets_of(queries, device, index)
    rows = sum(lengths if queries is None else queries)

    def random(*shape: int):
        return torch.randn(shape, device=device).to(dtype)

    inputs = [random(rows, num_heads, width), random(sum(lengths), num_kv_heads, width)]
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
        options = {"causal": causal, "window_size": window, "key_bias": event_bias, "scale": scale, "impl": impl}
        return jfi.ops.jagged_attention(
            query, key, value, query_offsets=query_offsets, key_offsets=key_offsets, **options
        )

    def plain(*tensors):
        query, key, value, event_bias = operands(tensors)
        where = (query_offsets, key_offsets, causal, window)
        return reference.jagged_attention(query, key, value, *where, event_bias, scale)[0]

    if family is not None:
        offsets = {"query_offsets": query_offsets, "key_offsets": key_offsets}
        query, key, value, event_bias = operands(inputs)
        plan = jfi.ops.explain(jfi.ops.jagged_attention, query, key, value, key_bias=event_bias, impl=impl, **offsets)
        assert plan.family == family, plan
    compare(public, plain, inputs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_ragged(case, dtype, impl, device):
    lengths = LENGTHS[case]
    check(lengths, device, impl, dtype, causal=True, value_width=None)
    check(lengths, device, impl, dtype, queries=lengths[::-1], num_heads=2, value_width=8, bias="finite")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("causal", "window"), WINDOWS)
def test_windows(causal, window, impl, device):
    check([5, 0, 140, 1], device, impl, num_heads=2, num_kv_heads=2, causal=causal, window=window)
    check(
        [5, 0, 140, 9], device, impl, queries=[70, 3, 65, 0], num_heads=3, causal=causal, window=window, bias="finite"
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 2), (3, 1), MANY_HEADS])
@pytest.mark.parametrize("bias", [None, "hidden"])
def test_heads(num_heads, num_kv_heads, bias, impl, device):
    check(
        [5, 0, 80, 1],
        device,
        impl,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        value_width=12,
        bias=bias,
        causal=bias is None,
    )


HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("family", "short"),
    [("jagged_sm90", 0), ("jagged_sm90", 2**30), ("jagged_triton", 0)] if ON_HOPPER else [("jagged_triton", 0)],
)
@pytest.mark.parametrize("dtype", HALVES if torch.cuda.is_available() else HALVES[:1])
@pytest.mark.parametrize(("causal", "window"), WINDOWS if torch.cuda.is_available() else WINDOWS[:3])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 1), (3, 1)])
@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (64, None), (128, 128)])
def test_half_precision(width, value_width, num_heads, num_kv_heads, causal, window, dtype, family, short, device):
    """The shapes of the Hopper kernels, with so few programs that each takes many tiles."""
    options = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "width": width,
        "causal": causal,
        "window": window,
        "family": family,
    }
    lengths = [0, 1, 64, 130, 5, 400] if torch.cuda.is_available() else [0, 1, 70]
    with override(num_sms=2, SM90_SHORT_KEYS={64: short, 128: short}, **FAMILIES[family]):
        check(lengths, device, "triton", dtype, value_width=value_width, **options)
        check(lengths, device, "triton", dtype, lengths[::-1], value_width=value_width, **options)
        if num_heads == num_kv_heads:
            check(lengths, device, "triton", dtype, lengths[::-1], value_width=value_width, bias="hidden", **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("width", "value_width"), [(1, 1), (17, None), (96, 5), (100, None), (256, None), (256, 300), (400, 3)]
)
def test_widths(width, value_width, impl, device):
    check([3, 0, 70, 1], device, impl, width=width, value_width=value_width, causal=True)


def test_rows_wider_than_a_tile_are_refused(device):
    x, offsets = torch.randn(3, 1, 513, device=device), offsets_of([3], device)
    with pytest.raises(ValueError, match=r"key and value must be at most 512 wide for impl='triton'.*, got 513"):
        jfi.ops.jagged_attention(x, x, query_offsets=offsets, impl="triton")


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), max_size=5),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    width=st.integers(1, 40),
    value_width=st.none() | st.integers(1, 40),
    bias=st.sampled_from([None, "finite", "hidden"]),
    causal=st.booleans(),
    window=st.none() | st.tuples(st.none() | st.integers(0, 60), st.none() | st.integers(0, 60)),
)
def test_any_shape(lengths, heads, width, value_width, bias, causal, window, impl, device):
    queries, keys = [n for n, _ in lengths], [n for _, n in lengths]
    check(keys, device, impl, torch.float32, queries, *heads, width, value_width, bias, causal, window)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scale", [0.0, 1e-46, 1e-20, -0.7, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES] if torch.cuda.is_available() else [torch.float32])
def test_any_scale(scale, dtype, impl, device):
    offsets = offsets_of([5, 0, 70], device)
    compare(
        lambda q, k, v: jfi.ops.jagged_attention(q, k, v, query_offsets=offsets, scale=scale, causal=True, impl=impl),
        lambda q, k, v: reference.jagged_attention(q, k, v, offsets, offsets, True, None, None, scale)[0],
        [torch.randn(75, 2, 64, device=device).to(dtype) for _ in range(3)],
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.float16, 64)])
def test_the_log_sum_exp_and_its_gradient(dtype, width, impl, device):
    offsets, keys = offsets_of([5, 0, 70, 2], device), offsets_of([9, 3, 40, 0], device)
    inputs = [torch.randn(rows, num_heads, width, device=device).to(dtype) for rows, num_heads in ((77, 2), (52, 1))]

    def both(out, lse):
        # -inf where nothing is seen: those rows are checked apart.
        assert lse[75:].eq(-torch.inf).all() and out[75:].eq(0).all()
        lse = lse.where(lse > -torch.inf, 0.0).to(out.dtype)
        return torch.cat([out, lse[..., None].expand_as(out) * 0.1], -1)

    compare(
        lambda q, k: both(
            *jfi.ops.jagged_attention(q, k, query_offsets=offsets, key_offsets=keys, return_lse=True, impl=impl)
        ),
        lambda q, k: both(*reference.jagged_attention(q, k, None, offsets, keys, False, None, None, width**-0.5)),
        inputs,
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_parts_of_a_history_merge(impl, device):
    """Gradients too: the older and the newer half of every history, attended to apart."""
    lengths = [6, 40, 1, 0, 3]
    offsets, older_offsets = offsets_of(lengths, device), offsets_of([n // 2 for n in lengths], device)
    newer_offsets = offsets - older_offsets
    query, key = torch.randn(50, 2, 16, device=device), torch.randn(50, 2, 16, device=device)
    own = torch.arange(50, device=device) - offsets[:-1].repeat_interleave(offsets.diff())
    older = own < older_offsets.diff().repeat_interleave(offsets.diff())

    def merged(query, key):
        parts = [(key[older], older_offsets), (key[~older], newer_offsets)]
        out, lse = zip(
            *(
                jfi.ops.jagged_attention(
                    query, part, query_offsets=offsets, key_offsets=ends, return_lse=True, impl=impl
                )
                for part, ends in parts
            ),
            strict=True,
        )
        total = torch.logaddexp(*lse)
        return sum(o * torch.exp(part - total)[..., None] for o, part in zip(out, lse, strict=True))

    leaves = [x.requires_grad_() for x in (query, key)]
    whole = jfi.ops.jagged_attention(query, key, query_offsets=offsets, impl=impl)
    parts = merged(query, key)
    torch.testing.assert_close(parts, whole)
    grad = torch.randn_like(whole)
    got, expected = torch.autograd.grad(parts, leaves, grad), torch.autograd.grad(whole, leaves, grad)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("dtype", "width", "num_kv_heads", "biased"),
    [
        (torch.float32, 64, 2, True),
        (torch.float16, 64, 2, True),
        (torch.float16, 64, 1, False),
        (torch.float16, 128, 2, False),
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sample(value, dtype, width, num_kv_heads, biased, impl, device):
    lengths = [100, 30, 77]
    offsets = offsets_of(lengths, device)
    shapes = [(207, 2, width), (207, num_kv_heads, width), (207, num_kv_heads, width), *([(207, 2)] if biased else [])]
    clean = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    broken = [x.clone() for x in clean]
    for x in broken:
        x[100:130] = value
    results = []
    for inputs in (clean, broken):
        leaves = [x.requires_grad_() for x in inputs]
        bias = leaves[3] if biased else None
        out = jfi.ops.jagged_attention(*leaves[:3], query_offsets=offsets, key_bias=bias, impl=impl)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert b[100:130].isnan().all()
        assert torch.equal(a[:100], b[:100]) and torch.equal(a[130:], b[130:])


@pytest.mark.slow  # the interpreter runs one program after another
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_same_inputs_give_the_same_bits(dtype, impl, device):
    offsets = offsets_of([300, 5, 0, 90], device)
    leaves = [torch.randn(395, 2, 64, device=device).to(dtype).requires_grad_() for _ in range(3)]
    runs = []
    for _ in range(2):
        out = jfi.ops.jagged_attention(*leaves, query_offsets=offsets, causal=True, impl=impl)
        runs.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_windows_beyond_all_places(impl, device):
    offsets, queries = offsets_of([70, 3], device), offsets_of([4, 40], device)
    query, key = torch.randn(44, 1, 16, device=device), torch.randn(73, 1, 16, device=device)
    whole = jfi.ops.jagged_attention(query, key, query_offsets=queries, key_offsets=offsets, impl=impl)
    for window in ((sys.maxsize, None), (None, sys.maxsize), (2**31 - 1, 2**31 - 1)):
        got = jfi.ops.jagged_attention(
            query, key, query_offsets=queries, key_offsets=offsets, window_size=window, impl=impl
        )
        torch.testing.assert_close(got, whole)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_bias_of_the_least_number_there_is(impl, device):
    """As masks are often written: where every event has it, none is preferred."""
    offsets = offsets_of([70], device)
    query, key = torch.randn(70, 1, 16, device=device), torch.randn(70, 1, 16, device=device)
    bias = torch.full((70, 1), -1e9, device=device)
    got = jfi.ops.jagged_attention(query, key, query_offsets=offsets, key_bias=bias, impl=impl)
    torch.testing.assert_close(got, key.mean(0).expand_as(got), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", ["query", "key", "grad"])
def test_tensors_off_their_borders(which, device):
    """A view that does not begin at a multiple of 16 bytes, which TMA cannot load."""
    offsets = offsets_of([5, 0, 70], device)

    def tensor(name):
        if name != which:
            return torch.randn(75, 2, 64, device=device).half()
        return torch.randn(75 * 128 + 1, device=device).half()[1:].view(75, 2, 64)

    query, key, grad = tensor("query").requires_grad_(), tensor("key").requires_grad_(), tensor("grad")
    out = jfi.ops.jagged_attention(query, key, query_offsets=offsets, impl="triton")
    got = [out, *torch.autograd.grad(out, (query, key), grad)]
    plain = reference.jagged_attention(query, key, None, offsets, offsets, False, None, None, 0.125)[0]
    for a, b in zip(got, [plain, *torch.autograd.grad(plain, (query, key), grad)], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("tapers", [False, True])
@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize(("batch", "counted_once"), [(1, 1024), (5, 4), (200, 1024), (200, 0)])
def test_the_schedule_has_every_tile_once_and_the_long_first(
    batch, counted_once, num_heads, tapers, device, monkeypatch
):
    from jfi.kernels.common.tile_scheduler import schedule_tiles

    monkeypatch.setattr("jfi.kernels.common.tile_scheduler.COUNTED_ONCE", counted_once)
    lengths = torch.randint(0, 700, (batch,)) * (torch.rand(batch) > 0.2)
    other_lengths = torch.randint(0, 700, (batch,))
    offsets = offsets_of(lengths.tolist(), device)
    other_offsets = offsets_of(other_lengths.tolist(), device, torch.int32)
    schedule = schedule_tiles(offsets, other_offsets, int(lengths.sum()), num_heads, 64, tapers=tapers)[:, :5].tolist()
    tiles = [
        (tile, int(offsets[b]), int(lengths[b]), int(other_offsets[b]), int(other_lengths[b]))
        for b in range(batch)
        for tile in range(-(-int(lengths[b]) * num_heads // 64))
    ]
    assert sorted(tuple(x) for x in schedule[: len(tiles)]) == sorted(tiles)
    assert all(x == [0] * 5 for x in schedule[len(tiles) :])
    counts = [-(-x[2] * num_heads // 64) for x in schedule[: len(tiles)]]
    seen = [(count - x[0]) / count if tapers else 1 for x, count in zip(schedule, counts, strict=False)]
    work = [share * x[4] + 1 for x, share in zip(schedule, seen, strict=False)]
    assert all(later < earlier * 2**0.5 + 1 for earlier, later in pairwise(work))


@pytest.mark.parametrize("name", ["query", "key"])
def test_rows_whose_positions_do_not_fit_32_bits_are_refused(name, device, monkeypatch):
    from jfi.kernels.jagged_attention import execute

    monkeypatch.setattr(execute, "_MAX_ROWS", 70)
    rows = {"query": 40, "key": 40} | {name: 70}
    query, key = (torch.randn(count, 1, 16, device=device) for count in rows.values())
    offsets = {f"{side}_offsets": offsets_of([count], device) for side, count in rows.items()}
    with pytest.raises(ValueError, match=f"{name} must have fewer than 2³¹ rows.*got 70"):
        jfi.ops.jagged_attention(query, key, **offsets, impl="triton")


@pytest.mark.parametrize("case", ["candidates", "causal"])
def test_the_exported_forward(case, device):
    """The operator that replaces jagged_attention in an exported program, run eagerly, against the plain formula."""
    from jfi.kernels.exported import jagged_attention_fwd

    offsets = offsets_of([5, 0, 3, 32], device)
    if case == "candidates":
        query, queries = torch.randn(30, 4, 24, device=device), offsets_of([7, 2, 1, 20], device)
        inputs = (query, torch.randn(40, 1, 24, device=device), None, queries, offsets)
        rest = (torch.ones(40, 4, device=device), None, None, None, None, 0.3, None, None, False)
        found, _ = jagged_attention_fwd(JaggedAttentionInputs(*inputs, *rest))
        plain = reference.jagged_attention(*inputs, False, None, torch.ones(40, 4, device=device), 0.3)[0]
    else:
        inputs = (*torch.randn(3, 40, 4, 24, device=device), offsets, offsets)
        rest = (None, None, None, None, None, 0.3, None, 0, False)
        found, _ = jagged_attention_fwd(JaggedAttentionInputs(*inputs, *rest))
        plain = reference.jagged_attention(*inputs, True, None, None, 0.3)[0]
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)


class Attend(torch.nn.Module):
    def forward(self, query, key, query_offsets, key_offsets, bias):
        offsets = {"query_offsets": query_offsets, "key_offsets": key_offsets}
        return jfi.ops.jagged_attention(query, key, **offsets, causal=True, key_bias=bias)


class Add(torch.nn.Module):
    def forward(self, x):
        return x + 1


def run_package(module: torch.nn.Module, example: tuple, given: tuple, path: Path) -> int:
    """Exports `module`, compares the package with it in a process without jfi; returns that process's exit code."""
    with torch.no_grad():
        shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in example)
        program = torch.export.export(module, example, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        torch.save((given, module(*given)), path.with_suffix(".tensors"))
    script = f"""
import sys
sys.modules["jfi"] = None
import torch
given, wanted = torch.load({str(path.with_suffix(".tensors"))!r})
found = torch._inductor.aoti_load_package({str(path)!r})(*given)
torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)
"""
    return subprocess.run([sys.executable, "-c", script], check=False).returncode


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_package_runs_without_jfi(device, tmp_path):
    def inputs(queries, keys):
        rows = torch.randn(sum(queries), 4, 64, device=device), torch.randn(sum(keys), 1, 64, device=device)
        return *rows, offsets_of(queries, device), offsets_of(keys, device), torch.randn(sum(keys), 4, device=device)

    rows = torch.randn(7, 4, device=device)
    if run_package(Add(), (rows,), (rows[:3],), tmp_path / "add.pt2"):
        pytest.skip(f"torch {torch.__version__} runs no package in a fresh process here, not even x + 1")
    example, given = inputs([3, 5, 9], [7, 4, 6]), inputs([30, 0, 1, 200, 17], [40, 9, 0, 300, 5])
    assert run_package(Attend(), example, given, tmp_path / "attend.pt2") == 0
