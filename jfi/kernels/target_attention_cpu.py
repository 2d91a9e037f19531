"""Target attention on a processor: dense products over chunks of neighbouring samples that stay in cache.

A chunk is a run of whole samples, so its rows are one contiguous view of the history: nothing is gathered, padded or
copied.  All queries of the chunk meet all of its rows in one product; the pairs of different samples are masked out.
That computes up to CHUNK_QUERIES times too much, and is still faster than any exact scheme: a matrix product of a few
queries runs at the speed of the memory, and one chunk costs a handful of operators instead of a handful a sample.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

#: A chunk ends before it holds more rows or more query rows than this (one sample always fits).
CHUNK_ROWS = 2048
CHUNK_QUERIES = 16


def _chunks(offsets: Tensor, queries: int) -> Iterator[tuple[int, int, int, int]]:
    """(first sample, end sample, first row, end row) of each chunk; an empty sample joins its neighbours."""
    ends = offsets.tolist()
    most = max(1, CHUNK_QUERIES // queries)
    first = 0
    while first < len(ends) - 1:
        end = first + 1
        while end < len(ends) - 1 and end - first < most and ends[end + 1] - ends[first] <= CHUNK_ROWS:
            end += 1
        yield first, end, ends[first], ends[end]
        first = end


class _Problem:
    """The operands with query heads grouped by key head, and the scores of a chunk."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor | None, offsets: Tensor, bias: Tensor | None, scale: float
    ):
        self.batch, self.times, self.heads, self.width = query.shape
        self.groups = key.shape[1]
        self.offsets, self.bias, self.scale = offsets, bias, scale
        self.query = self.grouped(query)
        self.key = key
        self.value = key if value is None else value
        self.compute = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype

    def grouped(self, x: Tensor) -> Tensor:
        """[B, T, H, W] -> [G, B, T, H/G, W]."""
        return x.unflatten(2, (self.groups, self.heads // self.groups)).permute(2, 0, 1, 3, 4)

    def ungrouped(self, x: Tensor) -> Tensor:
        """[G, B, T, H/G, W] -> [B, T, H, W]."""
        return x.permute(1, 2, 0, 3, 4).reshape(self.batch, self.times, self.heads, x.shape[-1]).contiguous()

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        for first, end, low, high in _chunks(self.offsets, self.times * self.heads // self.groups):
            yield slice(first, end), slice(low, high)

    def queries(self, x: Tensor, samples: slice) -> Tensor:
        """[G, c · T · H/G, W] of a chunk."""
        return x[:, samples].reshape(self.groups, -1, x.shape[-1]).to(self.compute)

    def rows(self, x: Tensor, rows: slice) -> Tensor:
        """[G, R, W] of a chunk, a view where the dtype allows."""
        return x[rows].to(self.compute).transpose(0, 1)

    def scores(self, queries: Tensor, keys: Tensor, samples: slice, rows: slice) -> Tensor:
        """[G, c · T · H/G, R], -inf between different samples."""
        scores = torch.bmm(queries * self.scale, keys.transpose(1, 2))
        count = samples.stop - samples.start
        parts = scores.view(self.groups, count, self.times, -1, rows.stop - rows.start)
        if self.bias is not None:
            bias = self.bias[rows].to(self.compute).view(-1, self.groups, self.heads // self.groups)
            parts += bias.permute(1, 2, 0)[:, None, None]
        if count > 1:
            bounds = self.offsets[samples.start : samples.stop + 1, None]
            at = torch.arange(rows.start, rows.stop)
            parts.masked_fill_(((at < bounds[:-1]) | (at >= bounds[1:]))[:, None, None], -torch.inf)
        return scores


@torch.autocast("cpu", enabled=False)  # the dtypes are decided here
def forward(
    query: Tensor, key: Tensor, value: Tensor | None, offsets: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the output [B, T, H, E] and the log-sum-exp of the scores [B, T, H], -inf for an empty history."""
    problem = _Problem(query, key, value, offsets, bias, scale)
    shape = problem.query.shape[:-1]
    out = query.new_zeros(*shape, problem.value.shape[2])
    lse = torch.full((*shape, 1), -torch.inf, dtype=problem.compute)
    for samples, rows in problem.chunks():
        if rows.start == rows.stop:
            continue
        queries, keys = problem.queries(problem.query, samples), problem.rows(problem.key, rows)
        scores = problem.scores(queries, keys, samples, rows)
        top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(problem.compute).min)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        values = keys if value is None else problem.rows(problem.value, rows)
        result = torch.bmm(weights, values) / total.masked_fill(total == 0, 1)
        out[:, samples] = result.view_as(out[:, samples])
        lse[:, samples] = total.log_().add_(top).view_as(lse[:, samples])
    return problem.ungrouped(out), problem.ungrouped(lse)[..., 0]


@torch.autocast("cpu", enabled=False)
def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of query, key (key + value where they are shared), value and bias."""
    problem = _Problem(query, key, value, offsets, bias, scale)
    grads, lses = problem.grouped(grad), problem.grouped(lse[..., None])
    deltas = problem.grouped((grad.to(problem.compute) * out).sum(-1, keepdim=True))
    dquery = torch.zeros_like(problem.query, memory_format=torch.contiguous_format)
    dkey = torch.empty_like(key)
    dvalue = None if value is None else torch.empty_like(value)
    dbias = None if bias is None else torch.empty_like(bias)
    for samples, rows in problem.chunks():
        if rows.start == rows.stop:
            continue
        queries, keys = problem.queries(problem.query, samples), problem.rows(problem.key, rows)
        values = keys if value is None else problem.rows(problem.value, rows)
        douts, top = problem.queries(grads, samples), problem.queries(lses, samples)
        weights = problem.scores(queries, keys, samples, rows)
        weights = weights.sub_(top.masked_fill(top == -torch.inf, 0)).exp_()
        dscores = torch.bmm(douts, values.transpose(1, 2)).sub_(problem.queries(deltas, samples)).mul_(weights)
        dquery[:, samples] = torch.bmm(dscores, keys).mul_(scale).view_as(dquery[:, samples])
        chunk_dvalue = torch.bmm(weights.transpose(1, 2), douts)
        if dvalue is None:
            chunk_dkey = chunk_dvalue.baddbmm_(dscores.transpose(1, 2), queries, alpha=scale)
        else:
            chunk_dkey = torch.bmm(dscores.transpose(1, 2), queries).mul_(scale)
            dvalue[rows] = chunk_dvalue.transpose(0, 1)
        dkey[rows] = chunk_dkey.transpose(0, 1)
        if dbias is not None:
            parts = dscores.view(problem.groups, -1, problem.heads // problem.groups, rows.stop - rows.start)
            dbias[rows] = parts.sum(1).flatten(0, 1).T
    return problem.ungrouped(dquery), dkey, dvalue, dbias
