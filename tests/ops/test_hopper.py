"""What of Hopper's kernels can be told without a Hopper: that they compile for it, and how they are launched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from ops.compile_kernels import attend, tensors
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.jagged_attention import sm90 as jagged_attention_hopper
from jfi.kernels.jagged_attention import sm90_primitives as hopper


@pytest.fixture
def launches(monkeypatch):
    """(launcher, grid, tensors, numbers, descriptors) of every kernel that would be launched."""
    calls = []
    monkeypatch.setattr(Launcher, "__call__", lambda *args: calls.append(args))
    monkeypatch.setattr(jagged_attention_hopper, "multiprocessors", lambda device: 132)
    return calls


def test_the_kernels_compile():
    """In a process of its own: under the interpreter Triton's library cannot be compiled."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    path = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("heads", "groups"), [(1, 4), (4, 1)])
def test_a_descriptor_is_what_its_class_would_make(heads, groups):
    x = tensors(10, groups, 64)[0 if heads > 1 else 1]
    flat = x.view(-1, 64) if heads > 1 else x.view(10, -1)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    expected = TensorDescriptor.from_tensor(flat, [64, 64], layout)
    got = hopper.described(x, 64, heads)
    assert got.base.data_ptr() == expected.base.data_ptr() and got.base.dtype == expected.base.dtype
    for field in ("shape", "strides", "block_shape", "layout", "padding"):
        assert getattr(got, field) == getattr(expected, field), field


def test_one_schedule_serves_both_sweeps_of_self_attention(launches):
    attend(*tensors(300, 4, 64))
    # Forward: schedule, kernel.  Backward: schedule, two sweeps.
    assert len(launches) == 5
    attend(*tensors(300, 1, 64))
    assert len(launches) == 11


def test_what_is_served():
    def served(query, key, value, bias=None, scale=0.125):
        return jagged_attention_hopper.serves(query, key, value, bias, scale)

    query, key, value = tensors(10, 4, 64)
    assert served(query, key, value) and served(query, key, None) and served(query, key, value, torch.zeros(10, 4))
    assert served(query, key[:, :1].contiguous(), None)
    assert not served(query, key[:, :1].contiguous(), None, torch.zeros(10, 4))
    assert not served(query.float(), key.float(), None)
    assert (
        not served(*tensors(10, 2, 64)) and not served(*tensors(10, 4, 96)) and not served(query, key, value[..., :32])
    )
    assert not served(query, key, value, scale=0.0) and not served(query, key, value, scale=-1.0)
    assert not served(query, torch.zeros(10 * 256 + 1).half()[1:].view(10, 4, 64), value)
