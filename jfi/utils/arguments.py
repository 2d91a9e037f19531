"""Checks of constructors' arguments: each message names the argument, what it got and what it must be."""

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

#: Widths, heads and rows of a table beyond these are mistakes, which would end in an overflow or an endless loop.
MAX_WIDTH, MAX_LAYERS, MAX_ROWS = 2**20, 2**10, 2**31 - 1
_MODULES = nn.ModuleDict()


def shown(value: object) -> str:
    """Returns a value as messages show it: its repr if that is short, else the name of its type."""
    text = repr(value) if isinstance(value, str | int | float | list | tuple | dict | None) else ""
    return text if 0 < len(text) <= 100 else type(value).__name__


def check_int(argument: str, value: int, least: int = 1, most: int = MAX_WIDTH) -> None:
    """Raises unless the value is an integer of a range; a bool is not accepted."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{argument} must be an int, got {shown(value)}")
    if value < least:
        raise ValueError(f"{argument} must be at least {least}, got {value}")
    if value > most:
        raise ValueError(f"{argument} must be at most {most}, got {value}")


def check_number(argument: str, value: float, fits: Callable[[float], bool], must: str) -> None:
    """Raises unless the value is a number that fits, as `must` says in words."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{argument} must be a number {must}, got {shown(value)}")
    if not fits(value):
        raise ValueError(f"{argument} must be {must}, got {value}")


def check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises unless the value is one of some strings."""
    if not isinstance(value, str) or value not in choices:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{argument} must be {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}, got {shown(value)}")


def check_type(argument: str, value: object, kinds: Any, must: str) -> None:
    """Raises unless the value is of one of the types, as isinstance takes them and `must` says in words."""
    if not isinstance(value, kinds):
        raise TypeError(f"{argument} must be {must}, got {shown(value)}")


def check_module(argument: str, value: nn.Module) -> None:
    """Raises unless the value is an nn.Module."""
    check_type(argument, value, nn.Module, "an nn.Module")


def check_keys(argument: str, value: list[str], may_be_empty: bool = True) -> None:
    """Raises unless the value is a list of distinct strings."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{argument} must be a list of keys, got {shown(value)}")
    if len({*value}) < len(value) or not (value or may_be_empty):
        least = "" if may_be_empty else ", at least one"
        raise ValueError(f"{argument} must be a list of distinct keys{least}, got {shown(value)}")


def check_list_of_sizes(argument: str, value: list[int]) -> None:
    """Raises unless the value is a list of sizes."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"{argument} must be a list of sizes, got {shown(value)}")
    for i, size in enumerate(value):
        check_int(f"{argument}[{i}]", size)


def check_device(argument: str, value: Any) -> None:
    """Raises unless the value is None or names a device, as of torch.empty."""
    if value is None or isinstance(value, torch.device):
        return
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"{argument} must be a torch.device or None, got {shown(value)}")
    try:
        torch.device(value)
    except RuntimeError as fault:
        raise ValueError(f"{argument} must be a torch.device or None, got {value!r}: {fault}") from None


def check_ascending(name: str, times: Tensor, offsets: Tensor, row: str) -> None:
    """Raises ValueError unless times [S] of ``row``s are finite and do not decrease within a sample; reads them."""
    if times.is_floating_point() and not bool(times.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {times[~times.isfinite()][0].item()}")
    falls = times[1:] < times[:-1]
    starts = offsets[1:-1].long()
    falls[starts[(starts > 0) & (starts < times.shape[0])] - 1] = False  # between samples
    if bool(falls.any()):
        at = int(falls.nonzero()[0])
        got = f"{times[at].item()} then {times[at + 1].item()} at {row} {at + 1}"
        raise ValueError(f"{name} must not decrease within a sample, got {got}")


def module_name(name: str) -> str:
    """Returns the name itself if a module in an nn.ModuleDict can have it, else an escaped one of its own.

    >>> module_name("genre"), module_name("type"), module_name("a.b")
    ('genre', '%type', 'a%2Eb')
    """
    escaped = name.replace("%", "%25").replace(".", "%2E")
    return f"%{escaped}" if hasattr(_MODULES, escaped) else escaped
