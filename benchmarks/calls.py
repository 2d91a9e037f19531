"""Counts jfi's own function calls in one forward of the layer, and how often control moves from file to file.

    python -m benchmarks.calls

One JaggedFeatureInteraction of one feature with a position bias, embeddings in, on the CPU. A call counts if its code
is in a file of jfi/; a comprehension is a call, and so is each resumption of a generator. A call is a move if the call
before it was into another file. The first forward, which imports modules and fills caches, is not counted.
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
from torchrec.sparse.jagged_tensor import JaggedTensor

import jfi

ROOT = f"{Path(jfi.__file__).parent}{os.sep}"


class Calls(NamedTuple):
    """What was called, in order: (file below jfi/, function)."""

    made: list[tuple[str, str]]

    @property
    def count(self) -> int:
        return len(self.made)

    @property
    def moves(self) -> int:
        return sum(one[0] != other[0] for one, other in pairwise(self.made))


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


def one_forward() -> Calls:
    """Counts the calls of one forward of a layer of one feature."""
    torch.manual_seed(0)
    feature = jfi.SequenceFeatureConfig("taste", ["history"], ["item"], bias=jfi.PositionBias())
    layer = jfi.JaggedFeatureInteraction([feature], 64, 4)
    history, lengths, item = torch.randn(100, 64), torch.tensor([60, 0, 40]), torch.randn(3, 64)

    def forward() -> None:
        layer({"history": JaggedTensor(history, lengths=lengths)}, {"item": item})

    forward()
    return count_calls(forward)


def main() -> None:
    calls = one_forward()
    print(f"{calls.count} calls, {calls.moves} moves between files")
    for file, count in Counter(file for file, _ in calls.made).most_common():
        functions = Counter(name for at, name in calls.made if at == file)
        print(f"{count:4} {file}: " + ", ".join(f"{name} {n}" if n > 1 else name for name, n in functions.items()))


if __name__ == "__main__":
    main()
