"""A wrong pair of torch and fbgemm is one line that says what to install."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
    [
        FITTING,
        FITTING | {"torchrec": "1.9.2"},
        {"torch": "2.11.0+cu130", "fbgemm-gpu": "1.6.0", "torchrec": "1.6.1"},
        {"torch": "2.12.1", "fbgemm-gpu": "1.7.0", "torchrec": "1.7.0"},
        {"torch": "2.14.1", "fbgemm-gpu": "1.9.0", "torchrec": "1.9.2"},
        {"torch": "2.15.0", "fbgemm-gpu-nightly-cpu": "2026.10.16", "torchrec": "1.9.2"},
        {"torch": "2.99.0"},
        {"torch": "2.15.0.dev20260901", "fbgemm-gpu-nightly-cpu": "2026.9.22", "torchrec-nightly": "2026.9.1"},
    ],
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
            "torch 2.13.0.* needs torchrec 1.9.2 or 1.8.0, found 1.6.1: pip install --no-deps torchrec==1.9.2",
        ),
        ({"fbgemm-gpu": "1.8.0"}, "fbgemm-gpu and fbgemm-gpu-cpu are both installed"),
        (
            {"torch": "2.14.1"},
            "torch 2.14.1 needs fbgemm-gpu-cpu 1.9.0, found 1.8.0: pip install fbgemm-gpu-cpu==1.9.0",
        ),
        (
            {"torch": "2.14.1", "fbgemm-gpu-cpu": "1.9.0"},
            "torch 2.14.1 needs torchrec 1.9.2, found 1.8.0: pip install --no-deps torchrec==1.9.2",
        ),
        (
            {"torch": "2.15.0", "fbgemm-gpu-cpu": "1.9.0"},
            r"no release of fbgemm fits torch 2.15.0, found 1.9.0: pip install 'torch==2.14.\*' fbgemm-gpu-cpu==1.9.0, "
            "then pip install --no-deps torchrec==1.9.2",
        ),
        (
            {"torch": "2.15.0", "fbgemm-gpu-cpu": None, "fbgemm-gpu-nightly-cpu": "2026.10.16"},
            "torch 2.15.0 needs torchrec 1.9.2, found 1.8.0: pip install --no-deps torchrec==1.9.2",
        ),
    ],
)
def test_a_wrong_pair_is_named(monkeypatch, change, message):
    installed = {name: found for name, found in (FITTING | change).items() if found}
    pretend(monkeypatch, installed)
    with pytest.raises(ImportError, match=message) as error:
        lockstep.check()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "statement",
    ["import jfi.modules", "import jfi.models", "from jfi.data import load_dataset", "from jfi.training import train"],
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


ROOT = Path(__file__).parents[1]


def extra(name: str) -> dict[str, Requirement]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {requirement.name: requirement for requirement in map(Requirement, extras[name])}


def next_minor(release: str) -> str:
    major, minor, *_ = release.split(".")
    return f"{major}.{int(minor) + 1}.0"


@pytest.mark.parametrize(("name", "build"), [("cuda", "fbgemm-gpu"), ("cpu", "fbgemm-gpu-cpu")])
def test_an_extra_allows_each_row_and_nothing_newer(name, build):
    requirements = extra(name)
    rows = [(torch, fbgemm, torchrecs) for torch, (fbgemm, torchrecs) in lockstep.LOCKSTEP.items() if fbgemm]
    for torch, fbgemm, torchrecs in rows:
        assert f"{torch}.0" in requirements["torch"].specifier
        assert fbgemm in requirements[build].specifier
        assert name == "cpu" or all(torchrec in requirements["torchrec"].specifier for torchrec in torchrecs)
    torch, fbgemm, torchrecs = rows[-1]
    assert next_minor(torch) not in requirements["torch"].specifier
    assert next_minor(fbgemm) not in requirements[build].specifier
    assert name == "cpu" or next_minor(torchrecs[0]) not in requirements["torchrec"].specifier


def test_the_makefile_installs_a_row_that_the_extra_allows():
    pinned = dict(re.findall(r"([\w-]+)==([\d.]+)", (ROOT / "Makefile").read_text()))
    fbgemm, torchrecs = lockstep.LOCKSTEP[".".join(pinned["torch"].split(".")[:2])]
    assert (pinned["fbgemm-gpu-cpu"], pinned["torchrec"]) == (fbgemm, torchrecs[0])
    requirements = extra("cpu")
    assert all(pinned[name] in requirements[name].specifier for name in ("torch", "triton", "fbgemm-gpu-cpu"))
