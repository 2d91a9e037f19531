"""The file of a catalogue's semantic IDs: an item and its ID a row, and the fingerprint of the codec that gave them.

Its metadata also has the SHA-256 of all items and IDs. Parquet's own checksums leave out the file's footer, which says
how the pages are read.

The codec is in a folder next to it: that of `sids.parquet` is `sids.codec/codec.safetensors`.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import torch
from torch import Tensor

from jfi.data.config import SID
from jfi.data.errors import DataError
from jfi.data.io.arrays import as_text
from jfi.data.io.blocks import read_table
from jfi.data.schema.schema import CODEC
from jfi.semantic_ids.codec import Codec
from jfi.semantic_ids.packing import UNKNOWN_SID
from jfi.utils.files import DamagedFileError, writing_file

_FINGERPRINT, _SHA256 = b"jfi.sid.fingerprint", b"jfi.sid.sha256"


@dataclass(frozen=True)
class SemanticIDs:
    """The semantic IDs of a catalogue.

    Args:
        path: the file.
        items: `[N]`, distinct, in the type of the file.
        sids: `[N]` int64.
        codec: that gave them.
    """

    path: str
    items: pa.Array
    sids: np.ndarray
    codec: Codec

    @classmethod
    def read(
        cls, path: str | Path, column: str, setting: str = "data.semantic_ids", codec: Codec | None = None
    ) -> "SemanticIDs":
        """Reads the IDs that `write_sids` wrote.

        Args:
            path: the file.
            column: its column of the items.
            setting: what gave the path, for messages.
            codec: that must have given the IDs; None is the one next to the file.

        Raises:
            DataError: the file or the codec is missing or damaged, lacks a column, holds an item twice, is of another
                codec, or holds an ID whose digits are out of the codec's range; the message names setting and file.
        """
        if not Path(path).is_file():  # before its codec, which is not there either
            raise DataError(f"{setting}: {path}: no such file")
        try:
            codec = codec or Codec.load(codec_folder(Path(path)) / CODEC)
            return cls(str(path), *_read(path, column, codec, setting), codec)
        except (DataError, DamagedFileError) as fault:
            text = str(fault)
            raise DataError(text if text.startswith(setting) else f"{setting}: {text}") from None

    @cached_property
    def _texts(self) -> pa.Array:
        return as_text(self.items)

    def of(self, items: pa.Array, allow_no_match: bool = False) -> np.ndarray:
        """The IDs `[M]` int64 of items `[M]`, UNKNOWN_SID where the file has none.

        Raises:
            DataError: the file has none of the items, and `allow_no_match` is false.
        """
        positions = pc.index_in(items.cast(pa.large_string()), value_set=self._texts)
        if not allow_no_match and len(items) and positions.null_count == len(items):
            raise DataError(f"data.semantic_ids: {self.path} has none of the items of the interactions")
        # An item that the file lacks reads the ID that is appended.
        return np.append(self.sids, UNKNOWN_SID)[pc.fill_null(positions, -1).to_numpy(zero_copy_only=False)]

    def check_codec(self, codec: Codec, of: str, setting: str = "data.semantic_ids") -> None:
        """Raises DataError unless these IDs are of `codec`, which `of` has."""
        if self.codec.fingerprint != codec.fingerprint:
            here, there = self.codec.fingerprint[:12], codec.fingerprint[:12]
            what = f"{setting}: the IDs of {self.path}"
            raise DataError(f"{what} are of the codec {here}, those of {of} are of the codec {there}")


def codec_folder(path: Path) -> Path:
    """The folder of the codec of a file of IDs."""
    return path.with_suffix(".codec")


def write_sids(path: Path, column: str, items: pa.Array, sids: Tensor, codec: Codec) -> None:
    """Writes items and their SIDs to a Parquet file, whole or not at all.

    Args:
        path: the file.
        column: its column of the items.
        items: `[N]`, of any type.
        sids: `[N]` int64.
        codec: that gave the SIDs; its fingerprint becomes part of the file's metadata.
    """
    metadata = {_FINGERPRINT: codec.fingerprint.encode(), _SHA256: _digest(items, sids.cpu().numpy())}
    data = pa.table({column: items, SID: pa.array(sids.cpu().numpy())}).replace_schema_metadata(metadata)
    with writing_file(path) as unfinished:
        pyarrow.parquet.write_table(data, unfinished, write_page_checksum=True)


def _read(path: str | Path, column: str, codec: Codec, setting: str) -> tuple[pa.Array, np.ndarray]:
    """The items and their IDs `[N]` int64 of a file."""
    table = read_table(str(path), [column, SID], setting=setting)
    table.unique_ids(column)
    sids = table.column(SID)
    metadata = table.data.schema.metadata or {}
    given = metadata.get(_FINGERPRINT, b"").decode(errors="replace")
    if not given:
        raise DataError(f"{path}: no fingerprint of a codec, so it is no file of semantic IDs")
    if given != codec.fingerprint:
        raise DataError(
            f"{path}: its IDs are of the codec {given[:12]}, but the codec here is {codec.fingerprint[:12]}"
        )
    if sids.type != pa.int64() or sids.null_count:
        raise DataError(f"{path}: column '{SID}' must be int64 without gaps")
    if metadata.get(_SHA256) != _digest(table.column(column), sids.to_numpy()):
        raise DataError(f"{path}: damaged, its items and IDs do not match their SHA-256")
    ids = sids.to_numpy().copy()
    try:
        codec.digits(torch.from_numpy(ids))
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    return table.column(column), ids


def _digest(items: pa.Array, sids: np.ndarray) -> bytes:
    """SHA-256, in hexadecimal, of the texts of items and of their IDs, whatever the types and layout of the file."""
    texts = as_text(items)
    digest = hashlib.sha256(np.ascontiguousarray(sids, "<i8"))
    _, offsets, content = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1] if len(texts) else [0]
    digest.update(np.diff(ends).astype("<i8"))
    digest.update(memoryview(content or b"")[ends[0] : ends[-1]])
    return digest.hexdigest().encode()
