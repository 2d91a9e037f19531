"""Target attention on a GPU: four headline shapes beside every peer, then other lengths, widths and queries."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.peers import (
    FBGEMM,
    FLASH_4,
    FLEX,
    OURS,
    OURS_ALONE,
    PADDED_CUDNN,
    PADDED_EFFICIENT,
    PADDED_MATH,
    SLL_FUSED,
    SLL_UNFUSED,
    VARLEN,
    attention_problem,
)
from benchmarks.problem import Shape
from benchmarks.run import Case, Implementation

LONG, MANY, WIDE, LONGEST = HEADLINE = [
    Shape(1024, 4096, 128),
    Shape(4096, 512, 64),
    Shape(1024, 200, 256, T=8),
    Shape(64, 16384, 64),
]
PEERS = (PADDED_MATH, PADDED_EFFICIENT, PADDED_CUDNN, VARLEN, FLASH_4, FBGEMM, SLL_UNFUSED, SLL_FUSED)
QUICK_PEERS = (PADDED_EFFICIENT, VARLEN, FLASH_4, SLL_UNFUSED)
# Compiled for tens of seconds a shape, so on two of them.
COMPILED = (MANY, LONGEST)


def case(shape: Shape, implementations: Sequence[Implementation], headline: bool = False) -> Case:
    return Case(shape.name, shape, attention_problem, implementations, headline)


def headline_cases(quick: bool) -> list[Case]:
    out = []
    for shape in HEADLINE:
        for shared in (True, False):
            peers = QUICK_PEERS if quick else PEERS
            if shape in COMPILED and not shared and not quick:
                peers = (*peers, FLEX)
            out.append(case(replace(shape, shared=shared), (OURS, OURS_ALONE, *peers), headline=True))
    return out


def other_cases() -> list[Case]:
    one_read = [replace(shape, shared=True) for shape in HEADLINE]
    long, many = one_read[:2]
    several = [replace(long, T=16), replace(long, T=4, H=4), replace(many, T=16), replace(LONG, T=16)]
    candidates = [replace(shape, T=times) for times in (64, 1000) for shape in (long, LONG)]
    uneven = [replace(shape, lengths="log-normal") for shape in one_read]
    single = [replace(shape, dtype="float32") for shape in (long, many)]
    widths = [replace(long, D=width) for width in (96, 100, 32, 17, 16)]
    return [
        *(case(shape, (OURS, VARLEN)) for shape in several + candidates),
        *(case(shape, (OURS,)) for shape in uneven + single + widths),
    ]


def cases(quick: bool) -> list[Case]:
    return headline_cases(quick) + ([] if quick else other_cases())
