"""Writing to the memory of other GPUs of a host."""

from torch import Tensor


def push(rows: Tensor, targets: Tensor, addresses: Tensor, place: int, shared: bool) -> None:
    """Writes rows to the memory of K GPUs, in one kernel; nobody is told that they are there.

    Args:
        rows: contiguous, those for each target one after the other, as many for each; a multiple of 4 bytes each.
        targets: [K] int64, which of the addresses.
        addresses: [W] int64, addresses of memory that this GPU can write to, multiples of 16.
        place: byte of that memory to write from, a multiple of 4.
        shared: all targets get all rows.
    """
    from jfi.kernels.exchange.push import push as launch

    launch(rows, targets, addresses, place, shared)
