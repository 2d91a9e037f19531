"""Target attention on a CPU, without padding: sparse matrix products for few queries, dense ones for many.

A query attends to the history rows of its own sample alone.  As a sparse matrix of queries x rows, that pattern turns
every step into one pass over the history by a vectorised and threaded operator of torch:

    scores, dP    sampled products, q kᵀ and dO vᵀ at the pattern's entries    (torch.sparse.sampled_addmm)
    O, dq         weighted sums of a query's rows                             (embedding_bag, a query a bag)
    dk, dv        weighted sums of a row's queries                            (embedding_bag, a row a bag)

The history is read in place, without a loop over samples; only rows in half precision, which these operators do not
take, are copied to float32 first.  But these are products of vectors: where a sample has many scores, one matrix
product per sample is faster.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from jfi.cpu.batches import MAX_TOTAL, MIN_TOTAL, is_exact
from jfi.kernels.plan import CPU_DENSE_SCORES
from jfi.reference import unpack_digits
from jfi.utils.operands import TargetAttentionInputs

#: Packed digits are decoded for as many samples as have so many events, so that no [S, D] is made.
DECODED_EVENTS = 2**15

with warnings.catch_warnings():
    # The first sparse matrix of a process warns that they are in beta; only sampled_addmm is used here.
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


class _Problem:
    """The operands, at least float32, with query heads grouped by key head: Q = T · H/G query rows per key head."""

    def __init__(self, x: TargetAttentionInputs):
        query, key, value, bias = x.query, x.key, x.value, x.bias
        self.batch, self.num_queries, self.num_heads = query.shape[:3]
        self.rows, self.num_kv_heads = key.shape[:2]
        self.qheads_per_kvhead = self.num_heads // self.num_kv_heads
        self.query_rows = self.num_queries * self.qheads_per_kvhead
        self.offsets = x.offsets.long()
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.query = self.group(query) * x.scale
        self.key = key.to(self.dtype)
        self.value = self.key if value is None else value.to(self.dtype)
        self.is_shared = value is None
        self.bias = None if bias is None else bias.to(self.dtype)
        self.is_dense = not 0 < self.rows * self.query_rows <= CPU_DENSE_SCORES * self.batch

    def group(self, x: Tensor) -> Tensor:
        """[B, T, H, ...] -> [B, G, Q, ...]."""
        x = x.to(self.dtype).unflatten(2, (self.num_kv_heads, self.qheads_per_kvhead))
        return x.transpose(1, 2).flatten(2, 3)

    def ungroup(self, x: Tensor) -> Tensor:
        """[B, G, Q, ...] -> [B, T, H, ...]."""
        return x.unflatten(2, (self.num_queries, self.qheads_per_kvhead)).transpose(1, 2).flatten(2, 3).contiguous()


class _Pattern:
    """The rows that each query meets: B·G·Q x S·G, its P entries in the order (sample, key head, query, row)."""

    def __init__(self, problem: _Problem):
        self.problem = problem
        self.rows_per_sample = problem.num_kv_heads * problem.query_rows  # query rows
        self.count = problem.rows * self.rows_per_sample
        # Half as much to write and to read, where that is enough.
        self.index = torch.int32 if self.count * problem.num_heads < 2**31 else torch.int64
        self.offsets = self.starts = problem.offsets.to(self.index)
        self.lengths = self.offsets.diff()
        if self.rows_per_sample > 1:
            lengths = self.lengths.repeat_interleave(self.rows_per_sample)
            self.starts = F.pad(lengths.cumsum(0, dtype=self.index), (1, 0))
        #: [P]: of each entry its row in [S · G].
        self.column = torch.arange(0, self.count * problem.num_kv_heads, problem.num_kv_heads, dtype=self.index)
        if self.rows_per_sample > 1:
            group = torch.arange(problem.num_kv_heads, dtype=self.index).repeat_interleave(problem.query_rows)
            first = self.offsets[:-1, None] * problem.num_kv_heads + group
            self.column += self.expand(first.flatten() - self.starts[:-1] * problem.num_kv_heads)

    @cached_property
    def sample(self) -> Tensor:
        """[S]: of each row."""
        return torch.repeat_interleave(self.lengths, output_size=self.problem.rows)

    @cached_property
    def query(self) -> Tensor:
        """[P]: of each entry."""
        if self.rows_per_sample == 1:
            return self.sample
        return torch.repeat_interleave(self.starts.diff(), output_size=self.count)

    def expand(self, x: Tensor) -> Tensor:
        """[B, G, Q] -> [P]: the entry's query's."""
        return x.flatten().index_select(0, self.query)

    def bias(self) -> Tensor:
        """[P]: the entry's bias."""
        heads, position = self.problem.qheads_per_kvhead, self.column
        if heads > 1:  # the query rows of a key head are [T, H / G]
            position = torch.add(self.query % heads, position, alpha=heads)
        return self.problem.bias.flatten().index_select(0, position)

    def add_products(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """[P] += x [B, G, Q, W] times y [S, G, W] at the entries."""
        x, y = x.flatten(0, 2), y.flatten(0, 1)
        size = (x.shape[0], y.shape[0])
        matrix = torch.sparse_csr_tensor(self.starts, self.column, out, size, check_invariants=False)
        torch.sparse.sampled_addmm(matrix, x, y.T, out=matrix)
        return out

    def totals(self, weights: Tensor) -> Tensor:
        """[P] -> [B · G · Q]: the sum of each query's entries."""
        return torch.segment_reduce(weights, "sum", offsets=self.starts, initial=0)

    def sum_rows(self, weights: Tensor, x: Tensor) -> Tensor:
        """[P], [S, G, W] -> [B, G, Q, W]: for each query the weighted sum of its rows."""
        out = F.embedding_bag(self.column, x.flatten(0, 1), self.starts[:-1], mode="sum", per_sample_weights=weights)
        return out.view(self.problem.batch, self.problem.num_kv_heads, self.problem.query_rows, -1)

    def transpose(self, *weights: Tensor) -> list[Tensor]:
        """[P] -> [S, G · Q], each."""
        if self.rows_per_sample == 1:
            return [x[:, None] for x in weights]
        first = (self.offsets * (self.rows_per_sample - 1)).index_select(0, self.sample)
        first += torch.arange(self.problem.rows, dtype=self.index)
        step = self.lengths.index_select(0, self.sample)
        query = torch.arange(self.rows_per_sample, dtype=self.index)
        position = torch.addcmul(first[:, None], step[:, None], query)
        return [x.index_select(0, position.flatten()).view_as(position) for x in weights]

    def sum_queries(self, *terms: tuple[Tensor, Tensor]) -> Tensor:
        """[S, G · Q], [B, G, Q, W] -> [S, G, W]: each row's weighted sum of its queries, over all terms."""
        problem = self.problem
        weights, tables = zip(*terms, strict=True)
        # The tables are concatenated; positions [G, terms · Q] are those of the first sample's query rows.
        count = problem.batch * self.rows_per_sample
        queries = torch.arange(self.rows_per_sample, dtype=self.index).view(problem.num_kv_heads, -1)
        positions = torch.cat([queries + i * count for i in range(len(terms))], 1)
        first = torch.arange(0, count, self.rows_per_sample, dtype=self.index).index_select(0, self.sample)
        weights = torch.cat([x.unflatten(1, (problem.num_kv_heads, -1)) for x in weights], 2)
        out = F.embedding_bag(
            (first[:, None, None] + positions).flatten(0, 1),
            torch.cat([x.flatten(0, 2) for x in tables]),
            mode="sum",
            per_sample_weights=weights.flatten(0, 1),
        )
        return out.view(problem.rows, problem.num_kv_heads, -1)


def _sparse_forward(problem: _Problem) -> tuple[Tensor, Tensor]:
    pattern = _Pattern(problem)
    scores = problem.key.new_zeros(pattern.count) if problem.bias is None else pattern.bias()
    pattern.add_products(scores, problem.query, problem.key)
    # The maximum, another two passes, is needed for very large or small scores only.
    weights = scores.exp()
    total = pattern.totals(weights)
    lse = total.log()
    lowest, highest = total.masked_fill(pattern.starts.diff() == 0, 1).aminmax()
    if not MIN_TOTAL < lowest <= highest < MAX_TOTAL:
        top = torch.full_like(total, torch.finfo(total.dtype).min)
        top.scatter_reduce_(0, pattern.query.long(), scores, "amax").masked_fill_(is_exact(total), 0.0)
        weights = scores.sub_(pattern.expand(top)).exp_()
        total = pattern.totals(weights)
        lse = total.log().add_(top)
    total = total.masked_fill_(total == 0, 1).view(*problem.query.shape[:3], 1)
    return pattern.sum_rows(weights, problem.value).div_(total), lse.view(problem.query.shape[:3])


def _sparse_backward(
    problem: _Problem, grad: Tensor, delta: Tensor, lse: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    needs_query, needs_key, needs_value, needs_bias = needed
    pattern = _Pattern(problem)
    weights = pattern.expand(lse.neg())
    if problem.bias is not None:
        weights += pattern.bias()
    pattern.add_products(weights, problem.query, problem.key).exp_()
    dscores = pattern.add_products(pattern.expand(delta.neg()), grad, problem.value).mul_(weights)
    dquery = pattern.sum_rows(dscores, problem.key) if needs_query else None
    dkey = dvalue = dbias = None
    if needs_key or needs_value or needs_bias:
        dscores, weights = pattern.transpose(dscores, weights)
    if needs_bias:
        dbias = dscores.view(-1, problem.num_kv_heads, problem.num_queries, problem.qheads_per_kvhead).sum(2).flatten(1)
    if needs_key:
        dkey = pattern.sum_queries((dscores, problem.query), *([(weights, grad)] if problem.is_shared else []))
    if needs_value:
        dvalue = pattern.sum_queries((weights, grad))
    return dquery, dkey, dvalue, dbias


def _samples(problem: _Problem) -> Iterator[tuple[int, slice]]:
    ends = problem.offsets.tolist()
    for sample, (low, high) in enumerate(pairwise(ends)):
        if low < high:
            yield sample, slice(low, high)


def _dense_scores(problem: _Problem, sample: int, rows: slice) -> Tensor:
    """[G, Q, L]."""
    scores = torch.bmm(problem.query[sample], problem.key[rows].permute(1, 2, 0))
    if problem.bias is not None:
        by_head = scores.view(problem.num_kv_heads, problem.num_queries, problem.qheads_per_kvhead, -1)
        by_head += problem.bias[rows].T.unflatten(0, (problem.num_kv_heads, 1, problem.qheads_per_kvhead))
    return scores


def _dense_forward(problem: _Problem) -> tuple[Tensor, Tensor]:
    out = problem.query.new_zeros(*problem.query.shape[:3], problem.value.shape[2])
    lse = problem.query.new_full(problem.query.shape[:3], -torch.inf)
    for sample, rows in _samples(problem):
        scores = _dense_scores(problem, sample, rows)
        top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        torch.bmm(weights, problem.value[rows].transpose(0, 1), out=out[sample])
        out[sample] /= total.masked_fill(total == 0, 1)
        lse[sample] = total.log_().add_(top)[..., 0]
    return out, lse


def _dense_backward(
    problem: _Problem, grad: Tensor, delta: Tensor, lse: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    # A query of a sample without events has no other gradient.
    inputs = (problem.query, problem.key, problem.value, problem.bias)
    grads = [torch.zeros_like(x) if need else None for x, need in zip(inputs, needed, strict=True)]
    dquery, dkey, dvalue, dbias = grads
    for sample, rows in _samples(problem):
        weights = _dense_scores(problem, sample, rows).sub_(lse[sample, ..., None]).exp_()
        dscores = torch.bmm(grad[sample], problem.value[rows].permute(1, 2, 0)).sub_(delta[sample, ..., None])
        dscores *= weights
        if dquery is not None:
            torch.bmm(dscores, problem.key[rows].transpose(0, 1), out=dquery[sample])
        if dvalue is not None:
            dvalue[rows] = torch.bmm(weights.transpose(1, 2), grad[sample]).transpose(0, 1)
        if dkey is not None:
            block = torch.bmm(dscores.transpose(1, 2), problem.query[sample])
            if problem.is_shared:
                block.baddbmm_(weights.transpose(1, 2), grad[sample])
            dkey[rows] = block.transpose(0, 1)
        if dbias is not None:
            parts = dscores.view(problem.num_kv_heads, problem.num_queries, problem.qheads_per_kvhead, -1)
            dbias[rows] = parts.sum(1).flatten(0, 1).T
    return tuple(grads)


def _decoded(x: TargetAttentionInputs) -> Iterator[tuple[slice, slice, TargetAttentionInputs]]:
    """Yields (samples, events, their attention to decoded digits) of each block of samples.

    A block has at least one sample.
    """
    ends, first, dtype = x.offsets.tolist(), 0, torch.promote_types(x.query.dtype, torch.float32)
    while first < len(ends) - 1:
        last = first + 1
        while last < len(ends) - 1 and ends[last + 1] - ends[first] <= DECODED_EVENTS:
            last += 1
        samples, events = slice(first, last), slice(ends[first], ends[last])
        key = unpack_digits(x.key[events, 0], x.query.shape[3])[:, None].to(dtype)
        value = None if x.value_scale is None else key * x.value_scale[events, None, None].to(dtype)
        history = {"offsets": x.offsets[first : last + 1] - ends[first], "key": key, "value": value}
        bias = None if x.bias is None else x.bias[events]
        yield samples, events, x._replace(query=x.query[samples], bias=bias, **history)
        first = last


def forward(x: TargetAttentionInputs) -> tuple[Tensor, Tensor]:
    """Returns the output [B, T, H, E] and the log-sum-exp of the scores [B, T, H], -inf for an empty history."""
    query = x.query
    if x.key.dtype == torch.int32:  # packed digits
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for samples, _, part in _decoded(x):
            out[samples], lse[samples] = forward(part)
        return out, lse
    problem = _Problem(x)
    out, lse = (_dense_forward if problem.is_dense else _sparse_forward)(problem)
    return problem.ungroup(out).to(query.dtype), problem.ungroup(lse)


def backward(
    grad: Tensor, x: TargetAttentionInputs, out: Tensor, lse: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of query, key (key + value where they are shared), value and bias, None if not needed."""
    if x.key.dtype == torch.int32:
        return _digits_backward(grad, x, out, lse, needed)
    problem = _Problem(x)
    grads, lses = problem.group(grad), problem.group(lse)
    lses = lses.masked_fill(lses == -torch.inf, 0)
    deltas = (grads * problem.group(out)).sum(-1)
    work = _dense_backward if problem.is_dense else _sparse_backward
    dquery, *others = work(problem, grads, deltas, lses, needed[:4])
    dquery = None if dquery is None else problem.ungroup(dquery * x.scale).to(x.query.dtype)
    return dquery, *(None if y is None else y.to(x.query.dtype) for y in others)


def _digits_backward(
    grad: Tensor, x: TargetAttentionInputs, out: Tensor, lse: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    dquery = torch.empty_like(x.query) if needed[0] else None
    dbias = torch.empty_like(x.bias) if needed[3] else None
    for samples, events, part in _decoded(x):
        gradients = backward(grad[samples], part, out[samples], lse[samples], (needed[0], False, False, needed[3]))
        if dquery is not None:
            dquery[samples] = gradients[0]
        if dbias is not None:
            dbias[events] = gradients[3]
    return dquery, None, None, dbias
