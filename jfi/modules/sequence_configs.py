"""Configuration of sequence features, in the manner of `torchrec.modules.embedding_configs`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from jfi.utils.arguments import MAX_LAYERS, MAX_ROWS, MAX_WIDTH, check_choice, check_int, check_keys, check_type
from jfi.utils.operands import MAX_BUCKETS


@dataclass(frozen=True)
class PositionBias:
    """A learned score bias by an event's distance from the newest event, which comes last.

    A subclass is a bias by distance with other buckets or other initial values: a frozen dataclass with a method
    `buckets`, an `initial_table` or both. Kernels, padded batches, other ranks and a server then read its table as they
    read this one. A softmax ignores what is the same for all events of a query, so that a bias which falls linearly
    with the distance between two events of a causal JaggedEncoder, as in ALiBi, is one of these. Other buckets are
    refused as a `relative_bias` and with times, where kernels find the bucket of each pair by the formula below.

    Attributes:
        num_buckets: rows of the learned table, as a `relative_bias` at most 64. The distance d falls in bucket
            floor(log2(d + 1)); farther events share the last one. As a `relative_bias` an event itself is in bucket 0,
            the event d before it in bucket floor(log2(d)) + 1.
        recency: how the table begins. By default at zero; if True so that heads weigh events by powers of their
            distance, (d + 1)^-a: a is 0 for the first head, and from 1/2 to 2, evenly in log a, for the others (1/2
            where there is one other), so a single head begins at zero. Heads of recent events are then less diluted by
            a longer history. Slopes by head are those of ALiBi (Press et al. 2022), but of the logarithm of the
            distance, and learned from there.
    """

    num_buckets: int = 32
    recency: bool = False
    #: A method (count [S]) -> buckets [S] int32, from 0 to num_buckets - 1 for any integer; None for those above. The
    #: count is d + 1; below 1 it belongs to a row behind a padded batch, whose bias nothing reads.
    buckets: ClassVar[Callable[..., Tensor] | None] = None

    def __post_init__(self) -> None:
        check_int("num_buckets of PositionBias", self.num_buckets, most=MAX_ROWS)
        check_type("recency of PositionBias", self.recency, bool, "a bool")

    def initial_table(self, num_heads: int) -> Tensor:
        """Returns the initial values [num_buckets, num_heads] of the learned table, float32."""
        table = torch.zeros(self.num_buckets, num_heads)
        if self.recency:
            table[:, 1:] = torch.logspace(-1, 1, num_heads - 1, 2.0)
            table *= -math.log(2) * torch.arange(self.num_buckets)[:, None]
        return table


@dataclass(frozen=True)
class WeightBias:
    """The logarithm of the weights of the first sequence key, added to an event's scores in every head.

    An event of weight 2 counts as two events; one of weight 0 is hidden and gets no gradient. Weights must not be
    negative.
    """


@dataclass(frozen=True)
class KeyBias:
    """A learned score bias by a bucket id of each event, such as the bucket of its age.

    Attributes:
        key: the key of the bucket ids, which are aligned with the sequence keys.
        num_buckets: rows of the learned table; ids must be smaller.
    """

    key: str
    num_buckets: int = 32
    _most_buckets: ClassVar[int] = MAX_ROWS

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_type(f"key of {name}", self.key, str, "a str")
        if not self.key or self.key != self.key.strip():
            raise ValueError(f"key of {name} must be a key without spaces around it, got {self.key!r}")
        check_int(f"num_buckets of {name}", self.num_buckets, most=self._most_buckets)


@dataclass(frozen=True)
class TimeBias(KeyBias):
    """A learned score bias by an event's age at the time of the target; as a `relative_bias` at that of another event.

    An age below 1 is in bucket 0, any other in bucket 1 + floor(log2(age)); older events share the last one. Where
    `JaggedFeatureInteraction.forward` is given times, the age of each pair of candidate and event is computed from
    them, in their unit, and no ids are read; elsewhere the buckets are ids under `key`, as with KeyBias.

    Attributes:
        key: the key of the bucket ids for batches without times; as a `relative_bias` that of the events' times, which
            are aligned with the sequence keys and do not decrease in a sample: int32, int64 or float64, in any unit.
        num_buckets: rows of the learned table, at most 64.
    """

    _most_buckets: ClassVar[int] = MAX_BUCKETS


Bias = PositionBias | WeightBias | KeyBias


@dataclass
class SequenceFeatureConfig:
    """One sequence feature: a history, the target that attends to it, and what is added to its scores.

    An event may have several *aligned* fields (its item, category, rating, ...): one key each, with the same lengths
    sample by sample, whose embeddings are combined into one row per event. The target's embeddings are combined in the
    same way.

    Attributes:
        name: key of the feature in the layer's output, and its name in the layer's state_dict; without a period.
        sequence_keys: keys of the history's aligned fields, each `embedding_dim` wide.
        target_keys: keys of the target's embeddings, each `embedding_dim` wide.
        combine: "sum" keeps the width; "concat" makes an event `len(sequence_keys) * embedding_dim` wide and the
            target `len(target_keys) * embedding_dim`.
        bias: added to an event's attention scores: `PositionBias`, `WeightBias`, `KeyBias`, `TimeBias`, or None for
            none. The learned ones have a value for each head.
        weighted_values: whether each event's value is multiplied by the event's weight, that of the first sequence key;
            the softmax does not read it. As with TorchRec's `is_weighted`, weights may have either sign and get a
            gradient. With WeightBias as well, a weight does both.
        max_seqlen: the longest history, if it is known, such as the length at which the data is cut. A hint: even a
            wrong one changes nothing but speed and rounding.
        relative_bias: added to the scores of pairs of events in a causal JaggedEncoder, which alone reads it:
            `PositionBias` by how many events one lies behind the other, `TimeBias` by the time between them, or None
            for none. Each block learns a value for each bucket and head. `bias` is added too.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> from jfi import KeyBias, SequenceFeatureConfig
        >>> SequenceFeatureConfig("taste", ["history_item", "history_rating"], ["item"], bias=KeyBias("history_age"))
        SequenceFeatureConfig(name='taste', sequence_keys=['history_item', 'history_rating'], target_keys=['item'], \
combine='sum', bias=KeyBias(key='history_age', num_buckets=32), weighted_values=False, max_seqlen=None, \
relative_bias=None)
    """

    name: str
    sequence_keys: list[str]
    target_keys: list[str]
    combine: Literal["sum", "concat"] = "sum"
    bias: Bias | None = None
    weighted_values: bool = False
    max_seqlen: int | None = None
    relative_bias: PositionBias | TimeBias | None = None

    def __post_init__(self) -> None:
        check_type("name", self.name, str, "a str")
        if not self.name or "." in self.name:
            raise ValueError(f"name must not be empty or contain a period, got {self.name!r}")
        of_feature = f"of feature '{self.name}'"
        check_keys(f"sequence_keys {of_feature}", self.sequence_keys, may_be_empty=False)
        check_keys(f"target_keys {of_feature}", self.target_keys, may_be_empty=False)
        check_choice(f"combine {of_feature}", self.combine, ("sum", "concat"))
        if self.bias is not None and not isinstance(self.bias, Bias):
            raise TypeError(f"bias {of_feature} must be a PositionBias, WeightBias, KeyBias or None, got {self.bias!r}")
        if self.bias_key in self.sequence_keys:
            raise ValueError(f"bias {of_feature} must not read one of its sequence_keys, got {self.bias!r}")
        check_type(f"weighted_values {of_feature}", self.weighted_values, bool, "a bool")
        if self.max_seqlen is not None:
            check_int(f"max_seqlen {of_feature}", self.max_seqlen, most=torch.iinfo(torch.int64).max)
        relative, argument = self.relative_bias, f"relative_bias {of_feature}"
        check_type(argument, relative, PositionBias | TimeBias | None, "a PositionBias, TimeBias or None")
        if relative is not None:
            check_int(f"num_buckets of {argument}", relative.num_buckets, most=MAX_BUCKETS)
        if has_own_buckets(relative):
            raise ValueError(f"{argument} must have the buckets of PositionBias, got {relative!r}")
        if self.time_key is not None and self.time_key in (*self.sequence_keys, self.bias_key):
            raise ValueError(f"{argument} must read a key of its own, got {relative!r}")

    def encoded(self) -> "SequenceFeatureConfig":
        """Returns the feature behind a JaggedEncoder, which has the encoded events under the feature's name."""
        return replace(self, sequence_keys=[self.name], relative_bias=None)

    @property
    def bias_key(self) -> str | None:
        """Returns the key of the bucket ids, if the bias reads any."""
        return self.bias.key if isinstance(self.bias, KeyBias) else None

    @property
    def time_key(self) -> str | None:
        """Returns the key of the events' times, if the relative bias reads them."""
        return self.relative_bias.key if isinstance(self.relative_bias, TimeBias) else None

    @property
    def of_events(self) -> tuple[object, ...]:
        """Returns the settings by which the events are read, which layers of one sharded collection share by name."""
        return self.sequence_keys, self.combine, self.bias, self.weighted_values

    @property
    def input_keys(self) -> list[str]:
        """Returns the keys of what is read in addition to embeddings: bucket ids and times."""
        return [key for key in (self.bias_key, self.time_key) if key is not None]

    @property
    def num_buckets(self) -> int:
        """Returns the number of rows of the learned bias table; 0 if nothing is learned."""
        return 0 if self.bias is None else getattr(self.bias, "num_buckets", 0)

    @property
    def reads_weights(self) -> bool:
        """Returns whether the weights of the first sequence key are read."""
        return self.weighted_values or isinstance(self.bias, WeightBias)

    def sequence_width(self, embedding_dim: int) -> int:
        """Returns the width of a combined event."""
        return embedding_dim * (len(self.sequence_keys) if self.combine == "concat" else 1)

    def target_width(self, embedding_dim: int) -> int:
        """Returns the width of the combined target."""
        return embedding_dim * (len(self.target_keys) if self.combine == "concat" else 1)


@dataclass
class FeatureGroup:
    """Features of the same kind, which one call of an operator serves, and what is known of them before any batch.

    They have the same number of sequence keys and of target keys, combined to the same widths, the same kind of bias
    with the same number of buckets, and all or none have weighted values. A field of an event is `embedding_dim` wide,
    a target `target_dim`, or as wide as the events where that is None.
    """

    features: list[SequenceFeatureConfig]
    embedding_dim: int
    target_dim: int | None = None

    def __post_init__(self) -> None:
        # The features' first keys, then their second ones, ... Not fields of the dataclass, from which torch.fx would
        # build it again.
        self.sequence_keys = list(zip(*[feature.sequence_keys for feature in self.features], strict=True))
        self.target_keys = list(zip(*[feature.target_keys for feature in self.features], strict=True))
        self.reads_weights = self.features[0].reads_weights
        bounds = [feature.max_seqlen for feature in self.features if feature.max_seqlen is not None]
        self.max_seqlen = max(bounds) if len(bounds) == len(self.features) else None
        self.target_dim = self.embedding_dim if self.target_dim is None else self.target_dim


def has_own_buckets(bias: Bias | None) -> bool:
    """Returns whether a bias by distance has other buckets than those of the kernels."""
    return isinstance(bias, PositionBias) and bias.buckets is not None


@torch.no_grad()
def reset_bias(table: Tensor | None, bias: Bias | None) -> None:
    """Sets the learned table [num_buckets, num_heads] of a bias, if there is one, to its initial values."""
    if table is not None:
        table.copy_(bias.initial_table(table.size(1))) if isinstance(bias, PositionBias) else table.zero_()


def group_features(
    features: list[SequenceFeatureConfig], embedding_dim: int, target_dim: int | None = None
) -> list[FeatureGroup]:
    """Groups the features by kind, in the order of each group's first feature."""
    groups: dict[tuple, list[SequenceFeatureConfig]] = {}
    for feature in features:
        kind = (
            feature.target_width(1),
            feature.sequence_width(embedding_dim),
            len(feature.target_keys),
            len(feature.sequence_keys),
            feature.bias if has_own_buckets(feature.bias) else type(feature.bias),
            feature.num_buckets,
            feature.weighted_values,
        )
        groups.setdefault(kind, []).append(feature)
    return [FeatureGroup(alike, embedding_dim, target_dim) for alike in groups.values()]


def describe(features: list[SequenceFeatureConfig], **options: object) -> str:
    """Returns the repr of a module with sequence features: a line for each, and the options."""
    lines = []
    for feature in features:
        shown = {name: getattr(feature, name) for name in ("combine", "bias", "weighted_values", "relative_bias")}
        extras = [f", {name}={value!r}" for name, value in shown.items() if value not in ("sum", None, False)]
        keys = f"{' + '.join(feature.target_keys)} -> {' + '.join(feature.sequence_keys)}"
        lines.append(f"{feature.name}: {keys}{''.join(extras)}")
    return "\n".join([*lines, ", ".join(f"{name}={value}" for name, value in options.items())])


def check_features(features: list[SequenceFeatureConfig], argument: str = "features") -> None:
    """Raises unless `features` is a list of at least one config, with distinct names."""
    if not isinstance(features, list) or not all(isinstance(feature, SequenceFeatureConfig) for feature in features):
        raise TypeError(f"{argument} must be a list of SequenceFeatureConfig, got {features!r}")
    if not features:
        raise ValueError(f"{argument} must hold at least one SequenceFeatureConfig, got []")
    names = [feature.name for feature in features]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{argument} must have distinct names, got {repeated} more than once")


def check_sizes(embedding_dim: int, num_heads: int, **others: int) -> None:
    """Raises unless every size is an integer of a sensible range, and `num_heads` divides `embedding_dim`."""
    for argument, size in {"embedding_dim": embedding_dim, "num_heads": num_heads, **others}.items():
        check_int(argument, size, most=MAX_LAYERS if argument == "num_layers" else MAX_WIDTH)
    if embedding_dim % num_heads:
        raise ValueError(f"num_heads must divide embedding_dim={embedding_dim}, got {num_heads}")
