"""Configuration of sequence features, in the manner of `torchrec.modules.embedding_configs`."""

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal


@dataclass
class SequenceFeatureConfig:
    """One sequence feature: which history is attended to, by which target, and what biases scores and scales values.

    An event may have several *aligned* fields (its item, category, rating, ...): one key each, with the same lengths
    sample by sample, whose embeddings are combined into one row per event. The target's embeddings are combined in the
    same way.

    Attributes:
        name: key of the feature in the layer's output.
        sequence_keys: keys of the history's aligned fields, each `embedding_dim` wide.
        target_keys: keys of the target's embeddings, each `embedding_dim` wide.
        combine: "sum" keeps the width; "concat" makes an event `len(sequence_keys) * embedding_dim` wide and the
            target `len(target_keys) * embedding_dim`. Sums and concatenations are made before the attention; two
            fields of equal width, a power of two from 16 on, are concatenated while they are read, in eager calls on a
            GPU without the history's projection.
        bias: what is added to an event's attention scores, by head:

            - None: nothing.
            - "weights": the logarithm of the weights of the first sequence key, so that an event of weight 2 counts
              as two events and one of weight 0 is left out, with no gradient. Weights are never negative.
            - "position": a learned value for the event's distance from the newest event, which comes last; the
              distance d falls in bucket floor(log2(d + 1)).
            - any other string: a learned value for the event's bucket, whose id stands under this key, aligned with
              the sequence keys (for example the logarithm of its age).
        num_buckets: rows of that learned table. Farther positions share the last row; ids must be smaller.
        value_scale: what an event's value is multiplied by when the attended values are summed, its share of the
            attention left alone: None for nothing, or "weights" for the weights of the first sequence key, of either
            sign and with a gradient. Together with bias="weights" they do both.
        max_seqlen: the longest history, where it is known, such as the length at which the data is cut. It changes
            nothing but speed and rounding, even if it is wrong.

    Example:
        >>> SequenceFeatureConfig("taste", ["history_item", "history_rating"], ["item"], bias="history_age")
        SequenceFeatureConfig(name='taste', sequence_keys=['history_item', 'history_rating'], target_keys=['item'], \
combine='sum', bias='history_age', num_buckets=32, value_scale=None, max_seqlen=None)
    """

    name: str
    sequence_keys: list[str]
    target_keys: list[str]
    combine: Literal["sum", "concat"] = "sum"
    bias: str | None = None
    num_buckets: int = 32
    value_scale: Literal["weights"] | None = None
    max_seqlen: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty")
        for argument, keys in (("sequence_keys", self.sequence_keys), ("target_keys", self.target_keys)):
            if isinstance(keys, str) or not isinstance(keys, list):
                raise TypeError(f"{argument} of feature '{self.name}' must be a list of keys, got {keys!r}")
            if not keys:
                raise ValueError(f"{argument} of feature '{self.name}' must name at least one key, got []")
            if len(set(keys)) != len(keys):
                raise ValueError(f"{argument} of feature '{self.name}' must not repeat a key, got {keys}")
        if self.combine not in ("sum", "concat"):
            raise ValueError(f"combine of feature '{self.name}' must be 'sum' or 'concat', got {self.combine!r}")
        if self.bucket_key in self.sequence_keys:
            raise ValueError(f"bias of feature '{self.name}' must not be one of its sequence_keys, got {self.bias!r}")
        if self.num_buckets < 1:
            raise ValueError(f"num_buckets of feature '{self.name}' must be at least 1, got {self.num_buckets}")
        if self.value_scale not in (None, "weights"):
            raise ValueError(
                f"value_scale of feature '{self.name}' must be 'weights' or None, got {self.value_scale!r}"
            )
        if self.max_seqlen is not None:
            if isinstance(self.max_seqlen, bool) or not isinstance(self.max_seqlen, Integral):
                raise TypeError(f"max_seqlen of feature '{self.name}' must be an int, got {self.max_seqlen!r}")
            if self.max_seqlen < 1:
                raise ValueError(f"max_seqlen of feature '{self.name}' must be at least 1, got {self.max_seqlen}")

    def encoded(self) -> "SequenceFeatureConfig":
        """This feature behind a JaggedEncoder, which puts one row for each event under the feature's name."""
        return replace(self, sequence_keys=[self.name])

    @property
    def bucket_key(self) -> str | None:
        """Key of the bucket ids, where the bias is read from one."""
        return None if self.bias in (None, "weights", "position") else self.bias

    @property
    def bias_kind(self) -> str | None:
        """None, "weights", "position" or "buckets", whatever the key of the ids."""
        return self.bias if self.bucket_key is None else "buckets"

    @property
    def bucket_rows(self) -> int:
        """Rows of the learned bias table: 0 where nothing is learned."""
        return 0 if self.bias in (None, "weights") else self.num_buckets

    def sequence_width(self, embedding_dim: int) -> int:
        """Width of a combined event."""
        return embedding_dim * (len(self.sequence_keys) if self.combine == "concat" else 1)

    def target_width(self, embedding_dim: int) -> int:
        """Width of the combined target."""
        return embedding_dim * (len(self.target_keys) if self.combine == "concat" else 1)


def check_features(features: list[SequenceFeatureConfig], argument: str = "features") -> None:
    """Raises unless `features` is a list of at least one config with a name of its own."""
    if not isinstance(features, list) or not all(isinstance(feature, SequenceFeatureConfig) for feature in features):
        raise TypeError(f"{argument} must be a list of SequenceFeatureConfig, got {features!r}")
    if not features:
        raise ValueError(f"{argument} must hold at least one SequenceFeatureConfig, got []")
    names = [feature.name for feature in features]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{argument} must have distinct names, got {repeated} more than once")


def check_sizes(embedding_dim: int, num_heads: int, **others: int) -> None:
    """Raises unless every size is a positive integer, and `num_heads` divides `embedding_dim`."""
    for argument, size in {"embedding_dim": embedding_dim, "num_heads": num_heads, **others}.items():
        if not isinstance(size, Integral):
            raise TypeError(f"{argument} must be an int, got {size!r}")
        if size < 1:
            raise ValueError(f"{argument} must be at least 1, got {size}")
    if embedding_dim % num_heads:
        raise ValueError(f"num_heads must divide embedding_dim={embedding_dim}, got {num_heads}")
