"""The public operators under the tracers of torch.fx and TorchRec, on meta tensors, and what torch.func gets."""

import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torchrec.fx import Tracer as TorchRecTracer

import jfi
from jfi import ops, table1

B, S, D, T = 3, 7, 4, 2
OFFSETS = torch.tensor([0, 2, 2, 7])


def example(name: str) -> tuple[list[torch.Tensor], dict]:
    """Floating inputs of a public operator, and its other arguments."""
    x, y = torch.randn(S, D), torch.randn(S, T)
    query, key = torch.randn(B, T, 2, D), torch.randn(S, 1, D)
    pairs = torch.randn(4 + 25)
    return {
        "jagged_dense_bmm": ([x], {"offsets": OFFSETS, "dense": torch.randn(B, D, T)}),
        "jagged_jagged_bmm": ([x, y], {"offsets": OFFSETS}),
        "jagged_softmax": ([y], {"offsets": OFFSETS}),
        "jagged_jagged_bmm_jagged_out": ([x, x.clone()], {"x_offsets": OFFSETS, "out_size": 29}),
        "jagged2_softmax": ([pairs], {"x_offsets": OFFSETS}),
        "array_jagged_bmm_jagged_out": ([pairs, x], {"x_offsets": OFFSETS}),
        "target_attention": ([query, key], {"offsets": OFFSETS, "key_bias": torch.randn(S, 2), "scale": 0.3}),
        "digit_attention": (
            [query],
            {"digits": torch.ones(S, 1, dtype=torch.int32), "offsets": OFFSETS, "key_bias": torch.randn(S, 2)},
        ),
        "jagged_attention": ([torch.randn(S, 2, D), key], {"query_offsets": OFFSETS, "key_bias": torch.randn(S, 2)}),
    }[name]


PUBLIC = {name: getattr(module, name) for module in (ops, table1) for name in module.__all__}
OPERATORS = [name for name, operator in PUBLIC.items() if "offsets" in str(inspect.signature(operator))]


def test_there_is_an_example_of_every_operator():
    assert len(OPERATORS) >= 8 and all(example(name) for name in OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_tracer_records_one_call_of_the_operator(name):
    inputs, keywords = example(name)
    keywords = {key: value for key, value in keywords.items() if not isinstance(value, torch.Tensor)}
    tensors = {key: value for key, value in example(name)[1].items() if isinstance(value, torch.Tensor)}
    operator = PUBLIC[name]

    class Model(nn.Module):
        def forward(self, inputs, tensors):
            tensors = {key: tensors[key] for key in names}
            return operator(*[inputs[i] for i in range(count)], **tensors, **keywords) * 2

    names, count = list(tensors), len(inputs)
    want = operator(*inputs, **tensors, **keywords) * 2
    for tracer in (torch.fx.Tracer(), TorchRecTracer()):
        model = Model()
        graph = tracer.trace(model)
        assert [node.target for node in graph.nodes if node.op == "call_function"].count(operator) == 1
        module = torch.fx.GraphModule(model, graph)
        torch.testing.assert_close(module(inputs, tensors), want, rtol=0, atol=0)
        again = pickle.loads(pickle.dumps(module))
        torch.testing.assert_close(again(inputs, tensors), want, rtol=0, atol=0)


def test_a_traced_pair_of_results_can_be_unpacked():
    class Model(nn.Module):
        def forward(self, x, offsets):
            out, lse = jfi.ops.jagged_attention(x, x, query_offsets=offsets, return_lse=True)
            return out * lse.unsqueeze(-1)

    x = torch.randn(S, 2, D)
    torch.testing.assert_close(torch.fx.symbolic_trace(Model())(x, OFFSETS), Model()(x, OFFSETS), rtol=0, atol=0)


class Named(torch.Tensor):
    """A subclass that says of which operators it is the result."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        return (func, out) if PUBLIC.get(getattr(func, "__name__", "")) is func else out


@pytest.mark.parametrize("name", OPERATORS)
def test_a_tensor_subclass_sees_the_operator(name):
    inputs, keywords = example(name)
    want = PUBLIC[name](*inputs, **keywords)
    func, out = PUBLIC[name](*(x.as_subclass(Named) for x in inputs), **keywords)
    assert func is PUBLIC[name] and type(out) is Named
    torch.testing.assert_close(out.as_subclass(torch.Tensor), want, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("validated", [False, True], ids=["plain", "validated"])
def test_meta_tensors_give_shapes_forward_and_backward(name, validated):
    inputs, keywords = example(name)
    leaves = [x.requires_grad_() for x in inputs]
    want = PUBLIC[name](*leaves, **keywords)
    grads = torch.autograd.grad(want.sum(), leaves)
    metas = [x.detach().to("meta").requires_grad_() for x in inputs]
    keywords = tree_map_only(torch.Tensor, lambda x: x.to("meta"), keywords)
    with ops.validation() if validated else torch.enable_grad():
        out = PUBLIC[name](*metas, **keywords)
    found = torch.autograd.grad(out.sum(), metas)
    for got, real in zip((out, *found), (want, *grads), strict=True):
        assert got.is_meta and (got.shape, got.dtype) == (real.shape, real.dtype)


def _transforms(function, inputs: tuple[torch.Tensor, ...]) -> dict:
    """Every transform of torch.func, of a function of tensors, and dual tensors."""

    def loss(*inputs):
        return function(*inputs).sin().sum()

    tangents = tuple(torch.randn_like(x) for x in inputs)
    several = [torch.stack([x, -x]) for x in inputs]
    return {
        "vmap": lambda: torch.vmap(function)(*several),
        "grad": lambda: torch.func.grad(loss)(*inputs),
        "vmap of grad": lambda: torch.vmap(torch.func.grad(loss))(*several),
        "vjp": lambda: torch.func.vjp(function, *inputs),
        "jacrev": lambda: torch.func.jacrev(function)(*inputs),
        "jacfwd": lambda: torch.func.jacfwd(function)(*inputs),
        "hessian": lambda: torch.func.hessian(loss)(*inputs),
        "jvp": lambda: torch.func.jvp(function, inputs, tangents),
        "jvp under a compiler": lambda: torch.compile(
            lambda *x: torch.func.jvp(function, x[::2], x[1::2]), backend="eager"
        )(*[x for pair in zip(inputs, tangents, strict=True) for x in pair]),
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_transforms_of_torch_func_are_refused_by_name(name):
    """Nothing is computed that could be wrong: some kernels and custom operators do not see transforms."""
    inputs, keywords = example(name)
    message = f"{name} takes no transform of torch.func"
    for transform in _transforms(lambda *x: PUBLIC[name](*x, **keywords), tuple(inputs)).values():
        with pytest.raises(NotImplementedError, match=message):
            transform()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        dual = torch.autograd.forward_ad.make_dual(inputs[-1], torch.randn_like(inputs[-1]))
        PUBLIC[name](*inputs[:-1], dual, **keywords)


def test_a_tangent_within_a_tuple_is_refused():
    table = torch.randn(S, D)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="takes no transform"):
        ops.gather_rows((table, torch.autograd.forward_ad.make_dual(table, table)), (OFFSETS, OFFSETS - 1))


def test_a_transform_of_a_backward_pass_is_refused_by_name():
    (query, key), keywords = example("target_attention")
    out = ops.target_attention(query.requires_grad_(), key, **keywords)
    with pytest.raises(NotImplementedError, match="target_attention_bwd takes no transform"):
        torch.vmap(lambda grad: torch.autograd.grad(out, query, grad, retain_graph=True))(torch.stack([out, -out]))


def test_forward_mode_elsewhere_does_not_matter():
    inputs, keywords = example("target_attention")
    with torch.autograd.forward_ad.dual_level():
        ops.target_attention(*inputs, **keywords)


def test_functional_call_is_no_transform():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(D))

        def forward(self, query, key, offsets):
            return ops.target_attention(query * self.scale, key, offsets=offsets)

    (query, key), _ = example("target_attention")
    module = Attention()
    scale = torch.full((D,), 2.0, requires_grad=True)
    out = torch.func.functional_call(module, {"scale": scale}, (query, key, OFFSETS))
    torch.testing.assert_close(out, ops.target_attention(query * 2, key, offsets=OFFSETS))
    (grad,) = torch.autograd.grad(out.sum(), scale)
    assert grad.any()


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_changes_nothing_on_a_cpu(name):
    """Forward and backward, within the block and after it, on sizes whose products would be rounded."""
    inputs, keywords = large_example(name)
    operator, found = PUBLIC[name], []
    for inside, after in ((False, False), (True, False), (True, True)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out = operator(*leaves, **keywords)
            if not after:
                grads = torch.autograd.grad(out.double().sin().sum(), leaves)
        if after:
            grads = torch.autograd.grad(out.double().sin().sum(), leaves)
        found.append((out, *grads))
    want, *others = found
    for other in others:
        for got, expected in zip(other, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


def large_example(name: str) -> tuple[list[torch.Tensor], dict]:
    """As `example`, with samples of 0 to 90 rows and widths of 64."""
    offsets = torch.tensor([0, 90, 90, 97, 160])
    x, y, rows = torch.randn(160, 64), torch.randn(160, 64), offsets.diff()
    pairs = torch.randn(int((rows * rows).sum()))
    query, key = torch.randn(4, 2, 2, 64), torch.randn(160, 1, 64)
    return {
        "jagged_dense_bmm": ([x], {"offsets": offsets, "dense": torch.randn(4, 64, 16)}),
        "jagged_jagged_bmm": ([x, y], {"offsets": offsets}),
        "jagged_softmax": ([y], {"offsets": offsets}),
        "jagged_jagged_bmm_jagged_out": ([x, y], {"x_offsets": offsets}),
        "jagged2_softmax": ([pairs], {"x_offsets": offsets}),
        "array_jagged_bmm_jagged_out": ([pairs, x], {"x_offsets": offsets}),
        "target_attention": ([query, key], {"offsets": offsets, "key_bias": torch.randn(160, 2)}),
        "digit_attention": ([query], {"digits": torch.full((160, 4), 0x51).int(), "offsets": offsets}),
        "jagged_attention": ([torch.randn(160, 2, 64), key], {"query_offsets": offsets, "causal": True}),
    }[name]
