"""Jagged attention on a processor: the products of one sample after another, without padding.

Only one sample's scores are in memory at a time, forward and backward, [H, queries, keys].
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _Problem:
    """The operands, widened, query heads grouped by key head: queries [R, G, H/G, D]."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        query_offsets: Tensor,
        key_offsets: Tensor,
        bias: Tensor | None,
        scale: float,
        left: int | None,
        right: int | None,
    ):
        self.groups = key.shape[1]
        self.query = self.group(query)
        self.key = _widen(key)
        self.value = self.key if value is None else _widen(value)
        self.bias = None if bias is None else _widen(bias).unflatten(1, (self.groups, -1))
        self.scale, self.left, self.right = scale, left, right
        self.query_offsets, self.key_offsets = query_offsets.tolist(), key_offsets.tolist()

    def group(self, x: Tensor) -> Tensor:
        """[R, H, ...] -> [R, G, H/G, ...]."""
        return _widen(x).unflatten(1, (self.groups, -1))

    def samples(self) -> Iterator[tuple[slice, slice]]:
        """The rows of each sample that has both queries and keys."""
        for queries, keys in zip(pairwise(self.query_offsets), pairwise(self.key_offsets), strict=True):
            if queries[0] < queries[1] and keys[0] < keys[1]:
                yield slice(*queries), slice(*keys)

    def scores(self, queries: slice, keys: slice) -> Tensor:
        """[G, H/G, queries, keys], -inf where a key is not seen."""
        scores = torch.einsum("qghd,kgd->ghqk", self.query[queries], self.key[keys]) * self.scale
        if self.bias is not None:
            scores += self.bias[keys].permute(1, 2, 0)[:, :, None]
        if self.left is not None or self.right is not None:
            count, length = scores.shape[2:]
            place = torch.arange(length - count, length)[:, None]
            key = torch.arange(length)
            if self.right is not None:
                scores.masked_fill_(key - place > self.right, -torch.inf)
            if self.left is not None:
                scores.masked_fill_(place - key > self.left, -torch.inf)
        return scores


def forward(query: Tensor, key: Tensor, value: Tensor | None, *rest) -> tuple[Tensor, Tensor]:
    """Arguments and results as those of jagged_attention_fwd.forward."""
    problem = _Problem(query, key, value, *rest)
    rows, heads = query.shape[:2]
    out = problem.value.new_zeros(rows, problem.groups, heads // problem.groups, problem.value.shape[2])
    lse = out.new_full(out.shape[:3], -torch.inf)
    for queries, keys in problem.samples():
        scores = problem.scores(queries, keys)
        top = scores.amax(-1, keepdim=True)
        # Of a query that sees nothing all weights are exp(-inf - inf) = 0.
        weights = torch.exp(scores - top.masked_fill(top == -torch.inf, torch.inf))
        total = weights.sum(-1, keepdim=True)
        lse[queries] = (top + total.log())[..., 0].permute(2, 0, 1)
        weights /= total.masked_fill(total == 0, 1.0)
        out[queries] = torch.einsum("ghqk,kge->qghe", weights, problem.value[keys])
    return out.flatten(1, 2).to(query.dtype), lse.flatten(1, 2)


def backward(
    grad: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Arguments and results as those of jagged_attention_bwd.backward."""
    problem = _Problem(query, key, value, query_offsets, key_offsets, bias, *rest)
    grad = problem.group(grad)
    delta = (grad * problem.group(out)).sum(-1)
    if dlse is not None:
        delta -= problem.group(dlse)
    lse = problem.group(lse)
    # Merging empty parts makes a dL of NaN, which weights of 0 would not stop.
    delta.masked_fill_(lse == -torch.inf, 0.0)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    dquery, dkey = torch.zeros_like(problem.query), torch.zeros_like(problem.key)
    dvalue = dkey if value is None else torch.zeros_like(problem.value)
    dbias = None if bias is None else torch.zeros_like(problem.bias)
    for queries, keys in problem.samples():
        weights = torch.exp(problem.scores(queries, keys) - lse[queries].permute(1, 2, 0)[..., None])
        dweights = torch.einsum("qghe,kge->ghqk", grad[queries], problem.value[keys])
        dscores = weights * (dweights - delta[queries].permute(1, 2, 0)[..., None])
        dquery[queries] = torch.einsum("ghqk,kgd->qghd", dscores, problem.key[keys]) * problem.scale
        dkey[keys] += torch.einsum("ghqk,qghd->kgd", dscores, problem.query[queries]) * problem.scale
        dvalue[keys] += torch.einsum("ghqk,qghe->kge", weights, grad[queries])
        if dbias is not None:
            dbias[keys] = dscores.sum(2).permute(2, 0, 1)
    return (
        dquery.flatten(1, 2).to(query.dtype),
        dkey.to(key.dtype),
        None if value is None else dvalue.to(value.dtype),
        None if bias is None else dbias.flatten(1, 2).to(bias.dtype),
    )
