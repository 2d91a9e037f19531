"""The tensors of a checkpoint, without pickle: storage for torch.distributed.checkpoint (DCP).

rank-<n>.safetensors   the tensors and shards that process n wrote, in the layout of safetensors
tensors.json           by name: dtype, shape, and where each chunk of the tensor is

torch's own storage keeps its metadata as a pickle, which can run any code when it is read. DCP plans which process
writes or reads which chunk, so a checkpoint of some processes can be read by any other number of them.
"""

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
from jfi.utils.tensor_header import DTYPE_NAMES, DTYPES, tensor_header

INDEX = "tensors.json"
_FILE = re.compile(r"rank-\d+\.safetensors")
#: Bytes that are hashed and written at a time: what is hashed is still in the cache when it is written.
_BLOCK = 2**22


class MismatchedCheckpointError(ConfigError):
    """A checkpoint without damage whose tensors are not those of the model; the message is one line."""


@dataclass(frozen=True)
class _Place:
    """The start of a chunk in its file."""

    file: str
    begin: int


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
        by_key = {_key(item): item for item in sorted(items, key=lambda item: (item.index.fqn, item.index.offset))}
        shapes = {key: (_dtype(item), item.tensor_data.chunk.sizes) for key, item in by_key.items()}
        header, begins = tensor_header(shapes)
        items, digest = [by_key[key] for key in begins], hashlib.sha256(header)
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
        places = [(_Place(name, len(header) + begin), self.sums[name]) for begin in begins.values()]
        size = (self.folder / name).stat().st_size
        return [WriteResult(item.index, size, place) for item, place in zip(items, places, strict=True)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places: dict[MetadataIndex, _Place] = {}
        for result in (result for part in results for result in part):
            place, self.sums[place.file] = result.storage_data
            places[result.index] = place
        index = {}
        for name, tensor in metadata.state_dict_metadata.items():
            chunks = []
            for chunk in tensor.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                sizes = {"offsets": list(chunk.offsets), "shape": list(chunk.sizes)}
                chunks.append({**sizes, "file": place.file, "begin": place.begin})
            index[name] = {"dtype": DTYPE_NAMES[tensor.properties.dtype], "shape": list(tensor.size), "chunks": chunks}
        path = self.folder / INDEX
        with path.open("w") as file:
            json.dump(index, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        self.sums[INDEX] = sha256_of(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class TensorReader(StorageReader):
    """Reads what `TensorWriter` wrote, whatever number of processes did.

    Args:
        folder: of the files.

    Raises:
        DamagedFileError: tensors.json is not what the writer writes, or names bytes that the files lack.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.metadata = Metadata({}, storage_data={})
        try:
            for name, tensor in json.loads((folder / INDEX).read_text()).items():
                self._add(name, **tensor)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise DamagedFileError(f"{folder / INDEX} is damaged") from None

    def _add(self, name: str, dtype: str, shape: list[int], chunks: list[dict]) -> None:
        """Adds a tensor; raises ValueError, TypeError or KeyError if it can't be one."""
        size, kind, found = _size(shape), DTYPES[dtype], []
        for chunk in chunks:
            offsets, sizes = _size(chunk["offsets"]), _size(chunk["shape"])
            place = _Place(chunk["file"], *_size([chunk["begin"]]))
            inside = all(o + s <= d for o, s, d in zip(offsets, sizes, size, strict=True))
            end = place.begin + math.prod(sizes) * kind.itemsize
            known = _FILE.fullmatch(place.file) and (self.folder / place.file).is_file()
            if not inside or not known or end > (self.folder / place.file).stat().st_size:
                raise ValueError
            found.append(ChunkStorageMetadata(offsets, sizes))
            self.metadata.storage_data[MetadataIndex(name, offsets)] = place, kind, sizes
        if sum(math.prod(chunk.sizes) for chunk in found) != math.prod(size):
            raise ValueError
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(kind), size, found)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None: ...

    def read_metadata(self) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, Tensor] = {}
        for item in plan.items:
            place, kind, sizes = self.metadata.storage_data[item.storage_index]
            if place.file not in files:  # mapped, so that only the pages in use are read
                files[place.file] = torch.from_numpy(np.memmap(self.folder / place.file, np.uint8, "r"))
            length = math.prod(sizes) * kind.itemsize
            chunk = files[place.file][place.begin : place.begin + length].view(kind).view(sizes)
            for dim, (offset, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                chunk = chunk.narrow(dim, offset, size)
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


def _size(numbers: list[int]) -> torch.Size:
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError
    return torch.Size(numbers)


def _dtype(item: WriteItem) -> torch.dtype:
    return item.tensor_data.properties.dtype


def _key(item: WriteItem) -> str:
    """The name of the tensor, and for a part of it where the part begins."""
    data = item.tensor_data
    return item.index.fqn + ("" if data.chunk.sizes == data.size else str(list(data.chunk.offsets)))


def _bytes(name: str, tensor: Tensor) -> memoryview:
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.numel():
        ends = torch.stack(torch.aminmax(tensor))  # of these NaN passes through, and no temporary is made
        if not ends.isfinite().all():
            raise FloatingPointError(f"{name} is not finite")
    return memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
