"""Tensors and text in one file of the layout of safetensors (`jfi.utils.tensor_header`)."""

import ctypes
import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from jfi.utils.tensor_header import DTYPES, METADATA, tensor_header


def tensors_to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The content of a file; the same tensors and metadata give the same bytes.

    Args:
        tensors: by name.
        metadata: texts by name.
    """
    shapes = {name: (tensors[name].dtype, tensors[name].shape) for name in sorted(tensors)}
    header, begins = tensor_header(shapes, dict(sorted(metadata.items())))
    parts = []
    for name in begins:
        tensor = tensors[name].detach().cpu().contiguous()
        parts.append(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b"")
    return b"".join([header, *parts])


def tensors_from_bytes(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file's content.

    Raises:
        ValueError: it is not such a file, or it is damaged.
    """
    try:
        start = 8 + int.from_bytes(content[:8], "little")
        if not 8 < start <= len(content):
            raise ValueError("wrong length of the header")
        header = json.loads(content[8:start])
        metadata, tensors = header.pop(METADATA), {}
        for name, entry in header.items():
            kind, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            if not 0 <= begin <= end <= len(content) - start or end - begin != math.prod(shape) * kind.itemsize:
                raise ValueError(f"wrong place of {name}")
            data = bytearray(content[start + begin : start + end])
            tensors[name] = (torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)).view(shape)
        return tensors, {str(name): str(text) for name, text in metadata.items()}
    except (KeyError, TypeError, AttributeError, RecursionError, RuntimeError, ValueError) as error:
        raise ValueError(f"not a file of tensors, or a damaged one: {error}") from None
