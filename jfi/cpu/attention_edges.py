"""Jagged attention on a CPU where edges say which keys a query sees: times, or a bias by age or distance.

A sample's queries are split into chunks, each with the keys from the first that its first query sees to the last that
its last query sees.  Chunks of similar sizes form a batch, padded, whatever samples they belong to.

By its edges a query divides the keys of its chunk into runs: hidden ones, those of each bucket, hidden ones.  The
scores begin as the biases of the runs, -inf where hidden, and a matrix product adds to them in place; the gradient of
the table is a sum over runs.  So all heads share one index a pair, and nothing else is computed about buckets.

The scores are in units of log 2, since exp2 takes a third of the time of exp in torch.  They are kept by key, then by
query: sums of a run then do not wait for one another, and in each matrix product the operand that is only as wide as a
head can stand on the left; on the right it makes MKL four times as slow.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from jfi.cpu.attention_batches import Problem, Rows
from jfi.cpu.blocks import LEAST_TOTAL, MOST_TOTAL, Shapes, is_exact, widen
from jfi.plan import MOST_BUCKETS

#: The most queries of a chunk: more meet more keys that are hidden, fewer read keys more often.
CHUNK_QUERIES = 64
#: The most elements of a batch of chunks, operands and scores: 2 MB of float32.
BATCH_ELEMENTS = 2**19
#: Padding a batch up to this many pairs of query and key costs less than another batch.
PADDED_PAIRS = 2**13
LOG2_E = math.log2(math.e)


def _by_head(x: Tensor) -> Tensor:
    """[.., H, W] -> [H, .., W], contiguous."""
    return x.transpose(0, 1).contiguous()


def _batches(problem: Problem) -> Iterator["_Batch"]:
    query_offsets, key_offsets = problem.offsets
    # The edges of a query as the lengths of its runs: of keys before those it sees, of each bucket from the oldest on,
    # and of later keys, which lacks the number of all keys.
    ends = (problem.edges[:, :-1] >> MOST_BUCKETS.bit_length() - 1).flip(1)
    begin = problem.edges[:, -1:]
    ends = torch.maximum(ends, begin)
    runs = torch.cat([begin, ends.diff(dim=1, prepend=begin), -ends[:, -1:]], 1)

    bias = None if problem.bias is None else problem.bias[..., None]
    operands = [None if x is None else _by_head(x) for x in (problem.query, problem.key, problem.value, bias)]
    counts = query_offsets.diff()
    parts = (counts + (CHUNK_QUERIES - 1)) // CHUNK_QUERIES
    sample = torch.repeat_interleave(parts)
    part = torch.arange(len(sample)) - (parts.cumsum(0) - parts)[sample]
    first, last = (query_offsets[sample] + counts[sample] * x // parts[sample] for x in (part, part + 1))
    low, high = begin[first, 0].long(), ends[last - 1, -1].long()
    lengths, keys = last - first, (high - low).clamp(min=0)
    widths = problem.query.shape[2] + (problem.key if problem.value is None else problem.value).shape[2]
    for group, (num_queries, num_keys), is_full in Shapes.of(lengths, keys).padded(PADDED_PAIRS):
        elements = problem.num_heads * ((num_queries + num_keys) * widths + num_queries * num_keys)
        for chunks in group.split(max(1, BATCH_ELEMENTS // elements)):
            yield _Batch(
                problem,
                operands,
                Rows.of(first[chunks], lengths[chunks], num_queries, is_full),
                Rows.of(key_offsets[sample[chunks]] + low[chunks], keys[chunks], num_keys, is_full),
                runs,
                low[chunks],
            )


class _Batch:
    """K chunks with L queries and M keys each, padded; every query head has a key head of its own.

    Attributes:
        query: [H · K, L, D], scaled to units of log 2.
        key, value: [H · K, M, D] and [H · K, M, E].
        bias: [H · K, M, 1] or None, in units of log 2.
        table: [H, 1, N + 2], the biases of a query's runs in units of log 2, -inf first and last.
        runs: [K · M · L], of each pair the run in [K · L · (N + 2)].
        blind: [H · K, 1, L], whether a query sees no key.
    """

    def __init__(
        self,
        problem: Problem,
        operands: list[Tensor | None],
        queries: Rows,
        keys: Rows,
        runs: Tensor,
        low: Tensor,
    ):
        self.problem, self.queries, self.keys = problem, queries, keys
        self.count, num_keys = keys.place.shape
        query, key, value, bias = operands
        self.query = self.take(query, queries).mul_(problem.scale * LOG2_E)
        self.key = self.take(key, keys)
        self.value = self.key if value is None else self.take(value, keys)
        self.bias = None if bias is None else self.take(bias, keys).mul_(LOG2_E)
        table = self.query.new_zeros(runs.shape[1] - 2, problem.num_heads)
        if problem.table is not None:
            table = widen(problem.table) * LOG2_E
        hidden = table.new_full((1, problem.num_heads), -torch.inf)
        self.table = torch.cat([hidden, table.flip(0), hidden]).T[:, None]

        runs = runs.index_select(0, queries.place.flatten()).view(*queries.place.shape, -1)
        runs[..., 0] -= low[:, None]
        runs[..., -1] += low[:, None] + num_keys
        self.blind = (runs[..., 0] + runs[..., -1] == num_keys).repeat(problem.num_heads, 1)[:, None]
        of_pair = torch.repeat_interleave(runs.flatten(), output_size=queries.place.numel() * num_keys)
        # Of 64 bits again, since index_add_ is slow at an index of 32.
        self.runs = of_pair.view(self.count, -1, num_keys).mT.flatten().long()

    def take(self, x: Tensor, rows: Rows) -> Tensor:
        """[H or G, .., W] -> [H · K, N, W], at least float32."""
        x = widen(x.index_select(1, rows.place.flatten()))
        if len(x) < self.problem.num_heads:
            x = x.repeat_interleave(self.problem.num_heads // len(x), 0)
        return x.view(-1, rows.place.shape[1], x.shape[2])

    def put(self, out: Tensor, x: Tensor) -> None:
        """Write [H · K, L, W] to the queries' rows of [R, H, W]."""
        self.queries.put(out, self.queries.place, x.unflatten(0, (-1, self.count)).permute(1, 2, 0, 3))

    def add(self, out: Tensor, x: Tensor) -> None:
        """Add [H · K, M, W], 0 for padding, to the keys' rows of [S, H or G, W]."""
        x = x.unflatten(0, (out.shape[1], -1, self.count))
        x = x[:, 0] if x.shape[1] == 1 else x.sum(1)
        out.index_add_(0, self.keys.place.flatten(), x.permute(1, 2, 0, 3).flatten(0, 1))

    def scores(self, table: Tensor) -> Tensor:
        """[H · K, M, L], -inf where a key is not seen; table: [H, K · L, N + 2]."""
        scores = table.flatten(1).index_select(1, self.runs).view(*self.key.shape[:2], -1)
        scores.baddbmm_(self.key, self.query.mT)
        return scores if self.bias is None else scores.add_(self.bias)


def _softmax(scores: Tensor, blind: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights times their sum, the sums and the log-sum-exp, [.., 1, L] each."""
    weights = scores.exp2()
    total = weights.sum(1, keepdim=True)
    least, most = total.masked_fill(blind, 1.0).aminmax()
    if LEAST_TOTAL < least <= most < MOST_TOTAL:
        return weights, total, total.log()
    # A query that sees nothing has weights of 2^(-inf - min) = 0.
    top = scores.amax(1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    top.masked_fill_(is_exact(total), 0.0)
    weights = scores.sub_(top).exp2_()
    total = weights.sum(1, keepdim=True)
    return weights, total, total.log().add_(top.div_(LOG2_E))


def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Write the rows of out and lse of all queries that have keys."""
    for batch in _batches(problem):
        weights, total, lses = _softmax(
            batch.scores(batch.table.expand(-1, batch.queries.place.numel(), -1)), batch.blind
        )
        outs = torch.bmm(batch.value.mT, weights).div_(total.masked_fill_(total == 0, 1.0))
        batch.put(out, outs.mT)
        batch.put(lse[..., None], lses.mT)


def backward(
    problem: Problem, grad: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, results: list[Tensor | None]
) -> None:
    """Write the gradient of query, and add to those of key, value, bias and table, at least float32, if not None."""
    dquery, dkey, dvalue, dbias, dtable = results
    deltas = (widen(grad) * widen(out)).sum(-1)
    if dlse is not None:
        deltas -= dlse
    empty = lse == -torch.inf
    # Combining empty parts makes a gradient of NaN for the log-sum-exp, which weights of 0 would not stop.
    deltas.masked_fill_(empty, 0.0)
    lse = _by_head((lse * LOG2_E).masked_fill_(empty, torch.inf)[..., None])  # weights of 2^(-inf) = 0
    # One more column subtracts the delta in the product of the gradient and the values.
    grad = _by_head(torch.cat([widen(grad), -deltas[..., None]], 2))
    for batch in _batches(problem):
        grads, lses = batch.take(grad, batch.queries), batch.take(lse, batch.queries)
        if batch.queries.padding is not None:
            lses.masked_fill_(batch.queries.padding.repeat(problem.num_heads, 1)[..., None], torch.inf)
        table = batch.table - lses.view(problem.num_heads, -1, 1)
        weights = batch.scores(table).exp2_()
        values = torch.nn.functional.pad(batch.value, (0, 1), value=1.0)
        dscores = torch.bmm(values, grads.mT).mul_(weights)
        if dquery is not None:
            batch.put(dquery, torch.bmm(batch.key.mT, dscores).mul_(problem.scale).mT)
        if dkey is not None:
            batch.add(dkey, torch.bmm(batch.query.mT, dscores.mT).div_(LOG2_E).mT)
        of_values = dkey if problem.value is None else dvalue
        if of_values is not None:
            batch.add(of_values, torch.bmm(grads[..., :-1].mT, weights.mT).mT)
        if dbias is not None:
            batch.add(dbias[..., None], dscores.sum(2, keepdim=True))
        if dtable is not None:
            found = torch.zeros_like(table).flatten(1)
            found.index_add_(1, batch.runs, dscores.view(problem.num_heads, -1))
            dtable += found.view_as(table).sum(1)[:, 1:-1].flip(1).T
