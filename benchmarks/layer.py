"""The whole layer, beside what it replaces: nn.Linear on keys and values, varlen_attn, output projection.

Both hold the same parameters, laid out as in ``jfi.modules.stacked_attention``.  They are called with JaggedTensors and
targets by key, and return the entries of all features in one tensor, as DLRM takes them.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from benchmarks.peers import varlen_attn
from benchmarks.problem import BATCH, DTYPES, ROWS, Problem, Shape, Tally, draw_lengths, pad, random, valid
from benchmarks.run import Case, Implementation, PreparedModule
from jfi import JaggedFeatureInteraction, SequenceFeatureConfig

#: Elements of padded history that the check holds at once, in float64.
CHECKED_ELEMENTS = 2**24


@dataclass(frozen=True)
class LayerShape(Shape):
    """F features of B samples each; heads are parts of D."""

    F: int = 1

    @property
    def name(self) -> str:
        features = f"{self.F} features, " if self.F > 1 else ""
        return f"{features}B={self.B} N={self.N} D={self.D} H={self.H} T={self.T} {self.dtype}"


def attend(
    history: Tensor,
    target: Tensor,
    lengths: Tensor,
    num_heads: int,
    query_weight: Tensor,
    query_bias: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    output_weight: Tensor,
    output_bias: Tensor,
) -> Tensor:
    """[R, D], [b, D] -> [b, D]: the formula of one feature on some samples, padded, with every projection where
    ``nn.MultiheadAttention`` has it."""
    longest = max(1, int(lengths.max()))
    padded = pad(history, lengths, longest)
    query = (target @ query_weight.T + query_bias).unflatten(1, (-1, num_heads, history.shape[1] // num_heads))
    key, value = ((padded @ weight.T).unflatten(2, (num_heads, -1)) for weight in (key_weight, value_weight))
    scores = torch.einsum("bthd,bnhd->bthn", query, key) / math.sqrt(query.shape[3])
    # An empty sample sees one row of padding, whose value is 0.
    hidden = ~valid(lengths.clamp(min=1), longest)[:, None, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bthn,bnhd->bthd", weights, value).flatten(1) @ output_weight.T + output_bias


class LayerProblem(Problem):
    """F · B samples in one history [S, D], feature by feature; targets [F · B, D], the output [B, F · D]."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        return dict(list(self.inputs.items())[2:])

    def chunks(self) -> Iterator[tuple[int, slice]]:
        """Every sample, some at once: the feature, and which of its samples."""
        size = max(1, CHECKED_ELEMENTS // (self.shape.N * self.shape.D))
        for feature in range(self.shape.F):
            for first in range(0, self.shape.B, size):
                yield feature, slice(first, min(first + size, self.shape.B))

    def relative_errors(self, got: list[Tensor]) -> list[float]:
        """Over all samples: parameters get their gradients from every one."""
        out, *grads = got
        out = out.unflatten(1, (self.shape.F, self.shape.D))
        tallies = {name: Tally() for name in ("out", *self.inputs)}
        sums = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in self.parameters.items()}
        for feature, part in self.chunks():
            samples = slice(feature * self.shape.B + part.start, feature * self.shape.B + part.stop)
            rows = slice(self.starts[ROWS][samples.start], self.starts[ROWS][samples.stop])
            true_out, true_grads = self.chunk_truth(feature, part, samples, rows)
            tallies["out"].add(out[part, feature], true_out)
            for total, true_grad in zip(sums.values(), true_grads[2:], strict=True):
                total[feature] += true_grad
            if grads:
                tallies["history"].add(grads[0][rows], true_grads[0])
                tallies["target"].add(grads[1][samples], true_grads[1])
        for (name, total), grad in zip(sums.items(), grads[2:], strict=False):
            tallies[name].add(grad, total)
        return [tally.relative for tally, _ in zip(tallies.values(), got, strict=False)]

    def chunk_truth(self, feature: int, part: slice, samples: slice, rows: slice) -> tuple[Tensor, list[Tensor]]:
        parts = [self.inputs["history"][rows], self.inputs["target"][samples]]
        parts += [x[feature] for x in self.parameters.values()]
        history, target, *parameters = [x.double().requires_grad_() for x in parts]
        lengths = self.lengths[samples].to(history.device)
        out = attend(history, target, lengths, self.shape.H, *parameters)
        grad = self.grad.unflatten(1, (self.shape.F, -1))[part, feature].double()
        return out.detach(), list(torch.autograd.grad(out, [history, target, *parameters], grad))

    def columns(self) -> dict[str, object]:
        return super().columns() | {"history_mb": self.inputs["history"].nbytes / 1e6}


def layer_problem(shape: LayerShape, seed: int, device: torch.device) -> LayerProblem:
    torch.manual_seed(seed)
    lengths = draw_lengths(replace(shape, B=shape.F * shape.B), seed)
    queries = shape.T * shape.D

    def weight(*size: int) -> Tensor:
        return random((shape.F, *size), shape.dtype, device) / math.sqrt(size[-1])

    inputs = {
        "history": random((int(lengths.sum()), shape.D), shape.dtype, device),
        "target": random((shape.F * shape.B, shape.D), shape.dtype, device),
        "query_weight": weight(queries, shape.D),
        "query_bias": weight(queries),
        "key_weight": weight(shape.D, shape.D),
        "value_weight": weight(shape.D, shape.D),
        "output_weight": weight(shape.D, queries),
        "output_bias": weight(shape.D),
    }
    return LayerProblem(
        shape=shape,
        lengths=lengths,
        offsets=F.pad(lengths.cumsum(0), (1, 0)).to(device),
        inputs=inputs,
        layouts={"history": ROWS, "target": BATCH, "out": BATCH},
        grad=random((shape.B, shape.F * shape.D), shape.dtype, device),
        formula=attend,
    )


def by_feature(problem: LayerProblem) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Lengths [B] and offsets [B + 1] of every feature, and its rows."""
    lengths = problem.device_lengths.view(problem.shape.F, -1)
    offsets = [F.pad(x.cumsum(0), (1, 0)) for x in lengths]
    return list(lengths), offsets, problem.lengths.view(problem.shape.F, -1).sum(1).tolist()


def split(x: Tensor, rows: list[int]) -> Sequence[Tensor]:
    """Adjoining views, as a sharded EmbeddingCollection gives them; one alone is not split, whose backward copies."""
    return x.split(rows) if len(rows) > 1 else (x,)


def ours(problem: LayerProblem) -> PreparedModule:
    shape, lengths, offsets, rows = problem.shape, *by_feature(problem)
    features = [SequenceFeatureConfig(f"f{f}", [f"h{f}"], [f"t{f}"], max_seqlen=shape.N) for f in range(shape.F)]
    layer = JaggedFeatureInteraction(features, shape.D, shape.H, shape.T, device=problem.offsets.device)
    layer.to(DTYPES[shape.dtype])
    weights = {f"attention.f{f}.{name}": x[f] for name, x in problem.parameters.items() for f in range(shape.F)}
    layer.load_state_dict(weights)

    def wrap(history: Tensor, target: Tensor) -> tuple:
        parts = zip(split(history, rows), lengths, offsets, strict=True)
        sequences = {f"h{f}": JaggedTensor(x, lengths=n, offsets=bounds) for f, (x, n, bounds) in enumerate(parts)}
        return sequences, {f"t{f}": x for f, x in enumerate(split(target, [shape.B] * shape.F))}

    return PreparedModule(
        list(problem.inputs.values())[:2],
        lambda sequences, targets: layer(sequences, targets).values(),
        problem.grad,
        gradients=functools.partial(stacked_gradients, count=len(problem.parameters)),
        wrap=wrap,
        parameters=[getattr(x, name) for x in layer.attention.values() for name in problem.parameters],
    )


def stacked_gradients(grads: list[Tensor], count: int) -> list[Tensor]:
    """The gradients of `count` parameters of each feature, stacked as the problem's; those of the leaves come first."""
    return [*grads[:2], *(torch.stack(grads[2 + i :: count]) for i in range(count))]


class Projections(nn.Module):
    """Those of nn.MultiheadAttention, without biases of keys and values, which change nothing, as in the layer."""

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        num_queries: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_queries, self.heads = num_queries, (num_heads, embedding_dim // num_heads)
        linear = functools.partial(nn.Linear, device=device, dtype=dtype)
        self.query = linear(embedding_dim, num_queries * embedding_dim)
        self.key, self.value = (linear(embedding_dim, embedding_dim, bias=False) for _ in range(2))
        self.output = linear(num_queries * embedding_dim, embedding_dim)

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Loads what the layer holds for one of its features, by the layer's names."""
        self.load_state_dict({name.replace("_", "."): x for name, x in parameters.items()})


class VarlenAttention(Projections):
    """The baseline of one feature."""

    def __init__(self, shape: LayerShape, device: torch.device) -> None:
        super().__init__(shape.D, shape.H, shape.T, device, DTYPES[shape.dtype])
        self.attention, self.longest = varlen_attn(shape), shape.N

    def forward(self, history: Tensor, offsets: Tensor, target: Tensor, query_offsets: Tensor) -> Tensor:
        query = self.query(target).view(-1, *self.heads)
        key, value = self.key(history).unflatten(1, self.heads), self.value(history).unflatten(1, self.heads)
        out = self.attention(query, key, value, query_offsets, offsets, self.num_queries, self.longest)
        return self.output(out.reshape(target.shape[0], -1))


def projected(problem: LayerProblem) -> PreparedModule:
    """Features one after another."""
    shape, device, parameters = problem.shape, problem.offsets.device, problem.parameters
    _, offsets, rows = by_feature(problem)
    offsets = [x.int() for x in offsets]
    query_offsets = torch.arange(shape.B + 1, dtype=torch.int32, device=device) * shape.T
    modules = [VarlenAttention(shape, device) for _ in range(shape.F)]
    for feature, module in enumerate(modules):
        module.load({name: x[feature] for name, x in parameters.items()})

    def call(histories: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        parts = zip(modules, histories, offsets, targets, strict=True)
        return torch.cat([module(*inputs, query_offsets) for module, *inputs in parts], dim=1)

    of_modules = [dict(module.named_parameters()) for module in modules]
    return PreparedModule(
        list(problem.inputs.values())[:2],
        call,
        problem.grad,
        gradients=functools.partial(stacked_gradients, count=len(parameters)),
        wrap=lambda history, target: (split(history, rows), split(target, [shape.B] * shape.F)),
        parameters=[of_module[name.replace("_", ".")] for of_module in of_modules for name in parameters],
    )


OURS = Implementation("jfi", ours, ours=True, graph=True)
PROJECTED = Implementation("nn.Linear + varlen_attn", projected, graph=True)

HEADLINE = [
    LayerShape(1024, 4096, 128, H=4),
    LayerShape(4096, 512, 64, H=4),
    LayerShape(1024, 200, 256, H=4, T=2),
    LayerShape(512, 100, 64, H=4, F=26),
]
#: The rows of the 26 features as those of one.
MERGED = replace(HEADLINE[-1], B=26 * 512, F=1)


def case(shape: LayerShape, *implementations: Implementation) -> Case:
    return Case(shape.name, shape, layer_problem, implementations, headline=True)


def cases(quick: bool) -> list[Case]:
    both = [case(shape, OURS, PROJECTED) for shape in (HEADLINE[1::2] if quick else HEADLINE)]
    return [*both, case(MERGED, OURS)]
