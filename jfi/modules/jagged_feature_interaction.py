"""The layer: target-aware attention over the histories of a TorchRec model."""

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from jfi.modules import lookups, stacked_attention, validation
from jfi.modules.events import read_events
from jfi.modules.sequence_configs import (
    FeatureGroup,
    SequenceFeatureConfig,
    check_features,
    check_sizes,
    describe,
    group_features,
)
from jfi.modules.stacked_attention import FeatureAttention
from jfi.utils.arguments import check_device, check_module, module_name, shown
from jfi.utils.context import not_scriptable

torch.fx.wrap("read_events")


class JaggedFeatureInteraction(nn.Module):
    """Returns pooled features: each sample's history as one embedding, by attention of the target to its events.

    `torch.nn.MultiheadAttention` with the target as query and the history's events as keys and values, on TorchRec's
    jagged tensors, without padding; `jfi.modules.stacked_attention` derives why the history is read once and (but for
    many ragged targets of a user on a CPU) never projected. It follows target attention as in Zhou et al., "Deep
    Interest Network" (KDD 2018), and Xu et al., "Enhancing Performance and Scalability of Large-Scale Recommendation
    Systems with Jagged Flash Attention" (RecSys 2024).

    The attention runs in the dtype of the history, whose rows are never cast (on a CPU the operators widen half
    precision); the projections, which never see the history, run in the parameters' dtype or autocast's. An empty
    history gives the output projection's bias.

    Features of the same kind form a group, and each kernel serves a whole group: the same number of sequence keys and
    of target keys, of the same widths, the same kind of bias with the same number of buckets, and all or none with
    weighted values. The number of kernels does not depend on the number of features in a group, unless targets are
    ragged and have times: then each feature with a bias by position or age takes a separate call. The histories of a
    group are concatenated (a shared history once for each feature), without a copy if they are adjacent in memory
    already, as in the output of a sharded EmbeddingCollection.

    The parameters are named by feature, `attention.taste.query_weight`, so that a layer with one more feature loads
    those of a layer without it (strict=False). They are stacked in `forward` where a group has several features.

    Args:
        features: the sequence features, with distinct names.
        embedding_dim: width of each feature's output, and of every input embedding whose width is not given.
        num_heads: heads, a divisor of `embedding_dim`.
        num_queries: queries per target (the paper's T), each with a separate projection.
        embedding_collection: a module that looks up the histories, such as an EmbeddingCollection. With it, `forward`
            takes ids in a KeyedJaggedTensor and calls it; without it, the output of an EmbeddingCollection, and the
            layer has no tables.
        sequence_dim: width of the embeddings of events; None for `embedding_dim`.
        target_dim: width of the embeddings of targets; None for `embedding_dim`.
        device: device of the parameters; after "meta" call `to_empty()` and `reset_parameters()`.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:

        >>> import torch
        >>> from jfi import JaggedFeatureInteraction, PositionBias, SequenceFeatureConfig
        >>> from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
        >>> #                        sample 0    1       2
        >>> # "history_item"           [7, 3]   []   [5, 1, 7]   <- events, oldest first
        >>> # "history_rating"         [4, 5]   []   [1, 2, 5]   <- aligned with them
        >>> sequences = KeyedJaggedTensor(
        ...     keys=["history_item", "history_rating"],
        ...     values=torch.tensor([7, 3, 5, 1, 7, 4, 5, 1, 2, 5]),
        ...     lengths=torch.tensor([2, 0, 3, 2, 0, 3]),
        ... )
        >>> tables = [
        ...     EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=10, feature_names=["history_item"]),
        ...     EmbeddingConfig(name="rating", embedding_dim=8, num_embeddings=6, feature_names=["history_rating"]),
        ... ]
        >>> layer = JaggedFeatureInteraction(
        ...     [SequenceFeatureConfig("taste", ["history_item", "history_rating"], ["item"], bias=PositionBias())],
        ...     embedding_dim=8,
        ...     num_heads=2,
        ...     embedding_collection=EmbeddingCollection(tables=tables),
        ... )
        >>> targets = {"item": torch.randn(3, 8)}
        >>> pooled = layer(sequences, targets)
        >>> pooled.keys(), pooled["taste"].shape
        (['taste'], torch.Size([3, 8]))

        What does each target attend to? A weight for each event, query and head:

        >>> weights = layer.attention_weights(sequences, targets)["taste"]
        >>> weights.values().shape
        torch.Size([5, 1, 2])

        Several targets of a user can share their history, which is then read once. With times each of them sees what
        is strictly older: here the second of user 2 sees one event more than the first.

        >>> from torchrec import JaggedTensor
        >>> counts, lengths = torch.tensor([1, 0, 2]), torch.tensor([2, 0, 3])
        >>> candidates = {"item": JaggedTensor(torch.randn(3, 8), lengths=counts)}
        >>> target_times = JaggedTensor(torch.tensor([50, 30, 40]), lengths=counts)
        >>> event_times = JaggedTensor(torch.tensor([10, 20, 10, 20, 30]), lengths=lengths)
        >>> layer(sequences, candidates, target_times, event_times)["taste"].shape
        torch.Size([3, 8])
        >>> weights = layer.attention_weights(sequences, candidates, target_times, event_times)["taste"]
        >>> weights.lengths(), weights.values()[:, 0, 0] > 0
        (tensor([2, 3, 3]), tensor([ True,  True,  True,  True, False,  True,  True,  True]))
    """

    def __init__(
        self,
        features: list[SequenceFeatureConfig],
        embedding_dim: int,
        num_heads: int = 1,
        num_queries: int = 1,
        *,
        embedding_collection: nn.Module | None = None,
        sequence_dim: int | None = None,
        target_dim: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        check_features(features)
        sequence_dim = embedding_dim if sequence_dim is None else sequence_dim
        target_dim = embedding_dim if target_dim is None else target_dim
        widths = {"sequence_dim": sequence_dim, "target_dim": target_dim}
        check_sizes(embedding_dim, num_heads, num_queries=num_queries, **widths)
        for feature in features:
            if feature.relative_bias is not None:
                what = f"relative_bias of feature '{feature.name}'"
                raise ValueError(
                    f"{what} must be None in this layer, got {feature.relative_bias!r}: it belongs to a JaggedEncoder, "
                    "and feature.encoded() is the feature behind it"
                )
        check_device("device", device)
        if embedding_collection is not None:
            check_module("embedding_collection", embedding_collection)
        self.features = features
        self.embedding_dim, self.num_heads, self.num_queries = embedding_dim, num_heads, num_queries
        self.embedding_collection = embedding_collection
        self._reads_inputs = any([one.reads_weights or one.input_keys for one in features])  # more than embeddings
        self.sequence_dim, self.target_dim = sequence_dim, target_dim
        #: The features by kind; one launch serves a group.
        self.groups = group_features(features, sequence_dim, target_dim)
        sizes = (target_dim, sequence_dim, embedding_dim, num_heads, num_queries, device)
        self.attention = nn.ModuleDict({module_name(f.name): FeatureAttention(f, *sizes) for f in features})
        self._names, self._widths = [feature.name for feature in features], [embedding_dim] * len(features)
        self._module_names = dict(zip(self._names, self.attention, strict=True))

    @property
    def output_width(self) -> int:
        """Sum of the widths of the output's entries."""
        return self.embedding_dim * len(self.features)

    __prepare_scriptable__ = not_scriptable("JaggedFeatureInteraction")

    def reset_parameters(self) -> None:
        """Draws the parameters of the layer anew; those of a given `embedding_collection` stay as they are."""
        by_name: Any = self.attention
        for feature in by_name.values():
            feature.reset_parameters()

    def forward(
        self,
        sequences: KeyedJaggedTensor | dict[str, JaggedTensor],
        targets: KeyedTensor | dict[str, Tensor] | dict[str, JaggedTensor],
        target_times: JaggedTensor | None = None,
        event_times: JaggedTensor | dict[str, JaggedTensor] | None = None,
        max_events: int | None = None,
        ids: KeyedJaggedTensor | None = None,
    ) -> KeyedTensor:
        """Pools the histories by their targets.

        Args:
            sequences: a KeyedJaggedTensor of ids where the layer has an `embedding_collection`, else embeddings
                [S, sequence_dim] by sequence key, float32, bfloat16 or float16, the aligned ones of one dtype. A
                feature with a KeyBias reads bucket ids [S] under its key; one with a WeightBias or weighted values
                reads the weights of its first sequence key (see `ids`). Lengths and offsets are int32 or int64.
            targets: embeddings by target key, either dense, [B, target_dim], or ragged: JaggedTensors of as many
                users as the histories, whose values [R, target_dim] are the users' candidates, in the same number
                for all keys. The `values()` of a JaggedTensor are dense targets only where each sample has exactly one
                id: with 2, 0 and 1 they have as many rows as samples too, which nothing can notice.
            target_times: of ragged targets the times [R], int32, int64 or float64 in any unit, not decreasing within a
                user. A candidate then sees the events that are strictly older than itself, none of the same time,
                and its biases by position and age are those of a history cut to these events. Without times it sees
                all events of its user.
            event_times: given with `target_times`: times [S] of the same dtype, not decreasing within a user, by the
                features' first sequence keys, or one JaggedTensor for all.
            max_events: given with times: a candidate sees at most this many of the newest events; None for all.
            ids: beyond embeddings the ids that an EmbeddingCollection outside the layer has looked up: weights and
                bucket ids are then read from them, since the collection's output has none. Rows that are not read yet,
                here or on other ranks, stay so.

        Returns:
            An entry [B, embedding_dim] for each feature, keyed by its name, as EmbeddingBagCollection returns; of
            ragged targets [R, embedding_dim], in the order of the packed candidates. Without an event to see it is the
            output projection's bias.

        Raises:
            ValueError, TypeError: a missing key, a wrong width or dtype, histories of several dtypes in one group of
                features, fields that are not aligned, different numbers of samples, a bucket id out of range. The
                contents of lengths, weights and ids are checked on the CPU only; on a GPU that would synchronize.
        """
        sequences = self._embed(sequences, targets, ids)
        events = read_events(sequences, self.groups, targets, target_times, event_times, max_events)
        outputs = []
        for number, group in enumerate(self.groups):
            outputs.append(stacked_attention.attend(events[number], group, self._parameters_of(group), self.num_heads))
        values = outputs[0] if len(outputs) == 1 else self._in_order(outputs)
        return KeyedTensor(self._names, self._widths, values)

    @torch.no_grad()
    def attention_weights(
        self,
        sequences: KeyedJaggedTensor | dict[str, JaggedTensor],
        targets: KeyedTensor | dict[str, Tensor] | dict[str, JaggedTensor],
        target_times: JaggedTensor | None = None,
        event_times: JaggedTensor | dict[str, JaggedTensor] | None = None,
        max_events: int | None = None,
        ids: KeyedJaggedTensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Returns how much each target attends to each event, for inspection and plots; takes what `forward` takes.

        Returns:
            For each feature, by name, the weights [S, num_queries, num_heads] of its events, which sum to one over the
            events of a sample. Of ragged targets [P, num_queries, num_heads], by candidate: each has a weight for every
            event of its user, 0 for those that it does not see.
        """
        sequences, weights = lookups.fetched(self._embed(sequences, targets, ids)), dict[str, JaggedTensor]()
        by_group = read_events(sequences, self.groups, targets, target_times, event_times, max_events)
        for group, events in zip(self.groups, by_group, strict=True):
            by_feature = stacked_attention.attention_weights(events, group, self._parameters_of(group), self.num_heads)
            weights |= {feature.name: found for feature, found in zip(group.features, by_feature, strict=True)}
        return {name: weights[name] for name in self._names}

    def _parameters_of(self, group: FeatureGroup) -> list[tuple[Tensor | None, ...]]:
        by_name: Any = self.attention
        return [by_name[self._module_names[feature.name]].own_parameters() for feature in group.features]

    def _in_order(self, outputs: list[Tensor]) -> Tensor:
        pooled: dict[str, Tensor] = {}
        for output, group in zip(outputs, self.groups, strict=True):
            rows = output.split(self.embedding_dim, 1)  # indexed, since a proxy of torch.fx cannot be iterated
            pooled |= {feature.name: rows[index] for index, feature in enumerate(group.features)}
        return torch.cat([pooled[name] for name in self._names], dim=1)

    def _embed(
        self, sequences: KeyedJaggedTensor | dict[str, JaggedTensor], targets: object, ids: KeyedJaggedTensor | None
    ) -> KeyedJaggedTensor | dict[str, JaggedTensor]:
        """Returns the embeddings of the histories, looked up if the layer has a collection; targets must be given."""
        if targets is None:
            raise TypeError("targets must be a KeyedTensor or a dict of Tensor by target key, got None")
        if self.embedding_collection is None:
            return sequences if ids is None else lookups.with_event_inputs(sequences, ids, self.features)
        if not (ids is None or isinstance(ids, torch.fx.Proxy)):
            raise TypeError(
                f"ids must be None where sequences are the ids that embedding_collection looks up, got {shown(ids)}"
            )
        if not isinstance(sequences, KeyedJaggedTensor | torch.fx.Proxy):
            raise TypeError(f"sequences must be a KeyedJaggedTensor of ids, got {type(sequences).__name__}")
        validation.allow_no_samples(sequences)
        embeddings = self.embedding_collection(sequences)
        if not self._reads_inputs:
            return embeddings
        return lookups.with_event_inputs(embeddings, sequences, self.features, "sequences")

    def extra_repr(self) -> str:
        widths = {"sequence_dim": self.sequence_dim, "target_dim": self.target_dim}
        widths = {name: width for name, width in widths.items() if width != self.embedding_dim}
        return describe(self.features, num_heads=self.num_heads, num_queries=self.num_queries, **widths)
