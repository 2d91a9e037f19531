"""Tensors and a description in one file of safetensors; loading it runs no code from it."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from jfi.utils.files import reading_file, write_file

_DESCRIPTION = "jfi"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], description: dict) -> None:
    """Writes a file, whole or not at all; the same arguments give the same bytes."""
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_file(path, save(tensors, {_DESCRIPTION: json.dumps(description, sort_keys=True)}))


def read_tensors(path: Path, fault: type[Exception]) -> tuple[dict[str, Tensor], dict]:
    """Returns the tensors of a file and its description.

    Raises:
        fault: the file is missing.
        ValueError: it is not such a file, or it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    with reading_file(path, fault):
        path.open("rb").close()
    try:
        with safe_open(path, "pt") as file:
            description = json.loads((file.metadata() or {}).get(_DESCRIPTION, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, RecursionError) as error:
        raise ValueError(f"not a file of tensors, or a damaged one: {error}") from None
    if not isinstance(description, dict):
        raise ValueError("its header describes neither a codec nor content")
    return tensors, description
