"""A text file in any encoding -> its content as UTF-8, or one line that names the byte that is not in the encoding."""

import codecs
import gzip
import zlib
from collections.abc import Sequence

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
    for magic, what in _MAGIC.items():
        if raw.startswith(magic):
            raise DataError(f"{path}: this is no text, but {what}")
    for encoding in encodings:
        try:
            text = raw if codecs.lookup(encoding).name == UTF8 and _is_utf8(raw) else _decode(path, raw, encoding)
            break
        except DataError:
            if encoding == encodings[-1]:
                raise
    if text.startswith(_BOM):
        del text[: len(_BOM)]
    return text


def count_lines(text: bytes | bytearray) -> int:
    """The number of line ends: LF, CR LF or CR."""
    # In blocks that fit a CPU's cache NumPy counts three times as fast as bytes.count.
    content = np.frombuffer(text, np.uint8)
    feeds = sum(np.count_nonzero(content[i : i + _CACHED] == 10) for i in range(0, len(content), _CACHED))
    return feeds + (text.count(b"\r") - text.count(b"\r\n") if b"\r" in text else 0)


def _read(path: str) -> bytearray:
    with open(path, "rb") as file:
        if not path.lower().endswith(".gz"):
            raw = bytearray(file.seek(0, 2))
            file.seek(0)
            size = file.readinto(raw)
            del raw[size:]
            return raw
        raw = bytearray()
        try:
            with gzip.open(file) as unpacked:
                while block := unpacked.read(_BLOCK):
                    raw += block
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: not a whole gzip file: {str(error).lower()}") from error
        return raw


def _is_utf8(text: bytearray) -> bool:
    ends = pa.py_buffer(np.array([0, len(text)], np.int64))
    try:
        # Arrow checks 5 GB/s and makes no copy.
        pa.LargeStringArray.from_buffers(1, ends, pa.py_buffer(text)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _decode(path: str, raw: bytearray, encoding: str) -> bytearray:
    decoder, text = codecs.getincrementaldecoder(encoding)(), bytearray()
    view = memoryview(raw)
    for end in range(_BLOCK, len(raw) + _BLOCK, _BLOCK):
        try:
            text += decoder.decode(bytes(view[end - _BLOCK : end]), final=end >= len(raw)).encode(UTF8)
        except UnicodeDecodeError as error:
            # The decoder may have kept the first bytes of a character from the block before.
            offset = min(end, len(raw)) - len(error.object) + error.start
            before = error.object[: error.start].decode(encoding, errors="ignore").encode(UTF8, errors="ignore")
            line = count_lines(text + before) + 1
            name = "UTF-8" if codecs.lookup(encoding).name == UTF8 else encoding
            advice = _ADVICE
            if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                advice = "it starts like UTF-16: set data.encoding: utf-16"
            what = f"the byte 0x{error.object[error.start]:02X} at offset {offset} is not {name}"
            raise DataError(f"{path}:{line}: {what}; {advice}") from error
        except UnicodeError as error:
            raise DataError(f"{path}:{count_lines(text) + 1}: not {encoding}: {error}; {_ADVICE}") from error
    return text
