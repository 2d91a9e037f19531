"""Multi-head target attention of several features in one launch, on plain tensors.

For one feature, with the combined target e [B, D_e] of each sample and its events x [S, D_x], h a head of width d and t
one of T queries:

    q_th = W_q,th e + b_q,th                            [B, d]
    p_th = softmax over the sample's events of (q_th · W_k,h x) / sqrt(d) + bias_h
    o    = W_o concat_{t,h}(sum over events of p_th c W_v,h x) + b_o          c the events' weights, if values have any

This is `torch.nn.MultiheadAttention` with T queries a target. A bias of the keys would add the same to all scores of a
query and cancel in the softmax; a bias of the values would be weighted by probabilities that sum to one, and so be part
of b_o. Hence neither exists. Keys and values can be projected on either side:

    targets' side    queries are projected by W_kᵀ W_q, outputs by W_o W_v     (`attend_absorbed`)
    history's side   k_h = W_k,h x, v_h = W_v,h x                               (`jfi.ops.jagged_attention`)

The numbers are the same to rounding, and the parameters are the same. On the targets' side the S rows of the history
are never projected, and every head reads the same raw rows: scores and sums take 2 T H D_x multiply-adds an event. On
the history's side they take 2 T D, but the projections 2 D D_x and two more tensors of the history's size. Hence the
targets' side, but where many ragged targets share an event: `jfi.modules.ragged_attention.pays_to_project`.

Training begins at multiples of the identity: W_v = I, W_q = W_k = 2 I, W_o = 6 I / T for each query (and random numbers
are added to the queries if T > 1, to tell them apart). So the layer starts as a weighted sum of the raw events, more
similar ones with more weight. Random projections learn where the rest of the model makes the rows large, and hardly in
a DLRM: TorchRec draws rows with a spread of 1 / sqrt(num_embeddings), the mean of n events is sqrt(n) times smaller
still, and the gradients that its dot products send to the rows are lost among those of larger features.

Events that are semantic IDs are x = P d, d their digits: on the targets' side W_k P and W_v P replace W_k
and W_v, and kernels read the digits (`jfi.ops.digit_attention`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.modules import ragged_attention
from jfi.modules.events import Events
from jfi.modules.sequence_configs import FeatureGroup, SequenceFeatureConfig, reset_bias
from jfi.ops import digit_attention
from jfi.ops.absorbed_target_attention import absorb, affine, attend_absorbed, compose
from jfi.tables.table_rows import digit_numbers, join, join_words
from jfi.utils.context import without_autocast

# Whether targets are ragged is known only where there are tensors.
torch.fx.wrap("attend")

#: Initial W_q and W_k, and W_o summed over the queries, as multiples of the identity; others were measured in
#: benchmarks/notes/defaults.md.
SCORE_SCALE, OUTPUT_SCALE = 2.0, 6.0

#: Parameters of a feature. `attend_absorbed` takes those of the projections in this order.
_PROJECTIONS = ("query_weight", "query_bias", "key_weight", "value_weight", "output_weight", "output_bias")
_PARAMETERS = (*_PROJECTIONS, "bucket_bias")


class FeatureAttention(nn.Module):
    """The parameters of one feature's target attention; `attend` stacks those of a group.

    Of targets that combined are D_e wide, events D_x, queries and outputs D = embedding_dim, they are query_weight
    [T * D, D_e] and query_bias [T * D], key_weight and value_weight [D, D_x], output_weight [D, T * D] and output_bias
    [D], laid out as in `nn.MultiheadAttention`; bucket_bias [num_buckets, H] where the feature's bias is learned, else
    None.
    """

    def __init__(
        self,
        feature: SequenceFeatureConfig,
        target_dim: int,
        event_dim: int,
        embedding_dim: int,
        num_heads: int,
        num_queries: int,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.bias, self.num_queries = feature.bias, num_queries

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device))

        queries, buckets = num_queries * embedding_dim, feature.num_buckets
        event_width = feature.sequence_width(event_dim)
        self.query_weight = parameter(queries, feature.target_width(target_dim))
        self.query_bias = parameter(queries)
        self.key_weight = parameter(embedding_dim, event_width)
        self.value_weight = parameter(embedding_dim, event_width)
        self.output_weight = parameter(embedding_dim, queries)
        self.output_bias = parameter(embedding_dim)
        self.register_parameter("bucket_bias", parameter(buckets, num_heads) if buckets else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the projections to multiples of the identity, as the module's docstring says, and resets the biases."""
        queries = self.query_weight.detach().unflatten(0, (self.num_queries, -1))
        outputs = self.output_weight.detach().unflatten(1, (self.num_queries, -1))
        for query, output in zip(queries.unbind(0), outputs.unbind(1), strict=True):
            query.copy_(_identity(query, SCORE_SCALE))
            if self.num_queries > 1:
                query += nn.init.xavier_uniform_(torch.empty_like(query))
            output.copy_(_identity(output, OUTPUT_SCALE / self.num_queries))
        self.key_weight.copy_(_identity(self.key_weight, SCORE_SCALE))
        self.value_weight.copy_(_identity(self.value_weight))
        nn.init.zeros_(self.query_bias)
        nn.init.zeros_(self.output_bias)
        reset_bias(self.bucket_bias, self.bias)

    def own_parameters(self) -> tuple[Tensor | None, ...]:
        """Returns the six parameters of the projections and `bucket_bias`."""
        if tuple(self._parameters) == _PARAMETERS:  # 20 times faster than nn.Module's getattr, which many features feel
            return tuple(self._parameters.values())
        return tuple([getattr(self, name) for name in _PARAMETERS])  # some are parametrized or pruned


def _identity(like: Tensor, scale: float = 1.0) -> Tensor:
    """Returns `scale` times the identity in the shape of `like`, repeated along the longer side.

    Of concatenated fields it takes the sum; a narrower input it repeats.
    """
    rows, columns = like.shape
    width = min(rows, columns)
    eye = torch.eye(width, dtype=like.dtype, device=like.device)
    return scale * eye.repeat(-(-rows // width), -(-columns // width))[:rows, :columns]


def stack(parameters: list[tuple[Tensor | None, ...]]) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Stacks the `own_parameters` of F features alike, so that one launch serves all.

    Returns the parameters of the projections [F, ...], and the bias tables one below the other [F * num_buckets, H],
    None without one. Those of a single feature are views.
    """
    if len(parameters) == 1:
        *weights, table = parameters[0]
        return tuple([weight.unsqueeze(0) for weight in weights]), table
    *weights, tables = zip(*parameters, strict=True)
    table = None if tables[0] is None else torch.stack(tables).flatten(0, 1)  # whose gradient is cut faster than cat's
    return tuple([torch.stack(weight) for weight in weights]), table


def attend(
    events: Events,
    group: FeatureGroup,
    parameters: list[tuple[Tensor | None, ...]],
    num_heads: int,
) -> Tensor:
    """Pools the events of a group's F features in one launch to [B, F * embedding_dim]; [R, ..] if ragged.

    The attention itself runs in the dtype of the history, which is never cast, or of its projections; the outputs have
    the dtype of the parameters, which are `own_parameters` of each feature, or that of autocast.
    """
    is_ragged, scale = events.target_offsets is not None, 1 / math.sqrt(parameters[0][2].size(0) // num_heads)
    if not (is_ragged or events.remote or events.digits):
        # Of one feature as they are: each view would be a node of autograd's graph.
        weights, table = (parameters[0][:6], parameters[0][6]) if len(parameters) == 1 else stack(parameters)
        history = events.fields if events.by_id is None else events.by_id
        options = _options(events, table, scale, num_heads, events.fields[0].dtype)
        options |= {"num_heads": num_heads, "max_seqlen": group.max_seqlen}
        out = attend_absorbed(events.target, history, weights, **options)
        return out if len(parameters) == 1 else _by_sample(out)
    weights, table = stack(parameters)
    if events.digits:  # those of the digits d of events x = P d
        query, query_bias, key, value, *output = weights
        with without_autocast(events.fields[0].device.type):
            digit_weight = events.digits[0].embedding.digit_weight().to(key.dtype)
            weights = query, query_bias, torch.matmul(key, digit_weight), torch.matmul(value, digit_weight), *output
    if is_ragged:
        bias = group.features[0].bias
        attention = partial(ragged_attention.attend, events=events, table=table, bias=bias, scale=scale)
        if ragged_attention.pays_to_project(events, weights, num_heads):
            return _by_sample(_projected(events, weights, num_heads, attention))
    elif events.remote:
        attention = partial(_attend_to_remote, events, group, table, scale)
    else:
        attention = partial(_attend_to_digits, events, table, scale)
    return _by_sample(compose(events.stacked_target, weights, num_heads, events.fields[0], attention))


def _by_sample(out: Tensor) -> Tensor:
    """Returns outputs [F, B, D] as [B, F * D]."""
    return out.transpose(0, 1).flatten(1)


@torch.no_grad()
def attention_weights(
    events: Events, group: FeatureGroup, parameters: list[tuple[Tensor | None, ...]], num_heads: int
) -> list[JaggedTensor]:
    """Returns by feature the probabilities p [.., T, H] of the events, which sum to one over the events of a target.

    The arguments are those of `attend`.
    """
    (weights, table), history = stack(parameters), events.history
    w_qk, b_qk, _ = absorb(weights[:5], num_heads, weights[0].dtype)
    query = affine(b_qk, events.stacked_target, w_qk).unflatten(2, (-1, num_heads, history.size(1))).flatten(0, 1)
    offsets = events.target_offsets
    if offsets is None:  # dense targets are the only candidates of their samples
        offsets = torch.arange(query.size(0) + 1, device=query.device)
    events = replace(events, fields=(history,), by_id=None, digits=(), target_offsets=offsets)
    scale = 1 / math.sqrt(weights[2].size(1) // num_heads)
    options = {"table": table, "bias": group.features[0].bias, "scale": scale}
    operator = ragged_attention.weights_of_pairs
    found = ragged_attention.attend(query.to(history.dtype), events=events, operator=operator, **options)
    lengths = events.offsets.diff().repeat_interleave(offsets.diff()).view(len(group.features), -1)
    values = found.unflatten(1, query.shape[1:3]).split(lengths.sum(1).tolist())
    return [JaggedTensor(rows, lengths=counts) for rows, counts in zip(values, lengths, strict=True)]


def _projected(events: Events, weights: tuple[Tensor, ...], num_heads: int, attention: Callable[..., Tensor]) -> Tensor:
    """Returns the outputs [F, R, D] of ragged targets, with keys and values projected on the history's side.

    The attention is that of queries [F * R, T, H, D / H] to keys and values [S, H, D / H].
    """
    query_weight, query_bias, key_weight, value_weight, output_weight, output_bias = weights
    query = affine(query_bias, events.stacked_target, query_weight)
    rows = digit_numbers(events.digits) if events.digits else events.history
    by_feature = rows.split(events.counts)
    key, value = (_project(by_feature, weight, num_heads) for weight in (key_weight, value_weight))
    query = query.view(-1, query_weight.size(1) // key_weight.size(1), num_heads, key.size(2))
    attended = attention(query.to(key.dtype), key, value)
    return affine(output_bias, attended.reshape(output_bias.size(0), -1, output_weight.size(2)), output_weight)


def _project(rows: tuple[Tensor, ...], weight: Tensor, num_heads: int) -> Tensor:
    """Returns each feature's events [.., D_x] times its weight [D, D_x], concatenated: [S, H, D / H]."""
    weight = weight.to(rows[0].dtype)
    found = [functional.linear(rows[f], weight[f]) for f in range(len(rows))]
    found = found[0] if len(rows) == 1 else torch.cat(found)
    return found.view(-1, num_heads, weight.size(1) // num_heads)


def _options(events: Events, table: Tensor | None, scale: float, num_heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """Returns what target attention takes of the events apart from keys and values."""
    return {
        "offsets": events.offsets,
        "key_bias": events.key_bias(None, num_heads, dtype) if table is None else table,
        "key_bias_index": events.bias_index,
        "value_scale": events.value_scale,
        "scale": scale,
    }


def _attend_to_digits(events: Events, table: Tensor | None, scale: float, query: Tensor) -> Tensor:
    options = _options(events, table, scale, query.size(2), query.dtype)
    return digit_attention(query, join_words(events.digits), **options)


def _attend_to_remote(events: Events, group: FeatureGroup, table: Tensor | None, scale: float, query: Tensor) -> Tensor:
    """Attends to events whose rows lie on several ranks."""
    names, found = [feature.name for feature in group.features], dict[str, Tensor]()

    def by_feature(x: Tensor) -> dict[str, Tensor]:
        return dict(zip(names, x.chunk(len(names)), strict=True))

    queries, tables = by_feature(query), {} if table is None else by_feature(table)
    for part in events.remote:
        found |= part.attend(queries, tables, scale)
    return join([found[name] for name in names])
