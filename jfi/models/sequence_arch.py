"""Turns looked-up embeddings into the entries of DLRM's interaction, a row for each sample.

The samples of a batch by user share timelines: what belongs to the user is computed once a timeline, U in all, and
given to the R samples that are its rows.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from jfi import reference
from jfi.modules import (
    JaggedEncoder,
    JaggedFeatureInteraction,
    JaggedPooling,
    SequenceFeatureConfig,
    lookups,
    validation,
)
from jfi.modules.events import as_dict
from jfi.modules.jagged_pooling import pool
from jfi.tables.table_rows import DigitRows, own_rows, parts_of
from jfi.utils.arguments import MAX_LAYERS, check_int, module_name
from jfi.utils.context import padding_state
from jfi.utils.jagged import Timelines


@dataclass(frozen=True)
class AttentionPooling:
    """Settings of a SequenceDLRM whose targets attend to their histories.

    Args:
        num_heads: attention heads, a divisor of embedding_dim.
        layers: how often a target attends to its histories. From the second time on its query is the target plus a
            linear map of what it has found, and the results are summed to one more entry for each sequence feature
            (Guan et al., "Make It Long, Keep It Fast", 2025).

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> AttentionPooling(num_heads=4)
        AttentionPooling(num_heads=4, layers=1)
    """

    num_heads: int = 1
    layers: int = 1

    def __post_init__(self) -> None:
        check_int("num_heads", self.num_heads)
        check_int("layers", self.layers, most=MAX_LAYERS)


class SequenceArch(nn.Module):
    """Turns the embeddings that were looked up into the F entries [B, F, embedding_dim] that InteractionArch takes.

    It is a module because TorchRec's train pipelines trace only modules that contain a collection: this one is a leaf
    of their graph.

    Args:
        features: as in SequenceDLRM, as `pooling`, `encoder` and `user_keys`; empty where histories are not used.
        bag_keys: keys of the EmbeddingBagCollection's output, an entry each, in the order of the entries.
        single_keys: keys of the EmbeddingCollection's output that become an entry each.
        widths: by key that of its embeddings; those that are not `embedding_dim` wide are projected.
        embedding_dim: width of every entry.
        event_dim: width of the embeddings of events.
    """

    def __init__(
        self,
        features: list[SequenceFeatureConfig],
        bag_keys: list[str],
        single_keys: list[str],
        widths: dict[str, int],
        embedding_dim: int,
        event_dim: int,
        pooling: AttentionPooling | Literal["mean", "sum", "none"],
        encoder: JaggedEncoder | None,
        user_keys: list[str],
    ) -> None:
        super().__init__()
        self.user_keys = user_keys
        self.bag_keys, self.single_keys, self.embedding_dim = bag_keys, single_keys, embedding_dim
        layers: list[JaggedFeatureInteraction | JaggedPooling] = []
        pooled = features if encoder is None else [feature.encoded() for feature in features]
        attends = isinstance(pooling, AttentionPooling)
        if isinstance(pooling, AttentionPooling):
            sizes = embedding_dim, pooling.num_heads
            for _ in range(pooling.layers if features else 0):
                layers.append(JaggedFeatureInteraction(pooled, *sizes, sequence_dim=event_dim))
        elif features and pooling != "none":
            layers.append(JaggedPooling(pooled, event_dim, pooling))
        self.pooling, self.encoder = layers[0] if layers else None, encoder
        #: Layers of attention to the same histories, each with a target refined by what the layers before have found;
        #: the first target of each feature is refined. The sum of all layers is one more entry for each feature.
        further = nn.ModuleList(layers[1:])
        self.refined_keys = list(dict.fromkeys(feature.target_keys[0] for feature in features))
        refined_width = len(self.refined_keys) * embedding_dim
        refine = nn.ModuleList(nn.Linear(layer.output_width, refined_width) for layer in layers[1:])
        self.further = nn.ModuleDict({"layers": further, "refine": refine})
        keys = bag_keys + single_keys
        others = [key for key in keys if widths[key] != embedding_dim]
        self.projections = nn.ModuleDict({module_name(key): nn.Linear(widths[key], embedding_dim) for key in others})
        self.pooled_projection = None
        if layers and not attends and event_dim != embedding_dim:
            self.pooled_projection = nn.Linear(event_dim, embedding_dim)
        pooled_width = sum(layer.output_width for layer in layers[:2])
        #: F.
        self.num_entries = len(keys) + pooled_width // (embedding_dim if attends else event_dim)
        #: Features whose bias inputs come from the batch's ids.
        self.features = features if encoder is None else features + encoder.features
        self._not_shared = None if encoder is None else _why_not_shared(encoder)

    def forward(
        self,
        ids: KeyedJaggedTensor,
        bags: KeyedTensor | None,
        embeddings: dict[str, JaggedTensor],
        timelines: Timelines | None = None,
    ) -> Tensor:
        """Returns the entries: those of `bags`, of the single keys of `embeddings`, of the histories."""
        singles, pooled = self._singles(bags, embeddings, timelines), []
        if self.pooling is not None:
            sequences = self._events(embeddings, ids, timelines)
            entry = self._pool(self.pooling, singles, sequences, timelines)
            if self.pooled_projection is not None:
                entry = self.pooled_projection(entry.unflatten(1, (-1, self.pooled_projection.in_features))).flatten(1)
            pooled.append(entry)
            total, targets = entry, singles
            for layer, refine in zip(*self.further.values(), strict=True):
                targets = refined(targets, self.refined_keys, refine(entry))
                entry = self._pool(layer, targets, sequences, timelines)
                total = total + entry
            pooled += [total] if total is not entry else []
        return _stack_entries(singles, pooled, self.embedding_dim)

    def attention_weights(
        self,
        ids: KeyedJaggedTensor,
        bags: KeyedTensor | None,
        embeddings: dict[str, JaggedTensor],
        timelines: Timelines | None = None,
    ) -> dict[str, JaggedTensor]:
        """Returns by sequence feature the attention weights of its events; the arguments are those of `forward`."""
        singles, sequences = self._singles(bags, embeddings, timelines), self._events(embeddings, ids, timelines)
        pooling: Any = self.pooling
        return pooling.attention_weights(sequences, *_targets(singles, sequences, self.features, timelines))

    def _singles(
        self, bags: KeyedTensor | None, embeddings: dict[str, JaggedTensor], timelines: Timelines | None
    ) -> dict[str, Tensor]:
        """Returns the entries that are not histories, all `embedding_dim` wide."""
        entries = _single_entries(bags, embeddings, self.bag_keys, self.single_keys)
        if len(self.projections):
            names = {key: module_name(key) for key in self.bag_keys + self.single_keys}
            projections = {key: self.projections[name] for key, name in names.items() if name in self.projections}
            entries = {key: projections[key](entries[key]) if key in projections else entries[key] for key in names}
        return _shared(entries, self.user_keys, timelines)

    def _events(
        self, embeddings: dict[str, JaggedTensor], ids: KeyedJaggedTensor, timelines: Timelines | None
    ) -> dict[str, JaggedTensor]:
        sequences = _sequences(embeddings, ids, self.features, self._not_shared, timelines)
        return sequences if self.encoder is None else self.encoder(sequences)

    def _pool(
        self,
        layer: JaggedFeatureInteraction | JaggedPooling,
        singles: dict[str, Tensor],
        sequences: dict[str, JaggedTensor],
        timelines: Timelines | None,
    ) -> Tensor:
        targets, target_times, event_times, max_events = _targets(singles, sequences, self.features, timelines)
        return layer(sequences, targets, target_times, event_times, max_events).values()


@torch.fx.wrap
def refined(entries: dict[str, Tensor], keys: list[str], changes: Tensor) -> dict[str, Tensor]:
    """Returns the entries, those of `keys` plus their part of `changes [B, len(keys) * embedding_dim]`."""
    parts = changes.chunk(len(keys), dim=1)
    return entries | {key: entries[key] + part for key, part in zip(keys, parts, strict=True)}


@torch.fx.wrap
def _single_entries(
    bags: KeyedTensor | None,
    embeddings: dict[str, JaggedTensor],
    bag_keys: list[str],
    single_keys: list[str],
) -> dict[str, Tensor]:
    """Returns by key the embeddings [B, D] that are not histories: bags and sums of a sample's embeddings."""
    # A sharded collection returns its keys in the order of the sharding.
    by_key = {} if bags is None else bags.to_dict()
    entries = {key: by_key[key] for key in bag_keys}
    for key in single_keys:
        rows = embeddings[key]
        if padding_state.is_padded and key not in padding_state.fixed_length_keys:
            rows = JaggedTensor(own_rows(rows.values(), rows.offsets(), [rows]), **parts_of(rows))
        entries[key] = pool(key, rows, None, mean=False)
    return entries


@torch.fx.wrap
def _shared(entries: dict[str, Tensor], user_keys: list[str], timelines: Timelines | None) -> dict[str, Tensor]:
    if timelines is None or not user_keys:
        return entries
    # Not an index, whose gradient would add up with atomics.
    users = torch.stack([entries[key][: timelines.count] for key in user_keys], 1)
    rows = reference.segment_expand(users, timelines.row_offsets, entries[user_keys[0]].size(0))
    return entries | dict(zip(user_keys, rows.unbind(1), strict=True))


@torch.fx.wrap
def _sequences(
    embeddings: dict[str, JaggedTensor],
    ids: KeyedJaggedTensor,
    features: list[SequenceFeatureConfig],
    not_shared: str | None,
    timelines: Timelines | None,
) -> dict[str, JaggedTensor]:
    """Returns the events with what the biases read; of timelines the U that are not empty by construction."""
    sequences = lookups.with_event_inputs(embeddings, ids, features, "sparse_features")
    if timelines is None:
        return sequences
    if not_shared is not None:
        raise ValueError(not_shared)
    count = timelines.count
    read = {key for feature in features for key in feature.sequence_keys}
    read |= {validation.input_key(key) for feature in features for key in feature.input_keys}
    for key in read & sequences.keys():
        whole = sequences[key]
        parts = parts_of(whole) | {"lengths": whole.lengths()[:count], "offsets": whole.offsets()[: count + 1]}
        is_digits = isinstance(whole, DigitRows)
        sequences[key] = whole.with_parts(**parts) if is_digits else JaggedTensor(whole.values(), **parts)
    return sequences


def _why_not_shared(encoder: JaggedEncoder) -> str | None:
    """Returns why the rows of a timeline cannot share encoded events; None if they can."""
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
    """Returns the arguments of the pooling after its sequences: ragged targets if rows share timelines."""
    if timelines is None:
        return singles, None, None, None
    rows = {"lengths": timelines.row_offsets.diff(), "offsets": timelines.row_offsets}
    targets = {key: JaggedTensor(entries, **rows) for key, entries in singles.items()}
    events = sequences[features[0].sequence_keys[0]]
    event_times = JaggedTensor(timelines.event_times, lengths=events.lengths(), offsets=events.offsets())
    return targets, JaggedTensor(timelines.target_times, **rows), event_times, timelines.max_events


@torch.fx.wrap
def _stack_entries(singles: dict[str, Tensor], pooled: list[Tensor], embedding_dim: int) -> Tensor:
    return torch.cat([*singles.values(), *pooled], dim=1).unflatten(1, (-1, embedding_dim))


@torch.fx.wrap
def merged(embeddings: dict[str, JaggedTensor], others: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    """Merges the output of a collection with `others`, which are converted to its dtype."""
    together = as_dict(embeddings)
    dtype = next((validation.unread(rows).dtype for rows in together.values()), None)
    for key, rows in others.items():
        if dtype is None or validation.unread(rows).dtype == dtype:
            together[key] = rows
        elif isinstance(rows, DigitRows):
            together[key] = rows.to_dtype(dtype)
        else:
            together[key] = JaggedTensor(rows.values().to(dtype), **parts_of(rows))
    return together
