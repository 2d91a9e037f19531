"""Who may import whom, each in a fresh process: kernels <- ops <- modules <- models <- training; data beside models.

Serving has two sides: what exports stands on models and data, what answers requests on nothing but itself.
"""

import subprocess
import sys
from pathlib import Path

import pytest

#: What must not have been imported after importing the first.
FORBIDDEN = {
    "jfi": {"torch", "torchrec", "triton", "fbgemm_gpu"},
    "jfi.ops": {
        "torchrec",
        "fbgemm_gpu",
        "triton",
        "jfi.modules",
        "jfi.models",
        "jfi.data",
        "jfi.training",
        "jfi.kernels",
    },
    "jfi.modules": {"jfi.models", "jfi.data", "jfi.training"},
    "jfi.models": {"jfi.data", "jfi.training"},
    "jfi.data": {"jfi.modules", "jfi.models", "jfi.training", "jfi.ops"},
    "jfi.serving.export": {"jfi.data", "jfi.training", "aiohttp"},
    "jfi.serving.request_fields": {"jfi.modules", "jfi.models", "jfi.training", "aiohttp"},
    "jfi.serving.scorer": {
        "torchrec",
        "fbgemm_gpu",
        "jfi.ops",
        "jfi.modules",
        "jfi.models",
        "jfi.data",
        "jfi.training",
    },
}


@pytest.mark.parametrize("module", FORBIDDEN)
def test_imports(module):
    script = f"import sys, {module}; print(*sorted(sys.modules), sep='\\n')"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not FORBIDDEN[module] & set(run.stdout.split())


@pytest.mark.parametrize("absent", ["triton", "torchrec", "fbgemm_gpu"])
def test_operators_work_where_other_packages_are_absent(absent):
    script = f"""
import sys
sys.modules[{absent!r}] = None
import torch, jfi.ops
x = torch.randn(2, 1, 1, 4, requires_grad=True)
jfi.ops.target_attention(x, torch.randn(5, 1, 4), offsets=torch.tensor([0, 2, 5])).sum().backward()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_kernels_are_imported_by_operators_alone():
    root = Path(__file__).parents[1] / "jfi"
    for path in root.rglob("*.py"):
        area = path.relative_to(root).parts[0]
        if area not in ("ops", "kernels"):
            assert "jfi.kernels" not in path.read_text(), f"{path} reaches past jfi.ops"
