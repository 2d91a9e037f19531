"""The typed config of a training run: `data`, `model`, `encoder`, `optimizer`, `sharding` and `training`.

A YAML file sets any part of it, and the command line overrides any field (`--training.epochs 3`); see
`jfi.training.cli`.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from jfi.data import DataConfig
from jfi.data.config import AGE, HISTORY
from jfi.files import absolute_path
from jfi.plan import MOST_BUCKETS


class ConfigError(ValueError):
    """A fault in the config that the user can fix, as one line that names the key."""


def _require(condition: bool, key: str, got: object, must: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: got {got!r}, must be {must}")


#: Values of a bias, beside null; the last one is the bucket key that every data schema has.
_BIASES = ("position", "recency", "weights", HISTORY + AGE)


def check_bias(key: str, bias: str | None) -> None:
    """Raises ConfigError unless `bias`, the value of the option `key`, is known."""
    _require(bias is None or bias in _BIASES, key, bias, f"null or one of {', '.join(_BIASES)}")


@dataclass
class PretrainedConfig:
    """Embeddings from a file, for the values of a categorical column.

    Args:
        path: a Parquet file, or a `.npy` file of `[rows, width]`.
        id_column: of a Parquet file, the column with the values.
        vector_column: of a Parquet file, the column with lists of numbers.
        ids: of a `.npy` file, a UTF-8 text file with a value for each row, one a line.
        frozen: whether these rows stay as they are. Values that the file lacks have rows that are drawn and trained.
    """

    path: str
    id_column: str = "id"
    vector_column: str = "vector"
    ids: str | None = None
    frozen: bool = True


@dataclass
class ModelConfig:
    """The model.

    Args:
        embedding_dim: width of every embedding, of the sequence feature and of the dense arch's output.
        pooling: pooling of histories: `attention` (the target attends to the events), `mean`, or `none` (no histories).
        num_heads: heads of the target attention, a divisor of `embedding_dim`.
        num_queries: queries per target.
        attention_layers: how often the target attends to the events: from the second time on it asks with what it has
            found, and the results are summed to an entry of their own.
        bias: learned score bias per head, by the bucket under a key such as `history_age`, or by `position` (counted
            from the newest event); by `recency`, which is the position with a table that begins with heads for the
            newest events; or `weights` of the events; or null. An unknown bucket key is refused. A list of
            biases gives each heads of its own, whose result is an entry of its own.
        num_buckets: rows of a bias table for `position`, also the encoder's, and for `encoder.relative_bias`, with
            which it is at most 64; the data determines those of a bucket key.
        combine: how the aligned fields of an event are combined into one row: `sum` or `concat`.
        dense_arch: hidden layer sizes of the MLP of the dense features; its output layer (embedding_dim) is added.
        cross_layers: layers of a cross network (DCNv2) over the elements of all embeddings that DLRM's interaction
            takes, whose output enters `over_arch` beside the dot products; 0 for none.
        over_arch: hidden layer sizes of the MLP that ends in the logit, at least one; its output layer is added.
        dropout: probability with which an element of the interaction's input is zeroed in training.
        semantic_ids: how the IDs of `data.semantic_ids` are read: `digits` (ternary digits, no table), `decode` (the
            content that they stand for), `tables` (a learned vector for each place and value of a digit, the
            traditional way) or `prefix_tables` (one for each prefix, by hash). `optimizer.embeddings` steps these.
        semantic_id_init: of `tables`, `random` or `centroids`, the principal components of the codec's vectors.
        semantic_id_spread: root mean square of the elements of these tables at the start.
        semantic_id_buckets: most rows of a table of prefixes.
        item_id: whether the id of the item is an input. Without it the model knows an item by its other columns and
            its semantic ID alone, so that one never seen in training is scored as any other.
        pretrained: by categorical column the file of its initial embeddings, read once, at the start of a run.
    """

    embedding_dim: int = 32
    pooling: Literal["attention", "mean", "none"] = "attention"
    num_heads: int = 4
    num_queries: int = 1
    attention_layers: int = 1
    bias: str | list[str] | None = None
    num_buckets: int = 32
    combine: Literal["sum", "concat"] = "sum"
    dense_arch: list[int] = field(default_factory=lambda: [64])
    cross_layers: int = 0
    over_arch: list[int] = field(default_factory=lambda: [128, 64])
    dropout: float = 0.0
    semantic_ids: Literal["digits", "decode", "tables", "prefix_tables"] = "digits"
    semantic_id_init: Literal["random", "centroids"] = "random"
    semantic_id_spread: float = 0.1
    semantic_id_buckets: int = 65536
    item_id: bool = True
    pretrained: dict[str, PretrainedConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = ("embedding_dim", "num_heads", "num_queries", "num_buckets", "attention_layers", "semantic_id_buckets")
        for name in counts:
            _require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        spread, init = self.semantic_id_spread, self.semantic_id_init
        _require(0 < spread < math.inf, "model.semantic_id_spread", spread, "positive and finite")
        fits = init == "random" or self.semantic_ids == "tables"
        _require(fits, "model.semantic_id_init", init, "random unless model.semantic_ids is tables")
        _require(self.cross_layers >= 0, "model.cross_layers", self.cross_layers, "0 or more")
        biases = self.biases()
        for bias in biases:
            check_bias("model.bias", bias)
        _require(
            len(set(biases)) == len(biases) > 0, "model.bias", self.bias, "null, a bias, or a list of distinct ones"
        )
        for name in ("dense_arch", "over_arch"):
            sizes = getattr(self, name)
            _require(all(size >= 1 for size in sizes), f"model.{name}", sizes, "a list of positive sizes")
        _require(len(self.over_arch) >= 1, "model.over_arch", self.over_arch, "a list of at least one size")
        _require(
            self.embedding_dim % self.num_heads == 0, "model.num_heads", self.num_heads, "a divisor of embedding_dim"
        )
        _require(0 <= self.dropout < 1, "model.dropout", self.dropout, "in [0, 1)")
        fits = "recency" not in biases or self.num_heads > 1
        _require(fits, "model.num_heads", self.num_heads, "at least 2 with model.bias recency")

    def biases(self) -> list[str | None]:
        """The biases, of which each has attention heads of its own."""
        return self.bias if isinstance(self.bias, list) else [self.bias]

    def with_absolute_paths(self) -> "ModelConfig":
        """A copy whose files are named by absolute paths."""

        def absolute(one: PretrainedConfig) -> PretrainedConfig:
            ids = None if one.ids is None else absolute_path(one.ids)
            return dataclasses.replace(one, path=absolute_path(one.path), ids=ids)

        return dataclasses.replace(self, pretrained={name: absolute(one) for name, one in self.pretrained.items()})


@dataclass
class EncoderConfig:
    """Self-attention among the events of a history before they are pooled: a stack of pre-norm Transformer blocks.

    Args:
        num_layers: number of blocks; 0 for no encoder. With `model.pooling: none` there is none either. Time grows with
            the sum of the squared lengths: see `data.max_history`.
        num_heads: heads of the self-attention, a divisor of `model.embedding_dim`.
        feedforward_ratio: width of the hidden layer of a block's feed-forward part, as a multiple of
            `model.embedding_dim`.
        dropout: probability with which an element of the feed-forward part is zeroed in training.
        causal: whether an event attends only to itself and to earlier events.
        bias: learned score bias per block and head, of the event that is attended to; as `model.bias`.
        relative_bias: learned score bias per block and head, of the pair of events: `distance`, by how many events one
            lies behind the other, for which `causal` is true; or null.
    """

    num_layers: int = 0
    num_heads: int = 4
    feedforward_ratio: int = 4
    dropout: float = 0.0
    causal: bool = False
    bias: str | None = None
    relative_bias: Literal["distance"] | None = None

    def __post_init__(self) -> None:
        check_bias("encoder.bias", self.bias)
        _require(self.num_layers >= 0, "encoder.num_layers", self.num_layers, "0 or more")
        for name in ("num_heads", "feedforward_ratio"):
            _require(getattr(self, name) >= 1, f"encoder.{name}", getattr(self, name), "at least 1")
        _require(0 <= self.dropout < 1, "encoder.dropout", self.dropout, "in [0, 1)")
        fits = self.bias != "recency" or self.num_heads > 1
        _require(fits, "encoder.num_heads", self.num_heads, "at least 2 with encoder.bias recency")
        is_causal = self.relative_bias is None or self.causal
        _require(is_causal, "encoder.causal", self.causal, "true with encoder.relative_bias")


@dataclass
class OptimizerGroup:
    """The optimizer of one group of parameters.

    Args:
        name: `adagrad`, `adam` or `adamw` of torch.optim; for embedding tables also TorchRec's `rowwise_adagrad`, with
            one accumulator per row. The backward pass steps the tables, and only their rows in the batch: rows that
            it lacks cost nothing, and their moments (of Adam) stay. Under torchrun tables have `adagrad` or
            `rowwise_adagrad`.
        learning_rate: step size.
        weight_decay: as in torch.optim: decoupled for adamw, an L2 penalty for the others. Of a table it acts on the
            rows of the batch only.
    """

    name: Literal["adagrad", "adam", "adamw", "rowwise_adagrad"] = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0


@dataclass
class OptimizerConfig:
    """The optimizers of the embedding tables and of all other parameters.

    Args:
        dense: for the MLPs, the attention and the encoder.
        embeddings: for the embedding tables.
        average: decay of an exponential moving average of all parameters, such as 0.99; evaluation then uses the
            average. Of a table a step averages the rows of the batch, and the end of an epoch all rows. It takes as
            much memory as the parameters, and must be null under torchrun.
        schedule: how the learning rates of both groups go on after the warm-up: `constant`, or `cosine`, which falls to
            zero at the last step of the last of `training.epochs`.
        warmup_steps: number of steps in which the learning rates rise linearly to their values.
    """

    dense: OptimizerGroup = field(default_factory=OptimizerGroup)
    embeddings: OptimizerGroup = field(default_factory=lambda: OptimizerGroup(name="adagrad", learning_rate=0.02))
    average: float | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name, group in (("dense", self.dense), ("embeddings", self.embeddings)):
            key, rate, decay = f"optimizer.{name}", group.learning_rate, group.weight_decay
            _require(0 < rate < math.inf, f"{key}.learning_rate", rate, "positive and finite")
            _require(0 <= decay < math.inf, f"{key}.weight_decay", decay, "0 or more and finite")
        dense = self.dense.name
        _require(dense != "rowwise_adagrad", "optimizer.dense.name", dense, "adagrad, adam or adamw")
        in_range = self.average is None or 0 < self.average < 1
        _require(in_range, "optimizer.average", self.average, "between 0 and 1, or null")
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "0 or more")


@dataclass
class ShardingConfig:
    """Sharding of the embedding tables over the processes that torchrun launches; see docs/distributed.md.

    Args:
        type: `table_wise` (each table is in one process), `row_wise` or `column_wise` (each table is split by rows or
            columns), `table_row_wise` (by rows over the processes of one host, with `exchange: attention`), or `auto`:
            TorchRec's planner chooses for each table.
        min_partition: columns per shard under `column_wise`; a multiple of 4 and a divisor of `model.embedding_dim`.
        compute_kernel: `fused` (tables in device memory), `fused_uvm_caching` (tables in host memory, with a cache on
            the GPU, for tables that exceed GPU memory), or `auto`: the planner chooses.
        cache_load_factor: fraction of a table's rows that the cache holds, in (0, 1].
        exchange: `rows` sends the rows of histories to their samples' processes, and their gradients back; `attention`
            sends queries to the processes that own the rows, and partial outputs back; `auto` takes what sends fewer
            bytes, where attention is possible, and says so.
        replicate_below: with `attention`, tables of at most so many rows are read whole by every process.
        dedup: whether a row that several events of a process' samples have is sent to it once, and its gradient is
            summed before it is sent back.
        communication: dtype in which embeddings and their gradients are sent.
        group_size: null shards each table over all processes. A number, a divisor of that of the processes: each group
            of so many has all tables and learns from its own samples.
        sync_every: steps between two averages of the tables of all groups; an epoch ends with one too.
    """

    type: Literal["auto", "table_wise", "row_wise", "column_wise", "table_row_wise"] = "auto"
    min_partition: int = 16
    compute_kernel: Literal["auto", "fused", "fused_uvm_caching"] = "auto"
    cache_load_factor: float = 0.2
    exchange: Literal["rows", "attention", "auto"] = "rows"
    replicate_below: int = 100_000
    dedup: bool = False
    communication: Literal["float32", "bfloat16"] = "float32"
    group_size: int | None = None
    sync_every: int = 1

    def __post_init__(self) -> None:
        width, fraction = self.min_partition, self.cache_load_factor
        _require(width >= 4 and width % 4 == 0, "sharding.min_partition", width, "a positive multiple of 4")
        _require(0 < fraction <= 1, "sharding.cache_load_factor", fraction, "in (0, 1]")
        _require(self.replicate_below >= 0, "sharding.replicate_below", self.replicate_below, "at least 0")
        _require(self.group_size is None or self.group_size >= 1, "sharding.group_size", self.group_size, "positive")
        _require(self.sync_every >= 1, "sharding.sync_every", self.sync_every, "positive")
        alone = self.group_size is None and self.sync_every > 1
        _require(not alone, "sharding.sync_every", self.sync_every, "1 unless sharding.group_size is given")


@dataclass
class TrainingConfig:
    """The training loop.

    Args:
        run_dir: folder of the run, new or empty. Null means `runs/<date>-<time>`.
        preset: `auto` chooses widths, biases, the cross network, dropout, averaging, the batch size, and the rates of
            the default optimizers from the number of training samples, and `data.statistics`, heads by recency and
            `model.item_id` by pilots on the validation rows, wherever a setting is at its default. It says what it
            chose and why, and writes it to the run's config.yaml; not under torchrun. With `warm_start` it takes the
            model's settings and `data.statistics` from that run. Null leaves all settings as they are.
        epochs: maximum number of epochs.
        batch_size: samples per step, over all processes under torchrun.
        eval_batch_size: samples per batch of evaluation, over all processes under torchrun.
        monitor: validation metric that selects the best epoch: `auc` (highest), `ne` (lowest), or one of those that
            `ranking` computes, such as `hr@10`, `ndcg@10` or `ndcg@10_full` (highest).
        patience: training stops after this number of epochs without a better `monitor`; null never stops early.
        seed: seed of parameters, dropout, sample order and sampled negatives; in [0, 2**32).
        device: `auto` means cuda if there is a GPU, else cpu.
        precision: of the matrix products in training and in the run's own evaluation: `float32`, or `bfloat16`, under
            torch.autocast. Parameters, the loss and the optimizers' state are float32 in both; rows that are looked up
            are rounded to bfloat16 on a GPU. A run is exported, and scores tables, in float32.
        max_grad_norm: gradients of all parameters outside of the embedding tables are scaled down so that their norm,
            taken over all of them, is at most this; null leaves them as they are. Rows of tables are not clipped:
            where the backward pass steps them, their gradients never exist together.
        cuda_graph: `auto` launches training steps on a GPU as CUDA graphs where that is possible: batches by sample, no
            encoder, not under torchrun. A line names the reason where it is not, and the line of an epoch how many
            steps ran so. `off` never does.
        log_every: steps between two lines of training metrics.
        checkpoint_every: steps between checkpoints within an epoch, in addition to the one after each epoch; 0 for
            none.
        warm_start: folder of a run to start from, or null: the parameters are those of its best epoch. A value that it
            knows keeps its row of the embedding table, a new one gets a fresh row. The columns, the model and the
            encoder must be the same. The optimizers start anew.
        ranking: of implicit feedback, what HR@k and NDCG@k rank a held-out positive among: `sampled` items
            (`data.eval_negatives`), `full` (these, and all items of training), or `none`.
        ranking_k: k of HR@k and NDCG@k.
        ranking_positives: the most positives of a split to rank, spread evenly over it; null for all. Each candidate is
            scored with the whole history, so `full` scores that many times the number of items.
    """

    run_dir: str | None = None
    preset: Literal["auto"] | None = None
    epochs: int = 10
    batch_size: int = 1024
    eval_batch_size: int = 4096
    monitor: str = "auc"
    patience: int | None = 2
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    max_grad_norm: float | None = None
    cuda_graph: Literal["auto", "off"] = "auto"
    log_every: int = 50
    checkpoint_every: int = 0
    warm_start: str | None = None
    ranking: Literal["none", "sampled", "full"] = "sampled"
    ranking_k: int = 10
    ranking_positives: int | None = 1000

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "eval_batch_size", "log_every", "ranking_k"):
            _require(getattr(self, name) >= 1, f"training.{name}", getattr(self, name), "at least 1")
        _require(0 <= self.seed < 2**32, "training.seed", self.seed, "in [0, 2**32)")
        _require(self.checkpoint_every >= 0, "training.checkpoint_every", self.checkpoint_every, "0 or more")
        norm = self.max_grad_norm
        _require(norm is None or 0 < norm < math.inf, "training.max_grad_norm", norm, "positive and finite, or null")
        limit = self.ranking_positives
        _require(limit is None or limit >= 1, "training.ranking_positives", limit, "at least 1, or null")
        _require(self.patience is None or self.patience >= 1, "training.patience", self.patience, "at least 1, or null")

    def ranking_kinds(self) -> dict[Literal["sampled", "full"], str]:
        """By kind of candidates that `ranking` asks for, how the names of its metrics end."""
        return {"none": {}, "sampled": {"sampled": ""}, "full": {"sampled": "", "full": "_full"}}[self.ranking]

    def ranking_metrics(self) -> list[str]:
        """The names of the metrics that `ranking` computes for implicit feedback."""
        suffixes = self.ranking_kinds().values()
        return [f"{name}@{self.ranking_k}{suffix}" for suffix in suffixes for name in ("hr", "ndcg")]


@dataclass
class Config:
    """The whole config of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        several = isinstance(self.model.bias, list) and self.encoder.num_layers > 0 and self.model.pooling != "none"
        _require(not several, "model.bias", self.model.bias, "one bias or null with encoder.num_layers")
        fits = self.encoder.num_layers == 0 or self.model.embedding_dim % self.encoder.num_heads == 0
        _require(fits, "encoder.num_heads", self.encoder.num_heads, "a divisor of model.embedding_dim")
        rows, limited = self.model.num_buckets, self.encoder.relative_bias is not None
        why = f"at most {MOST_BUCKETS} with encoder.relative_bias"
        _require(not limited or rows <= MOST_BUCKETS, "model.num_buckets", rows, why)
        if self.data.batching == "user":
            self._check_shared()
        frozen = [name for name, one in self.model.pretrained.items() if one.frozen]
        decay = self.optimizer.embeddings.weight_decay
        why = f"0 with model.pretrained.{frozen[0]}.frozen" if frozen else ""
        _require(not frozen or decay == 0, "optimizer.embeddings.weight_decay", decay, why)
        has_sids = self.data.semantic_ids is not None or self.data.prepared is not None
        how = self.model.semantic_ids
        _require(has_sids or how == "digits", "model.semantic_ids", how, "digits without data.semantic_ids")
        crossed = next((cross for cross in self.data.event_crosses if self.data.item in cross), None)
        why = f"true with data.event_crosses of '{self.data.item}'"
        _require(self.model.item_id or crossed is None, "model.item_id", self.model.item_id, why)
        width = self.sharding.min_partition
        fits = self.sharding.type != "column_wise" or self.model.embedding_dim % width == 0
        _require(fits, "sharding.min_partition", width, "a divisor of model.embedding_dim under column_wise")
        self._check_monitor()

    def with_training(self, **changes: object) -> "Config":
        """A copy with some fields of `training` changed."""
        return dataclasses.replace(self, training=dataclasses.replace(self.training, **changes))

    def _check_monitor(self) -> None:
        monitor, ranked = self.training.monitor, self.training.ranking_metrics()
        # A prepared dataset may have a label that the config does not name; it is in the config of the run.
        labeled = self.data.source != "table" or self.data.label is not None
        known = ["auc", "ne", *([] if labeled else ranked)]
        why = ""
        if "@" in monitor and labeled:
            why = "; hr@k and ndcg@k are metrics of implicit feedback, and the data has labels"
        elif "@" in monitor and not ranked:
            why = "; set training.ranking for hr@k and ndcg@k"
        elif "@" in monitor:
            why = "; see training.ranking and training.ranking_k"
        must = f"{', '.join(known[:-1])} or {known[-1]}{why}"
        _require(monitor in known, "training.monitor", monitor, must)

    def _check_shared(self) -> None:
        """Checks that the samples of a user can share one timeline."""
        if self.encoder.num_layers and self.model.pooling != "none":
            why = "with data.batching: user, where encoded events are the same for all samples of a user"
            _require(self.encoder.causal, "encoder.causal", self.encoder.causal, f"true {why}")
            _require(self.encoder.bias is None, "encoder.bias", self.encoder.bias, f"null {why}; see relative_bias")
        if HISTORY + AGE in self.model.biases() and self.model.pooling == "attention":
            buckets, most = self.data.num_age_buckets, f"at most {MOST_BUCKETS} with data.batching: user"
            _require(buckets <= MOST_BUCKETS, "data.num_age_buckets", buckets, most)
