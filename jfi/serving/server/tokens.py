"""Tokens of callers, in a file that is read again once it has changed: who may read, write and delete.

A line has one scope or more, and a token or its SHA-256; the rest of a line after `#` is a comment:

    read          the scores' token
    read write    sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
"""

import hashlib
import hmac
import logging
import re
import time
from pathlib import Path

from aiohttp import web
from prometheus_client import Counter

from jfi.utils.errors import InputError
from jfi.utils.files import reading_file

#: What a token may be for.
_SCOPES = {"read", "write", "delete"}
_TOKEN = re.compile(r"[\w.~+/=-]{16,}", re.ASCII)
_SUM = re.compile(r"sha256:[0-9a-fA-F]{64}")
#: Paths of probes, which need no token.
_OPEN = ("/health/live", "/health/ready")
#: Seconds between two looks at the file.
_LOOK_SECONDS = 1.0
_log = logging.getLogger("jfi.serving")


class Tokens:
    """The tokens of a file.

    Args:
        refused: counts changes of the file that cannot be read, after which the tokens stay as they were.

    Raises:
        InputError: there is no such file, or a line is malformed, or none has a token.
    """

    def __init__(self, path: Path, refused: Counter) -> None:
        self._path, self._refused, self._looked = path, refused, time.monotonic()
        self._version, self._scopes = _version(path), read_tokens(path)
        if path.stat().st_mode & 0o004:
            _log.warning("--tokens %s: all users of this machine may read it; chmod o-r it", path)

    def check(self, request: web.Request, path: str) -> None:
        """Checks that a request may do what it asks for, before its body is read.

        Raises:
            web.HTTPUnauthorized: it has no token, or an unknown one.
            web.HTTPForbidden: its token is for other scopes.
        """
        if path in _OPEN:
            return
        self._look()
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            how = {"WWW-Authenticate": "Bearer"}
            raise web.HTTPUnauthorized(text="the request needs a header Authorization: Bearer TOKEN", headers=how)
        given, own = hashlib.sha256(token.strip().encode(errors="surrogateescape")).digest(), set()
        for one, scopes in self._scopes.items():  # all of them, so that the time tells nothing
            own |= scopes if hmac.compare_digest(one, given) else set()
        if not own:
            how = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
            raise web.HTTPUnauthorized(text="the token is unknown", headers=how)
        wanted = "delete" if request.method == "DELETE" else "write"
        if request.method in ("GET", "HEAD") or path == "/score":
            wanted = "read"
        if wanted not in own:
            how = {"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{wanted}"'}
            raise web.HTTPForbidden(text=f"the token is not for the scope {wanted}", headers=how)

    def _look(self) -> None:
        """Reads the file if it has changed, at most once a second."""
        if (now := time.monotonic()) - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        if (version := _version(self._path)) == self._version:
            return
        self._version = version
        try:
            self._scopes = read_tokens(self._path)
        except (InputError, OSError) as error:
            self._refused.inc()
            _log.error("the tokens stay as they were: %s", error)


def read_tokens(path: Path) -> dict[bytes, set[str]]:
    """Returns by SHA-256 of a token its scopes.

    Raises:
        InputError: a line is malformed, which the message names without its words, or there is no token.
    """
    found: dict[bytes, set[str]] = {}
    with reading_file(path, InputError):
        lines = path.read_bytes().decode(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if not (words := line.partition("#")[0].split()):
            continue
        *scopes, token = words
        if _SUM.fullmatch(token):
            digest = bytes.fromhex(token.removeprefix("sha256:"))
        elif _TOKEN.fullmatch(token):
            digest = hashlib.sha256(token.encode()).digest()
        else:
            scopes = []
        if not scopes or not _SCOPES.issuperset(scopes):
            token = "a token of at least 16 letters, digits and -._~+/=, or sha256: and 64 hexadecimal digits"
            raise InputError(f"--tokens {path}:{number}: must be some of read, write and delete, and {token}")
        found.setdefault(digest, set()).update(scopes)
    if not found:
        raise InputError(f"--tokens {path}: has no token")
    return found


def _version(path: Path) -> tuple[int, ...] | None:
    """Returns what changes with the content of a file; None if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
