"""The mean of a history: what `JaggedFeatureInteraction` is measured against."""

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from jfi.modules.lookup import by_key, read_history
from jfi.modules.sequence_configs import SequenceFeatureConfig, check_features
from jfi.ops import target_attention


class JaggedMeanPooling(nn.Module):
    """Pools each sample's history into the mean of its events' combined embeddings; an empty history gives zeros.

    Has no parameters, ignores the features' targets, biases and value scales, and is called like
    JaggedFeatureInteraction without a collection of its own, so that one can stand in for the other.

    Args:
        features: the sequence features, with distinct names.
        embedding_dim: width of every embedding that comes in.

    Example:

        >>> from torchrec import JaggedTensor
        >>> events = JaggedTensor(values=torch.tensor([[1.0, 2.0], [3.0, 6.0]]), lengths=torch.tensor([2, 0]))
        >>> pooling = JaggedMeanPooling([SequenceFeatureConfig("taste", ["history_item"], ["item"])], embedding_dim=2)
        >>> pooling({"history_item": events})["taste"]
        tensor([[2., 4.],
                [0., 0.]])
    """

    def __init__(self, features: list[SequenceFeatureConfig], embedding_dim: int) -> None:
        super().__init__()
        check_features(features)
        self.features = features
        self.embedding_dim = embedding_dim

    @property
    def output_width(self) -> int:
        """Sum of the widths of the output's entries."""
        return sum(feature.sequence_width(self.embedding_dim) for feature in self.features)

    def forward(
        self, sequences: dict[str, JaggedTensor], targets: KeyedTensor | dict[str, Tensor] | None = None
    ) -> KeyedTensor:
        """Means of the histories.

        Args:
            sequences: embeddings [S, embedding_dim] by sequence key.
            targets: not looked at.

        Returns:
            One entry a feature, `embedding_dim` wide, or with "concat" that for each of its sequence keys.
        """
        means = _means(sequences, self.features, self.embedding_dim)
        return KeyedTensor(
            keys=[feature.name for feature in self.features],
            length_per_key=[feature.sequence_width(self.embedding_dim) for feature in self.features],
            values=torch.cat([means[index] for index in range(len(self.features))], dim=1),
        )


@torch.fx.wrap
def _means(
    sequences: dict[str, JaggedTensor], features: list[SequenceFeatureConfig], embedding_dim: int
) -> list[Tensor]:
    sequences = by_key(sequences)
    means = []
    for feature in features:
        history, offsets = read_history(sequences, feature, embedding_dim)
        # A query of zeros scores every event alike, and the attention is the mean.
        query = history.new_zeros(offsets.size(0) - 1, 1, 1, history.size(1))
        means.append(target_attention(query, history.unsqueeze(1), offsets=offsets).flatten(1))
    return means
