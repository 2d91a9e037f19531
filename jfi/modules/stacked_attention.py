"""Multi-head target attention of several features, on plain tensors.

The projections of all features are batched; the attention itself is one call a feature. For one feature,
with the combined target e [B, D_e] of each sample and its events x [S, D_x], h a head of width d:

    q_h = W_q,h e + b_q,h                               [B, T, d]
    p_h = softmax over the sample's events of (q_h · W_k,h x) / sqrt(d) + bias_h
    o   = W_o concat_{t,h}(sum over events of p_h W_v,h x) + b_o

This is `torch.nn.MultiheadAttention` with T queries a target. It is computed as

    q'_h = W_k,hᵀ q_h        a_h = target_attention(q'_h, x, x)        o = W_o concat_{t,h}(W_v,h a_h) + b_o

for q · W_k x = W_kᵀ q · x, and a sum commutes with W_v: the same numbers to rounding, yet the S rows of the history are
never projected, and every head reads the same raw rows. A key bias adds the same to all scores of a query and cancels
in the softmax; a value bias is added whole by probabilities that sum to one and merges into b_o. So neither exists.
"""

import math

import torch
from torch import Tensor, nn

from jfi.modules.lookup import FeatureInputs
from jfi.modules.sequence_configs import SequenceFeatureConfig
from jfi.ops import jagged_softmax, target_attention

torch.fx.wrap("target_attention")


class StackedTargetAttention(nn.Module):
    """Target attention of F features of equal widths, whose parameters are stacked along the first dimension.

    Args:
        features: F of them, with combined targets of one width D_e and combined events of one width D_x.
        embedding_dim: width of the projected queries over all heads, and of the output.
        num_heads: H, a divisor of `embedding_dim`.
        num_queries: T.
        device: where the parameters live, "meta" included.

    Parameters:
        query_weight [F, T * embedding_dim, D_e] and query_bias [F, T * embedding_dim], key_weight and value_weight
        [F, embedding_dim, D_x], output_weight [F, embedding_dim, T * embedding_dim] and output_bias
        [F, embedding_dim], laid out as in `nn.MultiheadAttention`; bucket_bias [R, H], the learned bias tables of
        all features one below the other, unless no feature has one.
    """

    def __init__(
        self,
        features: list[SequenceFeatureConfig],
        embedding_dim: int,
        num_heads: int,
        num_queries: int,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.features = features
        self.num_heads, self.num_queries = num_heads, num_queries
        self.head_width = embedding_dim // num_heads
        self.scale = 1 / math.sqrt(self.head_width)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device))

        num_features, queries = len(features), num_queries * embedding_dim
        target_width = features[0].target_width(embedding_dim)
        sequence_width = features[0].sequence_width(embedding_dim)
        bucket_rows = sum(feature.bucket_rows for feature in features)
        self.query_weight = parameter(num_features, queries, target_width)
        self.query_bias = parameter(num_features, queries)
        self.key_weight = parameter(num_features, embedding_dim, sequence_width)
        self.value_weight = parameter(num_features, embedding_dim, sequence_width)
        self.output_weight = parameter(num_features, embedding_dim, queries)
        self.output_bias = parameter(num_features, embedding_dim)
        self.register_parameter("bucket_bias", parameter(bucket_rows, num_heads) if bucket_rows else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every projection anew as in Glorot & Bengio (2010), and sets the biases to zero."""
        queries = self.query_weight.detach().unflatten(1, (self.num_queries, -1)).flatten(0, 1)
        for weight in (queries, self.key_weight, self.value_weight, self.output_weight):
            for matrix in weight.unbind():
                nn.init.xavier_uniform_(matrix)
        for bias in (self.query_bias, self.output_bias, self.bucket_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, inputs: list[FeatureInputs]) -> Tensor:
        """The features' outputs [F, B, embedding_dim], in the parameters' dtype or autocast's.

        The attention itself runs in the dtype of the history, which is never cast.
        """
        queries = self._queries(inputs)
        attended = [
            target_attention(
                queries[f].to(inputs[f].history.dtype),
                inputs[f].history.unsqueeze(1),
                None,
                inputs[f].offsets,
                bias=self._score_bias(f, inputs[f]),
                scale=self.scale,
            )
            for f in range(len(self.features))
        ]
        attended = torch.stack(attended).to(self.value_weight.dtype)  # [F, B, T, H, D_x]
        heads = torch.einsum("fbthx,fhdx->fbthd", attended, self._by_head(self.value_weight))
        return torch.baddbmm(self.output_bias.unsqueeze(1), heads.flatten(2), self.output_weight.transpose(1, 2))

    @torch.no_grad()
    def attention_weights(self, inputs: list[FeatureInputs]) -> list[Tensor]:
        """The probabilities p [S, T, H] of each feature, which sum to one over the events of a sample."""
        queries = self._queries(inputs)
        weights = []
        for f, (_, history, offsets, _) in enumerate(inputs):
            bias = self._score_bias(f, inputs[f])
            query = (queries[f].to(history.dtype) * self.scale).flatten(1, 2)  # [B, T * H, D_x]
            sample = torch.arange(query.size(0), device=history.device)
            sample = torch.repeat_interleave(sample, offsets.diff(), output_size=history.size(0))
            # One query at a time: no more memory than the history's, however many queries.
            scores = [torch.linalg.vecdot(history, one[sample]) for one in query.unbind(1)]
            scores = torch.stack(scores, dim=1)  # [S, T * H]
            if bias is not None:
                scores = scores + bias.repeat(1, self.num_queries)
            weights.append(jagged_softmax(scores, offsets).unflatten(1, (self.num_queries, self.num_heads)))
        return weights

    def _queries(self, inputs: list[FeatureInputs]) -> Tensor:
        """Queries on the history's side of the key projection, q' [F, B, T, H, D_x]."""
        target = torch.stack([inputs[f].target for f in range(len(self.features))]).to(self.query_weight.dtype)
        query = torch.baddbmm(self.query_bias.unsqueeze(1), target, self.query_weight.transpose(1, 2))
        query = query.unflatten(2, (self.num_queries, self.num_heads, self.head_width))
        return torch.einsum("fbthd,fhdx->fbthx", query, self._by_head(self.key_weight))

    def _by_head(self, weight: Tensor) -> Tensor:
        """[F, embedding_dim, D_x] -> [F, H, d, D_x]."""
        return weight.unflatten(1, (self.num_heads, self.head_width))

    def _score_bias(self, f: int, inputs: FeatureInputs) -> Tensor | None:
        """Score bias [S, H] of feature f in the dtype of its history."""
        feature = self.features[f]
        first_row = sum(above.bucket_rows for above in self.features[:f])
        bias = inputs.bias + first_row if feature.bucket_rows else inputs.bias
        return score_bias(feature, bias, self.bucket_bias, self.num_heads, inputs.history)


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
    return by_head.to(like.dtype)
