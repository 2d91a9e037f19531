"""Chooses how the processes of a run exchange histories: their rows, or attention to them.

`jfi.distributed` has the second way. Where both work, the one that sends fewer bytes is chosen, by the formulas of
`jfi.training.distributed.traffic`.
"""

import os

import torch
from torchrec import EmbeddingCollection
from torchrec.distributed.types import ParameterSharding, ShardingPlan

from jfi.distributed.planning import in_rows, remote_field
from jfi.models import SequenceDLRM
from jfi.modules import JaggedFeatureInteraction
from jfi.training.config import Config, ConfigError, ShardingConfig
from jfi.training.distributed import traffic


def choose_exchange(model: SequenceDLRM, config: Config, ranks: int, mean_events: float) -> tuple[str, str]:
    """The exchange of a run, "rows" or "attention", and what to say of the choice.

    Args:
        model: not sharded yet.
        config: of the run.
        ranks: processes that shard the tables together.
        mean_events: mean length of a history.

    Raises:
        ConfigError: the config asks for attention where it cannot go to the rows, or accumulates gradients there.
    """
    wanted = config.sharding.exchange
    if wanted == "rows":
        if config.sharding.type == "table_row_wise":
            raise ConfigError("sharding.type: got 'table_row_wise', which needs sharding.exchange: attention")
        return "rows", ""
    reason = _why_not(model, config)
    if reason is not None:
        if wanted == "attention" or config.sharding.type == "table_row_wise":
            raise ConfigError(f"sharding.exchange: got '{wanted}', but {reason}")
        if config.training.gradient_accumulation_steps > 1:
            raise ConfigError(accumulates_nowhere(config, reason))
        return "rows", f"sharding.exchange auto: rows, since {reason}"
    if wanted == "attention":
        return "attention", ""
    if config.training.gradient_accumulation_steps > 1:
        return "attention", "sharding.exchange auto: attention, since training.gradient_accumulation_steps is above 1"
    rows, attention = _reckoned(model, config, ranks, mean_events)
    chosen = "attention" if attention < rows or config.sharding.type == "table_row_wise" else "rows"
    return chosen, (
        f"sharding.exchange auto: {chosen}; a sample sends about {attention:,.0f} bytes a step where attention goes to "
        f"the rows, {rows:,.0f} where rows travel"
    )


def accumulates_nowhere(config: Config, reason: str) -> str:
    """Returns the message for a run that accumulates gradients over FBGEMM's tables.

    Args:
        config: of the run.
        reason: why attention does not go to the rows.
    """
    got = config.training.gradient_accumulation_steps
    return (
        f"training.gradient_accumulation_steps: got {got}, must be 1 under torchrun where rows are exchanged, since "
        f"FBGEMM steps its tables in each backward pass ({reason}); with sharding.exchange: attention jfi steps them, "
        "in one process its FusedEmbeddingCollection does"
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


def _reckoned(model: SequenceDLRM, config: Config, ranks: int, mean_events: float) -> tuple[float, float]:
    """Bytes a sample of either way: rows, and attention."""
    arch, (tables, replicated) = model.sequence_arch, _tables(model, config.sharding)
    itemsize = 2 if config.sharding.communication == "bfloat16" else 4
    width, rows, attention = model.embedding_collection.embedding_dim(), 0.0, 0.0
    for feature in arch.features:
        fields = len(feature.sequence_keys)
        columns = fields + (feature.num_buckets > 0) + feature.reads_weights
        shape = traffic.SequenceShape(mean_events, width, arch.pooling.num_heads, fields, columns)
        rows += traffic.by_rows(shape, ranks, itemsize).total
        if remote_field(feature, tables, replicated) is not None:
            attention += traffic.by_attention(shape, _owners(config.sharding, ranks), itemsize, ranks).total
    small = sum(c.num_embeddings for c in model.embedding_collection.embedding_configs() if c.name in replicated)
    if model.embedding_bag_collection is not None:  # whose small tables are replicated too
        bags = [config.num_embeddings for config in model.embedding_bag_collection.embedding_bag_configs()]
        small += sum(count for count in bags if count <= config.sharding.replicate_below)
    samples = max(1, config.training.batch_size // ranks)
    return rows, attention + traffic.replicated(small, width, ranks) / samples


def _owners(sharding: ShardingConfig, ranks: int) -> int:
    """Processes that a table of histories is split over; where the planner chooses, all."""
    if sharding.type == "table_wise":
        return 1
    return min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), ranks) if sharding.type == "table_row_wise" else ranks


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
