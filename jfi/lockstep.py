"""PyTorch, fbgemm and TorchRec are built for one another: a wrong pair ends in an undefined symbol inside an import.

Importing this module, before the first import of TorchRec, says in one line what to install instead.
"""

from importlib.metadata import PackageNotFoundError, version

#: torch -> (fbgemm-gpu or fbgemm-gpu-cpu, torchrec), major.minor
LOCKSTEP = {"2.11": ("1.6", "1.6"), "2.12": ("1.7", "1.7"), "2.13": ("1.8", "1.8")}


def _minor(package: str) -> str | None:
    try:
        return ".".join(version(package).split(".")[:2])
    except PackageNotFoundError:
        return None


def check() -> None:
    """Raise ImportError, naming the version to install, unless torch, fbgemm and TorchRec fit together.

    A torch that the table does not know (a nightly, a newer release) is left to fbgemm's own loading.
    """
    torch = _minor("torch")
    if torch not in LOCKSTEP:
        return
    want_fbgemm, want_torchrec = LOCKSTEP[torch]
    gpu, cpu = _minor("fbgemm-gpu"), _minor("fbgemm-gpu-cpu")
    package = "fbgemm-gpu-cpu" if cpu and not gpu else "fbgemm-gpu"
    if gpu and cpu:
        raise ImportError(
            "fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other: uninstall both, then "
            f"pip install fbgemm-gpu-cpu=={want_fbgemm}.0 (no GPU) or fbgemm-gpu=={want_fbgemm}.0"
        )
    if (gpu or cpu) != want_fbgemm:
        raise ImportError(
            f"torch {version('torch')} needs {package} {want_fbgemm}, found {gpu or cpu or 'none'}: "
            f"pip install {package}=={want_fbgemm}.0"
        )
    if _minor("torchrec") != want_torchrec:
        raise ImportError(
            f"torch {version('torch')} needs torchrec {want_torchrec}, found {_minor('torchrec') or 'none'}: "
            f"pip install --no-deps torchrec=={want_torchrec}.0"
        )


check()
