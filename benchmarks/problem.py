"""Inputs of one operator on one jagged batch, and the truth about any of its samples in float64."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIGMA = 1.5  # of the log-normal lengths
#: Uniform lengths by name: the shortest, as a share of N.
SHORTEST = {"uniform": 0.0, "nearly full": 0.9, "full": 1.0}

#: What the first dimension of a tensor counts: samples, packed rows, the L·L pairs of each sample's rows, or packed
#: queries.
BATCH, ROWS, PAIRS, QUERIES = "batch", "rows", "pairs", "queries"


@dataclass(frozen=True)
class Shape:
    """The letters of the operators' docstrings; N is the longest length that may be drawn."""

    B: int
    N: int
    D: int
    T: int = 1
    H: int = 1
    G: int = 1
    dtype: str = "bfloat16"
    lengths: str = "uniform"
    shared: bool = False

    @property
    def name(self) -> str:
        heads = f" H={self.H}" if self.H > 1 else ""
        heads += f" G={self.G}" if self.G > 1 else ""
        lengths = "" if self.lengths == "uniform" else f", {self.lengths}"
        reads = "one read" if self.shared else "distinct"
        return f"B={self.B} N={self.N} D={self.D} T={self.T}{heads} {self.dtype}, {reads}{lengths}"


def order(samples: int, seed: int) -> Tensor:
    """[B]: an order of the samples, so that every set of a case's inputs is the same work."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))


def draw_lengths(shape: Shape, seed: int) -> Tensor:
    """[B] on the CPU: uniform up to N (see SHORTEST), or log-normal, cut at N, with the sum of those uniform in [0, N].

    Another seed gives the same lengths in another order.
    """
    generator = torch.Generator().manual_seed(0)
    shortest = int(SHORTEST.get(shape.lengths, 0.0) * shape.N)
    lengths = torch.randint(shortest, shape.N + 1, (shape.B,), generator=generator)
    if shape.lengths not in SHORTEST:
        lengths = log_normal(shape.B, shape.N, int(lengths.sum()), generator)
    return lengths[order(shape.B, seed)]


def log_normal(samples: int, longest: int, total: int, generator: torch.Generator) -> Tensor:
    """[B]: log-normal lengths, cut at the longest, with nearly that sum."""
    spread = (SIGMA * torch.randn(samples, generator=generator, dtype=torch.float64)).exp()
    low, high = 0.0, float(longest) ** 2
    for _ in range(60):
        middle = (low + high) / 2
        lengths = (spread * middle).long().clamp(max=longest)
        low, high = (middle, high) if lengths.sum() < total else (low, middle)
    return lengths


@dataclass
class Tally:
    """How far a tensor is from the truth, part by part."""

    wrong: float = 0.0
    size: float = 0.0

    def add(self, part: Tensor, truth: Tensor) -> None:
        self.wrong += float((part.double().reshape(truth.shape) - truth).square().sum())
        self.size += float(truth.square().sum())

    @property
    def relative(self) -> float:
        return (self.wrong / self.size) ** 0.5 if self.size else float(self.wrong != 0)


@dataclass
class Problem:
    """One set of inputs.

    Attributes:
        inputs: by argument name, in the operator's layout; the gradient flows to each of them.
        layouts: of every input and of "out".
        grad: the gradient of the output.
        formula: the operator on one sample, in float64, differentiable.
        flops: of forward and backward, counting real pairs only; 0 where bytes alone set the floor.
        query_lengths: where queries are packed by lengths of their own; None means the rows are the queries.
        kept: bytes that a forward must leave for its backward beside the output.
    """

    shape: Shape
    lengths: Tensor
    offsets: Tensor
    inputs: dict[str, Tensor]
    layouts: dict[str, str]
    grad: Tensor
    formula: Callable[..., Tensor]
    flops: tuple[float, float] = (0.0, 0.0)
    query_lengths: Tensor | None = None
    kept: int = 0
    starts: dict[str, list[int]] = field(init=False)
    known: dict[int, tuple[Tensor, list[Tensor]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        queries = self.lengths if self.query_lengths is None else self.query_lengths
        counts = {ROWS: self.lengths, PAIRS: self.lengths.square(), QUERIES: queries}
        self.starts = {layout: F.pad(count.cumsum(0), (1, 0)).tolist() for layout, count in counts.items()}

    @property
    def rows(self) -> int:
        return self.starts[ROWS][-1]

    @property
    def device_lengths(self) -> Tensor:
        return self.lengths.to(self.offsets.device)

    @property
    def pair_offsets(self) -> Tensor:
        return torch.tensor(self.starts[PAIRS], device=self.offsets.device)

    @property
    def query_offsets(self) -> Tensor:
        if self.query_lengths is None:
            return self.offsets
        return torch.tensor(self.starts[QUERIES], device=self.offsets.device)

    def take(self, x: Tensor, layout: str, sample: int) -> Tensor:
        """The sample's part of a tensor."""
        if layout == BATCH:
            return x[sample]
        return x[self.starts[layout][sample] : self.starts[layout][sample + 1]]

    def samples(self, count: int = 6) -> list[int]:
        """The samples that are checked: the longest, the shortest, the last, and some between."""
        order = self.lengths.argsort(stable=True).tolist()
        picked = [order[-1], order[0], len(order) - 1, *order[:: max(1, len(order) // (count - 2))]]
        return list(dict.fromkeys(picked))[:count]

    def truth(self, sample: int) -> tuple[Tensor, list[Tensor]]:
        """Output and gradients of one sample."""
        if sample not in self.known:
            self.known[sample] = self._truth(sample)
        return self.known[sample]

    def _truth(self, sample: int) -> tuple[Tensor, list[Tensor]]:
        leaves = {
            name: self.take(x, self.layouts[name], sample).double().requires_grad_() for name, x in self.inputs.items()
        }
        out = self.formula(**leaves)
        grad = self.take(self.grad, self.layouts["out"], sample).double()
        return out.detach(), list(torch.autograd.grad(out, list(leaves.values()), grad))

    def relative_errors(self, got: list[Tensor]) -> list[float]:
        """Of the output and the gradients that follow it, in the Frobenius norm over the checked samples."""
        layouts = [self.layouts["out"], *(self.layouts[name] for name in self.inputs)]
        tallies = [Tally() for _ in got]
        for sample in self.samples():
            true_out, true_grads = self.truth(sample)
            for tally, x, layout, truth in zip(tallies, got, layouts, [true_out, *true_grads], strict=False):
                tally.add(self.take(x, layout, sample), truth)
        return [tally.relative for tally in tallies]

    def bytes(self) -> tuple[int, int]:
        """The fewest of forward (inputs in, output out) and backward (inputs, output's gradient in, gradients out)."""
        size = sum(x.nbytes for x in self.inputs.values())
        return size + self.grad.nbytes, 2 * size + self.grad.nbytes

    def columns(self) -> dict[str, object]:
        return asdict(self.shape) | {"S": self.rows}


def random(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=DTYPES[dtype], device=device)


def pad(x: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """[S, ...] -> [B, N, ...], zeros behind each sample's rows."""
    out = x.new_zeros(lengths.shape[0], longest, *x.shape[1:])
    out[valid(lengths, longest)] = x
    return out


def valid(lengths: Tensor, longest: int) -> Tensor:
    """[B, N]: whether a padded row is real."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def valid_pairs(lengths: Tensor, longest: int) -> Tensor:
    """[B, N, N]: whether a padded pair is real."""
    rows = valid(lengths, longest)
    return rows[:, :, None] & rows[:, None, :]
