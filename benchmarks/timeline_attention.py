"""Jagged attention by time: the targets of a user attend to the events of one timeline that are older than themselves.

Cases of the suite `timeline`. Each shape is measured without times (every target sees the whole timeline), with times,
and with times and a bias by distance or by age. Gaps between events are 1 s to 2 days, log-distributed with most of
them short; targets lie anywhere between the events.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import jfi.ops
from benchmarks.jagged_peers import JaggedShape, jagged_problem
from benchmarks.problem import DTYPES, QUERIES, ROWS, Problem, Tally
from benchmarks.run import Case, Implementation, Prepared

BUCKETS = 32
LONGEST_GAP = 12  # its natural logarithm, of seconds
#: What targets see, and the argument of jagged_attention that has the bias.
KINDS = {"no times": None, "older": None, "older, bias by distance": "position_bias", "older, bias by age": "time_bias"}


@dataclass(frozen=True)
class TimedShape(JaggedShape):
    """`kind` is one of KINDS."""

    kind: str = "no times"

    @property
    def name(self) -> str:
        return f"{super().name}, {self.kind}"


SHAPES = [
    *(TimedShape(64, 16384, 128, T=most, H=4, lengths="full", shared=True) for most in (64, 512)),
    TimedShape(1024, 4096, 128, T=128, H=2, lengths="nearly full"),
]


@dataclass(kw_only=True)
class TimedProblem(Problem):
    """Times [R] of the targets and [S] of the events; the input "bias" [BUCKETS, H] where the kind has one."""

    query_time: Tensor
    key_time: Tensor

    def relative_errors(self, got: list[Tensor]) -> list[float]:
        """Over all users: the bias gets its gradient from every one."""
        names = ["out", *self.inputs]
        tallies = {name: Tally() for name in names[: len(got)]}
        summed = None
        for user in range(self.shape.B):
            for name, x, truth in zip(names, got, self._user_truth(user), strict=False):
                if name == "bias":
                    summed = truth if summed is None else summed + truth
                else:
                    tallies[name].add(self.take(x, self.layouts[name], user), truth)
        if summed is not None and "bias" in tallies:
            tallies["bias"].add(got[names.index("bias")], summed)
        return [tally.relative for tally in tallies.values()]

    def _user_truth(self, user: int) -> list[Tensor]:
        """The output of one user and the gradients."""
        leaves = {
            name: (x if name == "bias" else self.take(x, self.layouts[name], user)).double().requires_grad_()
            for name, x in self.inputs.items()
        }
        times = self.take(self.query_time, QUERIES, user), self.take(self.key_time, ROWS, user)
        out = self.formula(**leaves, times=times)
        grad = self.take(self.grad, QUERIES, user).double()
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)]


def attend_in_time(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    times: tuple[Tensor, Tensor],
    kind: str,
) -> Tensor:
    """[T, H, D], [L, G, D] -> [T, H, D]: the formula on one user, each of whose targets sees an event."""
    query_time, key_time = times[0][:, None], times[1]
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    values = keys if value is None else value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    scores = torch.einsum("thd,lhd->htl", query, keys) / math.sqrt(query.shape[2])
    if kind != "no times":
        is_older = key_time < query_time
        if bias is not None:
            place = torch.arange(len(key), device=key.device)
            by_distance = is_older.sum(1, keepdim=True) - place
            count = by_distance if KINDS[kind] == "position_bias" else query_time - key_time
            # frexp's exponent is floor(log2) + 1, exactly.
            bucket = torch.frexp(count.double()).exponent.clamp(0, len(bias) - 1).long()
            # A product, since the gradient of an index would add millions of numbers up one after another.
            scores = scores + (F.one_hot(bucket, len(bias)).to(bias.dtype) @ bias).movedim(2, 0)
        scores = scores.masked_fill(~is_older, -torch.inf)
    return torch.einsum("htl,lhe->the", scores.softmax(-1), values)


def timed_problem(shape: TimedShape, seed: int, device: torch.device) -> TimedProblem:
    """As `jagged_problem`, the operations counted over the pairs that targets see."""
    problem = jagged_problem(shape, seed, device)
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(problem.rows, generator=generator)
    key_time = torch.exp(share**3 * LONGEST_GAP).long().add(1).cumsum(0)
    query_time, seen = [], 0
    for user, count in enumerate(problem.query_lengths.tolist()):
        events = problem.take(key_time, ROWS, user)
        place = torch.randint(len(events), (count,), generator=generator).sort().values
        query_time.append(events[place] + 1)
        seen += int(torch.searchsorted(events, query_time[-1]).sum())
    if shape.kind == "no times":
        seen = int((problem.query_lengths * problem.lengths).sum())
    product = 2.0 * seen * shape.H * shape.D
    given = {one.name: getattr(problem, one.name) for one in fields(Problem) if one.init}
    if KINDS[shape.kind] is not None:
        given["inputs"]["bias"] = torch.randn(BUCKETS, shape.H, dtype=DTYPES[shape.dtype], device=device)
    given |= {"formula": of_kind(shape.kind), "flops": (2 * product, 5 * product)}
    return TimedProblem(**given, query_time=torch.cat(query_time).to(device), key_time=key_time.to(device))


def of_kind(kind: str) -> Callable[..., Tensor]:
    return lambda **inputs: attend_in_time(**inputs, kind=kind)


def ours(problem: TimedProblem) -> Prepared:
    names, kind = list(problem.inputs), problem.shape.kind
    options = {"query_offsets": problem.query_offsets, "key_offsets": problem.offsets}
    if kind != "no times":
        options |= {"query_time": problem.query_time, "key_time": problem.key_time}

    def call(*tensors: Tensor) -> Tensor:
        named = dict(zip(names, tensors, strict=True))
        if "bias" in named:
            named[KINDS[kind]] = named.pop("bias")
        return jfi.ops.jagged_attention(**named, **options)

    return Prepared(list(problem.inputs.values()), call, problem.grad)


OURS = Implementation("jfi", ours, ours=True, graph=True)


def cases(quick: bool) -> list[Case]:
    shapes = [replace(shape, kind=kind) for shape in SHAPES[: 1 if quick else None] for kind in KINDS]
    return [Case(shape.name, shape, timed_problem, (OURS,), headline=True) for shape in shapes]
