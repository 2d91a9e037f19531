"""Operators of nested tensors: the bits of the packed call, nested with the same offsets; other forms are refused."""

import re

import pytest
import torch
from ops.ragged import LENGTHS, offsets_of
from ops.test_compiled import KEYS, cases
from torch import Tensor
from torch.nested import nested_tensor, nested_tensor_from_jagged
from torch.utils._pytree import tree_leaves

from jfi import ops, table1
from jfi.kernels.plan import H200

#: By operator and parameter of offsets the arguments that may be nested; "result" is divided by the first.
EVENTS = ("indices", "key_bias", "key_bias_index", "value_scale")
PACKED = {
    "target_attention": {"offsets": ("key", "value", *EVENTS)},
    "jagged_attention": {
        "query_offsets": ("query", "query_time", "result"),
        "key_offsets": ("key", "value", "key_bias", "value_scale", "key_time"),
    },
    "gather_rows": {"offsets": ("indices", "result")},
}
NAMES = [name for name, (operator, _) in cases(torch.device("cpu"), 1).items() if operator in PACKED]
TABLES = {"key": "indices", "key_bias": "key_bias_index"}


def is_nested(x) -> bool:
    return isinstance(x, Tensor) and x.is_nested


def nest(operator: str, given: dict, names: list[str], longest: int | None = None) -> dict:
    """The arguments with some of them nested, and without the offsets of these."""
    given = dict(given)
    for parameter, packed in PACKED[operator].items():
        nested = [name for name in names if name in packed]
        offsets = given.get(parameter, given.get("query_offsets"))
        for name in nested:
            parts = given[name] if isinstance(given[name], tuple) else (given[name],)
            if offsets is None:  # gather_rows has none
                offsets = offsets_of(KEYS * (len(parts[0]) // sum(KEYS)), torch.device("cpu"))
            parts = tuple(nested_tensor_from_jagged(x, offsets, max_seqlen=longest) for x in parts)
            given[name] = parts if isinstance(given[name], tuple) else parts[0]
        if nested and parameter in given:
            given[parameter] = None
    return given


def nestable(operator: str, given: dict) -> list[str]:
    """The arguments of a call that may be nested: not those that are tables."""
    names = [name for packed in PACKED[operator].values() for name in packed if given.get(name) is not None]
    return [name for name in names if given.get(TABLES.get(name)) is None]


def run(function, given: dict, leaves: list[Tensor]) -> tuple[list[Tensor], tuple]:
    """Values of the outputs, and gradients of theirs."""
    values = [x.values() if x.is_nested else x for x in tree_leaves(function(given))]
    return values, torch.autograd.grad([x.sin().sum() for x in values], leaves) if leaves else ()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_the_packed_call(name, dtype):
    operator, given = cases(torch.device("cpu"), 1)[name]
    given = {key: x.to(dtype) if key.endswith("offsets") else x for key, x in given.items()}
    leaves = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]
    function = getattr(ops, operator)
    want = run(lambda given: function(**given), given, leaves)
    names, (parameter, divided) = nestable(operator, given), next(iter(PACKED[operator].items()))
    for some in [names, *([one] for one in names)]:
        nested = nest(operator, given, some)
        torch.testing.assert_close(run(lambda given: function(**given), nested, leaves), want, rtol=0, atol=0)
        for x in tree_leaves(function(**nested)):
            assert x.is_nested == bool("result" in divided and {*divided} & {*some})
            assert not x.is_nested or parameter not in given or x.offsets() is given[parameter]


@pytest.mark.parametrize("case", LENGTHS)
def test_attention_of_any_lengths_on_any_device(case, device):
    offsets = offsets_of(LENGTHS[case], device)
    count, batch = sum(LENGTHS[case]), len(LENGTHS[case])
    key = torch.randn(count, 1, 16, device=device, requires_grad=True)
    query = torch.randn(batch, 1, 2, 16, device=device, requires_grad=True)
    x = nested_tensor_from_jagged(key, offsets)
    for got, want, leaves in (
        (ops.target_attention(query, x), ops.target_attention(query, key, offsets=offsets), (query, key)),
        (ops.jagged_attention(x, x).values(), ops.jagged_attention(key, key, query_offsets=offsets), (key,)),
    ):
        assert torch.equal(got, want)
        grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (got, want)]
        torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_self_attention_from_one_projection_equals_a_loop_over_samples():
    """In float64; chunks of a projection have strides, and its results meet nested tensors again."""
    rows = torch.randn(7, 12, dtype=torch.float64, requires_grad=True)
    x = nested_tensor_from_jagged(rows, torch.tensor([0, 4, 4, 7]))
    projection = torch.nn.Linear(12, 36, dtype=torch.float64)
    query, key, value = [part.unflatten(-1, [3, 4]) for part in projection(x).chunk(3, dim=-1)]
    assert not key.is_contiguous()
    out = ops.jagged_attention(query, key, value, causal=True).flatten(2) + x
    for got, one in zip(out.unbind(), rows.split([4, 0, 3]), strict=True):
        q, k, v = [part.unflatten(-1, [3, 4]).transpose(0, 1) for part in projection(one).chunk(3, dim=-1)]
        scores = (q @ k.mT * 4**-0.5).masked_fill(torch.ones(len(one), len(one)).triu(1).bool(), -torch.inf)
        want = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) + one
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        if len(one):
            grads = [torch.autograd.grad(x.sin().sum(), rows, retain_graph=True) for x in (got, want)]
            torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_nothing_is_read_and_a_known_longest_length_is_a_hint():
    values, offsets, query = (torch.empty(shape, device="meta") for shape in ((9, 1, 16), (4,), (3, 1, 2, 16)))
    offsets = offsets.long()
    unknown = nested_tensor_from_jagged(values, offsets)
    known = nested_tensor_from_jagged(values, offsets, min_seqlen=0, max_seqlen=5)
    out = ops.jagged_attention(known, known)
    assert out.shape == known.shape and out._maybe_max_seqlen == 5
    for nested, longest in ((unknown, None), (known, 5)):
        assert ops.target_attention(query, nested).shape == query.shape
        assert nested._maybe_max_seqlen == longest
        packed = {"offsets": offsets, "max_seqlen": longest, "device": H200}
        plan = ops.explain(ops.target_attention, query, values, **packed)
        assert ops.explain(ops.target_attention, query, nested, device=H200) == plan
        assert ops.explain(ops.target_attention, query, nested, max_seqlen=longest, device=H200) == plan


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has nothing to synchronize with")
def test_no_synchronisation(device):
    offsets, query = offsets_of(KEYS, device), torch.randn(4, 1, 2, 16, device=device)
    key = torch.randn(sum(KEYS), 1, 16, device=device, requires_grad=True)

    def call():
        x = nested_tensor_from_jagged(key, offsets)
        y = ops.jagged_attention(x, x, x, causal=True) + x
        torch.autograd.grad(ops.target_attention(query, y, value=x).sin().sum(), key)

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_traced_function_takes_either_form():
    def function(query, key, offsets):
        return ops.target_attention(query, key, offsets=offsets)

    traced = torch.fx.symbolic_trace(function)
    query, key, offsets = torch.randn(2, 1, 2, 8), torch.randn(5, 1, 8), torch.tensor([0, 4, 5])
    got = traced(query, nested_tensor_from_jagged(key, offsets), None)
    assert torch.equal(got, traced(query, key, offsets))


OFFSETS = torch.tensor([0, 2, 5])
ROWS = nested_tensor_from_jagged(torch.randn(5, 1, 8), OFFSETS)
QUERY = torch.randn(2, 1, 2, 8)
IDS = nested_tensor_from_jagged(torch.tensor([0, 1, 2, 3, 4]), OFFSETS)


def attend(key=ROWS, **given):
    return ops.target_attention(**{"query": QUERY, "key": key} | given)


REFUSED = {
    "holes": (
        lambda: attend(nested_tensor_from_jagged(ROWS.values(), OFFSETS, torch.tensor([1, 3]))),
        "key must be packed, got a nested tensor with lengths: call its contiguous()",
    ),
    "transposed": (
        lambda: attend(ROWS.transpose(1, 2)),
        "key must be [B, j, ...], jagged in dimension 1, got 2: transpose it",
    ),
    "strided": (
        lambda: attend(nested_tensor([torch.randn(2, 1, 8), torch.randn(3, 1, 8)]), offsets=OFFSETS),
        "key must be a dense tensor, got a nested one of layout torch.strided",
    ),
    "offsets of another tensor": (
        lambda: attend(value=nested_tensor_from_jagged(ROWS.values(), OFFSETS.clone())),
        "value must have the offsets of key, the same tensor, got others",
    ),
    "ids of another tensor": (
        lambda: ops.gather_rows((torch.randn(5, 2),) * 2, (IDS, nested_tensor_from_jagged(IDS.values(), OFFSETS + 0))),
        "indices[1] must have the offsets of indices[0], the same tensor, got others",
    ),
    "offsets twice": (lambda: attend(offsets=OFFSETS), "offsets must be None where key is nested and has its own"),
    "no offsets": (lambda: attend(ROWS.values()), "offsets must be a Tensor, got NoneType"),
    "a query of another number of samples": (
        lambda: attend(query=QUERY[:1]),
        "offsets must have B+1 = 2 entries, got 3",
    ),
    "a query of target attention": (lambda: attend(query=ROWS), "query must be a dense tensor, got a nested one"),
    "a table": (lambda: attend(indices=IDS), "key must be a dense tensor, got a nested one of layout torch.jagged"),
    "a table of biases": (
        lambda: attend(key_bias=IDS, key_bias_index=IDS),
        "key_bias must be a dense tensor, got a nested one of layout torch.jagged",
    ),
    "a bias by age": (
        lambda: ops.jagged_attention(ROWS, ROWS, causal=True, position_bias=ROWS),
        "position_bias must be a dense tensor, got a nested one of layout torch.jagged",
    ),
    "digits": (
        lambda: ops.digit_attention(QUERY, IDS.int(), offsets=OFFSETS),
        "digits must be a dense tensor, got a nested one of layout torch.jagged",
    ),
    "blocks": (
        lambda: table1.jagged2_softmax(IDS.float(), OFFSETS),
        "a must be a dense tensor, got a nested one of layout torch.jagged",
    ),
    "one dimension too few": (lambda: attend(IDS.float()), "key must be [S, G, D], got a tensor of shape [5]"),
    "a transform": (lambda: torch.func.vmap(lambda q: attend(query=q))(QUERY[None]), "torch.func"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_forms_are_refused_by_name(kind):
    call, message = REFUSED[kind]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=re.escape(message)):
        call()


def test_refused_forms_are_taken_once_they_are_packed():
    """The cures that the messages name."""
    holes = nested_tensor_from_jagged(torch.randn(6, 1, 8), torch.tensor([0, 3, 6]), torch.tensor([2, 3]))
    got = attend(holes.contiguous())
    for i, x in enumerate(holes.unbind()):
        want = ops.target_attention(QUERY[i : i + 1], x, offsets=torch.tensor([0, len(x)]))
        torch.testing.assert_close(got[i : i + 1], want)
    assert torch.equal(attend(ROWS.transpose(1, 2).transpose(1, 2)), attend())


@pytest.mark.parametrize("longest", [None, 27])
@pytest.mark.parametrize("name", ["target", "target, tables", "jagged", "gather_rows"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_for_all_sizes(name, longest, backend):
    torch._dynamo.reset()
    operator = cases(torch.device("cpu"), 1)[name][0]

    def function(given: dict):
        out = getattr(ops, operator)(**given)
        return out * 2 if is_nested(out) else out  # PyTorch's own operators follow in the same graph

    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
        for factor in (3, 5, 7):
            given = cases(torch.device("cpu"), factor)[name][1]
            leaves = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]
            # Another bound of the lengths is not another graph either.
            hint = None if longest is None else longest + factor
            names = nestable(operator, given)
            results = [run(call, nest(operator, given, names, hint), leaves) for call in (compiled, function)]
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
