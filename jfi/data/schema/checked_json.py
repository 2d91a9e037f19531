"""JSON files that carry their own SHA-256."""

import hashlib
import json
from pathlib import Path
from typing import TypeVar

from jfi.data.errors import DataError
from jfi.utils.files import reading_file
from jfi.utils.json_files import convert

T = TypeVar("T")


def checked_json(kind: str, content: dict) -> str:
    """The text of a JSON file of some kind that `read_checked_json` reads."""
    tree = {"format": kind, "sha256": _digest(content), "content": content}
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"


def read_checked_json(path: Path, kind: str, content_type: type[T]) -> T:
    """Returns the content of a file of the text of `checked_json`, as `jfi.utils.json_files.read_json`.

    Raises:
        DataError: it is missing, damaged or of another kind, as one line that names it.
    """
    with reading_file(path, DataError):
        content = path.read_bytes()
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        raise DataError(f"{path}: damaged, it is not JSON") from None
    if not isinstance(tree, dict) or tree.get("format") != kind:
        raise DataError(f"{path}: not a file of this version of jfi (its 'format' must be '{kind}')")
    if not isinstance(tree.get("content"), dict) or tree.get("sha256") != _digest(tree["content"]):
        raise DataError(f"{path}: damaged, the content does not match its SHA-256")
    return convert(tree["content"], content_type, path, DataError)


def _digest(content: dict) -> str:
    # JSON writes all digits of a float, so the text is the same after a round trip.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
