"""Measure a case: each implementation is checked against float64, then timed; a wrong one gets no speed."""

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.problem import Problem, Shape

#: The largest relative error, in the Frobenius norm over the checked samples.  float32 allows TF32 on a GPU.
TOLERANCE = {"float32": 5e-3, "bfloat16": 3e-2, "float16": 5e-3}
CPU_TOLERANCE = 1e-4


class Missing(RuntimeError):
    """A peer that is not installed, or does not offer this case."""


@dataclass
class Prepared:
    """One implementation on one set of inputs, in its own layout.  Changing the layout is not timed.

    Attributes:
        leaves: its inputs, in the order of the problem's.
        call: (*leaves) -> output.
        grad: the gradient of its output.
        output, gradients: back to the operator's layout.
        solves: the problem that it computes, and is compared with, where that is another than it was given.
    """

    leaves: list[Tensor]
    call: Callable[..., Tensor]
    grad: Tensor
    output: Callable[[Tensor], Tensor] = lambda out: out
    gradients: Callable[[list[Tensor]], list[Tensor]] = lambda grads: grads
    solves: Problem | None = None

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.call(*self.leaves)

    def tracked(self) -> tuple[Tensor, list[Tensor]]:
        """The output with its graph, and fresh leaves."""
        leaves = [x.detach().requires_grad_() for x in self.leaves]
        return self.call(*leaves), leaves

    def forward_backward(self) -> tuple[Tensor, ...]:
        out, leaves = self.tracked()
        return (out, *torch.autograd.grad(out, leaves, self.grad))


@dataclass(kw_only=True)
class PreparedModule(Prepared):
    """A module: its call takes what ``wrap`` makes of the leaves, which is not timed, and finds its parameters itself.

    Attributes:
        wrap: (*leaves) -> arguments of the call, on the graph of the leaves.
        parameters: the problem's inputs behind the leaves.
    """

    wrap: Callable[..., tuple]
    parameters: list[Tensor]
    arguments: tuple = field(init=False)

    def __post_init__(self) -> None:
        self.leaves = [x.detach().requires_grad_() for x in self.leaves]
        self.arguments = self.wrap(*self.leaves)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.call(*self.arguments)

    def tracked(self) -> tuple[Tensor, list[Tensor]]:
        return self.call(*self.arguments), [*self.leaves, *self.parameters]


@dataclass(frozen=True)
class Implementation:
    """Attributes:
    prepare: raises Missing where it cannot serve the problem.
    graph: its kernels are also timed by replaying a CUDA graph: forward and backward apart, or both of a module.
    rotate: False where every set of inputs would be compiled anew.
    context: entered around everything it does.
    """

    name: str
    prepare: Callable[[Problem], Prepared]
    ours: bool = False
    graph: bool = False
    rotate: bool = True
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    build: Callable[[Shape, int, torch.device], Problem]
    implementations: Sequence[Implementation]
    headline: bool = False
    paper: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rates:
    """What the machine does at best, measured in this run: bytes and operations a second; None on a CPU."""

    copy: float | None = None
    matmul: float | None = None

    def floor_us(self, size: int, flops: float) -> float | None:
        return None if self.copy is None else max(size / self.copy, flops / self.matmul) * 1e6


def errors(problem: Problem, prepared: Prepared) -> tuple[float, float | None, str]:
    """Relative error of the output and of the worst gradient (None and a reason where the backward fails)."""
    problem = prepared.solves or problem
    out, leaves = prepared.tracked()
    grads, reason = None, ""
    try:
        grads = prepared.gradients(list(torch.autograd.grad(out, leaves, prepared.grad)))
    except Exception as error:
        reason = summary(error)
    relative = problem.relative_errors([prepared.output(out.detach()), *(grads or [])])
    # A NaN is greater than nothing, so it is looked for first.
    worst = max(relative[1:], key=lambda x: (x != x, x)) if grads else None
    return relative[0], worst, reason


def summary(error: Exception) -> str:
    """One short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]


def check(row: dict, problem: Problem, prepared: Prepared, tolerance: float) -> None:
    """Fill status and errors: ok | forward only | wrong | wrong gradient."""
    forward, backward, reason = errors(problem, prepared)
    row |= {"error_forward": forward, "error_backward": backward}
    if not forward <= tolerance:
        row |= {"status": "wrong", "note": f"relative error {forward:.1e} > {tolerance:.0e}"}
    elif backward is None:
        row |= {"status": "forward only", "note": reason}
    elif not backward <= tolerance:
        row |= {"status": "wrong gradient", "note": f"relative error {backward:.1e} > {tolerance:.0e}"}
    else:
        row["status"] = "ok"


def run(case: Case, device: torch.device, rates: Rates, seconds: float) -> Iterator[dict]:
    """One row an implementation; one that says why where the case does not fit the machine."""
    try:
        yield from _run(case, device, rates, seconds)
    except torch.OutOfMemoryError as error:
        row = {"case": case.name, "implementation": "any", "ours": False, "headline": False, **asdict(case.shape)}
        yield row | {"status": "failed", "note": summary(error), "floor_forward_us": None}


def _run(case: Case, device: torch.device, rates: Rates, seconds: float) -> Iterator[dict]:
    problems = [case.build(case.shape, 0, device)]
    if device.type == "cuda":
        fit = measure.ROTATED_BYTES // max(1, problems[0].bytes()[0]) + 1
        count = min(measure.SETS, max(measure.LEAST_SETS, fit))
        problems += [case.build(case.shape, seed, device) for seed in range(1, count)]
    pairs = list(zip(problems[0].bytes(), problems[0].flops, strict=True))
    floors = [rates.floor_us(size, flops) for size, flops in pairs]
    rows = []
    for implementation in case.implementations:
        row = {"case": case.name, "implementation": implementation.name, "ours": implementation.ours}
        row |= {"headline": case.headline, **problems[0].columns(), **case.paper}
        row |= {"floor_forward_us": floors[0], "floor_backward_us": floors[1]}
        rows.append(row)
    if device.type == "cpu":
        yield from _run_cpu(case, problems[0], rows, seconds)
        return
    for implementation, row in zip(case.implementations, rows, strict=True):
        try:
            with implementation.context():
                _run_gpu(implementation, problems, row, seconds)
        except Missing as reason:
            row |= {"status": "missing", "note": str(reason)}
        except Exception as error:
            row |= {"status": "failed", "note": summary(error)}
        gc.collect()
        torch.cuda.empty_cache()
        yield row


def _put_times(row: dict, name: str, times: list[float]) -> None:
    """The median, and the least, in which the host was disturbed least."""
    row[f"{name}_us"], row[f"{name}_least_us"] = statistics.median(times), min(times)


def _run_gpu(implementation: Implementation, problems: list[Problem], row: dict, seconds: float) -> None:
    sets = [implementation.prepare(problem) for problem in problems[: None if implementation.rotate else 1]]
    check(row, problems[0], sets[0], TOLERANCE[problems[0].shape.dtype])
    if row["status"] == "wrong":
        return
    _put_times(row, "forward", measure.eager_times([p.forward for p in sets], seconds))
    row["host_us"] = measure.host_us([p.forward for p in sets], seconds)
    row["memory_forward_mb"] = measure.peak_mb(sets[0].forward)
    results = problems[0].grad.nbytes + problems[0].kept
    row["floor_memory_forward_mb"] = results / 1e6
    if row["status"] == "ok":
        both = [p.forward_backward for p in sets]
        _put_times(row, "forward_backward", measure.eager_times(both, seconds))
        with torch.autograd.set_multithreading_enabled(False):  # as `jfi.training` trains
            _put_times(row, "one_thread", measure.eager_times(both, seconds))
        row["memory_training_mb"] = measure.peak_mb(sets[0].forward_backward)
        gradients = sum(x.nbytes for x in problems[0].inputs.values())
        row["floor_memory_training_mb"] = (results + gradients) / 1e6
    for column, count in {"forward": problems[0].flops[0], "forward_backward": sum(problems[0].flops)}.items():
        if count and f"{column}_us" in row:
            row[f"{column}_tflops"] = count / row[f"{column}_us"] / 1e6
    if implementation.graph:
        _run_graphs(sets, row, problems[0].flops)


def _run_graphs(sets: list[Prepared], row: dict, flops: tuple[float, float]) -> None:
    def backwards() -> list[measure.Call]:
        tracked = [(prepared, *prepared.tracked()) for prepared in sets]
        return [
            lambda p=prepared, out=out, leaves=leaves: torch.autograd.grad(out, leaves, p.grad, retain_graph=True)
            for prepared, out, leaves in tracked
        ]

    def both() -> list[measure.Call]:
        # Anew, since what wrap did has to be on the capturing stream too.
        return [replace(prepared).forward_backward for prepared in sets]

    forward, backward = row["floor_forward_us"], row["floor_backward_us"]
    try:
        _replay(row, "forward", lambda: [p.forward for p in sets], forward, flops[0])
        if row["status"] != "ok":
            return
        if isinstance(sets[0], PreparedModule):
            _replay(row, "forward_backward", both, forward + backward, sum(flops))
        else:
            _replay(row, "backward", backwards, backward, flops[1])
    except Exception as error:
        row["note"] = f"no graph: {summary(error)}"


def _replay(row: dict, column: str, build: Callable[[], list[measure.Call]], floor: float, flops: float) -> None:
    row[f"kernel_{column}_us"] = measure.kernel_us(build)
    if flops:
        row[f"kernel_{column}_tflops"] = flops / row[f"kernel_{column}_us"] / 1e6
    row[f"efficiency_{column}"] = floor / row[f"kernel_{column}_us"]


def _run_cpu(case: Case, problem: Problem, rows: list[dict], seconds: float) -> Iterator[dict]:
    ready: dict[str, Prepared] = {}
    for implementation, row in zip(case.implementations, rows, strict=True):
        try:
            prepared = implementation.prepare(problem)
            check(row, problem, prepared, CPU_TOLERANCE)
        except Missing as reason:
            row |= {"status": "missing", "note": str(reason)}
        except Exception as error:
            row |= {"status": "failed", "note": summary(error)}
        if row["status"] in ("ok", "forward only", "wrong gradient"):
            ready[implementation.name] = prepared
    whole = [row["implementation"] for row in rows if row["status"] == "ok"]
    columns = {
        "forward": measure.interleaved_us({name: p.forward for name, p in ready.items()}, seconds),
        "forward_backward": measure.interleaved_us({name: ready[name].forward_backward for name in whole}, seconds),
    }
    for row in rows:
        for column, times in columns.items():
            if spent := times.get(row["implementation"]):
                _put_times(row, column, spent)
        if prepared := ready.get(row["implementation"]):
            row["memory_forward_mb"] = measure.cpu_peak_mb(prepared.forward)
            if row["status"] == "ok":
                row["memory_training_mb"] = measure.cpu_peak_mb(prepared.forward_backward)
        yield row
