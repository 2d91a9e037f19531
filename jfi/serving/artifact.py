"""The artifact: a folder that is complete or absent, and that is verified before use.

artifact.json       the schema of requests, the inputs of the model, limits and versions
vocabularies.json   by column the known values; their ids count from 1 in this order
tables.pt           the embedding tables
model.pt2           the dense part of the model, an AOTInductor package
policy.json         of a run with `data.policy`, which events of a history are scored
checksums.json      SHA-256 of each of the other files
"""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jfi.files import naming

FORMAT = 2
INFO, VOCABULARIES, TABLES, MODEL = "artifact.json", "vocabularies.json", "tables.pt", "model.pt2"
POLICY = "policy.json"
_CHECKSUMS = "checksums.json"
#: Flags of /proc/cpuinfo for instructions that a compiler uses on its own under -march=native: of x86 and of ARM.
_INSTRUCTIONS = re.compile(
    r"s?sse\w*|avx\w*|amx\w*|fma|f16c|bmi\w*|abm|popcnt|movbe"
    r"|asimd\w*|sve\w*|i8mm|bf16|atomics|lrcpc|ilrcpc|sha3|fcma|mops|cssc"
)


class ArtifactError(Exception):
    """An artifact that cannot be written or used; the message is one line."""


def cpu_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """This CPU's architecture and the instructions that compiled code may need, which only Linux names."""
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = line[1].split() if line else []
    return [platform.machine(), *sorted(filter(_INSTRUCTIONS.fullmatch, flags))]


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Gives a temporary folder for the files; on success it gets its checksums and the name `path`.

    Raises:
        ArtifactError: `path` exists.
    """
    if path.exists():
        raise ArtifactError(f"{path} exists already; name a new folder")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        write_json(unfinished / _CHECKSUMS, {file.name: _checksum(file) for file in sorted(unfinished.iterdir())})
        for file in unfinished.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def read(path: Path) -> dict:
    """The contents of artifact.json, after the checksum of every file is verified.

    Raises:
        ArtifactError: not an artifact, one of another format, or a damaged one.
    """
    if not (path / _CHECKSUMS).is_file():
        raise ArtifactError(f"{path} is not an artifact: {_CHECKSUMS} is missing")
    expected = read_json(path / _CHECKSUMS)
    for name in (INFO, VOCABULARIES, TABLES, MODEL, *([POLICY] if POLICY in expected else [])):
        file = path / name
        if not file.is_file():
            raise ArtifactError(f"{path} is damaged: {name} is missing")
        if _checksum(file) != expected.get(name):
            raise ArtifactError(f"{path} is damaged: {name} does not match its checksum")
    info = read_json(path / INFO)
    if info["format"] != FORMAT:
        raise ArtifactError(f"{path} has format {info['format']}, but this version reads format {FORMAT}; export again")
    return info


def identity(path: Path) -> str:
    """12 digits that are the same for artifacts of the same files, and for no others."""
    return _checksum(path / _CHECKSUMS)[:12]


def write_json(path: Path, value: object) -> None:
    with naming(path):
        path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ArtifactError(f"{path.parent} is damaged: {path.name} is not JSON") from None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
