"""TorchRec's DLRMTrain, DistributedModelParallel and train pipeline around models with the layer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import jfi
import jfi.table1
from integration import sharded
from integration.sharded import CPU, EPS, RATE, STEPS, build, fill_tables, make_batch, process_group, shard, train
from integration.test_layer_graphs import collection, layer_over
from jfi.models import require_optimizer_in_backward, table_parameters

#: What the pipeline must have taken ahead, by model: every collection.
COLLECTIONS = {
    "own tables": {"model.sparse_arch.embedding_bag_collection", "model.history.embedding_collection"},
    "shared table": {"model.sparse_arch.embedding_bag_collection", "model.collection"},
    "SequenceDLRM": {"model.embedding_bag_collection", "model.embedding_collection"},
}


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("name", COLLECTIONS)
def test_dlrm_train_takes_it(name, samples):
    model = DLRMTrain(build(name))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        loss, (_, logits, labels) = model(make_batch(samples=samples))
        assert logits.shape == labels.shape == (samples,)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", COLLECTIONS)
def test_every_collection_is_pipelined_and_the_losses_stay(name):
    model = DLRMTrain(build(name))
    fill_tables(model)
    apply_optimizer_in_backward(torch.optim.Adagrad, table_parameters(model), {"lr": RATE, "eps": EPS})
    dense = [parameter for parameter in model.parameters() if not hasattr(parameter, "_in_backward_optimizers")]
    optimizer = torch.optim.Adam(dense, lr=0.01)
    want = []
    for step in range(STEPS):
        loss, _ = model(make_batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        want.append(loss.item())
    with process_group():
        losses, pipelined = train(name, "table_wise")
    assert pipelined == COLLECTIONS[name]
    assert losses == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "SequenceDLRM" else pytest.mark.slow) for name in COLLECTIONS]
)
def test_it_compiles_when_sharded(name):
    """TorchRec's sharded collections return awaitables, which nothing may look into while torch.compile traces."""
    torch._dynamo.reset()
    model = DLRMTrain(build(name))
    apply_optimizer_in_backward(torch.optim.SGD, table_parameters(model), {"lr": 0.0})  # so that both read the same
    with process_group():
        model, _ = shard(model)
        fill_tables(model)
        compiled = torch.compile(model, backend="aot_eager")
        for step, samples in enumerate((8, 5)):
            batch, gradients = make_batch(step, samples=samples), []
            for run in (model, compiled):
                loss, (_, logits, _) = run(batch)
                model.zero_grad()
                loss.backward()
                gradients.append([logits, *(x.grad.clone() for x in model.module.parameters() if x.grad is not None)])
            torch.testing.assert_close(gradients[1], gradients[0])


def test_a_target_may_be_an_entry_of_a_sharded_collection():
    """`pooled[key]` of a sharded EmbeddingBagCollection is an awaitable."""
    with process_group():
        model, _ = shard(build("own tables"))
        fill_tables(model)
        history, bags = model.module.history, model.module.sparse_arch.embedding_bag_collection
        ids = make_batch().sparse_features
        got, want = history(ids, {"item": bags(ids)["item"]}), history(ids, bags(ids))
    torch.testing.assert_close(got.values(), want.values(), rtol=0, atol=0)


class OnIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer_over(collection())

    def forward(self, ids: KeyedJaggedTensor, item: torch.Tensor) -> torch.Tensor:
        return self.layer(ids, {"item": item})["taste"]


def test_a_sharded_collection_takes_variable_batch_sizes():
    keys, which = ["history_item", "history_rating"], torch.tensor([0, 1, 0])
    with process_group():
        model, _ = shard(OnIds())
        fill_tables(model)
        few = KeyedJaggedTensor(
            keys,
            torch.tensor([1, 2, 3, 4, 5, 6]),
            lengths=torch.tensor([2, 1, 2, 1]),
            stride_per_key_per_rank=[[2], [2]],
            inverse_indices=(keys, torch.stack([which, which])),
        )
        every = KeyedJaggedTensor(
            keys, torch.tensor([1, 2, 3, 1, 2, 4, 5, 6, 4, 5]), lengths=torch.tensor([2, 1, 2, 2, 1, 2])
        )
        item = torch.randn(3, 8)
        torch.testing.assert_close(model(few, item), model(every, item))


class Direct(nn.Module):
    """A forward that TorchRec's tracer goes through, with operators of jfi called in it."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="t_item", embedding_dim=8, num_embeddings=20, feature_names=["item", "history_item"]
        )
        self.collection = EmbeddingCollection(tables=[table])
        self.scorer = nn.Linear(8, 1)

    def forward(self, batch):
        embeddings = self.collection(batch.sparse_features)
        target, events = embeddings["item"].values(), embeddings["history_item"]
        history, offsets = events.values(), events.offsets()
        attended = jfi.ops.target_attention(target[:, None, None], history[:, None], offsets=offsets, scale=1.0)
        weights = jfi.table1.jagged_softmax(self.scorer(history), offsets)
        pooled = jfi.table1.jagged_jagged_bmm(history, weights, offsets)
        logits = self.scorer(attended.flatten(1) + pooled.squeeze(-1)).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def test_operators_in_a_forward_that_the_pipeline_traces():
    torch.manual_seed(0)
    with process_group():
        model, optimizer = shard(Direct())
        pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
        batches = iter([make_batch()] * 20)
        losses = [pipeline.progress(batches).item() for _ in range(20)]
        assert pipeline._pipelined_modules == [model.module.collection]
    assert losses[-1] < losses[0]


def table_of(model: nn.Module, name: str) -> torch.Tensor:
    (found,) = (x for key, x in model.state_dict().items() if key.endswith(f"{name}.weight"))
    return (found.local_shards()[0].tensor if hasattr(found, "local_shards") else found).clone()


def test_the_rate_that_was_set_is_the_rate_that_is_used():
    """Adagrad's first step moves every element that has a gradient by the learning rate, whatever the gradient."""
    model = DLRMTrain(build("own tables"))
    apply_optimizer_in_backward(torch.optim.Adagrad, table_parameters(model), {"lr": RATE})
    require_optimizer_in_backward(model)
    with process_group():
        model, _ = shard(model)
        names = ("t_user", "t_item", "t_history_item", "t_history_rating")
        before = {name: table_of(model, name) for name in names}
        model(make_batch())[0].backward()
        for name in names:
            moved = (table_of(model, name) - before[name]).abs()
            assert moved.max().item() == pytest.approx(RATE, rel=1e-3), name


def test_what_torchrec_does_where_the_layers_tables_were_forgotten():
    """Why there is require_optimizer_in_backward: the history's tables would train by SGD at 0.01."""
    model = DLRMTrain(build("own tables"))
    apply_optimizer_in_backward(torch.optim.Adagrad, model.model.sparse_arch.parameters(), {"lr": RATE})
    missing = [f"model.history.embedding_collection.embeddings.t_history_{name}.weight" for name in ("item", "rating")]
    with pytest.raises(ValueError, match="every table must have an optimizer in backward") as error:
        require_optimizer_in_backward(model)
    assert str(missing) in str(error.value)
    with process_group():
        model, _ = shard(model)
        rates = {name: one.param_groups[0]["lr"] for _, one in model.fused_optimizer.optimizers for name in one.params}
    assert rates["embedding_bags.t_item.weight"] == pytest.approx(RATE)
    assert rates["embeddings.t_history_item.weight"] == pytest.approx(0.01)


def test_a_sharded_model_is_checked_too_late():
    with process_group():
        model, _ = shard(build("own tables"))
        with pytest.raises(ValueError, match="model must hold tables that are not sharded yet, got none"):
            require_optimizer_in_backward(model)


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    outs = [tmp_path / f"{rank}.json" for rank in range(2)]
    commands = [
        [sys.executable, sharded.__file__, str(rank), "2", tmp_path / "store", out] for rank, out in enumerate(outs)
    ]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    if [process.returncode for process in processes] != [0, 0]:
        pytest.fail("\n".join(errors), pytrace=False)
    for name in COLLECTIONS:
        with process_group():
            want, _ = train(name, "row_wise")
        for out in outs:
            assert json.loads(Path(out).read_text())[name] == pytest.approx(want, rel=1e-4), name
