"""Published versions of a model: a folder that a trainer or `jfi export --publish` writes, and that servers follow.

0000000001/  manifest.json, artifact/                                a whole version, compiled
0000000002/  manifest.json, rows.safetensors, constants.safetensors  a delta to the version before
0000000099/  manifest.json, tables.safetensors, constants.safetensors  a snapshot, whole with the base's compiled part

Each version is complete or absent. SHA256SUMS in it has the checksums of its files, and its own SHA-256 is the
version's digest: the manifest of a delta has that of its parent, the version before, so that nothing is applied to
another state than the one that it was made from. A whole version without a parent begins a new chain, as of another
run. The base of a version is the artifact whose schema and compiled part it needs.

rows.safetensors      by table `TABLE.rows` [n] int64, `TABLE.values` [n, D] float32, and of a table that grows
                      `TABLE.ids` [n] int64, the raw id of each row from now on; 0 is that of a row without an owner
constants.safetensors the parameters of the dense part, all of them
tables.safetensors    as of an artifact

Nothing here needs a model: jfi.serving.publish has what a version is written from.
"""

import hashlib
import shutil
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from jfi.serving.artifact import ArtifactError, Info
from jfi.serving.schema import Table
from jfi.serving.tables import FloatTables, Tables, load_tables
from jfi.utils.errors import InputError
from jfi.utils.files import (
    LOCK,
    NO_FILE,
    SUMS,
    DamagedFileError,
    check_sum,
    locking,
    naming,
    parse_sums,
    sha256_of,
    write_file,
    write_sums,
    writing_folder,
)
from jfi.utils.json_files import read_json

FORMAT = 2
MANIFEST, ROWS, CONSTANTS, TABLES, ARTIFACT = (
    "manifest.json",
    "rows.safetensors",
    "constants.safetensors",
    "tables.safetensors",
    "artifact",
)
#: Digits of a version's name.
_DIGITS = 10
#: Begins the names of folders that are being removed.
_REMOVED = ".removed-"


class PublishedError(InputError):
    """A version that cannot be used; the message is one line that names it."""


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json.

    Args:
        version: number of the version; they count from 1.
        parent: digest of the version that it follows: a delta changes its state, a snapshot has the same state. None
            for one that begins a chain.
        base: SHA-256 of the artifact that it needs, as of `jfi.serving.artifact.sha256_of`.
        base_version: number of the version that has this artifact.
        time: of publishing, in seconds since 1970.
        log_position: of training in the log that it follows, as the trainer gave it.
        constants: of an artifact: by name the dtype and the shape of each constant that versions bring.
        program: of an artifact: SHA-256 of what was compiled and of all data, without numbers that training changes.
    """

    format: int
    version: int
    kind: Literal["artifact", "delta", "snapshot"]
    parent: str | None
    base: str
    base_version: int
    time: float
    log_position: Any = None
    constants: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    program: str | None = None


@dataclass(frozen=True)
class Version:
    """A version whose manifest was verified.

    Args:
        digest: SHA-256 of its SHA256SUMS.
        sums: SHA-256 by name of file.
    """

    path: Path
    digest: str
    manifest: Manifest
    sums: dict[str, str]

    @property
    def number(self) -> int:
        return self.manifest.version


@dataclass(frozen=True)
class Change:
    """A change of a scorer's state, read and verified whole.

    Args:
        version: number of the version that the scorer has afterwards.
        rows: by table the rows [n], their values [n, D], and of a table that grows their raw ids [n], otherwise None.
        tables: all tables, of a snapshot; None for a delta.
    """

    version: int
    rows: dict[str, tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=dict)
    tables: Tables | None = None
    constants: dict[str, Tensor] = field(default_factory=dict)

    def largest_ids(self) -> dict[str, int]:
        """Returns by table the id of the row with the largest value, of a table that grows the raw id."""
        found = {}
        for table, (rows, values, ids) in (self.rows if self.tables is None else self.tables.all_rows()).items():
            if len(rows):
                largest = int(torch.maximum(values.amax(1), -values.amin(1)).argmax())
                found[table] = int((rows if ids is None else ids)[largest])
        return found


def path_of(folder: Path, number: int) -> Path:
    """Returns the folder of a version."""
    return folder / f"{number:0{_DIGITS}d}"


def numbers(folder: Path) -> list[int]:
    """Returns the numbers of the versions in a folder, ascending; none if it does not exist.

    Raises:
        PublishedError: it is not a folder.
    """
    try:
        return sorted(int(one.name) for one in folder.iterdir() if len(one.name) == _DIGITS and one.name.isdecimal())
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise PublishedError(f"{folder} is a file, must be a folder of published versions") from None


def read_version(folder: Path, number: int) -> Version:
    """Reads and verifies the manifest of a version, and no other file of it.

    Raises:
        PublishedError: it is missing, damaged, or of another format.
    """
    path = path_of(folder, number)
    try:
        content = (path / SUMS).read_bytes()
        sums = parse_sums(path / SUMS, content)
        check_sum(path, MANIFEST, sums)
    except NO_FILE:
        raise PublishedError(f"{path / SUMS} is missing") from None
    except DamagedFileError as fault:
        raise PublishedError(str(fault)) from None
    manifest = read_json(path / MANIFEST, Manifest, PublishedError)
    if manifest.format != FORMAT:
        must = f"this version of jfi reads format {FORMAT}"
        raise PublishedError(f"{path} has format {manifest.format}, but {must}")
    if manifest.version != number:
        raise PublishedError(f"{path} is damaged: its manifest is of version {manifest.version}")
    return Version(path, hashlib.sha256(content).hexdigest(), manifest, sums)


class VersionFolder:
    """A folder of versions that is written, by one process at a time: it holds the lock until `close`, or its end.

    Args:
        path: of the folder, made if it does not exist.

    Raises:
        PublishedError: another process holds the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        #: The version that was written last.
        self.last: Version | None = None
        numbers(path)  # refuses a file
        path.mkdir(parents=True, exist_ok=True)
        held, what = ExitStack(), "publishes to this folder; each run needs one of its own"
        held.enter_context(locking(path / LOCK, lambda by: PublishedError(f"{path}: {by} {what}")))
        #: Releases the lock.
        self.close = weakref.finalize(self, held.close)

    def write(
        self,
        fill: Callable[[Path], dict[str, Any]],
        base: Version | None,
        parent: Version | None = None,
        log_position: object = None,
    ) -> Version:
        """Writes the next version, complete or not at all.

        Args:
            fill: writes its files and returns what the manifest says of them.
            base: the version of its artifact; None for the version itself.
            parent, log_position: as of the manifest.
        """
        number = max(numbers(self.path), default=0) + 1
        path, version = path_of(self.path, number), None
        try:
            with writing_folder(path) as unfinished:
                about = fill(unfinished)
                of_base = {} if base is None else {"base": base.manifest.base}
                manifest = Manifest(
                    FORMAT,
                    number,
                    parent=None if parent is None else parent.digest,
                    base_version=number if base is None else base.number,
                    time=time.time(),
                    log_position=log_position,
                    **of_base,
                    **about,
                )
                write_file(unfinished / MANIFEST, msgspec.json.encode(manifest))
                sums = {one.name: sha256_of(one) for one in unfinished.iterdir() if one.is_file()}
                write_sums(unfinished, sums)
                version = Version(path, sha256_of(unfinished / SUMS), manifest, sums)
        finally:
            # Servers see a folder that has its name, whatever fails then.
            if version is not None and path.exists():
                self.last = version
        return version

    def remove_old(self, keep: int) -> None:
        """Removes versions that are older than the last `keep` whole ones, but for their bases.

        What a killed process has left of them goes too.
        """
        for path in self.path.glob(f"{_REMOVED}*"):
            shutil.rmtree(path)
        found = numbers(self.path)
        whole = []
        for number in reversed(found):
            try:
                version = read_version(self.path, number)
            except PublishedError:
                continue
            if version.manifest.kind != "delta":
                whole.append(version)
            if len(whole) == keep:
                break
        needed = {one.manifest.base_version for one in whole}
        for number in found:
            if number < whole[-1].number and number not in needed:
                removed = self.path / f"{_REMOVED}{number}"
                path_of(self.path, number).rename(removed)  # at once, for those who read
                shutil.rmtree(removed)


def read_change(version: Version, base: Version, info: Info, tables_device: str | None) -> Change:
    """Reads and verifies what a delta or a snapshot brings.

    Args:
        base: the version of its artifact.
        tables_device: of the tables; None means that of the dense part.

    Raises:
        PublishedError: it is damaged, or does not fit its base.
    """
    path, device = version.path, torch.device(info.device)
    on = torch.device(tables_device or info.device)
    constants = _read_tensors(version, CONSTANTS)
    expected, found = base.manifest.constants, described(constants)
    if wrong := sorted(name for name in {**expected, **found} if expected.get(name) != found.get(name)):
        raise PublishedError(f"{path / CONSTANTS} does not fit its base: '{wrong[0]}' is missing or of another shape")
    _check_finite(path / CONSTANTS, constants)
    constants = {name: one.to(device) for name, one in constants.items()}
    if version.manifest.kind == "snapshot":
        try:
            check_sum(path, TABLES, version.sums)
            tables = load_tables(path / TABLES, info.quantization, info.tables, on)
        except (DamagedFileError, ArtifactError) as fault:
            raise PublishedError(str(fault)) from None
        check_tables(path / TABLES, tables)
        return Change(version.number, {}, tables, constants)
    rows = _rows(path / ROWS, _read_tensors(version, ROWS), info.tables)
    return Change(
        version.number,
        {name: tuple([None if one is None else one.to(on) for one in parts]) for name, parts in rows.items()},
        None,
        constants,
    )


def _rows(path: Path, tensors: dict[str, Tensor], tables: dict[str, Table]) -> dict:
    """Returns the `rows` of a Change, checked against the tables."""
    found = {}
    for name, table in tables.items():
        rows, values, ids = (tensors.pop(f"{name}.{part}", None) for part in ("rows", "values", "ids"))
        if rows is None and values is None and ids is None:
            continue
        wanted = {"rows": (rows, torch.int64, ()), "values": (values, torch.float32, (table.width,))}
        wanted |= {"ids": (ids, torch.int64, ())} if table.grows else {}
        if ids is not None and not table.grows:
            raise PublishedError(f"{path} does not fit its base, whose table '{name}' does not grow")
        for part, (one, dtype, width) in wanted.items():
            count = 0 if rows is None or rows.dim() != 1 else len(rows)
            if one is None or one.dtype != dtype or one.shape != (count, *width):
                got = "missing" if one is None else f"{one.dtype} of shape {list(one.shape)}"
                raise PublishedError(f"{path}: {name}.{part} must be {dtype} of shape {[count, *width]}, is {got}")
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < table.rows:
            raise PublishedError(f"{path}: {name}.rows must be from 0 to {table.rows - 1}")
        if len(rows.unique()) != len(rows):
            raise PublishedError(f"{path}: {name}.rows must be distinct")
        if ids is not None and bool(ids[rows == 0].any()):
            raise PublishedError(f"{path}: {name}.ids has an id for row 0, which is that of ids without a row")
        _check_finite(path, {f"{name}.values": values})
        found[name] = rows, values, ids
    if tensors:
        raise PublishedError(f"{path} does not fit its base, which has no table for '{min(tensors)}'")
    return found


def check_tables(path: Path, tables: Tables) -> None:
    """Checks that the values of tables are finite; only float32 tables are published."""
    if isinstance(tables, FloatTables):
        _check_finite(path, tables.tensors)


def _check_finite(path: Path, tensors: dict[str, Tensor]) -> None:
    for name, one in tensors.items():
        if not one.is_floating_point() or not one.numel():
            continue
        if not all(bool(end.isfinite()) for end in one.aminmax()):  # NaN if one is; no copy
            raise PublishedError(f"{path}: {name} has values that are not finite")


def described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Returns by name the dtype and the shape of tensors, as a manifest has them."""
    return {name: (str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in tensors.items()}


def _read_tensors(version: Version, name: str) -> dict[str, Tensor]:
    """Reads the tensors of a file from the very bytes that are verified."""
    path = version.path / name
    if name not in version.sums:
        raise PublishedError(f"{version.path / SUMS} does not list {name}")
    try:
        with naming(path):
            content = path.read_bytes()
    except NO_FILE:
        raise PublishedError(f"{path} is missing") from None
    if hashlib.sha256(content).hexdigest() != version.sums[name]:
        raise PublishedError(f"{path} is damaged: its SHA-256 is not the one in {SUMS}")
    try:
        return safetensors.torch.load(content)
    except SafetensorError as error:
        raise PublishedError(f"{path} is damaged: {' '.join(str(error).split())}") from None
