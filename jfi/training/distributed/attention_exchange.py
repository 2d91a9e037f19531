"""Chooses how the processes of a run exchange histories: by attention where the rows are, or by sending the rows."""

import dataclasses

import torch
from torchrec.distributed.types import ParameterSharding, ShardingPlan
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from jfi.data import DataSchema
from jfi.distributed.planning import in_rows, remote_field
from jfi.models import SequenceDLRM
from jfi.modules import JaggedFeatureInteraction
from jfi.training.config import Config, require
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
    require(reason is None or wanted != "attention", "sharding.exchange", wanted, f"auto or rows, since {reason}")
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
    training, decay = config.training, config.optimizer.embeddings.decay
    parts, graph = training.gradient_accumulation_steps, training.cuda_graph
    why = f"under torchrun where processes exchange rows of histories: {reason}"
    kind = config.sharding.type
    require(kind != "table_row_wise", "sharding.type", kind, f"another type {why}")
    require(decay == 0, "optimizer.embeddings.weight_decay", decay, f"0 or auto {why}")
    require(parts == 1, "training.gradient_accumulation_steps", parts, f"1 {why}")
    require(graph != "always", "training.cuda_graph", graph, f"auto or never {why}")
    for column, pretrained in config.model.pretrained.items():
        require(not pretrained.frozen, f"model.pretrained.{column}.frozen", True, f"False {why}")


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
    configs = [] if model.embedding_collection is None else model.embedding_collection.embedding_configs()
    names = zip(configs, get_embedding_names_by_table(configs), strict=True)
    tables = {name: config.name for config, own in names for name in own}
    replicated = [config.name for config in configs if config.num_embeddings <= sharding.replicate_below]
    for feature in arch.features:
        if unknown := [key for key in feature.sequence_keys if key not in tables]:
            return f"'{unknown[0]}' of feature '{feature.name}' is no row of a table"
        try:
            remote_field(feature, tables, replicated)
        except ValueError as error:
            return str(error)
    return None


def within_hosts(plan: ShardingPlan, local_size: int, world_size: int) -> None:
    """Splits each table of the collection of histories over the processes of one host: the host with the fewest rows.

    Args:
        plan: changed in place.
        local_size: processes of a host.
        world_size: all processes.
    """
    used = [0] * (world_size // local_size)
    for own, name in [(tables, name) for tables in plan.plan.values() for name in tables]:
        sharding: ParameterSharding = own[name]
        num_rows = sum(shard.shard_sizes[0] for shard in sharding.sharding_spec.shards)
        host = used.index(min(used))
        used[host] += num_rows
        block = -(-num_rows // local_size)
        counts = [0] * world_size
        for place in range(local_size):
            counts[host * local_size + place] = max(0, min(block, num_rows - place * block))
        own[name] = in_rows(counts, sharding, 0, local_size)
