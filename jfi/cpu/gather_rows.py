"""Rows of tables by id on a CPU: without the mask of padding where no index is padding."""

import torch
from torch import Tensor

from jfi import reference


def gather_rows(tables: tuple[Tensor, ...], indices: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """[N, D] and [S] a table -> [S, D], the sum; an index of -1 gives zeros."""
    if len(tables) > 1 or not indices[0].numel() or int(indices[0].min()) < 0:
        return reference.gather_rows(tables, indices, dtype)
    return torch.nn.functional.embedding(indices[0], tables[0]).to(dtype)
