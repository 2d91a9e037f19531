"""Chooses how the processes of a run exchange histories: by attention where the rows are, or by sending the rows."""

import dataclasses

import torch
from torchrec import EmbeddingCollection
from torchrec.distributed.types import ParameterSharding, ShardingPlan

from jfi.data import DataSchema
from jfi.distributed.planning import in_rows, remote_field
from jfi.models import SequenceDLRM
from jfi.modules import JaggedFeatureInteraction
from jfi.training.config import Config, ConfigError, ShardingConfig
from jfi.training.model.build_model import build_model


def with_exchange(config: Config, schema: DataSchema) -> tuple[Config, str | None]:
    """Returns the config with the exchange that `sharding.exchange: auto` stands for, and why where that is rows.

    Args:
        config: of a run under torchrun.
        schema: of its dataset.

    Raises:
        ConfigError: attention cannot go to the rows of this model, and the config asks for it or for what needs it.
    """
    wanted = config.sharding.exchange
    if wanted == "rows":
        return config, None
    reason = _why_not(build_model(config.model, config.encoder, schema, torch.device("meta")), config)
    if reason is not None and wanted == "attention":
        raise ConfigError(f"sharding.exchange: got 'attention', must be auto or rows, since {reason}")
    if reason is not None:
        check_rows(config, reason)
    exchange = "attention" if reason is None else "rows"
    return dataclasses.replace(config, sharding=dataclasses.replace(config.sharding, exchange=exchange)), reason


def check_rows(config: Config, reason: str) -> None:
    """Raises ConfigError for a setting that needs `sharding.exchange: attention`.

    Args:
        config: of a run under torchrun that exchanges the rows of histories, which FBGEMM steps in the backward pass.
        reason: why it exchanges rows.
    """
    sharding, training, decay = config.sharding, config.training, config.optimizer.embeddings.decay
    parts, graph = training.gradient_accumulation_steps, training.cuda_graph
    for key, got, must, supported in (
        ("sharding.type", sharding.type, "another type", sharding.type != "table_row_wise"),
        ("optimizer.embeddings.weight_decay", decay, "0 or auto", decay == 0),
        ("training.gradient_accumulation_steps", parts, "1", parts == 1),
        ("training.cuda_graph", graph, "auto or never", graph != "always"),
    ):
        if not supported:
            raise ConfigError(
                f"{key}: got {got!r}, must be {must} under torchrun where processes exchange rows of histories: "
                f"{reason}"
            )


def _why_not(model: SequenceDLRM, config: Config) -> str | None:
    """Why attention cannot go to the rows of this model; None if it can."""
    sharding, arch = config.sharding, model.sequence_arch
    if not isinstance(arch.pooling, JaggedFeatureInteraction):
        return f"model.pooling is '{config.model.pooling}'"
    if arch.encoder is not None:
        return "encoder.num_layers is above 0, and an encoder reads whole histories"
    if config.data.batching == "user":
        return "data.batching is 'user', and several targets share a timeline"
    if sharding.type == "column_wise":
        return "sharding.type is 'column_wise'"
    if sharding.compute_kernel == "fused_uvm_caching":
        return "sharding.compute_kernel is 'fused_uvm_caching', and attention reads rows in device memory"
    bags = model.embedding_bag_collection
    widths = {} if bags is None else {table.name: table.embedding_dim for table in bags.embedding_bag_configs()}
    if len({*widths.values()}) > 1:
        return f"tables of users and contexts have several widths, {widths}"
    tables, replicated = _tables(model, sharding)
    for feature in arch.features:
        if unknown := [key for key in feature.sequence_keys if key not in tables]:
            return f"'{unknown[0]}' of feature '{feature.name}' is no row of a table"
        try:
            remote_field(feature, tables, replicated)
        except ValueError as error:
            return str(error)
    return None


def _tables(model: SequenceDLRM, sharding: ShardingConfig) -> tuple[dict[str, str], list[str]]:
    """Returns by embedding of the collection its table, and the tables that every process reads whole."""
    collection: EmbeddingCollection = model.embedding_collection
    configs = collection.embedding_configs()
    names = collection.embedding_names_by_table()
    tables = {name: config.name for config, own in zip(configs, names, strict=True) for name in own}
    return tables, [config.name for config in configs if config.num_embeddings <= sharding.replicate_below]


def within_hosts(plan: ShardingPlan, local_size: int, world_size: int, device: torch.device) -> None:
    """Splits each table of the collection of histories over the processes of one host: the host with the fewest rows.

    Args:
        plan: changed in place.
        local_size: processes of a host.
        world_size: all processes.
        device: type of the processes' devices.
    """
    used = [0] * (world_size // local_size)
    for own, name in [(tables, name) for tables in plan.plan.values() for name in tables]:
        sharding: ParameterSharding = own[name]
        shards = sharding.sharding_spec.shards
        num_rows, width = sum(shard.shard_sizes[0] for shard in shards), shards[0].shard_sizes[1]
        host = used.index(min(used))
        used[host] += num_rows
        block = -(-num_rows // local_size)
        counts = [0] * world_size
        for place in range(local_size):
            counts[host * local_size + place] = max(0, min(block, num_rows - place * block))
        own[name] = in_rows(counts, width, device.type, sharding.compute_kernel, 0, local_size)
