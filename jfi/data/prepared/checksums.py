"""Checksums of a prepared dataset: small files are verified when it is opened, large ones by a background thread.

SHA-256 takes about 0.7 s a GB on a core, so a large dataset opens at once. Whoever computes something from it waits for
the thread before the result is stored.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from jfi.data.errors import DataError
from jfi.utils.files import verify

#: Files up to this size are verified before `open_checked` returns.
SMALL = 1 << 24


class Verification:
    """The verification of files by a background thread.

    Args:
        folder: of the files and SHA256SUMS.
        names: of the files.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> _ = (folder / "events.arrow").write_bytes(b"events")
        >>> from jfi.utils.files import write_sums
        >>> write_sums(folder, {"events.arrow": "0" * 64})
        >>> verification = Verification(folder, ["events.arrow"])
        >>> verification.check()
        Traceback (most recent call last):
        jfi.data.errors.DataError: .../events.arrow is damaged: its SHA-256 is not the one in SHA256SUMS
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(folder, names), daemon=True)
        self._thread.start()

    def _run(self, folder: Path, names: Sequence[str]) -> None:
        try:
            verify(folder, names, DataError)
        except Exception as fault:
            self._fault = fault

    def check(self, seconds: float | None = None) -> bool:
        """Raises the fault of the first damaged file that was found.

        Args:
            seconds: to wait until all files are verified; None waits as long as it takes.

        Returns:
            Whether all files are verified.

        Raises:
            DataError: a file is missing or damaged.
            OSError: a file cannot be read.
        """
        self._thread.join(seconds)
        if self._fault is not None:
            raise self._fault
        return not self._thread.is_alive()


def open_checked(folder: Path, sizes: Mapping[str, int]) -> Verification | None:
    """Verifies the small files, and begins to verify the large ones.

    Args:
        folder: of the dataset.
        sizes: the bytes of each file, by name.

    Returns:
        The verification of the large files; None if there are none, or if another process of this host verifies them.

    Raises:
        DataError: a file, or SHA256SUMS, is missing or damaged.
    """
    verify(folder, [name for name, size in sizes.items() if size <= SMALL], DataError)
    large = [name for name, size in sizes.items() if size > SMALL]
    return Verification(folder, large) if large and os.environ.get("LOCAL_RANK", "0") == "0" else None
