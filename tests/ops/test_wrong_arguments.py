"""Every argument of every public operator, of wrong types and sizes: an error of the right class that names it."""

import inspect
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from ops.test_compiled import PUBLIC, cases
from torch import Tensor
from torch.utils._pytree import tree_leaves

from jfi import ops
from jfi.kernels.plan import H200

CPU = torch.device("cpu")
NAMES = list(cases(CPU, 1))
#: Neither a tensor nor a number.
NEITHER = {"a str": "2", "a dict": {}, "an object": object(), "a class": int, "a complex number": 1j}


def wrong_tensors(x: Tensor) -> Iterator[tuple[str, object]]:
    """What cannot stand in the place of a tensor [N, ...] of more than one row."""
    x = x.detach()
    yield from NEITHER.items()
    yield from {"an int": 3, "a float": 3.5, "a bool": True, "a list": x.tolist(), "tensors": [x]}.items()
    yield "an array", x.numpy()
    yield "complex", x.to(torch.complex64)
    yield "bool", x != 0
    yield "int16", x.to(torch.int16)
    yield "8 bits", x.float().to(torch.float8_e4m3fn)
    yield "of the other kind", x.long() if x.is_floating_point() else x.float()
    yield "sparse", x.to_sparse()
    yield "opaque", x.float().to_mkldnn()
    if x.dim() == 2:
        yield "compressed", x.to_sparse_csr()
    if x.shape[0] > 1:
        yield "nested, strided", torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.strided)
        offsets, lengths = torch.tensor([0, 1, len(x)]), torch.tensor([1, len(x) - 2])
        yield "nested, with a hole", torch.nested.nested_tensor_from_jagged(x, offsets, lengths)


def wrong_shapes(x: Tensor) -> Iterator[tuple[str, object]]:
    """The same of other sizes, whose error may name what they do not fit."""
    x = x.detach()
    yield "without dimensions", x.flatten()[0]
    yield "of one more dimension", x.unsqueeze(0)
    yield "of one more dimension behind", x.unsqueeze(-1)
    yield "elsewhere", x.to("meta")
    yield "without rows", x[:0]
    if x.dim() > 1:
        yield "of one dimension less", x[0]
        yield "without width", x[..., :0]


def wrong_numbers(x: float | torch.dtype) -> Iterator[tuple[str, object]]:
    yield from NEITHER.items()
    yield from {"a list": [x], "a tuple": (x,), "a tensor": torch.tensor([2, 3]), "an array": np.array([2, 3])}.items()
    if isinstance(x, bool):
        yield from {"None": None, "an int": 1, "a float": 1.0, "NumPy's": np.True_}.items()
    elif isinstance(x, int):
        yield from {
            "a float": 2.0,
            "a bool": True,
            "NumPy's": np.float64(2),
            "negative": -1,
            "too large": 2**70,
        }.items()
    elif isinstance(x, float):
        yield from {"a bool": True, "not a number": float("nan"), "infinite": float("inf")}.items()
    elif isinstance(x, torch.dtype):
        yield from {"integers": torch.int64, "complex": torch.complex64, "an int": 3, "a type": np.float32}.items()


def wrong(name: str, x: object) -> Iterator[tuple[str, object, bool]]:
    """(what it is, the value, whether the error may name another argument, which it does not fit)."""
    if isinstance(x, Tensor):
        yield from ((*one, False) for one in wrong_tensors(x))
        yield from ((*one, True) for one in wrong_shapes(x))
    elif name == "window_size":
        sides = [("1", None), (True, None), (1.0, None), (-1, None), (None, 2**70), (1,), (1, 2, 3), [1, None]]
        yield from ((repr(one), one, False) for one in [*sides, 5, torch.tensor([1, 2]), *NEITHER.values()])
    elif name == "impl":
        other = [None, 1, True, "cuda", "AUTO", ["auto"], np.array(["auto", "torch"]), torch.tensor([1, 2])]
        yield from ((repr(one), one, False) for one in [*other, *NEITHER.values()])
    elif isinstance(x, tuple):
        for kind, one in NEITHER.items():
            yield kind, one, False
            yield f"a tuple with {kind}", (*x[:-1], one), False
        yield from (("None", (None,) * len(x), False), ("nothing", (), False), ("an iterator", iter(x), False))
        yield from (("an int", 3, False), ("an array", x[0].detach().numpy(), False))
        yield from (("one more", (*x, x[0]), True), ("one less", x[:-1], True))
        for i, one in enumerate(x):
            for kind, value in wrong_tensors(one):
                yield f"{i}: {kind}", (*x[:i], value, *x[i + 1 :]), False
            for kind, value in wrong_shapes(one):
                yield f"{i}: {kind}", (*x[:i], value, *x[i + 1 :]), True
    else:
        yield from ((*one, False) for one in wrong_numbers(x))


@pytest.mark.parametrize("case", NAMES)
def test_a_wrong_argument_is_named(case):
    operator, given = cases(CPU, 1)[case]
    given = given | {"impl": "auto"}
    for name, x in given.items():
        for kind, value, is_size in wrong(name, x):
            with pytest.raises((TypeError, ValueError)) as caught:
                PUBLIC[operator](**given | {name: value})
                pytest.fail(f"{name} may be {kind}")
            names = given if is_size else [name]
            assert re.search(rf"\b({'|'.join(names)})\b", str(caught.value)), (name, kind, str(caught.value))


@pytest.mark.parametrize("case", NAMES)
def test_another_floating_dtype_is_taken_or_named(case):
    operator, given = cases(CPU, 1)[case]
    for name, x in given.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            for dtype in (torch.float64, torch.bfloat16):
                try:
                    out = PUBLIC[operator](**given | {name: x.detach().to(dtype).requires_grad_(x.requires_grad)})
                    sum([one.sum() for one in tree_leaves(out)], torch.zeros((), requires_grad=True)).backward()
                except (TypeError, ValueError) as error:
                    assert re.search(rf"\b{name}\b", str(error)), (name, dtype, str(error))


@pytest.mark.parametrize("case", NAMES)
def test_what_is_needed_is_not_none(case):
    operator, given = cases(CPU, 1)[case]
    parameters = inspect.signature(PUBLIC[operator]).parameters
    for name in given:
        if parameters[name].default is parameters[name].empty:
            with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
                PUBLIC[operator](**given | {name: None})


@pytest.mark.parametrize("case", ["target, by bucket", "jagged, a window", "jagged, by age"])
def test_bounds_beyond_all_sizes_change_nothing(case):
    operator, given = cases(CPU, 1)[case]
    bounds = {"max_seqlen": (0, 2**62), "max_visible": (2**40, 2**62), "window_size": ((2**40, None), (2**62, 2**62))}
    for name, values in bounds.items():
        if name in given:
            without = PUBLIC[operator](**given | {name: None})
            for value in values:
                torch.testing.assert_close(PUBLIC[operator](**given | {name: value}), without)


def test_explain_names_wrong_arguments():
    operator, given = cases(CPU, 1)["target"]
    ops.explain(PUBLIC[operator], **given, device=H200)
    for device in ("cuda", torch.device("cuda"), 0):
        with pytest.raises(TypeError, match="device must be a Device of"):
            ops.explain(PUBLIC[operator], **given, device=device)
    for other in ("target_attention", None, torch.softmax):
        with pytest.raises(TypeError, match="operator must be one of"):
            ops.explain(other, **given)
    for name in ("query", "key", "offsets"):
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            ops.explain(PUBLIC[operator], **given | {name: [1.0]})
