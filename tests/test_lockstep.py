"""A wrong pair of torch and fbgemm is one line that says what to install."""

import pytest

from jfi import lockstep

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
            "torch 2.13.0.* needs fbgemm-gpu-cpu 1.8, found 1.6: pip install fbgemm-gpu-cpu==1.8.0",
        ),
        ({"fbgemm-gpu-cpu": None}, "torch 2.13.0.* needs fbgemm-gpu 1.8, found none: pip install fbgemm-gpu==1.8.0"),
        ({"torchrec": "1.6.1"}, "torch 2.13.0.* needs torchrec 1.8, found 1.6: pip install --no-deps torchrec==1.8.0"),
        ({"fbgemm-gpu": "1.8.0"}, "fbgemm-gpu and fbgemm-gpu-cpu are both installed"),
    ],
)
def test_a_wrong_pair_is_named(monkeypatch, change, message):
    installed = {name: found for name, found in (FITTING | change).items() if found}
    pretend(monkeypatch, installed)
    with pytest.raises(ImportError, match=message) as error:
        lockstep.check()
    assert "\n" not in str(error.value)
