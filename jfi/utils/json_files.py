"""Reads JSON files as values of annotated types, strictly, by msgspec."""

from pathlib import Path
from typing import TypeVar

import msgspec

from jfi.utils.errors import InputError
from jfi.utils.files import reading_file

T = TypeVar("T")


def read_json(path: str | Path, kind: type[T], fault: type[Exception] = InputError) -> T:
    """Returns the content of a JSON file as a value of a type: a dataclass, a msgspec.Struct, `dict[str, int]` ...

    A type that refuses unknown fields is a `msgspec.Struct` with `forbid_unknown_fields=True`; bounds are
    `Annotated[int, msgspec.Meta(ge=0)]`.

    Raises:
        fault: the file is missing, is not JSON or not of the type, as one line that names the file and the field.

    Example:
        >>> path = getfixture("tmp_path") / "sizes.json"
        >>> _ = path.write_text('{"a.arrow": "12"}')
        >>> read_json(path, dict[str, int])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        jfi.utils.errors.InputError: ...sizes.json is damaged: expected `int`, got `str` - at `$[...]`
    """
    with reading_file(path, fault):
        content = Path(path).read_bytes()
    return decode_json(content, kind, path, fault)


def decode_json(content: bytes | str, kind: type[T], path: str | Path, fault: type[Exception] = InputError) -> T:
    """Returns the content of a JSON file that was read already; otherwise as `read_json`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        raise fault(f"{path} is damaged: {reason[:1].lower()}{reason[1:]}") from None
