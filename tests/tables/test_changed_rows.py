"""The marks of the rows that steps change, against the rows whose weights differ."""

import copy

import pytest
import torch
from torchrec import EmbeddingConfig, KeyedJaggedTensor

from jfi.modules import FusedEmbeddingCollection, defer_steps
from jfi.tables.changed_rows import ChangedRows

SIZES = {"item": 50, "user": 20, "unused": 5}
#: By key the table that it reads.
KEYS = {"item": "item", "history": "item", "user": "user"}
ON = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def collection(device: str = "cpu") -> FusedEmbeddingCollection:
    torch.manual_seed(0)
    configs = [
        EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=rows, feature_names=keys)
        for name, rows in SIZES.items()
        if (keys := [key for key, table in KEYS.items() if table == name] or ["unused"])
    ]
    return FusedEmbeddingCollection(configs, torch.optim.SGD, {"lr": 0.5}, device=torch.device(device))


def step(model: FusedEmbeddingCollection, seed: int) -> None:
    """A step of ids that are drawn; the gradients of all rows differ from zero."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (12,), generator=draw)
    sizes = lengths.view(3, 4).sum(1).tolist()
    values = [torch.randint(0, SIZES[t], (n,), generator=draw) for t, n in zip(KEYS.values(), sizes, strict=True)]
    unused = KeyedJaggedTensor([*KEYS, "unused"], torch.cat(values), lengths=torch.cat([lengths, torch.zeros(4).int()]))
    found = model(unused.to(model.device))
    sum(one.values().sum() for one in found.values()).backward()


def differing(model: FusedEmbeddingCollection, before: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    now = model.state_dict()
    return {
        name: (now[f"embeddings.{name}.weight"] != before[f"embeddings.{name}.weight"])
        .any(1)
        .nonzero()
        .flatten()
        .tolist()
        for name in SIZES
    }


def taken(changed: ChangedRows) -> dict[str, list[int]]:
    return {name: changed.take(name).tolist() for name in SIZES}


def saved(model: FusedEmbeddingCollection) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("device", ON)
def test_the_marked_rows_are_those_that_have_changed(device):
    model = collection(device)
    step(model, 0)  # before marks are asked for
    changed = model.fused_optimizer.track_changes()
    assert model.fused_optimizer.track_changes() is changed
    for round_of in range(3):
        before = saved(model)
        for seed in range(1, 4):
            step(model, 10 * round_of + seed)
        expected = differing(model, before)
        assert expected["item"] and expected["user"] and not expected["unused"]
        assert taken(changed) == expected
        assert taken(changed) == {name: [] for name in SIZES}


def test_frozen_rows_are_not_marked_and_deferred_steps_are():
    model = collection()
    changed = model.fused_optimizer.track_changes()
    frozen = torch.zeros(50, dtype=torch.bool)
    frozen[:25] = True
    model.freeze_rows("item", frozen)
    before = saved(model)
    with defer_steps(model):
        step(model, 1)
        assert taken(changed) == {name: [] for name in SIZES}
    step(model, 2)
    expected = differing(model, before)
    assert min(expected["item"]) >= 25 and taken(changed) == expected


def test_rows_of_look_ups_with_other_tables_are_joined():
    changed = ChangedRows()
    changed.mark({"a": 3, "b": 2}, torch.tensor([0, 3, 5]))
    changed.mark({"b": 2}, torch.tensor([1, 2]))
    changed.mark({"c": 4}, torch.tensor([3], dtype=torch.int32))
    assert changed.take("b").tolist() == [0, 1] and changed.take("a").tolist() == [0]
    changed.put_back("b", torch.tensor([1]))
    assert changed.take("b").tolist() == [1] and changed.take("c").tolist() == [3] and changed.take("c").tolist() == []


def test_a_copy_has_marks_of_its_own():
    model = collection()
    changed = model.fused_optimizer.track_changes()
    step(model, 1)
    twin = copy.deepcopy(model)
    own = taken(changed)
    assert own["item"] and taken(twin.fused_optimizer.changed) == own


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_marks_the_rows_of_each_replay():
    from jfi.cuda_graphs import CapturedStep

    model = collection("cuda")
    changed = model.fused_optimizer.track_changes()

    def train(ids: KeyedJaggedTensor) -> torch.Tensor:
        loss = sum(one.values().sum() for one in model(ids).values())
        loss.backward()
        return loss.detach()

    captured = CapturedStep(train, model)
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        values = torch.cat(
            [torch.randint(0, SIZES[t], (4,), generator=draw) for t in KEYS.values()] + [torch.arange(4)]
        )
        before = saved(model)
        captured(KeyedJaggedTensor([*KEYS, "unused"], values, lengths=torch.ones(16, dtype=torch.int64)))
        torch.cuda.synchronize()
        assert taken(changed) == differing(model, before), seed
    assert captured.captured
