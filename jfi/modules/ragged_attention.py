"""Attention of ragged targets: R candidates of U users over one timeline a user.

The formula is that of `jfi.modules.stacked_attention`, with `jfi.ops.jagged_attention` instead of target
attention: the query rows of a candidate are heads of that operator, T · H of them. On the targets' side all share the
one key head of raw events; on the history's side each of the H key heads serves T.

With times a candidate sees the events that are strictly older than itself, and a learned bias by position or age is
looked up for each pair of candidate and event. For a history cut to what the candidate sees, dense targets give the
same numbers: the newest event that a candidate sees has distance 1 in the operator, and d = 0 in PositionBias.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jfi import reference
from jfi.modules.events import Events, is_by_pair
from jfi.modules.sequence_configs import Bias, TimeBias
from jfi.ops import jagged_attention
from jfi.tables.table_rows import join_words
from jfi.utils.context import padding_state
from jfi.utils.operands import MAX_BUCKETS


def pays_to_project(events: Events, weights: tuple[Tensor, ...], num_heads: int) -> bool:
    """Returns whether projecting the history costs less than attending to raw events in every head, by multiply-adds.

    Only on a CPU, where they are what counts, and never in a compiled graph, which serves every number of candidates.
    In the one large product of a projection they take less than half the time that they take in those of users.
    """
    if torch.compiler.is_compiling() or not events.target.is_cpu:
        return False
    output_width, event_width = weights[2].shape[1:]
    num_queries = weights[0].size(1) // output_width
    rows, users = events.target.shape[:-1].numel(), events.offsets.size(0) - 1
    saved_by_pair = 2 * num_queries * (num_heads * event_width - output_width)
    return rows * saved_by_pair > users * output_width * event_width


def attend(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    events: Events,
    table: Tensor | None,
    bias: Bias | None,
    scale: float,
    operator: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Attends from R candidates of F features to the events of their users: [F * R, T, H, D] -> as many numbers.

    Key and value are projected events [S, H, D], or None for the raw events; the table [F * num_buckets, H] has the
    learned values of the features' bias. The operator is `jagged_attention`, or another that takes its arguments.
    """
    operator = jagged_attention if operator is None else operator
    if padding_state.is_padded:
        raise ValueError(
            "ragged targets cannot be padded, as captured steps need: rows behind the last candidate are not written"
        )
    (num_features, num_rows, _), (num_queries, num_heads) = events.stacked_target.shape, query.shape[1:3]
    is_projected = key is not None
    if is_projected:  # the T query heads of a key head are neighbours
        query = query.transpose(1, 2)
        table = None if table is None else table.repeat_interleave(num_queries, 1)
    else:
        key = join_words(events.digits) if events.digits else events.history.unsqueeze(1)
        table = None if table is None else table.repeat(1, num_queries)
    query = query.flatten(1, 2)
    of_queries = {"query": query, "query_time": events.target_times}
    of_events = {"key": key, "value": value, "value_scale": events.value_scale, "key_time": events.times}
    options = {"scale": scale, "max_visible": events.max_visible}
    if is_by_pair(bias, events.target_times is not None):
        # One call of the operator a feature, since the tables differ.
        parts = {name: x.split([num_rows] * num_features) for name, x in of_queries.items()}
        parts |= {name: x.split(events.counts) for name, x in of_events.items() if x is not None}
        parts["query_offsets"] = _by_feature(events.target_offsets, num_features)
        parts["key_offsets"] = _by_feature(events.offsets, num_features)
        outputs = []
        for f, feature_table in enumerate(table.to(query.dtype).chunk(num_features)):
            if isinstance(bias, TimeBias):
                options["time_bias"] = feature_table
            else:  # distances begin at 1, and the operator's row 0 is for 0; none reaches bucket 63
                options["position_bias"] = F.pad(feature_table[: MAX_BUCKETS - 1], (0, 0, 1, 0))
            outputs.append(operator(**{name: part[f] for name, part in parts.items()}, **options))
        attended = outputs[0] if num_features == 1 else torch.cat(outputs)
    else:
        options |= {"query_offsets": events.target_offsets, "key_offsets": events.offsets}
        key_bias = events.key_bias(table, query.size(1), query.dtype)
        attended = operator(**of_queries, **of_events, key_bias=key_bias, **options)
    return attended.view(-1, num_heads, num_queries, query.size(2)).transpose(1, 2) if is_projected else attended


def _by_feature(offsets: Tensor, num_features: int) -> list[Tensor]:
    """Splits [F * U + 1] into F times [U + 1], each from 0 on."""
    if num_features == 1:
        return [offsets]
    return [F.pad(lengths.cumsum(0), (1, 0)) for lengths in offsets.diff().view(num_features, -1).unbind()]


def weights_of_pairs(
    query: Tensor,
    key: Tensor,
    *,
    query_offsets: Tensor,
    key_offsets: Tensor,
    scale: float,
    query_time: Tensor | None,
    key_time: Tensor | None,
    key_bias: Tensor | None = None,
    value: None = None,
    value_scale: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Returns the probabilities [P, H] of `jagged_attention`, by query: those of the key rows [S, 1, D] of its sample.

    The weight of a key that the query does not see is 0.
    """
    times = None if query_time is None else (query_time, key_time)
    arguments = (query, key, None, query_offsets, key_offsets, False, None, key_bias, scale, times)
    return reference.jagged_attention(*arguments, **options, returns_weights=True)[0].to(query.dtype)
