"""PyTorch, fbgemm and TorchRec are built for one another: a wrong pair ends in an undefined symbol inside an import.

Importing this module, before the first import of TorchRec, says in one line what to install instead.
"""

from importlib.metadata import PackageNotFoundError, version

#: torch's major.minor -> (fbgemm-gpu or fbgemm-gpu-cpu, torchrec); major and minor must agree
LOCKSTEP = {"2.11": ("1.6.0", "1.6.1"), "2.12": ("1.7.0", "1.7.0"), "2.13": ("1.8.0", "1.8.0")}


def _found(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _minor(release: str | None) -> str | None:
    return release and ".".join(release.split(".")[:2])


def check() -> None:
    """Raise ImportError, naming the version to install, unless torch, fbgemm and TorchRec fit together.

    A torch that the table does not know (a nightly, a newer release) is left to fbgemm's own loading.
    """
    torch = _minor(_found("torch"))
    if torch not in LOCKSTEP:
        return
    fbgemm, torchrec = LOCKSTEP[torch]
    gpu, cpu = _found("fbgemm-gpu"), _found("fbgemm-gpu-cpu")
    package = "fbgemm-gpu-cpu" if not gpu and (cpu or "+cpu" in version("torch")) else "fbgemm-gpu"
    if gpu and cpu:
        raise ImportError(
            "fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other: uninstall both, then "
            f"pip install fbgemm-gpu-cpu=={fbgemm} (no GPU) or fbgemm-gpu=={fbgemm}"
        )
    if _minor(gpu or cpu) != _minor(fbgemm):
        raise ImportError(
            f"torch {version('torch')} needs {package} {fbgemm}, found {gpu or cpu or 'none'}: "
            f"pip install {package}=={fbgemm}"
        )
    if _minor(_found("torchrec")) != _minor(torchrec):
        raise ImportError(
            f"torch {version('torch')} needs torchrec {torchrec}, found {_found('torchrec') or 'none'}: "
            f"pip install --no-deps torchrec=={torchrec}"
        )


check()
