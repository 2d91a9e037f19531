"""The artifact: a folder that is complete or absent, and that is verified before use.

artifact.json       the schema of requests, the inputs of the model, limits and versions
vocabularies.json   by column the known values; their ids count from 1 in this order
tables.safetensors  the embedding tables; of one that grows also the raw id of each row, `<table>.ids`
model.pt2           the dense part of the model, an AOTInductor package
policy.json         of a run with `data.policy`, which events of a history are scored
SHA256SUMS          SHA-256 of each of the other files, which `sha256sum -c` reads

model.pt2 is machine code, which runs when it is loaded. Checksums inside the folder find damage; against files that
somebody else has put there the SHA-256 of SHA256SUMS helps, which the caller of `read` knows from elsewhere.
"""

import hashlib
import io
import os
import platform
import re
import stat
import tempfile
import uuid
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jfi.serving.schema import Inputs, Limits, Schema, Table
from jfi.utils.errors import InputError
from jfi.utils.files import SUMS, DamagedFileError, check_sum, parse_sums
from jfi.utils.files import sha256_of as file_sha256
from jfi.utils.json_files import read_json

FORMAT = 7
INFO, VOCABULARIES, TABLES, MODEL = "artifact.json", "vocabularies.json", "tables.safetensors", "model.pt2"
POLICY = "policy.json"
#: In the metadata of model.pt2, see `jfi.serving.scorer.shapes_of`.
SHAPES = "jfi.shapes"
#: Flags of /proc/cpuinfo for instructions that a compiler uses on its own under -march=native: of x86 and of ARM.
_INSTRUCTIONS = re.compile(
    r"s?sse\w*|avx\w*|amx\w*|fma|f16c|bmi\w*|abm|popcnt|movbe"
    r"|asimd\w*|sve\w*|i8mm|bf16|atomics|lrcpc|ilrcpc|sha3|fcma|mops|cssc"
)


class ArtifactError(InputError):
    """An artifact that cannot be written or used; the message is one line."""


def cpu_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """This CPU's architecture and the instructions that compiled code may need, which only Linux names."""
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = line[1].split() if line else []
    return [platform.machine(), *sorted(filter(_INSTRUCTIONS.fullmatch, flags))]


@dataclass(frozen=True)
class Format:
    """The format of an artifact, which every version can read."""

    format: int


@dataclass(frozen=True)
class Info(Format):
    """The contents of artifact.json.

    Args:
        trained: versions that the run has recorded, see `jfi.utils.versions`; None if it has none.
        device: that the dense part was compiled for.
        cpu: what `cpu_instructions` gave.
        padded: whether each request of a batch is padded to the longest.
        limits: the defaults of the server's limits.
        schema: of requests, without the vocabularies.
        calibration: a and b of each label, 1 and 0 of a regression; None if there are none.
        checkpoint: fingerprint of the run's parameters that are served as they are; None for others.
    """

    run: str | None
    trained: dict[str, str | None] | None
    versions: dict[str, str | None]
    exported: str
    device: Literal["cpu", "cuda"]
    gpu: str | None
    cpu: list[str]
    padded: bool
    quantization: Literal["float32", "int8"]
    tables: dict[str, Table]
    embedding_dim: int
    inputs: Inputs
    limits: Limits
    schema: Schema
    calibration: list[tuple[float, float]] | None
    checkpoint: str | None = None


def read(path: Path, sha256: Collection[str] | None = None) -> tuple[Info, dict[str, str]]:
    """Verifies the checksum of every file.

    Args:
        sha256: those of `sha256_of`, of the artifacts that may be used; None for any.

    Returns:
        The contents of artifact.json, with the vocabularies in its schema, and the SHA-256 of each file.

    Raises:
        ArtifactError: not an artifact, one of another format, a damaged one, or none of `sha256`.
    """
    if not (path / SUMS).is_file():
        hint = f"; did you mean '{path / 'artifact'}'?" if (path / "artifact" / SUMS).is_file() else ""
        raise ArtifactError(f"{path} is not an artifact: {SUMS} is missing{hint}")
    content = (path / SUMS).read_bytes()
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) not in sha256:
        raise ArtifactError(f"{path} has the SHA-256 {found}, which is not among those that may be served")
    try:
        sums = parse_sums(path / SUMS, content)
        for name in dict.fromkeys((INFO, *sums)):
            check_sum(path, name, sums)
        found = read_json(path / INFO, Format, ArtifactError).format
        if found != FORMAT:
            raise ArtifactError(f"{path} has format {found}, but this version reads format {FORMAT}; export again")
        info = read_json(path / INFO, Info, ArtifactError)
        for name in (VOCABULARIES, TABLES, MODEL, *([] if info.schema.policy is None else [POLICY])):
            if name not in sums:
                raise DamagedFileError(f"{path / SUMS} does not list {name}")
    except DamagedFileError as fault:
        raise ArtifactError(str(fault)) from None
    info.schema.vocabularies.update(read_json(path / VOCABULARIES, dict[str, list[str]], ArtifactError))
    return info, sums


def check_environment(path: Path, info: Info, tables_device: str | None) -> None:
    """Checks that an artifact can run on this machine, with the torch that is here; an ArtifactError says why not."""
    import torch

    made, here = info.versions.get("torch") or "of an unknown version", torch.__version__.split("+")[0]
    if made.split(".")[:2] != here.split(".")[:2]:
        raise ArtifactError(f"{path} was exported with torch {made}, but this is torch {here}; export again")
    if lacking := sorted(set(info.cpu) - set(cpu_instructions())):
        why = f"{', '.join(lacking)}, which this one lacks or does not name; export on a CPU without"
        raise ArtifactError(f"{path} was exported on a CPU with {why}")
    if tables_device == "cuda" and not torch.cuda.is_available():
        raise ArtifactError("--tables-device cuda: there is no GPU here")
    if info.device == "cuda":
        if not torch.cuda.is_available():
            raise ArtifactError(f"{path} was exported for a GPU, but there is none here; export with --device cpu")
        if (name := torch.cuda.get_device_name()) != info.gpu:
            raise ArtifactError(f"{path} was exported for {info.gpu}, but this GPU is {name}; export again")


def load_model(path: Path, sha256: str) -> Any:
    """Loads the dense part, a `torch._inductor` package, from the very bytes that are verified.

    Args:
        sha256: of model.pt2, as `read` gave it.

    Raises:
        ArtifactError: model.pt2 has changed since, or is no package whose files stay in one folder.
    """
    from torch._inductor import aoti_load_package

    content = (path / MODEL).read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ArtifactError(f"{path} is damaged: {MODEL} does not match its checksum")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as package:
            members = package.infolist()
    except zipfile.BadZipFile as error:
        raise ArtifactError(f"{path} is damaged: {MODEL}: {error}") from None
    for member in members:
        name = member.orig_filename
        leaves = name.startswith("/") or ".." in name.split("/") or any(one in name for one in "\\:\0")
        if leaves or stat.S_ISLNK(member.external_attr >> 16):  # torch unpacks any name
            raise ArtifactError(f"{path}: {MODEL} has the file {name!r}, which would be unpacked outside of its folder")
    # The name is known before there is a file, so that a signal at any moment leaves none.
    unpacked = Path(tempfile.gettempdir()) / f"jfi-model-{uuid.uuid4().hex}.pt2"
    try:
        with open(unpacked, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
        return aoti_load_package(str(unpacked))
    finally:
        unpacked.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of an artifact, in hexadecimal: of SHA256SUMS, which has those of all other files."""
    return file_sha256(path / SUMS)
