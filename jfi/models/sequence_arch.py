"""Turns looked-up embeddings into the entries of DLRM's interaction, a row for each sample.

The samples of a batch by user share timelines: what belongs to the user is computed once a timeline, U in all, and
given to the R samples that are its rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from jfi.modules import (
    JaggedEncoder,
    JaggedFeatureInteraction,
    JaggedPooling,
    SequenceFeatureConfig,
    lookups,
    validation,
)
from jfi.modules.feature_modules import FeatureModules
from jfi.modules.table_rows import DigitRows, own_rows
from jfi.ops import jagged_dense_bmm, jagged_jagged_bmm
from jfi.utils.arguments import MAX_LAYERS, check_int
from jfi.utils.padding import padding_state
from jfi.utils.timelines import Timelines


class RefinedAttention(nn.Module):
    """Further layers of target attention over the same histories, each with a refined target.

    The query of a layer is the target plus a linear map of all that the layers before have found.

    Args:
        layers: the second layer and those behind it, of the same features as the first.
        device: device of the linear maps.
    """

    def __init__(self, layers: list[JaggedFeatureInteraction], device: torch.device | None = None) -> None:
        super().__init__()
        first = layers[0]
        self.layers = nn.ModuleList(layers)
        #: The first target of each feature is refined.
        self.keys = list(dict.fromkeys(feature.target_keys[0] for feature in first.features))
        width = len(self.keys) * first.embedding_dim
        self.refine = nn.ModuleList(nn.Linear(first.output_width, width, device=device) for _ in layers)

    def forward(
        self,
        found: Tensor,
        singles: dict[str, Tensor],
        sequences: dict[str, JaggedTensor],
        features: list[SequenceFeatureConfig],
        timelines: Timelines | None,
    ) -> Tensor:
        """The sum [B, output_width] of what all layers find.

        Args:
            found: [B, output_width], what the first layer has found.
            singles: entries by key, the targets among them.
            sequences: the histories, as the first layer has them.
            features: as `SequenceArch.features`.
            timelines: as in `SequenceArch.forward`.
        """
        total = found
        for layer, refine in zip(self.layers, self.refine, strict=True):
            singles = refined(singles, self.keys, refine(found))
            targets, target_times, event_times, max_events = _targets(singles, sequences, features, timelines)
            found = layer(sequences, targets, target_times, event_times, max_events).values()
            total = total + found
        return total


@dataclass(frozen=True)
class AttentionPooling:
    """Settings of a SequenceDLRM whose targets attend to their histories.

    Args:
        num_heads: attention heads, a divisor of embedding_dim.
        num_queries: queries per target.
        layers: how often a target attends to its histories. From the second time on its query is the target plus a
            linear map of what it has found, and the results are summed to one more entry for each sequence feature
            (Guan et al., "Make It Long, Keep It Fast", 2025).

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> AttentionPooling(num_heads=4)
        AttentionPooling(num_heads=4, num_queries=1, layers=1)
    """

    num_heads: int = 1
    num_queries: int = 1
    layers: int = 1

    def __post_init__(self) -> None:
        check_int("num_heads", self.num_heads)
        check_int("num_queries", self.num_queries)
        check_int("layers", self.layers, most=MAX_LAYERS)


def pooling_layers(
    pooling: AttentionPooling | str,
    features: list[SequenceFeatureConfig],
    embedding_dim: int,
    event_dim: int,
    device: torch.device | None,
) -> list[JaggedFeatureInteraction | JaggedPooling]:
    """Returns the layers that pool the histories of these features, one after another."""
    if not features:
        return []
    if not isinstance(pooling, AttentionPooling):
        return [JaggedPooling(features, event_dim, pooling)]
    sizes = embedding_dim, pooling.num_heads, pooling.num_queries
    options = {"sequence_dim": event_dim, "device": device}
    return [JaggedFeatureInteraction(features, *sizes, **options) for _ in range(pooling.layers)]


class SequenceArch(nn.Module):
    """Turns the embeddings that were looked up into the F entries [B, F, embedding_dim] that InteractionArch takes.

    It is a module of its own because TorchRec's train pipelines trace only modules that contain a collection: this one
    is a leaf of their graph.

    Args:
        features: the sequence features; empty where histories are not used.
        bag_keys: keys of the EmbeddingBagCollection's output, an entry each, in the order of the entries.
        single_keys: keys of the EmbeddingCollection's output that become an entry each.
        embedding_dim: width of every entry.
        pooling: pools each history to an entry; after an encoder its features are the configs' `encoded()`.
        encoder: encodes every feature's events before they are pooled, or None.
        user_keys: keys of entries that the rows of a timeline share.
        further: layers of attention behind `pooling`; their sum is one more entry for each feature.
        widths: by key of entries whose embeddings have another width than `embedding_dim`, theirs: they are projected.
            "" stands for the entries of a mean or a sum.
        device: of the projections.
        id_keys: by key of the EmbeddingCollection's output that of the ids where they differ.
    """

    def __init__(
        self,
        features: list[SequenceFeatureConfig],
        bag_keys: list[str],
        single_keys: list[str],
        embedding_dim: int,
        pooling: JaggedFeatureInteraction | JaggedPooling | None,
        encoder: JaggedEncoder | None = None,
        user_keys: list[str] | None = None,
        further: RefinedAttention | None = None,
        widths: dict[str, int] | None = None,
        device: torch.device | None = None,
        id_keys: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._id_keys = id_keys or {}
        self.bag_keys, self.single_keys, self.embedding_dim = bag_keys, single_keys, embedding_dim
        self.pooling, self.encoder, self.further = pooling, encoder, further
        self.user_keys = user_keys or []
        widths = dict(widths or {})
        pooled_width = widths.pop("", None)
        self.projections = FeatureModules(
            {key: nn.Linear(width, embedding_dim, device=device) for key, width in widths.items()}
        )
        self.pooled_projection = None if pooled_width is None else nn.Linear(pooled_width, embedding_dim, device=device)
        # Features whose bias inputs come from the batch's ids.
        self.features = features if encoder is None else features + encoder.features
        self._not_shared = None if encoder is None else _why_not_shared(encoder)

    def forward(
        self,
        ids: KeyedJaggedTensor,
        bags: KeyedTensor | None,
        embeddings: dict[str, JaggedTensor] | None,
        timelines: Timelines | None = None,
    ) -> Tensor:
        """Entries [B, F, embedding_dim]: those of `bags`, of the single keys of `embeddings`, of the histories."""
        singles = self._singles(bags, embeddings, timelines)
        pooled = []
        if self.pooling is not None:
            sequences = _sequences(embeddings, ids, self.features, self._id_keys, self._not_shared, timelines)
            if self.encoder is not None:
                sequences = self.encoder(sequences)
            targets, target_times, event_times, max_events = _targets(singles, sequences, self.features, timelines)
            found = self.pooling(sequences, targets, target_times, event_times, max_events).values()
            if self.pooled_projection is not None:
                found = self.pooled_projection(found.unflatten(1, (-1, self.pooled_projection.in_features))).flatten(1)
            pooled.append(found)
            if self.further is not None:
                pooled.append(self.further(pooled[0], singles, sequences, self.features, timelines))
        return _stack_entries(singles, pooled, self.embedding_dim)

    def attention_weights(
        self,
        ids: KeyedJaggedTensor,
        bags: KeyedTensor | None,
        embeddings: dict[str, JaggedTensor] | None,
        timelines: Timelines | None = None,
    ) -> dict[str, JaggedTensor]:
        """Returns by sequence feature the attention weights of its events; the arguments are those of `forward`."""
        singles = self._singles(bags, embeddings, timelines)
        sequences = _sequences(embeddings, ids, self.features, self._id_keys, self._not_shared, timelines)
        if self.encoder is not None:
            sequences = self.encoder(sequences)
        return self.pooling.attention_weights(sequences, *_targets(singles, sequences, self.features, timelines))

    def _singles(
        self, bags: KeyedTensor | None, embeddings: dict[str, JaggedTensor] | None, timelines: Timelines | None
    ) -> dict[str, Tensor]:
        """The entries that are not histories, all `embedding_dim` wide."""
        keys = self.bag_keys, self.single_keys
        if not len(self.projections):
            return _single_entries(bags, embeddings, *keys, self.user_keys, timelines)
        found = _single_entries(bags, embeddings, *keys, [], timelines)
        entries = {
            key: self.projections[key](found[key]) if key in self.projections else found[key]
            for own in keys
            for key in own
        }
        return _of_rows(entries, self.user_keys, timelines)


@torch.fx.wrap
def refined(entries: dict[str, Tensor], keys: list[str], changes: Tensor) -> dict[str, Tensor]:
    """The entries, those of `keys` plus their part of `changes [B, len(keys) * embedding_dim]`."""
    parts = changes.chunk(len(keys), dim=1)
    return entries | {key: entries[key] + part for key, part in zip(keys, parts, strict=True)}


@torch.fx.wrap
def _single_entries(
    bags: KeyedTensor | None,
    embeddings: dict[str, JaggedTensor] | None,
    bag_keys: list[str],
    single_keys: list[str],
    user_keys: list[str],
    timelines: Timelines | None,
) -> dict[str, Tensor]:
    """The entries [B, embedding_dim] that are not histories, by key: bags and sums of a sample's embeddings."""
    # A sharded collection returns its keys in the order of the sharding.
    found = {} if bags is None else bags.to_dict()
    entries = {key: found[key] for key in bag_keys}
    for key in single_keys:
        values, offsets = embeddings[key].values(), embeddings[key].offsets()
        one_each = len(offsets) == len(values) + 1
        if one_each and (key in padding_state.fixed_length_keys or _are_single(embeddings[key])):
            entries[key] = values
        else:
            if padding_state.is_padded:
                values = own_rows(values, offsets, [embeddings[key]])
            entries[key] = jagged_jagged_bmm(values, values.new_ones(values.size(0), 1), offsets).squeeze(-1)
    return entries if timelines is None else broadcast(entries, user_keys, timelines.row_offsets)


@torch.fx.wrap
def _of_rows(entries: dict[str, Tensor], user_keys: list[str], timelines: Timelines | None) -> dict[str, Tensor]:
    return entries if timelines is None else broadcast(entries, user_keys, timelines.row_offsets)


def _are_single(events: JaggedTensor) -> bool:
    """Returns whether each sample has one event, where that may be read."""
    lengths = events.lengths()
    return validation.may_read(lengths) and bool((lengths == 1).all())


def broadcast(entries: dict[str, Tensor], user_keys: list[str], row_offsets: Tensor) -> dict[str, Tensor]:
    """The entries of R rows, those of `user_keys` from the U timelines that come first in theirs.

    Args:
        entries: [R, embedding_dim] by key.
        user_keys: keys whose first U rows are those of timelines.
        row_offsets: [U + 1].
    """
    shared = [entries[key][: row_offsets.size(0) - 1] for key in user_keys]
    if not shared:
        return entries
    # A product with ones rather than an index, whose gradient would add up with atomics.
    users = torch.stack(shared, 1).flatten(1)
    ones = users.new_ones(entries[user_keys[0]].size(0), 1)
    rows = jagged_dense_bmm(ones, row_offsets, users.unsqueeze(1)).unflatten(1, (len(shared), -1))
    return entries | dict(zip(user_keys, rows.unbind(1), strict=True))


@torch.fx.wrap
def _sequences(
    embeddings: dict[str, JaggedTensor],
    ids: KeyedJaggedTensor,
    features: list[SequenceFeatureConfig],
    id_keys: dict[str, str],
    not_shared: str | None,
    timelines: Timelines | None,
) -> dict[str, JaggedTensor]:
    """The events with what the biases read; of timelines the U that are not empty by construction."""
    sequences = lookups.with_event_inputs(embeddings, ids, features, id_keys)
    if timelines is None:
        return sequences
    if not_shared is not None:
        raise ValueError(not_shared)
    count = timelines.count
    read = {key for feature in features for key in feature.sequence_keys}
    read |= {validation.input_key(key) for feature in features for key in feature.input_keys}
    for key in read:
        if key in sequences:
            whole = sequences[key]
            parts = {"lengths": whole.lengths()[:count], "offsets": whole.offsets()[: count + 1]}
            parts["weights"] = whole.weights_or_none()
            is_digits = isinstance(whole, DigitRows)
            sequences[key] = whole.with_parts(**parts) if is_digits else JaggedTensor(whole.values(), **parts)
    return sequences


def _why_not_shared(encoder: JaggedEncoder) -> str | None:
    """Why the rows of a timeline cannot share encoded events; None if they can."""
    if not encoder.causal:
        return "timelines need a causal encoder: with causal=False a row would see events after itself"
    for feature in encoder.features:
        if feature.bias is not None:
            return (
                f"timelines need an encoder whose features have no bias, got {feature.bias!r} in '{feature.name}': it "
                "belongs to one row; relative_bias is the same for all"
            )
    return None


@torch.fx.wrap
def _targets(
    singles: dict[str, Tensor],
    sequences: dict[str, JaggedTensor],
    features: list[SequenceFeatureConfig],
    timelines: Timelines | None,
) -> tuple[dict[str, Tensor] | dict[str, JaggedTensor], JaggedTensor | None, JaggedTensor | None, int | None]:
    """The arguments of the pooling after its sequences: ragged targets if rows share timelines."""
    if timelines is None:
        return singles, None, None, None
    rows = {"lengths": timelines.row_offsets.diff(), "offsets": timelines.row_offsets}
    targets = {key: JaggedTensor(one, **rows) for key, one in singles.items()}
    events = sequences[features[0].sequence_keys[0]]
    event_times = JaggedTensor(timelines.event_times, lengths=events.lengths(), offsets=events.offsets())
    return targets, JaggedTensor(timelines.target_times, **rows), event_times, timelines.max_events


@torch.fx.wrap
def _stack_entries(singles: dict[str, Tensor], pooled: list[Tensor], embedding_dim: int) -> Tensor:
    return torch.cat([*singles.values(), *pooled], dim=1).unflatten(1, (-1, embedding_dim))


@torch.fx.wrap
def merged(embeddings: dict[str, JaggedTensor] | None, others: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    """Merges the output of a collection with `others`, which are converted to its dtype."""
    if embeddings is None:
        return others
    together = lookups.as_dict(embeddings)
    dtype = next((validation.unread(one).dtype for one in together.values()), None)
    for key, one in others.items():
        if isinstance(one, DigitRows):
            together[key] = one if dtype in (None, one.rows.dtype) else one.to_dtype(dtype)
            continue
        values = one.values() if dtype is None else one.values().to(dtype)
        parts = {"lengths": one.lengths_or_none(), "offsets": one.offsets_or_none()}
        together[key] = JaggedTensor(values, **parts, weights=one.weights_or_none())
    return together
