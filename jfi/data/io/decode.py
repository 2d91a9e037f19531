"""A text file in any encoding -> parts of its content in UTF-8, or one line that names the byte that does not fit."""

import codecs
import io
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

import pyarrow as pa

from jfi.data.errors import DataError
from jfi.data.io.layouts import COMPRESSED
from jfi.data.io.paths import File, open_file

UTF8 = "utf-8"
#: Bytes of a part of a file, of which memory holds a few.
PART = 1 << 24
#: No row is longer.
LONGEST_ROW = 1 << 26
_MAGIC = {
    b"PK\x03\x04": "a zip archive (or a spreadsheet); unpack it",
    b"PAR1": "a Parquet file; let its name end in .parquet",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; let its name end in .zst",
    b"\x1f\x8b": "compressed by gzip; let its name end in .gz",
}
_ADVICE = "set data.encoding to the encoding of the file, such as gb18030, latin-1, cp1252 or utf-16"


def stream_utf8(file: File) -> Iterator[bytes]:
    """Yields the text of a file as UTF-8, without a byte order mark, in parts of about 16 MiB.

    A file whose name ends in `.gz` or `.zst` is decompressed. Where its layout has several encodings, it is read twice.

    Raises:
        DataError: the file is in none of the encodings, or its content is another format's.
    """
    first, encoding = file.layout.encodings[0], file.layout.encodings[-1]
    if first != encoding:
        with suppress(DataError):
            for _ in _decode(file, first):
                pass
            encoding = first
    parts = (part for part in _decode(file, encoding) if part)
    yield next(parts, b"").removeprefix(codecs.BOM_UTF8)
    yield from parts


def count_lines(text: bytes | bytearray) -> int:
    """Returns the number of line ends: LF, CR LF or CR."""
    return text.count(b"\n") + (text.count(b"\r") - text.count(b"\r\n") if b"\r" in text else 0)


def _raw_parts(path: str) -> Iterator[bytes]:
    codec = COMPRESSED.get(os.path.splitext(path.lower())[1])
    with open_file(path) as file:
        stream = file if codec is None else pa.CompressedInputStream(pa.PythonFile(file, "r"), codec)
        try:
            for number, part in enumerate(iter(lambda: stream.read(PART), b"")):
                for magic, what in _MAGIC.items():
                    if number == 0 and part.startswith(magic):
                        raise DataError(f"{path}: this is no text, but {what}")
                yield part
        except OSError as error:
            if codec is None or error.errno is not None:
                raise
            raise DataError(f"{path}: not a whole {codec} file: {str(error).lower()}") from error


def _decode(file: File, encoding: str) -> Iterator[bytes]:
    """Yields the text of a file as UTF-8; no part ends between the CR and the LF of a line end."""
    path, layout = file.path, file.layout
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), translate=False)
    begin, offset, lines = b"", 0, 1
    for part in chain(_raw_parts(path), [b""]):
        begin, offset = begin or part[:4], offset + len(part)
        try:
            text = decoder.decode(part, final=not part).encode(UTF8)
        except UnicodeDecodeError as error:
            # The decoder may have kept the first bytes of a character from the part before.
            place = offset - len(error.object) + error.start
            lines += count_lines(error.object[: error.start].decode(encoding, "ignore").encode(UTF8, "ignore"))
            name = "UTF-8" if codecs.lookup(encoding).name == UTF8 else encoding
            is_utf16 = begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            advice = "it starts like UTF-16: set data.encoding: utf-16" if is_utf16 else _ADVICE
            what = f"the byte 0x{error.object[error.start]:02X} at offset {place} is not {name}"
            raise DataError(f"{path}:{lines}: {what}{layout.advice(advice)}") from error
        except UnicodeError as error:  # UTF-16 without a byte order mark, or half of a surrogate pair
            raise DataError(f"{path}: not {encoding}: {error}{layout.advice(_ADVICE)}") from error
        lines += count_lines(text)
        yield text
