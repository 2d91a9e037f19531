"""The tensors of a checkpoint, without pickle: storage for torch.distributed.checkpoint (DCP).

rank-<n>.safetensors   the tensors and shards that process n wrote, in the layout of safetensors
tensors.json           by name: dtype, shape, and the file of each chunk of the tensor

torch's own storage keeps its metadata as a pickle, which can run any code when it is read. Its HuggingFaceStorageWriter
loses a chunk where a process has two of one tensor, and copies all of a process's tensors to the host twice. DCP plans
which process writes or reads which chunk, so a checkpoint of some processes can be read by any other number of them.
"""

import hashlib
import json
import math
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from jfi.training.config import ConfigError
from jfi.utils.files import DamagedFileError, sha256_of
from jfi.utils.json_files import read_json

INDEX = "tensors.json"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
#: By dtype its name in the header of a file.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
} | {dtype: f"{'I' if dtype.is_signed else 'U'}{8 * dtype.itemsize}" for dtype in _INTEGERS}
#: Bytes that are hashed and written at a time: what is hashed is still in the cache when it is written.
_BLOCK = 2**22


class MismatchedCheckpointError(ConfigError):
    """A checkpoint without damage whose tensors are not those of the model; the message is one line."""


_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_Sizes = list[Annotated[int, msgspec.Meta(ge=0, le=2**62)]]


class _Chunk(msgspec.Struct, forbid_unknown_fields=True):
    offsets: _Sizes
    shape: _Sizes
    file: Annotated[str, msgspec.Meta(pattern=r"^rank-\d+\.safetensors$")]


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: _Sizes
    chunks: list[_Chunk]


class TensorWriter(StorageWriter):
    """Writes tensors into an existing folder.

    Args:
        folder: of the files; the processes that save together share it.

    After `torch.distributed.checkpoint.save`, `sums` of the first process has the SHA-256 of each file by its name.
    A floating point tensor with an infinity or NaN makes the save raise FloatingPointError.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.sums: dict[str, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank-{rank}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan.storage_data, plan.items, planner) if plan.items else [])
        return done

    def _write(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        for item in items:
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(f"a checkpoint holds tensors only; {item.index.fqn} is none")
        items = sorted(items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn, item.index.offset))
        header = _header(items)
        digest = hashlib.sha256(header)
        with open(self.folder / name, "wb") as file:
            file.write(header)
            for item in items:
                data = _bytes(item.index.fqn, planner.resolve_data(item))
                for at in range(0, len(data), _BLOCK):
                    digest.update(data[at : at + _BLOCK])
                    file.write(data[at : at + _BLOCK])
            file.flush()
            os.fsync(file.fileno())
        self.sums[name] = digest.hexdigest()
        size = (self.folder / name).stat().st_size
        return [WriteResult(item.index, size, (name, self.sums[name])) for item in items]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[MetadataIndex, str] = {}
        for result in (result for part in results for result in part):
            files[result.index], self.sums[files[result.index]] = result.storage_data
        index = {}
        for name, tensor in metadata.state_dict_metadata.items():
            chunks = [
                _Chunk(list(chunk.offsets), list(chunk.sizes), files[MetadataIndex(name, chunk.offsets)])
                for chunk in tensor.chunks
            ]
            index[name] = _Tensor(_NAMES[tensor.properties.dtype], list(tensor.size), chunks)
        path = self.folder / INDEX
        path.write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1))
        self.sums[INDEX] = sha256_of(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class TensorReader(StorageReader):
    """Reads what `TensorWriter` wrote, whatever number of processes did.

    Args:
        folder: of the files.

    Raises:
        DamagedFileError: tensors.json is not what the writer writes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.metadata = Metadata({}, storage_data={})
        for name, tensor in read_json(folder / INDEX, dict[str, _Tensor], DamagedFileError).items():
            try:
                self._add(name, tensor)
            except (ValueError, KeyError):
                raise DamagedFileError(f"{folder / INDEX} is damaged: {name} is no tensor") from None

    def _add(self, name: str, tensor: _Tensor) -> None:
        """Adds a tensor; raises ValueError or KeyError if it can't be one."""
        size, dtype, found = torch.Size(tensor.shape), _DTYPES[tensor.dtype], []
        for chunk in tensor.chunks:
            offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.shape)
            if any(o + s > d for o, s, d in zip(offsets, sizes, size, strict=True)):
                raise ValueError
            found.append(ChunkStorageMetadata(offsets, sizes))
            self.metadata.storage_data[MetadataIndex(name, offsets)] = chunk.file, _key(name, size, found[-1])
        if sum(math.prod(chunk.sizes) for chunk in found) != math.prod(size):
            raise ValueError
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(dtype), size, found)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None: ...

    def read_metadata(self) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with ExitStack() as stack:
            files: dict[str, Any] = {}  # mapped, so that only the pages in use are read
            for item in plan.items:
                name, key = self.metadata.storage_data[item.storage_index]
                try:
                    if name not in files:
                        files[name] = stack.enter_context(safe_open(self.folder / name, "pt"))
                    spans = zip(item.storage_offsets, item.lengths, strict=True)
                    chunk = files[name].get_slice(key)[tuple(slice(at, at + length) for at, length in spans)]
                except (SafetensorError, FileNotFoundError) as fault:
                    raise DamagedFileError(f"{self.folder / name} is damaged: {fault}") from None
                target = planner.resolve_tensor(item).detach()
                target.copy_(chunk)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class TensorLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of tensors after it has checked that the checkpoint has each, in its shape.

    Raises:
        MismatchedCheckpointError: a tensor is missing or has another shape; the message names it.
    """

    def set_up_planner(self, state_dict: dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        for name, value in self.state_dict.items():
            if name not in metadata.state_dict_metadata:
                raise MismatchedCheckpointError(f"the checkpoint has no tensor {name}, which the model has")
            saved, needed = tuple(metadata.state_dict_metadata[name].size), tuple(value.size())
            if saved != needed:
                raise MismatchedCheckpointError(
                    f"{name} has the shape {saved} in the checkpoint and {needed} in the model"
                )


def _dtype(item: WriteItem) -> torch.dtype:
    return item.tensor_data.properties.dtype


def _key(name: str, size: torch.Size, chunk: ChunkStorageMetadata) -> str:
    """The name of a tensor in its file, and for a part of it where the part begins."""
    return name + ("" if chunk.sizes == size else str(list(chunk.offsets)))


def _header(items: list[WriteItem]) -> bytes:
    """The header of a safetensors file: its length, JSON padded to a multiple of 8; then the tensors follow in order.

    The widest elements come first, so that every tensor is aligned without gaps.
    """
    entries, end = {}, 0
    for item in items:
        chunk = item.tensor_data.chunk
        begin, end = end, end + math.prod(chunk.sizes) * _dtype(item).itemsize
        key = _key(item.index.fqn, item.tensor_data.size, chunk)
        entries[key] = {"dtype": _NAMES[_dtype(item)], "shape": list(chunk.sizes), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(name: str, tensor: Tensor) -> memoryview:
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.numel():
        ends = torch.stack(torch.aminmax(tensor))  # of these NaN passes through, and no temporary is made
        if not ends.isfinite().all():
            raise FloatingPointError(f"{name} is not finite")
    return memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
