"""Batches and maps of the tests of growing tables."""

import torch
from torchrec import KeyedJaggedTensor

from jfi.modules import GrowingIds, GrowingTable

KEYS = ["item", "history_item", "tag"]


def growing(capacity=5, **options):
    every = options.pop("every", 100)
    return GrowingIds([GrowingTable("item", capacity, ["item", "history_item"], **options)], every)


def batch(items, histories=None, tags=None):
    """A batch with one item a sample; other keys have no ids by default."""
    histories = [[] for _ in items] if histories is None else histories
    tags = [1 for _ in items] if tags is None else tags
    flat = [*items, *[id for history in histories for id in history], *tags]
    lengths = [1] * len(items) + [len(history) for history in histories] + [1] * len(tags)
    return KeyedJaggedTensor(KEYS, torch.tensor(flat), lengths=torch.tensor(lengths))


def owners(module, table="item"):
    return {id for id in module.ids(table).tolist() if id}
