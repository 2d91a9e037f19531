"""Types of settings with bounds, in words and as checks of dataclasses."""

import dataclasses
import re
import sys
import types
import typing
from functools import cache
from typing import Annotated

import msgspec
from msgspec import Meta

_MOST = sys.float_info.max
Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
#: A number of rows, values or events, which an int32 holds.
Size = Annotated[int, Meta(ge=1, lt=2**31)]
Seed = Annotated[int, Meta(ge=0, lt=2**32)]
Finite = Annotated[float, Meta(ge=-_MOST, le=_MOST)]
NonNegative = Annotated[float, Meta(ge=0, le=_MOST)]
Positive = Annotated[float, Meta(gt=0, le=_MOST)]
#: The share of elements that dropout zeroes.
Dropout = Annotated[float, Meta(ge=0, lt=1)]
_WORDS = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("a text", "texts"),
    types.NoneType: ("null", "null"),
}


def fields(section: type) -> dict[str, typing.Any]:
    """Returns the types of a dataclass's fields, with their bounds."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {one.name: hints[one.name] for one in dataclasses.fields(section)}


def describe(hint: object, is_plural: bool = False) -> str:
    """Returns a type in words, as an error says what a value must be.

    Example:
        >>> describe(list[Count] | typing.Literal["auto"] | None)
        'a list of integers of at least 1, auto or null'
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"{describe(parts[0], is_plural)} {_bounds(parts[1])}"
    if origin is list:
        words = describe(parts[0], is_plural=True)
        return f"{'lists' if is_plural else 'a list'} of {f'({words})' if ' or ' in words else words}"
    if origin is dict:
        return f"a mapping to {describe(parts[1], is_plural=True)}"
    if dataclasses.is_dataclass(hint):
        return "entries" if is_plural else "a mapping of settings"
    if origin not in (typing.Literal, typing.Union, types.UnionType):
        return _WORDS[hint][is_plural]
    words = [
        word
        for part in (parts if origin is not typing.Literal else [hint])
        for word in (
            map(str, typing.get_args(part))
            if typing.get_origin(part) is typing.Literal
            else [describe(part, is_plural)]
        )
    ]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _bounds(meta: Meta) -> str:
    if meta.multiple_of is not None:
        return f"of at least {meta.ge}, a multiple of {meta.multiple_of}"
    if meta.min_length is not None:
        return "that is not empty"
    least, most = (meta.gt if meta.ge is None else meta.ge), (meta.lt if meta.le is None else meta.le)
    if least == -_MOST:
        return "that is finite"
    if most in (None, _MOST):
        return f"{'above' if meta.ge is None else 'of at least'} {least}{'' if most is None else ' and finite'}"
    return f"in {'(' if meta.ge is None else '['}{least}, {most}{')' if meta.le is None else ']'}"


@cache
def _bounded(section: type) -> dict[str, typing.Any]:
    """The types of those fields that have bounds or take certain values alone."""
    return {name: hint for name, hint in fields(section).items() if re.search(r"Annotated|Literal", str(hint))}


def check_bounds(section: object, key: str, fault: type[Exception]) -> None:
    """Raises `fault` for a field of a dataclass whose type has bounds or lists values, and does not take its value.

    Args:
        section: an instance.
        key: what precedes the field's name in the message.
        fault: its type.
    """
    for name, hint in _bounded(type(section)).items():
        value = getattr(section, name)
        try:
            if hasattr(value, "item"):  # a number of NumPy, which neither YAML nor JSON holds
                value = value.item()
                setattr(section, name, value)
            msgspec.convert(value, hint)
        except msgspec.ValidationError:
            raise fault(f"{key}{name}: got {value!r}, must be {describe(hint)}") from None
