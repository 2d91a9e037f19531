"""Hints for messages about unknown names; needs the standard library alone."""

from collections.abc import Iterable
from difflib import get_close_matches

#: Longer names are not compared: `difflib` would take a second for some megabytes.
_MAX_LENGTH = 100


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
