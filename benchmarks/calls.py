"""Counts jfi's own function calls in one forward of the layer, its files, and how often control moves between them.

    python -m benchmarks.calls

One JaggedFeatureInteraction of one feature with a position bias, on the CPU, with ids in (TorchRec's
EmbeddingCollection, then a FusedEmbeddingCollection) and with embeddings in. A call counts if its code is in a file of
jfi/; a comprehension is a call, and so is each resumption of a generator. A call is a move if the call before it was
into another file. The first forward, which imports modules and fills caches, is not counted.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import jfi

ROOT = f"{Path(jfi.__file__).parent}{os.sep}"
WIDTH = 64


class Calls(NamedTuple):
    """The calls in order, each as (file below jfi/, function)."""

    made: list[tuple[str, str]]

    @property
    def count(self) -> int:
        return len(self.made)

    @property
    def files(self) -> int:
        return len({file for file, _ in self.made})

    @property
    def moves(self) -> int:
        return sum(one[0] != other[0] for one, other in pairwise(self.made))

    def entries(self, folder: str) -> Counter[str]:
        """Returns how often control enters each file of a folder from another file of that folder."""
        files = [file for file, _ in self.made if file.startswith(folder)]
        return Counter(files[:1] + [after for before, after in pairwise(files) if before != after])


def count_calls(function: Callable[[], object]) -> Calls:
    """Calls `function` and counts what it calls."""
    calls = Calls([])

    def on_event(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT):
            calls.made.append((file.removeprefix(ROOT), frame.f_code.co_name))

    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def embedding_collections() -> dict[str, nn.Module | None]:
    """Returns the collections of a layer by name; None for a layer that is given embeddings."""
    tables = [EmbeddingConfig(name="item", embedding_dim=WIDTH, num_embeddings=100, feature_names=["history"])]
    return {
        "EmbeddingCollection": EmbeddingCollection(tables=tables),
        "FusedEmbeddingCollection": jfi.FusedEmbeddingCollection(tables, torch.optim.SGD, {"lr": 0.1}),
        "embeddings": None,
    }


def one_forward(collection: nn.Module | None) -> Calls:
    """Counts the calls of one forward of a layer of one feature."""
    torch.manual_seed(0)
    feature = jfi.SequenceFeatureConfig("taste", ["history"], ["item"], bias=jfi.PositionBias())
    layer = jfi.JaggedFeatureInteraction([feature], WIDTH, 4, embedding_collection=collection)
    lengths, target = torch.tensor([60, 0, 40]), torch.randn(3, WIDTH)

    def forward() -> None:
        if collection is None:
            sequences = {"history": JaggedTensor(rows, lengths=lengths)}
        else:
            sequences = KeyedJaggedTensor(["history"], ids, lengths=lengths)
        layer(sequences, {"item": target})

    rows, ids = torch.randn(100, WIDTH), torch.arange(100)
    forward()
    return count_calls(forward)


def main() -> None:
    for name, collection in embedding_collections().items():
        calls = one_forward(collection)
        print(f"{name}: {calls.count} calls, {calls.files} files, {calls.moves} moves between files")
        for file, count in Counter(file for file, _ in calls.made).most_common():
            functions = Counter(function for at, function in calls.made if at == file)
            print(f"{count:4} {file}: " + ", ".join(f"{name} {n}" if n > 1 else name for name, n in functions.items()))


if __name__ == "__main__":
    main()
