"""The layer: target-aware attention over the histories of a TorchRec model."""

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from jfi.modules import lookup
from jfi.modules.sequence_configs import SequenceFeatureConfig, check_features, check_sizes
from jfi.modules.stacked_attention import StackedTargetAttention


class JaggedFeatureInteraction(nn.Module):
    """Pools each sample's history into one embedding by what the sample's target attends to in it.

    `torch.nn.MultiheadAttention` with the target as query and the history's events as keys and values, on TorchRec's
    jagged tensors, without padding; `jfi.modules.stacked_attention` derives how the history is read but never
    projected. After target attention as in Zhou et al., "Deep Interest Network" (KDD 2018), and Xu et al., "Enhancing
    Performance and Scalability of Large-Scale Recommendation Systems with Jagged Flash Attention" (RecSys 2024).

    The attention runs in the dtype of the history, whose rows are never cast; the projections, which never see the
    history, run in the parameters' dtype or autocast's. An empty history gives the output projection's bias.

    Args:
        features: the sequence features, with distinct names.
        embedding_dim: width of every embedding that comes in, and of each feature's output.
        num_heads: heads, a divisor of `embedding_dim`.
        num_queries: queries that each target is expanded to, with projections of their own (the paper's T).
        embedding_collection: looks up the ids of histories. With it, `forward` takes a KeyedJaggedTensor of ids;
            without it, the output of an EmbeddingCollection, and the layer owns no table.
        device: where the parameters live, "meta" included: then `to_empty()` and `reset_parameters()` follow.

    Raises:
        ValueError, TypeError: an argument that does not fit, by name.

    Example:

        >>> import torch
        >>> from jfi import JaggedFeatureInteraction, SequenceFeatureConfig
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
        ...     [SequenceFeatureConfig("taste", ["history_item", "history_rating"], ["item"], bias="position")],
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
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        check_features(features)
        check_sizes(embedding_dim, num_heads, num_queries=num_queries)
        self._id_keys: list[str] = []
        if embedding_collection is not None:
            _check_collection(embedding_collection, features, embedding_dim)
            self._id_keys = [name for table in embedding_collection.embedding_configs() for name in table.feature_names]
        self.features = features
        self.embedding_dim = embedding_dim
        self.embedding_collection = embedding_collection

        # Features of equal widths share stacked parameters, in the order in which the widths first appear.
        members: dict[tuple[int, int], list[int]] = {}
        for index, feature in enumerate(features):
            widths = feature.target_width(embedding_dim), feature.sequence_width(embedding_dim)
            members.setdefault(widths, []).append(index)
        self._members = list(members.values())
        self.groups = nn.ModuleList(
            StackedTargetAttention(
                [features[index] for index in indices], embedding_dim, num_heads, num_queries, device
            )
            for indices in self._members
        )

    @property
    def output_width(self) -> int:
        """Sum of the widths of the output's entries."""
        return self.embedding_dim * len(self.features)

    def reset_parameters(self) -> None:
        """Draws the layer's own parameters anew; those of a given `embedding_collection` stay as they are."""
        for group in self.groups:
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
                feature whose bias is a key reads bucket ids [S] there; one whose bias is "weights" reads the weights of
                its first sequence key. Lengths and offsets are int32 or int64.
            targets: embeddings [B, embedding_dim] by target key.

        Returns:
            One entry [B, embedding_dim] a feature, keyed by its name: what EmbeddingBagCollection would return.

        Raises:
            ValueError, TypeError: an absent key, a wrong width or dtype, fields that are not aligned, a bucket id out
                of range. Lengths and ids are looked at on the CPU alone, where that costs no synchronisation.
        """
        inputs = lookup.read_inputs(self._embed(sequences), targets, self.features, self.embedding_dim)
        pooled = {}
        for group, indices in zip(self.groups, self._members, strict=True):
            outputs = group([inputs[index] for index in indices])
            pooled |= {index: outputs[place] for place, index in enumerate(indices)}
        return KeyedTensor(
            keys=[feature.name for feature in self.features],
            length_per_key=[self.embedding_dim] * len(self.features),
            values=torch.cat([pooled[index] for index in range(len(self.features))], dim=1),
        )

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
        inputs = lookup.read_inputs(self._embed(sequences), targets, self.features, self.embedding_dim)
        weights = {}
        for group, indices in zip(self.groups, self._members, strict=True):
            for index, values in zip(indices, group.attention_weights([inputs[i] for i in indices]), strict=True):
                weights[index] = JaggedTensor(values=values, offsets=inputs[index].offsets)
        return {feature.name: weights[index] for index, feature in enumerate(self.features)}

    def _embed(self, sequences: KeyedJaggedTensor | dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        if self.embedding_collection is None:
            return sequences
        lookup.require_id_keys("sequences", sequences, self._id_keys)
        lookup.allow_no_samples(sequences)
        return lookup.with_event_inputs(self.embedding_collection(sequences), sequences, self.features)


def _check_collection(
    collection: EmbeddingCollection, features: list[SequenceFeatureConfig], embedding_dim: int
) -> None:
    if collection.embedding_dim() != embedding_dim:
        raise ValueError(
            f"embedding_collection must be embedding_dim={embedding_dim} wide, got {collection.embedding_dim()}"
        )
    names = [name for names in collection.embedding_names_by_table() for name in names]
    for feature in features:
        lookup.require_keys("embedding_collection", names, feature.sequence_keys)
