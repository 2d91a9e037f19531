"""Indices outside of their tables in the operators: rows of zeros on a GPU, errors under validation and on a CPU."""

import pytest
import torch
from ops.unchecked import as_on_a_gpu
from torch import nn

import jfi
import jfi.reference
from jfi.ops import gather_rows, target_attention
from jfi.tables.gather_rows import bound_ids

pytestmark = pytest.mark.usefixtures("poisoned")
WIDTH, ROWS = 8, 5
LENGTHS = [4, 0, 9, 3]
#: Below the table, just behind it, so far that an address or an int32 overflows.
FAR = {torch.int32: [ROWS, -3, 10**9, 2**31 - 1, -(2**31)], torch.int64: [ROWS, -3, 10**9, 2**40 + 1, 2**32, -(2**63)]}


def offsets(device) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], device=device)


def indices(device, dtype=torch.int64, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Some of which are outside, and which are inside."""
    index = torch.randint(0, rows, (sum(LENGTHS),), dtype=dtype)
    places = torch.tensor([0, 2, 5, 6, 11, 15])[: len(FAR[dtype])]
    index[places] = torch.tensor(FAR[dtype], dtype=dtype)
    return index.to(device), ((index >= 0) & (index < rows)).to(device)


def rows_of(table: torch.Tensor, index: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """By plain operations: zeros where the index is outside."""
    return table[torch.where(inside, index, 0).long()] * inside.view(-1, *[1] * (table.dim() - 1)).to(table.dtype)


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("num_tables", [1, 4, 6])
def test_ids_outside_become_missing_and_are_counted(device, dtype, num_tables):
    sizes = [ROWS, 0, 1, ROWS + 2, 2**33, 7][:num_tables]
    parts = [indices(device, dtype)[0][:count] for count in (16, 3, 0, 16, 16, 1)][:num_tables]
    counts = torch.zeros(num_tables, dtype=torch.int64, device=device)
    with as_on_a_gpu(device):
        for times in (1, 2):
            found = bound_ids(parts, sizes, counts)
            outside = [(part.long() < 0) | (part.long() >= size) for part, size in zip(parts, sizes, strict=True)]
            for one, part, out in zip(found, parts, outside, strict=True):
                assert one.tolist() == torch.where(out, -1, part.long()).tolist()
            assert counts.tolist() == [times * int(out.sum()) for out in outside]
        missing = torch.full((3,), -1, dtype=dtype, device=device)
        assert bound_ids([missing], [ROWS], counts[:1])[0].tolist() == [-1] * 3  # which -1 says already
        assert counts[0] == 2 * int(outside[0].sum())


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("dtype", FAR)
def test_rows_are_zeros(device, impl, dtype):
    tables = [nn.Parameter(torch.randn(rows, WIDTH, device=device)) for rows in (ROWS, 3 * ROWS)]
    given = [indices(device, dtype, len(table)) for table in tables]
    expected = sum(rows_of(table, *one) for table, one in zip(tables, given, strict=True))
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, tables, grad)
    with as_on_a_gpu(device):
        found = gather_rows(tuple(tables), tuple(index for index, _ in given), impl=impl)
        torch.testing.assert_close(found, expected)
        for one, other in zip(torch.autograd.grad(found, tables, grad), gradients, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("num_queries", "num_tables"), [(1, 1), (3, 2), (20, 1)])
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_attention_to_rows_by_id(device, impl, num_queries, num_tables):
    """As to rows that a plain look-up has read; 20 queries do so before they attend."""
    query = torch.randn(len(LENGTHS), num_queries, 2, WIDTH, device=device, requires_grad=True)
    tables = [nn.Parameter(torch.randn(rows, 1, WIDTH, device=device)) for rows in (ROWS, ROWS + 4)[:num_tables]]
    given = [indices(device, rows=len(table)) for table in tables]
    dense = sum(rows_of(table, *one) for table, one in zip(tables, given, strict=True))
    expected = target_attention(query, dense, offsets=offsets(device), impl="torch")
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, [query, *tables], grad)
    ids = tuple(index for index, _ in given)
    with as_on_a_gpu(device):
        found = target_attention(query, tuple(tables), indices=ids, offsets=offsets(device), impl=impl)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for one, other in zip(torch.autograd.grad(found, [query, *tables], grad), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("buckets", [4, 100])
@pytest.mark.parametrize("num_queries", [1, 20])
@pytest.mark.parametrize("max_seqlen", [None, 9])
def test_biases_are_zero(device, buckets, num_queries, max_seqlen):
    """A table of 100 biases gets its gradient by event, and 20 queries read no bias by index."""
    query = torch.randn(len(LENGTHS), num_queries, 2, WIDTH, device=device, requires_grad=True)
    key = torch.randn(sum(LENGTHS), 1, WIDTH, device=device, requires_grad=True)
    table = torch.randn(buckets, 2, device=device, requires_grad=True)
    index, inside = indices(device, rows=buckets)
    by_event = rows_of(table, index, inside)
    expected = target_attention(query, key, offsets=offsets(device), key_bias=by_event, impl="torch")
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, [query, key, table], grad)
    with as_on_a_gpu(device):
        found = target_attention(
            query, key, offsets=offsets(device), key_bias=table, key_bias_index=index, max_seqlen=max_seqlen
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for one, other in zip(torch.autograd.grad(found, [query, key, table], grad), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_validation_makes_errors_of_them(device):
    table, biases = torch.randn(ROWS, 1, WIDTH, device=device), torch.randn(4, 1, device=device)
    query = torch.randn(len(LENGTHS), 1, 1, WIDTH, device=device)
    index, _ = indices(device)
    ids, history = torch.zeros_like(index), {"offsets": offsets(device)}
    with jfi.ops.validation():
        with pytest.raises(ValueError, match=r"indices\[0\] must be from 0 to 4, rows of tables\[0\], got"):
            gather_rows((table[:, 0],), (index,))
        with pytest.raises(ValueError, match="indices must be from 0 to 4, rows of key, got"):
            target_attention(query, table, indices=index, **history)
        with pytest.raises(ValueError, match="key_bias_index must be from 0 to 3"):
            target_attention(query, table, indices=ids, key_bias=biases, key_bias_index=index, **history)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(device, dynamic):
    """A compiler checks no ids; those outside give zeros also in the graph."""
    table = torch.randn(ROWS, WIDTH, device=device)
    index, inside = indices(device)
    compiled = torch.compile(lambda table, index: gather_rows((table,), (index,)), fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(table, index), rows_of(table, index, inside))
