"""The versions of a folder in the order in which a server applies them."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jfi.serving import artifact
from jfi.serving.artifact import ArtifactError, Info
from jfi.serving.published import (
    ARTIFACT,
    TABLES,
    Change,
    Manifest,
    PublishedError,
    Version,
    check_tables,
    numbers,
    path_of,
    read_change,
    read_version,
)
from jfi.serving.schema import NotFiniteError
from jfi.serving.scorer import Scorer
from jfi.utils.files import NO_FILE


@dataclass(frozen=True)
class Step:
    """A step to another version: a change of the scorer that serves, or a new scorer."""

    version: Version
    base: Version
    info: Info
    change: Change | None = None
    scorer: Scorer | None = None

    def apply_to(self, scorer: Scorer | None) -> Scorer:
        """Returns the scorer of the version: the one given, changed in place, or a new one."""
        if self.scorer is not None:
            return self.scorer
        scorer.apply(self.change)
        return scorer


class VersionChain:
    """Follows a folder of published versions.

    `next` reads and verifies a step, which the caller applies and then reports by `done`, or by `refuse` if applying
    raises. A version whose parent is the current one is a change of it. After a fault in a change the current version
    stays until there is a newer whole one, or until the files of the refused one change, as while a tool still copies
    them. The current version never gives way to an older one while its scorer is intact; after a change that was half
    applied, and at the start, the newest whole version that works is loaded.

    Args:
        load: loads an artifact of the folder.
        at: number of the version to serve, as if there were no later ones; None for the newest.

    Example::

        chain = VersionChain(Path("published"), Scorer)
        scorer = chain.start()
        while (step := chain.next()) is not None:
            scorer = step.apply_to(scorer)
            chain.done(step)
    """

    def __init__(
        self,
        folder: Path,
        load: Callable[[Path], Scorer],
        tables_device: str | None = None,
        at: int | None = None,
    ) -> None:
        self._folder, self._load, self._tables_device, self._last = folder, load, tables_device, at
        #: Why versions were refused, since the list was emptied.
        self.reasons: list[str] = []
        #: Why a newer version is not served, or None.
        self.refused_reason: str | None = None
        #: By number of a version, and whether it was read as a whole one or as a change, its files when it was refused
        #: and the reason; the reason is None of one that is not whole.
        self._refused: dict[tuple[int, bool], tuple[frozenset, str | None]] = {}
        self._current: Version | None = None
        #: The version of the artifact in use and its info; None without an intact scorer.
        self._base: tuple[Version, Info] | None = None

    def start(self) -> Scorer:
        """Returns the scorer of the newest version that works, or of `at`.

        Raises:
            ArtifactError: there is no whole version that works, or `at` cannot be reached.
        """
        scorer = None
        while (step := self.next(scorer is not None and scorer.is_whole)) is not None:
            try:
                scorer = step.apply_to(scorer)
            except Exception as error:
                self.refuse(step, error)
            else:
                self.done(step)
        if scorer is None or not scorer.is_whole:
            why = self.refused_reason or "it has none"
            raise ArtifactError(f"{self._folder} has no whole version to start from: {why}")
        if self._last not in (None, self.manifest.version):
            why = self.refused_reason or f"the newest one up to it is {self.manifest.version}"
            raise ArtifactError(f"{self._folder} has no version {self._last} that can be served: {why}")
        return scorer

    @property
    def manifest(self) -> Manifest:
        """The manifest of the current version."""
        return self._current.manifest

    def next(self, is_intact: bool = True) -> Step | None:
        """Reads the step to the next version; None where there is none that can be used.

        Args:
            is_intact: whether there is a scorer of the current version; otherwise the step is a new one.
        """
        found = [number for number in numbers(self._folder) if self._last is None or number <= self._last]
        if not is_intact:
            self._base = None
            return self._whole(found)
        at = self._current.number
        newer = [number for number in found if number > at]
        if not newer:
            if found and found[-1] < at:
                self._say(f"{self._folder} ends with version {found[-1]}, older than the current {at}")
            return None
        step = self._read(at + 1, self._follow, False) if newer[0] == at + 1 else None
        step = step or self._whole(newer)
        if step is None and newer[0] != at + 1:
            self._say(f"{path_of(self._folder, at + 1)} is missing")
        return step

    def done(self, step: Step) -> None:
        """Takes a step that was applied: its version is the current one."""
        self._current, self._base, self.refused_reason = step.version, (step.base, step.info), None
        self._refused = {key: one for key, one in self._refused.items() if key[0] > step.version.number}

    def refuse(self, step: Step, error: Exception) -> None:
        """Takes a step that failed while it was applied; the current version stays, if the scorer is intact."""
        number, reason = step.version.number, f"{step.version.path}: {_reason(error)}"
        self._refused |= dict.fromkeys([(number, True), (number, False)], (self._files(number), reason))
        self._say(reason)

    def _say(self, reason: str) -> None:
        if reason != self.refused_reason:
            self.refused_reason = reason
            self.reasons.append(reason)

    def _read(self, number: int, read: Callable[[Version], Step | None], whole: bool) -> Step | None:
        """Reads a step to a version, unless it was refused and its files are the same; None if it is refused."""
        files = self._files(number)  # before they are read: a copying tool may still write them
        known, reason = self._refused.get((number, whole), (None, None))
        if known == files:
            self.refused_reason = self.refused_reason or reason
            return None
        step = None
        try:
            step = read(read_version(self._folder, number))
        except PublishedError as fault:
            self._say(reason := str(fault))
        if step is None:
            self._refused[number, whole] = files, reason
        return step

    def _files(self, number: int) -> frozenset:
        """Describes the files of a version."""
        found = set()
        for folder, _, names in os.walk(path_of(self._folder, number)):
            for name in names:
                with suppress(FileNotFoundError):
                    file = os.lstat(os.path.join(folder, name))
                    found.add((folder, name, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns))
        return frozenset(found)

    def _follow(self, version: Version) -> Step | None:
        """Reads the change from the current version to the one that follows it; None if that begins a new chain."""
        manifest, (base, info) = version.manifest, self._base
        if manifest.parent != self._current.digest:
            if manifest.kind == "delta":
                raise PublishedError(f"{version.path} is a change of another version {manifest.version - 1}")
            return None
        if manifest.base != base.manifest.base:
            raise PublishedError(f"{version.path} is of another base, {manifest.base}")
        if manifest.kind == "snapshot":  # of the state that is here
            return Step(version, base, info, Change(version.number))
        return Step(version, base, info, read_change(version, base, info, self._tables_device))

    def _whole(self, candidates: list[int]) -> Step | None:
        """Reads the step to the newest whole version that works."""
        steps = (self._read(number, self._load_whole, True) for number in reversed(candidates))
        return next((step for step in steps if step is not None), None)

    def _load_whole(self, version: Version) -> Step | None:
        """Reads the step to a whole version, a new scorer unless the current one is of the same artifact."""
        manifest = version.manifest
        if manifest.kind == "delta":
            return None
        if manifest.kind == "artifact":
            scorer = self._load_base(version, version.number)
            check_tables(version.path / ARTIFACT / TABLES, scorer.tables)
            self._try(version, scorer.check_scores)
            return Step(version, version, scorer.info, scorer=scorer)
        if self._base is not None and self._base[0].manifest.base == manifest.base:
            return Step(version, *self._base, read_change(version, *self._base, self._tables_device))
        base = read_version(self._folder, manifest.base_version)
        if base.manifest.kind != "artifact" or base.manifest.base != manifest.base:
            raise PublishedError(f"{version.path} is of another base, {manifest.base}, than {base.path} has")
        scorer = self._load_base(base, version.number)
        change = read_change(version, base, scorer.info, self._tables_device)
        self._try(version, lambda: scorer.apply(change))
        return Step(version, base, scorer.info, scorer=scorer)

    @staticmethod
    def _try(version: Version, apply: Callable[[], None]) -> None:
        try:
            apply()
        except Exception as error:
            raise PublishedError(f"{version.path}: {_reason(error)}") from error

    def _load_base(self, base: Version, number: int) -> Scorer:
        """Loads the artifact of a version, for a scorer of version `number`."""
        path, manifest = base.path / ARTIFACT, base.manifest
        try:
            if (found := artifact.sha256_of(path)) != manifest.base:
                raise PublishedError(f"{path} has the SHA-256 {found}, not that of its manifest, {manifest.base}")
            scorer = self._load(path)
        except NO_FILE as error:
            raise PublishedError(f"{error.filename} is missing") from None
        except ArtifactError as fault:
            raise PublishedError(str(fault)) from None
        if absent := sorted(set(manifest.constants) - set(scorer.package.get_constant_fqns())):
            raise PublishedError(f"{path} cannot follow versions: its compiled part has no constant '{absent[0]}'")
        scorer.version = number
        return scorer


def _reason(error: Exception) -> str:
    known = isinstance(error, NotFiniteError | ArtifactError)
    return str(error) if known else f"it could not be applied: {error!r}"
