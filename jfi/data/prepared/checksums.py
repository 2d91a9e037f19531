"""Checksums of a prepared dataset: small files are verified when it is opened, large ones by a background thread.

SHA-256 takes about 0.7 s a GB on a core, so a large dataset opens at once. Whoever computes something from it waits for
the thread before the result is stored.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from jfi.data.errors import DataError
from jfi.utils.files import DamagedFileError, check_sum, read_sums, reading_file, sha256_of, write_sums

#: Files up to this size are verified before `open_checked` returns.
SMALL = 1 << 24


class Verification:
    """The verification of files by a background thread.

    Args:
        folder: of the files.
        names: of the files.
        sums: SHA-256 by name.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> _ = (folder / "events.arrow").write_bytes(b"events")
        >>> verification = Verification(folder, ["events.arrow"], {"events.arrow": "0" * 64})
        >>> verification.check()
        Traceback (most recent call last):
        jfi.data.errors.DataError: .../events.arrow is damaged: its SHA-256 is not the one in SHA256SUMS
    """

    def __init__(self, folder: Path, names: Sequence[str], sums: Mapping[str, str]) -> None:
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(folder, names, sums), daemon=True)
        self._thread.start()

    def _run(self, folder: Path, names: Sequence[str], sums: Mapping[str, str]) -> None:
        try:
            verify(folder, names, sums)
        except Exception as fault:
            self._fault = fault

    def check(self, wait: bool = True) -> None:
        """Raises the fault of the first damaged file that was found.

        Args:
            wait: whether to wait until all files are verified.

        Raises:
            DataError: a file is missing or damaged.
            OSError: a file cannot be read.
        """
        if wait:
            self._thread.join()
        if self._fault is not None:
            raise self._fault


def write_checksums(folder: Path, files: Mapping[str, Path]) -> None:
    """Writes `folder/SHA256SUMS`.

    Args:
        folder: of the dataset.
        files: by name of a file its path now, which may be another one until the dataset is complete.
    """
    write_sums(folder, {name: sha256_of(path) for name, path in files.items()})


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
    sums = _read(folder)
    verify(folder, [name for name, size in sizes.items() if size <= SMALL], sums)
    large = [name for name, size in sizes.items() if size > SMALL]
    if not large or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    return Verification(folder, large, sums)


def verify(folder: Path, names: Sequence[str], sums: Mapping[str, str] | None = None) -> None:
    """Verifies the SHA-256 of files, as `sha256sum -c SHA256SUMS` does.

    Args:
        folder: of the files.
        names: of the files.
        sums: SHA-256 by name; None for those in `folder/SHA256SUMS`.

    Raises:
        DataError: a file, or SHA256SUMS, is missing or damaged.
    """
    sums = _read(folder) if sums is None else sums
    for name in names:
        try:
            with reading_file(folder / name, DataError):
                check_sum(folder, name, sums)
        except DamagedFileError as fault:
            raise DataError(str(fault)) from None


def _read(folder: Path) -> dict[str, str]:
    try:
        return read_sums(folder)
    except DamagedFileError as fault:
        raise DataError(str(fault)) from None
