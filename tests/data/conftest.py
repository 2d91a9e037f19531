from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of lines and gives its path."""

    def write(name: str, *lines: str, encoding: str = "utf8") -> str:
        path = tmp_path / name
        path.write_bytes("".join(f"{line}\n" for line in lines).encode(encoding))
        return str(path)

    return write


@pytest.fixture
def ratings(write: Write) -> str:
    """Ten rows in the order of time: two users in turn, five items, alternating ratings of 5 and 1."""
    rows = [f"{i % 2},{i % 5},{5 if i % 4 < 2 else 1},{100 + 10 * i}" for i in range(10)]
    return write("ratings.csv", "user_id,item_id,rating,timestamp", *rows)
