"""PyTorch, fbgemm and TorchRec are built for one another: a wrong pair ends in an undefined symbol inside an import.

Importing this module, before the first import of TorchRec, says in one line what to install instead.
"""

from importlib.metadata import PackageNotFoundError, version

#: torch's major.minor -> (fbgemm-gpu or fbgemm-gpu-cpu, None before its release; releases of torchrec, newest first).
#: Major and minor must agree.
LOCKSTEP: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "2.11": ("1.6.0", ("1.6.1",)),
    "2.12": ("1.7.0", ("1.7.0",)),
    "2.13": ("1.8.0", ("1.9.2", "1.8.0")),
    "2.14": ("1.9.0", ("1.9.2",)),
    "2.15": (None, ("1.9.2",)),
}
NIGHTLIES = ("fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu")


def _found(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _minor(release: str | None) -> str | None:
    return release and ".".join(release.split(".")[:2])


def check() -> None:
    """Raise ImportError, naming the version to install, unless torch, fbgemm and TorchRec fit together.

    A torch that the table does not know (a nightly, a newer release) and a nightly fbgemm are left to fbgemm's own
    loading.
    """
    release = _found("torch") or ""
    torch = _minor(release)
    if torch not in LOCKSTEP or ".dev" in release:
        return
    fbgemm, torchrecs = LOCKSTEP[torch]
    _check_fbgemm(f"torch {version('torch')}", fbgemm)
    found = _found("torchrec")
    if _minor(found) not in map(_minor, torchrecs):
        raise ImportError(
            f"torch {version('torch')} needs torchrec {' or '.join(torchrecs)}, found {found or 'none'}: "
            f"pip install --no-deps torchrec=={torchrecs[0]}"
        )


def _check_fbgemm(torch: str, fbgemm: str | None) -> None:
    gpu, cpu = _found("fbgemm-gpu"), _found("fbgemm-gpu-cpu")
    package = "fbgemm-gpu-cpu" if not gpu and (cpu or "+cpu" in version("torch")) else "fbgemm-gpu"
    if not gpu and not cpu and any(map(_found, NIGHTLIES)):
        return
    if not fbgemm:
        newest, (fbgemm, torchrecs) = [(torch, fit) for torch, fit in LOCKSTEP.items() if fit[0]][-1]
        raise ImportError(
            f"no release of fbgemm fits {torch}, found {gpu or cpu or 'none'}: "
            f"pip install 'torch=={newest}.*' {package}=={fbgemm}, then pip install --no-deps torchrec=={torchrecs[0]}"
        )
    if gpu and cpu:
        raise ImportError(
            "fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other: uninstall both, then "
            f"pip install fbgemm-gpu-cpu=={fbgemm} (no GPU) or fbgemm-gpu=={fbgemm}"
        )
    if _minor(gpu or cpu) != _minor(fbgemm):
        raise ImportError(
            f"{torch} needs {package} {fbgemm}, found {gpu or cpu or 'none'}: pip install {package}=={fbgemm}"
        )


check()
