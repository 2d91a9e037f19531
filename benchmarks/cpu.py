"""Target attention on a processor, float32: jfi beside padded SDPA, fbgemm's operators and torch's segments."""

from dataclasses import replace

from benchmarks.peers import FBGEMM, OURS, PADDED, PADDING, SEGMENTS, attention_problem
from benchmarks.problem import Shape
from benchmarks.run import Case

SHAPES = [
    Shape(512, 200, 64, 1, dtype="float32"),
    Shape(512, 200, 64, 8, dtype="float32"),
    Shape(128, 2000, 64, 1, dtype="float32"),
    Shape(512, 200, 64, 1, H=4, dtype="float32"),
    # Four heads of the same total width, each with its own key head.
    Shape(512, 200, 16, 1, H=4, G=4, dtype="float32"),
]


def cases(quick: bool) -> list[Case]:
    shapes = [replace(shape, B=shape.B // 16) for shape in SHAPES] if quick else SHAPES
    peers = (OURS, PADDED, PADDING, FBGEMM, SEGMENTS)
    return [
        Case(replace(shape, shared=shared).name, replace(shape, shared=shared), attention_problem, peers, headline=True)
        for shape in shapes
        for shared in (False, True)
    ]
