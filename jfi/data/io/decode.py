"""A text file in any encoding -> its content as UTF-8, or one line that names the byte that is not in the encoding."""

import codecs
import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from jfi.data.errors import DataError

UTF8 = "utf-8"
_BLOCK = 1 << 20
_CACHED = 1 << 17
_BOM = codecs.BOM_UTF8
_MAGIC = {
    b"PK\x03\x04": "a zip archive (or a spreadsheet); unpack it",
    b"PAR1": "a Parquet file; let its name end in .parquet",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it, or use gzip and .gz",
    b"BZh": "compressed by bzip2; unpack it, or use gzip and .gz",
    b"\xfd7zXZ": "compressed by xz; unpack it, or use gzip and .gz",
    b"\x1f\x8b": "compressed by gzip; let its name end in .gz",
}
_ADVICE = "set data.encoding to the encoding of the file, such as gb18030, latin-1, cp1252 or utf-16"


def check_encoding(encoding: str) -> None:
    """Raises DataError for a name that is not one of Python's text encodings."""
    try:
        # Codecs such as rot13 and base64 are not for text: str.encode refuses them.
        "a".encode(encoding)
        codecs.getincrementaldecoder(encoding)
    except (LookupError, ValueError) as error:
        raise DataError(
            f"data.encoding is '{encoding}'; it must be an encoding that Python knows, such as utf-8, gb18030, "
            "latin-1, cp1252 or utf-16"
        ) from error


def read_utf8(path: str, encodings: Sequence[str]) -> bytearray:
    """The text of a file as UTF-8, without a byte order mark; a name that ends in `.gz` is decompressed.

    Args:
        encodings: tried in this order.

    Raises:
        DataError: the file is in none of the encodings, or its content is another format's.
    """
    raw = _read(path)
    _check_magic(path, raw)
    for encoding in encodings:
        try:
            if codecs.lookup(encoding).name == UTF8 and _is_utf8(raw):
                text = raw
            else:
                view, text = memoryview(raw), bytearray()
                for part in _decode(path, (bytes(view[i : i + _BLOCK]) for i in range(0, len(raw), _BLOCK)), encoding):
                    text += part
            break
        except DataError:
            if encoding == encodings[-1]:
                raise
    if text.startswith(_BOM):
        del text[: len(_BOM)]
    return text


def stream_utf8(path: str, encodings: Sequence[str], size: int) -> Iterator[bytes]:
    """`read_utf8` in parts of about `size` bytes, so that a file may be longer than memory.

    Where several encodings are allowed, the file is read twice.
    """
    for encoding in encodings[:-1]:
        try:
            for _ in _decode(path, _raw_parts(path, size), encoding):
                pass
            break
        except UndecodableError:
            pass
    else:
        encoding = encodings[-1]
    begins = True
    for part in _decode(path, _raw_parts(path, size), encoding):
        if part:
            yield part.removeprefix(_BOM) if begins else part
            begins = False


def count_lines(text: bytes | bytearray) -> int:
    """The number of line ends: LF, CR LF or CR."""
    # In blocks that fit a CPU's cache NumPy counts three times as fast as bytes.count.
    content = np.frombuffer(text, np.uint8)
    feeds = sum(np.count_nonzero(content[i : i + _CACHED] == 10) for i in range(0, len(content), _CACHED))
    return feeds + (text.count(b"\r") - text.count(b"\r\n") if b"\r" in text else 0)


class UndecodableError(DataError):
    """A file is not in an encoding."""


def _read(path: str) -> bytearray:
    if not path.lower().endswith(".gz"):
        with open(path, "rb") as file:
            raw = bytearray(file.seek(0, 2))
            file.seek(0)
            size = file.readinto(raw)
            del raw[size:]
            return raw
    raw = bytearray()
    for part in _unpack(path, _BLOCK):
        raw += part
    return raw


def _unpack(path: str, size: int) -> Iterator[bytes]:
    try:
        with gzip.open(path) as unpacked:
            while part := unpacked.read(size):
                yield part
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: not a whole gzip file: {str(error).lower()}") from error


def _raw_parts(path: str, size: int) -> Iterator[bytes]:
    if path.lower().endswith(".gz"):
        parts = _unpack(path, size)
    else:
        with open(path, "rb") as file:
            yield from _checked(path, iter(lambda: file.read(size), b""))
        return
    yield from _checked(path, parts)


def _checked(path: str, parts: Iterator[bytes]) -> Iterator[bytes]:
    first = next(parts, b"")
    _check_magic(path, first)
    yield from chain([first], parts)


def _check_magic(path: str, raw: bytes | bytearray) -> None:
    for magic, what in _MAGIC.items():
        if raw.startswith(magic):
            raise DataError(f"{path}: this is no text, but {what}")


def _is_utf8(text: bytearray) -> bool:
    ends = pa.py_buffer(np.array([0, len(text)], np.int64))
    try:
        # Arrow checks 5 GB/s and makes no copy.
        pa.LargeStringArray.from_buffers(1, ends, pa.py_buffer(text)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _decode(path: str, parts: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """The text of the parts of a file as UTF-8."""
    decoder, begin, offset, lines, last = codecs.getincrementaldecoder(encoding)(), b"", 0, 0, b""
    for part in chain(parts, [b""]):
        begin, offset = begin or part[:4], offset + len(part)
        try:
            text = decoder.decode(part, final=not part).encode(UTF8)
        except UnicodeDecodeError as error:
            # The decoder may have kept the first bytes of a character from the part before.
            place = offset - len(error.object) + error.start
            before = error.object[: error.start].decode(encoding, errors="ignore").encode(UTF8, errors="ignore")
            name = "UTF-8" if codecs.lookup(encoding).name == UTF8 else encoding
            advice = _ADVICE
            if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                advice = "it starts like UTF-16: set data.encoding: utf-16"
            what = f"the byte 0x{error.object[error.start]:02X} at offset {place} is not {name}"
            line = lines + more_lines(last, before) + 1
            raise UndecodableError(f"{path}:{line}: {what}; {advice}") from error
        except UnicodeError as error:
            if isinstance(error, UnicodeEncodeError):  # half of a surrogate pair
                lines += more_lines(last, error.object[: error.start].encode(UTF8, errors="ignore"))
            raise UndecodableError(f"{path}:{lines + 1}: not {encoding}: {error}; {_ADVICE}") from error
        lines, last = lines + more_lines(last, text), text[-1:] or last
        yield text


def more_lines(last: bytes, text: bytes | bytearray) -> int:
    """The line ends that `text` adds after a text that ends with the byte `last`."""
    return count_lines(text) - (last == b"\r" and text.startswith(b"\n"))
