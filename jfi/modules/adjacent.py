"""Concatenation without a copy of what is adjacent in memory already."""

import torch
from torch import Tensor

from jfi.utils.context import is_traced


def join(tensors: list[Tensor]) -> Tensor:
    """Concatenates the rows of contiguous tensors; without a copy if they are adjacent in memory already.

    Example:
        >>> rows = torch.arange(6.0).view(3, 2)
        >>> join(list(rows.split([1, 2]))).data_ptr() == rows.data_ptr()
        True
    """
    if len(tensors) == 1:
        return tensors[0]
    if is_traced() or not _are_adjacent(tensors):
        return torch.cat(tensors)
    if not (torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])):
        return _span(tensors)
    return _Adjacent.apply(*tensors)


class _Adjacent(torch.autograd.Function):
    """`_span`, whose gradient is cut into views."""

    @staticmethod
    def forward(ctx, *tensors: Tensor) -> Tensor:
        ctx.sizes = [tensor.size(0) for tensor in tensors]
        return _span(tensors)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.split(ctx.sizes)


def _are_adjacent(tensors: list[Tensor]) -> bool:
    """Whether the tensors, those without an element aside, directly follow one another in one storage."""
    end = None
    for tensor in tensors:
        if type(tensor) is not Tensor:
            return False
        if tensor.numel() == 0:
            continue
        if end is None:
            first, end, dtype, width = tensor, tensor.data_ptr(), tensor.dtype, tensor.shape[1:]
        if tensor.data_ptr() != end or tensor.dtype != dtype or tensor.shape[1:] != width or not tensor.is_contiguous():
            return False
        end += tensor.nbytes
    if end is None:
        return False
    # Storages of their own may be neighbours too: the first one must hold all.
    storage = first.untyped_storage()
    return end <= storage.data_ptr() + storage.nbytes()


def _span(tensors: list[Tensor]) -> Tensor:
    """One tensor over the memory of adjacent tensors."""
    first = next(tensor for tensor in tensors if tensor.numel())
    return first.detach().as_strided((sum([tensor.numel() for tensor in tensors]),), (1,)).view(-1, *first.shape[1:])
