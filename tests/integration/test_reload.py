"""A model that several processes have sharded and saved predicts the same when one process loads it.

The order of the keys of a sharded EmbeddingBagCollection's output follows the sharding plan.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from processes import in_processes
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

from integration import page
from integration.sharded import CPU, fill_tables, make_batch, process_group
from jfi import SequenceDLRM, SequenceFeatureConfig
from jfi.models import AttentionPooling

SIZE = 2
#: The default, "dense", crashes on a CPU.
FUSED = {"compute_kernel": "fused"}
#: By position of the table in its collection; gloo has no collective for bags that are split by rows.
BAGS = [table_wise(rank=1, **FUSED), table_wise(rank=0, **FUSED), column_wise(ranks=[0, 1], **FUSED)]
EVENTS = [row_wise(**FUSED), table_wise(rank=1, **FUSED)]
MODELS = ["own tables", "shared table", "SequenceDLRM", "README"]


class Readme(nn.Module):
    """The ten lines of the README, in a module."""

    def __init__(self) -> None:
        super().__init__()
        text = (page.ROOT / "README.md").read_text()
        section = text[text.index("## Ten lines in an existing model") :]
        setup, code = re.search(r"<!-- setup\n(.*?)-->\n```python\n(.*?)```", section, flags=re.DOTALL).groups()
        names = {}
        exec(setup, names)
        self.ebc = names["self"].ebc
        before, after = code.split("# in forward")
        exec(before, names | {"self": self})
        self.ids, self.code = names["ids"], compile("#" + after, "README.md", "exec")

    def forward(self, dense_features: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        names = {"self": self, "ids": ids}
        exec(self.code, {"torch": torch}, names)
        return names["sparse"]


def model_of(name: str) -> nn.Module:
    """The model; those of the page with bags of several keys, whose order the plan changes."""
    torch.manual_seed(0)
    if name == "README":
        return Readme()
    names = page.run(before="The optimizer in backward")
    if name == "own tables":
        bags = names.bag_tables("user", "item", "history_rating")
        return names.HistoryDLRM(bags, names.history, names.DENSE, [8, names.D], [8, 1])
    bags, events = names.bag_tables("user", "history_rating"), names.EmbeddingCollection(tables=[names.items])
    if name == "shared table":
        return names.SharedTableDLRM(bags, events, names.shared.history, names.DENSE, [8, names.D], [8, 1])
    features = [SequenceFeatureConfig("taste", ["history_item"], ["item"])]
    return SequenceDLRM(bags, events, features, names.DENSE, [8, names.D], [8, 1], pooling=AttentionPooling(2))


def shard(model: nn.Module) -> DistributedModelParallel:
    size, plans = dist.get_world_size(), {}
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            sharder, kinds, configs = EmbeddingBagCollectionSharder(), BAGS, module.embedding_bag_configs()
        elif isinstance(module, EmbeddingCollection):
            sharder, kinds, configs = EmbeddingCollectionSharder(), EVENTS, module.embedding_configs()
        else:
            continue
        if size == 1:
            kinds = [table_wise(rank=0, **FUSED)] * len(configs)
        own = {config.name: kinds[place] for place, config in enumerate(configs)}
        plans[path] = construct_module_sharding_plan(module, own, sharder, size, size, "cpu")
    return DistributedModelParallel(model, device=CPU, plan=ShardingPlan(plans))


def make_inputs(model: nn.Module, rank: int, size: int) -> tuple[Tensor, KeyedJaggedTensor]:
    if isinstance(model, Readme):
        return torch.empty(0), model.ids  # the same samples for each process
    batch = make_batch(rank=rank, size=size)
    return batch.dense_features, batch.sparse_features


def save(rank: int, folder: str) -> None:
    """What one of several processes does."""
    with process_group(rank, SIZE, dist.FileStore(f"{folder}/store", SIZE)), torch.no_grad():
        for name in MODELS:
            model = model_of(name)
            sharded = shard(model)
            fill_tables(sharded)
            predictions = sharded(*make_inputs(model, rank, SIZE))
            checkpoint.save({"model": sharded.state_dict()}, checkpoint_id=f"{folder}/{name}")
            torch.save(predictions, f"{folder}/{name}.{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    in_processes(save, str(path))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_one_process_predicts_what_two_have_saved(name, folder):
    saved = [torch.load(folder / f"{name}.{rank}.pt") for rank in range(SIZE)]
    with process_group(), torch.no_grad():
        model = model_of(name)
        sharded = shard(model)
        state = {"model": sharded.state_dict()}
        checkpoint.load(state, checkpoint_id=folder / name)
        sharded.load_state_dict(state["model"])
        predictions = sharded(*make_inputs(model, 0, 1))
    want = saved[0] if name == "README" else torch.cat(saved)
    torch.testing.assert_close(predictions, want)
    assert predictions.std() > 0.01  # samples differ at all
