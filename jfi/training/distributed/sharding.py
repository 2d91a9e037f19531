"""Shards the embedding tables of a model over the processes of a run, and builds the optimizer of the sharded model.

TorchRec's DistributedModelParallel does it: its planner assigns the tables to ranks, their update is fused into the
backward pass, and DistributedDataParallel replicates all other parameters. Parameters keep the names that they have in
one process.
"""

import dataclasses
import math
import os
import warnings

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    KernelConfig,
    ParameterConstraints,
    PlannerError,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import CacheParams, CommOp, ModuleSharder, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from jfi.data import DataSchema
from jfi.distributed import AttentionCollectionSharder, FetchedBagsSharder
from jfi.distributed.planning import in_rows, remote_field
from jfi.distributed.sharded_tables import check_bags
from jfi.models import SequenceDLRM
from jfi.modules import JaggedFeatureInteraction
from jfi.modules.lookups import names_of
from jfi.training.config import Config, ConfigError, ShardingConfig, require
from jfi.training.distributed.processes import World
from jfi.training.model.build_model import OPTIMIZERS, build_model, keyed_optimizer, table_configs
from jfi.training.model.parameter_groups import Groups

#: The epsilon of torch.optim's Adagrad and of TorchRec's RowWiseAdagrad; fbgemm has another default.
_EPS = 1e-10
#: Optimizers whose fused form makes the same steps as the one of a single process.
_FUSED = ("adagrad", "rowwise_adagrad")
#: Fraction of the memory that the planner reserves for everything but tables.
_RESERVED = 0.2
#: Fraction of a table's rows that the cache on the GPU holds: FBGEMM's default.
_CACHED = 0.2
_TYPES = ["table_wise", "row_wise", "column_wise"]


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
    tables = {name: table for name, _, table in names_of(model.embedding_collection)}
    for feature in arch.features:
        if unknown := [key for key in feature.sequence_keys if key not in tables]:
            return f"'{unknown[0]}' of feature '{feature.name}' is no row of a table"
    try:
        if model.embedding_bag_collection is not None:
            check_bags(model.embedding_bag_collection)
        for feature in arch.features:
            remote_field(feature, tables, sharding.replicate_below)
    except ValueError as error:
        return str(error).partition(": ")[0]  # without advice for code
    return None


def check_sharded(config: Config, world: World) -> None:
    """Checks that a run under torchrun supports the config.

    Raises:
        ConfigError: a setting that it does not support, by its key.
    """
    optimizer, kernel, size = config.optimizer, config.sharding.compute_kernel, config.sharding.group_size
    if config.training.run_dir is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        raise ConfigError("training.run_dir must be set when torchrun runs with --max_restarts")
    average, tables = optimizer.ema_decay, optimizer.embeddings
    require(average in (None, "auto"), "optimizer.ema_decay", average, "null under torchrun")
    must = f"{' or '.join(_FUSED)} under torchrun"
    require(tables.name in _FUSED, "optimizer.embeddings.name", tables.name, must)
    if config.sharding.exchange == "rows":
        check_rows(config, "sharding.exchange is rows")
    is_cached, key = kernel == "fused_uvm_caching", "sharding.compute_kernel"
    require(world.device.type == "cuda" or not is_cached, key, kernel, "auto or fused without a GPU")
    if size is not None:
        must = f"a divisor of the number of processes, {world.size}"
        require(world.size % size == 0, "sharding.group_size", size, must)
        must = (
            "0 or auto with sharding.group_size, since an average of tables mixes rows with and without their penalty"
        )
        require(tables.decay == 0, "optimizer.embeddings.weight_decay", tables.weight_decay, must)
        require(not is_cached, key, kernel, "auto or fused with sharding.group_size")


def shard_model(
    model: SequenceDLRM, config: Config, world: World
) -> tuple[DistributedModelParallel, CombinedOptimizer, Groups]:
    """Shards `model`, which has its tables on the meta device; `draw_tables` sets their values afterwards.

    Args:
        model: with the settings of `config`.
        config: of the run, without settings left open.
        world: its processes.

    Returns:
        The sharded model, the optimizer of its tables and its other parameters, and the groups that share its tables.

    Raises:
        ConfigError: the planner finds no plan, since the tables do not fit.
    """
    tables, group = table_configs(model), config.optimizer.embeddings
    parameters = dict(model.named_parameters())
    fused = {"lr": group.learning_rate, "eps": _EPS, "weight_decay": group.decay}
    apply_optimizer_in_backward(OPTIMIZERS[group.name], [parameters[name] for name in tables], fused)
    for module in model.children():
        if not isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            module.to(world.device)
    groups = Groups(world, config.sharding.group_size)
    sharders, remote = sharders_of(config.sharding), config.sharding.exchange == "attention"
    if remote:
        half = torch.bfloat16 if config.sharding.communication == "bfloat16" else None
        options = {"replicate_below": config.sharding.replicate_below, "dtype": half}
        sharders = [FetchedBagsSharder(**options), AttentionCollectionSharder(model, **options)]
    try:
        plan = world.on_first(lambda: _plan(model, list(tables.values()), config, world, sharders))
    except ConfigError as fault:
        may_cache = world.device.type == "cuda" and config.sharding.group_size is None
        if not (remote and may_cache and config.sharding.compute_kernel == "auto"):
            raise
        raise ConfigError(f"{fault}; with sharding.exchange: rows tables may lie in host memory") from None
    plan, environment = groups.own_plan(plan), groups.environment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TorchRec passes DDP an argument that torch 2.13 deprecates
        # Captured steps average gradients themselves.
        options = {"init_data_parallel": config.training.cuda_graph != "always"}
        sharded = DistributedModelParallel(model, environment, world.device, plan, sharders, **options)
    groups.hold(sharded, list(tables))
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    others = keyed_optimizer(config.optimizer.dense, dense, config.training.max_grad_norm)
    return sharded, CombinedOptimizer([sharded.fused_optimizer, others]), groups


def sharders_of(sharding: ShardingConfig) -> list[ModuleSharder]:
    """Returns TorchRec's sharders of both collections, which send rows in the config's dtype."""
    codecs = None
    if sharding.communication == "bfloat16":
        # Not by TorchRec's get_qcomm_codecs_registry, which sends float16 in silence on CPUs.
        half = QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16)
        codecs = {operation.name: get_qcomm_codecs(half) for operation in CommOp}
    return [
        EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs),
        EmbeddingCollectionSharder(qcomm_codecs_registry=codecs),
    ]


def _plan(
    model: SequenceDLRM,
    tables: list[BaseEmbeddingConfig],
    config: Config,
    world: World,
    sharders: list[ModuleSharder],
) -> ShardingPlan:
    local, size = int(os.environ["LOCAL_WORLD_SIZE"]), config.sharding.group_size or world.size
    on_gpu, attention = world.device.type == "cuda", isinstance(sharders[0], FetchedBagsSharder)
    topology = TopologyFactory.create_topology(
        TrainerConfig(
            world_size=size,
            local_world_size=min(local, size),
            hbm_cap_bytes=torch.cuda.get_device_properties(world.device).total_memory if on_gpu else None,
            ddr_cap_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local,
        ),
        kernel_config=KernelConfig(compute_device=world.device.type),
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=-(-config.training.batch_size // world.size),
        storage_reservation=FixedPercentageStorageReservation(_RESERVED),
        constraints={table.name: _constraints(table, config.sharding, on_gpu, attention) for table in tables},
    )
    try:
        plan = planner.plan(model, sharders)
        if config.sharding.type == "table_row_wise":
            within_hosts(plan, min(local, size), size)
        return plan
    except PlannerError as error:
        raise ConfigError(f"sharding: TorchRec's planner found no plan: {str(error).splitlines()[0]}") from None


def _constraints(
    table: BaseEmbeddingConfig, sharding: ShardingConfig, on_gpu: bool, attention: bool
) -> ParameterConstraints:
    bags = isinstance(table, EmbeddingBagConfig)
    types = _TYPES if sharding.type == "auto" else [sharding.type]
    if types == ["table_row_wise"]:
        types = ["row_wise"]  # `within_hosts` keeps to one host what the planner splits over all
    if types == ["row_wise"] and bags and not on_gpu and not attention:
        types = ["table_wise"]  # gloo has no collective that sums bags over ranks
    kernels = [sharding.compute_kernel]
    if sharding.compute_kernel == "auto":
        cached = on_gpu and sharding.group_size is None and not attention
        kernels = ["fused", "fused_uvm_caching"] if cached else ["fused"]
    return ParameterConstraints(
        sharding_types=types,
        compute_kernels=kernels,
        min_partition=shard_columns(table.embedding_dim),
        cache_params=CacheParams(load_factor=_CACHED) if "fused_uvm_caching" in kernels else None,
    )


def shard_columns(width: int) -> int:
    """Returns the columns of a shard under `column_wise`: 16, or half of a narrower table.

    FBGEMM takes multiples of 4; a table that has no such shards stays whole.

    >>> shard_columns(64), shard_columns(8), shard_columns(10)
    (16, 4, 10)
    """
    columns = math.gcd(width // 2, 16)
    return columns if width % 8 == 0 else width


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
        for rank in range(local_size):
            counts[host * local_size + rank] = max(0, min(block, num_rows - rank * block))
        own[name] = in_rows(counts, sharding, 0, local_size)
