"""However an operator is reached (eagerly, under a mode or in a graph), it is the same operator."""

from types import SimpleNamespace

import pytest
import torch
from ops.ragged import offsets_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import jfi.ops as ops
from jfi import reference, table1
from jfi.utils import context

LENGTHS = [3, 0, 40]


def inputs(device, dtype=torch.float32):
    query = torch.randn(3, 2, 1, 8, device=device, dtype=dtype)
    key = torch.randn(43, 1, 8, device=device, dtype=dtype)
    return query, key, offsets_of(LENGTHS, device)


def test_fake_tensors_run_no_kernel(device):
    query, key, offsets = inputs(device)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (query, key, offsets)]
    out = table1.jagged_dense_bmm(fakes[1].flatten(1), fakes[2], fakes[0].flatten(1, 2).transpose(1, 2), impl="triton")
    assert type(out) is type(fakes[0]) and out.shape == (43, 2)


def test_a_graph_shows_the_operator(device):
    query, key, offsets = inputs(device)
    graph = make_fx(lambda q, k: ops.target_attention(q, k, offsets=offsets, impl="triton"))(query, key)
    assert torch.ops.jfi.target_attention_fwd.default in {node.target for node in graph.graph.nodes}
    torch.testing.assert_close(graph(query, key), ops.target_attention(query, key, offsets=offsets, impl="triton"))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_trace_holds_for_other_inputs(impl, device):
    query, key, offsets = inputs(device)
    with torch.no_grad():
        traced = torch.jit.trace(
            lambda q, k: ops.target_attention(q, k, offsets=offsets, impl=impl), (query, key), check_trace=False
        )
        other = torch.randn_like(query)
        expected = ops.target_attention(other, key, offsets=offsets, impl=impl)
        torch.testing.assert_close(traced(other, key), expected)


def test_a_profile_names_the_operator(device):
    query, key, offsets = inputs(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.target_attention(query, key, offsets=offsets, impl="triton")
    assert "jfi::target_attention_fwd" in {event.key for event in profile.key_averages()}


def test_cpu_tensors_are_refused_without_the_interpreter(monkeypatch):
    monkeypatch.setattr("jfi.ops.checks.interprets", lambda: False)
    query, key, offsets = inputs(torch.device("cpu"))
    with pytest.raises(ValueError, match="impl='triton' must come with tensors on a GPU, got cpu: use impl='torch'"):
        ops.target_attention(query, key, offsets=offsets, impl="triton")


def test_second_derivatives_where_gradients_are_operators(device):
    _, key, offsets = inputs(device)
    x, dense = key.flatten(1).requires_grad_(), torch.randn(3, 8, 2, device=device, requires_grad=True)

    def penalty(function):
        (dx,) = torch.autograd.grad(function(x, offsets, dense).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, dense))

    got = penalty(lambda *args: table1.jagged_dense_bmm(*args, impl="triton"))
    for a, b in zip(got, penalty(reference.jagged_dense_bmm), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_target_attention_has_no_second_derivative_and_says_so(device):
    query, key, offsets = inputs(device)
    query.requires_grad_()
    out = ops.target_attention(query, key, offsets=offsets, impl="triton")
    (dquery,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="target_attention_bwd"):
        dquery.sum().backward()


@pytest.mark.parametrize("max_seqlen", [None, 40, 7])
def test_tensors_need_not_be_aligned_nor_the_hint_right(max_seqlen, device):
    """Views one element into a buffer: 4 bytes, which Triton compiles other loads for."""
    aligned = inputs(device)
    shifted = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in aligned[:2]]
    results = []
    for query, key in (aligned[:2], shifted):
        leaves = [query.requires_grad_(), key.requires_grad_()]
        out = ops.target_attention(*leaves, offsets=aligned[2], max_seqlen=max_seqlen, impl="triton")
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU, or none")
@pytest.mark.parametrize("num_queries", [2, 20])
def test_kernels_run_where_the_tensors_are(num_queries):
    results = []
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        query, key, offsets = (x.to(device) for x in inputs(torch.device("cpu")))
        query = query[:, :1].repeat(1, num_queries, 1, 1).requires_grad_()
        out = ops.target_attention(query, key, offsets=offsets)
        results.append((out, *torch.autograd.grad(out.square().sum(), query)))
        assert out.device == torch.device(device)
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(here.cpu(), there.cpu())


def test_a_compiler_meets_no_context_variable(monkeypatch):
    """As on a GPU, where whether contents are read depends on one."""

    def get():
        raise RuntimeError("the context variable was read")

    monkeypatch.setattr(context, "_READABLE", ())
    monkeypatch.setattr(context, "validates_on_gpu", SimpleNamespace(get=get))
    query, key, offsets = inputs("cpu")

    def attend(query, key):
        return ops.target_attention(query, key, offsets=offsets, key_bias_index=index, key_bias=table)

    index, table = torch.zeros(43, dtype=torch.long), torch.randn(3, 1)
    with pytest.raises(RuntimeError, match="the context variable was read"):
        attend(query, key)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")(query, key)
    monkeypatch.undo()
    torch.testing.assert_close(compiled, attend(query, key))
