"""Attention of ragged targets: R candidates of U users over one timeline a user.

The formula is that of `jfi.modules.stacked_attention`, with `jfi.ops.jagged_attention` in the place of target
attention: the query rows of a candidate are heads of that operator, T · H of them. On the targets' side all share the
one key head of raw events; on the history's side each of the H key heads serves T.

With times a candidate sees the events that are strictly older than itself, and a learned bias by position or age is
looked up for each pair of candidate and event. For a history cut to what the candidate sees, dense targets give the
same numbers: the newest event that a candidate sees has distance 1 in the operator, and d = 0 in PositionBias.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from jfi import reference
from jfi.modules import inputs as group_inputs
from jfi.modules.inputs import GroupInputs
from jfi.modules.projections import linear, project_events
from jfi.modules.ragged_targets import is_by_pair
from jfi.modules.sequence_configs import Bias, TimeBias
from jfi.modules.table_rows import join_words
from jfi.ops import absorb_weights, jagged_attention, jagged_softmax
from jfi.plan import MOST_BUCKETS
from jfi.utils.padding import padding_state


def pays_to_project(inputs: GroupInputs, weights: tuple[Tensor, ...], num_heads: int) -> bool:
    """Whether projecting the history costs less than attending to raw events in every head, by multiply-adds.

    Only on a CPU, where they are what counts, and never in a compiled graph, which serves every number of candidates.
    In the one large product of a projection they take less than half the time that they take in those of users.
    """
    if torch.compiler.is_compiling() or not inputs.target.is_cpu:
        return False
    output_width, event_width = weights[2].shape[1:]
    num_queries = weights[0].size(1) // output_width
    rows, users = inputs.target.size(0) * inputs.target.size(1), inputs.offsets.size(0) - 1
    saved_by_pair = 2 * num_queries * (num_heads * event_width - output_width)
    return rows * saved_by_pair > users * output_width * event_width


def attend(
    inputs: GroupInputs,
    weights: tuple[Tensor, ...],
    bucket_bias: Tensor | None,
    bias: Bias | None,
    num_heads: int,
    projects_history: bool,
) -> Tensor:
    """The outputs [F, R, embedding_dim] of R candidates, in the parameters' dtype or autocast's.

    Args:
        inputs: with candidates.
        weights: of the projections, as `jfi.ops.absorbed_target_attention` takes them; those of keys and values are of
            `inputs.rows`.
        bucket_bias: [F * num_buckets, H], the learned bias tables.
        bias: of the features.
        num_heads: H.
        projects_history: whether keys and values are projected.
    """
    if padding_state.is_padded:
        raise ValueError(
            "ragged targets cannot be padded, as captured steps need: rows behind the last candidate are not written"
        )
    query_weight, query_bias, key_weight, value_weight, output_weight, output_bias = weights
    num_features, embedding_dim = output_bias.shape
    num_queries, head_width = query_weight.size(1) // embedding_dim, embedding_dim // num_heads
    options = {"inputs": inputs, "bias": bias, "scale": 1 / math.sqrt(head_width)}
    if not projects_history:
        absorbed = absorb_weights(weights[:5], num_heads)
        table = None if bucket_bias is None else bucket_bias.repeat(1, num_queries)
        if inputs.digits:
            key, indices = join_words(inputs.digits)
        else:
            key, indices = inputs.history.unsqueeze(1), None
        attention = partial(_attend, key=key, indices=indices, table=table, **options)
        dtype = inputs.fields[0].dtype
        return attend_to_raw_events(inputs.target, key_weight.size(2), dtype, absorbed, output_bias, attention)
    rows = inputs.rows.split(inputs.events)
    key, value = (project_events(rows, weight, num_heads) for weight in (key_weight, value_weight))
    query = linear(inputs.target, query_weight, query_bias)
    # The T query heads of a key head are neighbours.
    query = query.view(-1, num_queries, num_heads, head_width).transpose(1, 2).flatten(1, 2)
    table = None if bucket_bias is None else bucket_bias.repeat_interleave(num_queries, 1)
    attended = _attend(query.to(key.dtype), key, value, table=table, **options)
    attended = attended.view(-1, num_heads, num_queries, head_width).transpose(1, 2)
    return linear(attended.reshape(num_features, -1, query_weight.size(1)), output_weight, output_bias)


def attend_to_raw_events(
    target: Tensor,
    width: int,
    dtype: torch.dtype,
    absorbed: tuple[Tensor, Tensor, Tensor],
    output_bias: Tensor,
    attention: Callable[[Tensor], Tensor],
) -> Tensor:
    """The outputs [F, R, embedding_dim] of R candidates with absorbed projections, in training and in serving.

    Args:
        target: [F, R, D_e].
        width: D_x, of an event.
        dtype: of the events.
        absorbed: W_qk [F, T * H * D_x, D_e], b_qk [F, T * H * D_x] and W_vo [F, T * H * D_x, embedding_dim], the result
            of `jfi.ops.absorb_weights`.
        output_bias: [F, embedding_dim].
        attention: of query rows [F * R, T * H, D_x] to the events of their user.
    """
    w_qk, b_qk, w_vo = absorbed
    query = linear(target, w_qk, b_qk).reshape(-1, w_qk.size(1) // width, width)
    attended = attention(query.to(dtype))
    return linear(attended.reshape(target.size(0), -1, w_vo.size(1)), w_vo.mT, output_bias)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    indices: Tensor | None = None,
    inputs: GroupInputs,
    table: Tensor | None,
    bias: Bias | None,
    scale: float,
) -> Tensor:
    """[F * R, T * H, D] -> [F * R, T * H, E]; the bias tables [F * num_buckets, T * H] are as wide as the query.

    key: as of `jagged_attention`, with indices a table of packed digits.
    """
    candidates = inputs.candidates
    options = {"scale": scale, "max_visible": candidates.max_events}
    if not is_by_pair(bias, candidates.times is not None):
        return jagged_attention(
            query,
            key,
            value,
            query_offsets=candidates.offsets,
            key_offsets=inputs.offsets,
            indices=indices,
            key_bias=group_inputs.key_bias(inputs, table, query.size(1), query.dtype),
            value_scale=inputs.value_scale,
            query_time=candidates.times,
            key_time=candidates.event_times,
            **options,
        )
    # One call of the operator a feature, since each has its own table.
    num_features, num_rows, _ = inputs.target.shape
    by_row, by_event = [num_rows] * num_features, inputs.events
    queries, query_times = query.split(by_row), candidates.times.split(by_row)
    key_times = candidates.event_times.split(by_event)
    keys = key.split(by_event) if indices is None else [key] * num_features
    parts = (None if x is None else x.split(by_event) for x in (value, indices, inputs.value_scale))
    values, rows, value_scales = ([None] * num_features if part is None else part for part in parts)
    query_offsets, key_offsets = (_by_feature(x, num_features) for x in (candidates.offsets, inputs.offsets))
    tables, attended = table.to(query.dtype).chunk(num_features), []
    for f in range(num_features):
        if isinstance(bias, TimeBias):
            options["time_bias"] = tables[f]
        else:  # distances begin at 1, and the operator's row 0 is for 0; none reaches bucket 63
            options["position_bias"] = F.pad(tables[f][: MOST_BUCKETS - 1], (0, 0, 1, 0))
        attended.append(
            jagged_attention(
                queries[f],
                keys[f],
                values[f],
                query_offsets=query_offsets[f],
                key_offsets=key_offsets[f],
                indices=rows[f],
                value_scale=value_scales[f],
                query_time=query_times[f],
                key_time=key_times[f],
                **options,
            )
        )
    return attended[0] if num_features == 1 else torch.cat(attended)


def _by_feature(offsets: Tensor, num_features: int) -> list[Tensor]:
    """[F * U + 1] -> F times [U + 1], each from 0 on."""
    if num_features == 1:
        return [offsets]
    return [F.pad(lengths.cumsum(0), (1, 0)) for lengths in offsets.diff().view(num_features, -1).unbind()]


def attention_weights(
    inputs: GroupInputs, weights: tuple[Tensor, ...], bucket_bias: Tensor | None, bias: Bias | None, num_heads: int
) -> tuple[Tensor, Tensor]:
    """The probabilities [P, T, H] of the pairs of candidate and event, and how many pairs each candidate has [F * R].

    A candidate has a pair with every event of its user; the weight of an event that it does not see is 0.
    """
    candidates, history = inputs.candidates, inputs.history
    num_features, num_rows, _ = inputs.target.shape
    w_qk, b_qk, _ = absorb_weights(weights[:5], num_heads)
    query = linear(inputs.target, w_qk, b_qk).unflatten(2, (-1, history.size(1))).flatten(0, 1)
    query = query.to(history.dtype) / math.sqrt(weights[2].size(1) // num_heads)  # [F * R, T * H, D_x]
    num_queries = query.size(1) // num_heads

    counts = candidates.offsets.diff()
    lengths = inputs.offsets.diff().repeat_interleave(counts, output_size=query.size(0))
    begins = inputs.offsets[:-1].repeat_interleave(counts, output_size=query.size(0))
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    candidate = torch.arange(query.size(0), device=query.device).repeat_interleave(lengths)
    place = torch.arange(candidate.size(0), device=query.device) - offsets[candidate]  # of the event in its history
    event = begins[candidate] + place

    rows = history[event]
    scores = torch.stack([torch.linalg.vecdot(rows, one[candidate]) for one in query.unbind(1)], dim=1)  # [P, T * H]
    is_relative = is_by_pair(bias, candidates.times is not None)
    added = group_inputs.key_bias(inputs, None if is_relative else bucket_bias, num_heads, history.dtype)
    added = None if added is None else added[event]
    if candidates.times is not None:
        age = reference.ages(candidates.times[candidate], candidates.event_times[event])
        visible = age > 0
        seen = torch.zeros_like(lengths).index_add_(0, candidate, visible.to(lengths.dtype))
        distance = seen[candidate] - place
        if is_relative:
            count, first = (age, 0) if isinstance(bias, TimeBias) else (distance, 1)
            num_buckets = bucket_bias.size(0) // num_features
            bucket = (torch.frexp(count.double()).exponent - first).clamp(0, num_buckets - 1)
            added = bucket_bias[bucket + candidate // max(num_rows, 1) * num_buckets].to(history.dtype)
        if candidates.max_events is not None:
            visible &= distance <= candidates.max_events
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if added is not None:
        scores = scores + added.repeat(1, num_queries)
    return jagged_softmax(scores, offsets).unflatten(1, (num_queries, num_heads)), lengths
