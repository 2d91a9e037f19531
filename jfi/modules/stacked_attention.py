"""Multi-head target attention of several features in one launch, on plain tensors.

For one feature, with the combined target e [B, D_e] of each sample and its events x [S, D_x], h a head of width d and t
one of T queries:

    q_th = W_q,th e + b_q,th                            [B, d]
    p_th = softmax over the sample's events of (q_th · W_k,h x) / sqrt(d) + bias_h
    o    = W_o concat_{t,h}(sum over events of p_th c W_v,h x) + b_o          c the events' weights, if values have any

This is `torch.nn.MultiheadAttention` with T queries a target. A bias of the keys would add the same to all scores of a
query and cancel in the softmax; a bias of the values would be weighted by probabilities that sum to one, and so be part
of b_o. Hence neither exists. Keys and values can be projected on either side:

    targets' side    queries are projected by W_kᵀ W_q, outputs by W_o W_v     (`jfi.ops.absorbed_target_attention`)
    history's side   k_h = W_k,h x, v_h = W_v,h x                               (`jfi.ops.target_attention`)

The numbers are the same to rounding, and the parameters are the same. On the targets' side the S rows of the history
are never projected, and every head reads the same raw rows: scores and sums take 2 T H D_x multiply-adds an event. On
the history's side they take 2 T D, but the projections 2 D D_x: with D_x = D that is less only if T H > D + T, and it
writes two more tensors of the history's size. Hence the targets' side, unless T H > D. Where many ragged targets share
an event, it is projected once for all of them: `jfi.modules.ragged_attention.pays_to_project`.

Training begins at multiples of the identity: W_v = I, W_q = W_k = 2 I, W_o = 6 I / T for each query (and random numbers
are added to the queries if T > 1, to tell them apart). So the layer starts as a weighted sum of the raw events, more
similar ones with more weight. Random projections learn where the rest of the model makes the rows large, and hardly in
a DLRM: TorchRec draws rows with a spread of 1 / sqrt(num_embeddings), the mean of n events is sqrt(n) times smaller
still, and the gradients that its dot products send to the rows are lost among those of larger features.

Events that are semantic IDs are x = P d, d their digits: on the targets' side W_k P and W_v P take the places of W_k
and W_v, and kernels read the digits (`jfi.ops.digit_attention`).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.modules import inputs as group_inputs
from jfi.modules import ragged_attention
from jfi.modules.inputs import GroupInputs
from jfi.modules.projections import linear, project_events
from jfi.modules.sequence_configs import FeatureGroup, SequenceFeatureConfig, initial_bias
from jfi.modules.table_rows import join_words
from jfi.ops import absorb_weights, absorbed_target_attention, digit_attention, jagged_softmax, target_attention
from jfi.utils.context import without_autocast

# Whether targets are ragged is known only where there are tensors.
torch.fx.wrap("attend")

#: Initial W_q and W_k, and W_o summed over the queries, as multiples of the identity; benchmarks/NOTES.md has others.
SCORE_SCALE, OUTPUT_SCALE = 2.0, 6.0

#: Parameters of a feature. `jfi.ops.absorbed_target_attention` takes those of the projections in this order.
_PROJECTIONS = ("query_weight", "query_bias", "key_weight", "value_weight", "output_weight", "output_bias")
_PARAMETERS = (*_PROJECTIONS, "bucket_bias")


class FeatureAttention(nn.Module):
    """The parameters of one feature's target attention; `attend` stacks those of a group.

    Args:
        feature: the feature.
        target_width: width D_e of the combined targets.
        event_width: width D_x of the combined events.
        embedding_dim: width D of the projected queries over all heads, and of the output.
        num_heads: H, a divisor of `embedding_dim`.
        num_queries: T.
        device: where the parameters live, "meta" included.

    Parameters:
        query_weight [T * embedding_dim, D_e] and query_bias [T * embedding_dim], key_weight and value_weight
        [embedding_dim, D_x], output_weight [embedding_dim, T * embedding_dim] and output_bias [embedding_dim], laid out
        as in `nn.MultiheadAttention`; bucket_bias [num_buckets, H] where the feature's bias is learned, else None.
    """

    def __init__(
        self,
        feature: SequenceFeatureConfig,
        target_width: int,
        event_width: int,
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
        self.query_weight = parameter(queries, target_width)
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
        if self.bucket_bias is not None:
            table = self.bucket_bias.detach()
            table.copy_(initial_bias(self.bias, *table.shape))

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

    Returns:
        The parameters of the projections [F, ...], and the bias tables one below the other [F * num_buckets, H], None
        without one. Those of a single feature are views.
    """
    if len(parameters) == 1:
        *weights, table = parameters[0]
        return tuple([weight.unsqueeze(0) for weight in weights]), table
    *weights, tables = zip(*parameters, strict=True)
    table = None if tables[0] is None else torch.cat(tables)
    return tuple([torch.stack(weight) for weight in weights]), table


def attend(
    inputs: GroupInputs,
    group: FeatureGroup,
    parameters: list[tuple[Tensor | None, ...]],
    num_heads: int,
    project_history: bool,
    project_for_ragged: bool,
) -> Tensor:
    """Pools the events of a group's F features in one launch.

    The attention itself runs in the dtype of the history, which is never cast, or of its projections.

    Args:
        inputs: of the group.
        group: the features.
        parameters: by feature, as `FeatureAttention.own_parameters` returns them.
        num_heads: H.
        project_history: whether keys and values are projected on the history's side.
        project_for_ragged: whether they also are for ragged targets where that pays.

    Returns:
        The features' outputs [F, B, embedding_dim], in the parameters' dtype or autocast's; [F, R, ..] if ragged.
    """
    weights, bucket_bias = stack(parameters)
    bias = group.features[0].bias
    if inputs.digits and not (project_history and inputs.candidates is None):
        weights = _of_digits(inputs, weights)
    if inputs.candidates is not None:
        if project_for_ragged and not project_history:
            project_history = ragged_attention.pays_to_project(inputs, weights, num_heads)
        return ragged_attention.attend(inputs, weights, bucket_bias, bias, num_heads, project_history)
    if inputs.spread:
        names = [feature.name for feature in group.features]
        return _attend_to_spread(inputs, weights, bucket_bias, num_heads, names)
    if project_history:
        return _project_history(inputs, weights, bucket_bias, num_heads, group.max_seqlen)
    table = bucket_bias
    if table is None and bias is not None:
        table = group_inputs.key_bias(inputs, None, num_heads, inputs.fields[0].dtype)
    if inputs.digits:
        return _attend_to_digits(inputs, weights, table, num_heads)
    return absorbed_target_attention(
        inputs.target,
        inputs.fields if inputs.by_id is None else inputs.by_id,
        weights,
        offsets=inputs.offsets,
        num_heads=num_heads,
        key_bias=table,
        key_bias_index=inputs.bias_index,
        value_scale=inputs.value_scale,
        max_seqlen=group.max_seqlen,
    )


@torch.no_grad()
def attention_weights(
    inputs: GroupInputs, group: FeatureGroup, parameters: list[tuple[Tensor | None, ...]], num_heads: int
) -> list[JaggedTensor]:
    """Returns by feature the probabilities p [.., T, H] of the events, which sum to one over the events of a target.

    The arguments are those of `attend`.
    """
    weights, bucket_bias = stack(parameters)
    num_features = len(group.features)
    if inputs.candidates is not None:
        bias = group.features[0].bias
        values, lengths = ragged_attention.attention_weights(inputs, weights, bucket_bias, bias, num_heads)
        lengths = lengths.view(num_features, -1)
        values = values.split(lengths.sum(1).tolist())
    else:
        lengths = inputs.offsets.diff().view(num_features, -1)
        values = _event_weights(inputs, weights, bucket_bias, num_heads).split(inputs.events)
    return [JaggedTensor(rows, lengths=counts) for rows, counts in zip(values, lengths, strict=True)]


def _event_weights(
    inputs: GroupInputs, weights: tuple[Tensor, ...], bucket_bias: Tensor | None, num_heads: int
) -> Tensor:
    """[S, T, H] of dense targets."""
    history, offsets = inputs.history, inputs.offsets
    num_queries = weights[0].size(1) // weights[2].size(1)
    w_qk, b_qk, _ = absorb_weights(weights[:5], num_heads)
    query = linear(inputs.target, w_qk, b_qk).view(-1, num_queries * num_heads, history.size(1))
    query = query.to(history.dtype) / math.sqrt(weights[2].size(1) // num_heads)  # [F * B, T * H, D_x]
    sample = torch.arange(query.size(0), device=history.device)
    sample = torch.repeat_interleave(sample, offsets.diff(), output_size=history.size(0))
    # One query at a time: no more memory than the history's, however many queries.
    scores = [torch.linalg.vecdot(history, one[sample]) for one in query.unbind(1)]
    scores = torch.stack(scores, dim=1)  # [S, T * H]
    bias = group_inputs.key_bias(inputs, bucket_bias, num_heads, history.dtype)
    if bias is not None:
        scores = scores + bias.repeat(1, num_queries)
    return jagged_softmax(scores, offsets).unflatten(1, (num_queries, num_heads))


def _of_digits(inputs: GroupInputs, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The weights with W_k P and W_v P in the places of W_k and W_v: those of the digits d of events x = P d."""
    query, query_bias, key, value, *output = weights
    with without_autocast(inputs.fields[0].device.type):
        digit_weight = inputs.digits[0].embedding.digit_weight().to(key.dtype)
        return query, query_bias, torch.matmul(key, digit_weight), torch.matmul(value, digit_weight), *output


def _attend_to_digits(inputs: GroupInputs, weights: tuple[Tensor, ...], table: Tensor | None, num_heads: int) -> Tensor:
    """`attend` to the digits of events, with the weights of `_of_digits`."""
    words, indices = join_words(inputs.digits)

    def attend(query: Tensor, scale: float) -> Tensor:
        return digit_attention(
            query,
            words,
            offsets=inputs.offsets,
            indices=indices,
            key_bias=table,
            key_bias_index=inputs.bias_index,
            value_scale=inputs.value_scale,
            scale=scale,
        )

    return _absorbed(inputs, weights, num_heads, attend)


def _attend_to_spread(
    inputs: GroupInputs, weights: tuple[Tensor, ...], table: Tensor | None, num_heads: int, features: list[str]
) -> Tensor:
    """`attend` to events whose rows lie on several ranks."""

    def attend(query: Tensor, scale: float) -> Tensor:
        if len(inputs.spread) == 1:
            return inputs.spread[0].attend(query, table, scale)
        by_feature, found = query.chunk(len(features)), {}
        for events in inputs.spread:
            own = torch.cat([by_feature[features.index(name)] for name in events.feature_names])
            attended = events.attend(own, table, scale).chunk(len(events.feature_names))
            found |= dict(zip(events.feature_names, attended, strict=True))
        return torch.cat([found[name] for name in features])

    return _absorbed(inputs, weights, num_heads, attend)


def _absorbed(
    inputs: GroupInputs,
    weights: tuple[Tensor, ...],
    num_heads: int,
    attend: Callable[[Tensor, float], Tensor],
) -> Tensor:
    """[F, B, D]: the absorbed projections around an attention to raw events of the width of the key weights.

    Args:
        inputs: for the targets, and the dtype of the events.
        weights: as of `absorbed_target_attention`.
        num_heads: H.
        attend: from queries [F * B, T, H, D_x] and the factor of the scores to outputs of this shape.
    """
    *projections, output_bias = weights
    device = inputs.fields[0].device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else projections[0].dtype
    with without_autocast(device):
        w_qk, b_qk, w_vo = absorb_weights(tuple(projections), num_heads, dtype)
        num_queries = projections[0].size(1) // projections[2].size(1)
        query = linear(inputs.target, w_qk, b_qk).view(-1, num_queries, num_heads, projections[2].size(2))
        scale = 1 / math.sqrt(projections[2].size(1) // num_heads)
        attended = attend(query.to(inputs.fields[0].dtype), scale)
        return linear(attended.reshape(output_bias.size(0), -1, w_vo.size(1)), w_vo.mT, output_bias.to(dtype))


def _project_history(
    inputs: GroupInputs,
    weights: tuple[Tensor, ...],
    bucket_bias: Tensor | None,
    num_heads: int,
    max_seqlen: int | None,
) -> Tensor:
    """`attend` on the history's side."""
    query_weight, query_bias, key_weight, value_weight, output_weight, output_bias = weights
    query = linear(inputs.target, query_weight, query_bias)
    rows = inputs.history.split(inputs.events)
    key, value = (project_events(rows, weight, num_heads) for weight in (key_weight, value_weight))
    table = bucket_bias
    if table is None:
        table = group_inputs.key_bias(inputs, None, num_heads, key.dtype)
    attended = target_attention(
        query.view(-1, query_weight.size(1) // key_weight.size(1), num_heads, key.size(2)).to(key.dtype),
        key,
        value,
        offsets=inputs.offsets,
        key_bias=table,
        key_bias_index=inputs.bias_index,
        value_scale=inputs.value_scale,
        max_seqlen=max_seqlen,
    )
    return linear(attended.reshape(output_bias.size(0), -1, output_weight.size(2)), output_weight, output_bias)
