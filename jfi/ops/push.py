"""Writes to the memory of other GPUs of a host."""

from torch import Tensor


def push(rows: Tensor, targets: Tensor, addresses: Tensor, offset: int, shared: bool) -> None:
    """Writes rows to the memory of K GPUs, in one kernel, without a barrier.

    Args:
        rows: contiguous, those for each target one after the other, equally many for each; a multiple of 4 bytes each.
        targets: [K] int64, indices of addresses.
        addresses: [W] int64, addresses of memory that this GPU can write to, multiples of 16.
        offset: first byte of that memory to write, a multiple of 4.
        shared: all targets get all rows.
    """
    from jfi.kernels.exchange.push import push as launch

    launch(rows, targets, addresses, offset, shared)
