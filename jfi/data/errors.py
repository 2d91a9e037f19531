from collections.abc import Iterable
from difflib import get_close_matches


class DataError(ValueError):
    """A fault of the input data or of the config that describes it: one line that names the place."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an "unknown name" message: the nearest known name, or all of them when none is near.

    >>> nearest("raitng", ["rating", "timestamp"])
    "did you mean 'rating'?"
    """
    known = list(known)
    by_lower = {k.lower(): k for k in known}
    close = get_close_matches(name.lower(), by_lower, n=1)
    return f"did you mean '{by_lower[close[0]]}'?" if close else f"known: {', '.join(known)}"
