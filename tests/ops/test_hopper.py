"""What of the Hopper kernels can be tested without a Hopper GPU: that they compile, how they are launched, and when."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from ops.launches import attend, attend_by_time, tensors
from ops.overrides import override, splits
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import jfi.ops
from jfi.kernels import plan
from jfi.kernels.common.combine import SplitPartials
from jfi.kernels.common.launch import Launcher
from jfi.kernels.jagged_attention import sm90_primitives, visibility
from jfi.kernels.plan import A100, H200, plan_jagged_attention
from jfi.ops.dispatch import operators
from jfi.utils.operands import JaggedAttentionInputs, TargetAttentionInputs


@pytest.mark.parametrize("options", [[], pytest.param(["--every"], marks=pytest.mark.slow)], ids=["ends", "every"])
def test_the_kernels_compile(options):
    """In a process of its own: under the interpreter Triton's library cannot be compiled."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    path = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run([sys.executable, str(path), *options], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 4), (4, 1)])
def test_a_descriptor_is_what_its_class_would_make(num_heads, num_kv_heads):
    x = tensors(10, num_kv_heads, 64)[0 if num_heads > 1 else 1]
    flat = x.view(-1, 64) if num_heads > 1 else x.view(10, -1)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    expected = TensorDescriptor.from_tensor(flat, [64, 64], layout)
    got = sm90_primitives.tensor_descriptor(x, 64, num_heads)
    assert got.base.data_ptr() == expected.base.data_ptr() and got.base.dtype == expected.base.dtype
    for field in ("shape", "strides", "block_shape", "layout", "padding"):
        assert getattr(got, field) == getattr(expected, field), field


def test_one_schedule_serves_both_kernels_of_self_attention(monkeypatch):
    launches = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, *args: launches.append(self.kernel.fn.__name__))
    forward = ["_schedule_kernel", "jagged_attention_sm90_fwd_kernel", "_schedule_kernel"]
    dquery, dkey = "jagged_attention_sm90_dquery_kernel", "jagged_attention_sm90_dkey_kernel"
    attend(*tensors(300, 4, 64))
    assert launches == [*forward, dquery, dkey]
    launches.clear()
    attend(*tensors(300, 1, 64))
    assert launches == [*forward, dquery, "_schedule_kernel", dkey]


def test_a_part_of_the_query_rows_has_its_sums_by_bucket_at_a_time(monkeypatch):
    """As in the kernels for any GPU, whose test runs these too where there is a Hopper GPU."""
    launches = []

    def record(self, grid, given, numbers=(), descriptors=()):
        launches.append((self.kernel.fn.__name__, given, numbers))

    monkeypatch.setattr(Launcher, "__call__", record)
    monkeypatch.setattr(visibility, "MAX_BUCKET_SUMS", 100 * 4 * 32)
    attend_by_time(*tensors(300, 4, 64), "ages", H200)
    parts = [(given[2][2], numbers[2]) for name, given, numbers in launches if "dquery" in name]
    assert [sums.shape for sums, _ in parts] == [(100, 4, 32)] * 3
    assert [first for _, first in parts] == [0, 100, 200] and len({sums.data_ptr() for sums, _ in parts}) == 1
    schedules = [given for name, given, _ in launches if name == "_schedule_kernel"]
    # Of the forward, of the parts, and of the keys.
    assert [given[0].tolist() for given in schedules] == [
        [0, 150, 300],
        *([0, 100, 100], [100, 150, 200], [200, 200, 300]),
        [0, 150, 300],
    ]


def test_splits_are_combined_after_the_forward(monkeypatch):
    """Each of a tile's splits is a work tile; the kernels themselves do not run."""
    launches = []

    def record(self, grid, given, numbers=(), descriptors=()):
        launches.append((self.kernel.fn.__name__, given, numbers))

    monkeypatch.setattr(Launcher, "__call__", record)
    for num_kv_heads in (1, 4):
        launches.clear()
        with override(**splits(4)):
            attend(*tensors(300, num_kv_heads, 64))
        names = [name for name, _, _ in launches]
        assert names[:3] == ["_schedule_kernel", "jagged_attention_sm90_fwd_kernel", "_combine_splits_kernel"]
        (_, given, numbers), (_, combined, _) = launches[1:3]
        assert numbers[0] == 4 * num_kv_heads * given[0].shape[0]
        values, lse, out, out_lse = combined
        assert values.shape == (300 * 4 // num_kv_heads, 4, num_kv_heads, 64) and lse.shape == values.shape[:3]
        assert given[2] is values and given[3] is lse
        assert (out.shape, out_lse.shape) == ((300, 4, 64), (300, 4))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 1), (3, 3)])
@pytest.mark.parametrize("num_splits", [2, 3, 8])
def test_combining_splits(num_splits, num_heads, num_kv_heads, device):
    """Softmax over the splits' log-sum-exps; of an empty split no value is read, and without any the output is 0."""
    out = torch.full((37, num_heads, 64), torch.nan, device=device).half()
    lse = torch.full((37, num_heads), torch.nan, device=device)
    partials = SplitPartials(out, num_kv_heads, num_splits)
    partials.values.normal_()
    partials.lse.normal_().mul_(30)
    empty = torch.rand_like(partials.lse) < 0.3
    empty[5] = True
    partials.lse[empty], partials.values[empty] = -torch.inf, torch.nan
    partials.combine(out, lse)
    weight = partials.lse.double().softmax(1).nan_to_num().unsqueeze(3)
    expected = (weight * partials.values.double().nan_to_num()).sum(1).view(out.shape)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(lse, partials.lse.double().logsumexp(1).view(lse.shape).float())


@pytest.mark.parametrize("value", ["own", "shared"])
def test_target_attention_hands_many_queries_to_them(monkeypatch, value):
    """Each gradient comes back in its place; the kernels themselves do not run."""
    launches = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, *args: launches.append(self.kernel.fn.__name__))
    query, key = torch.randn(600, 256, 2, 64).half(), torch.randn(1200, 2, 64).half()
    own = torch.randn(1200, 2, 64).half() if value == "own" else None
    bias = torch.randn(1200, 2).half()
    x = TargetAttentionInputs(query, key, own, torch.arange(601) * 2, bias, None, None, None, [], [], 0.125, None)
    monkeypatch.setattr(plan, "device_of", lambda device: H200)
    out, lse = operators.target_attention_fwd(*x, "triton")
    assert (out.shape, lse.shape) == (query.shape, query.shape[:3])
    needed = [True, True, own is not None, True, False]
    grads = operators.target_attention_bwd(torch.randn_like(out), None, *x, out, lse, needed, "triton")
    assert [grad.shape for grad in grads] == [y.shape for y in (query, key, own, bias) if y is not None]
    assert sum("sm90" in name for name in launches) == 3


def plan_of(query, key, value=None, key_bias=None, scale=None, device=H200, **times):
    offsets = torch.tensor([0, query.shape[0]])
    rest = {"query_offsets": offsets, "key_bias": key_bias, "scale": scale, "device": device} | times
    return jfi.ops.explain(jfi.ops.jagged_attention, query, key, value, **rest)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("value", None),
        ("value = key", None),
        ("bias", None),
        ("one key head", None),
        ("bias, one key head", "query heads with a bias share a key head"),
        ("float32", "torch.float32 is not half precision"),
        ("two key heads", "several query heads share each of several key heads"),
        ("width 96", "keys and values are not both 64 or 128 wide"),
        ("narrow value", "keys and values are not both 64 or 128 wide"),
        ("scale 0", "scale is at most 1e-30"),
        ("times", None),
        ("times and a bias by key", "a bias by key together with times or a bias by bucket"),
        ("scale -1", "scale is at most 1e-30"),
        ("A100", "no Hopper GPU"),
    ],
)
def test_when_the_hopper_kernels_run(case, reason):
    query, key, value = tensors(10, 4, 64)
    one, bias = key[:, :1].contiguous(), torch.zeros(10, 4).half()
    times = dict.fromkeys(("query_time", "key_time"), torch.arange(10)) | {"time_bias": torch.zeros(8, 4).half()}
    plan = {
        "value": lambda: plan_of(query, key, value),
        "value = key": lambda: plan_of(query, key),
        "bias": lambda: plan_of(query, key, value, bias),
        "one key head": lambda: plan_of(query, one),
        "bias, one key head": lambda: plan_of(query, one, None, bias),
        "float32": lambda: plan_of(query.float(), key.float()),
        "two key heads": lambda: plan_of(*tensors(10, 2, 64)),
        "width 96": lambda: plan_of(*tensors(10, 4, 96)),
        "narrow value": lambda: plan_of(query, key, value[..., :32]),
        "scale 0": lambda: plan_of(query, key, value, scale=0.0),
        "times": lambda: plan_of(query, key, value, **times),
        "times and a bias by key": lambda: plan_of(query, key, value, bias, **times),
        "scale -1": lambda: plan_of(query, key, value, scale=-1.0),
        "A100": lambda: plan_of(query, key, value, device=A100),
    }[case]()
    assert plan.family == ("jagged_sm90" if reason is None else "jagged_triton")
    assert reason is None or plan.reason == f"no sm90 kernels: {reason}"


def test_tensors_that_tma_cannot_load():
    query, key, _ = tensors(10, 4, 64)
    unaligned = torch.zeros(10 * 256 + 1).half()[1:].view(10, 4, 64)
    offsets = torch.tensor([0, 10])
    for inputs in ((unaligned, key, key), (query, unaligned, key), (query, key, unaligned)):
        x = JaggedAttentionInputs(*inputs, offsets, offsets, *(None,) * 5, 0.125, None, None, False)
        plan = plan_jagged_attention(x, "triton", H200)
        assert plan.family == "jagged_triton" and "16 bytes" in plan.reason


@pytest.mark.parametrize(("width", "longest"), [(64, 768), (128, 384)])
def test_short_histories_have_smaller_tiles_of_keys(width, longest):
    short, long = (plan_of(*tensors(rows, 4, width)).forward[0] for rows in (longest, longest + 1))
    assert (short.block_n, long.block_n) == (64, 128)
    assert short.programs_per_sm > long.programs_per_sm
