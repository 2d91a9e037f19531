"""JSON files that say of which format they are, and whose checksums are in the SHA256SUMS of their folder."""

from pathlib import Path
from typing import TypeVar

import msgspec

from jfi.data.errors import DataError
from jfi.utils.files import reading_file, verify
from jfi.utils.json_files import decode_json

T = TypeVar("T")


class _Versioned(msgspec.Struct):
    format: str


def read_versioned(path: Path, kind: type[T], known: str, advice: str, verified: bool = True) -> T:
    """Returns the content of a JSON file, as `jfi.utils.json_files.read_json`.

    Args:
        path: of the file.
        kind: the type of the content.
        known: the value of its field `format` that this version of jfi reads.
        advice: what to do about a file of another version.
        verified: whether to verify its checksum.

    Raises:
        DataError: it is missing, damaged or of another format, as one line that names it.
    """
    with reading_file(path, DataError):
        content = path.read_bytes()
    found = decode_json(content, _Versioned, path, DataError).format
    if found != known:
        raise DataError(f"{path}: not a file of this version of jfi (its 'format' must be '{known}'); {advice}")
    if verified:
        verify(path.parent, [path.name], DataError)
    return decode_json(content, kind, path, DataError)
