"""A Transformer encoder over histories: each event's embedding takes up the events around it.

A block is pre-norm, as in Xiong et al., "On Layer Normalization in the Transformer Architecture" (ICML 2020):

    y = x + W_o concat_h(attention_h(LayerNorm(x))) + b_o            x, y [S, D], one event per row
    z = y + FeedForward(LayerNorm(y))                                W_2 gelu(W_1 · + b_1) + b_2, with dropout

and a LayerNorm follows the last block, since the residual stream is never normalized. The rows stay packed throughout:
only the attention reads offsets. Keys and values are projected without a bias: a key bias would add the same to all
scores of a query and cancel in the softmax; a value bias would be weighted by probabilities that sum to one, and so be
part of b_o.

A causal encoder may add a learned bias to the score of each pair of events, by their distance or the time between them,
as in Raffel et al., "Exploring the Limits of Transfer Learning" (2020), with buckets in powers of two as in Zhai et
al., "Actions Speak Louder than Words" (HSTU, ICML 2024):

    score_ij = q_i k_j / sqrt(D/H) + bias_j + relative_bias[floor(log2(distance or time from j to i)) + 1]
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.modules import lookups
from jfi.modules.events import Events, as_dict, read_events
from jfi.modules.sequence_configs import (
    FeatureGroup,
    SequenceFeatureConfig,
    TimeBias,
    check_features,
    check_sizes,
    describe,
    reset_bias,
)
from jfi.ops import jagged_attention
from jfi.tables.table_rows import parts_of
from jfi.utils.arguments import check_device, check_number, check_type, module_name
from jfi.utils.context import not_scriptable

torch.fx.wrap("read_events")
torch.fx.wrap("jagged_attention")

#: Attention among each sample's events, as `jagged_attention` with its offsets bound: called with query, key and value
#: [S, H, D/H], and `causal`, `key_bias` and what a relative bias needs by keyword. An argument, since serving exports
#: the blocks with another attention.
Attention = Callable[..., Tensor]


class JaggedEncoder(nn.Module):
    """Self-attention among each sample's events, on packed rows: pre-norm Transformer blocks for JaggedTensors.

    It goes between an EmbeddingCollection and JaggedFeatureInteraction. A feature's aligned fields are combined into
    one row per event, which is projected to `embedding_dim` if they are concatenated; the encoded rows are returned
    under the feature's name, where the feature's `SequenceFeatureConfig.encoded()` reads them. Other keys are returned
    unchanged; a key equal to a feature's name is replaced after all features have read it.

    Each feature has separate blocks; state_dict() names them by feature, `stacks.taste.blocks.0...`. A learned bias has
    a table in every block, of `num_buckets * num_heads` numbers that start at zero, so that each block learns how far
    it looks back: `bucket_bias` by the attended event, `relative_bias` by the pair of events.

    Attention compares all pairs of a sample's events: time grows with the sum of the squared lengths.

    Args:
        features: the sequence features to encode, with distinct names. Their `bias` is added to the scores of the
            self-attention, by head and by attended event, their `relative_bias` by head and by pair of events; their
            targets and `weighted_values`, which belong to the pooling, are not read.
        embedding_dim: width of every input embedding and of an encoded event.
        num_heads: heads, a divisor of `embedding_dim`.
        num_layers: blocks per feature.
        feedforward_ratio: width of the hidden layer of a block's feed-forward part, in `embedding_dim`.
        dropout: probability with which an element is zeroed in training, after both layers of the feed-forward part.
        causal: whether an event attends only to itself and to those before it; True for a `relative_bias`.
        device: device of the parameters; after "meta" call `to_empty()` and `reset_parameters()`.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:

        >>> import torch
        >>> from jfi import JaggedEncoder, JaggedFeatureInteraction, PositionBias, SequenceFeatureConfig
        >>> from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
        >>> #                        sample 0    1       2
        >>> # "history_item"           [7, 3]   []   [5, 1, 7]   <- events, oldest first
        >>> # "history_rating"         [4, 5]   []   [1, 2, 5]   <- aligned with them
        >>> ids = KeyedJaggedTensor(
        ...     keys=["history_item", "history_rating"],
        ...     values=torch.tensor([7, 3, 5, 1, 7, 4, 5, 1, 2, 5]),
        ...     lengths=torch.tensor([2, 0, 3, 2, 0, 3]),
        ... )
        >>> tables = [
        ...     EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=10, feature_names=["history_item"]),
        ...     EmbeddingConfig(name="rating", embedding_dim=8, num_embeddings=6, feature_names=["history_rating"]),
        ... ]
        >>> taste = SequenceFeatureConfig("taste", ["history_item", "history_rating"], ["item"], bias=PositionBias())
        >>> encoder = JaggedEncoder([taste], embedding_dim=8, num_heads=2, num_layers=2)
        >>> encoded = encoder(EmbeddingCollection(tables=tables)(ids))
        >>> sorted(encoded), encoded["taste"].values().shape
        (['history_item', 'history_rating', 'taste'], torch.Size([5, 8]))
        >>> layer = JaggedFeatureInteraction([taste.encoded()], embedding_dim=8, num_heads=2)
        >>> layer(encoded, {"item": torch.randn(3, 8)})["taste"].shape
        torch.Size([3, 8])

        With a bias by the time between two events:

        >>> from jfi import TimeBias
        >>> from torchrec import JaggedTensor
        >>> clicks = SequenceFeatureConfig("clicks", ["click"], ["item"], relative_bias=TimeBias("click_time"))
        >>> encoder = JaggedEncoder([clicks], embedding_dim=8, num_heads=2, causal=True)
        >>> lengths = torch.tensor([2, 0, 3])
        >>> events = JaggedTensor(torch.randn(5, 8), lengths=lengths)
        >>> times = JaggedTensor(torch.tensor([10, 70, 5, 5, 900]), lengths=lengths)
        >>> encoder({"click": events, "click_time": times})["clicks"].values().shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        features: list[SequenceFeatureConfig],
        embedding_dim: int,
        num_heads: int = 1,
        num_layers: int = 1,
        *,
        feedforward_ratio: int = 4,
        dropout: float = 0.0,
        causal: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        check_features(features)
        check_sizes(embedding_dim, num_heads, num_layers=num_layers, feedforward_ratio=feedforward_ratio)
        check_number("dropout", dropout, lambda p: 0 <= p < 1, "in [0, 1)")
        check_type("causal", causal, bool, "a bool")
        check_device("device", device)
        for feature in features:
            if feature.relative_bias is not None and not causal:
                because = f"since feature '{feature.name}' has relative_bias={feature.relative_bias!r}"
                raise ValueError(f"causal must be True, {because}, got {causal!r}")
        self.features = features
        self.embedding_dim, self.num_heads, self.num_layers, self.causal = embedding_dim, num_heads, num_layers, causal
        self._groups = [FeatureGroup([replace(feature, weighted_values=False)], embedding_dim) for feature in features]
        options = (embedding_dim, num_heads, num_layers, feedforward_ratio, dropout, causal, device)
        self.stacks = nn.ModuleDict({module_name(f.name): EncoderStack(f, *options) for f in features})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections anew as in Glorot & Bengio (2010), resets the biases, and sets the norms to one.

        Both projections that a block adds to its input start at zero, so that the block starts as the identity: random
        ones would add vectors that are far larger than the rows of a new table.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        stacks: Any = self.stacks
        for stack in stacks.values():
            for block in stack.blocks:
                nn.init.zeros_(block.output.weight)
                nn.init.zeros_(block.feedforward[-2].weight)
                reset_bias(block.bucket_bias, block.bias)
                reset_bias(block.relative_bias, block.relative)

    __prepare_scriptable__ = not_scriptable("JaggedEncoder")

    def forward(
        self, sequences: JaggedTensor | dict[str, JaggedTensor], ids: KeyedJaggedTensor | None = None
    ) -> JaggedTensor | dict[str, JaggedTensor]:
        """Encodes the events of every feature.

        Args:
            sequences: embeddings [S, embedding_dim] by sequence key, float32, bfloat16 or float16, aligned ones of the
                same dtype, with the inputs of the features' biases as in `JaggedFeatureInteraction.forward` and times
                [S] under the key of a relative TimeBias; or one JaggedTensor, if the only feature reads a single key.
                Lengths and offsets are int32 or int64.
            ids: the input of the EmbeddingCollection that looked up the embeddings, of which weights, bucket ids and
                times are read, as in `JaggedFeatureInteraction.forward`.

        Returns:
            The input, and under each feature's name its encoded events [S, embedding_dim] in the parameters' dtype,
            with the lengths and the weights of its first sequence key; for a JaggedTensor, the encoded events.

        Raises:
            ValueError, TypeError: a missing key, a wrong width or dtype, fields that are not aligned, a bucket id out
                of range, times that decrease. The contents of lengths, ids and times are checked on the CPU only; on a
                GPU that would synchronize.
        """
        by_key = _by_key(sequences, self.features, ids)
        events = read_events(by_key, self._groups)
        encoded = [
            stack(events[f], partial(jagged_attention, query_offsets=events[f].offsets))
            for f, stack in enumerate(self.stacks.values())
        ]
        return _with_encoded(sequences, by_key, self.features, encoded)

    def extra_repr(self) -> str:
        return describe(self.features, num_heads=self.num_heads, num_layers=self.num_layers, causal=self.causal)


class EncoderStack(nn.Module):
    """The blocks of one feature and the LayerNorm after them, on plain tensors; the arguments are JaggedEncoder's."""

    def __init__(
        self,
        feature: SequenceFeatureConfig,
        embedding_dim: int,
        num_heads: int,
        num_layers: int,
        feedforward_ratio: int,
        dropout: float,
        causal: bool,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        width = feature.sequence_width(embedding_dim)
        same = width == embedding_dim
        self.input_projection = nn.Identity() if same else nn.Linear(width, embedding_dim, device=device)
        self.blocks = nn.ModuleList(
            EncoderBlock(feature, embedding_dim, num_heads, feedforward_ratio, dropout, causal, device)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(embedding_dim, device=device)

    def forward(self, events: Events, attention: Attention) -> Tensor:
        """Encodes events [S, sequence_width] to [S, embedding_dim]."""
        # The residual stream keeps the parameters' dtype, under autocast too, so that its sums are not rounded.
        dtype = self.norm.weight.dtype
        x = self.input_projection(events.history.to(dtype)).to(dtype)
        for block in self.blocks:
            x = block(x, events, attention)
        return self.norm(x)


class EncoderBlock(nn.Module):
    """Self-attention and the feed-forward part, each after a LayerNorm and with a residual path.

    Query, key and value are projected separately, so that each is contiguous, as the attention reads it.
    """

    bucket_bias: nn.Parameter | None
    relative_bias: nn.Parameter | None

    def __init__(
        self,
        feature: SequenceFeatureConfig,
        width: int,
        num_heads: int,
        feedforward_ratio: int,
        dropout: float,
        causal: bool,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_width = num_heads, width // num_heads
        self.causal, self.bias = causal, feature.bias
        self.attention_norm = nn.LayerNorm(width, device=device)
        self.query = nn.Linear(width, width, device=device)
        self.key = nn.Linear(width, width, bias=False, device=device)
        self.value = nn.Linear(width, width, bias=False, device=device)
        self.output = nn.Linear(width, width, device=device)
        self.relative = relative = feature.relative_bias
        self.by_time = isinstance(relative, TimeBias)
        rows = {"bucket_bias": feature.num_buckets, "relative_bias": 0 if relative is None else relative.num_buckets}
        for name, count in rows.items():
            table = torch.empty(count, num_heads, device=device)
            self.register_parameter(name, nn.Parameter(table) if count else None)
        self.feedforward_norm = nn.LayerNorm(width, device=device)
        self.feedforward = nn.Sequential(
            nn.Linear(width, feedforward_ratio * width, device=device),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(feedforward_ratio * width, width, device=device),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor, events: Events, attention: Attention) -> Tensor:
        """Maps [S, D] to [S, D]."""
        normed = self.attention_norm(x)
        query, key, value = self._by_head(self.query(normed)), self.key(normed), self.value(normed)
        bias = events.key_bias(self.bucket_bias, self.num_heads, query.dtype)
        options: dict[str, Any] = {"causal": self.causal, "key_bias": bias}
        if self.by_time:
            options |= {"query_time": events.times, "key_time": events.times}
        if self.relative_bias is not None:
            options["time_bias" if self.by_time else "position_bias"] = self.relative_bias.to(query.dtype)
        attended = attention(query, self._by_head(key), self._by_head(value), **options)
        x = x + self.output(attended.flatten(1))
        return x + self.feedforward(self.feedforward_norm(x))

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.unflatten(1, (self.num_heads, self.head_width))


@torch.fx.wrap
def _by_key(
    sequences: JaggedTensor | dict[str, JaggedTensor],
    features: list[SequenceFeatureConfig],
    ids: KeyedJaggedTensor | None,
) -> dict[str, JaggedTensor]:
    if not isinstance(sequences, JaggedTensor):
        by_key = as_dict(sequences, "sequences must be a JaggedTensor or a dict of them, an embedding a row")
        return lookups.with_event_inputs(by_key, ids, features)
    read = {key for feature in features for key in (*feature.sequence_keys, *feature.input_keys)}
    if len(features) > 1 or len(read) > 1:
        raise TypeError(f"sequences must be a dict of JaggedTensor, since features read {sorted(read)}, got one alone")
    return lookups.with_event_inputs({features[0].sequence_keys[0]: sequences}, ids, features)


@torch.fx.wrap
def _with_encoded(
    sequences: JaggedTensor | dict[str, JaggedTensor],
    by_key: dict[str, JaggedTensor],
    features: list[SequenceFeatureConfig],
    encoded: list[Tensor],
) -> JaggedTensor | dict[str, JaggedTensor]:
    outputs = {}
    for feature, values in zip(features, encoded, strict=True):
        outputs[feature.name] = JaggedTensor(values, **parts_of(by_key[feature.sequence_keys[0]]))
    return outputs[features[0].name] if isinstance(sequences, JaggedTensor) else by_key | outputs
