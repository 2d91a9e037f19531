"""The sections of a run's config that say what is trained: `model`, `encoder`, `optimizer` and `sharding`."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from jfi.data.setting_types import Count, Dropout, Natural, NonNegative, Positive, check_bounds
from jfi.utils.errors import InputError
from jfi.utils.files import absolute_path


class ConfigError(InputError):
    """A fault in the config that the user can fix, as one line that names the key."""


def require(condition: bool, key: str, got: object, must: str) -> None:
    """Raises ConfigError for the value `got` of a key, unless `condition`."""
    if not condition:
        raise ConfigError(f"{key}: got {got!r}, must be {must}")


#: A bias of attention's scores; the last one is the bucket key that every data schema has.
Bias = Literal["position", "recency", "weights", "history_age"]


def event_width(widths: Mapping[str, int], default: int) -> int:
    """Returns the width of the tables that events have.

    Args:
        widths: by column that of its table; may be empty.
        default: `model.embedding_dim`.

    Raises:
        ConfigError: they differ; TorchRec's EmbeddingCollection has one width for all of its tables.
    """
    first = next(iter(widths), None)
    for name, width in widths.items():
        if width != widths[first]:
            must = f"that of '{first}', {widths[first]}, since the tables that events have must have one width"
            raise ConfigError(f"data.features '{name}': width is {width}, must be {must}")
    return default if first is None else widths[first]


@dataclass
class PretrainedConfig:
    """Embeddings from a file, for the values of a categorical column.

    Args:
        path: a Parquet file with two columns, the values and lists of numbers.
        frozen: whether these rows are kept fixed, under torchrun with `sharding.exchange: attention` alone. Values that
            the file lacks have random rows that are trained.
    """

    path: str
    frozen: bool = True


@dataclass
class ModelConfig:
    """The model.

    Args:
        embedding_dim: width of every embedding, of the sequence feature and of the dense arch's output.
        pooling: pooling of histories: `attention` (the target attends to the events), `mean`, or `none` (no histories).
        num_heads: heads of the target attention, and of the encoder's blocks, a divisor of `embedding_dim`.
        bias: learned score bias per head, by the bucket under a key such as `history_age`, or by `position` (counted
            from the newest event, up to 32); by `recency`, which is the position with a table that begins with heads
            for the newest events; or `weights` of the events; or null. In a list each bias has its own heads, whose
            result is a separate entry. `auto` is heads by age and by recency; with an encoder, or a single head, by
            age alone.
        dense_arch: hidden layer sizes of the MLP of the dense features; its output layer (embedding_dim) is added.
        cross_layers: layers of a cross network (DCNv2) over the elements of all embeddings that DLRM's interaction
            takes, whose output enters `over_arch` with the dot products; 0 for none.
        over_arch: hidden layer sizes of the MLP that ends in the logit, at least one; its output layer is added. With
            `data.labels` the first layer is shared, and each label has its own tower of the others.
        dropout: probability with which an element of the interaction's input is zeroed in training.
        semantic_ids: how the IDs of `data.semantic_ids` are read: `digits` (ternary digits) or `decode` (the content
            that they stand for).
        item_id: whether the id of the item is an input. Without it the model knows an item by its other columns and
            its semantic ID alone, so that one never seen in training is scored as any other.
        pretrained: by categorical column the file of its initial embeddings, read once, at the start of a run.
    """

    embedding_dim: Count = 64
    pooling: Literal["attention", "mean", "sum", "none"] = "attention"
    num_heads: Count = 4
    bias: Literal["auto"] | Bias | list[Bias] | None = "auto"
    dense_arch: list[Count] = field(default_factory=lambda: [64])
    cross_layers: Natural = 2
    over_arch: Annotated[list[Count], Meta(min_length=1)] = field(default_factory=lambda: [128, 64])
    dropout: Dropout = 0.1
    semantic_ids: Literal["digits", "decode"] = "digits"
    item_id: bool = True
    pretrained: dict[str, PretrainedConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds(self, "model.", ConfigError)
        biases = self.biases()
        require(
            len(set(biases)) == len(biases) > 0, "model.bias", self.bias, "null, a bias, or a list of distinct ones"
        )
        require(
            self.embedding_dim % self.num_heads == 0, "model.num_heads", self.num_heads, "a divisor of embedding_dim"
        )
        fits = "recency" not in biases or self.num_heads > 1
        require(fits, "model.num_heads", self.num_heads, "at least 2 with model.bias recency")

    def biases(self) -> Sequence[str | None]:
        """The biases, each with attention heads of its own; none for `auto`, which `resolve_defaults` replaces."""
        if self.bias == "auto":
            return [None]
        return self.bias if isinstance(self.bias, list) else [self.bias]

    def with_absolute_paths(self) -> "ModelConfig":
        """A copy whose files are named by absolute paths."""

        absolute = {
            name: dataclasses.replace(one, path=absolute_path(one.path)) for name, one in self.pretrained.items()
        }
        return dataclasses.replace(self, pretrained=absolute)


@dataclass
class EncoderConfig:
    """Self-attention among the events of a history before they are pooled: a stack of pre-norm Transformer blocks.

    Args:
        num_layers: number of blocks; 0 for no encoder. With `model.pooling: none` there is none either. Time grows with
            the sum of the squared lengths: see `data.max_history`.
        dropout: probability with which an element of the feed-forward part is zeroed in training.
        causal: whether an event attends only to itself and to earlier events.
        relative_bias: learned score bias per block and head, of the pair of events: `distance`, the number of events
            between them, which needs `causal: true`; or null.
    """

    num_layers: Natural = 0
    dropout: Dropout = 0.0
    causal: bool = False
    relative_bias: Literal["distance"] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "encoder.", ConfigError)
        is_causal = self.relative_bias is None or self.causal
        require(is_causal, "encoder.causal", self.causal, "true with encoder.relative_bias")


@dataclass
class OptimizerGroup:
    """The optimizer of one group of parameters.

    Args:
        name: `adagrad`, `adam` or `adamw` of torch.optim; for embedding tables also TorchRec's `rowwise_adagrad`, with
            one accumulator per row. The backward pass updates only those rows of the tables that are in the batch:
            other rows cost nothing, and their moments (of Adam) do not change. Under torchrun tables have `adagrad` or
            `rowwise_adagrad`.
        learning_rate: step size.
        weight_decay: as in torch.optim: decoupled for adamw, an L2 penalty for the others. For tables it is a penalty
            of all rows in each step; a row gets that of all steps since it was last stepped when a batch reads it
            again, so other rows cost nothing. `auto`, of tables alone, is that of elements with a normal prior of
            standard deviation 0.2: 25 / (training samples, sampled negatives included). With `training.warm_start` it
            is that of the other run; it is 0 under torchrun where rows are exchanged or with `sharding.group_size`, and
            with rows of `model.pretrained` that are trained.
    """

    name: Literal["adagrad", "adam", "adamw", "rowwise_adagrad"] = "adam"
    learning_rate: Positive = 1e-3
    weight_decay: NonNegative | Literal["auto"] = 0.0

    @property
    def decay(self) -> float:
        """The weight decay; none for `auto`, which `resolve_defaults` replaces."""
        return 0.0 if self.weight_decay == "auto" else self.weight_decay


@dataclass
class OptimizerConfig:
    """The optimizers of the embedding tables and of all other parameters.

    Args:
        dense: for the MLPs, the attention and the encoder.
        embeddings: for the embedding tables.
        ema_decay: decay of an exponential moving average of all parameters, such as 0.99; evaluation then uses the
            average. `auto` is 0.98, and null under torchrun and with `training.publish_every`, where it must be. For a
            table, a step averages the rows of the batch, and the end of an epoch averages all rows. It takes as much
            memory as the parameters.
        schedule: how the learning rates of both groups change after the warm-up: `constant`, or `cosine`, which falls
            to zero at the last step of the last of `training.epochs`.
        warmup_steps: number of steps in which the learning rates rise linearly to their values.
    """

    dense: OptimizerGroup = field(default_factory=lambda: OptimizerGroup(learning_rate=3e-3))
    embeddings: OptimizerGroup = field(default_factory=lambda: OptimizerGroup("adagrad", 0.05, "auto"))
    ema_decay: Annotated[float, Meta(gt=0, lt=1)] | Literal["auto"] | None = "auto"
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Natural = 0

    def __post_init__(self) -> None:
        check_bounds(self, "optimizer.", ConfigError)
        for name, group in (("dense", self.dense), ("embeddings", self.embeddings)):
            check_bounds(group, f"optimizer.{name}.", ConfigError)
        decay = self.dense.weight_decay
        require(decay != "auto", "optimizer.dense.weight_decay", decay, "a number, since auto is of tables alone")
        dense = self.dense.name
        require(dense != "rowwise_adagrad", "optimizer.dense.name", dense, "adagrad, adam or adamw")


@dataclass
class ShardingConfig:
    """Sharding of the embedding tables over the processes that torchrun launches; see docs/distributed.md.

    Args:
        type: `table_wise` (each table is in one process), `row_wise` (each table is split by rows), `column_wise` (by
            columns, 16 a shard or half of a narrower table), `table_row_wise` (by rows over the processes of one
            host), or `auto`: TorchRec's planner chooses for each table.
        compute_kernel: `fused` (tables in device memory), `fused_uvm_caching` (tables in host memory, with a cache on
            the GPU of a fifth of their rows, for tables that exceed GPU memory; it needs `exchange: rows`), or `auto`:
            the planner chooses, with `exchange: attention` always `fused`.
        exchange: `rows` sends the rows of histories to their samples' processes, and their gradients back; `attention`
            sends queries to the processes that own the rows, and partial outputs back, and every process reads tables
            of at most 100,000 rows whole; `auto` takes attention where the model and the tables allow it, and prints
            its choice.
        communication: dtype in which embeddings and their gradients are sent.
        group_size: null shards each table over all processes. With a number, which must divide the number of processes,
            each group of that many processes has all tables and learns from its own samples; every 10 steps, and at the
            end of an epoch, the tables of all groups are averaged.
    """

    type: Literal["auto", "table_wise", "row_wise", "column_wise", "table_row_wise"] = "auto"
    compute_kernel: Literal["auto", "fused", "fused_uvm_caching"] = "auto"
    exchange: Literal["auto", "attention", "rows"] = "auto"
    communication: Literal["float32", "bfloat16"] = "float32"
    group_size: Count | None = None
    #: With `attention`, every process reads tables of at most this many rows whole; the default of jfi.distributed.
    replicate_below: ClassVar[int] = 100_000
    #: Steps between two averages of groups: rare enough to send little, and losses hardly differ from those of 1.
    average_every: ClassVar[int] = 10

    def __post_init__(self) -> None:
        check_bounds(self, "sharding.", ConfigError)
