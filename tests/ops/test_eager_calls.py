"""Counts of what an eager call does on the host, which do not depend on how fast a host is."""

import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from ops.ragged import offsets_of

import jfi
from jfi.kernels import plan
from jfi.kernels.common import launch
from jfi.kernels.jagged_attention import execute
from jfi.ops import checks
from jfi.ops._attention import Prepared
from jfi.utils.operands import JaggedAttentionInputs

ROOT = str(Path(jfi.__file__).parent)
ALLOCATIONS = ("empty", "empty_like", "new_empty", "clone")


def inputs(device, rows=6, dtype=torch.float32):
    """Queries of two samples, queries of packed rows, key, value and offsets."""
    key, value, packed = (torch.randn(rows, 2, 64, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    query = torch.randn(2, 1, 2, 64, device=device, dtype=dtype).requires_grad_()
    return query, packed, key, value, offsets_of([2, rows - 2], device)


def attend(kind, query, packed, key, value, offsets):
    """Returns the output and the leaves of an operator by its name."""
    if kind == "jagged_attention":
        return jfi.ops.jagged_attention(packed, key, value, query_offsets=offsets, impl="triton"), [packed, key, value]
    if kind == "digit_attention":
        digits = torch.zeros(key.shape[0], 4, dtype=torch.int32, device=key.device)
        return jfi.ops.digit_attention(query, digits, offsets=offsets, impl="triton"), [query]
    return jfi.ops.target_attention(query, key, value, offsets=offsets, impl="triton"), [query, key, value]


@pytest.mark.parametrize("kind", ["jagged_attention", "digit_attention", "target_attention"])
@pytest.mark.parametrize("moved", [False, True])
def test_both_passes_share_a_plan(kind, moved, device):
    """Unless the operands that were saved are no longer where the plan has them, at multiples of 16 bytes."""
    name = "plan_jagged_attention" if kind == "jagged_attention" else "plan_target_attention"
    tensors = inputs(device)
    gradients = []
    for move in (False, moved):

        def unpack(x, move=move):
            return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) if move else x

        with mock.patch.object(plan, name, wraps=getattr(plan, name)) as planned:
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
                out, leaves = attend(kind, *tensors)
            gradients.append(torch.autograd.grad(out.square().sum(), leaves))
        assert planned.call_count == 1 + move
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_a_schedule_serves_one_backward_pass(device, monkeypatch):
    """Its counters are used up: a second pass over a graph that is kept makes its own, as does a captured one."""
    monkeypatch.setattr(plan, "device_of", lambda _: plan.H200)
    _, packed, key, value, offsets = inputs("cpu", 600, torch.bfloat16)
    x = JaggedAttentionInputs(packed, key, value, offsets, offsets, *[None] * 5, 0.125, None, None, False)
    prepared, found = Prepared(plan.plan_jagged_attention(x, "triton")), []
    results = torch.zeros_like(packed), torch.zeros(600, 2)
    monkeypatch.setattr(execute, "forward", lambda x, chosen: (*results, offsets))
    monkeypatch.setattr(execute, "backward", lambda *args: found.append(args[-1]))
    operator = sys.modules["jfi.ops.jagged_attention"]
    operator._forward(x, prepared)
    for _ in range(2):
        operator._backward(packed, None, x, *results, [True] * 5, prepared)
    assert found[0] is offsets and found[1] is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(execute, "forward", lambda x, chosen: (*results, mock.Mock(is_cuda=True)))
    operator._forward(x, prepared)
    operator._backward(packed, None, x, *results, [True] * 5, prepared)
    assert found[2] is None


#: By operator and pass: launches, allocations, descriptors, and calls of functions of jfi.
COUNTS = {
    ("jagged_attention", "forward"): (2, 3, 3, 52),
    ("jagged_attention", "backward"): (2, 4, 4, 30),
    ("target_attention", "forward"): (2, 3, 0, 46),
    ("target_attention", "backward"): (2, 4, 0, 28),
}


@pytest.mark.parametrize("kind", ["jagged_attention", "target_attention"])
def test_calls_of_both_passes(kind, monkeypatch):
    """As planned for an H200, where nothing runs: the second call, which finds what the first one has prepared."""
    launches = []
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *args: launches.append(args))
    monkeypatch.setattr(plan, "device_of", lambda _: plan.H200)
    monkeypatch.setattr(checks, "interprets", lambda: True)
    monkeypatch.setattr(checks, "may_read", lambda _: False)  # as offsets on a GPU
    tensors = inputs("cpu", 600, torch.bfloat16)
    grad, found = torch.ones_like(attend(kind, *tensors)[0]), Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found[frame.f_code.co_name] += 1
            found["calls"] += 1
        elif event == "c_call" and argument.__name__ in ALLOCATIONS:
            found["allocations"] += 1

    def counted(function):
        found.clear(), launches.clear()
        sys.setprofile(count)
        try:
            result = function()
        finally:
            sys.setprofile(None)
        descriptors = found["tensor_descriptor"]
        return result, (len(launches), found["allocations"], descriptors, found["calls"])

    for _ in range(2):
        (out, leaves), forward = counted(lambda: attend(kind, *tensors))
        _, backward = counted(lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, grad))
    for number, most in zip(forward + backward, COUNTS[kind, "forward"] + COUNTS[kind, "backward"], strict=True):
        assert number <= most, (forward, backward)
