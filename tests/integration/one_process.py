"""One gloo process group of this process, without a network, and a small table of batches."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from jfi.data import Batch

CPU = torch.device("cpu")
KEYS = ("user", "item", "history_item", "history_rating")


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_batch(samples: int = 6, seed: int = 0, rows: int = 20) -> Batch:
    """Labels follow from the target and the newest event; the second history is empty."""
    draw = torch.Generator().manual_seed(seed)
    ones = torch.ones(samples, dtype=torch.long)
    history = torch.randint(1, 6, (samples,), generator=draw)
    history[1:2] = 0
    lengths = torch.cat([ones, ones, history, history])
    ids = torch.randint(rows, (int(lengths.sum()),), generator=draw)
    labels = (ids[samples : 2 * samples] % 2).float()
    sparse = KeyedJaggedTensor(list(KEYS), ids, lengths=lengths)
    return Batch(torch.rand(samples, 4, generator=draw), sparse, labels, torch.arange(samples))
