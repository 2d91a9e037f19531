"""The README's table: the operators and the layer beside the peers that have a kernel for the shape, in one run."""

from dataclasses import replace

from benchmarks import layer, self_attention, target
from benchmarks.jagged_peers import FLASH_4, HSTU, IKBO, SLL, UNMASKED, VARLEN
from benchmarks.jagged_peers import OURS as JAGGED
from benchmarks.peers import OURS, PADDED_CUDNN
from benchmarks.run import Case


def cases(quick: bool) -> list[Case]:
    """The README's cases in its order; quick: without padded cuDNN."""
    padded = target.QUICK_PEERS if quick else (*target.QUICK_PEERS, PADDED_CUDNN)
    one_read = [replace(shape, shared=True) for shape in (target.LONG, target.LONGEST)]
    causal = replace(self_attention.LONG, causal=True)
    return [
        *(target.case(shape, (OURS, *padded), headline=True) for shape in one_read),
        self_attention.case(self_attention.MIDDLE, (JAGGED, VARLEN, FLASH_4, UNMASKED, SLL), headline=True),
        layer.case(layer.HEADLINE[1], layer.OURS, layer.PROJECTED),
        self_attention.case(causal, (JAGGED, VARLEN, FLASH_4, HSTU), headline=True),
        self_attention.case(self_attention.SHARED_USERS, (JAGGED, VARLEN, FLASH_4, IKBO), headline=True),
    ]
