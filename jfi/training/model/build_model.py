"""Builds the model and its optimizer for the keys of a data schema.

The EmbeddingCollection, which returns an embedding per event, has the tables of the history keys, and with them the
user, item and context keys that share these tables, so that a target has the embedding of its own events. All other
tables are in the EmbeddingBagCollection.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim import Optimizer
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from jfi.data import DataSchema, FeatureSpec
from jfi.models import AttentionPooling, Heads, SequenceDLRM
from jfi.modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    GrowingIds,
    GrowingTable,
    JaggedEncoder,
    PositionBias,
    SemanticIDEmbedding,
    SequenceFeatureConfig,
    TimeBias,
    WeightBias,
)
from jfi.training.model_config import (
    ConfigError,
    EncoderConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerGroup,
    event_width,
)

#: Rows of a table of biases by position; operators take 64 at most.
_NUM_POSITIONS = 32
#: Rows that are drawn with one generator. Another number gives other initial values.
_ROWS_DRAWN = 65_536
OPTIMIZERS = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rowwise_adagrad": RowWiseAdagrad,
}


def build_model(
    config: ModelConfig,
    encoder: EncoderConfig,
    schema: DataSchema,
    table_device: torch.device | None = None,
    optimizer: OptimizerConfig | None = None,
    output_dtype: torch.dtype | None = None,
    admit_every: int = 100,
) -> SequenceDLRM:
    """The SequenceDLRM of `config` for the keys of `schema`.

    It has a sequence feature for each history, of its name: an event is the sum of all keys of the history, the target
    that of all item keys (semantic IDs among them), and `max_seqlen` is the most events of the history. There is one
    more, of the same events, for each further bias of `model.bias`.

    Args:
        config: the section `model`.
        encoder: the section `encoder`.
        schema: of the batches that the model reads.
        table_device: device of the embedding tables; "meta" if `draw_tables` follows.
        optimizer: steps the tables in the backward pass, for the training of a model that is not sharded; None gives
            TorchRec's collections.
        output_dtype: in which the rows of the tables enter the model, where `optimizer` is given; None means float32.
        admit_every: steps between two admissions of new ids to tables that grow.

    Raises:
        ConfigError: `model.semantic_ids` does not go with the codec, or nothing describes the item.
    """
    features = [f for f in schema.features if config.item_id or f.column != schema.item_key]
    if not any(f.role == "item" for f in features):
        raise ConfigError("model.item_id: got False, but nothing else describes the item; see data.semantic_ids")
    history = [f for f in features if f.role == "history"] if config.pooling != "none" else []
    event_tables = {f.table for f in history}
    embedded = [f for f in features if f.role in ("user", "item", "context") or f in history]
    in_tables = [f for f in embedded if not f.semantic]
    in_collection = [f for f in in_tables if f.table in event_tables]
    in_bags = [f for f in in_tables if f.table not in event_tables]
    biases = config.biases() if config.pooling == "attention" else [None]
    # A sequence feature for each bias: some heads go by the age of an event, others by its position.
    sequences = [
        SequenceFeatureConfig(
            name=name if index == 0 else f"{name}_by_{bias}",
            sequence_keys=[f.key for f in history if f.history == name],
            target_keys=[f.key for f in features if f.role == "item"],
            bias=_bias(bias, name, features),
            max_seqlen=most,
        )
        for name, most in (schema.histories.items() if history else ())
        for index, bias in enumerate(biases)
    ]
    bag_tables = _tables(EmbeddingBagConfig, in_bags, config.embedding_dim)
    tables = _tables(EmbeddingConfig, in_collection, config.embedding_dim)
    if optimizer is None:
        make_bags = partial(EmbeddingBagCollection, device=table_device)
        make_embeddings = partial(EmbeddingCollection, device=table_device)
    else:
        group = optimizer.embeddings
        fused = {
            "optimizer_type": OPTIMIZERS[group.name],
            "optimizer_kwargs": {"lr": group.learning_rate, "weight_decay": group.decay},
            "ema_decay": None if optimizer.ema_decay == "auto" else optimizer.ema_decay,
            "output_dtype": output_dtype,
            "device": table_device,
        }
        make_bags, make_embeddings = (
            partial(kind, **fused) for kind in (FusedEmbeddingBagCollection, FusedEmbeddingCollection)
        )
    widths = {f.column: f.width or config.embedding_dim for f in in_collection}
    width = event_width(widths, config.embedding_dim)
    attention = AttentionPooling(config.num_heads)
    return SequenceDLRM(
        make_bags(bag_tables) if bag_tables else None,
        make_embeddings(tables) if tables else None,
        sequences,
        dense_in_features=max(1, len(schema.dense_names)),
        dense_arch_layer_sizes=[*config.dense_arch, config.embedding_dim],
        over_arch_layer_sizes=[*config.over_arch, 1],
        pooling=attention if config.pooling == "attention" else config.pooling,
        encoder=_encoder(encoder, sequences, width, config.num_heads),
        dropout=config.dropout,
        cross_layers=config.cross_layers,
        user_keys=[f.key for f in embedded if f.role == "user"],
        semantic_ids=_semantic_ids(config, schema, [f.key for f in embedded if f.semantic], width),
        growing_ids=_growing_ids(schema, in_tables, admit_every),
        heads=_heads(schema),
    )


def _heads(schema: DataSchema) -> Heads:
    """An output for each label."""
    is_scaled = any(label.task == "regression" for label in schema.labels)
    moments = [(label.mean, label.deviation) for label in schema.labels] if is_scaled else None
    return Heads(len(schema.labels), moments, schema.num_auxiliary)


def _growing_ids(schema: DataSchema, features: list[FeatureSpec], every: int) -> GrowingIds | None:
    """Maps the raw ids of the tables that grow."""
    shared: dict[str, list[FeatureSpec]] = {}
    for feature in features:
        if feature.raw:
            shared.setdefault(feature.table, []).append(feature)
    tables = []
    for name, members in shared.items():
        own = schema.encodings.capacities[members[0].column]
        tables.append(GrowingTable(name, own.capacity, [f.key for f in members], own.min_count))
    return GrowingIds(tables, every) if tables else None


def _semantic_ids(config: ModelConfig, schema: DataSchema, keys: list[str], width: int) -> SemanticIDEmbedding | None:
    if schema.codec is None:
        return None
    try:
        return SemanticIDEmbedding(schema.codec, width, keys, config.semantic_ids)
    except ValueError as fault:
        raise ConfigError(f"model.semantic_ids: {fault}") from None


def table_configs(model: nn.Module) -> dict[str, BaseEmbeddingConfig]:
    """The config of each embedding table of an unsharded model, by parameter name."""
    configs = {}
    for prefix, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            configs |= {f"{prefix}.embedding_bags.{c.name}.weight": c for c in module.embedding_bag_configs()}
        elif isinstance(module, EmbeddingCollection):
            configs |= {f"{prefix}.embeddings.{c.name}.weight": c for c in module.embedding_configs()}
    return configs


def draw_tables(state: Mapping[str, Tensor | ShardedTensor], tables: dict[str, BaseEmbeddingConfig], seed: int) -> None:
    """Draws the initial values of the embedding tables, uniform within ±1/sqrt(rows).

    A row's values depend only on the seed, the table's name and the row, so they are the same for any sharding. A
    process allocates no more than its shards and a block of rows.

    Args:
        state: the model's `state_dict()`, whose tensors are filled in place.
        tables: the result of `table_configs`.
        seed: `training.seed`.
    """
    for name, table in tables.items():
        for values, row, column in shards_of(state[name]):
            _draw_shard(values, row, column, table, seed)


def shards_of(weight: Tensor | ShardedTensor) -> list[tuple[Tensor, int, int]]:
    """The parts of a table that this process has, each with its first row and its first column."""
    if isinstance(weight, ShardedTensor):
        return [(shard.tensor, *shard.metadata.shard_offsets) for shard in weight.local_shards()]
    return [(weight, 0, 0)]


class ClippingOptimizer(KeyedOptimizerWrapper):
    """Scales the gradients of its parameters down to a norm before each step.

    Args:
        parameters: by name; all on one device, and the same in every process.
        make: makes the optimizer of a list of parameters.
        max_norm: the largest norm, over all gradients; None for no limit.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        make: Callable[[list[nn.Parameter]], Optimizer],
        max_norm: float | None = None,
    ) -> None:
        super().__init__(parameters, make)
        self._clipped, self._max_norm = list(parameters.values()), max_norm

    def step(self, closure: object = None) -> None:
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._clipped, self._max_norm)
        super().step(closure)


def build_optimizer(config: OptimizerConfig, model: nn.Module, max_grad_norm: float | None = None) -> KeyedOptimizer:
    """The optimizers of the embedding tables and of all other parameters, with state keyed by parameter name.

    Args:
        config: of the two groups; that of the collections' tables is in them already.
        model: built with this config, so that its collections step their tables themselves.
        max_grad_norm: the largest norm of the gradients of the other parameters; None for no limit.
    """
    names = table_configs(model)
    tables = [
        (name, module.fused_optimizer)
        for name, module in model.named_modules()
        if isinstance(module, FusedEmbeddingBagCollection | FusedEmbeddingCollection)
    ]
    dense = {name: p for name, p in model.named_parameters() if name not in names}
    return CombinedOptimizer([*tables, ("", keyed_optimizer(config.dense, dense, max_grad_norm))])


def keyed_optimizer(
    group: OptimizerGroup, parameters: dict[str, nn.Parameter], max_norm: float | None = None
) -> KeyedOptimizer:
    """The optimizer of a group of parameters, with state keyed by parameter name.

    On a GPU Adam and AdamW keep their learning rate and their step in tensors there, so that a CUDA graph can hold
    their step. Adagrad has no such form in torch.

    Args:
        group: which optimizer, and its settings.
        parameters: by name.
        max_norm: the largest norm of their gradients; None for no limit.
    """

    def make(values: list[nn.Parameter]) -> Optimizer:
        rate, device = group.learning_rate, values[0].device
        if group.name not in ("adam", "adamw") or device.type != "cuda":
            return OPTIMIZERS[group.name](values, lr=rate, weight_decay=group.decay)
        options = {"lr": torch.tensor(rate, device=device), "fused": True, "capturable": True}
        optimizer = OPTIMIZERS[group.name](values, weight_decay=group.decay, **options)
        optimizer._warned_capturable_if_run_uncaptured = True  # the first steps are not captured
        return optimizer

    return ClippingOptimizer(parameters, make, max_norm)


def _draw_shard(shard: Tensor, row: int, column: int, table: BaseEmbeddingConfig, seed: int) -> None:
    """Fills the shard of `table` that begins at `row` and `column`."""
    low, high = table.get_weight_init_min(), table.get_weight_init_max()
    end, width = row + shard.shape[0], shard.shape[1]
    for first in range(row - row % _ROWS_DRAWN, end, _ROWS_DRAWN):
        last = min(first + _ROWS_DRAWN, end)
        generator = np.random.default_rng((seed, zlib.crc32(table.name.encode()), first))
        values = generator.random((last - first, table.embedding_dim), np.float32)[max(row - first, 0) :]
        drawn = torch.from_numpy(values[:, column : column + width]) * (high - low) + low
        shard[last - row - len(drawn) : last - row].copy_(drawn)


def _tables(kind: type, features: list[FeatureSpec], embedding_dim: int) -> list:
    """A table config for each table name, with the keys that share it."""
    shared: dict[str, list[FeatureSpec]] = {}
    for feature in features:
        shared.setdefault(feature.table, []).append(feature)
    return [
        kind(
            name=table,
            embedding_dim=members[0].width or embedding_dim,
            num_embeddings=members[0].num_embeddings,
            feature_names=[f.key for f in members],
        )
        for table, members in shared.items()
    ]


def _encoder(
    encoder: EncoderConfig, sequences: list[SequenceFeatureConfig], width: int, num_heads: int
) -> JaggedEncoder | None:
    if not sequences or not encoder.num_layers:
        return None
    relative = None if encoder.relative_bias is None else PositionBias(_NUM_POSITIONS)
    return JaggedEncoder(
        [replace(sequence, bias=None, relative_bias=relative) for sequence in sequences],
        width,
        num_heads,
        encoder.num_layers,
        dropout=encoder.dropout,
        causal=encoder.causal,
    )


def _bias(bias: str | None, history: str, features: list[FeatureSpec]) -> PositionBias | WeightBias | TimeBias | None:
    """Returns a bias of the config, for a history."""
    if bias is None:
        return None
    if bias in ("position", "recency"):
        return PositionBias(_NUM_POSITIONS, bias == "recency")
    if bias == "weights":
        return WeightBias()
    age = next(f for f in features if f.role == "bucket" and f.history == history)
    return TimeBias(age.key, age.num_embeddings)
