"""Tensors and text in one file of the layout of safetensors, which any reader of safetensors can open.

8 bytes: length of the header; the header as JSON, with `__metadata__`; the tensors' bytes, little-endian.
"""

import ctypes
import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

_DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"


def tensors_to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The content of a file; the same tensors and metadata give the same bytes.

    Args:
        tensors: by name, of float32, float64 or int64.
        metadata: texts by name.
    """
    header: dict[str, dict] = {_METADATA: dict(sorted(metadata.items()))}
    parts, end = [], 0
    # The widest elements first, so that every tensor is aligned without gaps, which safetensors forbids.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name].detach().cpu().contiguous()
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        parts.append(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b"")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


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
        metadata, tensors = header.pop(_METADATA), {}
        for name, entry in header.items():
            kind, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            if not 0 <= begin <= end <= len(content) - start or end - begin != math.prod(shape) * kind.itemsize:
                raise ValueError(f"wrong place of {name}")
            data = bytearray(content[start + begin : start + end])
            tensors[name] = (torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)).view(shape)
        return tensors, {str(name): str(text) for name, text in metadata.items()}
    except (KeyError, TypeError, AttributeError, RecursionError, RuntimeError, ValueError) as error:
        raise ValueError(f"not a file of tensors, or a damaged one: {error}") from None
