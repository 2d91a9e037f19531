"""Of every operator: gradients that no input needs are not computed, and the others are right, whichever inputs need
one; rows behind the last sample, as batches padded to capacity have, change nothing.
"""

import itertools

import pytest
import torch
from ops.absorbed import absorbed_target_attention
from ops.overrides import override
from ops.ragged import offsets_of
from ops.unchecked import as_on_a_gpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jfi import ops, table1
from jfi.semantic_ids import pack_words

IMPLS = ["triton", "torch"]
LENGTHS, QUERIES = [3, 0, 14, 1], [2, 1, 5, 3]
S, R, B = sum(LENGTHS), sum(QUERIES), len(LENGTHS)


def example(name: str, device: torch.device, padding: int = 0) -> tuple:
    """A function of named tensors, those that may need a gradient, and how to override the plan.

    So many rows of NaN, or of odd integers, follow the last sample.
    """
    offsets, queries = offsets_of(LENGTHS, device), offsets_of(QUERIES, device)

    def padded(x: Tensor) -> Tensor:
        if not padding or x.shape[0] not in (S, R):
            return x
        rows = x.new_full((padding, *x.shape[1:]), torch.nan if x.is_floating_point() else 2**30 + 7)
        return torch.cat([x, rows])

    def random(*shape: int) -> Tensor:
        return padded(torch.randn(shape, device=device))

    def integers(high: int, count: int = S) -> Tensor:
        return padded(torch.randint(0, high, (count,), device=device))

    def target(**fixed):
        return lambda impl, **leaves: ops.target_attention(offsets=offsets, impl=impl, **leaves, **fixed)

    def jagged(**fixed):
        given = {"query_offsets": queries, "key_offsets": offsets} | fixed
        return lambda impl, **leaves: ops.jagged_attention(impl=impl, **leaves, **given)

    def of_digits(**fixed):
        return lambda impl, **leaves: ops.digit_attention(digits=digits, offsets=offsets, impl=impl, **leaves, **fixed)

    def absorbed(impl, target, weight, key_bias, **fields):
        # The weights are the parameters of a layer: all of them are trained, or none.
        shapes = (1, 8, 4), (1, 8), (1, 8, 32), (1, 8, 32), (1, 8, 8), (1, 8)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        weights = tuple(x.view(shape) for x, shape in zip(weight.split(sizes), shapes, strict=True))
        options = {"offsets": offsets, "num_heads": 2, "key_bias": key_bias, "key_bias_index": buckets, "impl": impl}
        return absorbed_target_attention(target, tuple(fields.values()), weights, **options)

    def by_id(impl, query, table, other):
        return ops.target_attention(query, (table, other), offsets=offsets, indices=(ids, buckets), impl=impl)

    def gather(impl, **tables):
        return ops.gather_rows(tuple(tables.values()), (ids, buckets, buckets), impl=impl)

    ids, buckets = integers(9), integers(5)
    digits = padded(pack_words(torch.randint(-1, 2, (S, 20))).to(device))
    scales = padded(torch.rand(S, device=device))
    query, many = random(B, 2, 2, 16), random(B, 20, 2, 16)
    key, value, key_bias, table = random(S, 1, 16), random(S, 1, 10), random(S, 2), random(5, 2)
    rows = {"query": random(R, 2, 16), "key": key}
    times = {name: padded(torch.arange(n, device=device)) for name, n in (("query_time", R), ("key_time", S))}
    by_bucket = {"key_bias_index": buckets, "value_scale": scales}
    all_queries = {"query": random(B, 2, 2, 20)}
    # On Hopper the kernels of the half-precision cases are others.
    half = {"query": random(R, 2, 64).half(), "key": random(S, 2, 64).half()}
    return {
        "target": (target(), {"query": query, "key": key, "value": value, "key_bias": key_bias}),
        "target, value = key": (target(), {"query": query, "key": key}),
        "target, by bucket": (target(**by_bucket), {"query": query, "key": key, "key_bias": table}),
        "target, by many buckets": (
            target(**by_bucket | {"key_bias_index": integers(200)}),
            {"query": query, "key": key, "key_bias": random(200, 2)},
        ),
        "target, split": (target(), {"query": query, "key": key, "key_bias": key_bias}, {"num_sms": 3}),
        "target, many": (target(), {"query": many, "key": key, "value": value, "key_bias": key_bias}),
        "target, many, value = key": (target(), {"query": many, "key": key, "key_bias": key_bias}),
        "target, many in a tile": (
            target(),
            {"query": many.half(), "key": key.half(), "value": value.half(), "key_bias": key_bias.half()},
        ),
        "target, by id": (by_id, {"query": query, "table": random(9, 1, 16), "other": random(5, 1, 16)}),
        "jagged": (jagged(), rows | {"value": value, "key_bias": key_bias}),
        "jagged, plain": (jagged(causal=True), rows),
        "jagged, by age": (jagged(**times), rows | {"value": value, "time_bias": random(7, 2)}),
        "jagged, by distance": (jagged(causal=True), rows | {"position_bias": random(7, 2)}),
        "jagged, half": (jagged(), half | {"value": random(S, 2, 64).half(), "key_bias": key_bias.half()}),
        "jagged, half by age": (jagged(**times), half | {"time_bias": random(7, 2).half()}),
        "jagged, digits": (
            jagged(key=digits, value_scale=scales),
            {"query": random(R, 2, 20), "key_bias": key_bias},
        ),
        "jagged, digits by age": (
            jagged(key=digits, **times),
            {"query": random(R, 2, 20), "time_bias": random(7, 2)},
        ),
        "digits": (of_digits(), all_queries | {"key_bias": key_bias}),
        "digits, by bucket": (of_digits(key_bias_index=buckets), all_queries | {"key_bias": table}),
        "digits, by many buckets": (
            of_digits(key_bias_index=integers(200)),
            all_queries | {"key_bias": random(200, 2)},
        ),
        "digits, half": (of_digits(), {"query": random(B, 1, 2, 20).half(), "key_bias": key_bias.half()}),
        "digits, half by bucket": (
            of_digits(key_bias_index=buckets),
            {"query": random(B, 1, 2, 20).half(), "key_bias": table},
        ),
        "absorbed": (
            absorbed,
            {"target": random(1, B, 4), "weight": random(624), "key_bias": table}
            | {"field": random(S, 16), "other": random(S, 16)},
        ),
        "gather_rows": (gather, {"table": random(9, 16), "other": random(5, 16), "third": random(5, 16)}),
        "jagged_dense_bmm": (
            lambda impl, x, dense: table1.jagged_dense_bmm(x, offsets, dense, impl=impl),
            {"x": random(S, 16), "dense": random(B, 16, 3)},
        ),
        "jagged_jagged_bmm": (
            lambda impl, x, y: table1.jagged_jagged_bmm(x, y, offsets, impl=impl),
            {"x": random(S, 16), "y": random(S, 3)},
        ),
        "jagged_jagged_bmm_jagged_out": (
            lambda impl, x, y: table1.jagged_jagged_bmm_jagged_out(x, y, offsets, queries, impl=impl),
            {"x": random(S, 16), "y": random(R, 16)},
        ),
        "array_jagged_bmm_jagged_out": (
            lambda impl, a, y: table1.array_jagged_bmm_jagged_out(a, y, offsets, queries, out_rows=S, impl=impl),
            {"a": random(sum(n * m for n, m in zip(LENGTHS, QUERIES, strict=True))), "y": random(R, 16)},
        ),
    }[name]


NAMES = [
    *("target", "target, value = key", "target, by bucket", "target, by many buckets", "target, split"),
    *("target, many", "target, many, value = key", "target, many in a tile", "target, by id"),
    *("jagged", "jagged, plain", "jagged, by age", "jagged, by distance", "jagged, half", "jagged, half by age"),
    *("jagged, digits", "jagged, digits by age", "digits", "digits, by bucket", "digits, by many buckets"),
    *("digits, half", "digits, half by bucket", "absorbed", "gather_rows"),
    *("jagged_dense_bmm", "jagged_jagged_bmm", "jagged_jagged_bmm_jagged_out", "array_jagged_bmm_jagged_out"),
]


class Recorded(TorchDispatchMode):
    """The operators of jfi at work, and what each returned."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "jfi":
            self.calls.append((func._opname, tree_leaves(out)))
        return out


def gradients(name: str, impl: str, device: torch.device, wanted: tuple[str, ...], traced: bool = False) -> dict:
    """The gradients of the wanted inputs; with ``traced`` by the registered operators, forward and backward."""
    torch.manual_seed(0)
    function, leaves, *overrides = example(name, device)
    with override(**overrides[0] if overrides else {}):
        if traced:
            with Recorded():
                return _gradients(function, leaves, impl, wanted)
        return _gradients(function, leaves, impl, wanted)


def _gradients(function, leaves: dict[str, Tensor], impl: str, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    for key in wanted:
        leaves[key].requires_grad_()
    out = function(impl, **leaves)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return dict(zip(wanted, torch.autograd.grad(out, [leaves[key] for key in wanted], weights), strict=True))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", NAMES)
def test_any_inputs_may_need_a_gradient(name, impl, device, poisoned):
    keys = tuple(example(name, device)[1])
    every = gradients(name, impl, device, keys)
    tolerance = {"atol": 2e-2, "rtol": 1e-2} if "tile" in name or "half" in name else {"atol": 1e-4, "rtol": 1e-4}
    plain = gradients(name, "torch", device, keys)
    for key in keys:
        torch.testing.assert_close(every[key], plain[key], **tolerance)
    # Of more than three inputs those that need one alone, and those that need none alone.
    for count in range(1, len(keys)) if len(keys) < 4 else (1, len(keys) - 1):
        for wanted in itertools.combinations(keys, count):
            for key, got in gradients(name, impl, device, wanted, traced=count == 1).items():
                torch.testing.assert_close(got, every[key], **tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_rows_behind_the_last_sample_change_nothing(name, device, poisoned):
    """As on a GPU, where offsets are not read: enough of them for tiles of their own."""
    results = []
    for padding in (0, 130):
        torch.manual_seed(0)
        function, leaves, *overrides = example(name, device, padding)
        for x in leaves.values():
            x.requires_grad_()
        with as_on_a_gpu(device), override(**overrides[0] if overrides else {}):
            out = function("triton", **leaves)
            grad = torch.linspace(-1, 1, 7, device=device).to(out)[torch.arange(out.numel(), device=device) % 7]
            grad = grad.view_as(out)
            if out.shape[0] in (S + padding, R + padding):
                grad[-padding or len(grad) :] = torch.nan
            grads = torch.autograd.grad(out, [*leaves.values()], grad)
            results.append(dict(zip(("out", *leaves), (out, *grads), strict=True)))
    tolerance = {"atol": 2e-2, "rtol": 1e-2} if "tile" in name or "half" in name else {"atol": 1e-4, "rtol": 1e-4}
    for key, want in results[0].items():
        torch.testing.assert_close(results[1][key][: len(want)], want, **tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_only_what_is_needed_is_made(name, device, monkeypatch):
    """Where one input needs a gradient, the operators of the backward pass return one tensor.

    Their kernels get no other tensor of a frozen query's, key's or value's shape than that input itself: so with a
    learned bias alone, neither the queries nor the keys have memory for a gradient.
    """
    from jfi.kernels.common.launch import Launcher

    launch, given = Launcher.__call__, []

    def record(self, grid, tensors, *rest):
        given.extend(x for x in tree_leaves(tensors) if x is not None)
        return launch(self, grid, tensors, *rest)

    monkeypatch.setattr(Launcher, "__call__", record)
    for wanted in example(name, device)[1]:
        function, leaves, *overrides = example(name, device)
        leaves[wanted].requires_grad_()
        with override(**overrides[0] if overrides else {}):
            out = function("triton", **leaves)
            given.clear()
            with Recorded() as recorded:
                torch.autograd.grad(out, leaves[wanted], torch.ones_like(out))
        # The gradient of a table from that of its events is an operator on a GPU alone.
        outputs = [x for operator, found in recorded.calls for x in found if operator != "table_gradient"]
        assert len(outputs) == (0 if name == "gather_rows" else 1)
        inputs = {x.untyped_storage().data_ptr() for x in (*leaves.values(), out)}
        made = {x.untyped_storage().data_ptr(): x.shape for x in given}
        shapes = [shape for storage, shape in made.items() if storage not in inputs]
        for key, x in leaves.items():
            if key in ("query", "key", "value") and key != wanted and x.shape != out.shape:
                assert shapes.count(x.shape) <= (x.shape == leaves[wanted].shape), (wanted, key)


def test_a_frozen_key_has_no_kernel_of_its_own(device, monkeypatch):
    """Jagged attention, whose keys and queries have a kernel each."""
    from jfi.kernels.common.launch import Launcher

    launch, names = Launcher.__call__, []
    monkeypatch.setattr(
        Launcher, "__call__", lambda self, *args: names.append(self.kernel.fn.__name__) or launch(self, *args)
    )
    for wanted, of_query, of_key in (("query", True, False), ("key", False, True), ("time_bias", True, False)):
        function, leaves, *_ = example("jagged, by age", device)
        leaves[wanted].requires_grad_()
        out = function("triton", **leaves)
        names.clear()
        out.sum().backward()
        kernels = [any(kind in name for name in names) for kind in ("dquery", "dkey")]
        assert kernels == [of_query, of_key], names


def test_a_frozen_layer_learns_its_history_alone(device):
    """Neither a gradient of the queries nor one of the weights is made where the events alone are trained."""
    function, leaves, *_ = example("absorbed", device)
    leaves["field"].requires_grad_()
    out = function("triton" if device.type == "cuda" else "torch", **leaves)
    with Recorded() as recorded:
        (grad,) = torch.autograd.grad(out.sum(), leaves["field"])
    (shapes,) = [[x.shape for x in found] for name, found in recorded.calls if name == "target_attention_bwd"]
    assert grad.any() and len(shapes) == 1 and shapes[0][0] == S
