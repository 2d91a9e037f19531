"""In a process group of several, a fused collection refuses to train: each process would step tables of its own.

It does so however the processes share the other parameters, and before anything has changed.
"""

import inspect
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

from jfi import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from jfi.modules import defer_steps

SIZE = 2
OPTIONS = {
    "find_unused_parameters": True,
    "static_graph": True,
    "gradient_as_bucket_view": True,
    "broadcast_buffers": False,
    "forward_sync_buffers": False,
    "init_sync": False,
    "bucket_cap_mb": 1,
    "skip_all_reduce_unused_params": True,
}


class Model(nn.Module):
    def __init__(self, bags: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        config, collection = EmbeddingConfig, FusedEmbeddingCollection
        if bags:
            config, collection = EmbeddingBagConfig, FusedEmbeddingBagCollection
        table = config(name="item", num_embeddings=10, embedding_dim=4, feature_names=["item"])
        self.tables = collection([table], torch.optim.SGD, {"lr": 0.5})
        self.over = nn.Linear(4, 1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        rows = self.tables(ids)["item"]
        return self.over(rows if isinstance(rows, Tensor) else rows.values())


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(inner)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.inner(ids)


def ignoring_tables() -> nn.Module:
    model = Model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["tables.embeddings.item.weight"])
    return DistributedDataParallel(model)


def delaying_tables() -> nn.Module:
    model = Model()
    delayed = [("tables.embeddings.item.weight", model.tables.embeddings["item"].weight)]
    last = model.over.weight
    return DistributedDataParallel(model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=last)


UNUSED = {"find_unused_parameters": True}
KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
WAYS = {
    "no option": lambda: DistributedDataParallel(Model()),
    **{
        name: partial(lambda **options: DistributedDataParallel(Model(), **options), **{name: value})
        for name, value in OPTIONS.items()
        if name in KNOWN
    },
    "static_graph, find_unused_parameters": lambda: DistributedDataParallel(Model(), static_graph=True, **UNUSED),
    "bags": lambda: DistributedDataParallel(Model(bags=True), **UNUSED),
    "parameters to ignore": ignoring_tables,
    "delay_all_reduce_named_params": delaying_tables,
    "around a module that contains it": lambda: DistributedDataParallel(Around(Model()), **UNUSED),
    "inside another module": lambda: Around(DistributedDataParallel(Model(), **UNUSED)),
    "fully_shard": lambda: fully_shard(Model(), mesh=init_device_mesh("cpu", (SIZE,))),
    "gradients averaged by hand": Model,
}


def weight_of(model: nn.Module) -> Tensor:
    (weight,) = (x.detach() for name, x in model.named_parameters() if "tables" in name)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()


def step(model: nn.Module) -> str:
    """The error of a training step, or what has happened."""
    rank, before = dist.get_rank(), weight_of(model)
    ids = KeyedJaggedTensor(["item"], torch.tensor([1, 3 + rank]), lengths=torch.tensor([1, 1]))
    try:
        model(ids).sum().backward()
        error = "none"
    except RuntimeError as fault:
        error = str(fault)
    return error if torch.equal(weight_of(model), before) else "stepped"


def run(rank: int, folder: str) -> None:
    """What a process does."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", SIZE), rank=rank, world_size=SIZE)
    found = {name: step(make()) for name, make in WAYS.items()}
    model = DistributedDataParallel(Model(), **UNUSED)
    with defer_steps(model):
        found["defer_steps"] = step(model)
    with model.no_sync():
        found["no_sync"] = step(model)
    model.module.tables.requires_grad_(False)
    found["frozen"] = step(DistributedDataParallel(model.module))
    with torch.no_grad():
        ids = KeyedJaggedTensor(["item"], torch.tensor([1, 3]), lengths=torch.tensor([1, 1]))
        found["no_grad"] = list(Model()(ids).shape)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("processes")
    in_processes(run, str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


@pytest.mark.parametrize("way", [*WAYS, "defer_steps", "no_sync"])
def test_it_refuses_to_train(way, found):
    for of_rank in found:
        assert "steps its tables in one process, got a process group of 2" in of_rank[way]


def test_it_is_read_there(found):
    """Without gradients of the tables, as in evaluation, or with tables that are frozen."""
    for of_rank in found:
        assert of_rank["no_grad"] == [2, 1] and of_rank["frozen"] == "none"


def test_a_group_of_one_process_trains():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert step(DistributedDataParallel(Model(), **UNUSED)) == step(Model()) == "stepped"
    finally:
        dist.destroy_process_group()
