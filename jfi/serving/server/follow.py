"""A server that follows published versions: read in a thread, they are applied between calls of the model."""

import asyncio
import logging

from jfi.serving.server.live import Live
from jfi.serving.server.metrics import Metrics
from jfi.serving.version_chain import VersionChain

#: Seconds between two looks at the folder.
POLL_SECONDS = 0.2
_log = logging.getLogger("jfi.serving")


class VersionFollower(VersionChain):
    """Keeps a server at the newest version of a folder."""

    def health(self) -> dict[str, object]:
        """Returns what serves, for /health."""
        now = self.manifest
        about = {"version": now.version, "published": now.time, "log_position": now.log_position}
        return about | {"refused_reason": self.refused_reason}

    async def run(self, live: Live, metrics: Metrics) -> None:
        """Applies versions as they appear, until it is cancelled."""
        failed = None
        while True:
            self._show(metrics)
            step = None
            try:
                step = await asyncio.to_thread(self.next, live.now.scorer.is_whole)
                failed = None
            except Exception as error:  # such as a storage that does not answer
                if failed != (failed := repr(error)):
                    _log.error("versions cannot be followed now: %s", failed)
            if step is None:
                await asyncio.sleep(POLL_SECONDS)
                continue
            try:
                await (live.apply(step.change) if step.scorer is None else live.replace(step.scorer))
            except Exception as error:
                self.refuse(step, error)
                continue
            if step.scorer is not None or self.refused_reason is not None:
                _log.warning("version %d answers, of artifact %s", step.version.number, live.now.scorer.identity)
            self.done(step)
            metrics.versions.labels("applied").inc()

    def _show(self, metrics: Metrics) -> None:
        """Says what has been refused, and which version answers."""
        for reason in self.reasons:
            metrics.versions.labels("refused").inc()
            _log.error("version %d answers on: %s", self.manifest.version, reason)
        self.reasons.clear()
        metrics.version.set(self.manifest.version)
        metrics.version_published.set(self.manifest.time)
        metrics.version_refused.set(self.refused_reason is not None)
