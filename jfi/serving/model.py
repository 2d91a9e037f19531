"""What is exported: the dense part of a SequenceDLRM for U users and R candidates, a user's history read once for all.

In training each sample has a history of its own. To rank, all candidates of a user meet the same one, so the events of
a user are encoded once, and his candidates are that many queries over them: `jagged_attention` in place of
`target_attention`. The weights stand still now, so what `jfi.ops.absorb_weights` multiplies at every step is
multiplied once, the scale of the scores with it:

    q' = W_qk e + b_qk          a_th = attention(q'_th, x, x)          o = W_vo concat_th(a_th) + b_o

for a candidate e and events x. T queries a target are T times as many heads, over one key head.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import PoolingType

from jfi.models import SequenceDLRM
from jfi.modules import JaggedEncoder, JaggedFeatureInteraction, inputs
from jfi.ops import absorb_weights
from jfi.serving.attention import Segments, attend, padded

#: Keys of `buckets`: by event the rows of the learned score biases of the pooling and of the encoder.
POOLING, ENCODER = "pooling", "encoder"


class ScoringModel(nn.Module):
    """The dense part of a SequenceDLRM, with its parameters as they are now.

    Args:
        model: trained, with one sequence feature or none, which reads no weights: requests have none.
        user_keys: which of the keys that are entries describe the user; the others describe the candidate.
        impl: of the attention, "torch" or "triton".

    Raises:
        ValueError: a model that cannot be served.
    """

    def __init__(self, model: SequenceDLRM, user_keys: list[str], impl: str = "torch") -> None:
        super().__init__()
        arch = model.sequence_arch
        features = arch.pooling.features if arch.pooling is not None else []
        if len(features) > 1:
            raise ValueError(f"a model to serve must have one sequence feature, got {len(features)}")
        for feature in arch.features:
            if feature.reads_weights:
                raise ValueError(f"feature '{feature.name}' reads weights of events, which requests do not have")
        bags = model.embedding_bag_collection
        tables = [] if bags is None else bags.embedding_bag_configs()
        if unlike := [table.name for table in tables if table.pooling != PoolingType.SUM]:
            raise ValueError(f"a model to serve must have bags that are sums, got others in the tables {unlike}")
        self.keys = [key for table in tables for key in table.feature_names] + arch.single_keys
        self.user_keys = [key for key in self.keys if key in user_keys]
        self.feature = arch.features[0] if features else None
        self.encoder = None if arch.encoder is None else ScoringEncoder(arch.encoder, impl)
        self.pooling: nn.Module | None = None
        if isinstance(arch.pooling, JaggedFeatureInteraction):
            self.pooling = CandidateAttention(arch.pooling, impl)
        elif features:
            self.pooling = Mean()
        archs = (model.dense_arch, model.inter_arch, model.over_arch)
        self.dense_arch, self.inter_arch, self.over_arch = map(copy.deepcopy, archs)
        self.embedding_dim = arch.embedding_dim
        self.pads = impl == "torch"  # users to the longest among them
        self.eval().requires_grad_(False)

    def forward(
        self,
        history: dict[str, Tensor],
        users: dict[str, Tensor],
        candidates: dict[str, Tensor],
        dense: Tensor,
        buckets: dict[str, Tensor],
        history_offsets: Tensor,
        history_owner: Tensor,
        history_places: Tensor,
        candidate_offsets: Tensor,
        candidate_owner: Tensor,
        candidate_places: Tensor,
    ) -> Tensor:
        """Logits [R].

        Args:
            history: embeddings [S, D] by sequence key; no key where the model reads no history.
            users: embeddings [U, D] by key.
            candidates: embeddings [R, D] by key.
            dense: [R, dense_in_features], those of the user and those of the candidate.
            buckets: [S] int64 by POOLING and ENCODER, where these have a learned bias.
            history_offsets, history_owner, history_places: the `Segments` of the S events, which belong to U users.
            candidate_offsets, candidate_owner, candidate_places: those of the R candidates.
        """
        events = Segments(history_offsets, history_owner, history_places)
        rows = Segments(candidate_offsets, candidate_owner, candidate_places)
        entries = {key: users[key][rows.owner] if key in self.user_keys else candidates[key] for key in self.keys}
        stacked = [entries[key] for key in self.keys]
        if self.feature is not None:
            x = inputs.combine([history[key] for key in self.feature.sequence_keys], self.feature)
            if self.encoder is not None:
                x = self.encoder(x, events, buckets.get(ENCODER))
            target = inputs.combine([entries[key] for key in self.feature.target_keys], self.feature)
            stacked.append(self.pooling(target, x, rows, events, buckets.get(POOLING)))
        sparse = torch.cat(stacked, dim=1).unflatten(1, (-1, self.embedding_dim))
        return self.over_arch(self.inter_arch(self.dense_arch(dense), sparse)).squeeze(-1)


class CandidateAttention(nn.Module):
    """Multi-head attention of R candidates over their users' events: a JaggedFeatureInteraction of one feature."""

    def __init__(self, layer: JaggedFeatureInteraction, impl: str) -> None:
        super().__init__()
        group = layer.attention[0]
        self.heads = layer.num_queries * layer.num_heads
        self.num_queries, self.impl = layer.num_queries, impl

        # In float64, so that an absorbed weight is rounded once.
        weights = tuple(weight.detach() for weight in group.weights[:5])
        w_qk, b_qk, w_vo = absorb_weights(weights, layer.num_heads, torch.float64)
        scale = 1 / math.sqrt(layer.embedding_dim // layer.num_heads)
        self._hold("query_weight", w_qk[0] * scale)
        self._hold("query_bias", b_qk[0] * scale)
        self._hold("output_weight", w_vo[0].T)
        self._hold("output_bias", group.output_bias[0].detach())
        self._hold("bucket_bias", None if group.bucket_bias is None else group.bucket_bias.detach())

    def _hold(self, name: str, value: Tensor | None) -> None:
        self.register_buffer(name, None if value is None else value.float().contiguous())

    def forward(
        self, target: Tensor, history: Tensor, rows: Segments, events: Segments, buckets: Tensor | None
    ) -> Tensor:
        """[R, D_e], [S, D_x] -> [R, embedding_dim]."""
        query = F.linear(target, self.query_weight, self.query_bias).unflatten(1, (self.heads, -1))
        bias = None if self.bucket_bias is None else F.embedding(buckets, self.bucket_bias).repeat(1, self.num_queries)
        key = history.unsqueeze(1)
        attended = attend(query, key, None, rows, events, bias=bias, scale=1.0, causal=False, impl=self.impl)
        return F.linear(attended.flatten(1), self.output_weight, self.output_bias)


class Mean(nn.Module):
    """The mean of each user's events, for each of his candidates; zeros without an event."""

    def forward(
        self, target: Tensor, history: Tensor, rows: Segments, events: Segments, buckets: Tensor | None
    ) -> Tensor:
        values, present = padded(history, events)
        total = values.masked_fill(~present.unsqueeze(2), 0).sum(1)
        return (total / present.sum(1, keepdim=True).clamp(min=1))[rows.owner]


class ScoringEncoder(nn.Module):
    """The blocks of a JaggedEncoder of one feature, over attention that can be exported."""

    def __init__(self, encoder: JaggedEncoder, impl: str) -> None:
        super().__init__()
        self.stack, self.impl = copy.deepcopy(encoder.stacks[encoder.features[0].name]), impl

    def forward(self, history: Tensor, events: Segments, buckets: Tensor | None) -> Tensor:
        """Encodes events [S, sequence_width] to [S, embedding_dim], as `EncoderBlock.forward` does."""
        x = self.stack.input_projection(history)
        for block in self.stack.blocks:
            shape = (block.num_heads, block.head_width)
            normed = block.attention_norm(x)
            query, key, value = (f(normed).unflatten(1, shape) for f in (block.query, block.key, block.value))
            bias = None if block.bucket_bias is None else F.embedding(buckets, block.bucket_bias)
            how = {"scale": block.head_width**-0.5, "causal": block.causal, "impl": self.impl}
            attended = attend(query, key, value, events, events, bias=bias, **how)
            x = x + block.output(attended.flatten(1))
            x = x + block.feedforward(block.feedforward_norm(x))
        return self.stack.norm(x)
