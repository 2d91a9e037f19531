"""Tables in groups of processes (2D parallelism): each group shards all tables among its processes.

A group exchanges rows among its own processes only, and its copy of the tables learns from its own samples. Every few
steps the groups average their tables and the states of the tables' optimizers. The other parameters are those of all
processes in every step.

It is what TorchRec's DMPCollection does, with its ShardingEnv2D; DMPCollection itself refuses CPUs. Tensors stay
ShardedTensors, so that a checkpoint is that of one group, and is read by any number of processes and groups.
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.remote_device import _remote_device
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import EnumerableShardingSpec, ShardingEnv, ShardingEnv2D, ShardingPlan

from jfi.training.distributed.processes import World
from jfi.training.model.build_model import shards_of


class Groups:
    """The groups of a run's processes: processes n * g to n * g + n - 1 are group g, so that hosts can be groups.

    Args:
        world: all processes.
        size: n, the processes of a group, a divisor of their number; None for a single group.
    """

    def __init__(self, world: World, size: int | None) -> None:
        self.size, self._world = size or world.size, world
        self._replicas: dist.ProcessGroup | None = None
        self._tables: list[Tensor] = []
        self._averaged_at = 0

    @property
    def several(self) -> bool:
        """Returns whether there is more than one group."""
        return self.size < self._world.size

    def environment(self) -> ShardingEnv:
        """For DistributedModelParallel; all processes call it together."""
        if not self.several:
            return ShardingEnv.from_process_group(dist.group.WORLD)
        shape = self._world.size // self.size, self.size
        mesh = init_device_mesh(self._world.device.type, shape, mesh_dim_names=("replicate", "shard"))
        self._replicas = mesh.get_group("replicate")
        parts = mesh.get_group("shard"), self._replicas, dist.group.WORLD, mesh
        environment = ShardingEnv2D(*parts, use_inter_host_allreduce=True)
        environment.output_dtensor = False
        return environment

    def own_plan(self, plan: ShardingPlan) -> ShardingPlan:
        """A plan for processes 0 to n - 1, for those of this process' group."""
        if not self.several:
            return plan
        plan, first = copy.deepcopy(plan), self._world.rank // self.size * self.size
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        for tables in plan.plan.values():
            for table in tables.values():
                table.ranks = [first + rank for rank in table.ranks]
                if isinstance(table.sharding_spec, EnumerableShardingSpec):
                    for shard in table.sharding_spec.shards:
                        rank = first + shard.placement.rank()
                        device = "cpu" if self._world.device.type == "cpu" else f"cuda:{rank % local}"
                        shard.placement = _remote_device(f"rank:{rank}/{device}")
        return plan

    def hold(self, model: DistributedModelParallel, names: list[str]) -> None:
        """Names the tables to average: the parameters of `model` with these names."""
        if not self.several:
            return
        parameters, state = model.state_dict(), model.fused_optimizer.state_dict()["state"]
        for name in names:
            sharded = [parameters[name], *state.get(name, {}).values()]
            self._tables += [values for one in sharded for values, *_ in shards_of(one)]

    @torch.no_grad()
    def average(self, step: int) -> None:
        """Averages the tables of the groups and their optimizers' states; all processes call it together.

        Args:
            step: finished steps; nothing is done twice after the same one.
        """
        if step == self._averaged_at:
            return
        self._averaged_at = step
        for values in self._tables:
            dist.all_reduce(values, group=self._replicas)
            values /= self._world.size // self.size
