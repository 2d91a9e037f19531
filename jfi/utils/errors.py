"""Errors whose messages are for users, hints for them, and errors of memory; needs the standard library alone."""

import errno
import os
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches

#: Longer names are not compared: `difflib` would take a second for some megabytes.
_MAX_LENGTH = 100
#: The words of torch, CUDA, NCCL, DuckDB, Arrow, the loader and Python in errors of other types than MemoryError.
_WORDS = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc|ALLOC_FAILED"
    r"|can't start new thread|resource temporarily unavailable|failed to map segment",
    re.IGNORECASE,
)
#: By the words of the error the numbers of errors of the storage.
_STORAGE = {os.strerror(number): number for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS)}
_STORAGE["File size limit exceeded"] = errno.EFBIG
#: Arrow's message.
_SIZE = re.compile(r"alloc of size (\d+) failed")


class InputError(ValueError):
    """A fault in what a user gave: a file, a setting or an option. A command prints it as one line, exit code 2."""


def import_line(error: BaseException) -> str | None:
    """Returns a line on a package that is missing, or that does not fit the others; None for any other error."""
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name and error.name != "jfi":
        extras = "'jfi[cpu,train,serve]' (no GPU) or 'jfi[cuda,train,serve]'"
        return f"no module named {error.name}, which jfi needs: pip install {extras}"
    return str(error) if type(error) is ImportError and error.name is None else None  # as jfi.utils.lockstep raises it


def suggest(name: str, known: Iterable[str], cutoff: float = 0.6, prefix: str = "") -> str:
    """Returns the end of an "unknown name" message: the nearest known name, or all of them where none is near.

    Args:
        name: the unknown name; upper and lower case count as the same letter.
        known: the names that exist.
        cutoff: least similarity of a near name, in [0, 1], as in `difflib.get_close_matches`.
        prefix: put before the names in the hint.

    Example:
        >>> suggest("raitng", ["rating", "timestamp"])
        "did you mean 'rating'?"
        >>> suggest("x", ["rating", "timestamp"])
        'known: rating, timestamp'
    """
    known = list(known)
    by_lower = {one.lower(): one for one in known}
    near = get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff) if len(name) <= _MAX_LENGTH else []
    if near:
        return f"did you mean '{prefix}{by_lower[near[0]]}'?"
    return f"known: {', '.join(prefix + one for one in known) or 'none'}"


def memory_line(error: BaseException) -> str | None:
    """Returns the line of an error's message that speaks of memory, or None if the error is of another kind.

    Example:
        >>> memory_line(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.")), memory_line(ValueError("bad"))
        ('CUDA out of memory. Tried to allocate 2 GiB.', None)
    """
    text = str(error)
    found = next((line.strip() for line in text.splitlines() if _WORDS.search(line)), None)
    if isinstance(error, MemoryError):  # Arrow's and NumPy's are subclasses
        return found or text
    if isinstance(error, OSError):
        return text if error.errno == errno.ENOMEM else None
    # torch.OutOfMemoryError is a RuntimeError.
    others = (("duckdb", "Error"), ("pyarrow", "ArrowException"))
    kinds = [getattr(sys.modules[package], kind) for package, kind in others if sys.modules.get(package)]
    return found if isinstance(error, (RuntimeError, ImportError, *kinds)) else None


def storage_number(text: str) -> int | None:
    """Returns the number of the error of the storage that another program's message speaks of; None if of none.

    Example:
        >>> storage_number("Could not write file x: No space left on device") == errno.ENOSPC
        True
    """
    return next((number for words, number in _STORAGE.items() if words in text), None)


def memory_cause(error: BaseException) -> str | None:
    """Returns the line of the memory error that an error, which names a file as damaged, comes from; None if none does.

    A size beyond the memory of the machine is one that a damaged file has asked for; DuckDB's limit is a setting.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        line = None if type(error).__module__.endswith("duckdb") else memory_line(error)
        if line is not None:
            size = _SIZE.search(line)
            is_absurd = size is not None and int(size[1]) > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return None if is_absurd else line
        error = error.__cause__ or error.__context__
    return None


def shorten(text: str) -> str:
    """The text in one line of at most 500 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 500 else f"{line[:499]}…"
