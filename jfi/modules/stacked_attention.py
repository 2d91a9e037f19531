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

Events that are semantic IDs are x = P d, d their digits: on the targets' side W_k P and W_v P take the places of W_k
and W_v, and kernels read the digits (`jfi.ops.digit_attention`).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.context import without_autocast
from jfi.modules import inputs as group_inputs
from jfi.modules import ragged_attention
from jfi.modules.inputs import GroupInputs
from jfi.modules.projections import linear, project_events
from jfi.modules.sequence_configs import Bias, FeatureGroup, initial_bias
from jfi.modules.table_rows import join_words
from jfi.ops import absorb_weights, absorbed_target_attention, digit_attention, jagged_softmax, target_attention

# Whether targets are ragged is known only where there are tensors.
torch.fx.wrap("_attend")


class StackedTargetAttention(nn.Module):
    """Target attention of F features alike, whose parameters are stacked along the first dimension.

    Args:
        group: the F features, with combined targets of one width D_e and combined events of one width D_x.
        embedding_dim: width D of the projected queries over all heads, and of the output.
        num_heads: H, a divisor of `embedding_dim`.
        num_queries: T.
        project_history: whether keys and values are projected on the history's side.
        project_for_ragged: whether they also are for ragged targets where that pays.
        device: where the parameters live, "meta" included.

    Parameters:
        query_weight [F, T * embedding_dim, D_e] and query_bias [F, T * embedding_dim], key_weight and value_weight
        [F, embedding_dim, D_x], output_weight [F, embedding_dim, T * embedding_dim] and output_bias
        [F, embedding_dim], laid out as in `nn.MultiheadAttention`; bucket_bias [R, H], the learned bias tables of
        all features one below the other, where the bias is learned.
    """

    def __init__(
        self,
        group: FeatureGroup,
        embedding_dim: int,
        num_heads: int,
        num_queries: int,
        project_history: bool = False,
        project_for_ragged: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.group, self.features, self.num_features = group, group.features, len(group.features)
        self.num_heads, self.num_queries = num_heads, num_queries
        self.project_history, self.project_for_ragged = project_history, project_for_ragged
        self.max_seqlen = group.max_seqlen

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device))

        queries = num_queries * embedding_dim
        target_width = group.features[0].target_width(group.width_of_targets)
        sequence_width = group.features[0].sequence_width(group.embedding_dim)
        bucket_rows = self.num_features * group.features[0].num_buckets
        self.query_weight = parameter(self.num_features, queries, target_width)
        self.query_bias = parameter(self.num_features, queries)
        self.key_weight = parameter(self.num_features, embedding_dim, sequence_width)
        self.value_weight = parameter(self.num_features, embedding_dim, sequence_width)
        self.output_weight = parameter(self.num_features, embedding_dim, queries)
        self.output_bias = parameter(self.num_features, embedding_dim)
        self.register_parameter("bucket_bias", parameter(bucket_rows, num_heads) if bucket_rows else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every projection anew as in Glorot & Bengio (2010), and resets the biases."""
        queries = self.query_weight.detach().unflatten(1, (self.num_queries, -1)).flatten(0, 1)
        for weight in (queries, self.key_weight, self.value_weight, self.output_weight):
            for matrix in weight.unbind():
                nn.init.xavier_uniform_(matrix)
        nn.init.zeros_(self.query_bias)
        nn.init.zeros_(self.output_bias)
        if self.bucket_bias is not None:
            tables = self.bucket_bias.detach().chunk(self.num_features)
            for feature, table in zip(self.features, tables, strict=True):
                table.copy_(initial_bias(feature.bias, *table.shape))

    def forward(self, inputs: GroupInputs) -> Tensor:
        """The features' outputs [F, B, embedding_dim], in the parameters' dtype or autocast's; [F, R, ..] if ragged.

        The attention itself runs in the dtype of the history, which is never cast, or of its projections.
        """
        projects = self.project_history, self.project_for_ragged
        names = [feature.name for feature in self.features]
        options = (self.features[0].bias, self.num_heads, *projects, self.max_seqlen, names)
        return _attend(inputs, self.weights, self.bucket_bias, *options)

    @torch.no_grad()
    def attention_weights(self, inputs: GroupInputs) -> list[JaggedTensor]:
        """By feature the probabilities p [.., T, H] of the events, which sum to one over the events of a target."""
        if inputs.candidates is not None:
            bias = self.features[0].bias
            values, lengths = ragged_attention.attention_weights(
                inputs, self.weights, self.bucket_bias, bias, self.num_heads
            )
            lengths = lengths.view(self.num_features, -1)
            values = values.split(lengths.sum(1).tolist())
        else:
            lengths = inputs.offsets.diff().view(self.num_features, -1)
            values = self._event_weights(inputs).split(inputs.events)
        return [JaggedTensor(rows, lengths=counts) for rows, counts in zip(values, lengths, strict=True)]

    def _event_weights(self, inputs: GroupInputs) -> Tensor:
        """[S, T, H] of dense targets."""
        history, offsets, num_heads = inputs.history, inputs.offsets, self.num_heads
        w_qk, b_qk, _ = absorb_weights(self.weights[:5], num_heads)
        query = linear(inputs.target, w_qk, b_qk).view(-1, self.num_queries * num_heads, history.size(1))
        query = query.to(history.dtype) / math.sqrt(self.key_weight.size(1) // num_heads)  # [F * B, T * H, D_x]
        sample = torch.arange(query.size(0), device=history.device)
        sample = torch.repeat_interleave(sample, offsets.diff(), output_size=history.size(0))
        # One query at a time: no more memory than the history's, however many queries.
        scores = [torch.linalg.vecdot(history, one[sample]) for one in query.unbind(1)]
        scores = torch.stack(scores, dim=1)  # [S, T * H]
        bias = group_inputs.key_bias(inputs, self.bucket_bias, num_heads, history.dtype)
        if bias is not None:
            scores = scores + bias.repeat(1, self.num_queries)
        return jagged_softmax(scores, offsets).unflatten(1, (self.num_queries, num_heads))

    def stacked_parameters(self) -> dict[str, Tensor]:
        """All parameters by name as [F, ...], the learned bias tables too."""
        parameters = dict(self.named_parameters(recurse=False))
        if self.bucket_bias is not None:
            parameters["bucket_bias"] = self.bucket_bias.unflatten(0, (self.num_features, -1))
        return parameters

    def leave_meta(self, name: str, device: torch.device) -> Tensor:
        """Gives a parameter memory on a device, and returns it as [F, ...]."""
        old = getattr(self, name)
        setattr(self, name, nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad))
        return self.stacked_parameters()[name]

    def extra_repr(self) -> str:
        return f"features={[feature.name for feature in self.features]}, project_history={self.project_history}"

    # AttentionGroups saves and loads the group's weights by feature, and calls the hooks that run before loading.
    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *_: object) -> None:
        pass

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The parameters of the projections, as `jfi.ops.absorbed_target_attention` takes them."""
        query, output = (self.query_weight, self.query_bias), (self.output_weight, self.output_bias)
        return (*query, self.key_weight, self.value_weight, *output)


def _attend(
    inputs: GroupInputs,
    weights: tuple[Tensor, ...],
    bucket_bias: Tensor | None,
    bias: Bias | None,
    num_heads: int,
    project_history: bool,
    project_for_ragged: bool,
    max_seqlen: int | None,
    features: list[str],
) -> Tensor:
    """`StackedTargetAttention.forward`; the bias is that of the features, which have these names."""
    if inputs.digits and not (project_history and inputs.candidates is None):
        weights = _of_digits(inputs, weights)
    if inputs.candidates is not None:
        if project_for_ragged and not project_history:
            project_history = ragged_attention.pays_to_project(inputs, weights, num_heads)
        return ragged_attention.attend(inputs, weights, bucket_bias, bias, num_heads, project_history)
    if inputs.spread:
        return _attend_to_spread(inputs, weights, bucket_bias, num_heads, features)
    if project_history:
        return _project_history(inputs, weights, bucket_bias, num_heads, max_seqlen)
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
        max_seqlen=max_seqlen,
    )


def _of_digits(inputs: GroupInputs, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The weights with W_k P and W_v P in the places of W_k and W_v: those of the digits d of events x = P d."""
    query, query_bias, key, value, *output = weights
    with without_autocast(inputs.fields[0].device.type):
        digit_weight = inputs.digits[0].embedding.digit_weight().to(key.dtype)
        return query, query_bias, torch.matmul(key, digit_weight), torch.matmul(value, digit_weight), *output


def _attend_to_digits(inputs: GroupInputs, weights: tuple[Tensor, ...], table: Tensor | None, num_heads: int) -> Tensor:
    """`_attend` to the digits of events, with the weights of `_of_digits`."""
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
    """`_attend` to events whose rows lie on several ranks."""

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
    """`_attend` on the history's side."""
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
