"""Versions of the code, for what runs and artifacts record."""

import subprocess
from pathlib import Path

import torch

import jfi


def versions() -> dict[str, str | None]:
    """Returns the versions of jfi and torch, and the commit of jfi's checkout, None where it is installed."""
    return {"jfi": jfi.__version__, "torch": torch.__version__.split("+")[0], "commit": commit_of(jfi.__path__[0])}


def commit_of(package: str) -> str | None:
    """Returns the commit of the git checkout that has a package's folder at its top, None if there is none or no git.

    A checkout with changed files has "+" behind the commit.
    """
    if not (root := Path(package).parent).joinpath(".git").exists():
        return None
    command = ["git", "-C", root, "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
