"""Runs `jfi serve`."""

import argparse
import asyncio
import gc
import logging
import math
import re
import resource
import signal
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from jfi.cli.state import own_state
from jfi.serving.artifact import ArtifactError
from jfi.serving.request_log import RequestLog
from jfi.serving.scorer import Scorer, StateSettings
from jfi.state.outbox import PartWriter
from jfi.state.retention import DAY, Retention
from jfi.state.state import read_layout
from jfi.state.stores import Store, open_store
from jfi.utils.errors import InputError
from jfi.utils.files import reading_file

_SHA256 = r"[0-9a-fA-F]{64}"


def load_artifact(options: argparse.Namespace, store: Store | None, path: Path) -> Scorer:
    """Loads an artifact."""
    limits = options.tables_device, options.max_candidates, options.max_history
    state = None
    if store is not None:
        cold = options.if_state_fails == "cold"
        kept = Retention((options.keep_days or math.inf) * DAY, options.user_quota, options.log or options.feed)
        is_logged = options.log is not None
        state = StateSettings(store, cold, options.late_seconds, options.max_events, kept, is_logged)
    sums = known_sums(options.sha256)
    return Scorer(path, *limits, output=options.output, sha256=sums, state=state)


def open_state(options: argparse.Namespace) -> Store | None:
    """Opens the store of the state, once for all artifacts that are served; by default what `jfi export` has made."""
    own, name = own_state(options.artifact, options.follow), options.state
    if name is None and own.is_dir():
        name = str(own)
        print(f"state {name}", flush=True)
    if name in (None, "none"):
        return None
    return open_store(name, max_gb=options.state_gb, timeout=options.state_timeout_ms / 1e3)


def known_sums(given: str | None) -> set[str] | None:
    """The SHA-256 of the artifacts that may be served; None for any."""
    if given is None:
        return None
    known = given
    if not re.fullmatch(_SHA256, given):
        if not Path(given).is_file():
            raise ArtifactError(f"--sha256 {given}: is neither 64 hexadecimal digits nor a file")
        with reading_file(given, ArtifactError):
            known = Path(given).read_bytes().decode(errors="replace")
    for number, line in enumerate(known.splitlines(), 1):
        if (text := line.strip()) and not re.fullmatch(_SHA256, text):
            what = f"line {number} must be 64 hexadecimal digits, got {text[:80]!r}"
            raise ArtifactError(f"--sha256 {given}: {what}")
    if not known.split():
        raise ArtifactError(f"--sha256 {given}: has no SHA-256")
    return set(known.lower().split())


def most_connections(wanted: int) -> int:
    """Returns how many connections, at most `wanted`, leave file descriptors to the rest of the process."""
    own = 256  # the model, the state, versions that are loaded, and connections that are just accepted
    soft, hard = (
        sys.maxsize if one == resource.RLIM_INFINITY else one for one in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft < wanted + own:
        soft = min(wanted + own, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard if hard < sys.maxsize else resource.RLIM_INFINITY))
    return min(wanted, max(soft - own, soft // 4))


def serve(options: argparse.Namespace, store: Store | None) -> None:
    """Serves until a signal, with the state of a store."""
    from prometheus_client import disable_created_metrics

    from jfi.serving.server.app import make_app, once_a_minute, run, without_traceback
    from jfi.serving.server.events import write_parts
    from jfi.serving.server.follow import VersionFollower

    disable_created_metrics()  # the time of a counter's first value, a sample more for each
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("aiohttp.server").addFilter(without_traceback)
    logging.getLogger("asyncio").addFilter(once_a_minute())
    if options.access_log:
        logging.getLogger("jfi.serving").setLevel(logging.INFO)
    sys.setswitchinterval(0.001)  # seconds that the event loop waits while another thread computes in Python
    load, follower, tasks = partial(load_artifact, options, store), None, []
    if options.log is not None:
        writer = PartWriter(store, read_layout(store), options.log, options.log_rows, options.log_seconds)
        tasks.append(partial(write_parts, writer))
    if options.feed is not None:
        from jfi.follow.feed import Feed  # with pyarrow

        tasks.append(Feed(options.feed).run)
    if options.follow is not None:
        follower = VersionFollower(options.follow, load, options.tables_device, options.at)
    log = None
    if options.log_requests is not None:
        options.log_requests.mkdir(parents=True, exist_ok=True)  # whose faults name it
        log = partial(RequestLog, options.log_requests, options.share or 0.01, options.log_requests_mb << 20)
    app = make_app(
        load(options.artifact) if follower is None else follower.start(),
        max_batch=options.max_batch,
        max_wait=options.max_wait_ms / 1e3,
        queue=options.queue,
        max_body=options.max_body_mb * 2**20,
        bodies=options.bodies,
        connections=most_connections(options.connections),
        body_seconds=options.body_seconds,
        deadline=options.deadline_ms / 1e3,
        follower=follower,
        tasks=tasks,
        feed=options.feed,
        log=log,
        tokens=options.tokens,
    )

    async def run_until_signal() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run(app, options.host, options.port, stop, options.drain_seconds)

    try:
        asyncio.run(run_until_signal())
    except (OSError, OverflowError) as error:  # OverflowError: the port is out of range
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{options.host}:{options.port}: {reason}") from None


def main(options: argparse.Namespace) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    if absent := [name for name in ("orjson", "aiohttp", "prometheus_client") if find_spec(name) is None]:
        raise InputError(f"jfi serve needs {' and '.join(absent)}: pip install 'jfi[serve]'")
    if options.at is not None and options.follow is None:
        raise InputError("--at is a version of --follow FOLDER")
    if options.log_requests is None and options.share is not None:
        raise InputError("--share is a part of --log-requests FOLDER")
    if options.follow is not None and not options.follow.is_dir():
        raise ArtifactError(f"--follow {options.follow}: no such folder")
    # At the default of 700 objects the lists of a body so far are visited ever again: 2 MB of `[],` take 2 s, not 0.2.
    gc.set_threshold(100_000)
    store = open_state(options)
    needs = [name for name in ("log", "feed", "keep_days", "user_quota") if getattr(options, name) is not None]
    if store is None and needs:
        raise InputError(f"--{needs[0].replace('_', '-')} needs a state: name it by --state")
    try:
        serve(options, store)
    finally:
        if store is not None:
            store.close()
