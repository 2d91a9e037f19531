"""The options of `fit`, checked."""

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np

from jfi.history_policies.log import EventLog
from jfi.utils.errors import suggest

_MOST_SEGMENTS, _MOST_BINS = 8, 64


def budgets_of(remove: float | Mapping[str, float], threshold: float | None, names: Sequence[str]) -> dict[str, float]:
    budgets = _by_segment("remove", remove, names, 0.0)
    for name, share in budgets.items():
        if not 0 <= share < 1:
            raise ValueError(f"remove must be in [0, 1), got {share} for segment '{name}'")
    if threshold is not None and any(budgets.values()):
        raise ValueError(f"threshold and remove both say what to remove, got {threshold} and {remove}")
    return budgets


def caps_of(caps: int | Mapping[str, int] | None, newest: int, names: Sequence[str]) -> dict[str, int | None]:
    """The longest history of each segment, None for no limit."""
    most = _by_segment("caps", caps, names, None)
    for name, cap in most.items():
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < max(1, newest)):
            raise ValueError(f"caps must be whole numbers of at least newest = {newest}, got {cap!r} for '{name}'")
    return most


def _by_segment(argument: str, value: object, names: Sequence[str], default: object) -> dict:
    """The value of each segment, given for all or by name."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, default if value is None else value)
    check_names(argument, value, names)
    return {name: value.get(name, default) for name in names}


def check_names(argument: str, given: Sequence[str] | Mapping[str, object], names: Sequence[str]) -> None:
    """Checks that these are names of segments."""
    if isinstance(given, str):
        raise TypeError(f"{argument} must be a list of segments, got '{given}'")
    for name in given:
        if name not in names:
            raise ValueError(f"{argument} names segment '{name}'; {suggest(str(name), names)}")


def check(
    events: EventLog,
    conversion: np.ndarray,
    num_segments: int | None,
    threshold: float | None,
    max_weight: float,
    newest: int,
    num_bins: int,
    pseudo_count: float,
) -> np.ndarray:
    """Checks what can be checked before the long work; returns the conversions as bool."""
    if not isinstance(events, EventLog):
        raise TypeError(f"events must be an EventLog, got {type(events).__name__}")
    if not isinstance(conversion, np.ndarray) or conversion.shape != (len(events),):
        got = list(conversion.shape) if isinstance(conversion, np.ndarray) else type(conversion).__name__
        raise ValueError(f"conversion must be an array [{len(events)}] like the events, got {got}")
    ones = conversion == 1
    if not (ones | (conversion == 0)).all():
        raise ValueError(f"conversion must be 0 or 1, got {conversion[~(ones | (conversion == 0))][0]}")
    known = ones[events.surface >= 0]
    if not 0 < known.sum() < len(known):
        kind = "a conversion" if len(known) and known.all() else "no conversion"
        what = f"but all {len(known)} events with a surface have {kind}"
        raise ValueError(f"conversion must be 0 for some events and 1 for others, {what}")
    if num_segments is not None and not 1 <= num_segments <= _MOST_SEGMENTS:
        raise ValueError(f"num_segments must be 1 to {_MOST_SEGMENTS}, or None, got {num_segments}")
    if threshold is not None and not isfinite(threshold):
        raise ValueError(f"threshold must be finite, got {threshold}")
    if not max_weight >= 1 or not isfinite(max_weight):
        raise ValueError(f"max_weight must be at least 1, got {max_weight}")
    if newest < 0:
        raise ValueError(f"newest must be at least 0, got {newest}")
    if not 1 <= num_bins <= _MOST_BINS:
        raise ValueError(f"num_bins must be 1 to {_MOST_BINS}, got {num_bins}")
    if not pseudo_count > 0 or not isfinite(pseudo_count):
        raise ValueError(f"pseudo_count must be above 0, got {pseudo_count}")
    return ones
