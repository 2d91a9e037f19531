"""Values that run code, or write a file, where a loader takes them for a class, a module, a command or a path."""

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest

MODULE = "hostile_marker"


class Marker:
    """A file that an import of `MODULE`, a call of what it holds and a shell make; `check` says that none did.

    Args:
        folder: for the file and the module.
        patch: undoes the change of the path of modules.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.path = folder / "marker"
        (folder / f"{MODULE}.py").write_text(
            f"from pathlib import Path\nMarker = Path({str(self.path)!r}).touch\nMarker()\n"
        )
        patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, MODULE, raising=False)

    def values(self) -> list[Any]:
        """Returns a value of each kind."""
        by_class = {"class_path": f"{MODULE}.Marker", "init_args": {}}
        target = {"_target_": f"{MODULE}.Marker", "kind": f"{MODULE}:Marker", "module": MODULE}
        shell = f"$(touch {self.path}); touch {self.path} | touch {self.path} `touch {self.path}`"
        return [f"{MODULE}:Marker", f"{MODULE}.Marker", by_class, target, shell, str(self.path)]

    def check(self, what: object) -> None:
        """Fails if code of a file has run; `what` names it."""
        assert MODULE not in sys.modules and not self.path.exists(), what


#: Audit events of a process that goes beyond its files.
_BEYOND = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen", "os.system", "os.exec")
_BEYOND += ("os.posix_spawn", "os.spawn", "os.fork", "urllib.Request", "http.client.connect")
_recorded: list[str] | None = None


def _record(event: str, _: tuple) -> None:
    if _recorded is not None and event in _BEYOND:
        _recorded.append(event)


sys.addaudithook(_record)  # which stays as long as the process


@contextmanager
def recording() -> Iterator[list[str]]:
    """Yields a list of what the process does beyond its files, such as opening a socket or a file system of fsspec."""
    global _recorded
    _recorded, of_protocol = [], fsspec.core.get_filesystem_class

    def recorded(protocol: str) -> type:
        if protocol not in ("file", "local"):
            _recorded.append(protocol)
        return of_protocol(protocol)

    try:
        with mock.patch.object(fsspec.core, "get_filesystem_class", recorded):
            yield _recorded
    finally:
        _recorded = None


def nodes(tree: Any, at: tuple = ()) -> Iterator[tuple]:
    """Yields the path of each value of nested dicts and lists, the dicts and lists themselves among them."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*at, key)
        yield from nodes(value, (*at, key))


def replaced(tree: Any, path: tuple, value: Any) -> Any:
    """Returns a copy of a tree with another value at a path."""
    tree = copy.deepcopy(tree)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return tree


def attack(marker: Marker, tree: Any, write: Callable[[Any], object], commands: list[Callable], few: int | None) -> int:
    """Puts hostile values into a file, one at a time, and lets a command load it; returns how often.

    Args:
        marker: says whether code has run.
        tree: what the file holds.
        write: writes the file with another tree, and right checksums.
        commands: each loads the file, or raises an Exception.
        few: so many random places, each with one of the values; None for all places, each with all values.
    """
    places, draw = list(nodes(tree)), random.Random(0)
    if few is None:
        attacks = [(place, value) for place in places for value in marker.values()]
    else:
        attacks = [(draw.choice(places), draw.choice(marker.values())) for _ in range(few)]
    for place, value in attacks:
        command = draw.choice(commands)
        write(replaced(tree, place, value))
        with suppress(Exception):  # how files are refused other tests say
            command()
        marker.check((place, value, command))
    write(tree)
    return len(attacks)
