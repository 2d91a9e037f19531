"""The header of a file of tensors in the layout of safetensors, which any reader of safetensors can open.

8 bytes: length of the header; the header as JSON, with spaces up to a multiple of 8; the tensors' bytes, little-endian.
"""

import json
import math
from collections.abc import Mapping, Sequence

import torch

#: By the name in a header, the dtype.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: By dtype, the name in a header.
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"


def tensor_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """All that lies before the tensors' bytes, and where each tensor begins behind that.

    Args:
        tensors: by name, dtype and shape.
        metadata: texts by name, or None for a header without.

    Returns:
        The bytes, a multiple of 8, and by name the first byte of each tensor, in the order in which they lie: the
        widest elements first, so that every tensor is aligned without gaps, which safetensors forbids; else as given.

    Example:
        >>> tensor_header({"a": (torch.float32, [2]), "b": (torch.int64, [3])})[1]
        {'b': 0, 'a': 24}
    """
    header: dict[str, dict] = {} if metadata is None else {METADATA: dict(metadata)}
    begins, end = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda one: -one[1][0].itemsize):
        begins[name] = end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, begins
