"""Jagged attention on a CPU by batched matrix products: any window, width and bias, and a gradient for the log-sum-exp.

A sample's queries are split into chunks, each with the keys from the first that its first query sees to the last that
its last query sees.  Chunks of similar sizes form a batch, padded, whatever samples they belong to, so that no more
than a few MB of scores exist at a time.

With a bias by age or distance, a query's edges divide the keys of its chunk into runs: hidden ones, those of each
bucket, hidden ones.  The scores begin as the biases of the runs, -inf where hidden, and a matrix product adds to them
in place; the gradient of the table is a sum over runs.  So all heads share one index a pair.

The scores are in units of log 2, since exp2 takes a third of the time of exp in torch.  They are kept by key, then by
query: sums of a run then do not wait for one another.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from jfi.cpu.batches import MAX_TOTAL, MIN_TOTAL, Rows, Shapes, is_exact
from jfi.reference import unpack_digits, widen
from jfi.utils.operands import MAX_BUCKETS, JaggedAttentionInputs

#: The most queries of a chunk: more meet more keys that are hidden, fewer read keys more often.
CHUNK_QUERIES = 96
#: Where every query sees every key, a chunk may have up to four times as many queries, and this many scores.
MAX_SCORES = 2**19
#: The most elements of a batch of chunks, operands and scores: 2 MB of float32.
BATCH_ELEMENTS = 2**19
#: Instead of a batch of at most this many chunks, each is a batch.
FEW_CHUNKS = 3
#: Padding a batch up to this many pairs of query and key costs less than another batch.
PADDED_PAIRS = 2**13
LOG2_E = math.log2(math.e)
#: A window that reaches farther has no end; a position and it still fit 64 bits.
_FAR = 2**62


def keys_and_values(x: JaggedAttentionInputs, keys: Rows) -> tuple[Tensor, Tensor]:
    """Loads [K, M, G, D] and [K, M, G, E]; packed digits are decoded."""
    if not x.is_packed:
        key = keys.take(x.key)
        return key, key if x.value is None else keys.take(x.value)
    key = widen(unpack_digits(keys.take(x.key), x.query.shape[2])[:, :, None].to(x.query.dtype))
    return key, key if x.value is None else key * keys.take(x.value)[..., None, None]


def _visible(x: JaggedAttentionInputs) -> tuple[Tensor, Tensor]:
    """Returns which key of its sample each query sees first, and the one after its last: [R] int64."""
    if x.edges is not None:
        begin, end = x.edges[:, -1].long(), x.edges[:, 0].long() >> MAX_BUCKETS.bit_length() - 1
        return begin, torch.maximum(end, begin)
    counts, num_keys = x.query_offsets.long().diff(), x.key_offsets.long().diff()
    end = num_keys.repeat_interleave(counts)
    # Bottom-right aligned: a sample's last query has the position of its last key.
    position = torch.arange(len(end)) + (num_keys - x.query_offsets[1:]).repeat_interleave(counts)
    if x.right is not None:
        end = torch.minimum(end, (position + (min(x.right, _FAR) + 1)).clamp_(min=0))
    begin = torch.zeros_like(end)
    if x.left is not None:
        begin = torch.minimum(end, (position - min(x.left, _FAR)).clamp_(min=0))
    return begin, end


def _batches(x: JaggedAttentionInputs) -> Iterator["_Batch"]:
    begin, end = _visible(x)
    runs = None
    if x.table is not None:
        # A query's keys before those it sees, of each bucket from the oldest on, and after those it sees less all keys.
        ends = torch.maximum((x.edges[:, :-1] >> MAX_BUCKETS.bit_length() - 1).flip(1), x.edges[:, -1:])
        runs = torch.cat([x.edges[:, -1:], ends.diff(dim=1, prepend=x.edges[:, -1:]), -ends[:, -1:]], 1)
    query_offsets, key_offsets = x.query_offsets.long(), x.key_offsets.long()
    counts = query_offsets.diff()
    chunk = CHUNK_QUERIES
    if not x.tapers and x.left is None:
        chunk = (MAX_SCORES // x.query.shape[1] // key_offsets.diff().clamp(min=1)).clamp_(chunk, 4 * chunk)
    parts = (counts + (chunk - 1)) // chunk
    sample = torch.repeat_interleave(parts)
    part = torch.arange(len(sample)) - (parts.cumsum(0) - parts)[sample]
    first, last = (query_offsets[sample] + counts[sample] * i // parts[sample] for i in (part, part + 1))
    low = begin[first]
    lengths, keys = last - first, end[last - 1] - low
    widths = x.query.shape[2] + x.value_dim
    for group, (num_queries, num_keys), is_full in Shapes.of(lengths, keys).padded(PADDED_PAIRS):
        elements = x.query.shape[1] * ((num_queries + num_keys) * widths + num_queries * num_keys)
        count = BATCH_ELEMENTS // elements
        # One chunk is read in place, several are copied.
        for chunks in group.split(count if count > FEW_CHUNKS else 1):
            yield _Batch(
                x,
                Rows(first[chunks], num_queries, None if is_full else lengths[chunks]),
                Rows(key_offsets[sample[chunks]] + low[chunks], num_keys, None if is_full else keys[chunks]),
                begin,
                end,
                runs,
                low[chunks],
            )


class _Batch:
    """K chunks with L queries and M keys each, padded; the Q = H/G query heads of a key head are Q · L columns.

    Attributes:
        shape: (G, K, M, Q, L), of the scores.
        query: [G · K, Q · L, D], scaled to units of log 2.
        key, value: [G · K, M, D] and [G · K, M, E].
        bias: [G · K, M, Q or 1, 1] or None, in units of log 2; -inf for padding where nothing else hides it.
        table: [H, 1, N + 2], the biases of a query's runs in units of log 2, -inf first and last; None without.
        runs: [K · M · L], of each pair the run in [K · L · (N + 2)].
        hidden: [K, M, 1, L], the keys that a query does not see; None without a window, or with runs.
        is_blind: [G · K, 1, Q · L], whether a query sees no key.
    """

    def __init__(
        self,
        x: JaggedAttentionInputs,
        queries: Rows,
        keys: Rows,
        begin: Tensor,
        end: Tensor,
        runs: Tensor | None,
        low: Tensor,
    ):
        num_heads, num_kv_heads = x.query.shape[1], x.num_kv_heads
        count, num_queries, num_keys = queries.count, queries.size, keys.size
        self.queries, self.keys = queries, keys
        self.shape = num_kv_heads, count, num_keys, num_heads // num_kv_heads, num_queries
        self.query = self.take_queries(x.query) * (x.scale * LOG2_E)
        key, value = keys_and_values(x, keys)
        self.key = self.by_key_head(key)
        self.value = self.key if value is key else self.by_key_head(value)
        self.bias = self.table = self.hidden = None
        if x.bias is not None:
            bias = (keys.take(x.bias) * LOG2_E).unflatten(2, (num_kv_heads, -1))
            self.bias = bias.permute(2, 0, 1, 3).flatten(0, 1)[..., None]
        begin, end = begin[queries.index], end[queries.index]
        self.is_blind = (begin == end).repeat(num_kv_heads, self.shape[3])[:, None]
        if x.table is not None:
            table = widen(x.table) * LOG2_E
            hidden = table.new_full((1, num_heads), -torch.inf)
            self.table = torch.cat([hidden, table.flip(0), hidden]).T[:, None]
            runs = runs.index_select(0, queries.index.flatten()).view(count, num_queries, -1)
            runs[..., 0] -= low[:, None]
            runs[..., -1] += low[:, None] + num_keys
            of_pair = torch.repeat_interleave(runs.flatten(), output_size=count * num_queries * num_keys)
            # Of 64 bits again, since index_add_ is slow at an index of 32.
            self.runs = of_pair.view(count, num_queries, num_keys).mT.flatten().long()
        elif x.edges is not None or x.left is not None or x.right is not None:
            position = (low[:, None, None] + torch.arange(num_keys)[:, None]).int()
            hidden = position >= end[:, None].int()
            if x.edges is not None or x.left is not None:
                hidden |= position < begin[:, None].int()
            self.hidden = hidden[:, :, None]
        elif keys.padding is not None:
            padding = self.query.new_zeros(keys.padding.shape).masked_fill_(keys.padding, -torch.inf)
            padding = padding.repeat(num_kv_heads, 1)[..., None, None]
            self.bias = padding if self.bias is None else self.bias + padding

    def take_queries(self, x: Tensor) -> Tensor:
        """[R, H, W] -> [G · K, Q · L, W], at least float32."""
        x = self.queries.take(x).unflatten(2, (self.shape[0], -1))
        return x.permute(2, 0, 3, 1, 4).flatten(2, 3).flatten(0, 1)

    def by_key_head(self, x: Tensor) -> Tensor:
        """[K, M, G, W] -> [G · K, M, W]."""
        return x.permute(2, 0, 1, 3).flatten(0, 1)

    def put_queries(self, out: Tensor, x: Tensor) -> None:
        """Writes [G · K, Q · L, W] to the queries' rows of [R, H, W]."""
        num_kv_heads, count, _, group, num_queries = self.shape
        x = x.reshape(num_kv_heads, count, group, num_queries, -1)
        self.queries.put(out, x.permute(1, 3, 0, 2, 4).flatten(2, 3))

    def add_keys(self, out: Tensor, x: Tensor, factor: float = 1.0) -> None:
        """Adds factor · x [G · K, M, W], 0 for padding, to the keys' rows of [S, G, W]."""
        self.keys.add(out, x.unflatten(0, self.shape[:2]).permute(1, 2, 0, 3), factor)

    def scores(self, lse: Tensor | None = None) -> Tensor:
        """Returns the scores less lse [G · K, 1, Q · L]: [G · K, M, Q · L], -inf where a key is not seen."""
        num_kv_heads, count, num_keys, group, num_queries = self.shape
        if self.table is None:
            scores = torch.bmm(self.key, self.query.mT)
            if lse is not None:
                scores.sub_(lse)
        else:
            table = self.table
            if lse is not None:
                table = table - lse.view(num_kv_heads, count, group, -1).transpose(1, 2).reshape(len(table), -1, 1)
            table = table.expand(-1, count * num_queries, -1).flatten(1).index_select(1, self.runs)
            table = table.view(num_kv_heads, group, count, num_keys, -1).permute(0, 2, 3, 1, 4)
            scores = table.reshape(*self.key.shape[:2], -1).baddbmm_(self.key, self.query.mT)
        if self.bias is not None:
            scores.view(*self.key.shape[:2], group, -1).add_(self.bias)
        if self.hidden is not None:
            scores.view(self.shape).masked_fill_(self.hidden, -torch.inf)
        return scores


def _softmax(batch: _Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weights times their sum, the sums and the log-sum-exp, [.., 1, Q · L] each."""
    weights = batch.scores().exp2_()
    total = weights.sum(1, keepdim=True)
    lowest, highest = total.masked_fill(batch.is_blind, 1.0).aminmax()
    if MIN_TOTAL < lowest <= highest < MAX_TOTAL:
        return weights, total, total.log()
    scores = batch.scores()
    # A query that sees nothing has weights of 2^(-inf - min) = 0.
    top = scores.amax(1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    top.masked_fill_(is_exact(total), 0.0)
    weights = scores.sub_(top).exp2_()
    total = weights.sum(1, keepdim=True)
    return weights, total, total.log().add_(top.div_(LOG2_E))


def forward(x: JaggedAttentionInputs, out: Tensor, lse: Tensor) -> None:
    """Writes the rows of out and lse of all queries that have keys."""
    for batch in _batches(x):
        weights, total, lses = _softmax(batch)
        outs = torch.bmm(batch.value.mT, weights).div_(total.masked_fill_(total == 0, 1.0))
        batch.put_queries(out, outs.mT)
        batch.put_queries(lse[..., None], lses.mT)


def backward(
    x: JaggedAttentionInputs,
    grad: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    results: list[Tensor | None],
) -> None:
    """Writes the gradient of query, and adds to those of key, value, bias and table, at least float32, if not None."""
    dquery, dkey, dvalue, dbias, dtable = results
    deltas = (widen(grad) * widen(out)).sum(-1, keepdim=True)
    if dlse is not None:
        deltas -= dlse[..., None]
    empty = (lse == -torch.inf)[..., None]
    # Combining empty parts makes a gradient of NaN for the log-sum-exp, which weights of 0 would not stop.
    deltas.masked_fill_(empty, 0.0)
    lse = (lse * LOG2_E)[..., None].masked_fill_(empty, torch.inf)  # weights of 2^(-inf) = 0
    for batch in _batches(x):
        num_kv_heads, _, _, group, _ = batch.shape
        grads, lses, delta = (batch.take_queries(y).contiguous() for y in (grad, lse, deltas))
        if batch.queries.padding is not None:
            lses.masked_fill_(batch.queries.padding.repeat(num_kv_heads, group)[..., None], torch.inf)
        weights = batch.scores(lses.mT).exp2_()
        dscores = torch.bmm(batch.value, grads.mT).sub_(delta.mT).mul_(weights)
        if dquery is not None:
            batch.put_queries(dquery, torch.bmm(batch.key.mT, dscores).mul_(x.scale).mT)
        if dkey is not None:
            batch.add_keys(dkey, torch.bmm(dscores, batch.query), 1 / LOG2_E)
        of_values = dkey if x.value is None else dvalue
        if of_values is not None:
            batch.add_keys(of_values, torch.bmm(weights, grads))
        if dbias is not None:
            batch.keys.add(dbias, dscores.view(batch.shape).sum(4).permute(1, 2, 0, 3).flatten(2))
        if dtable is not None:
            _, count, _, _, num_queries = batch.shape
            by_run = dtable.new_zeros(dtable.shape[1], count * num_queries * (len(dtable) + 2))
            by_head = dscores.view(batch.shape).permute(0, 3, 1, 2, 4)
            by_run.index_add_(1, batch.runs, by_head.reshape(dtable.shape[1], -1))
            dtable += by_run.view(dtable.shape[1], -1, len(dtable) + 2).sum(1)[:, 1:-1].flip(1).T
