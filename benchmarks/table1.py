"""The six operators of the paper's Table 1, in its configuration, beside padded torch, fbgemm's CUDA and Triton (sll).

The paper gives operations, memory and the speed-up over padded PyTorch; the configuration follows from the first two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import jfi.ops
import jfi.table1
from benchmarks.peers import allow_tf32, fbgemm
from benchmarks.problem import (
    BATCH,
    PAIRS,
    ROWS,
    Problem,
    Shape,
    draw_lengths,
    pad,
    random,
    valid,
    valid_pairs,
)
from benchmarks.run import Case, Implementation, Missing, Prepared

SHAPE = Shape(1024, 200, 256, T=8, dtype="float32")

#: Xu et al., 'Jagged Flash Attention', RecSys 2024, Table 1: memory in MB and speed-up over padded PyTorch.
PAPER = {
    "jagged_dense_bmm": (109, 1.67),
    "jagged_jagged_bmm": (104, 2.52),
    "jagged_softmax": (6.3, 1.38),
    "jagged_jagged_bmm_jagged_out": (540, 2.29),
    "array_jagged_bmm_jagged_out": (1990, 1.29),
    "jagged2_softmax": (520, 3.06),
}


@dataclass(frozen=True)
class Operator:
    """The formula on one sample, and every implementation as a function of a problem that returns a call.

    ``operands`` names each input's layout and widths, as "rows D"; ``out`` the output's.
    """

    operands: dict[str, str]
    out: str
    formula: Callable[..., Tensor]
    ours: Callable[[Problem], Callable[..., Tensor]]
    padded: Callable[..., Tensor]
    fbgemm: Callable[[Problem], Callable[..., Tensor]] | None
    sll: Callable[[Problem], Callable[..., Tensor]]
    hidden: float = 0.0  # what padding holds

    def build(self, shape: Shape, seed: int, device: torch.device) -> Problem:
        torch.manual_seed(seed)
        lengths = draw_lengths(shape, seed)
        first = {BATCH: shape.B, ROWS: int(lengths.sum()), PAIRS: int(lengths.square().sum())}

        def draw(description: str) -> Tensor:
            layout, *widths = description.split()
            return random((first[layout], *(getattr(shape, width) for width in widths)), shape.dtype, device)

        layouts = {name: description.split()[0] for name, description in (self.operands | {"out": self.out}).items()}
        inputs = {name: draw(description) for name, description in self.operands.items()}
        offsets = F.pad(lengths.cumsum(0), (1, 0)).to(device)
        return Problem(shape, lengths, offsets, inputs, layouts, draw(self.out), self.formula)

    def prepare_padded(self, problem: Problem) -> Prepared:
        lengths, longest = problem.device_lengths, problem.shape.N
        inside = {ROWS: valid(lengths, longest), PAIRS: valid_pairs(lengths, longest)}

        def widen(x: Tensor, layout: str, hidden: float) -> Tensor:
            if layout == BATCH:
                return x
            if layout == ROWS:
                return pad(x, lengths, longest).masked_fill_(~inside[ROWS][..., None], hidden)
            return x.new_full((problem.shape.B, longest, longest), hidden).masked_scatter_(inside[PAIRS], x)

        def narrow(x: Tensor, layout: str) -> Tensor:
            return x if layout == BATCH else x[inside[layout]]

        layouts = problem.layouts
        return Prepared(
            [widen(x, layouts[name], self.hidden) for name, x in problem.inputs.items()],
            self.padded,
            widen(problem.grad, layouts["out"], 0.0),
            lambda out: narrow(out, layouts["out"]),
            lambda grads: [narrow(x, layouts[name]) for name, x in zip(problem.inputs, grads, strict=True)],
        )

    def prepare_padding(self, problem: Problem) -> Prepared:
        """The same from packed rows and back: what a model pays whose tensors are jagged."""
        lengths, longest, batch = problem.device_lengths, problem.shape.N, problem.shape.B
        places = {
            ROWS: valid(lengths, longest).flatten().nonzero()[:, 0],
            PAIRS: valid_pairs(lengths, longest).flatten().nonzero()[:, 0],
        }
        sides = {ROWS: (batch, longest), PAIRS: (batch, longest, longest)}

        def widen(x: Tensor, layout: str) -> Tensor:
            if layout == BATCH:
                return x
            wide = x.new_full((math.prod(sides[layout]), *x.shape[1:]), self.hidden)
            return wide.index_copy(0, places[layout], x).unflatten(0, sides[layout])

        def narrow(out: Tensor, layout: str) -> Tensor:
            return out if layout == BATCH else out.flatten(0, len(sides[layout]) - 1).index_select(0, places[layout])

        layouts = [problem.layouts[name] for name in problem.inputs]

        def call(*tensors: Tensor) -> Tensor:
            return narrow(self.padded(*map(widen, tensors, layouts)), problem.layouts["out"])

        return Prepared(list(problem.inputs.values()), call, problem.grad)

    def prepare_fbgemm(self, problem: Problem) -> Prepared:
        if self.fbgemm is None:
            raise Missing("not offered")
        fbgemm()
        return Prepared(list(problem.inputs.values()), self.fbgemm(problem), problem.grad)

    def prepare_sll(self, problem: Problem) -> Prepared:
        fbgemm("fbgemm_gpu.sll")
        return Prepared(list(problem.inputs.values()), self.sll(problem), problem.grad)

    def implementations(self) -> list[Implementation]:
        def prepare_ours(problem: Problem) -> Prepared:
            return Prepared(list(problem.inputs.values()), self.ours(problem), problem.grad)

        return [
            Implementation("jfi", prepare_ours, ours=True, graph=True),
            Implementation("padded torch", self.prepare_padded),
            Implementation("padding, torch", self.prepare_padding),
            Implementation("fbgemm CUDA", self.prepare_fbgemm),
            Implementation("sll Triton", self.prepare_sll),
        ]


HIDDEN = -1e30  # a score that padding has: it weighs nothing, and a sample of nothing but padding makes no NaN


def _lengths_and_offsets(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths = problem.device_lengths
    return lengths, problem.offsets, lengths.square(), problem.pair_offsets


def sll_pairs_out(problem: Problem) -> Callable[..., Tensor]:
    lengths, offsets, squares, pairs = _lengths_and_offsets(problem)
    longest, tf32 = problem.shape.N, allow_tf32()
    return lambda x, y: torch.ops.fbgemm.sll_jagged_jagged_bmm_jagged_out(
        x, y, lengths, offsets, lengths, offsets, squares, pairs, longest, tf32
    )


def sll_pairs_in(problem: Problem) -> Callable[..., Tensor]:
    lengths, offsets, squares, pairs = _lengths_and_offsets(problem)
    longest, tf32 = problem.shape.N, allow_tf32()
    return lambda a, y: torch.ops.fbgemm.sll_array_jagged_bmm_jagged_out(
        a, y, squares, pairs, lengths, offsets, lengths, offsets, longest, tf32
    )


def sll_pairs_softmax(problem: Problem) -> Callable[..., Tensor]:
    offsets, pairs, longest = problem.offsets, problem.pair_offsets, problem.shape.N
    return lambda a: torch.ops.fbgemm.sll_jagged2_softmax(a, offsets, pairs, longest, False)


OPERATORS = {
    "jagged_dense_bmm": Operator(
        {"x": "rows D", "dense": "batch D T"},
        "rows T",
        formula=lambda x, dense: x @ dense,
        ours=lambda p: lambda x, dense: jfi.table1.jagged_dense_bmm(x, p.offsets, dense),
        padded=torch.bmm,
        fbgemm=lambda p: lambda x, y: torch.ops.fbgemm.jagged_dense_bmm(x, p.offsets, y, p.shape.N)[0],
        sll=lambda p: (
            lambda x, y: torch.ops.fbgemm.sll_jagged_dense_bmm(
                x, y, p.offsets, p.shape.N, allow_tf32(), use_fbgemm_kernel=False
            )
        ),
    ),
    "jagged_jagged_bmm": Operator(
        {"x": "rows D", "y": "rows T"},
        "batch D T",
        formula=lambda x, y: x.T @ y,
        ours=lambda p: lambda x, y: jfi.table1.jagged_jagged_bmm(x, y, p.offsets),
        padded=lambda x, y: torch.bmm(x.transpose(1, 2), y),
        fbgemm=lambda p: lambda x, y: torch.ops.fbgemm.jagged_jagged_bmm(x, y, p.offsets, p.shape.N),
        sll=lambda p: (
            lambda x, y: torch.ops.fbgemm.sll_jagged_jagged_bmm(
                x, y, p.offsets, p.shape.N, allow_tf32(), use_fbgemm_kernel=False
            )
        ),
    ),
    "jagged_softmax": Operator(
        {"x": "rows T"},
        "rows T",
        formula=lambda x: x.softmax(0),
        ours=lambda p: lambda x: jfi.table1.jagged_softmax(x, p.offsets),
        padded=lambda x: x.softmax(1),
        fbgemm=lambda p: lambda x: torch.ops.fbgemm.jagged_softmax(x, p.offsets, p.shape.N)[0],
        sll=lambda p: lambda x: torch.ops.fbgemm.sll_jagged_softmax(x, p.offsets, p.shape.N, use_fbgemm_kernel=False),
        hidden=HIDDEN,
    ),
    "jagged_jagged_bmm_jagged_out": Operator(
        {"x": "rows D", "y": "rows D"},
        "pairs",
        formula=lambda x, y: (x @ y.T).flatten(),
        ours=lambda p: lambda x, y: jfi.table1.jagged_jagged_bmm_jagged_out(x, y, p.offsets, out_size=p.grad.shape[0]),
        padded=lambda x, y: torch.bmm(x, y.transpose(1, 2)),
        fbgemm=None,
        sll=sll_pairs_out,
    ),
    "array_jagged_bmm_jagged_out": Operator(
        {"a": "pairs", "y": "rows D"},
        "rows D",
        formula=lambda a, y: a.view(y.shape[0], y.shape[0]) @ y,
        ours=lambda p: lambda a, y: jfi.table1.array_jagged_bmm_jagged_out(a, y, p.offsets, out_rows=p.rows),
        padded=torch.bmm,
        fbgemm=None,
        sll=sll_pairs_in,
    ),
    "jagged2_softmax": Operator(
        {"a": "pairs"},
        "pairs",
        formula=lambda a: a.view(round(a.shape[0] ** 0.5), -1).softmax(-1).flatten() if a.shape[0] else a,
        ours=lambda p: lambda a: jfi.table1.jagged2_softmax(a, p.offsets),
        padded=lambda a: a.softmax(-1),
        fbgemm=None,
        sll=sll_pairs_softmax,
        hidden=HIDDEN,
    ),
}


def cases(quick: bool, shape: Shape = SHAPE) -> list[Case]:
    out = []
    for name, operator in OPERATORS.items():
        paper = dict(zip(("paper_mb", "paper_speedup"), PAPER[name], strict=True))
        out.append(Case(name, shape, operator.build, operator.implementations(), headline=True, paper=paper))
    return out
