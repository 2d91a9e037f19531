"""Writes versions of a model while it trains: a whole one first, then what steps have changed; see `published`.

A version takes the training loop the time to gather the changed rows and to write them. The dense part is compiled
once: its parameters are constants that a server replaces by name.
"""

import hashlib
import logging
import math
import shutil
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.export import ExportedProgram

from jfi.history_policies.policy import Policy
from jfi.models import SequenceDLRM
from jfi.modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from jfi.serving import artifact
from jfi.serving.export import Export
from jfi.serving.published import (
    ARTIFACT,
    CONSTANTS,
    FORMAT,
    MANIFEST,
    ROWS,
    TABLES,
    Manifest,
    PublishedError,
    Version,
    numbers,
    path_of,
    read_version,
)
from jfi.serving.schema import Limits, Schema
from jfi.serving.tables import FLOAT, write_tensors
from jfi.tables.changed_rows import ChangedRows
from jfi.utils import files
from jfi.utils.files import SUMS, read_sums, sha256_of, temporary_folder, write_file, write_sums, writing_folder
from jfi.utils.json_files import read_json

_log = logging.getLogger(__name__)
_FUSED = FusedEmbeddingCollection | FusedEmbeddingBagCollection
#: Fields of artifact.json that may differ between models of one compiled part.
_OWN = ("exported", "run", "trained")
#: Begins the names of folders that are being removed.
_REMOVED = ".removed-"
#: Least and most seconds between two attempts to publish while the storage fails.
_RETRY, _LAST_RETRY = 1.0, 600.0


class LockedFolderError(ValueError):
    """Another publisher writes the folder."""


class Publisher:
    """Publishes versions of a model that trains, in one process.

    Make it before the first step, and before steps are captured: from then on the model's collections mark the rows
    that steps change. Weights that are replaced otherwise, as by `load_state_dict`, need `publish(whole=True)`.

    One publisher at a time writes a folder: it holds the lock until `close`, or until it or its process is gone.
    A publisher that continues a folder begins with a whole version, since nobody knows what the last one lacks; the
    compiled part is that of the folder if the model, its schema and its limits are the same.

    Args:
        folder: of the versions.
        model: whose collections are fused ones.
        schema, limits, device, policy, run, trained: as of `jfi.serving.export.export`. Tables are float32.
        compact_every: deltas after which a snapshot is written, so that a server that starts reads few versions.
        compact_ratio: a snapshot comes sooner if the deltas since the last one have so many times its bytes.
        keep: whole versions that stay; what is older than these is removed, but for their base.

    Raises:
        ValueError: a model that cannot be published, by what it has; as LockedFolderError one whose folder
            another publisher writes.

    Example::

        publisher = Publisher(Path("published"), model, schema, Limits(1000, 200))
        for number, batch in enumerate(batches):
            train(model, batch)
            if number % 100 == 0:
                publisher.publish(place={"batch": number})
    """

    def __init__(
        self,
        folder: Path,
        model: SequenceDLRM,
        schema: Schema,
        limits: Limits,
        *,
        device: str = "cpu",
        policy: Policy | None = None,
        run: str | None = None,
        trained: dict[str, str | None] | None = None,
        compact_every: int = 100,
        compact_ratio: float = 1.0,
        keep: int = 2,
    ) -> None:
        for name, count in (("compact_every", compact_every), ("keep", keep)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        self._changed = _changed_rows(model)
        named = {"calibration": None, "run": run, "trained": trained}  # that of a run ends when it follows a log
        self._export = Export(model, schema, limits, device, FLOAT, None, policy, named)
        self._folder = folder
        self._compact_every, self._compact_ratio, self._keep = compact_every, compact_ratio, keep
        #: By growing table the raw ids of its rows, as the last version has them.
        self._ids: dict[str, Tensor] = {}
        #: The last version of this publisher, and that of the artifact which it needs.
        self._last: Version | None = None
        self._base: Version | None = None
        self._deltas = self._delta_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        held, what = ExitStack(), "publishes to this folder; each run needs one of its own"
        held.enter_context(files.locking(folder / files.LOCK, lambda by: LockedFolderError(f"{folder}: {by} {what}")))
        #: Releases the lock.
        self.close = weakref.finalize(self, held.close)

    def publish(self, place: object = None, whole: bool = False) -> int:
        """Writes a version, complete or not at all; returns its number.

        Args:
            place: in the log, which servers say; anything that JSON can hold.
            whole: writes a snapshot, or an artifact as the first version.
        """
        taken = {name: changed.take(name) for name, changed in self._changed.items()}
        whole = whole or self._last is None
        try:
            ids = self._export.growing_ids()
            if whole:
                self._write_whole(place)
            else:
                self._write_delta(place, taken, ids)
        except BaseException:
            for name, rows in taken.items():
                self._changed[name].put_back(name, rows)
            if whole:
                self._last = None  # the next version is a whole one again
            raise
        self._ids = ids
        if self._deltas >= self._compact_every or self._delta_bytes > self._compact_ratio * self._whole_bytes():
            self._write_snapshot(place, before=self._last.name)
            whole = True
        if whole:
            self._remove_old()
        return self._last.number

    def _whole_bytes(self) -> int:
        """Returns the bytes of the numbers of a snapshot."""
        constants = sum(math.prod(shape) for _, shape in self._base.manifest.constants.values())
        return 4 * (constants + sum(weight.numel() for weight in self._export.weights.values()))

    def _write_whole(self, place: object) -> None:
        if self._base is None:
            traced = self._export.program()
            fingerprint = _fingerprint(traced[0])
            self._base = self._known_base(fingerprint)
        if self._base is not None:
            self._write_snapshot(place, before=None)
            return

        def fill(path: Path) -> dict[str, Any]:
            constants = {name: (_dtype(one), list(one.shape)) for name, one in self._constants().items()}
            base = self._export.write(path / ARTIFACT, traced)
            return {"kind": "artifact", "base": base, "constants": constants, "program": fingerprint}

        self._base = self._write(place, None, fill)
        self._deltas = self._delta_bytes = 0

    def _known_base(self, program: str) -> Version | None:
        """Returns the newest version whose artifact differs from this model's in numbers alone; None without one."""
        for number in reversed(numbers(self._folder)):
            try:
                version = read_version(self._folder, number)
                if version.manifest.program != program:
                    continue
                path = version.path / ARTIFACT
                artifact.read(path)  # verifies it
                kept = read_sums(path)
            except (PublishedError, artifact.ArtifactError):
                continue
            if artifact.sha256_of(path) != version.manifest.base:
                continue
            with temporary_folder("jfi-publish-") as own:
                self._export.write_data(own)
                changing = {artifact.MODEL, artifact.TABLES, artifact.INFO}
                found = {one.name: sha256_of(one) for one in own.iterdir() if one.name not in changing}
                here = read_json(own / artifact.INFO, dict)
            there = read_json(path / artifact.INFO, dict)
            same = all(here[name] == there.get(name) for name in here if name not in _OWN)
            if same and found == {name: one for name, one in kept.items() if name not in changing}:
                return version
        return None

    def _write_snapshot(self, place: object, before: str | None) -> None:
        def fill(path: Path) -> dict[str, Any]:
            self._export.save_tables(path / TABLES)
            _save(path / CONSTANTS, self._constants())
            return {"kind": "snapshot"}

        self._write(place, before, fill)
        self._deltas = self._delta_bytes = 0

    def _write_delta(self, place: object, taken: dict[str, Tensor], ids: dict[str, Tensor]) -> None:
        tensors = {}
        for name, weight in self._export.weights.items():
            rows = taken[name].to(weight.device)
            if name in ids:
                moved = (ids[name] != self._ids[name]).nonzero().flatten()
                rows = torch.cat([rows, moved.to(weight.device)]).unique()
                tensors[f"{name}.ids"] = ids[name][rows.to(ids[name].device)]
            tensors[f"{name}.rows"] = rows
            tensors[f"{name}.values"] = weight.detach()[rows].float()

        def fill(path: Path) -> dict[str, Any]:
            _save(path / ROWS, tensors)
            _save(path / CONSTANTS, self._constants())
            return {"kind": "delta"}

        version = self._write(place, self._last.name, fill)
        self._deltas += 1
        self._delta_bytes += sum(one.stat().st_size for one in version.path.iterdir())

    def _constants(self) -> dict[str, Tensor]:
        """Returns the constants of the dense part by name, as they are now."""
        scoring = self._export.scoring()
        named = (*scoring.named_parameters(remove_duplicate=False), *scoring.named_buffers(remove_duplicate=False))
        return {name: value.detach() for name, value in named}

    def _write(self, place: object, before: str | None, fill: Callable[[Path], dict[str, Any]]) -> Version:
        """Writes the next version; `fill` writes its files and returns what the manifest says of them."""
        number = max(numbers(self._folder), default=0) + 1
        path, version = path_of(self._folder, number), None
        try:
            with writing_folder(path) as unfinished:
                about = fill(unfinished)
                base = {} if self._base is None else {"base": self._base.manifest.base}
                base["base_version"] = number if self._base is None else self._base.number
                manifest = Manifest(FORMAT, number, before=before, time=time.time(), place=place, **base, **about)
                write_file(unfinished / MANIFEST, msgspec.json.encode(manifest))
                sums = {one.name: sha256_of(one) for one in unfinished.iterdir() if one.is_file()}
                write_sums(unfinished, sums)
                version = Version(path, sha256_of(unfinished / SUMS), manifest, sums)
        finally:
            # Servers see a folder that has its name, whatever fails then.
            if version is not None and path.exists():
                self._last = version
        return version

    def _remove_old(self) -> None:
        """Removes versions that no server needs any more, and what a killed process has left of them."""
        for path in self._folder.glob(f"{_REMOVED}*"):
            shutil.rmtree(path)
        found = numbers(self._folder)
        whole = []
        for number in reversed(found):
            try:
                version = read_version(self._folder, number)
            except PublishedError:
                continue
            if version.manifest.kind != "delta":
                whole.append(version)
            if len(whole) == self._keep:
                break
        needed = {one.manifest.base_version for one in whole}
        for number in found:
            if number < whole[-1].number and number not in needed:
                removed = self._folder / f"{_REMOVED}{number}"
                path_of(self._folder, number).rename(removed)  # at once, for those who read
                shutil.rmtree(removed)


class PublishHook:
    """Publishes every so many seconds, in a training loop that calls it once a step and once a part of the log.

    A part that takes less time is published at its end alone. Where the storage fails, training goes on, and the next
    attempt waits twice as long as the last one, at most ten minutes; only `close` raises the error.

    Args:
        publisher: writes the versions.
        seconds: between the ends of two versions.
        place: in the log at which the loop begins.
        clock: gives the seconds.

    Example:
        >>> class Counting:
        ...     def publish(self, place=None):
        ...         print("published at", place)
        >>> now = [0.0]
        >>> hook = PublishHook(Counting(), 10.0, clock=lambda: now[0])
        >>> for now[0] in (4.0, 11.0, 14.0):
        ...     hook.after_step()
        published at None
        >>> now[0] = 30.0
        >>> hook.after_part({"part": "0001.parquet"})
        published at {'part': '0001.parquet'}
        >>> hook.close()
    """

    def __init__(
        self,
        publisher: Publisher,
        seconds: float,
        place: object = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not seconds >= 0:
            raise ValueError(f"seconds must be at least 0, got {seconds}")
        self._publisher, self._seconds, self._clock = publisher, seconds, clock
        self._place = place
        #: Times of the last version, and of the first change since; None without one.
        self._last, self._changed = clock(), None
        #: Attempts since the last version that have failed, and the time of the next one.
        self.failures, self._next = 0, -math.inf

    def after_step(self) -> None:
        """Publishes if the oldest change has waited so long."""
        self._change()
        if self._clock() - self._changed >= self._seconds:
            self._try()

    def after_part(self, place: object) -> None:
        """Takes a part's end as the place in the log, and publishes if the last version is so old."""
        self._place = place
        self._change()
        self.while_waiting()

    def while_waiting(self) -> None:
        """Publishes the changes, if there are any and the last version is so old."""
        if self._clock() - self._last >= self._seconds:
            self._try()

    def close(self) -> None:
        """Publishes the changes since the last version, if there are any."""
        if self._changed is not None:
            self._publisher.publish(place=self._place)
            self._last, self._changed, self.failures = self._clock(), None, 0

    def _try(self) -> None:
        if self._clock() < self._next:
            return
        try:
            self.close()
        except OSError as error:
            self.failures += 1
            wait = min(max(self._seconds, _RETRY) * 2 ** min(self.failures, 10), _LAST_RETRY)
            self._next = self._clock() + wait
            what = "no version could be written, %s times in a row; training goes on, next attempt in %.0f s: %s"
            _log.warning(what, self.failures, wait, error)

    def _change(self) -> None:
        if self._changed is None:
            self._changed = self._clock()


def _changed_rows(model: SequenceDLRM) -> dict[str, ChangedRows]:
    """Returns by table the marks of its changed rows, from now on."""
    found = {}
    for name in ("embedding_bag_collection", "embedding_collection"):
        collection = getattr(model, name)
        if collection is None:
            continue
        if not isinstance(collection, _FUSED):
            must = "a fused collection, which knows the rows that steps change, to publish versions"
            raise ValueError(f"{name} must be {must}; got {type(collection).__name__}")
        if collection.fused_optimizer.optimizer.ema_decay is not None:
            why = "every step changes the averages of all rows; train with optimizer.ema_decay: null"
            raise ValueError(f"{name} has ema_decay, and versions cannot have moving averages: {why}")
        found |= dict.fromkeys(collection.fused_optimizer.weights, collection.fused_optimizer.track_changes())
    return found


def _fingerprint(program: ExportedProgram) -> str:
    """Returns the SHA-256 of what is compiled, without the values of constants."""
    codes = [one.code for one in program.graph_module.modules() if isinstance(one, torch.fx.GraphModule)]
    constants = {name: (_dtype(one), list(one.shape)) for name, one in program.state_dict.items()}
    return hashlib.sha256(repr((codes, str(program.graph_signature), sorted(constants.items()))).encode()).hexdigest()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    tensors = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
    write_tensors(path, lambda: save_file(tensors, path))
