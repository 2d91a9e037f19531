"""Durable stores of bytes by key: LMDB, a folder on this machine, and Redis or Valkey, for several servers.

Both have four operations. `get` reads many keys in one call; `update` reads and writes many keys, all or none of them,
and no other writer comes between; `put` writes many keys without that promise, to fill a new store; `scan` reads all.
"""

import os
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from jfi.utils.errors import InputError
from jfi.utils.files import try_lock

#: Reads keys within an update, in their order; None for one that is not there.
Get = Callable[[Sequence[bytes]], list[bytes | None]]
#: By key what an update writes; None removes the key.
Changes = dict[bytes, bytes | None]

#: Keys that are written, read or scanned together.
_AT_ONCE = 1000
#: Bytes of values that `put` writes together.
_BYTES_AT_ONCE = 1 << 26
#: Times that an update of Redis is tried, if other servers write the same keys meanwhile.
_TRIES = 100
#: Seconds for which a Redis server that has not answered is not called again: each call would wait for its timeout.
_PAUSE = 1.0
#: Seconds after which a name that a process holds on a server is free, if the process has not asked again.
_HOLD_SECONDS = 10
#: What the client says before an error of a pipeline: the command, with all bytes of its value.
_COMMAND = re.compile(r"Command # \d+ \(.*\) of pipeline caused error: ", re.DOTALL)
#: Name of the environment variable with the password of a server: all users of a machine see what commands are given.
PASSWORD = "JFI_STATE_PASSWORD"
_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")


class StateError(InputError):
    """A state of users that is missing, damaged or made for another run."""


@contextmanager
def finding_damage(what: str) -> Iterator[None]:
    """Turns errors of decoding a part of a state into a StateError that names it."""
    try:
        yield
    except (ValueError, KeyError, struct.error, msgspec.MsgspecError) as error:
        raise StateError(f"the state of users is damaged: {what}: {error}") from None


class StoreUnavailableError(Exception):
    """The store is down, slow or full, as one line that says why; nothing was acknowledged."""


class Store(Protocol):
    """Bytes by key."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Returns the values of keys, None for a key that is not there."""

    def snapshot(self) -> AbstractContextManager[Get]:
        """Gives what reads keys as `get` does, in a folder as of the moment when the block began."""
        return nullcontext(self.get)

    def update(self, change: Callable[[Get], Changes]) -> None:
        """Writes what `change` returns, all or nothing; it may be called several times and must have no effect else.

        Args:
            change: gets a function that reads keys; what it has read is as it was when the changes are written.
        """

    def put(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Writes keys with their values, in several steps."""

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields all keys that begin with `prefix`, and their values; on Redis not all that is written meanwhile."""
        return chain.from_iterable(self.pages([prefix]))

    def hold(self, name: str) -> bool:
        """Tries to be the one process that holds a name, until the process ends or, on a server, 10 s after a call."""

    def pages(self, prefixes: Sequence[bytes]) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yields keys and values by lists: all keys that begin with one of `prefixes`, which have one length."""

    def check(self) -> None:
        """Raises StateError if the store may remove keys by itself."""

    def close(self) -> None:
        """Releases the store."""


def is_url(name: str) -> bool:
    """Returns whether a store is on a server, and not a folder."""
    return urlsplit(name).scheme in _SCHEMES


def without_password(name: str) -> str:
    """Returns the name of a store as messages show it.

    Example:
        >>> without_password("redis://writer:secret@localhost:6379/0?prefix=clicks")
        'redis://writer:***@localhost:6379/0?prefix=clicks'
    """
    return re.sub(r"(//[^/@:]*:)[^?]*(?=@)|([?&]password=)[^&]*", r"\1\2***", name) if is_url(name) else name


def open_store(
    name: str, *, create: bool = False, max_gb: int = 256, timeout: float = 0.2, write_timeout: float = 5.0
) -> Store:
    """Opens a store.

    Args:
        name: a folder of LMDB, or the URL of a Redis or Valkey server, such as `redis://localhost:6379/0?prefix=clicks`;
            a server's store may be one of several with different prefixes, "jfi" by default.
        max_gb: most GiB that a folder takes.
        timeout, write_timeout: as of RedisStore.

    Raises:
        StateError: there is no such folder, it is no store, or a package is missing.
    """
    if is_url(name):
        return RedisStore(name, timeout, write_timeout)
    return LmdbStore(Path(name), create, max_gb << 30)


class LmdbStore(Store):
    """A store in a folder, by LMDB: several processes of one machine may open it.

    A write is on the disk when `update` returns. Reads wait for no writer.

    Args:
        max_bytes: of the data. The file grows as it is filled.

    Raises:
        StateError: there is no such folder, or it is no store.
    """

    def __init__(self, path: Path, create: bool = False, max_bytes: int = 2**38) -> None:
        try:
            import lmdb
        except ModuleNotFoundError:
            raise StateError("the state of users in a folder needs lmdb: pip install 'jfi[serve]'") from None
        if not create and not (path / "data.mdb").is_file():
            raise StateError(f"{path} is not a state of users: it has no data.mdb; `jfi state load` makes one")
        self._error = lmdb.Error
        try:
            self._environment = lmdb.open(str(path), map_size=max_bytes, create=create, readahead=False)
        except lmdb.Error as error:
            why = error if os.access(path, os.W_OK) else "it must be writable, also to be read"
            raise StateError(f"{path} cannot be opened: {why}") from None
        self._path = path
        #: By name the file whose lock is held.
        self._held: dict[str, int] = {}

    @contextmanager
    def _naming_faults(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise StoreUnavailableError(f"LMDB: {error}") from None

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See Store; one read transaction, so that all values are of one moment."""
        with self.snapshot() as get:
            return get(keys)

    @contextmanager
    def snapshot(self) -> Iterator[Get]:
        """See Store."""
        with self._naming_faults(), self._environment.begin() as transaction:
            yield lambda keys: list(map(transaction.get, keys))

    def update(self, change: Callable[[Get], Changes]) -> None:
        """See Store."""
        with self._naming_faults():
            self._environment.reader_check()  # the snapshots of processes that were killed would keep freed pages
            with self._environment.begin(write=True) as transaction:
                for key, value in change(lambda keys: list(map(transaction.get, keys))).items():
                    if value is None:
                        transaction.delete(key)
                    else:
                        transaction.put(key, value)

    def put(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """See Store."""
        for part in _parts(items):
            self.update(lambda _, part=part: dict(part))

    def scan(self, prefix: bytes, begin: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """See Store; all values are of one moment; from the key `begin` on."""
        with self._naming_faults(), self._environment.begin() as transaction, transaction.cursor() as cursor:
            if cursor.set_range(begin or prefix):
                for key, value in cursor:
                    if not key.startswith(prefix):
                        break
                    yield key, value

    def hold(self, name: str) -> bool:
        """See Store; by the lock of a file."""
        if name not in self._held:
            file = os.open(self._path / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
            if try_lock(file) is False:
                os.close(file)
                return False
            self._held[name] = file
        return True

    def pages(self, prefixes: Sequence[bytes]) -> Iterator[list[tuple[bytes, bytes]]]:
        """See Store."""
        for prefix, begin in zip(prefixes, prefixes, strict=True):
            while page := list(islice(self.scan(prefix, begin), _AT_ONCE)):
                yield page
                begin = page[-1][0] + b"\0"

    def close(self) -> None:
        """See Store."""
        for file in self._held.values():
            os.close(file)
        self._held.clear()
        self._environment.close()


class _Client:
    """A client of a Redis server with a timeout of its own.

    Args:
        url: of the server; the password is that of `PASSWORD`.
        timeout: seconds for a connection, and for an answer.
    """

    def __init__(self, valkey: ModuleType, url: str, timeout: float) -> None:
        self._timeout, self._late = timeout, (valkey.TimeoutError, TimeoutError)
        self._fault, self._conflict, self._refusal = valkey.ValkeyError, valkey.WatchError, valkey.ResponseError
        how = {"socket_timeout": timeout, "socket_connect_timeout": timeout, "password": os.environ.get(PASSWORD)}
        self.own = valkey.Valkey.from_url(url, **how)
        self.own.connection_pool.make_connection()  # reads the parameters, and connects only when it is used
        #: Why the last call got no answer, and until when none is made.
        self._why, self._until = "", 0.0

    def lost(self, conflict: Exception) -> Exception | None:
        """Returns the lost connection that a conflict over watched keys stands for, None for a real conflict."""
        return conflict.__context__ if isinstance(conflict.__context__, (self._fault, OSError)) else None

    @contextmanager
    def __call__(self) -> Iterator[Any]:
        """Gives the client, whose faults become StoreUnavailableErrors; at once for a while after a missing answer."""
        if time.monotonic() < self._until:
            raise StoreUnavailableError(self._why)
        try:
            yield self.own
        except (self._fault, OSError) as error:
            if isinstance(error, self._conflict):
                error = self.lost(error) or error
            why = "Redis: " + _COMMAND.sub("", str(error), count=1).rstrip(".")
            if isinstance(error, self._late):
                why = f"Redis did not answer in {self._timeout:g} s"
            if not isinstance(error, self._refusal):
                self._why, self._until = why, time.monotonic() + _PAUSE
            raise StoreUnavailableError(why) from None


class RedisStore(Store):
    """A store on a Redis or Valkey server, for several servers at a time.

    Its durability is that of the Redis server: `appendonly yes` with `appendfsync always` keeps all that was
    acknowledged.

    Args:
        url: of the server, without the password, which is that of `PASSWORD`; its parameter `prefix` is put before all
            keys, with a colon, which it does not have itself: the keys of one prefix would begin as those of another.
        timeout: seconds for an answer.
        write_timeout: seconds for an answer to `update` and `put`, at least `timeout`.

    Raises:
        StateError: the package valkey is missing, or a wrong URL, such as one with a password.
    """

    def __init__(self, url: str, timeout: float = 0.2, write_timeout: float = 5.0) -> None:
        try:
            import valkey
        except ModuleNotFoundError:
            raise StateError(f"{without_password(url)} needs the package valkey: pip install 'jfi[serve]'") from None
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        prefix = query.pop("prefix", "jfi")
        if ":" in prefix:
            raise StateError(f"{without_password(url)} cannot be used: prefix is '{prefix}', must have no colon")
        if without_password(url) != url:
            why = f"all users of the machine see its password; set the environment variable {PASSWORD} to it"
            raise StateError(f"{without_password(url)} cannot be used: {why}")
        self._prefix, self._owner = prefix.encode() + b":", secrets.token_bytes(16)
        scheme = parts.scheme.replace("redis", "valkey")
        address = parts._replace(scheme=scheme, query=urlencode(query)).geturl()
        self._name, self._conflict = without_password(url), valkey.WatchError
        try:
            self._reads = _Client(valkey, address, timeout)
            self._writes = _Client(valkey, address, max(timeout, write_timeout))
        except (valkey.ValkeyError, ValueError, TypeError) as error:
            raise StateError(f"{self._name} cannot be used: {error}") from None

    def _own(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self._prefix + key for key in keys]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See Store; one MGET."""
        with self._reads() as client:
            return client.mget(self._own(keys)) if keys else []

    def update(self, change: Callable[[Get], Changes]) -> None:
        """See Store; optimistic, by WATCH, MULTI and EXEC."""
        with self._writes() as client:
            for _ in range(_TRIES):
                with client.pipeline() as pipeline:

                    def get(keys: Sequence[bytes], pipeline=pipeline) -> list[bytes | None]:
                        if not keys:
                            return []
                        pipeline.watch(*self._own(keys))
                        return pipeline.mget(self._own(keys))

                    changes = change(get)
                    pipeline.multi()
                    for key, value in changes.items():
                        if value is None:
                            pipeline.delete(self._prefix + key)
                        else:
                            pipeline.set(self._prefix + key, value)
                    try:
                        pipeline.execute()
                        return
                    except self._conflict as fault:
                        # The client raises it for a lost answer, too: it is unknown whether the changes were written.
                        if self._writes.lost(fault) is not None:
                            raise
        raise StoreUnavailableError(f"Redis: other servers have written the same keys {_TRIES} times")

    def put(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """See Store."""
        for part in _parts(items):
            with self._writes() as client:
                client.mset({self._prefix + key: value for key, value in part})

    def pages(self, prefixes: Sequence[bytes]) -> Iterator[list[tuple[bytes, bytes]]]:
        """See Store; all keys of the server are read once."""
        pattern, own, seen, cursor = b"", tuple(self._own(prefixes)), set[bytes](), None
        for column in zip(*own, strict=True):
            one = bytes(column[:1])
            pattern += b"?" if len({*column}) > 1 else b"\\" + one if one in b"*?[]\\^" else one
        while cursor != 0:
            with self._reads() as client:
                cursor, found = client.scan(cursor or 0, match=pattern + b"*", count=_AT_ONCE)
            keys = {key.removeprefix(self._prefix) for key in found if key.startswith(own)} - seen
            seen |= keys  # SCAN may give a key several times
            yield [(key, value) for key, value in zip(keys, self.get([*keys]), strict=True) if value is not None]

    def hold(self, name: str) -> bool:
        """See Store; by a key that expires."""
        key = self._prefix + b"l" + name.encode()
        with self._writes() as client:
            if client.set(key, self._owner, nx=True, ex=_HOLD_SECONDS):
                return True
            return client.get(key) == self._owner and bool(client.expire(key, _HOLD_SECONDS))

    def check(self) -> None:
        """See Store."""
        with self._reads() as client:
            policy = client.info("memory").get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys"):  # volatile ones remove keys with an expiry, which these have not
            why = "which removes events of users; set it to noeviction"
            raise StateError(f"{self._name}: its maxmemory-policy is {policy}, {why}")

    def close(self) -> None:
        """See Store."""
        self._reads.own.close()
        self._writes.own.close()


def _parts(items: Iterable[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yields lists of items, of bounded size."""
    part, size = [], 0
    for key, value in items:
        part.append((key, value))
        size += len(value)
        if len(part) >= _AT_ONCE * 10 or size >= _BYTES_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part
