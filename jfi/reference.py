"""Every operator in plain PyTorch: the truth that the tests compare with, and impl="torch" on a GPU.

Two moves make all of them.  *Expand* repeats a sample's entry for each of its rows, [B, ...] -> [S, ...]; *segment sum*
adds a sample's rows up, [S, ...] -> [B, ...].  Each is the other's gradient, so every formula below is differentiable,
deterministic and without padding; no length is read on the host, so nothing synchronizes or recompiles.

Half precision is computed in float32 and rounded once at the end.  Intermediates are as large as the formula says
([S, T, H, D] for target attention): this file is written to be read, the kernels and jfi/cpu to be fast.
"""

import torch
from torch import Tensor


def segment_reduce(x: Tensor, offsets: Tensor, reduce: str, initial: float) -> Tensor:
    """Reduces each sample's rows, [S, ...] -> [B, ...]; an empty sample gives the initial value."""
    if x.shape[0] == 0:
        return x.new_full((offsets.shape[0] - 1, *x.shape[1:]), initial)
    flat = x if x.dim() == 2 else x.reshape(x.shape[0], -1)
    out = torch.segment_reduce(flat, reduce, offsets=offsets.long(), axis=0, initial=initial)
    return out if x.dim() == 2 else out.view(-1, *x.shape[1:])


def _segment_fake(x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, *x.shape[1:])


@torch.library.custom_op("jfi::segment_sum", mutates_args=())
def segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Sums each sample's rows, [S, ...] -> [B, ...], in their order; an empty sample gives 0."""
    return segment_reduce(x, offsets, "sum", 0.0)


@torch.library.custom_op("jfi::segment_max", mutates_args=())
def segment_max(x: Tensor, offsets: Tensor) -> Tensor:
    """Returns the greatest of each sample's rows, [S, ...] -> [B, ...]; -inf if empty.  Not differentiable."""
    return segment_reduce(x, offsets, "max", -torch.inf)


@torch.library.custom_op("jfi::segment_expand", mutates_args=())
def segment_expand(x: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """Repeats each sample's entry for each of its rows, [B, ...] -> [rows, ...]."""
    return x.new_zeros(0, *x.shape[1:]) if rows == 0 else x[segment_ids(offsets, rows)]


@segment_expand.register_fake
def _(x: Tensor, offsets: Tensor, rows: int) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


def _save_offsets(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].shape[0]


segment_sum.register_fake(_segment_fake)
segment_max.register_fake(_segment_fake)
segment_sum.register_autograd(
    lambda ctx, grad: (segment_expand(grad, ctx.saved_tensors[0], ctx.rows), None), setup_context=_save_offsets
)
segment_expand.register_autograd(
    lambda ctx, grad: (segment_sum(grad, ctx.saved_tensors[0]), None, None), setup_context=_save_offsets
)


def segment_ids(offsets: Tensor, rows: int) -> Tensor:
    """Returns the sample that each packed row belongs to, [rows] int64; the last one for padding behind all samples."""
    index = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    # Not in offsets[1:-1]: Inductor's searchsorted reads a view from the start of its storage on a GPU (torch 2.11).
    return (torch.searchsorted(offsets, index, right=True) - 1).clamp(max=offsets.shape[0] - 2)


def widen(x: Tensor) -> Tensor:
    """Converts half precision to float32, the type it is computed in; leaves other types unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def jagged_dense_bmm(x: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Multiplies each sample's rows by its matrix, [S, D] x [B, D, T] -> [S, T]."""
    rows = segment_expand(widen(dense), offsets, x.shape[0])
    return torch.einsum("sd,sdt->st", widen(x), rows).to(x.dtype)


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Computes xᵀy of each sample, [S, D], [S, T] -> [B, D, T]."""
    return segment_sum(widen(x)[:, :, None] * widen(y)[:, None, :], offsets).to(x.dtype)


def jagged_softmax(x: Tensor, offsets: Tensor) -> Tensor:
    """Computes the softmax over each sample's rows, [S, T] -> [S, T].  Rows of nothing but -inf give 0."""
    return _softmax(widen(x), offsets)[0].to(x.dtype)


def _softmax(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the softmax over each sample's rows [S, T] and the log-sum-exp [B, T], -inf for nothing but -inf."""
    top = segment_max(x.detach(), offsets)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(x - segment_expand(top, offsets, x.shape[0]))
    total = segment_sum(weights, offsets)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, top + torch.log(total))
    return weights / segment_expand(total, offsets, x.shape[0]), lse


class Pairs:
    """Pairs of each sample's rows, L x M, one sample's block behind another's, row-major.

    Attributes:
        count: the number of pairs, P = Σ L·M.
        left, right: [P] int64, the x row and the y row of each pair.
    """

    def __init__(self, x_offsets: Tensor, y_offsets: Tensor, count: int | None):
        widths = y_offsets.diff().long()
        offsets = torch.nn.functional.pad((widths * x_offsets.diff()).cumsum(0), (1, 0))
        self.count = int(offsets[-1]) if count is None else count
        sample = segment_ids(offsets, self.count)
        place = torch.arange(self.count, device=offsets.device) - offsets[sample]
        self.left = x_offsets[sample] + place // widths[sample]
        self.right = y_offsets[sample] + place % widths[sample]

    def row_offsets(self, rows: int) -> Tensor:
        """Returns where each x row's pairs begin, [rows+1] int64."""
        return torch.searchsorted(self.left, torch.arange(rows + 1, device=self.left.device, dtype=self.left.dtype))

    def filled_row_offsets(self) -> Tensor:
        """Returns where the pairs of each x row that has any begin, then P, [P+1] int64.

        The number of such rows is known on the device only; it is at most P.
        """
        starts = torch.ones_like(self.left)
        starts[1:] = self.left.diff().clamp(max=1)
        rank = starts.cumsum(0) - 1
        return torch.searchsorted(rank, torch.arange(self.count + 1, device=rank.device))


def jagged_jagged_bmm_jagged_out(
    x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_size: int | None = None
) -> Tensor:
    """Computes xyᵀ of each sample, row-major, [S, D], [R, D] -> [Σ L·M]."""
    pairs = Pairs(x_offsets, y_offsets, out_size)
    return (widen(x)[pairs.left] * widen(y)[pairs.right]).sum(-1).to(x.dtype)


def jagged2_softmax(a: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """Computes the softmax along each of the rows' M columns, [Σ L·M] -> [Σ L·M]."""
    return jagged_softmax(a[:, None], Pairs(x_offsets, y_offsets, a.shape[0]).filled_row_offsets())[:, 0]


def array_jagged_bmm_jagged_out(a: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_rows: int) -> Tensor:
    """Multiplies each sample's [L, M] block by its y [M, D], [Σ L·M], [R, D] -> [S, D]."""
    pairs = Pairs(x_offsets, y_offsets, a.shape[0])
    return segment_sum(widen(a)[:, None] * widen(y)[pairs.right], pairs.row_offsets(out_rows)).to(y.dtype)


def _share_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeats key heads, [S, G, D] -> [S, H, D]: query heads g · H/G .. (g+1) · H/G - 1 share key head g."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def target_attention(
    query: Tensor, key: Tensor, value: Tensor | None, offsets: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    """Attends to each sample's history, [B, T, H, D], [S, G, D], [S, G, E] -> [B, T, H, E]."""
    num_heads, rows = query.shape[2], key.shape[0]
    keys = _share_heads(widen(key), num_heads)
    values = keys if value is None else _share_heads(widen(value), num_heads)
    queries = segment_expand(widen(query), offsets, rows)
    scores = torch.einsum("sthd,shd->sth", queries, keys) * scale
    if bias is not None:
        scores = scores + widen(bias)[:, None, :]
    weights = jagged_softmax(scores.flatten(1), offsets).view_as(scores)
    return segment_sum(weights[..., None] * values[:, None], offsets).to(query.dtype)


def unpack_digits(words: Tensor, num_digits: int) -> Tensor:
    """Unpacks [.., W] int32 to [.., L] int8: digit l is bits 2 (l % 16) and 2 (l % 16) + 1 of word l // 16, signed."""
    shifts = torch.arange(0, 32, 2, device=words.device, dtype=torch.int32)
    # Not shifted to the left: Inductor computes it in 64 bits on a GPU (torch 2.11), where no bit is shifted out.
    digits = ((words[..., None] >> shifts).to(torch.int8) & 3 ^ 2) - 2
    return digits.flatten(-2)[..., :num_digits]


def digit_attention(
    query: Tensor,
    digits: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    value_scale: Tensor | None,
    scale: float,
) -> Tensor:
    """Attends to each sample's history of packed digits, [B, T, H, L], [S, W] -> [B, T, H, L]."""
    key = unpack_digits(digits, query.shape[3])[:, None].to(query.dtype)
    value = None if value_scale is None else key * value_scale[:, None, None].to(key.dtype)
    return target_attention(query, key, value, offsets, bias, scale)


def bound_ids(ids: Tensor, size: int) -> Tensor:
    """Replaces ids outside of a table of so many rows by -1, [S] -> [S]."""
    outside = ids < 0
    if size <= torch.iinfo(ids.dtype).max:
        outside = outside | (ids >= size)
    return torch.where(outside, -1, ids)


def gather_rows(tables: tuple[Tensor, ...], indices: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Sums rows of tables, [N, D] and [S] of each -> [S, D]; an index of -1 gives zeros."""
    rows = []
    for table, index in zip(tables, indices, strict=True):
        if table.shape[0] == 0:  # all is padding
            rows.append(table.new_zeros(index.shape[0], table.shape[1]))
        else:
            rows.append(table.index_select(0, index.clamp(min=0)).masked_fill((index < 0).unsqueeze(1), 0))
    return (rows[0] if len(rows) == 1 else sum(widen(row) for row in rows)).to(dtype)


def ages(query_time: Tensor, key_time: Tensor) -> Tensor:
    """Returns the ages of keys, 0 for those not older than the query: int64, which ends at 2^63 - 1, or float64."""
    if query_time.is_floating_point():
        return (query_time - key_time).clamp(min=0)
    age = query_time.long() - key_time.long()
    overflows = (age < 0) & (query_time > key_time)
    return age.masked_fill(overflows, torch.iinfo(torch.int64).max).clamp(min=0)


def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    bias: Tensor | None,
    scale: float,
    times: tuple[Tensor, Tensor] | None = None,
    max_visible: int | None = None,
    time_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    returns_weights: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attends from queries to keys of their sample, [R, H, D], [S, G, D], [S, G, E] -> [R, H, E] and [R, H].

    Computes every pair, Σ L·M; the second result is the log-sum-exp of the scores, and with returns_weights the first
    is the probabilities [Σ L·M, H].  times: of queries and keys; a query that is not causal sees strictly older keys.
    """
    num_heads, rows = query.shape[1], query.shape[0]
    pairs = Pairs(query_offsets, key_offsets, None)
    keys, group, heads = widen(key), num_heads // key.shape[1], enumerate(widen(query).unbind(1))
    # By head, so that no tensor is larger than the rows of one.
    scores = [torch.linalg.vecdot(q[pairs.left], keys[pairs.right, h // group]) for h, q in heads]
    scores = torch.stack(scores, 1) * scale
    if bias is not None:
        scores = scores + widen(bias)[pairs.right]
    # Bottom-right aligned: the last query of a sample is at the position of its last key.
    ends = segment_expand((key_offsets[1:] - query_offsets[1:]).long(), query_offsets, rows)
    ahead = pairs.right - (pairs.left + ends[pairs.left])
    left, right = window or (None, None)
    hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
    if left is not None:
        hidden = hidden | (ahead < -left)
    if right is not None:
        hidden = hidden | (ahead > right)
    row_offsets = pairs.row_offsets(rows)
    age = None if times is None else ages(times[0][pairs.left], times[1][pairs.right])
    # 0 for the key at a causal query's own position; without causal, 1 for the newest key that is older than the query.
    distance = -ahead
    if age is not None and not causal:
        hidden = age <= 0
        older = segment_sum((~hidden).double(), row_offsets).long()
        place = pairs.right - segment_expand(key_offsets[:-1].long(), query_offsets, rows)[pairs.left]
        distance = older[pairs.left] - place
    if max_visible is not None:
        nearest = 1 if age is not None and not causal else 0  # no bool: symbolic sizes do not add to one
        hidden = hidden | (distance >= max_visible + nearest)
    for table, count in ((time_bias, age), (position_bias, distance)):
        if table is not None:
            # frexp's exponent is floor(log2) + 1, exactly.
            buckets = torch.frexp(count.double()).exponent.clamp(0, table.shape[0] - 1).long()
            scores = scores + widen(table)[buckets]
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    weights, lse = _softmax(scores, row_offsets)
    if returns_weights:
        return weights, lse
    values = _share_heads(keys if value is None else widen(value), num_heads)
    return segment_sum(weights[..., None] * values[pairs.right], row_offsets).to(query.dtype), lse
