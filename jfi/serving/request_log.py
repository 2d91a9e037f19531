"""A log of requests: files of lines of JSON, each an answered request with digests of what the model has read.

A line is written whole or is skipped by `read_lines`: a file whose process was killed, or whose disk was full, may end
in a part of one.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from jfi.serving.schema import Served
from jfi.utils.encoding import text_of
from jfi.utils.errors import InputError
from jfi.utils.files import by_number, writing_file

if TYPE_CHECKING:
    from jfi.serving.requests import Request, RequestReader

_log = logging.getLogger("jfi.serving")
#: Features that are no inputs by key: the number of a history's events, their ages, and the weights of a policy.
LENGTH, AGE, WEIGHTS = "history length", "history_age", "history weights"
#: Bytes of a file.
_FILE = 64 << 20
#: Requests, and bytes of their bodies, that wait to be written; of more a line is dropped.
_MOST, _MOST_BYTES = 4096, 32 << 20
#: Seconds that lines gather before they are written, and that the end waits for the last ones.
_GATHER, _END = 0.05, 10.0


class Line(msgspec.Struct):
    """A request as a file has it.

    Args:
        id: its X-Request-ID.
        written: time of the server, seconds since 1970.
        now: the time that it was scored at.
        version: of the published versions, or None.
        position: rows of the log that the state had; 0 without a state.
        oldest: seconds since 1970, up to which events had expired; None if all are kept.
        scores: of the candidates, of several labels by name.
        features: digests of what the model has read.
    """

    id: str
    written: float
    now: float
    model: Served
    version: int | None
    position: int
    available: bool
    scores: list[float] | dict[str, list[float]]
    features: dict[str, str]
    request: msgspec.Raw
    oldest: float | None = None


def digest(*arrays: np.ndarray) -> str:
    """Returns 16 hexadecimal digits of numbers, whatever their width: integers as int64, others as float32.

    Example:
        >>> digest(np.array([1, 2], np.int32)) == digest(np.array([1, 2]))
        True
    """
    found = blake2b(digest_size=8)
    for one in arrays:
        if one.dtype.kind == "f":
            one = one.astype(np.float32) + np.float32(0)  # -0.0 is 0.0
        found.update(np.ascontiguousarray(one, np.float32 if one.dtype.kind == "f" else np.int64))
    return found.hexdigest()


def digests(request: "Request", reader: "RequestReader") -> dict[str, str]:
    """Returns by feature the digest of what the model reads of a request, and the length of its history as it is."""
    counts, dense = request.counts, reader.dense_names
    found = {key: digest(ids, counts[key]) if key in counts else digest(ids) for key, ids in request.ids.items()}
    found |= {name: digest(request.dense[:, column]) for column, name in enumerate(dense)}
    if request.ages is not None:
        found[AGE] = digest(request.ages)
    if reader.schema.event:
        found[LENGTH] = str(request.num_events)
    if reader.schema.policy is not None:
        weights = request.weights
        found[WEIGHTS] = digest(np.ones(request.num_events, np.float32) if weights is None else weights)
    return found


class RequestLog:
    """Writes a share of the answered requests, in a thread of its own.

    Where the disk is slow or full lines are dropped; `add` never waits for it.

    Args:
        folder: of the files, made if it is not there; several servers may write to one.
        share: of the requests, chosen by their ids.
        max_bytes: of all files of the folder; the oldest are removed.
        count: called with "written" or "dropped" and a number of lines.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, share: float, max_bytes: int, count: Callable[[str, int], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._chosen, self._max_bytes, self._count = folder, int(share * 2**64), max_bytes, count
        self._file: int | None = None
        self._size = self._bytes = 0
        self._waiting: list[tuple] = []
        #: Hold what waits, and the file.
        self._lock, self._writing, self._is_closing = threading.Lock(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="request log", daemon=True)
        self._thread.start()

    def add(self, name: str, body: bytes, scores: object, request: "Request", reader: "RequestReader") -> None:
        """Takes an answered request to write, if its id is among those that are chosen.

        Args:
            name: its id.
            body: of the request, which was valid.
        """
        if int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >= self._chosen:
            return
        with self._lock:
            if len(self._waiting) < _MOST and self._bytes + len(body) <= _MOST_BYTES:
                self._waiting.append((name, time.time(), body, scores, request, reader))
                self._bytes += len(body)
                return
        self._count("dropped", 1)

    def close(self) -> None:
        """Writes what waits."""
        self._is_closing.set()
        self._thread.join(_END)

    def _run(self) -> None:
        is_last = has_failed = False
        while not is_last:
            is_last = self._is_closing.wait(_GATHER)
            with self._writing:  # until all that is taken is written: `remove_user` finds it in no other place
                with self._lock:
                    taken, self._waiting, self._bytes = self._waiting, [], 0
                for begin in range(0, len(taken), 64):
                    part = taken[begin : begin + 64]
                    try:
                        self._write(b"".join(map(_line, part)))
                        fault = None
                    except Exception as error:  # the thread goes on, whatever it is
                        self._close_file()  # which may end in a part of a line
                        fault = error
                    self._count("written" if fault is None else "dropped", len(part))
                    if fault is not None and not has_failed:
                        _log.warning("requests are dropped from the log %s: %s", self._folder, fault)
                    has_failed = fault is not None
        self._close_file()

    def remove_user(self, user: str, user_id: str | None) -> int:
        """Removes the lines of a user, those that wait too; see the function of this name."""
        with self._writing:
            self._close_file()
            with self._lock:
                self._waiting = [one for one in self._waiting if user_of(msgspec.json.decode(one[2]), user_id) != user]
                self._bytes = sum(len(one[2]) for one in self._waiting)
            return remove_user(self._folder, user, user_id)

    def _write(self, content: bytes) -> None:
        if self._file is None:
            self._open()
        self._size += len(content)
        while content:
            content = content[os.write(self._file, content) :]
        if self._size >= min(_FILE, self._max_bytes // 4):
            self._close_file()

    def _open(self) -> None:
        files = _files(self._folder)
        sizes = [file.stat().st_size for file in files]
        left = self._max_bytes - min(_FILE, self._max_bytes // 4)
        for file, size in zip(files, sizes, strict=True):
            if sum(sizes) <= left:
                break
            file.unlink(missing_ok=True)
            left += size
        name = f"requests-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z.jsonl"
        # Requests are as private as the log of events.
        self._file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._size = 0

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _line(entry: tuple) -> bytes:
    name, written, body, scores, request, reader = entry
    stored, whole = request.stored, request.filled or request
    state = (0, True) if stored is None else (stored.position, stored.is_available)
    oldest = None if stored is None else stored.oldest
    raw = msgspec.Raw(body.replace(b"\n", b" "))  # between values alone: a text of JSON has none
    found = digests(whole, reader)
    line = Line(name, written, request.now, request.model, request.version, *state, scores, found, raw, oldest)
    return msgspec.json.encode(line) + b"\n"


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("requests-*.jsonl"), key=by_number)


def read_lines(folder: Path) -> Iterator[Line]:
    """Yields the requests of a folder or a file, oldest file first; a part of a line is skipped.

    Raises:
        InputError: there is no such folder, or a line is none of a request.
    """
    if not (files := [folder] if folder.is_file() else _files(folder)):
        raise InputError(f"--requests {folder}: no file requests-*.jsonl, as a server with --log-requests writes it")
    read = msgspec.json.Decoder(Line).decode
    for file in files:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n"):
                    try:
                        yield read(line)
                    except msgspec.MsgspecError as fault:
                        raise InputError(f"{file}: line {number} is no request: {fault}") from None


def user_of(body: dict, user_id: str | None) -> str | None:
    """Returns the text of a request's user, None without one."""
    given = body["user"]
    return text_of(given.get(user_id) if isinstance(given, dict) else given)


def remove_user(folder: Path, user: str, user_id: str | None) -> int:
    """Removes the lines of a user; returns how many there were.

    Args:
        folder: of the files, none of which is being written.
    """
    removed, decode = 0, msgspec.json.Decoder(Line).decode
    for file in _files(folder):
        with open(file, "rb") as lines:  # not splitlines: a body may have carriage returns between its values
            whole = [line for line in lines if line.endswith(b"\n")]
        kept = [line for line in whole if user_of(msgspec.json.decode(decode(line).request), user_id) != user]
        if len(kept) < len(whole):
            removed += len(whole) - len(kept)
            with writing_file(file) as unfinished:
                unfinished.touch(0o600)
                unfinished.write_bytes(b"".join(kept))
    return removed
