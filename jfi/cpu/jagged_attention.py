"""Jagged attention on a CPU: samples of similar lengths in batches, by torch's flash attention where it takes them.

Samples are sorted by length and batched, L queries by M keys each.  Samples of equal lengths need no padding; where
only a few samples of a batch differ in length, padding them costs less than another batch, and the padding is masked.

Flash attention for CPUs has no gradient for a bias nor any for the log-sum-exp, needs E = D and makes NaN of a query
that sees no key: jfi/plan.py sends such problems to batched matrix products.

Packed digits are decoded block by block, as by `jfi.cpu.digit_attention`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from jfi.cpu import attention_edges
from jfi.cpu.attention_batches import Problem, Rows, take
from jfi.cpu.attention_bmm import bmm_backward, bmm_forward
from jfi.cpu.digit_attention import sample_blocks
from jfi.plan import JaggedAttentionInputs, cpu_flash_refusal
from jfi.reference import unpack_digits
from jfi.utils.compat import flash_attention_for_cpu, flash_attention_for_cpu_backward


class _Flash:
    """Operands and options of flash attention for K samples: [K, H, L, D] and [K, H, M, D]."""

    def __init__(self, problem: Problem, queries: Rows, keys: Rows):
        self.qheads_per_kvhead = problem.num_heads // problem.num_kv_heads
        query, key = take(problem.query, queries.place).transpose(1, 2), self.take_keys(problem.key, keys)
        value = key if problem.value is None else self.take_keys(problem.value, keys)
        self.operands = query, key, value
        self.options = {"scale": problem.scale}
        self.is_causal = problem.right is not None
        if keys.padding is not None and not self.is_causal:
            mask = query.new_zeros(keys.padding.shape).masked_fill_(keys.padding, -torch.inf)
            self.options["attn_mask"] = mask[:, None, None]

    def take_keys(self, x: Tensor, keys: Rows) -> Tensor:
        """[S, G, D] -> [K, H, M, D]."""
        x = take(x, keys.place).transpose(1, 2)
        return x if self.qheads_per_kvhead == 1 else x.repeat_interleave(self.qheads_per_kvhead, 1)

    def sum_heads(self, x: Tensor) -> Tensor:
        """[K, H, M, D] -> [K, M, G, D]."""
        return (x if self.qheads_per_kvhead == 1 else x.unflatten(1, (-1, self.qheads_per_kvhead)).sum(2)).transpose(
            1, 2
        )

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


def _flash_forward(problem: Problem, queries: Rows, keys: Rows, out: Tensor, lse: Tensor) -> None:
    outs, lses = _Flash(problem, queries, keys).forward()
    queries.put(out, queries.place, outs)
    queries.put(lse, queries.place, lses)


def _flash_backward(
    problem: Problem,
    queries: Rows,
    keys: Rows,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    results: list[Tensor | None],
) -> None:
    dquery, dkey, dvalue, _, _ = results
    grads = take(grad, queries.place)
    if queries.padding is not None:
        grads.masked_fill_(queries.padding[..., None, None], 0.0)
    parts = (grads, take(out, queries.place), take(lse, queries.place))
    dqueries, dkeys, dvalues = _Flash(problem, queries, keys).backward(*parts)
    if dquery is not None:
        queries.put(dquery, queries.place, dqueries)
    if dkey is not None:
        keys.put(dkey, keys.place, dkeys + dvalues if problem.value is None else dkeys)
    if dvalue is not None:
        keys.put(dvalue, keys.place, dvalues)


def _decoded(x: JaggedAttentionInputs) -> Iterator[tuple[slice, slice, JaggedAttentionInputs]]:
    """(queries, events, their attention to rows of numbers) of each block of samples with packed digits."""
    ends = x.query_offsets.tolist()
    for samples, events in sample_blocks(x.key_offsets):
        rows, own = slice(ends[samples.start], ends[samples.stop]), slice(samples.start, samples.stop + 1)
        key = unpack_digits(x.key[events], x.query.shape[2])[:, None].to(x.query.dtype)
        by_event = {"bias": x.bias, "key_time": x.key_time}
        by_query = {"query": x.query, "edges": x.edges, "query_time": x.query_time}
        parts = {name: None if y is None else y[events] for name, y in by_event.items()}
        parts |= {name: None if y is None else y[rows] for name, y in by_query.items()}
        offsets = {"query_offsets": x.query_offsets[own] - rows.start, "key_offsets": x.key_offsets[own] - events.start}
        value = None if x.value is None else key * x.value[events, None, None].to(key.dtype)
        yield rows, events, x._replace(key=key, value=value, **offsets, **parts)


@torch.autocast("cpu", enabled=False)
def forward(x: JaggedAttentionInputs) -> tuple[Tensor, Tensor]:
    """Results as those of the launcher in jfi/kernels/jagged_attention."""
    return _forward(x)


@torch.autocast("cpu", enabled=False)
def backward(
    grad: Tensor, dlse: Tensor | None, x: JaggedAttentionInputs, out: Tensor, lse: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Arguments and results as those of the launcher in jfi/kernels/jagged_attention."""
    return _backward(grad, dlse, x, out, lse, needed)


# These call themselves, and a decorator of autocast that is entered twice leaves it off.
def _forward(x: JaggedAttentionInputs) -> tuple[Tensor, Tensor]:
    out = x.query.new_zeros(*x.query.shape[:2], x.value_dim)
    lse = x.query.new_full(x.query.shape[:2], -torch.inf, dtype=torch.promote_types(x.query.dtype, torch.float32))
    if x.is_packed:
        for rows, _, part in _decoded(x):
            out[rows], lse[rows] = _forward(part)
        return out, lse
    problem = Problem(x)
    if x.edges is not None:
        attention_edges.forward(problem, out, lse)
        return out, lse
    is_flash = cpu_flash_refusal(x) is None
    for queries, keys in problem.batches(is_flash):
        (_flash_forward if is_flash else bmm_forward)(problem, queries, keys, out, lse)
    return out, lse


def _backward(
    grad: Tensor, dlse: Tensor | None, x: JaggedAttentionInputs, out: Tensor, lse: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    inputs = [y if need else None for y, need in zip((x.query, x.key, x.value, x.bias, x.table), needed, strict=True)]
    if x.is_packed or x.edges is not None:  # sums over batches
        results = [None if y is None else torch.zeros_like(y, dtype=lse.dtype) for y in inputs]
        if x.is_packed:
            _packed_backward(grad, dlse, x, out, lse, needed, results)
        else:
            attention_edges.backward(Problem(x), grad, dlse, out, lse, results)
        return tuple(None if y is None else found.to(y.dtype) for found, y in zip(results, inputs, strict=True))
    problem = Problem(x)
    results = [None if y is None else torch.zeros_like(y) for y in inputs]
    is_flash = dlse is None and cpu_flash_refusal(x) is None
    for queries, keys in problem.batches(is_flash):
        if is_flash:
            _flash_backward(problem, queries, keys, grad, out, lse, results)
        else:
            bmm_backward(problem, queries, keys, grad, dlse, out, lse, results)
    return tuple(results)


def _packed_backward(
    grad: Tensor,
    dlse: Tensor | None,
    x: JaggedAttentionInputs,
    out: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    results: list[Tensor | None],
) -> None:
    """Write the gradients of query and bias, and add to that of table."""
    dquery, _, _, dbias, dtable = results
    for rows, events, part in _decoded(x):
        dlse_part = None if dlse is None else dlse[rows]
        of_query, _, _, of_bias, of_table = _backward(grad[rows], dlse_part, part, out[rows], lse[rows], needed)
        if dquery is not None:
            dquery[rows] = of_query
        if dbias is not None:
            dbias[events] = of_bias
        if dtable is not None:
            dtable += of_table
