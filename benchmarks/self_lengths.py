"""The four lines of the paper's Figure 2: self-attention's time and memory against the longest length."""

from dataclasses import replace

from benchmarks.jagged_peers import DENSE, OURS, UNFUSED, UNMASKED, JaggedShape, jagged_problem
from benchmarks.run import Case

LONGEST = [2**power for power in range(7, 15)]
# Samples times longest length: the chip is full at every length, and at the longest one padded [B, N, N] is 8.6 GB in
# bfloat16, of which dense attention holds four at most.  One head, since Table 1's operators know one.
EVENTS = 2**18
WIDTH = 128

LINES = (
    replace(DENSE, name="dense"),
    replace(UNFUSED, name="jagged, unfused"),
    replace(UNMASKED, name="dense flash"),
    replace(OURS, name="jagged flash"),
)


def cases(quick: bool) -> list[Case]:
    shapes = [JaggedShape(EVENTS // longest, longest, WIDTH) for longest in (LONGEST[::3] if quick else LONGEST)]
    return [Case(shape.name, shape, jagged_problem, LINES) for shape in shapes]
