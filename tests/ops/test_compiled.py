"""Every public operator under torch.compile(fullgraph=True, dynamic=True): one graph for all sizes and integers."""

import inspect

import pytest
import torch
from ops.ragged import SLOW_HERE, offsets_of
from torch import Tensor
from torch.utils._pytree import tree_leaves

from jfi import ops, table1
from jfi.semantic_ids import pack_words

#: Lengths of the histories and of the queries of a batch; sizes that differ are never equal by chance.
KEYS, QUERIES = [0, 3, 1, 27], [2, 0, 5, 10]
S, R, B = sum(KEYS), sum(QUERIES), len(KEYS)
D, HEADS, FEATURE_WIDTH, TARGET_WIDTH, OUT = 18, 2, 34, 6, 22


def cases(device: torch.device, factor: int) -> dict[str, tuple[str, dict]]:
    """By name the operator and its arguments, of ``factor`` times the samples; integers change with it too."""
    keys, queries = offsets_of(KEYS * factor, device), offsets_of(QUERIES * factor, device)
    s, r, b = S * factor, R * factor, B * factor

    def random(*shape: int, trains: bool = True) -> Tensor:
        return torch.randn(shape, device=device).mul_(0.3).requires_grad_(trains)

    def integers(high: int, count: int = s) -> Tensor:
        return torch.randint(0, high, (count,), device=device)

    def tables(count: int, trains: bool = True) -> tuple[Tensor, ...]:
        return tuple(random(9 * factor + i, 1, D, trains=trains) for i in range(count))

    def ids(count: int) -> tuple[Tensor, ...]:
        return tuple(integers(9 * factor) for _ in range(count))

    scale = 0.3  # torch compiles each float anew that an operator takes
    pairs = factor * sum(n * m for n, m in zip(KEYS, QUERIES, strict=True))
    target = {"query": random(b, 3, HEADS, D), "offsets": keys}
    by_bucket = {
        "key_bias": random(7, HEADS),
        "key_bias_index": integers(7),
        "value_scale": torch.rand(s, device=device),
    }
    jagged = {"query": random(r, HEADS, D), "query_offsets": queries, "key_offsets": keys}
    times = {"query_time": torch.arange(r, device=device) * 3, "key_time": torch.arange(s, device=device) * 2}
    of_digits = {"query": random(b, 3, HEADS, 20), "offsets": keys}
    words = pack_words(torch.randint(-1, 2, (s, 20))).to(device)
    key, own = {"key": random(s, 1, D)}, {"value": random(s, 1, 10)}
    both = {"x": random(s, 16), "x_offsets": keys, "y_offsets": queries}
    blocks = {"a": random(pairs), "x_offsets": keys, "y_offsets": queries}
    return {
        "target": ("target_attention", target | key | own | {"key_bias": random(s, HEADS), "scale": scale}),
        "target, by bucket": ("target_attention", target | key | by_bucket | {"max_seqlen": 30 + factor}),
        "target, a learned scale": ("target_attention", target | key | {"value_scale": random(s)}),
        "target, many queries": ("target_attention", target | key | {"query": random(b, 20, HEADS, D)}),
        "target, a bias alone": (
            "target_attention",
            target | by_bucket | {"query": random(b, 3, HEADS, D, trains=False), "key": random(s, 1, D, trains=False)},
        ),
        "target, a table": ("target_attention", target | {"key": tables(1)[0], "indices": ids(1)[0], "scale": scale}),
        "target, tables": ("target_attention", target | {"key": tables(2), "indices": ids(2)}),
        "target, frozen tables": ("target_attention", target | {"key": tables(2, trains=False), "indices": ids(2)}),
        "target, more tables": ("target_attention", target | by_bucket | {"key": tables(5), "indices": ids(5)}),
        "jagged": (
            "jagged_attention",
            jagged | key | own | {"key_bias": random(s, HEADS), "scale": scale, "return_lse": True},
        ),
        "jagged, a window": (
            "jagged_attention",
            jagged | key | {"causal": True, "window_size": (4 + factor, None), "value_scale": random(s)},
        ),
        "jagged, self-attention": (
            "jagged_attention",
            key | {"query": random(s, HEADS, D), "query_offsets": keys, "causal": True},
        ),
        "jagged, half precision": (
            "jagged_attention",
            {
                **{name: random(s, HEADS, 64).detach().half().requires_grad_() for name in ("query", "key", "value")},
                **{"query_offsets": keys, "window_size": (4 + factor, None)},
            },
        ),
        "jagged, by age": (
            "jagged_attention",
            jagged | key | times | {"time_bias": random(7, HEADS), "max_visible": 5 + factor},
        ),
        "jagged, by distance": ("jagged_attention", jagged | key | {"position_bias": random(7, HEADS), "causal": True}),
        "jagged, digits": (
            "jagged_attention",
            jagged
            | times
            | {"query": random(r, HEADS, 20), "key": words, "time_bias": random(7, HEADS)}
            | {"value_scale": torch.rand(s, device=device)},
        ),
        "digits": ("digit_attention", of_digits | {"digits": words, "key_bias": random(s, HEADS), "scale": scale}),
        "digits, by bucket": ("digit_attention", of_digits | by_bucket | {"digits": words}),
        "digits, half precision": (
            "digit_attention",
            {"query": random(b, 1, HEADS, 20).detach().half().requires_grad_(), "digits": words, "offsets": keys},
        ),
        "gather_rows": (
            "gather_rows",
            {"tables": tuple(x[:, 0] for x in tables(2)), "indices": ids(2), "dtype": torch.float64},
        ),
        "gather_rows, frozen": (
            "gather_rows",
            {"tables": tuple(x[:, 0] for x in tables(3, trains=False)), "indices": ids(3)},
        ),
        "jagged_dense_bmm": ("jagged_dense_bmm", {"x": random(s, 16), "offsets": keys, "dense": random(b, 16, 3)}),
        "jagged_jagged_bmm": ("jagged_jagged_bmm", {"x": random(s, 16), "y": random(s, 3), "offsets": keys}),
        "jagged_softmax": ("jagged_softmax", {"x": random(s, 3), "offsets": keys}),
        "jagged_jagged_bmm_jagged_out": (
            "jagged_jagged_bmm_jagged_out",
            both | {"y": random(r, 16), "out_size": pairs},
        ),
        "jagged2_softmax": ("jagged2_softmax", blocks),
        "array_jagged_bmm_jagged_out": ("array_jagged_bmm_jagged_out", blocks | {"y": random(r, 16), "out_rows": s}),
    }


PUBLIC = {name: getattr(module, name) for module in (ops, table1) for name in module.__all__}
NAMES = list(cases(torch.device("cpu"), 1))
LONG = {(name, "triton") for name in NAMES if name not in ("target, tables", "target, a bias alone")}


def test_every_argument_of_every_operator_is_compiled():
    seen: dict[str, set[str]] = {}
    for operator, arguments in cases(torch.device("cpu"), 1).values():
        seen.setdefault(operator, {"impl"}).update(arguments)
    operators = {name: inspect.signature(function).parameters for name, function in PUBLIC.items()}
    del operators["explain"], operators["validation"]
    for name, parameters in operators.items():
        assert set(parameters) == seen[name], name


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        # The interpreter takes long, and what is traced is nearly the same for both.
        pytest.param(name, impl, marks=SLOW_HERE if (name, impl) in LONG else [])
        for name in NAMES
        for impl in ("triton", "torch")
    ],
)
def test_one_graph_for_all_sizes_and_integers(name, impl, device):
    torch._dynamo.reset()
    # Inductor takes minutes for all cases of the plain formula.
    takes_inductor = device.type == "cuda" and (impl == "triton" or "," not in name)
    backend = "inductor" if takes_inductor else "aot_eager"
    operator = cases(device, 1)[name][0]

    def function(arguments: dict):
        return PUBLIC[operator](**arguments, impl=impl)

    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
        for factor in (3, 5, 7) if impl == "torch" or device.type == "cuda" else (3, 5):
            arguments = cases(device, factor)[name][1]
            leaves = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
            results = []
            for attempt in (compiled, function):
                outs = [x for x in tree_leaves(attempt(arguments)) if isinstance(x, Tensor)]
                results.append((outs, torch.autograd.grad([x.sin().sum() for x in outs], leaves) if leaves else ()))
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
