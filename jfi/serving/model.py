"""The dense part of a SequenceDLRM for U users and R candidates, in the form that is exported.

All candidates of a user attend to one history, as the rows of a timeline do in training, and the same code computes
both (`jfi.modules.stacked_attention`, `EncoderStack`). The weights are constant here, so the projections of keys and
values, which training absorbs into those of the query and the output in every step, are absorbed once, together with
the scale of the scores:

    q' = W_qk e + b_qk          a_th = attention(q'_th, x, x)          o = W_vo concat_th(a_th) + b_o

for a candidate e and events x.
"""

import copy
import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import PoolingType

from jfi.models import SequenceDLRM
from jfi.models.sequence_arch import refined
from jfi.models.sequence_dlrm import interact
from jfi.modules import (
    JaggedFeatureInteraction,
    PositionBias,
    SequenceFeatureConfig,
    WeightBias,
)
from jfi.modules.events import Events, combine, position_buckets
from jfi.modules.jagged_pooling import Mode
from jfi.ops.absorbed_target_attention import absorb, affine
from jfi.serving.attention import PackedUsers, attend, padded
from jfi.utils.arguments import module_name


class ScoringModel(nn.Module):
    """The dense part of a SequenceDLRM, with its current parameters.

    Args:
        model: a trained model whose sequence features are of the same events, and do not read times of them: requests
            have none. Weights are those of a history policy.
        user_keys: keys that describe the user. The other keys, except those of the history, describe the candidate.
        impl: of the attention, "torch" or "triton".

    Raises:
        ValueError: a model that cannot be served.
    """

    def __init__(self, model: SequenceDLRM, user_keys: list[str], impl: str = "torch") -> None:
        super().__init__()
        arch = model.sequence_arch
        features = arch.pooling.features if arch.pooling is not None else []
        for feature in features[1:]:
            if (feature.sequence_keys, feature.combine) != (features[0].sequence_keys, features[0].combine):
                raise ValueError(
                    f"the sequence features of a model to serve must have the same events, got '{features[0].name}' of "
                    f"{features[0].sequence_keys} and '{feature.name}' of {feature.sequence_keys}"
                )
        for feature in arch.features:
            if feature.time_key is not None:
                raise ValueError(f"feature '{feature.name}' reads times of events, which requests do not have")
        bags = model.embedding_bag_collection
        tables = [] if bags is None else bags.embedding_bag_configs()
        if others := [table.name for table in tables if table.pooling != PoolingType.SUM]:
            raise ValueError(f"the embedding bags of a model to serve must use sum pooling, got another for {others}")
        self.keys = [key for table in tables for key in table.feature_names] + arch.single_keys
        self.user_keys = [key for key in self.keys if key in user_keys]
        self.candidate_keys = [key for key in self.keys if key not in user_keys]
        #: As they were before an encoder.
        self.features: list[SequenceFeatureConfig] = arch.features[: len(features)]
        self.impl = impl
        self.encoder: nn.Module | None = None
        self.encoder_feature: SequenceFeatureConfig | None = None
        if arch.encoder is not None:
            self.encoder = copy.deepcopy(arch.encoder.stacks[module_name(arch.encoder.features[0].name)])
            self.encoder_feature = arch.encoder.features[0]
        self.attends = isinstance(arch.pooling, JaggedFeatureInteraction)
        layers = [arch.pooling, *arch.further["layers"]] if self.attends else []
        #: By layer of attention and feature.
        self.pooling = nn.ModuleList(
            nn.ModuleList(CandidateAttention(layer, feature.name, impl) for feature in layer.features)
            for layer in layers
        )
        self.refined_keys, self.refine = arch.refined_keys, copy.deepcopy(arch.further["refine"])
        self.plain = Pooled(arch.pooling.mode) if features and not self.attends else None
        #: Of embeddings of another width than the entries.
        self.projections, self.pooled_projection = map(copy.deepcopy, (arch.projections, arch.pooled_projection))
        self.semantic_ids = copy.deepcopy(model.semantic_ids)
        archs = (model.dense_arch, model.inter_arch, model.cross_net, model.over_arch)
        self.dense_arch, self.inter_arch, self.cross_net, self.over_arch = map(copy.deepcopy, archs)
        self.embedding_dim = arch.embedding_dim
        self.pads = impl == "torch"  # each user to the longest in the batch
        self.eval().requires_grad_(False)

    @property
    def history_keys(self) -> list[str]:
        """Keys of the events."""
        return self.features[0].sequence_keys if self.features else []

    @property
    def semantic_keys(self) -> list[str]:
        """Keys of semantic IDs, which come as they are."""
        names = [] if self.semantic_ids is None else self.semantic_ids.feature_names
        return [key for key in (*self.history_keys, *self.keys) if key in names]

    @property
    def bucket_keys(self) -> list[str]:
        """Keys of the bucket ids that learned biases read."""
        biased = [*(self.features if self.attends else []), *([self.encoder_feature] if self.encoder_feature else [])]
        return sorted({feature.bias_key for feature in biased if feature.bias_key is not None})

    @property
    def weighted_features(self) -> list[str]:
        """Names of the features that read weights of the events."""
        own = [feature.name for feature in self.features if self.attends and feature.reads_weights]
        encoder = self.encoder_feature
        return own + ([encoder.name] if encoder is not None and isinstance(encoder.bias, WeightBias) else [])

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
        weights: Tensor | None = None,
    ) -> Tensor:
        """Logits [R], or the outputs [R, L] of a model with L of them.

        Args:
            history: embeddings [S, D] by sequence key; empty for a model that reads no history.
            users: embeddings [U, D] by key, each with the width D of its own table.
            candidates: embeddings [R, D] by key. Of `semantic_keys` they and the history are IDs, [R] and [S] int64.
            dense: [R, dense_in_features], the features of the user and of the candidate.
            buckets: [S] int64 by key of `bucket_keys`.
            history_offsets, history_owner, history_positions: the `PackedUsers` of the S events.
            candidate_offsets, candidate_owner, candidate_positions: the `PackedUsers` of the R candidates.
            weights: [S] float32, of the events, where `weighted_features` are any.
        """
        events = PackedUsers(history_offsets, history_owner, history_positions)
        read = ByEvent(buckets, weights)
        rows = PackedUsers(candidate_offsets, candidate_owner, candidate_positions)
        history, candidates = self._read_sids(history), self._projected(self._read_sids(candidates))
        users = self._projected(users)
        entries = {key: users[key][rows.owner] if key in self.user_keys else candidates[key] for key in self.keys}
        stacked = [entries[key] for key in self.keys]
        if self.features:
            x = combine([history[key] for key in self.history_keys], self.features[0])
            if self.encoder is not None:
                attention = partial(attend, queries=events, keys=events, impl=self.impl)
                index = _bias_rows(self.encoder_feature, events, read)
                score = read.score_bias(self.encoder_feature)
                x = self.encoder(Events(events.offsets, (x,), score_bias=score, bias_index=index), attention)
            stacked += self._pool(entries, x, rows, events, read)
        sparse = torch.cat(stacked, dim=1).unflatten(1, (-1, self.embedding_dim))
        return self.over_arch(interact(self.dense_arch(dense), sparse, self.inter_arch, self.cross_net)).squeeze(-1)

    def _read_sids(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        names = self.semantic_keys
        return {key: self.semantic_ids.embed(one) if key in names else one for key, one in values.items()}

    def _projected(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        names = {key: module_name(key) for key in values}
        own = {key: self.projections[name] for key, name in names.items() if name in self.projections}
        return {key: own[key](one) if key in own else one for key, one in values.items()}

    def _pool(
        self, entries: dict[str, Tensor], x: Tensor, rows: PackedUsers, events: PackedUsers, read: "ByEvent"
    ) -> list[Tensor]:
        """The entries of the histories, as `SequenceArch` has them."""
        if self.plain is not None:
            found = self.plain(x, rows, events)
            if self.pooled_projection is not None:
                found = self.pooled_projection(found.unflatten(1, (-1, self.pooled_projection.in_features))).flatten(1)
            return [found]
        layers: list[Tensor] = []
        for number, layer in enumerate(self.pooling):
            if number:
                entries = refined(entries, self.refined_keys, self.refine[number - 1](layers[-1]))
            of_features = []
            for attention in layer:
                target = combine([entries[key] for key in attention.feature.target_keys], attention.feature)
                of_features.append(attention(target, x, rows, events, read))
            layers.append(torch.cat(of_features, dim=1))
        return layers if len(layers) == 1 else [layers[0], torch.stack(layers).sum(0)]


class ByEvent(NamedTuple):
    """Inputs that attention reads of the S events, but for their embeddings."""

    buckets: dict[str, Tensor]  # [S] int64 by key
    weights: Tensor | None  # [S] float32

    def score_bias(self, feature: SequenceFeatureConfig) -> Tensor | None:
        """[S], the logarithms of the weights for a feature with a WeightBias."""
        return self.weights.log() if isinstance(feature.bias, WeightBias) else None


class CandidateAttention(nn.Module):
    """A feature of a JaggedFeatureInteraction for R candidates, with absorbed key and value projections."""

    def __init__(self, layer: JaggedFeatureInteraction, name: str, impl: str) -> None:
        super().__init__()
        own = layer.attention[module_name(name)]
        self.feature = next(feature for feature in layer.features if feature.name == name)
        self.impl = impl

        # In float64, so that an absorbed weight is rounded once.
        names = ("query_weight", "query_bias", "key_weight", "value_weight", "output_weight")
        weights = tuple(getattr(own, one).detach().unsqueeze(0) for one in names)
        w_qk, b_qk, w_vo = absorb(weights, layer.num_heads, torch.float64)
        scale = 1 / math.sqrt(layer.embedding_dim // layer.num_heads)
        self._hold("query_weight", w_qk * scale)
        self._hold("query_bias", b_qk * scale)
        self._hold("output_weight", w_vo)
        self._hold("output_bias", own.output_bias.detach().unsqueeze(0))
        self._hold("bucket_bias", None if own.bucket_bias is None else own.bucket_bias.detach())

    def _hold(self, name: str, value: Tensor | None) -> None:
        self.register_buffer(name, None if value is None else value.float().contiguous())

    def forward(self, target: Tensor, history: Tensor, rows: PackedUsers, events: PackedUsers, read: ByEvent) -> Tensor:
        """[R, D_e], [S, D_x] -> [R, embedding_dim]."""
        bias, value = None, None
        if self.bucket_bias is not None:
            bias = F.embedding(_bias_rows(self.feature, events, read), self.bucket_bias)
        elif isinstance(self.feature.bias, WeightBias):
            bias = read.score_bias(self.feature).unsqueeze(1).expand(-1, self.query_bias.size(1) // history.size(1))
        if self.feature.weighted_values:
            value = (history * read.weights.unsqueeze(1)).unsqueeze(1)
        key, options = history.unsqueeze(1), {"key_bias": bias, "scale": 1.0, "impl": self.impl}
        attention = partial(attend, key=key, value=value, queries=rows, keys=events, **options)
        query = affine(self.query_bias, target.unsqueeze(0), self.query_weight).view(
            target.size(0), -1, history.size(1)
        )
        attended = attention(query.to(history.dtype)).flatten(1)
        return affine(self.output_bias, attended.unsqueeze(0), self.output_weight.mT).squeeze(0)


class Pooled(nn.Module):
    """The mean or the sum of a user's events, for each of the user's candidates; zeros without events."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, history: Tensor, rows: PackedUsers, events: PackedUsers) -> Tensor:
        """[S, D_x] -> [R, D_x]; the arguments are those of CandidateAttention."""
        values, present = padded(history, events)
        total = values.masked_fill(~present.unsqueeze(2), 0).sum(1)
        if self.mode == "mean":
            total = total / present.sum(1, keepdim=True).clamp(min=1)
        return total[rows.owner]


def _bias_rows(feature: SequenceFeatureConfig, events: PackedUsers, read: ByEvent) -> Tensor | None:
    """Row [S] of the feature's learned bias table for each event, or None for a feature without one."""
    if isinstance(feature.bias, PositionBias):
        return position_buckets(events.offsets, events.owner.size(0), feature.bias)
    return None if feature.bias_key is None else read.buckets[feature.bias_key]
