"""Rows of tables by id: against float64 loops, with dense gradients, under tracers and with bad ids."""

import pytest
import torch

import jfi.ops
from jfi.ops import gather_rows
from jfi.utils.operands import MAX_TABLES

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
IMPLS = [("torch", x) for x in DTYPES] + [("triton", x) for x in DTYPES[1:]]
SIZES, IDS = (5, 3, 40), ([4, 0, 0, -1, 2], [2, 2, -1, -1, 0], [39, 7, 0, 7, -1])


def loop(tables, indices):
    out = torch.zeros(len(indices[0]), tables[0].shape[1], dtype=torch.float64)
    for table, index in zip(tables, indices, strict=True):
        for s, row in enumerate(index.tolist()):
            if row >= 0:
                out[s] += table[row].detach().cpu().double()
    return out


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("impl", "dtype"), IMPLS)
def test_rows_and_dense_gradients(count, impl, dtype, index_dtype, device):
    tables = tuple(torch.randn(n, 6, dtype=torch.float64).to(device, dtype).requires_grad_() for n in SIZES[:count])
    indices = tuple(torch.tensor(ids, dtype=index_dtype, device=device) for ids in IDS[:count])
    out = gather_rows(tables, indices, impl=impl)
    eps = torch.finfo(dtype).eps
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu().double(), loop(tables, indices), rtol=eps, atol=eps / 4)
    weight = torch.randn(5, 6, dtype=dtype, device=device)
    for table, index, grad in zip(tables, indices, torch.autograd.grad(out, tables, weight), strict=True):
        expected = torch.zeros(len(table) + 1, 6, dtype=torch.float64, device=device)
        expected.index_add_(0, torch.where(index < 0, len(table), index).long(), weight.double())
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.double(), expected[:-1], rtol=eps, atol=eps / 4)


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("width", [1, 17, 64, 256, 3000])
def test_more_tables_than_a_launch_takes(width, impl, device):
    """Indices from an address that 16 bytes do not divide, among them padding; the result in another dtype."""
    tables = tuple(torch.randn(9, width, device=device).half() for _ in range(MAX_TABLES + 2))
    indices = tuple(torch.randint(-1, 9, (40,), device=device)[1:] for _ in tables)
    out = gather_rows(tables, indices, dtype=torch.float32, impl=impl)
    torch.testing.assert_close(out.cpu().double(), loop(tables, indices), rtol=1e-6, atol=1e-5)


def test_transforms_of_torch_func_are_refused_by_name():
    tables, ids = torch.randn(3, 9, 4), torch.tensor([8, -1, 0, 0])

    def read(table):
        return gather_rows((table, table), (ids, ids)).sum()

    transforms = {
        "vmap": lambda: torch.vmap(read)(tables),
        "grad": lambda: torch.func.grad(read)(tables[0]),
        "jvp": lambda: torch.func.jvp(read, (tables[0],), (tables[1],)),
    }
    for transform in transforms.values():
        with pytest.raises(NotImplementedError, match="gather_rows takes no transform"):
            transform()


def test_gradcheck_of_some_tables():
    tables = tuple(torch.randn(n, 2, dtype=torch.float64) for n in SIZES[:2])
    indices = tuple(torch.tensor(ids) for ids in IDS[:2])
    torch.autograd.gradcheck(lambda a: gather_rows((a, tables[1]), indices), tables[0].requires_grad_())
    assert torch.autograd.gradcheck(lambda b: gather_rows((tables[0].detach(), b), indices), tables[1].requires_grad_())


def test_dtype_and_sizes_of_nothing():
    table = torch.randn(3, 2).half()
    assert gather_rows((table,), (torch.tensor([1]),), dtype=torch.float32).dtype == torch.float32
    assert gather_rows((table, torch.randn(4, 2)), (torch.tensor([1]), torch.tensor([3]))).dtype == torch.float16
    assert gather_rows((table,), (torch.tensor([], dtype=torch.int64),)).shape == (0, 2)
    assert gather_rows((table[:0],), (torch.tensor([-1]),)).tolist() == [[0.0, 0.0]]


def test_gradient_sums_in_float32():
    table = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    gather_rows((table,), (torch.zeros(1000, dtype=torch.int64),)).sum().backward()
    assert table.grad.tolist() == [[1000.0], [0.0]]


@pytest.mark.parametrize(
    "tables, indices, message",
    [
        (
            (torch.zeros(3, 2),),
            (torch.tensor([0, 3]),),
            r"indices\[0\] must be from 0 to 2, rows of tables\[0\], got 3",
        ),
        ((torch.zeros(3, 2),), (torch.tensor([-2, 0]),), r"indices\[0\] must be from 0 to 2, .* got -2"),
        (
            (torch.zeros(9, 2), torch.zeros(3, 2)),
            (torch.tensor([5]), torch.tensor([5])),
            r"indices\[1\] must be from 0 to 2, rows of tables\[1\], got 5",
        ),
        ((torch.zeros(3, 2), torch.zeros(3, 4)), (torch.tensor([0]),) * 2, r"tables\[1\] must have D = 2, got 4"),
        ((torch.zeros(3, 2),) * 2, (torch.tensor([0]), torch.tensor([0, 1])), r"indices\[1\] must have S = 1, got 2"),
        ((torch.zeros(3, 2),), (torch.zeros(2, 2).long(),), r"indices\[0\] must be \[S\]"),
        ((torch.zeros(3),), (torch.tensor([0]),), r"tables\[0\] must be \[N, D\]"),
        ((torch.zeros(3, 2),), (torch.tensor([0.0]),), r"indices\[0\] must be int32 or int64, got torch.float32"),
        ((torch.zeros(3, 2).int(),), (torch.tensor([0]),), r"tables\[0\] must be float32"),
        ((torch.zeros(3, 2),), (), r"tables and indices must have one tensor for each other"),
        ((), (), r"at least one"),
        (torch.zeros(3, 2), (torch.tensor([0]),), r"tables must be a tuple of tensors, got Tensor"),
        (([1.0],), (torch.tensor([0]),), r"tables\[0\] must be a Tensor, got list"),
    ],
)
def test_errors(tables, indices, message):
    with pytest.raises((ValueError, TypeError), match=message):
        gather_rows(tables, indices)


def test_other_dtype():
    with pytest.raises(TypeError, match="dtype must be float32"):
        gather_rows((torch.zeros(3, 2),), (torch.tensor([0]),), dtype=torch.int32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU always reads ids")
def test_bad_ids_on_a_gpu_are_found_under_validation(device):
    with jfi.ops.validation(), pytest.raises(ValueError, match="got 3"):
        gather_rows((torch.zeros(3, 2, device=device),), (torch.tensor([3], device=device),))


def test_a_traced_graph_has_the_gradient():
    tables, ids = [torch.randn(n, 4, requires_grad=True) for n in SIZES[:2]], [torch.tensor(ids) for ids in IDS[:2]]

    class Read(torch.nn.Module):
        def forward(self, a, b, *indices):
            return gather_rows((a, b), indices)

    traced = torch.export.export(Read(), (*tables, *ids), strict=False).module()
    found, expected = (torch.autograd.grad(read(*tables, *ids).pow(2).sum(), tables) for read in (traced, Read()))
    for got, want in zip(found, expected, strict=True):
        assert want.any()
        torch.testing.assert_close(got, want)


def test_opcheck():
    tables = [torch.randn(n, 4, requires_grad=True) for n in SIZES]
    indices = [torch.tensor(ids) for ids in IDS]
    torch.library.opcheck(torch.ops.jfi.gather_rows.default, (tables, indices, torch.float32, "torch"))


def test_tracers_and_meta_tensors():
    def function(a, b, ids):
        return gather_rows((a, b), (ids, ids), dtype=torch.float32, impl="torch")

    inputs = (torch.randn(9, 3, requires_grad=True), torch.randn(18, 3), torch.randint(0, 9, (7,)))
    traced = torch.fx.symbolic_trace(function)
    torch.testing.assert_close(traced(*inputs), function(*inputs))
    meta = function(*(x.to("meta") for x in inputs))
    assert meta.shape == (7, 3) and meta.is_meta
