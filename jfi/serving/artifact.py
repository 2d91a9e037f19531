"""The artifact: a folder that is whole or absent, and is checked before it is used.

artifact.json       what requests look like, what the model reads, limits and versions
vocabularies.json   by column its known values, whose ids are their places, from 1
tables.pt           the embedding tables
model.pt2           the dense part, a package of AOTInductor
checksums.json      SHA-256 of each of the others
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORMAT = 1
INFO, VOCABULARIES, TABLES, MODEL = "artifact.json", "vocabularies.json", "tables.pt", "model.pt2"
_CHECKSUMS = "checksums.json"


class ArtifactError(Exception):
    """An artifact that cannot be written or used, in one line."""


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A folder to write the files into; it gets its name and its checksums at the end, if nothing went wrong.

    Raises:
        ArtifactError: there is something of that name already.
    """
    if path.exists():
        raise ArtifactError(f"{path} exists already; name a new folder")
    torn = path.with_name(f".{path.name}.{os.getpid()}")
    torn.mkdir(parents=True)
    try:
        yield torn
        write_json(torn / _CHECKSUMS, {file.name: _checksum(file) for file in sorted(torn.iterdir())})
        for file in torn.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        torn.rename(path)
    finally:
        shutil.rmtree(torn, ignore_errors=True)


def read(path: Path) -> dict:
    """The contents of artifact.json, after a check of every file.

    Raises:
        ArtifactError: no artifact, one of another format, or a damaged one.
    """
    if not (path / _CHECKSUMS).is_file():
        raise ArtifactError(f"{path} is no artifact: {_CHECKSUMS} is missing")
    expected = read_json(path / _CHECKSUMS)
    for name in (INFO, VOCABULARIES, TABLES, MODEL):
        file = path / name
        if not file.is_file():
            raise ArtifactError(f"{path} is damaged: {name} is missing")
        if _checksum(file) != expected.get(name):
            raise ArtifactError(f"{path} is damaged: {name} is not what was written")
    info = read_json(path / INFO)
    if info["format"] != FORMAT:
        raise ArtifactError(f"{path} has format {info['format']}, this program reads {FORMAT}; export again")
    return info


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False))


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise ArtifactError(f"{path.parent} is damaged: {path.name} is not JSON") from None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
