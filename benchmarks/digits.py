"""Target attention over packed ternary digits beside attention over the same digits as rows of bfloat16.

Both get the same queries and events: *digits* int32 words [S, ceil(L / 16)], *rows* [S, 1, L] with value = key and a
gradient, as a history has that is looked up or computed. Each is compared with the formula in float64 on the longest
sample and some others, output and the queries' gradient.

Times are those of kernels, by replaying a CUDA graph, forward and backward apart. The least time (`floor_*`) is bytes
over this run's copy speed: words or rows once, queries, output and their gradients once, and for rows their
gradient. `memory_training_mb` is the allocator's peak of forward and backward above the inputs.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from benchmarks.problem import Shape, draw_lengths, random
from benchmarks.run import TOLERANCE, Rates, summary
from jfi.ops import digit_attention, jagged_attention, target_attention
from jfi.reference import unpack_digits

DIGITS, ROWS = "jfi, digits", "jfi, rows"


@dataclass(frozen=True)
class DigitShape(Shape):
    """D is the number of digits, H the query heads.

    Args:
        buckets: rows of a table of biases that events name; 0 for none.
        ragged: whether the T queries of a sample are candidates that share its history, as `jagged_attention` takes
            them.
    """

    buckets: int = 0
    ragged: bool = False

    @property
    def name(self) -> str:
        more = f", biases of {self.buckets} buckets" if self.buckets else ""
        more += ", ragged targets" if self.ragged else ""
        return f"B={self.B} N={self.N} L={self.D} T={self.T} H={self.H}{more}"


@dataclass(frozen=True)
class DigitCase:
    shape: DigitShape

    @property
    def name(self) -> str:
        return self.shape.name


@dataclass
class Inputs:
    """One set: words [S, W], what comes with the events, query [B, T, H, L], the output's gradient.

    query_offsets: [B + 1] where the queries are ragged targets.
    """

    words: Tensor
    given: dict[str, Tensor]
    query: Tensor
    grad: Tensor
    query_offsets: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, **given: Tensor) -> Tensor:
        """Attention of the queries to digits or rows."""
        if self.query_offsets is not None:
            offsets = {"query_offsets": self.query_offsets, "key_offsets": given.pop("offsets")}
            return jagged_attention(query.flatten(0, 1), key, **offsets, **given).view_as(query)
        return (digit_attention if key.dtype == torch.int32 else target_attention)(query, key, **given)

    def rows(self) -> Tensor:
        """[S, 1, L]."""
        return unpack_digits(self.words, self.query.shape[3])[:, None].to(self.query.dtype)


def make_inputs(shape: DigitShape, seed: int, device: torch.device) -> Inputs:
    lengths = draw_lengths(shape, seed)
    given = {"offsets": F.pad(lengths.cumsum(0), (1, 0)).to(device)}
    torch.manual_seed(seed)
    events = int(lengths.sum())
    if shape.buckets:
        given["key_bias"] = torch.randn(shape.buckets, shape.H, device=device)
        given["key_bias_index"] = torch.randint(shape.buckets, (events,), device=device)
    # The low bit of each digit says whether it is not 0, the high bit its sign.
    size = (events, -(-shape.D // 16))
    bits = [torch.randint(-(2**31), 2**31, size, dtype=torch.int32, device=device) for _ in range(2)]
    low = bits[0] & 0x55555555
    query, grad = (random((shape.B, shape.T, shape.H, shape.D), shape.dtype, device) for _ in range(2))
    ends = torch.arange(0, (shape.B + 1) * shape.T, shape.T, device=device) if shape.ragged else None
    return Inputs(low | (bits[1] & low) << 1, given, query, grad, ends)


class Digits:
    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.leaves = [inputs.query] + [inputs.given[name] for name in ("key_bias",) if name in inputs.given]
        self.read = inputs.words.nbytes
        self.written = 0

    def call(self, query: Tensor, *bias: Tensor) -> Tensor:
        given = self.inputs.given | ({"key_bias": bias[0]} if bias else {})
        return self.inputs.attend(query, self.inputs.words, **given)


class Rows(Digits):
    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.leaves = [self.leaves[0], inputs.rows(), *self.leaves[1:]]
        self.read = self.written = self.leaves[1].nbytes

    def call(self, query: Tensor, rows: Tensor, *bias: Tensor) -> Tensor:
        return self.inputs.attend(query, rows, **self.inputs.given | ({"key_bias": bias[0]} if bias else {}))


def tracked(way: Digits) -> tuple[Tensor, list[Tensor]]:
    """The output with its graph, and fresh leaves."""
    leaves = [x.detach().requires_grad_() for x in way.leaves]
    return way.call(*leaves), leaves


def step(way: Digits) -> tuple[Tensor, ...]:
    out, leaves = tracked(way)
    return out.detach(), *torch.autograd.grad(out, leaves, way.inputs.grad)


def samples(offsets: Tensor) -> list[int]:
    """Those that are checked: the longest, the first and the last."""
    return list(dict.fromkeys([int(offsets.diff().argmax()), 0, len(offsets) - 2]))


def error(inputs: Inputs, out: Tensor, dquery: Tensor) -> float:
    """The larger relative error of output and queries' gradient over the checked samples, in the Frobenius norm."""
    offsets, wrong, size = inputs.given["offsets"], [0.0, 0.0], [0.0, 0.0]
    words, table = inputs.words, inputs.given.get("key_bias")
    for b in samples(offsets):
        events = slice(int(offsets[b]), int(offsets[b + 1]))
        key = unpack_digits(words[events], inputs.query.shape[3]).double()
        query = inputs.query[b].double().requires_grad_()
        scores = query @ key.T * key.shape[1] ** -0.5
        if table is not None:
            scores = scores + table[inputs.given["key_bias_index"][events]].double().T
        truth = scores.softmax(-1) @ key
        truths = truth.detach(), *torch.autograd.grad(truth, query, inputs.grad[b].double())
        for i, (x, y) in enumerate(zip((out[b], dquery[b]), truths, strict=True)):
            wrong[i] += float((x.double() - y).square().sum())
            size[i] += float(y.square().sum())
    errors = [(x / y) ** 0.5 if y else float(x != 0) for x, y in zip(wrong, size, strict=True)]
    return max(errors, key=lambda x: (x != x, x))


def times(row: dict, kind: type[Digits], sets: list[Inputs]) -> None:
    ways = [kind(inputs) for inputs in sets]

    @torch.no_grad()
    def forward(way: Digits) -> Tensor:
        return way.call(*way.leaves)

    def backwards() -> list[measure.Call]:
        graphs = [(way, *tracked(way)) for way in ways]
        return [
            lambda way=way, out=out, leaves=leaves: torch.autograd.grad(out, leaves, way.inputs.grad, retain_graph=True)
            for way, out, leaves in graphs
        ]

    row["kernel_forward_us"] = measure.kernel_us(lambda: [lambda way=way: forward(way) for way in ways])
    row["kernel_backward_us"] = measure.kernel_us(backwards)
    for name in ("forward", "backward"):
        row[f"efficiency_{name}"] = row[f"floor_{name}_us"] / row[f"kernel_{name}_us"]
    row["memory_forward_mb"] = measure.peak_mb(lambda: forward(ways[0]))
    row["memory_training_mb"] = measure.peak_mb(lambda: step(ways[0]))


def run(case: DigitCase, device: torch.device, seconds: float, rates: Rates) -> Iterator[dict]:
    """A row for each way; `seconds` is not needed, since graphs are replayed."""
    shape = case.shape
    first = make_inputs(shape, 0, device)
    count = max(measure.LEAST_SETS, min(measure.SETS, measure.ROTATED_BYTES // max(1, Digits(first).read) + 1))
    sets = [first, *(make_inputs(shape, seed, device) for seed in range(1, count))]
    names = ("B", "N", "D", "T", "H", "buckets", "ragged", "dtype")
    columns = {name: getattr(shape, name) for name in names} | {"S": len(first.words)}
    for name, kind in ((DIGITS, Digits), (ROWS, Rows)):
        row = {"case": case.name, "implementation": name, "ours": kind is Digits, "headline": True, **columns}
        try:
            few = sets if kind is Digits else sets[: measure.LEAST_SETS]  # rows are larger than any cache
            way = kind(first)
            queries = first.query.nbytes
            row["floor_forward_us"] = rates.floor_us(way.read + 2 * queries, 0.0) or 0.0
            row["floor_backward_us"] = rates.floor_us(way.read + way.written + 3 * queries, 0.0) or 0.0
            out, dquery, *_ = step(way)
            row["error"] = error(first, out, dquery)
            del way, out, dquery, _
            row["status"] = "ok" if row["error"] <= TOLERANCE[shape.dtype] else "wrong"
            if row["status"] == "ok":
                with torch.autograd.set_multithreading_enabled(False):  # as `jfi.training` trains
                    times(row, kind, few)
            else:
                row["note"] = f"differs from float64 by {row['error']:.1e}"
        except Exception as failure:
            row |= {"status": "failed", "note": summary(failure)}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield row


USUAL = DigitShape(B=1024, N=4096, D=64, H=16)
HEADLINES = (USUAL, replace(USUAL, D=32), replace(USUAL, N=20_000), replace(USUAL, N=20_000, D=32))
OTHERS = (
    replace(USUAL, D=128),
    replace(USUAL, D=25),
    replace(USUAL, H=1),
    replace(USUAL, buckets=32),
    # With the two digits that tell an ID from none.
    replace(USUAL, D=27, T=16, H=4, ragged=True),
    replace(USUAL, D=66, T=16, H=4, ragged=True),
)


def cases(quick: bool) -> list[DigitCase]:
    return [DigitCase(shape) for shape in (HEADLINES[:1] if quick else HEADLINES + OTHERS)]
