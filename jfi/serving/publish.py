"""Writes versions of a model while it trains: a whole one first, then what steps have changed; see `published`.

A version takes the training loop the time to gather the changed rows and to write them. The dense part is compiled
once: its parameters are constants that a server replaces by name.
"""

import dataclasses
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import torch
from torch import Tensor
from torch.export import ExportedProgram

from jfi.data.io.table import SourceRows
from jfi.data.schema.rules import parse_rule
from jfi.models import SequenceDLRM
from jfi.modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from jfi.serving import artifact
from jfi.serving.export import Export
from jfi.serving.published import (
    ARTIFACT,
    CONSTANTS,
    ROWS,
    TABLES,
    PublishedError,
    Version,
    VersionFolder,
    described,
    numbers,
    read_version,
)
from jfi.serving.tables import FLOAT, write_tensors
from jfi.tables.changed_rows import ChangedRows
from jfi.utils.errors import InputError
from jfi.utils.files import sha256_of, temporary_folder

_log = logging.getLogger(__name__)
_FUSED = FusedEmbeddingCollection | FusedEmbeddingBagCollection
#: Least and most seconds between two attempts to publish while the storage fails.
_RETRY, _LAST_RETRY = 1.0, 600.0


def publish_artifact(folder: Path, export: Export) -> Version:
    """Writes a whole version, which begins a chain; older versions stay.

    Raises:
        PublishedError: another process writes the folder, such as a trainer.
    """
    versions = VersionFolder(folder)
    try:
        traced = export.program()
        return _write_artifact(versions, export, traced, _fingerprint(export, traced[0]))
    finally:
        versions.close()


def _write_artifact(
    versions: VersionFolder,
    export: Export,
    traced: tuple[ExportedProgram, str],
    fingerprint: str,
    log_position: object = None,
) -> Version:
    def fill(path: Path) -> dict[str, Any]:
        constants = described(_constants(export))
        base = export.write(path / ARTIFACT, traced)
        return {"kind": "artifact", "base": base, "constants": constants, "program": fingerprint}

    return versions.write(fill, None, log_position=log_position)


class Publisher:
    """Publishes versions of a model that trains, in one process.

    Make it before the first step, and before steps are captured: from then on the model's collections mark the rows
    that steps change. Weights that are replaced otherwise, as by `load_state_dict`, need `publish(whole=True)`.

    One publisher at a time writes a folder: it holds the lock until `close`, or until it or its process is gone.
    A publisher that continues a folder begins with a whole version, since nobody knows what the last one lacks; the
    compiled part is that of the folder if the model, its schema and its limits are the same.

    Args:
        folder: of the versions.
        export: of a model whose collections are fused ones, with float32 tables.
        compact_every: deltas after which a snapshot is written, so that a server that starts reads few versions.
        compact_ratio: a snapshot comes sooner if the deltas since the last one have so many times its bytes.
        keep: whole versions that stay; what is older than these is removed, but for their base.

    Raises:
        PublishedError: another process writes the folder.
        ValueError: a model that cannot be published, by what it has.

    Example::

        publisher = Publisher(Path("published"), Export(model, schema, Limits(1000, 200)))
        for number, batch in enumerate(batches):
            train(model, batch)
            if number % 100 == 0:
                publisher.publish(log_position={"batch": number})
    """

    def __init__(
        self,
        folder: Path,
        export: Export,
        *,
        compact_every: int = 100,
        compact_ratio: float = 1.0,
        keep: int = 2,
    ) -> None:
        for name, count in (("compact_every", compact_every), ("keep", keep)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if (tables := export.info.quantization) != FLOAT:
            raise ValueError(f"tables must be {FLOAT} to publish changes of them, got {tables}")
        self._export, self._changed = export, _changed_rows(export.model)
        self._compact_every, self._compact_ratio, self._keep = compact_every, compact_ratio, keep
        #: By growing table the raw ids of its rows, as the last version has them.
        self._ids: dict[str, Tensor] = {}
        #: The version of the artifact that the last one of this publisher needs.
        self._base: Version | None = None
        self._deltas = self._delta_bytes = 0
        self._versions = VersionFolder(folder)
        self.close = self._versions.close

    def publish(self, log_position: object = None, whole: bool = False) -> int:
        """Writes a version, complete or not at all; returns its number.

        Args:
            log_position: which servers say; anything that JSON can hold.
            whole: writes a snapshot, or an artifact as the first version.
        """
        taken = {name: changed.take(name) for name, changed in self._changed.items()}
        whole = whole or self._versions.last is None
        try:
            ids = self._export.growing_ids()
            if whole:
                self._write_whole(log_position)
            else:
                self._write_delta(log_position, taken, ids)
        except BaseException:
            for name, rows in taken.items():
                self._changed[name].put_back(name, rows)
            if whole:
                self._versions.last = None  # the next version is a whole one again
            raise
        self._ids = ids
        if self._deltas >= self._compact_every or self._delta_bytes > self._compact_ratio * self._whole_bytes():
            self._write_snapshot(log_position, self._versions.last)
            whole = True
        if whole:
            self._versions.remove_old(self._keep)
        return self._versions.last.number

    def _whole_bytes(self) -> int:
        """Returns the bytes of the numbers of a snapshot."""
        constants = sum(math.prod(shape) for _, shape in self._base.manifest.constants.values())
        return 4 * (constants + sum(weight.numel() for weight in self._export.weights.values()))

    def _write_whole(self, log_position: object) -> None:
        if self._base is None:
            traced = self._export.program()
            fingerprint = _fingerprint(self._export, traced[0])
            self._base = self._known_base(fingerprint)
        if self._base is not None:
            self._write_snapshot(log_position, None)
            return
        self._base = _write_artifact(self._versions, self._export, traced, fingerprint, log_position)
        self._deltas = self._delta_bytes = 0

    def _known_base(self, fingerprint: str) -> Version | None:
        """Returns the newest version whose artifact differs from this model's in numbers alone; None without one."""
        for number in reversed(numbers(self._versions.path)):
            try:
                version = read_version(self._versions.path, number)
                if version.manifest.program == fingerprint:
                    artifact.read(version.path / ARTIFACT, [version.manifest.base])  # verifies it
                    return version
            except (PublishedError, artifact.ArtifactError):
                continue
        return None

    def _write_snapshot(self, log_position: object, parent: Version | None) -> None:
        def fill(path: Path) -> dict[str, Any]:
            self._export.save_tables(path / TABLES)
            write_tensors(path / CONSTANTS, _constants(self._export))
            return {"kind": "snapshot"}

        self._versions.write(fill, self._base, parent, log_position)
        self._deltas = self._delta_bytes = 0

    def _write_delta(self, log_position: object, taken: dict[str, Tensor], ids: dict[str, Tensor]) -> None:
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
            write_tensors(path / ROWS, tensors)
            write_tensors(path / CONSTANTS, _constants(self._export))
            return {"kind": "delta"}

        version = self._versions.write(fill, self._base, self._versions.last, log_position)
        self._deltas += 1
        self._delta_bytes += sum(one.stat().st_size for one in version.path.iterdir())


class PublishHook:
    """Publishes every so many seconds, in a training loop that calls it once a step and once a part of the log.

    A part that takes less time is published at its end alone. No failure ends the loop: the next attempt waits twice as
    long as the last one, at most ten minutes, and has all changes since the last version. Only `close` raises.

    Args:
        publisher: writes the versions.
        seconds: between the ends of two versions.
        log_position: at which the loop begins.
        clock: gives the seconds.
        publish_if: a rule on `scores`, such as `auc >= .7 or rows < 1000`; while it does not hold, or has a score
            without a value, nothing is published. None publishes always, as there is none without rows.
        scores: returns the newest scores of the model by name, and their `rows`.

    Raises:
        InputError: `publish_if` is not a rule, or reads what is not in `scores`.

    Example:
        >>> class Counting:
        ...     def publish(self, log_position=None):
        ...         print("published at", log_position)
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
        log_position: object = None,
        clock: Callable[[], float] = time.monotonic,
        publish_if: str | None = None,
        scores: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        if not seconds >= 0:
            raise ValueError(f"seconds must be at least 0, got {seconds}")
        self._publisher, self._seconds, self._clock = publisher, seconds, clock
        self._rule, self._scores = None if publish_if is None else parse_rule(publish_if), scores
        known = [name for name, value in scores().items() if not isinstance(value, str)]
        for name in [] if self._rule is None else self._rule.columns:
            if name not in known:
                raise InputError(f"training.publish_if: '{publish_if}' reads '{name}', must be of {', '.join(known)}")
        self._log_position, self._reason = log_position, ""
        #: Times of the last version, and of the first change since; None without one.
        self._last, self._changed = clock(), None
        #: Attempts since the last version that have failed or were held back, and the time of the next one.
        self.failures, self.held_back, self._next = 0, 0, -math.inf

    def begin(self) -> int | None:
        """Publishes what training begins with; returns the number of the version, None if it could not be written.

        Raises:
            InputError: it cannot be published, as without a C++ compiler.
        """
        self._change()
        return self._try((OSError,))

    def after_step(self) -> None:
        """Publishes if the oldest change has waited so long."""
        self._change()
        if self._clock() - self._changed >= self._seconds:
            self._try()

    def after_part(self, log_position: object) -> None:
        """Takes the end of a part as the position in the log, and publishes if the last version is so old."""
        self._log_position = log_position
        self._change()
        self.while_waiting()

    def while_waiting(self) -> None:
        """Publishes the changes, if there are any and the last version is so old."""
        if self._clock() - self._last >= self._seconds:
            self._try()

    def close(self) -> None:
        """Publishes the changes since the last version, if there are any.

        Raises:
            OSError: the storage fails.
        """
        self._next = -math.inf
        self._try(())

    def _try(self, tolerated: tuple[type[Exception], ...] = (OSError, InputError)) -> int | None:
        """Publishes, unless there is no change or it is too early; a warning says why it could not."""
        now = self._clock()
        if self._changed is None or now < self._next:
            return None
        if (reason := self._held_back_by()) != "":
            self.held_back, self._next = self.held_back + 1, now + self._seconds
            if reason != self._reason:
                _log.warning("held back a version, training goes on: training.publish_if does not hold, %s", reason)
            self._reason = reason
            return None
        try:
            number = self._publisher.publish(self._log_position)
        except tolerated as error:
            self.failures += 1
            wait = min(max(self._seconds, _RETRY) * 2 ** min(self.failures, 10), _LAST_RETRY)
            self._next = self._clock() + wait
            what = "no version could be written, %s times in a row; training goes on, next attempt in %.0f s: %s"
            _log.warning(what, self.failures, wait, error)
            return None
        self._last, self._changed = self._clock(), None
        self.failures, self.held_back, self._reason = 0, 0, ""
        return number

    def _held_back_by(self) -> str:
        """Returns the scores for which the rule does not hold; "" if it holds."""
        if self._rule is None or not (scores := self._scores())["rows"]:
            return ""
        table = pa.table({name: pa.array([scores[name]], pa.float64()) for name in self._rule.columns})
        if self._rule.holds(SourceRows("scores", table, table.column_names, int)) == 1:
            return ""
        return ", ".join(f"{name} {scores[name]}" for name in self._rule.columns)

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


def _constants(export: Export) -> dict[str, Tensor]:
    """Returns the constants of the dense part by name, as they are now."""
    scoring = export.scoring()
    named = (*scoring.named_parameters(remove_duplicate=False), *scoring.named_buffers(remove_duplicate=False))
    return {name: value.detach().cpu().clone() for name, value in named}  # one may have several names


def _fingerprint(export: Export, program: ExportedProgram) -> str:
    """Returns the SHA-256 of an artifact without the numbers that training changes, its run and its time."""
    codes = [one.code for one in program.graph_module.modules() if isinstance(one, torch.fx.GraphModule)]
    info = msgspec.json.encode(dataclasses.replace(export.info, exported="", run=None, trained=None))
    with temporary_folder("jfi-publish-") as folder:
        export.write_data(folder)
        data = [(one.name, sha256_of(one)) for one in folder.iterdir() if one.name != artifact.INFO]
    parts = codes, str(program.graph_signature), sorted(described(program.state_dict).items()), info, sorted(data)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
