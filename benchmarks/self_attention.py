"""Jagged attention: self-attention over histories, and a ragged number of candidates against them."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.jagged_peers import (
    DENSE,
    FLASH_4,
    FLEX,
    HSTU,
    IKBO,
    OURS,
    PADDED,
    SLL,
    UNMASKED,
    VARLEN,
    JaggedShape,
    jagged_problem,
)
from benchmarks.run import Case, Implementation

HEADLINE = [
    JaggedShape(16, 8192, 128, H=4, G=4),
    JaggedShape(64, 2048, 64, H=4, G=4),
    JaggedShape(64, 1024, 64, H=4, G=4),
    JaggedShape(512, 200, 64, H=4, G=4),
    JaggedShape(1024, 2048, 64, T=64, H=4, G=4),
]
LONG, MIDDLE = HEADLINE[:2]
#: The cross-attention that Meta measures its kernel with: 3,686 to 4,096 events, two query heads on one key head.
CROSS = [JaggedShape(1024, 4096, 128, T=most, H=2, G=1, lengths="nearly full") for most in (32, 128, 160, 256)]
#: Every user's candidates of 64 query rows against a history of one length, as IKBO's own benchmark has them.
SHARED_USERS = JaggedShape(32, 2048, 128, T=4096, H=2, G=2, dtype="float16", lengths="full")
#: Where a schedule that took time with the square of the batch would take longer than attention.
MANY = JaggedShape(65_536, 40, 64, H=2, G=2)
PEERS = (VARLEN, FLASH_4, PADDED, UNMASKED, DENSE, SLL)
QUICK_PEERS = (VARLEN, FLASH_4, UNMASKED)


def case(shape: JaggedShape, implementations: Sequence[Implementation], headline: bool = False) -> Case:
    return Case(shape.name, shape, jagged_problem, implementations, headline)


def cases(quick: bool) -> list[Case]:
    cross = [case(shape, (OURS, VARLEN, FLASH_4), headline=True) for shape in CROSS]
    cross.append(case(SHARED_USERS, (OURS, VARLEN, FLASH_4, IKBO), headline=True))
    if quick:
        return [*(case(shape, (OURS, *QUICK_PEERS), headline=True) for shape in HEADLINE), *cross]
    causal = [replace(shape, causal=True) for shape in (LONG, MIDDLE)]
    return [
        case(LONG, (OURS, *PEERS, FLEX), headline=True),  # compiled for tens of seconds a shape, so on one of them
        *(case(shape, (OURS, *PEERS), headline=True) for shape in HEADLINE[1:]),
        *(case(shape, (OURS, VARLEN, FLASH_4, HSTU), headline=True) for shape in causal),
        *cross,
        case(replace(MIDDLE, lengths="log-normal"), (OURS,)),
        case(replace(LONG, B=2), (OURS, VARLEN)),
        case(MANY, (OURS, VARLEN)),
    ]
