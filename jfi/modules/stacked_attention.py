"""Multi-head target attention of several features in one launch, on plain tensors.

For one feature, with the combined target e [B, D_e] of each sample and its events x [S, D_x], h a head of width d and t
one of T queries:

    q_th = W_q,th e + b_q,th                            [B, d]
    p_th = softmax over the sample's events of (q_th · W_k,h x) / sqrt(d) + bias_h
    o    = W_o concat_{t,h}(sum over events of p_th c W_v,h x) + b_o          c the events' value scale, if any

This is `torch.nn.MultiheadAttention` with T queries a target. A key bias adds the same to all scores of a query and
cancels in the softmax; a value bias is added whole by probabilities that sum to one and merges into b_o. So neither
exists. The keys and values can be projected on either side, since q · W_k x = W_kᵀ q · x, and a sum commutes with W_v:

    targets' side    q'_th = W_k,hᵀ q_th     a_th = sum of p_th c x       o = W_o concat(W_v,h a_th) + b_o
    history's side   k_h = W_k,h x, v_h = W_v,h x       a_th = sum of p_th c v_h           o = W_o concat(a_th) + b_o

The numbers are the same to rounding, and the parameters are the same. On the targets' side the S rows of the history
are never projected, and every head reads the same raw rows: scores and sums take 2 T H D_x multiply-adds an event. On
the history's side they take 2 T D, but the projections 2 D D_x: with D_x = D that is less only where T H > D + T, and
it writes two more tensors of the history's size. Hence the targets' side, unless T H > D.

There W_q is merged with W_k and W_o with W_v, weights with weights:

    q' = W_qk e + b_qk       W_qk,th = W_k,hᵀ W_q,th [D_x, D_e]      b_qk,th = W_k,hᵀ b_q,th
    o  = W_vo a + b_o        W_vo,th = W_o,th W_v,h [D, D_x]

The merged weights cost some D^3 operations whatever B. Applying them costs H / 2 times the operations of two products
one after the other, but is one launch whose result lies as the attention reads it, with no transposed copy between.
"""

import math

import torch
from torch import Tensor, nn

from jfi.modules.joined import JoinedInputs
from jfi.modules.merged_attention import Weights, affine, cast, merged_attention, merged_queries
from jfi.modules.sequence_configs import SequenceFeatureConfig
from jfi.ops import jagged_softmax, target_attention

torch.fx.wrap("target_attention")
torch.fx.wrap("merged_attention")
torch.fx.wrap("affine")
torch.fx.wrap("cast")


class StackedTargetAttention(nn.Module):
    """Target attention of F features alike, whose parameters are stacked along the first dimension.

    Args:
        features: F of them, with combined targets of one width D_e, combined events of one width D_x, one kind of bias,
            of as many buckets if it is learned, and all or none with a value scale.
        embedding_dim: width D of the projected queries over all heads, and of the output.
        num_heads: H, a divisor of `embedding_dim`.
        num_queries: T.
        project_history: whether keys and values are projected on the history's side.
        device: where the parameters live, "meta" included.

    Parameters:
        query_weight [F, T * embedding_dim, D_e] and query_bias [F, T * embedding_dim], key_weight and value_weight
        [F, embedding_dim, D_x], output_weight [F, embedding_dim, T * embedding_dim] and output_bias
        [F, embedding_dim], laid out as in `nn.MultiheadAttention`; bucket_bias [R, H], the learned bias tables of
        all features one below the other, where the bias is learned.
    """

    def __init__(
        self,
        features: list[SequenceFeatureConfig],
        embedding_dim: int,
        num_heads: int,
        num_queries: int,
        project_history: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.features = features
        self.num_features = len(features)
        self.num_heads, self.num_queries = num_heads, num_queries
        self.head_width = embedding_dim // num_heads
        self.project_history = project_history
        longest = [feature.max_seqlen for feature in features]
        self.max_seqlen = None if None in longest else max(longest)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device))

        queries = num_queries * embedding_dim
        target_width = features[0].target_width(embedding_dim)
        sequence_width = features[0].sequence_width(embedding_dim)
        bucket_rows = sum(feature.bucket_rows for feature in features)
        self.query_weight = parameter(self.num_features, queries, target_width)
        self.query_bias = parameter(self.num_features, queries)
        self.key_weight = parameter(self.num_features, embedding_dim, sequence_width)
        self.value_weight = parameter(self.num_features, embedding_dim, sequence_width)
        self.output_weight = parameter(self.num_features, embedding_dim, queries)
        self.output_bias = parameter(self.num_features, embedding_dim)
        self.register_parameter("bucket_bias", parameter(bucket_rows, num_heads) if bucket_rows else None)
        self.reset_parameters()

    @property
    def scale(self) -> float:
        """Of the scores; worked out from an integer, since torch.compile(dynamic=True) makes a float a variable."""
        return 1 / math.sqrt(self.head_width)

    def reset_parameters(self) -> None:
        """Draws every projection anew as in Glorot & Bengio (2010), and sets the biases to zero."""
        queries = self.query_weight.detach().unflatten(1, (self.num_queries, -1)).flatten(0, 1)
        for weight in (queries, self.key_weight, self.value_weight, self.output_weight):
            for matrix in weight.unbind():
                nn.init.xavier_uniform_(matrix)
        for bias in (self.query_bias, self.output_bias, self.bucket_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, inputs: JoinedInputs) -> Tensor:
        """The features' outputs [F, B, embedding_dim], in the parameters' dtype or autocast's.

        The attention itself runs in the dtype of the history, which is never cast, or of its projections.
        """
        if not self.project_history:
            return merged_attention(
                inputs.target,
                inputs.fields,
                inputs.offsets,
                self._bias(inputs, inputs.fields[0]),
                self._buckets(inputs),
                inputs.value_scale,
                self._weights,
                self.scale,
                self.max_seqlen,
            )
        query = affine(self.query_bias, inputs.target, self.query_weight.transpose(1, 2))
        rows = inputs.history.split(inputs.events)
        key, value = self._projected(rows, self.key_weight), self._projected(rows, self.value_weight)
        attended = target_attention(
            cast(query.view(-1, self.num_queries, self.num_heads, self.head_width), key.dtype),
            key,
            value,
            offsets=inputs.offsets,
            key_bias=self._bias(inputs, key),
            key_bias_index=self._buckets(inputs),
            value_scale=inputs.value_scale,
            scale=self.scale,
            max_seqlen=self.max_seqlen,
        )
        attended = attended.reshape(self.num_features, -1, self.output_weight.size(2))
        return affine(self.output_bias, attended, self.output_weight.transpose(1, 2))

    @torch.no_grad()
    def attention_weights(self, inputs: JoinedInputs) -> Tensor:
        """The probabilities p [S, T, H] of all features' events, which sum to one over the events of a sample."""
        history, offsets = inputs.history, inputs.offsets
        query = merged_queries(inputs.target, self._weights)
        query = query.view(-1, self.num_queries * self.num_heads, history.size(1))
        query = cast(query, history.dtype) * self.scale  # [F * B, T * H, D_x]
        sample = torch.arange(query.size(0), device=history.device)
        sample = torch.repeat_interleave(sample, offsets.diff(), output_size=history.size(0))
        # One query at a time: no more memory than the history's, however many queries.
        scores = [torch.linalg.vecdot(history, one[sample]) for one in query.unbind(1)]
        scores = torch.stack(scores, dim=1)  # [S, T * H]
        bias = inputs.bias if self.bucket_bias is None else self._buckets(inputs)
        bias = score_bias(self.features[0], bias, self.bucket_bias, self.num_heads, history)
        if bias is not None:
            scores = scores + bias.repeat(1, self.num_queries)
        return jagged_softmax(scores, offsets).unflatten(1, (self.num_queries, self.num_heads))

    @torch.no_grad()
    def load_multihead_attention(self, place: int, attention: nn.MultiheadAttention) -> None:
        """Copies the weights into the slot of the feature at `place`, as `JaggedFeatureInteraction` describes."""
        if attention.in_proj_weight is None:
            query, key, value = attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
        else:
            query, key, value = attention.in_proj_weight.chunk(3)
        output, output_bias = attention.out_proj.weight, attention.out_proj.bias
        self.query_weight[place] = query
        self.key_weight[place] = key
        self.value_weight[place] = value
        self.output_weight[place] = output
        if attention.in_proj_bias is None:
            self.query_bias[place] = 0
            self.output_bias[place] = 0
        else:
            query_bias, _, value_bias = attention.in_proj_bias.chunk(3)
            self.query_bias[place] = query_bias
            self.output_bias[place] = output_bias + output @ value_bias

    @property
    def _weights(self) -> Weights:
        query, output = (self.query_weight, self.query_bias), (self.output_weight, self.output_bias)
        return Weights(*query, self.key_weight, self.value_weight, *output, self.num_queries, self.num_heads)

    def _projected(self, rows: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        """Each feature's events [.., D_x] under its weight, behind one another: [S, H, d]."""
        weight = cast(weight, rows[0].dtype)
        projected = [nn.functional.linear(rows[f], weight[f]) for f in range(self.num_features)]
        projected = projected[0] if self.num_features == 1 else torch.cat(projected)
        return projected.view(-1, self.num_heads, self.head_width)

    def _bias(self, inputs: JoinedInputs, like: Tensor) -> Tensor | None:
        """The score bias that `target_attention` takes: the table of the buckets, or [S, H]."""
        if self.bucket_bias is not None:
            return self.bucket_bias
        return score_bias(self.features[0], inputs.bias, None, self.num_heads, like)

    def _buckets(self, inputs: JoinedInputs) -> Tensor | None:
        """Row of `bucket_bias` of every event [S]."""
        if self.bucket_bias is None:
            return None
        if self.num_features == 1:
            return inputs.bias
        # Counted on the device, which would have to wait for what the host knows.
        events = inputs.offsets.diff().view(self.num_features, -1).sum(1)
        rows = self.bucket_bias.size(0)
        first_row = torch.arange(0, rows, rows // self.num_features, device=inputs.bias.device)
        return inputs.bias + torch.repeat_interleave(first_row, events, output_size=inputs.bias.size(0))


def score_bias(
    feature: SequenceFeatureConfig, bias: Tensor | None, table: Tensor | None, num_heads: int, like: Tensor
) -> Tensor | None:
    """What is added to the scores of each event, by head.

    Args:
        feature: whose `bias` it is.
        bias: by event the score bias [S], floating, or the row [S] of `table`, integer, as `lookup.EventInputs` has it.
        table: [rows, H], the learned values; not looked at where the feature learns none.
        num_heads: H.
        like: a tensor of the dtype wanted.

    Returns:
        [S, H], or None for a feature without a bias.
    """
    if feature.bias is None:
        return None
    by_head = nn.functional.embedding(bias, table) if feature.bucket_rows else bias.unsqueeze(1).expand(-1, num_heads)
    return cast(by_head, like.dtype)
