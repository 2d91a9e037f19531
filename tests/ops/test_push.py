"""Rows are written to the memory of others: here to several tensors of one device."""

import pytest
import torch

from jfi.ops.push import push


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "dtype", "place"),
    [(3, 4, torch.float32, 0), (700, 66, torch.bfloat16, 64), (5, 2, torch.bfloat16, 4), (0, 8, torch.float32, 0)],
)
def test_rows_are_where_they_were_sent(rows, width, dtype, place, shared, device):
    memories = [torch.full((300_000,), 7, dtype=torch.uint8, device=device) for _ in range(3)]
    addresses = torch.tensor([one.data_ptr() for one in memories], device=device)
    targets = torch.tensor([2, 0], device=device)
    sent = torch.randn(rows if shared else 2 * rows, width, device=device).to(dtype)
    push(sent, targets, addresses, place, shared)
    size = rows * width * dtype.itemsize
    parts = (sent, sent) if shared else (sent[:rows], sent[rows:])
    for part, memory in zip(parts, (memories[2], memories[0]), strict=True):
        assert torch.equal(memory[place : place + size].view(dtype).view(rows, width), part)
    for memory, count in zip(memories, (size, 0, size), strict=True):
        assert (memory[:place] == 7).all() and (memory[place + count :] == 7).all()
