"""The layer: target-aware attention over the histories of a TorchRec model."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from jfi.modules import inputs, validation
from jfi.modules.attention_groups import AttentionGroups
from jfi.modules.sequence_configs import SequenceFeatureConfig, check_features, check_sizes, describe, group_features
from jfi.modules.stacked_attention import StackedTargetAttention


class JaggedFeatureInteraction(nn.Module):
    """Pools each sample's history into one embedding by what the sample's target attends to in it.

    `torch.nn.MultiheadAttention` with the target as query and the history's events as keys and values, on TorchRec's
    jagged tensors, without padding; `jfi.modules.stacked_attention` derives how the history is read once and never
    projected. After target attention as in Zhou et al., "Deep Interest Network" (KDD 2018), and Xu et al., "Enhancing
    Performance and Scalability of Large-Scale Recommendation Systems with Jagged Flash Attention" (RecSys 2024).

    The attention runs in the dtype of the history, whose rows are never cast (on a processor the operators widen half
    precision); the projections, which never see the history, run in the parameters' dtype or autocast's. An empty
    history gives the output projection's bias.

    Features alike go through one launch, in a number of kernels that does not grow with theirs: those with equal
    numbers of sequence and target keys of equal widths, one kind of bias (of one `num_buckets`, if it is learned) and
    all or none with a value scale. Their histories are copied behind one another, one that several share for each of
    them, unless they lie so in memory already, as neighbours in the output of a sharded EmbeddingCollection do.

    Args:
        features: the sequence features, with distinct names.
        embedding_dim: width of every embedding that comes in, and of each feature's output.
        num_heads: heads, a divisor of `embedding_dim`.
        num_queries: queries that each target is expanded to, with projections of their own (the paper's T).
        embedding_collection: looks up the ids of histories. With it, `forward` takes a KeyedJaggedTensor of ids;
            without it, the output of an EmbeddingCollection, and the layer owns no table.
        project_history: whether events are projected to keys and values [S, embedding_dim] before the attention, and
            not targets and sums in their stead, which gives the same numbers to rounding from the same parameters. With
            T queries of H heads and events as wide as D = embedding_dim, projecting takes 2 D^2 + 2 T D multiply-adds
            an event and two tensors of the history's size, and not projecting 2 T H D and none. None projects where
            T H > D. Projected events are in the history's dtype or autocast's.
        device: where the parameters live, "meta" included: then `to_empty()` and `reset_parameters()` follow.

    Raises:
        ValueError, TypeError: an argument that does not fit, by name.

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

        Which event did the target look at? One weight for each event, query and head:

        >>> weights = layer.attention_weights(sequences, targets)["taste"]
        >>> weights.values().shape
        torch.Size([5, 1, 2])
    """

    def __init__(
        self,
        features: list[SequenceFeatureConfig],
        embedding_dim: int,
        num_heads: int = 1,
        num_queries: int = 1,
        *,
        embedding_collection: EmbeddingCollection | None = None,
        project_history: bool | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        check_features(features)
        check_sizes(embedding_dim, num_heads, num_queries=num_queries)
        if project_history is not None and not isinstance(project_history, bool):
            raise TypeError(f"project_history must be a bool or None, got {project_history!r}")
        self._id_keys: list[str] = []
        if embedding_collection is not None:
            self._id_keys = validation.check_collection(embedding_collection, features, embedding_dim)
        self.features = features
        self.embedding_dim, self.num_heads, self.num_queries = embedding_dim, num_heads, num_queries
        self.embedding_collection = embedding_collection
        if project_history is None:
            project_history = num_queries * num_heads > embedding_dim
        self.project_history = project_history

        self._groups = group_features(features, embedding_dim)
        self.attention = AttentionGroups(
            StackedTargetAttention(group, embedding_dim, num_heads, num_queries, project_history, device)
            for group in self._groups
        )
        names = [feature.name for feature in features]
        #: Of every group the places of its features in the output.
        self._places = [[names.index(feature.name) for feature in group.features] for group in self._groups]
        self._names, self._widths = names, [embedding_dim] * len(features)

    @property
    def output_width(self) -> int:
        """Sum of the widths of the output's entries."""
        return self.embedding_dim * len(self.features)

    def reset_parameters(self) -> None:
        """Draws the layer's own parameters anew; those of a given `embedding_collection` stay as they are."""
        for group in self.attention:
            group.reset_parameters()

    def forward(
        self,
        sequences: KeyedJaggedTensor | dict[str, JaggedTensor],
        targets: KeyedTensor | dict[str, Tensor],
    ) -> KeyedTensor:
        """Pools the histories by their targets.

        Args:
            sequences: a KeyedJaggedTensor of ids where the layer has an `embedding_collection`, else embeddings
                [S, embedding_dim] by sequence key, float32, bfloat16 or float16, the aligned ones of one dtype. A
                feature whose bias is a key reads bucket ids [S] there; one whose bias or value scale is "weights" reads
                the weights of its first sequence key. Lengths and offsets are int32 or int64.
            targets: embeddings [B, embedding_dim] by target key.

        Returns:
            One entry [B, embedding_dim] a feature, keyed by its name: what EmbeddingBagCollection would return.

        Raises:
            ValueError, TypeError: an absent key, a wrong width or dtype, histories of several dtypes among features
                alike, fields that are not aligned, other numbers of samples, a bucket id out of range. Lengths, weights
                and ids are looked at on the CPU alone, where that costs no synchronisation.
        """
        tensors = inputs.read_inputs(self._embed(sequences), self._groups, targets)
        outputs = [group(tensors[place]) for place, group in enumerate(self.attention)]
        return KeyedTensor(self._names, self._widths, self._in_order(outputs))

    @torch.no_grad()
    def attention_weights(
        self,
        sequences: KeyedJaggedTensor | dict[str, JaggedTensor],
        targets: KeyedTensor | dict[str, Tensor],
    ) -> dict[str, JaggedTensor]:
        """What each target attends to, for people who want to look; takes what `forward` takes.

        Returns:
            By feature name the weights [S, num_queries, num_heads] of its events, which sum to one over the events of
            a sample.
        """
        weights = {}
        tensors = inputs.read_inputs(self._embed(sequences), self._groups, targets)
        for group, one in zip(self.attention, tensors, strict=True):
            values = group.attention_weights(one).split(one.events)
            lengths = one.offsets.diff().view(group.num_features, -1)
            for feature, rows, counts in zip(group.features, values, lengths, strict=True):
                weights[feature.name] = JaggedTensor(rows, lengths=counts)
        return {name: weights[name] for name in self._names}

    def load_multihead_attention(self, name: str, attention: nn.MultiheadAttention) -> None:
        """Copies the weights of PyTorch's attention into those of one feature, which then computes the same.

        `attention` has the targets as queries and the events as both keys and values, in either order of dimensions.
        The bias of its values is merged into that of the output, which a value scale leaves alone, and the bias of its
        keys changes nothing. Its dropout is not taken over, and where it gives NaN, for an empty history, the layer
        gives the output's bias.

        Args:
            name: the feature.
            attention: with `embed_dim` and `num_heads` of this layer, and `kdim` and `vdim` the width of an event.

        Raises:
            ValueError, TypeError: an absent name, another type, other widths, or what the layer does not have:
                `num_queries` above 1, `add_bias_kv`, `add_zero_attn`.

        Example:
            >>> import torch
            >>> from jfi import JaggedFeatureInteraction, SequenceFeatureConfig
            >>> layer = JaggedFeatureInteraction([SequenceFeatureConfig("taste", ["history_item"], ["item"])], 8, 2)
            >>> layer.load_multihead_attention("taste", torch.nn.MultiheadAttention(8, num_heads=2))
        """
        validation.require_keys("features", self._names, [name])
        if not isinstance(attention, nn.MultiheadAttention):
            raise TypeError(f"attention must be an nn.MultiheadAttention, got {type(attention).__name__}")
        feature = self.features[self._names.index(name)]
        if self.num_queries > 1:
            raise ValueError(f"num_queries must be 1 to load an nn.MultiheadAttention, got {self.num_queries}")
        target_width, width = feature.target_width(self.embedding_dim), feature.sequence_width(self.embedding_dim)
        if target_width != self.embedding_dim:
            raise ValueError(
                f"feature '{name}' must have targets of embedding_dim={self.embedding_dim} to load an "
                f"nn.MultiheadAttention, got {target_width}"
            )
        wanted = {
            "embed_dim": self.embedding_dim,
            "num_heads": self.num_heads,
            "kdim": width,
            "vdim": width,
            "bias_k": None,
            "bias_v": None,
            "add_zero_attn": False,
        }
        for attribute, want in wanted.items():
            got = getattr(attention, attribute)
            if (got is not None) if want is None else got != want:
                got = "a tensor" if want is None else got
                raise ValueError(f"attention must have {attribute}={want} for feature '{name}', got {got}")
        with torch.no_grad():
            _load_multihead_attention(getattr(self.attention, name), attention)

    def _in_order(self, outputs: list[Tensor]) -> Tensor:
        """[F, B, embedding_dim] of every group -> [B, output_width] in the order of the features."""
        if len(outputs) == 1:
            return outputs[0].transpose(0, 1).flatten(1)
        pooled = {}
        for output, places in zip(outputs, self._places, strict=True):
            rows = output.unbind()
            pooled |= {place: rows[index] for index, place in enumerate(places)}
        return torch.cat([pooled[place] for place in range(len(self.features))], dim=1)

    def _embed(self, sequences: KeyedJaggedTensor | dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        if self.embedding_collection is None:
            return sequences
        validation.check_ids("sequences", sequences, self._id_keys, not self._is_unsharded())
        inputs.allow_no_samples(sequences)
        return inputs.with_event_inputs(self.embedding_collection(sequences), sequences, self.features)

    def _is_unsharded(self) -> bool:
        return isinstance(self.embedding_collection, validation.Collections)

    def extra_repr(self) -> str:
        return describe(self.features, num_heads=self.num_heads, num_queries=self.num_queries)


def _load_multihead_attention(own: SimpleNamespace, attention: nn.MultiheadAttention) -> None:
    if attention.in_proj_weight is None:
        query, key, value = attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
    else:
        query, key, value = attention.in_proj_weight.chunk(3)
    own.query_weight.copy_(query)
    own.key_weight.copy_(key)
    own.value_weight.copy_(value)
    own.output_weight.copy_(attention.out_proj.weight)
    if attention.in_proj_bias is None:
        own.query_bias.zero_()
        own.output_bias.zero_()
    else:
        query_bias, _, value_bias = attention.in_proj_bias.chunk(3)
        own.query_bias.copy_(query_bias)
        own.output_bias.copy_(attention.out_proj.bias + attention.out_proj.weight @ value_bias)
