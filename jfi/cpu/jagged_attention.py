"""Jagged attention on a CPU: batched matrix products over samples of similar lengths.

Samples are sorted by length and batched, L queries by M keys each.  Samples of equal lengths need no padding; where
only a few samples of a batch differ in length, padding them costs less than another batch, and the padding is masked.
A batch's operands and scores fit the L2 cache; a long sample is computed in blocks of queries, which leave out the keys
that a window hides.  So no more than a few MB of scores exist at a time, forward and backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from jfi.cpu.blocks import Shapes, widen

#: The most elements (operands and scores) of a batch of samples: 1 MB of float32.
BATCH_ELEMENTS = 2**18
#: Padding a batch up to this many scores costs less than another batch, some 100 µs.
PADDED_SCORES = 2**13
#: The fewest queries of a block: fewer make narrow matrix products.
BLOCK_QUERIES = 64
#: Sums of exp(score) between these are as exact as sums of exp(score - max), which take two more passes.
LEAST_TOTAL, MOST_TOTAL = 1e-20, 1e20


@dataclass
class _Rows:
    """The packed rows of K samples, on the side of the queries or of the keys, padded to N places each.

    Attributes:
        place: [K, N] int64: the row at each place; padding repeats the sample's last row.
        lengths: [K] int64.
        padding: [K, N], or None where every place has a row of its own.
    """

    place: Tensor
    lengths: Tensor
    padding: Tensor | None

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor, longest: int, is_full: bool) -> "_Rows":
        places = torch.arange(longest)
        if is_full:
            return cls(starts[:, None] + places, lengths, None)
        place = starts[:, None] + torch.minimum(places, lengths[:, None] - 1)
        return cls(place, lengths, places >= lengths[:, None])

    def index(self, heads: Tensor) -> Tensor:
        """[K, G, N, n]: the rows of a tensor [S · H, ...], heads [G, n] being those of each key head."""
        return self.place[:, None, :, None] * heads.numel() + heads[:, None]

    def put(self, out: Tensor, index: Tensor, x: Tensor) -> None:
        """Write x [K, G, N, n, ...] to the rows of out [S · H, ...] at index, padding excepted."""
        if self.padding is not None:
            real = ~self.padding[:, None, :, None].expand_as(index)
            index, x = index[real], x[real]
        out.index_copy_(0, index.flatten(), x.reshape(index.numel(), *out.shape[1:]).to(out.dtype))


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x [S, H, ...], index [K, G, N, n] -> [K, G, N, n, ...], at least float32."""
    return widen(x.flatten(0, 1).index_select(0, index.flatten())).unflatten(0, index.shape)


class _Problem:
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
        self.num_heads, self.num_kv_heads = query.shape[1], key.shape[1]
        self.query, self.key, self.value, self.bias = query, key, value, bias
        self.scale, self.left, self.right = scale, left, right
        self.offsets = query_offsets.long(), key_offsets.long()
        self.query_heads = torch.arange(self.num_heads).view(self.num_kv_heads, -1)
        self.key_heads = torch.arange(self.num_kv_heads)[:, None]

    def batches(self) -> Iterator["_Batch"]:
        """All samples with both queries and keys."""
        lengths = [offsets.diff() for offsets in self.offsets]
        shapes = Shapes.of(*lengths)
        widths = self.query.shape[2] + (self.key if self.value is None else self.value).shape[2]
        for part, (num_queries, num_keys), is_full in shapes.padded(PADDED_SCORES // self.num_heads):
            rows = self.num_heads * num_queries + self.num_kv_heads * num_keys
            elements = self.num_heads * num_queries * num_keys + rows * widths
            for samples in part.split(max(1, BATCH_ELEMENTS // elements)):
                sides = (
                    _Rows.of(offsets[samples], length[samples], longest, is_full)
                    for offsets, length, longest in zip(self.offsets, lengths, (num_queries, num_keys), strict=True)
                )
                yield _Batch(self, *sides)


class _Batch:
    """K samples with L queries and M keys each; H/G query heads share one of the G key heads.

    Attributes:
        query_index: [K, G, L, H/G].
        key_index: [K, G, M, 1].
        bias_index: [K, G, M, H/G].
        query: [K · G, L, H/G, D], scaled.
        key, value: [K · G, M, D] and [K · G, M, E].
    """

    def __init__(self, problem: _Problem, queries: _Rows, keys: _Rows):
        self.problem, self.queries, self.keys = problem, queries, keys
        self.num_queries, self.num_keys = queries.place.shape[1], keys.place.shape[1]
        self.query_index, self.key_index = queries.index(problem.query_heads), keys.index(problem.key_heads)
        self.query = self.take_queries(problem.query).mul_(problem.scale)
        self.key = self.take_keys(problem.key)
        self.value = self.key if problem.value is None else self.take_keys(problem.value)
        self.bias = None
        if problem.bias is not None:
            self.bias_index = keys.index(problem.query_heads)
            self.bias = _take(problem.bias, self.bias_index).mT[:, :, None]  # [K, G, 1, H/G, M]

    def take_queries(self, x: Tensor) -> Tensor:
        """[R, H, ...] -> [K · G, L, H/G, ...]."""
        return _take(x, self.query_index).flatten(0, 1)

    def take_keys(self, x: Tensor) -> Tensor:
        """[S, G, W] -> [K · G, M, W]."""
        return _take(x, self.key_index).flatten(0, 1).flatten(1, 2)

    def put_queries(self, out: Tensor, x: Tensor) -> None:
        """[K · G, L, H/G, ...] -> [R, H, ...]."""
        self.queries.put(out.flatten(0, 1), self.query_index, x.unflatten(0, (-1, self.problem.num_kv_heads)))

    def put_keys(self, out: Tensor, x: Tensor) -> None:
        """[K · G, M, W] -> [S, G, W]."""
        x = x.unflatten(0, (-1, self.problem.num_kv_heads))[:, :, :, None]
        self.keys.put(out.flatten(0, 1), self.key_index, x)

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Slices of the queries, and of the keys that they may see."""
        problem, queries, keys = self.problem, self.num_queries, self.num_keys
        is_windowed = problem.left is not None or problem.right is not None
        narrows = is_windowed and self.queries.padding is None and self.keys.padding is None
        step = BATCH_ELEMENTS // (len(self.queries.place) * problem.num_heads * keys)
        step = max(BLOCK_QUERIES, min(step, 2 * BLOCK_QUERIES if narrows else step))
        for start in range(0, queries, step):
            stop = min(start + step, queries)
            low, high = 0, keys
            if narrows and problem.left is not None:
                low = min(max(start + keys - queries - problem.left, 0), keys)
            if narrows and problem.right is not None:
                high = min(max(stop + keys - queries + problem.right, 0), keys)
            if low < high:
                yield slice(start, stop), slice(low, high)

    def scores(self, queries: slice, keys: slice) -> Tensor:
        """[K · G, L · H/G, M] of a block, -inf where a key is not seen."""
        scores = torch.bmm(self.query[:, queries].flatten(1, 2), self.key[:, keys].mT)
        hidden = self.hidden(queries, keys)
        if self.bias is not None or hidden is not None:
            split = scores.view(
                -1, self.problem.num_kv_heads, queries.stop - queries.start, *self.query.shape[2:3], scores.shape[2]
            )
            if self.bias is not None:
                split += self.bias[..., keys]
            if hidden is not None:
                split.masked_fill_(hidden[:, None, :, None], -torch.inf)
        return scores

    def hidden(self, queries: slice, keys: slice) -> Tensor | None:
        """[K or 1, L, M] of a block: the keys outside of each query's window, and padding."""
        left, right = self.problem.left, self.problem.right
        hidden = None
        if left is not None or right is not None:
            # Bottom-right aligned: a sample's last query has the position of its last key.
            shift = (self.keys.lengths - self.queries.lengths)[:, None, None]
            if self.queries.padding is None and self.keys.padding is None:
                shift = shift[:1]
            ahead = torch.arange(keys.start, keys.stop) - torch.arange(queries.start, queries.stop)[:, None] - shift
            if right is not None:
                hidden = ahead > right
            if left is not None:
                hidden = ahead < -left if hidden is None else hidden.logical_or_(ahead < -left)
        if self.keys.padding is not None:
            padding = self.keys.padding[:, None, keys]
            hidden = padding if hidden is None else hidden | padding
        return hidden


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The weights times their sum, and the sums in the form (sum, log-sum-exp), [..., 1] each.

    Keeps the scores where the plain exponentials may have lost digits.
    """
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True)
    least, most = total.aminmax()
    if LEAST_TOTAL < least <= most < MOST_TOTAL:
        return weights, total, total.log()
    # A query that sees nothing has weights of exp(-inf - min) = 0.
    top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    return weights, total, total.log().add_(top)


@torch.autocast("cpu", enabled=False)
def forward(query: Tensor, key: Tensor, value: Tensor | None, *rest) -> tuple[Tensor, Tensor]:
    """Arguments and results as those of the launcher in jfi/kernels/jagged_attention."""
    problem = _Problem(query, key, value, *rest)
    out = query.new_zeros(*query.shape[:2], (key if value is None else value).shape[2])
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
    for batch in problem.batches():
        outs = batch.query.new_zeros(*batch.query.shape[:3], out.shape[2])
        lses = batch.query.new_full(batch.query.shape[:3], -torch.inf)
        for queries, keys in batch.blocks():
            weights, total, block_lse = _softmax(batch.scores(queries, keys))
            block = torch.bmm(weights, batch.value[:, keys]).div_(total.masked_fill_(total == 0, 1.0))
            outs[:, queries] = block.view_as(outs[:, queries])
            lses[:, queries] = block_lse.view_as(lses[:, queries])
        batch.put_queries(out, outs)
        batch.put_queries(lse, lses)
    return out, lse


@torch.autocast("cpu", enabled=False)
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
    """Arguments and results as those of the launcher in jfi/kernels/jagged_attention."""
    problem = _Problem(query, key, value, query_offsets, key_offsets, bias, *rest)
    dquery, dkey = torch.zeros_like(query), torch.zeros_like(key)
    dvalue = None if value is None else torch.zeros_like(value)
    dbias = None if bias is None else torch.zeros_like(bias)
    for batch in problem.batches():
        grads, lses = batch.take_queries(grad), batch.take_queries(lse)
        deltas = (grads * batch.take_queries(out)).sum(-1)
        if dlse is not None:
            deltas -= batch.take_queries(dlse)
        empty = lses == -torch.inf
        # Combining empty parts makes a gradient of NaN for the log-sum-exp, which weights of 0 would not stop.
        deltas.masked_fill_(empty, 0.0)
        if batch.queries.padding is not None:
            empty = empty | batch.queries.padding.repeat_interleave(problem.num_kv_heads, 0)[:, :, None]
        lses.masked_fill_(empty, torch.inf)  # weights of exp(-inf) = 0
        dqueries, dkeys = torch.zeros_like(batch.query), torch.zeros_like(batch.key)
        dvalues = dkeys if value is None else torch.zeros_like(batch.value)
        dbiases = None if bias is None else torch.zeros(batch.bias_index.mT.shape, dtype=batch.query.dtype)
        for queries, keys in batch.blocks():
            block_grad, values = grads[:, queries].flatten(1, 2), batch.value[:, keys]
            weights = batch.scores(queries, keys).sub_(lses[:, queries].flatten(1, 2)[..., None]).exp_()
            dscores = torch.bmm(block_grad, values.mT).sub_(deltas[:, queries].flatten(1, 2)[..., None]).mul_(weights)
            block = torch.bmm(dscores, batch.key[:, keys])
            dqueries[:, queries] = block.view_as(dqueries[:, queries])
            dkeys[:, keys].baddbmm_(dscores.mT, batch.query[:, queries].flatten(1, 2))
            dvalues[:, keys].baddbmm_(weights.mT, block_grad)
            if dbiases is not None:
                split = dscores.view(*dbiases.shape[:2], queries.stop - queries.start, dbiases.shape[2], -1)
                dbiases[..., keys] += split.sum(2)
        batch.put_queries(dquery, dqueries.mul_(problem.scale))
        batch.put_keys(dkey, dkeys)
        if dvalue is not None:
            batch.put_keys(dvalue, dvalues)
        if dbias is not None:
            batch.keys.put(dbias.flatten(), batch.bias_index, dbiases.mT)
    return dquery, dkey, dvalue, dbias
