"""Jagged attention on a CPU: by torch's flash attention where it takes a call, else by chunks of queries.

For flash attention samples are sorted by length and batched, L queries by M keys each.  Samples of equal lengths need
no padding; where only a few samples of a batch differ in length, padding them costs less than another batch, and the
padding is masked.

Flash attention for CPUs has no gradient for a bias nor any for the log-sum-exp, needs E = D and makes NaN of a query
that sees no key: jfi/kernels/plan.py sends such problems to `jfi.cpu.attention_chunks`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from jfi.cpu import attention_chunks
from jfi.cpu.attention_chunks import keys_and_values
from jfi.cpu.batches import Rows, Shapes
from jfi.kernels.plan import cpu_flash_refusal
from jfi.utils.compat import flash_attention_for_cpu, flash_attention_for_cpu_backward
from jfi.utils.operands import JaggedAttentionInputs

#: The most elements of a batch of samples: 1 MB of float32, so that it stays in the L2 cache.
BATCH_ELEMENTS = 2**18
#: Padding a batch up to this many scores costs less than another batch, some 100 µs.
PADDED_SCORES = 2**15


def _batches(x: JaggedAttentionInputs) -> Iterator[tuple[Rows, Rows, "_Flash"]]:
    starts = x.query_offsets.long(), x.key_offsets.long()
    lengths = [offsets.diff() for offsets in starts]
    num_heads, widths = x.query.shape[1], x.query.shape[2] + x.value_dim
    padded = Shapes.of(*lengths).padded(PADDED_SCORES // num_heads)
    for part, longest, is_full in padded:
        elements = (num_heads * longest[0] + x.num_kv_heads * longest[1]) * widths
        for samples in part.split(max(1, BATCH_ELEMENTS // elements)):
            queries, keys = (
                Rows(start[samples], most, None if is_full else length[samples])
                for start, length, most in zip(starts, lengths, longest, strict=True)
            )
            yield queries, keys, _Flash(x, queries, keys)


class _Flash:
    """Operands and options of flash attention for K samples: [K, H, L, D] and [K, H, M, D]."""

    def __init__(self, x: JaggedAttentionInputs, queries: Rows, keys: Rows):
        self.qheads_per_kvhead = x.query.shape[1] // x.num_kv_heads
        query, (key, value) = queries.take(x.query).transpose(1, 2), keys_and_values(x, keys)
        key, value = self.share(key), None if value is key else self.share(value)
        self.operands = query, key, key if value is None else value
        self.options = {"scale": x.scale}
        self.is_causal = x.right is not None
        if keys.padding is not None and not self.is_causal:
            mask = query.new_zeros(keys.padding.shape).masked_fill_(keys.padding, -torch.inf)
            self.options["attn_mask"] = mask[:, None, None]

    def share(self, x: Tensor) -> Tensor:
        """[K, M, G, D] -> [K, H, M, D]."""
        x = x.transpose(1, 2)
        return x if self.qheads_per_kvhead == 1 else x.repeat_interleave(self.qheads_per_kvhead, 1)

    def sum_heads(self, x: Tensor) -> Tensor:
        """[K, H, M, D] -> [K, M, G, D]."""
        x = x if self.qheads_per_kvhead == 1 else x.unflatten(1, (-1, self.qheads_per_kvhead)).sum(2)
        return x.transpose(1, 2)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Returns the output [K, L, H, D] and the log-sum-exp [K, L, H]."""
        out, lse = flash_attention_for_cpu(*self.operands, 0.0, self.is_causal, **self.options)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[K, L, H, ...] -> the gradients [K, L, H, D], [K, M, G, D] and [K, M, G, D]."""
        grad, out, lse = (x.transpose(1, 2) for x in (grad, out, lse))
        saved = (*self.operands, out, lse)
        dquery, dkey, dvalue = flash_attention_for_cpu_backward(grad, *saved, 0.0, self.is_causal, **self.options)
        return dquery.transpose(1, 2), self.sum_heads(dkey), self.sum_heads(dvalue)


def forward(x: JaggedAttentionInputs) -> tuple[Tensor, Tensor]:
    """Results as those of the launcher in jfi/kernels/jagged_attention."""
    out = x.query.new_zeros(*x.query.shape[:2], x.value_dim)
    lse = x.query.new_full(x.query.shape[:2], -torch.inf, dtype=torch.promote_types(x.query.dtype, torch.float32))
    if cpu_flash_refusal(x) is not None:
        attention_chunks.forward(x, out, lse)
        return out, lse
    for queries, _, flash in _batches(x):
        outs, lses = flash.forward()
        queries.put(out, outs)
        queries.put(lse, lses)
    return out, lse


def backward(
    grad: Tensor, dlse: Tensor | None, x: JaggedAttentionInputs, out: Tensor, lse: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Arguments and results as those of the launcher in jfi/kernels/jagged_attention."""
    inputs = [y if need else None for y, need in zip((x.query, x.key, x.value, x.bias, x.table), needed, strict=True)]
    if dlse is not None or cpu_flash_refusal(x) is not None:
        results = [None if y is None else torch.zeros_like(y, dtype=lse.dtype) for y in inputs]  # sums over chunks
        attention_chunks.backward(x, grad, dlse, out, lse, results)
        return tuple(None if y is None else result.to(y.dtype) for result, y in zip(results, inputs, strict=True))
    dquery, dkey, dvalue, *_ = results = [None if y is None else torch.zeros_like(y) for y in inputs]
    for queries, keys, flash in _batches(x):
        grads = queries.take(grad)
        if queries.padding is not None:
            grads.masked_fill_(queries.padding[..., None, None], 0.0)
        dqueries, dkeys, dvalues = flash.backward(grads, queries.take(out), queries.take(lse))
        if dquery is not None:
            queries.put(dquery, dqueries)
        if dkey is not None:
            keys.put(dkey, dkeys + dvalues if x.value is None else dkeys)
        if dvalue is not None:
            keys.put(dvalue, dvalues)
    return tuple(results)
