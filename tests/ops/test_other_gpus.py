"""Plans for GPUs that this host need not have: what they know of a device, and that their kernels fit it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ops.overrides import override

import jfi.ops
from jfi.kernels import plan
from jfi.kernels.plan import A100, B200, H100, H200, L4, MI300X, MI350X, RTX3090, RTX4090, RTX5090, Split

DEVICES = (A100, RTX3090, L4, RTX4090, H100, H200, B200, RTX5090, MI300X, MI350X)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def plans(device, dtype, width):
    """Plans of all families of target attention and of jagged attention."""

    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    offsets = empty(65, dtype=torch.int64)
    for num_queries in (1, 8, 17, 64, 100):
        for own_values in (False, True):
            for max_seqlen in (None, 200):
                key = empty(20_000, 1, width)
                yield jfi.ops.explain(
                    jfi.ops.target_attention,
                    empty(64, num_queries, 1, width),
                    key,
                    key if own_values else None,
                    offsets=offsets,
                    max_seqlen=max_seqlen,
                    device=device,
                )
    for num_kv_heads in (1, 4):
        inputs = empty(20_000, 4, width), empty(20_000, num_kv_heads, width)
        yield jfi.ops.explain(jfi.ops.jagged_attention, *inputs, query_offsets=offsets, device=device)
    digits = empty(20_000, -(-width // 16), dtype=torch.int32)
    yield jfi.ops.explain(jfi.ops.digit_attention, empty(64, 1, 4, width), digits, offsets=offsets, device=device)


def text(chosen):
    """A plan without its device."""
    return "\n".join(line for line in str(chosen).splitlines() if not line.startswith("  device"))


@pytest.mark.parametrize("device", [H100, H200, B200, A100], ids=lambda x: x.arch)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 64, 100, 128, 256])
def test_gpus_with_much_shared_memory_have_the_tiles_that_were_measured(device, dtype, width):
    found = [text(one) for one in plans(device, dtype, width)]
    with override(SHARED_MEMORY=dict.fromkeys(plan.SHARED_MEMORY, (0, 0, 0))):
        assert found == [text(one) for one in plans(device, dtype, width)]


def test_the_float32_backward_fits_the_tensor_memory_of_blackwell():
    """With tiles of 64 x 64 the keys' gradient takes 624 columns at a width of 64, and an SM has 512."""
    for device, tiles in ((B200, (32, 32)), (H200, (64, 64))):
        *_, jagged, _ = plans(device, torch.float32, 64)
        assert {(x.block_m, x.block_n) for x in jagged.backward if x.block_n} == {tiles}


@pytest.mark.parametrize("device", DEVICES, ids=lambda x: x.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 100, 256, 512])
def test_one_sweep_has_all_query_rows_in_its_tile_and_tables_of_tiles_have_their_size(device, dtype, width):
    for chosen in plans(device, dtype, width):
        assert chosen.problem.device is device and f"  device: {device}" in str(chosen).splitlines()
        for kernel in chosen.forward + chosen.backward:
            assert kernel.num_stages >= 1 and (kernel.max_registers is None or not device.is_amd)
        if chosen.family == "target_multi_tile":
            dquery, *dhistory = chosen.backward
            assert dquery.split is Split.CHUNKS and dquery.options["TILE_ROWS"] == sum(x.block_n for x in dhistory)
            assert dhistory or dquery.block_m >= chosen.problem.padded_queries
            assert not dquery.options["BY_TMA"] or device.capability >= (9, 0)


def test_less_shared_memory_means_smaller_tiles():
    def dquery(device):
        *_, chosen = (x for x in plans(device, torch.float16, 256) if x.family == "target_multi_tile")
        kernel = chosen.backward[0]
        return kernel.block_m, kernel.block_n, kernel.num_stages

    assert dquery(H200) == (64, 32, 2) and dquery(L4) == (64, 16, 2) and dquery(MI300X) == (32, 16, 2)


def test_precision_follows_the_device():
    """3xTF32 takes more shared memory than float32; AMD's matrix cores take float32 itself."""
    by_width = {
        width: [next(plans(x, torch.float32, width)).problem.precision for x in DEVICES] for width in (128, 256)
    }
    amd = ["ieee", "ieee"]
    assert by_width[128] == ["tf32x3"] * 8 + amd
    assert by_width[256] == ["tf32x3", *["ieee"] * 3, *["tf32x3"] * 3, "ieee", *amd]
    attention_spec = pytest.importorskip("jfi.kernels.common.launch").attention_spec
    for device in (MI300X, MI350X):
        chosen = next(plans(device, torch.float16, 64))
        assert attention_spec(chosen.problem, chosen.forward[0]).sum_precision.value == "ieee"


def test_a_device_is_described_by_its_properties(monkeypatch):
    monkeypatch.setattr(plan, "interprets", lambda: False)
    properties = SimpleNamespace(
        name="NVIDIA L4", major=8, minor=9, multi_processor_count=58, shared_memory_per_block_optin=99 * 1024
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with override():
        assert plan.device_of(torch.device("cuda", 0)) == L4
        assert str(L4) == "NVIDIA L4 (sm_89), 58 SMs, 99 KB of shared memory per program"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(
        name="AMD MI300X",
        gcnArchName="gfx942:sramecc+:xnack-",
        multi_processor_count=304,
        shared_memory_per_block=64 * 1024,
    )
    with override():
        assert plan.device_of(torch.device("cuda", 0)) == MI300X and MI300X.capability == (0, 0)
        assert str(MI300X) == "AMD MI300X (gfx942), 304 CUs, 64 KB of shared memory per program"
    assert str(plan.Device("cuda", "sm_90", 132, name="any")) == "any (sm_90), 132 SMs"  # no limit of shared memory
    assert (RTX5090.capability, B200.capability, H100.capability) == ((12, 0), (10, 0), (9, 0))


FEW = ["--dtypes", "float16", "--widths", "64", "--kernels", "multi_tile_fwd|sid_words"]
MANY = ["--dtypes", "float32", "float16", "--widths", "100", "256"]


@pytest.mark.parametrize(
    "options",
    [["L4", "MI300X", *FEW], pytest.param(["L4", "B200", "MI300X", *MANY], marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_kernels_compile_and_fit(options):
    """In a process of its own: under the interpreter Triton's library cannot be compiled."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    path = Path(__file__).with_name("compile_kernels.py")
    command = [sys.executable, str(path), "--devices", *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "target_attention_multi_tile_fwd" in run.stdout
