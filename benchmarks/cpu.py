"""The operators on a CPU, float32, beside their peers: the paper's Table 1, self-attention, target attention.

*padded* peers get padded tensors; *padding + ...* and *padding, torch* start from packed rows and end with them.
"""

from dataclasses import replace

from benchmarks import jagged_peers, table1
from benchmarks.jagged_peers import JaggedShape, jagged_problem
from benchmarks.peers import FBGEMM, OURS, PADDED, PADDING, SEGMENTS, attention_problem
from benchmarks.problem import Shape
from benchmarks.run import Case, Implementation

TARGET_SHAPES = [
    Shape(512, 200, 64, 1, dtype="float32"),
    Shape(512, 200, 64, 8, dtype="float32"),
    Shape(128, 2000, 64, 1, dtype="float32"),
    Shape(512, 200, 64, 1, H=4, dtype="float32"),
    # Four heads of the same total width, each with its own key head.
    Shape(512, 200, 16, 1, H=4, G=4, dtype="float32"),
]
TABLE_1_SHAPE = Shape(64, 200, 256, T=8, dtype="float32")
SELF_SHAPES = [
    JaggedShape(1024, 12, 16, H=4, G=4, dtype="float32"),
    JaggedShape(1024, 60, 16, H=2, G=2, dtype="float32", lengths="log-normal"),
    JaggedShape(256, 200, 16, H=4, G=4, dtype="float32"),
    JaggedShape(256, 200, 64, H=2, G=2, dtype="float32"),
    JaggedShape(256, 200, 32, H=2, G=2, dtype="float32", causal=True),
]


def target_cases(shapes: list[Shape]) -> list[Case]:
    peers = (OURS, PADDED, PADDING, FBGEMM, SEGMENTS)
    return [
        Case(replace(shape, shared=shared).name, replace(shape, shared=shared), attention_problem, peers, headline=True)
        for shape in shapes
        for shared in (False, True)
    ]


def table_1_cases(shape: Shape) -> list[Case]:
    """fbgemm has CPU kernels for three of the six; the others are loops over samples in fbgemm_gpu.sll."""
    out = []
    for name, operator in table1.OPERATORS.items():
        own, _, padding, _, _ = operator.implementations()
        fbgemm = operator.prepare_sll if operator.fbgemm is None else operator.prepare_fbgemm
        implementations = (own, padding, Implementation("fbgemm", fbgemm))
        out.append(Case(f"{name}, {shape.name}", shape, operator.build, implementations, headline=True))
    return out


def self_cases(shapes: list[JaggedShape]) -> list[Case]:
    peers = (jagged_peers.OURS, jagged_peers.PADDED, jagged_peers.PADDING)
    return [Case(f"self-attention, {shape.name}", shape, jagged_problem, peers, headline=True) for shape in shapes]


def cases(quick: bool) -> list[Case]:
    def small(shapes: list) -> list:
        return [replace(shape, B=shape.B // 16) for shape in shapes] if quick else shapes

    (table_1_shape,) = small([TABLE_1_SHAPE])
    return table_1_cases(table_1_shape) + self_cases(small(SELF_SHAPES)) + target_cases(small(TARGET_SHAPES))
