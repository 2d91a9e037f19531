"""The versions that runs and artifacts record."""

import subprocess

import torch

import jfi
from jfi.utils.versions import commit_of, versions


def test_the_versions_are_those_of_the_packages():
    found = versions()
    assert found["jfi"] == jfi.__version__ and torch.__version__.startswith(found["torch"])
    assert found["commit"] == commit_of(jfi.__path__[0])


def test_the_commit_is_that_of_the_checkout_with_the_package_at_its_top(tmp_path, monkeypatch):
    package, installed = tmp_path / "jfi", tmp_path / "venv/site-packages/jfi"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "file").touch()

    def git(*words: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *own, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert commit_of(str(package)) is None
    git("init")
    assert commit_of(str(package)) is None  # without a commit
    git("add", "jfi")
    git("commit", "-m", "a")
    git("tag", "-a", "v1", "-m", "a")
    assert len(found := commit_of(str(package))) == 12 and git("rev-parse", "HEAD").startswith(found)
    assert commit_of(str(installed)) is None  # an environment inside of another project's checkout
    (package / "file").write_text("changed")
    assert commit_of(str(package)) == f"{found}+"
    monkeypatch.setenv("PATH", "")
    assert commit_of(str(package)) is None
