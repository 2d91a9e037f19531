"""jfi, whose backward gives the same bits each time, beside FlashAttention 4 in both of its modes."""

from dataclasses import replace

from benchmarks.jagged_peers import FLASH_4, FLASH_4_SAME_BITS, OURS, VARLEN
from benchmarks.run import Case
from benchmarks.self_attention import CROSS, HEADLINE, case


def cases(quick: bool) -> list[Case]:
    causal = [replace(shape, causal=True) for shape in HEADLINE[:2]]
    shapes = [*HEADLINE, *causal] + ([] if quick else CROSS)
    return [case(shape, (OURS, VARLEN, FLASH_4, FLASH_4_SAME_BITS), headline=True) for shape in shapes]
