"""A wrong pair of torch and fbgemm is one line that says what to install."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jfi.utils import lockstep

FITTING = {"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0"}


def pretend(monkeypatch, installed: dict[str, str]) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise lockstep.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(lockstep, "version", version)


@pytest.mark.parametrize(
    "installed",
    [FITTING, {"torch": "2.11.0+cu130", "fbgemm-gpu": "1.6.0", "torchrec": "1.6.1"}, {"torch": "2.99.0"}],
)
def test_fitting_versions_pass(monkeypatch, installed):
    pretend(monkeypatch, installed)
    lockstep.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"fbgemm-gpu-cpu": "1.6.0"},
            "torch 2.13.0.* needs fbgemm-gpu-cpu 1.8.0, found 1.6.0: pip install fbgemm-gpu-cpu==1.8.0",
        ),
        (
            {"fbgemm-gpu-cpu": None},
            "torch 2.13.0.* needs fbgemm-gpu-cpu 1.8.0, found none: pip install fbgemm-gpu-cpu==1.8.0",
        ),
        (
            {"fbgemm-gpu-cpu": None, "torch": "2.13.0"},
            "torch 2.13.0 needs fbgemm-gpu 1.8.0, found none: pip install fbgemm-gpu==1.8.0",
        ),
        (
            {"torchrec": "1.6.1"},
            "torch 2.13.0.* needs torchrec 1.8.0, found 1.6.1: pip install --no-deps torchrec==1.8.0",
        ),
        ({"fbgemm-gpu": "1.8.0"}, "fbgemm-gpu and fbgemm-gpu-cpu are both installed"),
    ],
)
def test_a_wrong_pair_is_named(monkeypatch, change, message):
    installed = {name: found for name, found in (FITTING | change).items() if found}
    pretend(monkeypatch, installed)
    with pytest.raises(ImportError, match=message) as error:
        lockstep.check()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "statement", ["import jfi.modules", "import jfi.models", "import jfi.data", "import jfi.training"]
)
def test_every_package_over_torchrec_checks_first(statement):
    script = f"""
import importlib.metadata, sys
found = importlib.metadata.version
importlib.metadata.version = lambda package: "0.1.0" if package.startswith("fbgemm") else found(package)
sys.modules["torchrec"] = None
{statement}
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "fbgemm" in run.stderr.splitlines()[-1] and run.stderr.splitlines()[-1].startswith("ImportError: ")


def test_the_extras_and_the_makefile_install_what_fits():
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    fbgemm, torchrec = lockstep.LOCKSTEP["2.13"]
    assert {"torch==2.13.0", f"fbgemm-gpu=={fbgemm}", f"torchrec=={torchrec}"} <= set(extras["cuda"])
    assert {"torch==2.13.0", f"fbgemm-gpu-cpu=={fbgemm}"} <= set(extras["cpu"])
    assert f"torchrec=={torchrec}" in (root / "Makefile").read_text()
