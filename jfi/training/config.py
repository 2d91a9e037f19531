"""The configuration of a training run, all typed: `data`, `model`, `encoder`, `optimizer`, `sharding` and `training`.

A YAML file gives any part of it, the command line overrides any field (`--training.epochs 3`); see `jfi.training.cli`.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from jfi.data import DataConfig


class ConfigError(ValueError):
    """A fault in a configuration that the user can mend; its text is one line that names the key."""


def _require(condition: bool, key: str, got: object, must: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: got {got!r}, must be {must}")


@dataclass
class ModelConfig:
    """What is built on the features of the table.

    Args:
        embedding_dim: width of every embedding, of the sequence feature and of the dense arch's output.
        pooling: how histories enter: `attention` (the target attends to them), `mean` of the events, or `none`.
        num_heads: query heads of the attention.
        num_queries: queries that each target is expanded to.
        bias: learned score bias per head: the key of a bucket sequence such as `history_age`, `position` (counted from
            the newest event), `weights` (the KJT's), or null. A bucket key that the data does not have is refused.
        num_buckets: rows of a bias table for `position`, the encoder's too; a bucket key brings its own number.
        combine: how the aligned fields of an event make one embedding: `sum` or `concat`.
        dense_arch: hidden layer sizes of the MLP over dense features; its output layer (embedding_dim) is added.
        over_arch: hidden layer sizes of the MLP that ends in the logit, at least one; the output layer is added.
        dropout: probability with which an element of what enters the interaction is dropped in training.
    """

    embedding_dim: int = 32
    pooling: Literal["attention", "mean", "none"] = "attention"
    num_heads: int = 4
    num_queries: int = 1
    bias: str | None = None
    num_buckets: int = 32
    combine: Literal["sum", "concat"] = "sum"
    dense_arch: list[int] = field(default_factory=lambda: [64])
    over_arch: list[int] = field(default_factory=lambda: [128, 64])
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("embedding_dim", "num_heads", "num_queries", "num_buckets"):
            _require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        for name in ("dense_arch", "over_arch"):
            sizes = getattr(self, name)
            _require(all(size >= 1 for size in sizes), f"model.{name}", sizes, "a list of positive sizes")
        _require(len(self.over_arch) >= 1, "model.over_arch", self.over_arch, "a list of at least one size")
        _require(
            self.embedding_dim % self.num_heads == 0, "model.num_heads", self.num_heads, "a divisor of embedding_dim"
        )
        _require(0 <= self.dropout < 1, "model.dropout", self.dropout, "in [0, 1)")


@dataclass
class EncoderConfig:
    """Self-attention among the events of a history before they are pooled: a stack of pre-norm Transformer blocks.

    Args:
        layers: blocks; 0 for no encoder, and none where `model.pooling` is `none`. Time grows with the sum of the
            squared lengths: see `data.max_history`.
        heads: heads of the self-attention, a divisor of `model.embedding_dim`.
        feedforward_ratio: width of the hidden layer of a block's feed-forward part, in `model.embedding_dim`.
        dropout: probability with which an element of the feed-forward part is dropped in training.
        causal: an event attends to itself and to those before it alone.
        bias: learned score bias by block and head, for the event that is attended to: what `model.bias` may be.
    """

    layers: int = 0
    heads: int = 4
    feedforward_ratio: int = 4
    dropout: float = 0.0
    causal: bool = False
    bias: str | None = None

    def __post_init__(self) -> None:
        _require(self.layers >= 0, "encoder.layers", self.layers, "0 or more")
        for name in ("heads", "feedforward_ratio"):
            _require(getattr(self, name) >= 1, f"encoder.{name}", getattr(self, name), "at least 1")
        _require(0 <= self.dropout < 1, "encoder.dropout", self.dropout, "in [0, 1)")


@dataclass
class OptimizerGroup:
    """The optimiser of one group of parameters.

    Args:
        name: `adagrad`, `adam` or `adamw` of torch.optim; for embedding tables also TorchRec's `rowwise_adagrad`, with
            one accumulator a row. Adagrad without weight decay takes sparse gradients for embedding tables: a step then
            costs the rows of the batch, whatever the size of the table. Under torchrun tables are updated in the
            backward pass by `adagrad` or `rowwise_adagrad`, both of which cost the rows of the batch.
        learning_rate: step size.
        weight_decay: as in torch.optim: decoupled for adamw, an L2 penalty for the others.
    """

    name: Literal["adagrad", "adam", "adamw", "rowwise_adagrad"] = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0


@dataclass
class OptimizerConfig:
    """Optimisers, chosen separately for the embedding tables and for everything else.

    Args:
        dense: the MLPs, the attention and the encoder.
        embeddings: the embedding tables.
        average: with a number such as 0.99, the model that is evaluated has the exponential moving average of all
            parameters, which keeps that share of itself a step. Each step then passes over all tables: leave it null
            for large ones; under torchrun it must be null.
    """

    dense: OptimizerGroup = field(default_factory=OptimizerGroup)
    embeddings: OptimizerGroup = field(default_factory=lambda: OptimizerGroup(name="adagrad", learning_rate=0.02))
    average: float | None = None

    def __post_init__(self) -> None:
        for name, group in (("dense", self.dense), ("embeddings", self.embeddings)):
            key, rate, decay = f"optimizer.{name}", group.learning_rate, group.weight_decay
            _require(0 < rate < math.inf, f"{key}.learning_rate", rate, "positive and finite")
            _require(0 <= decay < math.inf, f"{key}.weight_decay", decay, "0 or more and finite")
        dense = self.dense.name
        _require(dense != "rowwise_adagrad", "optimizer.dense.name", dense, "adagrad, adam or adamw")
        in_range = self.average is None or 0 < self.average < 1
        _require(in_range, "optimizer.average", self.average, "between 0 and 1, or null")


@dataclass
class ShardingConfig:
    """How the embedding tables are spread over the processes that torchrun launches; see docs/distributed.md.

    Args:
        type: `table_wise` (a table lies whole in one process), `row_wise` or `column_wise` (it is cut between rows or
            columns), or `auto`: TorchRec's planner chooses one for each table.
        min_partition: columns of a shard under `column_wise`; a multiple of 4 and a divisor of `model.embedding_dim`.
        compute_kernel: `fused` (tables in the device's memory), `fused_uvm_caching` (in the host's memory, with a cache
            on the GPU: for tables larger than the GPUs), or `auto`: the planner chooses.
        cache_load_factor: rows in that cache as a share of the table's, in (0, 1].
    """

    type: Literal["auto", "table_wise", "row_wise", "column_wise"] = "auto"
    min_partition: int = 16
    compute_kernel: Literal["auto", "fused", "fused_uvm_caching"] = "auto"
    cache_load_factor: float = 0.2

    def __post_init__(self) -> None:
        width, share = self.min_partition, self.cache_load_factor
        _require(width >= 4 and width % 4 == 0, "sharding.min_partition", width, "a positive multiple of 4")
        _require(0 < share <= 1, "sharding.cache_load_factor", share, "in (0, 1]")


@dataclass
class TrainingConfig:
    """The loop.

    Args:
        run_dir: folder of the run; must be new or empty. Null makes `runs/<date>-<time>`.
        epochs: most epochs to train.
        batch_size: samples a step; under torchrun the processes share them.
        eval_batch_size: samples a batch of evaluation, shared likewise.
        monitor: validation metric that picks the best epoch: `auc` (highest) or `ne` (lowest).
        patience: epochs without a better `monitor` after which training stops; null never stops early.
        seed: of parameters, dropout, sample order and sampled negatives; in [0, 2**32).
        device: `auto` is cuda where there is one, else cpu.
        log_every: steps between two lines of training metrics.
        checkpoint_every: steps between two checkpoints inside an epoch, beside the one after each epoch; 0 for none.
    """

    run_dir: str | None = None
    epochs: int = 10
    batch_size: int = 1024
    eval_batch_size: int = 4096
    monitor: Literal["auc", "ne"] = "auc"
    patience: int | None = 2
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_every: int = 50
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "eval_batch_size", "log_every"):
            _require(getattr(self, name) >= 1, f"training.{name}", getattr(self, name), "at least 1")
        _require(0 <= self.seed < 2**32, "training.seed", self.seed, "in [0, 2**32)")
        _require(self.checkpoint_every >= 0, "training.checkpoint_every", self.checkpoint_every, "0 or more")
        _require(self.patience is None or self.patience >= 1, "training.patience", self.patience, "at least 1, or null")


@dataclass
class Config:
    """Everything a run depends on."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        fits = self.encoder.num_layers == 0 or self.model.embedding_dim % self.encoder.num_heads == 0
        _require(fits, "encoder.num_heads", self.encoder.num_heads, "a divisor of model.embedding_dim")
        width = self.sharding.min_partition
        fits = self.sharding.type != "column_wise" or self.model.embedding_dim % width == 0
        _require(fits, "sharding.min_partition", width, "a divisor of model.embedding_dim under column_wise")

    def with_training(self, **changes: object) -> "Config":
        """A copy with some fields of `training` changed."""
        return dataclasses.replace(self, training=dataclasses.replace(self.training, **changes))
