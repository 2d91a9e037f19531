"""The mean or the sum of a history, the baselines of `JaggedFeatureInteraction`."""

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from jfi import reference
from jfi.modules import validation
from jfi.modules.events import Events, read_events
from jfi.modules.sequence_configs import FeatureGroup, SequenceFeatureConfig, check_features
from jfi.ops import jagged_attention, target_attention
from jfi.utils.arguments import check_choice, check_int
from jfi.utils.context import is_traced, padding_state

torch.fx.wrap("read_events")

Mode = Literal["mean", "sum"]


class JaggedPooling(nn.Module):
    """Pools each sample's history into the mean or the sum of its events' combined embeddings; zeros without events.

    It has no parameters, ignores the features' targets, biases and weights, and is called like a
    JaggedFeatureInteraction without `embedding_collection`, which it can replace. The sum is what an
    EmbeddingBagCollection with sum pooling computes; this one also takes several fields, and the events that each of a
    user's candidates sees.

    Args:
        features: the sequence features, with distinct names.
        embedding_dim: width of every input embedding.
        mode: "mean" or "sum".

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:

        >>> from torchrec import JaggedTensor
        >>> events = JaggedTensor(values=torch.tensor([[1.0, 2.0], [3.0, 6.0]]), lengths=torch.tensor([2, 0]))
        >>> pooling = JaggedPooling([SequenceFeatureConfig("taste", ["history_item"], ["item"])], embedding_dim=2)
        >>> pooling({"history_item": events})["taste"]
        tensor([[2., 4.],
                [0., 0.]])
    """

    def __init__(self, features: list[SequenceFeatureConfig], embedding_dim: int, mode: Mode = "mean") -> None:
        super().__init__()
        check_features(features)
        check_int("embedding_dim", embedding_dim)
        check_choice("mode", mode, get_args(Mode))
        self.mode = mode
        self.features = features
        self.embedding_dim = embedding_dim
        plain = [replace(feature, bias=None, weighted_values=False, relative_bias=None) for feature in features]
        self._groups = [FeatureGroup([feature], embedding_dim) for feature in plain]

    @property
    def output_width(self) -> int:
        """Returns the sum of the widths of the output's entries."""
        return sum(feature.sequence_width(self.embedding_dim) for feature in self.features)

    def forward(
        self,
        sequences: dict[str, JaggedTensor],
        targets: KeyedTensor | dict[str, Tensor] | dict[str, JaggedTensor] | None = None,
        target_times: JaggedTensor | None = None,
        event_times: JaggedTensor | dict[str, JaggedTensor] | None = None,
        max_events: int | None = None,
    ) -> KeyedTensor:
        """Pools the histories.

        Args:
            sequences: embeddings [S, embedding_dim] by sequence key.
            targets: not read unless they are ragged, and then only for the number of each user's candidates.
            target_times: of ragged targets, as `event_times` and `max_events` as in `JaggedFeatureInteraction.forward`:
                a candidate's events are those that it sees.
            event_times: given with `target_times`.
            max_events: given with times.

        Returns:
            An entry for each feature, `embedding_dim` wide; with "concat" `len(sequence_keys) * embedding_dim`.
        """
        times = target_times, event_times, max_events
        events = read_events(sequences, self._groups, targets, *times, only_ragged=True)
        return KeyedTensor(
            keys=[feature.name for feature in self.features],
            length_per_key=[feature.sequence_width(self.embedding_dim) for feature in self.features],
            values=_pool(events, self.mode),
        )


@torch.fx.wrap
def _pool(groups: list[Events], mode: Mode) -> Tensor:
    pooled = []
    for events in groups:
        # A query of zeros scores every event alike, and the attention is the mean.
        key = events.history.unsqueeze(1)
        if events.target is None or events.target_offsets is None:
            query = key.new_zeros(events.offsets.size(0) - 1, 1, 1, key.size(2))
            mean = target_attention(query, key, offsets=events.offsets)
            counts = events.offsets.diff()
        else:
            mean, lse = jagged_attention(
                key.new_zeros(events.target.size(-2), 1, key.size(2)),
                key,
                query_offsets=events.target_offsets,
                key_offsets=events.offsets,
                query_time=events.target_times,
                key_time=events.times,
                max_visible=events.max_visible,
                return_lse=True,
            )
            counts = lse.detach()[:, 0].exp().round()  # of scores of 0
        mean = mean.flatten(1)
        if mode == "sum":  # in float32 at least: float16 ends at 65,504 events
            wide = torch.promote_types(mean.dtype, torch.float32)
            mean = (mean.to(wide) * counts.to(wide).unsqueeze(1)).to(mean.dtype)
        pooled.append(mean)
    return torch.cat(pooled, dim=1)


def pool(key: str, rows: JaggedTensor, weights: Tensor | None, mean: bool) -> Tensor:
    """Returns the sums or means [B, D] of each sample's rows [S, D], with weights [S] if they are given.

    Rows behind the last sample are padding, whose gradients may be anything.
    """
    values, offsets, lengths = rows.values(), rows.offsets(), rows.lengths()
    one_each = key in padding_state.fixed_length_keys
    if not one_each and validation.may_read(lengths):
        one_each = offsets.size(0) == values.size(0) + 1 and bool((lengths == 1).all())
    if one_each:
        return values if weights is None else values * weights.unsqueeze(1).to(values.dtype)
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    weighted = wide if weights is None else wide * weights.unsqueeze(1).to(wide.dtype)
    if is_traced() or values.size(0) == 0:
        pooled = reference.segment_sum(weighted, offsets)
    else:  # spares the host two custom operators
        pooled = reference.segment_reduce(weighted, offsets, "sum", 0.0)
    pooled = pooled.to(values.dtype)
    return pooled / lengths.clamp(min=1).unsqueeze(1) if mean else pooled
