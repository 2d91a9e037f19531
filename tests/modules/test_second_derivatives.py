"""Second derivatives of every public operator and every layer: an error, or right; never left out without a word."""

import pytest
import torch
from ops.test_compiled import PUBLIC, cases
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torchrec import EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from jfi import FusedEmbeddingCollection
from modules.test_compiled_layers import DENSE, ENCODERS, RAGGED, WIDTH, events, sequences_of

CPU = torch.device("cpu")
NAMES = list(cases(CPU, 1))
LAYERS = [
    *[("dense", name, DENSE[name]) for name in ("plain", "two fields", "a bias by position", "several features")],
    *[("ragged", name, RAGGED[name]) for name in ("plain", "a bias by age", "means")],
    *[("encoder", name, ENCODERS[name]) for name in ("plain",)],
]


def double(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def count_refused(function, leaves: list[Tensor]) -> int:
    """Differentiates the gradient of each input by each input alone, as a row of a Hessian does.

    Where that is no error it must be right: some have none, such as that of an output bias. Of a sum no gradient comes
    in that requires one.
    """
    refused = 0
    for readout in (Tensor.sum, lambda out: out.square().sum()):

        def gradient(x: Tensor, create_graph: bool) -> Tensor:
            total = sum(readout(out) for out in function() if out.requires_grad)  # noqa: B023
            (grad,) = torch.autograd.grad(total, x, create_graph=create_graph, materialize_grads=True)
            return grad

        for x in leaves:
            seed = torch.randn_like(x)
            for y in leaves:
                product, got = (gradient(x, True) * seed).sum(), None
                try:
                    if product.requires_grad:
                        (got,) = torch.autograd.grad(product, y, allow_unused=True)
                except RuntimeError as error:
                    assert any(text in str(error) for text in ("second derivatives", "no autograd formula")), error
                    refused += 1
                    continue
                direction, ends = torch.randn_like(y), []
                for shift in (1e-5, -2e-5):
                    with torch.no_grad():
                        y.add_(direction, alpha=shift)
                    ends.append((gradient(x, False) * seed).sum())
                with torch.no_grad():
                    y.add_(direction, alpha=1e-5)
                got = torch.zeros_like(y) if got is None else got
                want = (ends[0] - ends[1]) / 2e-5
                torch.testing.assert_close((got * direction).sum(), want, rtol=1e-4, atol=1e-4)
    return refused


@pytest.mark.parametrize("name", NAMES)
def test_operators(name):
    operator, arguments = cases(CPU, 1)[name]
    arguments = tree_map_only(Tensor, double, arguments)
    leaves = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]

    def function():
        return [x for x in tree_leaves(PUBLIC[operator](**arguments)) if isinstance(x, Tensor)]

    assert bool(count_refused(function, leaves[:3])) == ("attention" in operator)


@pytest.mark.parametrize("name", ["target", "target, a table", "jagged", "jagged, digits", "digits, by bucket"])
def test_operators_by_kernels(name, device):
    operator, arguments = cases(device, 1)[name]
    leaves = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
    out = tree_leaves(PUBLIC[operator](**arguments, impl="triton"))[0]
    (grad,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivatives|no autograd formula"):
        torch.autograd.grad(grad.sum(), leaves[-1])


@pytest.mark.parametrize(("kind", "name", "make"), LAYERS)
def test_layers(kind, name, make):
    model = make().double()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x), alpha=0.2)
    ends, candidates = torch.tensor([0, 2, 2, 4]), torch.tensor([0, 1, 2, 4])
    given = tree_map_only(Tensor, double, events(4, ends))
    item, genre = (torch.randn(4 if kind == "ragged" else 3, WIDTH).double().requires_grad_() for _ in range(2))

    def function():
        sequences = sequences_of(**given)
        if kind == "encoder":
            return [model(sequences)["taste"].values()]
        ragged = {"item": JaggedTensor(item, offsets=candidates)}
        return [model(sequences, ragged if kind == "ragged" else {"item": item, "genre": genre}).values()]

    leaves = [given["history"], item, *model.parameters()]
    assert count_refused(function, leaves[:3])


@pytest.mark.parametrize("name", ["hessian", "hvp", "vhp", "jvp"])
def test_torch_autograd_functional(name):
    layer, item = DENSE["plain"](), torch.randn(3, WIDTH)

    def total(history):
        return layer(sequences_of(**{**events(4, ends), "history": history}), {"item": item})["taste"].sum()

    ends, history = torch.tensor([0, 2, 2, 4]), torch.randn(4, WIDTH)
    vectors = () if name == "hessian" else (torch.ones_like(history),)
    with pytest.raises(RuntimeError, match="second derivatives"):
        getattr(torch.autograd.functional, name)(total, history, *vectors)


def test_fused_tables():
    """A penalty of the gradient of looked-up rows: of attention an error, else in the step of the table."""
    config = EmbeddingConfig(name="t", embedding_dim=WIDTH, num_embeddings=9, feature_names=["history"])
    tables = FusedEmbeddingCollection([config], torch.optim.SGD, {"lr": 0.1})
    ids = KeyedJaggedTensor(["history"], torch.tensor([1, 4, 1, 7]), lengths=torch.tensor([2, 0, 2]))
    layer, item = DENSE["plain"](), torch.randn(3, WIDTH, requires_grad=True)
    table = tables.embeddings["t"].weight
    dense = table.detach().clone().requires_grad_()

    def penalty(rows, loss):
        return torch.autograd.grad(loss, rows, create_graph=True)[0].square().sum()

    with pytest.raises(RuntimeError, match="second derivatives"):
        penalty(item, layer(tables(ids), {"item": item}).values().sum()).backward()
    rows = tables(ids)["history"].values()
    penalty(rows, rows.pow(3).sum()).backward()
    rows = dense[ids.values()]
    penalty(rows, rows.pow(3).sum()).backward()
    torch.testing.assert_close(table.detach(), dense.detach() - 0.1 * dense.grad)
