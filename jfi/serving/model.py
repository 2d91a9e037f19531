"""The dense part of a SequenceDLRM for U users and R candidates, in the form that is exported.

All candidates of a user attend to one history, as the rows of a timeline do in training, and the same code computes
both (`jfi.modules.ragged_attention`, `EncoderStack`). The weights are constant here, so the projections of keys and
values, which training absorbs into those of the query and the output in every step, are absorbed once, together with
the scale of the scores:

    q' = W_qk e + b_qk          a_th = attention(q'_th, x, x)          o = W_vo concat_th(a_th) + b_o

for a candidate e and events x. T queries per candidate are T times as many heads on one key head.
"""

import copy
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import PoolingType

from jfi.models import SequenceDLRM
from jfi.modules import JaggedFeatureInteraction, PositionBias, SequenceFeatureConfig, inputs, ragged_attention
from jfi.ops import absorb_weights
from jfi.serving.attention import Segments, attend, padded


class ScoringModel(nn.Module):
    """The dense part of a SequenceDLRM, with its current parameters.

    Args:
        model: a trained model with at most one sequence feature, which must not read weights or times of events:
            requests have none.
        user_keys: keys that describe the user. The other keys, except those of the history, describe the candidate.
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
            if feature.time_key is not None:
                raise ValueError(f"feature '{feature.name}' reads times of events, which requests do not have")
        bags = model.embedding_bag_collection
        tables = [] if bags is None else bags.embedding_bag_configs()
        if others := [table.name for table in tables if table.pooling != PoolingType.SUM]:
            raise ValueError(f"the embedding bags of a model to serve must use sum pooling, got another for {others}")
        self.keys = [key for table in tables for key in table.feature_names] + arch.single_keys
        self.user_keys = [key for key in self.keys if key in user_keys]
        self.candidate_keys = [key for key in self.keys if key not in user_keys]
        self.feature: SequenceFeatureConfig | None = arch.features[0] if features else None
        self.impl = impl
        self.encoder: nn.Module | None = None
        self.encoder_feature: SequenceFeatureConfig | None = None
        if arch.encoder is not None:
            self.encoder = copy.deepcopy(arch.encoder.stacks[arch.encoder.features[0].name])
            self.encoder_feature = arch.encoder.features[0]
        self.pooling: nn.Module | None = None
        if isinstance(arch.pooling, JaggedFeatureInteraction):
            self.pooling = CandidateAttention(arch.pooling, impl)
        elif features:
            self.pooling = Mean()
        archs = (model.dense_arch, model.inter_arch, model.over_arch)
        self.dense_arch, self.inter_arch, self.over_arch = map(copy.deepcopy, archs)
        self.embedding_dim = arch.embedding_dim
        self.pads = impl == "torch"  # each user to the longest in the batch
        self.eval().requires_grad_(False)

    @property
    def history_keys(self) -> list[str]:
        """Keys of the events."""
        return [] if self.feature is None else self.feature.sequence_keys

    @property
    def bucket_keys(self) -> list[str]:
        """Keys of the bucket ids that learned biases read."""
        biased = [self.feature] if isinstance(self.pooling, CandidateAttention) else []
        biased += [] if self.encoder_feature is None else [self.encoder_feature]
        return sorted({feature.bias_key for feature in biased if feature.bias_key is not None})

    def forward(
        self,
        history: dict[str, Tensor],
        users: dict[str, Tensor],
        candidates: dict[str, Tensor],
        dense: Tensor,
        buckets: dict[str, Tensor],
        history_offsets: Tensor,
        history_owner: Tensor,
        history_positions: Tensor,
        candidate_offsets: Tensor,
        candidate_owner: Tensor,
        candidate_positions: Tensor,
    ) -> Tensor:
        """Logits [R].

        Args:
            history: embeddings [S, D] by sequence key; empty for a model that reads no history.
            users: embeddings [U, D] by key.
            candidates: embeddings [R, D] by key.
            dense: [R, dense_in_features], the features of the user and of the candidate.
            buckets: [S] int64 by key of `bucket_keys`.
            history_offsets, history_owner, history_positions: the `Segments` of the S events.
            candidate_offsets, candidate_owner, candidate_positions: the `Segments` of the R candidates.
        """
        events = Segments(history_offsets, history_owner, history_positions)
        rows = Segments(candidate_offsets, candidate_owner, candidate_positions)
        entries = {key: users[key][rows.owner] if key in self.user_keys else candidates[key] for key in self.keys}
        stacked = [entries[key] for key in self.keys]
        if self.feature is not None:
            x = inputs.combine([history[key] for key in self.feature.sequence_keys], self.feature)
            if self.encoder is not None:
                attention = partial(attend, queries=events, keys=events, impl=self.impl)
                index = _bias_rows(self.encoder_feature, events, buckets)
                x = self.encoder(inputs.GroupInputs(None, (x,), events.offsets, None, index, None, []), attention)
            target = inputs.combine([entries[key] for key in self.feature.target_keys], self.feature)
            stacked.append(self.pooling(target, x, rows, events, buckets))
        sparse = torch.cat(stacked, dim=1).unflatten(1, (-1, self.embedding_dim))
        return self.over_arch(self.inter_arch(self.dense_arch(dense), sparse)).squeeze(-1)


class CandidateAttention(nn.Module):
    """A JaggedFeatureInteraction of one feature for R candidates, with absorbed key and value projections.

    Args:
        layer: the trained layer.
        impl: of the attention, "torch" or "triton".
    """

    def __init__(self, layer: JaggedFeatureInteraction, impl: str) -> None:
        super().__init__()
        group = layer.attention[0]
        self.feature = layer.features[0]
        self.num_queries, self.impl = layer.num_queries, impl

        # In float64, so that an absorbed weight is rounded once.
        weights = tuple(weight.detach() for weight in group.weights[:5])
        w_qk, b_qk, w_vo = absorb_weights(weights, layer.num_heads, torch.float64)
        scale = 1 / math.sqrt(layer.embedding_dim // layer.num_heads)
        self._hold("query_weight", w_qk * scale)
        self._hold("query_bias", b_qk * scale)
        self._hold("output_weight", w_vo)
        self._hold("output_bias", group.output_bias.detach())
        self._hold("bucket_bias", None if group.bucket_bias is None else group.bucket_bias.detach())

    def _hold(self, name: str, value: Tensor | None) -> None:
        self.register_buffer(name, None if value is None else value.float().contiguous())

    def forward(
        self, target: Tensor, history: Tensor, rows: Segments, events: Segments, buckets: dict[str, Tensor]
    ) -> Tensor:
        """[R, D_e], [S, D_x] -> [R, embedding_dim]."""
        bias = None
        if self.bucket_bias is not None:
            bias = F.embedding(_bias_rows(self.feature, events, buckets), self.bucket_bias).repeat(1, self.num_queries)
        attention = partial(attend, queries=rows, keys=events, key_bias=bias, scale=1.0, impl=self.impl)
        absorbed = self.query_weight, self.query_bias, self.output_weight
        return ragged_attention.attend_to_raw_events(
            target.unsqueeze(0), history, absorbed, self.output_bias, attention
        ).squeeze(0)


class Mean(nn.Module):
    """The mean of a user's events, for each of the user's candidates; zeros without events."""

    def forward(
        self, target: Tensor, history: Tensor, rows: Segments, events: Segments, buckets: dict[str, Tensor]
    ) -> Tensor:
        """[S, D_x] -> [R, D_x]; the arguments are those of CandidateAttention."""
        values, present = padded(history, events)
        total = values.masked_fill(~present.unsqueeze(2), 0).sum(1)
        return (total / present.sum(1, keepdim=True).clamp(min=1))[rows.owner]


def _bias_rows(feature: SequenceFeatureConfig, events: Segments, buckets: dict[str, Tensor]) -> Tensor | None:
    """Row [S] of the feature's learned bias table for each event, or None for a feature without one."""
    if isinstance(feature.bias, PositionBias):
        return inputs.position_buckets(events.offsets, events.owner.size(0), feature.bias.num_buckets)
    return None if feature.bias_key is None else buckets[feature.bias_key]
