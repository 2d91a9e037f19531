"""Target attention with absorbed projections: both of its forms against the formula with projected histories."""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ops import budget
from ops.absorbed import absorbed_target_attention
from torch.utils._python_dispatch import TorchDispatchMode

from jfi import reference
from jfi.kernels import absorbed_weights, plan
from jfi.ops import absorbed_target_attention as absorbed

LENGTHS = [[3, 0, 1, 5], [0, 0, 0, 0], []]


class Traced(TorchDispatchMode):
    """Under a dispatch mode the operator is a composition of others."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def problem(
    features=1,
    num_queries=1,
    num_heads=2,
    widths=(8,),
    d_e=6,
    dim=8,
    lengths=LENGTHS[0],
    dtype=torch.float32,
    device="cpu",
):
    """Arguments by name: those that have gradients, and the others."""

    def random(*shape):
        return torch.randn(shape, device=device) / shape[-1] ** 0.5

    offsets = torch.tensor([0, *lengths * features], device=device).cumsum(0)
    rows, d_x, queries = int(offsets[-1]), sum(widths), num_queries * dim
    shapes = (queries, d_e), (queries,), (dim, d_x), (dim, d_x), (dim, queries), (dim,)
    leaves = {"target": random(features, len(lengths), d_e)}
    leaves |= {f"field {i}": random(rows, width).to(dtype) for i, width in enumerate(widths)}
    leaves |= {f"weight {i}": random(features, *shape) for i, shape in enumerate(shapes)}
    return leaves, {"offsets": offsets, "num_heads": num_heads}


def call(function, leaves, options):
    fields = tuple(x for name, x in leaves.items() if name.startswith("field"))
    weights = tuple(x for name, x in leaves.items() if name.startswith("weight"))
    more = {name: leaves[name] for name in ("key_bias",) if name in leaves}
    history = fields[0] if len(fields) == 1 else fields
    return function(leaves["target"], history, weights, **options, **more)


def results(function, leaves, options):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    out = call(function, leaves, options)
    torch.manual_seed(7)
    cotangent = torch.randn(out.shape).to(out)
    gradients = torch.autograd.grad(out, list(leaves.values()), cotangent)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def plain(target, history, weights, *, offsets, num_heads, key_bias=None, key_bias_index=None, value_scale=None, **_):
    """The formula with every projection in its place."""
    history = torch.cat(history, dim=1) if isinstance(history, tuple) else history
    w_q, b_q, w_k, w_v, w_o, b_o = weights
    features, dim = b_o.shape
    rows = offsets.view(-1)[:-1].view(features, -1)
    ends = [*rows[1:, 0].tolist(), history.shape[0]] if rows.numel() else [0] * features
    history, outputs = history.to(w_q.dtype), []
    if key_bias_index is not None:
        key_bias = key_bias[key_bias_index]
    starts = [0, *ends]
    for f in range(features):
        part = slice(starts[f], starts[f + 1])
        query = (target[f] @ w_q[f].T + b_q[f]).unflatten(1, (-1, num_heads, dim // num_heads))
        key, value = ((history[part] @ w[f].T).unflatten(1, (num_heads, -1)) for w in (w_k, w_v))
        if value_scale is not None:
            value = value * value_scale[part, None, None].to(value)
        own = torch.cat([rows[f] - starts[f], torch.tensor([ends[f] - starts[f]], device=rows.device)])
        bias = None if key_bias is None else key_bias[part].to(query)
        attended = reference.target_attention(query, key, value, own, bias, 1 / math.sqrt(dim // num_heads))
        outputs.append(attended.flatten(1) @ w_o[f].T + b_o[f])
    return torch.stack(outputs)


def is_one_node(leaves, options):
    """Whether an eager call is one node of autograd's graph."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    out = call(absorbed_target_attention, leaves, options)
    return type(out.grad_fn).__name__ == "absorbed_target_attention_fwdBackward"


def calls_of(owner, name, leaves, options):
    """How often an eager call of the operator calls a function of torch."""
    with mock.patch.object(owner, name, wraps=getattr(owner, name)) as spy:
        call(absorbed_target_attention, leaves, options)
    return spy.call_count


def double(leaves):
    return {name: x.double() for name, x in leaves.items()}


def check_both_forms(leaves, options):
    """The one node through both implementations, and the composition that a tracer sees."""
    truth, rough = results(plain, double(leaves), options), results(plain, leaves, options)
    terms = 16 * max(float(x.norm()) for x in truth.values())
    for impl in ("torch", "triton", "traced"):
        if impl == "traced":
            with Traced() as mode:
                got = results(absorbed_target_attention, leaves, options)
            assert "target_attention_fwd" in mode.names
        else:
            got = results(absorbed_target_attention, leaves, options | {"impl": impl})
            # PyTorch scales the values before the attention, in a node of their own; on a GPU it has no node at all.
            on_cpu = not leaves["target"].is_cuda
            one_node = impl == "triton" or (on_cpu and "value_scale" not in options)
            assert is_one_node(leaves, options | {"impl": impl}) == one_node
        for name, x in got.items():
            budget.check(f"{name} {impl}", x, rough[name].to(x.dtype), truth[name], terms)


@pytest.mark.parametrize("lengths", LENGTHS, ids=["some", "all empty", "no sample"])
@pytest.mark.parametrize(("features", "num_queries", "num_heads"), [(1, 1, 4), (2, 3, 2)])
@pytest.mark.parametrize("biased", ["nothing", "scores", "table", "values"])
def test_output_and_gradients(biased, features, num_queries, num_heads, lengths, device):
    leaves, options = problem(features, num_queries, num_heads, lengths=lengths, device=device)
    rows = leaves["field 0"].shape[0]
    if biased == "scores":
        leaves["key_bias"] = torch.randn(rows, num_heads, device=device)
    if biased == "table":
        leaves["key_bias"] = torch.randn(3, num_heads, device=device)
        options["key_bias_index"] = torch.randint(3, (rows,), device=device)
    if biased == "values":
        options["value_scale"] = torch.randn(rows, device=device)
    check_both_forms(leaves, options)
    if biased == "table":  # the kernels read the table where it is
        for impl, count in (("triton", 0), ("torch", 1)):
            assert calls_of(F, "embedding", leaves, options | {"impl": impl}) == count


@pytest.mark.parametrize("width", [16, 24], ids=["read where they are", "concatenated"])
@pytest.mark.parametrize("max_seqlen", [None, 5])
def test_two_fields(width, max_seqlen, device):
    leaves, options = problem(widths=(width, width), device=device)
    options["max_seqlen"] = max_seqlen
    check_both_forms(leaves, options)
    assert calls_of(torch, "cat", leaves, options | {"impl": "triton"}) == (0 if width == 16 else 1)
    assert calls_of(torch, "cat", leaves, options | {"impl": "torch"}) == 1


def test_many_fields_are_one_history(device):
    leaves, options = problem(widths=(8, 3, 16), device=device)
    check_both_forms(leaves, options)


@pytest.mark.parametrize(
    ("sizes", "extra", "absorbs"),
    [
        ({}, None, True),
        ({"widths": (16, 16)}, None, True),
        ({"widths": (24, 24)}, "table", True),
        ({"num_queries": 9}, "table", True),
        ({}, "scaled", True),
        ({"num_queries": 9}, "scaled", False),
        ({}, "learned scale", False),
        ({}, "float64 weights", False),
    ],
)
def test_kernels_absorb_the_weights_where_one_node_runs(sizes, extra, absorbs, device):
    leaves, options = problem(**sizes, device=device)
    rows = leaves["field 0"].shape[0]
    if extra == "table":
        leaves["key_bias"] = torch.randn(3, 2, device=device)
        options["key_bias_index"] = torch.zeros(rows, dtype=torch.long, device=device)
    if extra in ("scaled", "learned scale"):
        options["value_scale"] = torch.ones(rows, device=device, requires_grad=extra == "learned scale")
    if extra == "float64 weights":
        leaves = {name: x.double() if name.startswith("weight") else x for name, x in leaves.items()}
    options["impl"] = "triton"
    with mock.patch.object(absorbed_weights, "absorb", wraps=absorbed_weights.absorb) as absorb:
        call(absorbed_target_attention, leaves, options)
    assert absorb.called == absorbs


def problem_with_a_table(impl, device, **sizes):
    leaves, options = problem(features=2, device=device, **sizes)
    leaves["key_bias"] = torch.randn(3, options["num_heads"], device=device)
    buckets = torch.randint(3, leaves["field 0"].shape[:1], device=device)
    return leaves, options | {"key_bias_index": buckets, "impl": impl}


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_half_precision_histories_are_not_cast(impl, device, monkeypatch):
    leaves, options = problem_with_a_table(impl, device, dtype=torch.float16)
    plain_on_gpu = impl == "torch" and device.type == "cuda"
    owner, name = (reference, "target_attention") if plain_on_gpu else (absorbed, "run_forward")
    attend, seen = getattr(owner, name), []
    monkeypatch.setattr(owner, name, lambda *x: seen.append(x) or attend(*x))
    got = results(absorbed_target_attention, leaves, options)
    query, key, value, *_ = seen[0] if plain_on_gpu else seen[0][0]
    assert len(seen) == 1
    assert query.dtype == key.dtype == torch.float16 and value is None
    want = results(plain, double(leaves), options)
    assert got["out"].dtype == torch.float32 and got["field 0"].dtype == torch.float16
    for name, x in got.items():
        torch.testing.assert_close(x.double(), want[name], rtol=2e-2, atol=2e-2)


def test_forward_and_backward_share_one_plan(device):
    leaves, options = problem_with_a_table("triton", device)
    with mock.patch.object(plan, "plan_target_attention", wraps=plan.plan_target_attention) as made:
        results(absorbed_target_attention, leaves, options)
    assert made.call_count == 1


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("wanted", ["target", "field 0", "key_bias", "weight 1", "weight 2", "weight 5"])
def test_gradients_that_nobody_wants(wanted, impl, device):
    leaves, options = problem_with_a_table(impl, device)
    want = results(absorbed_target_attention, leaves, options)
    leaves[wanted].requires_grad_()
    out = call(absorbed_target_attention, leaves, options)
    torch.manual_seed(7)
    out.backward(torch.randn(out.shape).to(out))
    assert {name for name, x in leaves.items() if x.grad is not None} == {wanted}
    torch.testing.assert_close(leaves[wanted].grad, want[wanted], rtol=0, atol=0)


def test_a_learned_value_scale_has_a_gradient():
    leaves, options = problem()
    weights = tuple(x for name, x in leaves.items() if name.startswith("weight"))
    gradients = []
    for function in (absorbed_target_attention, plain):
        scale = torch.linspace(-1, 1, 9).requires_grad_()
        function(leaves["target"], leaves["field 0"], weights, value_scale=scale, **options).square().sum().backward()
        gradients.append(scale.grad)
    torch.testing.assert_close(*gradients)


def test_under_compile():
    leaves, options = problem()
    weights = tuple(x for name, x in leaves.items() if name.startswith("weight"))

    def attend(target, history):
        return absorbed_target_attention(target, history, weights, **options)

    arguments = leaves["target"], leaves["field 0"]
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), attend(*arguments))
