"""The versions of a folder in the order in which a server applies them."""

import copy
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jfi.serving import artifact
from jfi.serving.artifact import ArtifactError
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
from jfi.serving.scorer import NotFiniteError, Scorer
from jfi.utils.files import NO_FILE


@dataclass(frozen=True)
class Step:
    """A change of the scorer of the current version, or a new scorer, which leads to another version."""

    version: Version
    base: Version
    change: Change | None = None
    scorer: Scorer | None = None

    def apply_to(self, scorer: Scorer) -> Scorer:
        """Returns the scorer of the version: the one given, changed in place, or a new one."""
        if self.scorer is not None:
            return self.scorer
        scorer.apply(self.change)
        return scorer


class VersionChain:
    """Follows a folder of published versions.

    `next` reads and verifies a step, which the caller applies and then reports by `done`, or by `fail` if applying
    raises. A version that is missing, damaged, or made from another state than the one here breaks the chain: the
    current version stays until a whole one can be loaded that is newer, or that is in a folder without the current one,
    or until one that was missing appears. After a version that failed while it was applied, the next step is a new
    scorer, of the newest version that is reached without it.

    Args:
        folder: of the versions.
        load: loads an artifact of the folder.
        tables_device: as of Scorer.
        refused: called with the reason, once for each version that is refused.
        stop: number of the version at which following ends, as if there were no later ones; None for no end.

    Raises:
        ArtifactError: there is no whole version that can be loaded, or `stop` cannot be reached.

    Example::

        chain = VersionChain(Path("published"), Scorer)
        scorer = chain.take_scorer()
        while (step := chain.next()) is not None:
            scorer = step.apply_to(scorer)
            chain.done(step)
    """

    def __init__(
        self,
        folder: Path,
        load: Callable[[Path], Scorer],
        tables_device: str | None = None,
        refused: Callable[[str], object] = lambda _: None,
        stop: int | None = None,
    ) -> None:
        self._folder, self._load, self._tables_device, self._refused = folder, load, tables_device, refused
        self._stop = stop
        #: Why the next version cannot be applied, or None.
        self.broken: str | None = None
        #: Versions that are not looked at again until another is applied or their files change, and these files: a
        #: following one that was refused; and, when a whole one is looked for, deltas (whatever their files, hence
        #: None), and whole ones that could not be loaded.
        self._skipped: dict[int, frozenset | None] = {}
        #: By name of a version that could be read, but not used, the reason: it is not used again.
        self._unusable: dict[str, str] = {}
        #: All reasons that were given.
        self._said: dict[str, None] = {}
        self._scorer = self._open().scorer
        if stop is not None and self._at.number != stop:
            why = self.broken or f"the newest one up to it is {self._at.number}"
            raise ArtifactError(f"{folder} has no version {stop} that can be served: {why}")

    def _open(self) -> Step:
        """Takes the newest whole version that can be loaded, and what follows it, as the current version.

        Returns:
            the step to it, a new scorer.
        """
        self._base: Version | None = None
        self._skipped, self._needs_scorer = {}, False
        step = self._whole(self._numbers())
        if step is None:
            why = [*self._said, "it has none"][0]
            raise ArtifactError(f"{self._folder} has no whole version to start from: {why}")
        scorer = step.scorer
        self.done(step)
        while (step := self.next()) is not None:
            try:
                scorer = step.apply_to(scorer)
            except Exception as error:
                self.fail(step, error)
            else:
                self.done(step)
        if self._needs_scorer:
            raise ArtifactError(f"{self._folder} has no version that can be applied: {self.broken}")
        return Step(self._at, self._base, scorer=scorer)

    def take_scorer(self) -> Scorer:
        """Returns the scorer of the version at the start, once: it may be large, and another may take its place."""
        scorer = self._scorer
        del self._scorer
        return scorer

    @property
    def manifest(self) -> Manifest:
        """The manifest of the current version."""
        return self._at.manifest

    def _numbers(self) -> list[int]:
        return [number for number in numbers(self._folder) if self._stop is None or number <= self._stop]

    def next(self) -> Step | None:
        """Reads the step to the next version; None where there is none that can be used."""
        if self._needs_scorer:
            return self._again()
        found, at = self._numbers(), self._at.number
        if at == self._stop:
            return None
        newer = [number for number in found if number > at]
        if not newer:
            if not found or found[-1] >= at:
                return None
            if self.broken is None:
                self._break(f"{self._folder} ends with version {found[-1]}, older than the current {at}")
            return self._whole(found)
        if newer[0] != at + 1:
            step = self._whole(newer)  # those between may have been removed
            if step is None and self.broken is None:
                self._break(f"{path_of(self._folder, at + 1)} is missing")
            return step
        files = self._files(newer[0])
        if self._skipped.get(newer[0]) != files:
            try:
                return self._following(newer[0])
            except PublishedError as fault:
                self._break(str(fault))
                self._skipped[newer[0]] = files
        return self._whole(newer)

    def _again(self) -> Step | None:
        """Reads a step to a new scorer, as a chain that starts now; None where there is no whole version for it."""
        other = copy.copy(self)  # what it goes through is not the current version of this one
        try:
            return other._open()
        except ArtifactError as fault:
            self._say(str(fault))
            return None

    def done(self, step: Step) -> None:
        """Takes a step that was applied: its version is the current one."""
        self._at, self._base, self.broken, self._skipped = step.version, step.base, None, {}
        self._needs_scorer = False
        if step.scorer is not None:
            self._info = step.scorer.info

    def refuse(self, step: Step, why: str) -> None:
        """Takes a step that is not to be applied; the current scorer stays."""
        reason = f"{step.version.path}: {why}"
        self._unusable[step.version.name] = reason
        if step.scorer is not None and step.version.manifest.kind == "delta":
            self._unusable[step.base.name] = reason  # of a new scorer; or the deltas before it would be tried, too
        self._break(reason)

    def fail(self, step: Step, error: Exception) -> None:
        """Takes a step that has failed while it was applied: the scorer is of no version, a new one takes its place.

        If its scores are not finite, the scorer is as before.
        """
        self.refuse(step, _not_applied(error))
        self._needs_scorer = not isinstance(error, NotFiniteError)

    def _break(self, reason: str) -> None:
        self.broken = reason
        self._say(reason)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said[reason] = None
            self._refused(reason)

    def _following(self, number: int) -> Step:
        """Reads the step to the version that follows the current one."""
        at, version = self._at, self._read(number)
        manifest = version.manifest
        if manifest.before != at.name:
            if manifest.kind == "delta":
                raise PublishedError(f"{version.path} is a change of another version {at.number} than the current one")
            return self._load_whole(version)
        if manifest.kind == "artifact":
            return self._load_whole(version)
        if manifest.base != self._base.manifest.base:
            raise PublishedError(f"{version.path} is of another base, {manifest.base}")
        if manifest.kind == "snapshot":  # of the state that is here
            return Step(version, self._base, Change(number))
        return Step(version, self._base, read_change(version, self._base, self._info, self._tables_device))

    def _whole(self, candidates: list[int]) -> Step | None:
        """Reads the step to the newest whole version that can be loaded."""
        for number in reversed(candidates):
            if (skipped := self._skipped.get(number, ())) is None or skipped == (files := self._files(number)):
                continue
            try:
                version = self._read(number)
                if version.manifest.kind != "delta":
                    return self._load_whole(version)
                files = None
            except PublishedError as fault:
                self._say(str(fault))
            self._skipped[number] = files
        return None

    def _files(self, number: int) -> frozenset:
        """Describes the files of a version, before they are read: a copying tool may still write them."""
        found = set()
        for folder, _, names in os.walk(path_of(self._folder, number)):
            for name in names:
                with suppress(FileNotFoundError):
                    file = os.lstat(os.path.join(folder, name))
                    found.add((folder, name, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns))
        return frozenset(found)

    def _read(self, number: int) -> Version:
        version = read_version(self._folder, number)
        if version.name in self._unusable:
            raise PublishedError(self._unusable[version.name])
        return version

    def _load_whole(self, version: Version) -> Step:
        manifest = version.manifest
        if manifest.kind == "artifact":
            scorer = self._load_base(version, version.number)
            check_tables(version.path / ARTIFACT / TABLES, scorer.tables)
            try:
                scorer.check_scores()
            except NotFiniteError as fault:
                raise PublishedError(f"{version.path}: {fault}") from None
            return Step(version, version, scorer=scorer)
        base = self._base
        if base is not None and base.manifest.base == manifest.base:
            return Step(version, base, read_change(version, base, self._info, self._tables_device))
        base = self._read(manifest.base_version)
        if base.manifest.kind != "artifact" or base.manifest.base != manifest.base:
            raise PublishedError(f"{version.path} is of another base, {manifest.base}, than {base.path} has")
        scorer = self._load_base(base, version.number)
        change = read_change(version, base, scorer.info, self._tables_device)
        try:
            scorer.apply(change)
        except Exception as error:
            raise PublishedError(f"{version.path}: {_not_applied(error)}") from error
        return Step(version, base, scorer=scorer)

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


def _not_applied(error: Exception) -> str:
    return str(error) if isinstance(error, NotFiniteError) else f"it could not be applied: {error!r}"
