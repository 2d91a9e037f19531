"""A server that follows published versions: read in a thread, they are applied between calls of the model."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from jfi.serving.artifact import ArtifactError
from jfi.serving.scorer import Scorer
from jfi.serving.server.hot_swap import Live
from jfi.serving.server.metrics import Metrics
from jfi.serving.version_chain import Step, VersionChain

#: Seconds between two looks at the folder.
POLL_SECONDS = 0.2
_log = logging.getLogger("jfi.serving")


class Follower:
    """Keeps a server at the newest version of a folder.

    Args:
        folder: of the versions.
        load: loads an artifact of the folder.
        tables_device, stop: as of VersionChain.

    Raises:
        ArtifactError: there is no whole version that can be loaded, or `stop` cannot be reached.
    """

    def __init__(
        self, folder: Path, load: Callable[[Path], Scorer], tables_device: str | None = None, stop: int | None = None
    ) -> None:
        self._reasons: list[str] = []
        self._chain = VersionChain(folder, load, tables_device, self._reasons.append, stop)

    def first(self) -> Scorer:
        """Returns the scorer of the newest version at the start, which nothing holds here afterwards."""
        return self._chain.take_scorer()

    def health(self) -> dict[str, object]:
        """Returns what serves, for /health."""
        now = self._chain.manifest
        about = {"version": now.version, "published": now.time, "place": now.place}
        return about | {"version_refused": self._chain.broken}

    async def run(self, live: Live, metrics: Metrics) -> None:
        """Applies versions as they appear, until it is cancelled."""
        self._show(metrics)
        failed = None
        while True:
            step = None
            try:
                step = await asyncio.to_thread(self._chain.next)
                if step is not None:
                    await self._apply(step, live, metrics)
                failed = None
            except Exception as error:  # such as a storage that does not answer
                if failed != (failed := repr(error)):
                    self._refuse(metrics, failed, "versions cannot be followed now")
                step = None
            self._show(metrics)
            if step is None:
                await asyncio.sleep(POLL_SECONDS)

    async def _apply(self, step: Step, live: Live, metrics: Metrics) -> None:
        if step.scorer is None:
            try:
                await live.apply(step.change)
            except Exception as error:
                self._chain.fail(step, error)
                return
        elif not await live.swap(lambda: step.scorer):
            self._chain.refuse(step, "the server keeps its artifact, see the line before")
            return
        if self._chain.broken is not None and step.version.number > self._chain.manifest.version:
            _log.warning("version %d answers: the chain of versions is whole again", step.version.number)
        self._chain.done(step)
        metrics.versions.labels("applied").inc()

    def _show(self, metrics: Metrics) -> None:
        """Says what has been refused, and which version answers."""
        for reason in self._reasons:
            self._refuse(metrics, reason, f"version {self._chain.manifest.version} answers on")
        self._reasons.clear()
        metrics.version.set(self._chain.manifest.version)
        metrics.version_published.set(self._chain.manifest.time)
        metrics.version_broken.set(self._chain.broken is not None)

    @staticmethod
    def _refuse(metrics: Metrics, reason: str, what: str) -> None:
        metrics.versions.labels("refused").inc()
        _log.error("%s: %s", what, reason)


def open_follower(
    folder: Path, load: Callable[[Path], Scorer], tables_device: str | None, stop: int | None
) -> Follower:
    """Opens a folder of versions for a server; an ArtifactError names the folder."""
    if not folder.is_dir():
        raise ArtifactError(f"--follow {folder}: no such folder")
    return Follower(folder, load, tables_device, stop)
