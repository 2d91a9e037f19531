"""Jagged attention by batched matrix products: any bias, window and width, and a gradient for the log-sum-exp.

The operands and scores of a batch of samples fit the L2 cache.  A long sample is computed in blocks of queries, which
leave out the keys that a window hides, so that no more than a few MB of scores exist at a time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from jfi.cpu.attention_batches import BATCH_ELEMENTS, Problem, Rows, take
from jfi.cpu.blocks import LEAST_TOTAL, MOST_TOTAL, is_exact

#: The fewest queries of a block: fewer make narrow matrix products.
BLOCK_QUERIES = 64


class _Batch:
    """K samples with L queries and M keys each; H/G query heads share one of the G key heads.

    Attributes:
        query_index: [K, G, L, H/G].
        key_index: [K, G, M, 1].
        bias_index: [K, G, M, H/G].
        query: [K · G, L, H/G, D], scaled.
        key, value: [K · G, M, D] and [K · G, M, E].
    """

    def __init__(self, problem: Problem, queries: Rows, keys: Rows):
        self.problem, self.queries, self.keys = problem, queries, keys
        self.num_queries, self.num_keys = queries.place.shape[1], keys.place.shape[1]
        self.query_index, self.key_index = queries.index(problem.query_heads), keys.index(problem.key_heads)
        self.query = self.take_queries(problem.query).mul_(problem.scale)
        self.key = self.take_keys(problem.key)
        self.value = self.key if problem.value is None else self.take_keys(problem.value)
        self.bias = None
        if problem.bias is not None:
            self.bias_index = keys.index(problem.query_heads)
            self.bias = take(problem.bias.flatten(), self.bias_index).mT[:, :, None]  # [K, G, 1, H/G, M]

    def take_queries(self, x: Tensor) -> Tensor:
        """[R, H, ...] -> [K · G, L, H/G, ...]."""
        return take(x.flatten(0, 1), self.query_index).flatten(0, 1)

    def take_keys(self, x: Tensor) -> Tensor:
        """[S, G, W] -> [K · G, M, W]."""
        return take(x.flatten(0, 1), self.key_index).flatten(0, 1).flatten(1, 2)

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
    top.masked_fill_(is_exact(total), 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    return weights, total, total.log().add_(top)


def bmm_forward(problem: Problem, queries: Rows, keys: Rows, out: Tensor, lse: Tensor) -> None:
    """Write the rows of out and lse."""
    batch = _Batch(problem, queries, keys)
    outs = batch.query.new_zeros(*batch.query.shape[:3], out.shape[2])
    lses = batch.query.new_full(batch.query.shape[:3], -torch.inf)
    for rows, columns in batch.blocks():
        weights, total, block_lse = _softmax(batch.scores(rows, columns))
        block = torch.bmm(weights, batch.value[:, columns]).div_(total.masked_fill_(total == 0, 1.0))
        outs[:, rows] = block.view_as(outs[:, rows])
        lses[:, rows] = block_lse.view_as(lses[:, rows])
    batch.put_queries(out, outs)
    batch.put_queries(lse, lses)


def bmm_backward(
    problem: Problem,
    queries: Rows,
    keys: Rows,
    grad: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    results: list[Tensor | None],
) -> None:
    """Write the rows of the gradients of query, key, value and bias that are not None."""
    dquery, dkey, dvalue, dbias, _ = results
    batch = _Batch(problem, queries, keys)
    grads, lses = batch.take_queries(grad), batch.take_queries(lse)
    deltas = (grads * batch.take_queries(out)).sum(-1)
    if dlse is not None:
        deltas -= batch.take_queries(dlse)
    empty = lses == -torch.inf
    # Combining empty parts makes a gradient of NaN for the log-sum-exp, which weights of 0 would not stop.
    deltas.masked_fill_(empty, 0.0)
    if queries.padding is not None:
        empty |= queries.padding.repeat_interleave(problem.num_kv_heads, 0)[:, :, None]
    lses.masked_fill_(empty, torch.inf)  # weights of exp(-inf) = 0
    dqueries = None if dquery is None else torch.zeros_like(batch.query)
    dkeys = None if dkey is None else torch.zeros_like(batch.key)
    dvalues = None if dvalue is None else torch.zeros_like(batch.value)
    if problem.value is None:
        dvalues = dkeys
    dbiases = None if dbias is None else torch.zeros(batch.bias_index.mT.shape, dtype=batch.query.dtype)
    for rows, columns in batch.blocks():
        block_grad, values = grads[:, rows].flatten(1, 2), batch.value[:, columns]
        weights = batch.scores(rows, columns).sub_(lses[:, rows].flatten(1, 2)[..., None]).exp_()
        dscores = torch.bmm(block_grad, values.mT).sub_(deltas[:, rows].flatten(1, 2)[..., None]).mul_(weights)
        if dqueries is not None:
            dqueries[:, rows] = torch.bmm(dscores, batch.key[:, columns]).view_as(dqueries[:, rows])
        if dkeys is not None:
            dkeys[:, columns].baddbmm_(dscores.mT, batch.query[:, rows].flatten(1, 2))
        if dvalues is not None:
            dvalues[:, columns].baddbmm_(weights.mT, block_grad)
        if dbiases is not None:
            split = dscores.view(*dbiases.shape[:2], rows.stop - rows.start, dbiases.shape[2], -1)
            dbiases[..., columns] += split.sum(2)
    if dquery is not None:
        batch.put_queries(dquery, dqueries.mul_(problem.scale))
    if dkey is not None:
        batch.put_keys(dkey, dkeys)
    if dvalue is not None:
        batch.put_keys(dvalue, dvalues)
    if dbias is not None:
        keys.put(dbias.flatten(), batch.bias_index, dbiases.mT)
