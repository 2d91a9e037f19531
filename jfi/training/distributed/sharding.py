"""Shards the embedding tables of a model over the processes of a run, and builds the optimizer of the sharded model.

TorchRec's DistributedModelParallel does it: its planner assigns the tables to ranks, their update is fused into the
backward pass, and DistributedDataParallel replicates all other parameters. Parameters keep the names that they have in
one process.
"""

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
from torchrec.distributed.types import CacheParams, CommOp, ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from jfi.distributed import AttentionCollectionSharder, FetchedBagsSharder
from jfi.models import SequenceDLRM
from jfi.training.config import Config, ConfigError, ShardingConfig
from jfi.training.distributed.attention_exchange import check_rows, within_hosts
from jfi.training.distributed.processes import World
from jfi.training.loop.captured_steps import captures_shards
from jfi.training.model.build_model import OPTIMIZERS, keyed_optimizer, table_configs
from jfi.training.model.parameter_groups import Groups

#: The epsilon of torch.optim's Adagrad and of TorchRec's RowWiseAdagrad; fbgemm has another default.
_EPS = 1e-10
#: Optimizers whose fused form makes the same steps as the one of a single process.
_FUSED = ("adagrad", "rowwise_adagrad")
#: Fraction of the memory that the planner reserves for everything but tables.
_RESERVED = 0.2
_TYPES = ["table_wise", "row_wise", "column_wise"]


def check_sharded(config: Config, world: World) -> None:
    """Checks that a run under torchrun supports the config.

    Raises:
        ConfigError: a setting that it does not support, by its key.
    """
    optimizer, kernel = config.optimizer, config.sharding.compute_kernel
    if config.training.run_dir is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        raise ConfigError("training.run_dir must be set when torchrun runs with --max_restarts")
    if optimizer.ema_decay not in (None, "auto"):
        raise ConfigError(f"optimizer.ema_decay: got {optimizer.ema_decay}, must be null under torchrun")
    if optimizer.embeddings.name not in _FUSED:
        got = optimizer.embeddings.name
        raise ConfigError(f"optimizer.embeddings.name: got '{got}', must be {' or '.join(_FUSED)} under torchrun")
    if config.sharding.exchange == "rows":
        check_rows(config, "sharding.exchange is rows")
    if kernel == "fused_uvm_caching" and world.device.type != "cuda":
        raise ConfigError(f"sharding.compute_kernel: got '{kernel}', must be auto or fused without a GPU")
    size = config.sharding.group_size
    if size is not None and world.size % size:
        raise ConfigError(f"sharding.group_size: got {size}, must divide the number of processes, {world.size}")
    if size is not None and optimizer.embeddings.decay != 0:
        got = optimizer.embeddings.weight_decay
        raise ConfigError(
            f"optimizer.embeddings.weight_decay: got {got}, must be 0 or auto with sharding.group_size, since an "
            "average of tables mixes rows that have had their penalty with rows that have not"
        )
    if size is not None and kernel == "fused_uvm_caching":
        raise ConfigError(f"sharding.compute_kernel: got '{kernel}', must be auto or fused with sharding.group_size")


def shard_model(
    model: SequenceDLRM, config: Config, world: World
) -> tuple[DistributedModelParallel, CombinedOptimizer, Groups]:
    """Shards `model`, which has its tables on the meta device; `draw_tables` sets their values afterwards.

    Args:
        model: with the settings of `config`.
        config: of the run, settled.
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
    plan = groups.own_plan(plan)
    environment = groups.environment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TorchRec passes DDP an argument that torch 2.13 deprecates
        # Captured steps average gradients themselves.
        replicates = not captures_shards(config)
        sharded = DistributedModelParallel(
            model, environment, world.device, plan, sharders, init_data_parallel=replicates
        )
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
            within_hosts(plan, min(local, size), size, world.device)
        return plan
    except PlannerError as error:
        raise ConfigError(f"sharding: TorchRec's planner found no plan: {str(error).splitlines()[0]}") from None


def _constraints(
    table: BaseEmbeddingConfig, sharding: ShardingConfig, on_gpu: bool, attention: bool
) -> ParameterConstraints:
    bags = isinstance(table, EmbeddingBagConfig)
    types = _TYPES if sharding.type == "auto" else [sharding.type]
    if attention and sharding.type == "auto":
        types = ["table_wise", "row_wise"]
    if types == ["table_row_wise"] and (attention or not bags or not on_gpu):
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
        min_partition=sharding.min_partition,
        cache_params=CacheParams(load_factor=sharding.cache_load_factor) if "fused_uvm_caching" in kernels else None,
    )
