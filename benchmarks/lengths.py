"""Latency and memory against the longest length, in the manner of the paper's Figure 2."""

from dataclasses import replace

from benchmarks.peers import OURS, PADDED_EFFICIENT, PADDED_MATH, SLL_UNFUSED, VARLEN, attention_problem
from benchmarks.problem import Shape
from benchmarks.run import Case

SHAPE = Shape(128, 128, 128)
LONGEST = [2**power for power in range(7, 15)]


def cases(quick: bool) -> list[Case]:
    out = []
    for longest in LONGEST[::3] if quick else LONGEST:
        for shared in (True, False):
            shape = replace(SHAPE, N=longest, shared=shared)
            peers = () if shared else (PADDED_MATH, PADDED_EFFICIENT, SLL_UNFUSED, VARLEN)
            out.append(Case(shape.name, shape, attention_problem, (OURS, *peers)))
    return out
