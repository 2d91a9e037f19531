"""FuxiCTR gets the same rows: ids, labels and histories of the project's own batches, in FuxiCTR's layouts."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from data_configs import data_config

from benchmarks.quality import fuxictr
from benchmarks.quality.fuxictr_training import BY_FIELD, Batches, Rows
from benchmarks.quality.models import PEER_TRAINING
from jfi.data import DataError, load_dataset
from jfi.training.metrics.label_metrics import Predictions

PEERS = fuxictr.Peers()
needs_fuxictr = pytest.mark.skipif(not PEERS.python.exists(), reason=f"no FuxiCTR: {fuxictr.INSTALL}")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Of a table of 12 users with tied times, unknown values, a multi-valued column, and columns of every role."""
    folder, draw = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    lines = ["user_id,item_id,timestamp,rating,device"]
    for user in range(12):
        times = np.sort(draw.integers(0, 25, draw.integers(3, 30)))  # some are equal
        for time in times:
            lines.append(
                f"u{user},i{draw.integers(0, 20)},{1000 * user % 7000 + time},{draw.integers(1, 6)},d{time % 3}"
            )
    (folder / "interactions.csv").write_text("\n".join(lines) + "\n")
    genres = ["|".join(f"g{one}" for one in draw.choice(6, draw.integers(0, 5), replace=False)) for _ in range(20)]
    items = [f"i{item},{one},{draw.random():.3f}" for item, one in enumerate(genres)]
    (folder / "items.csv").write_text("\n".join(["item_id,genres,price", *items]) + "\n")
    tags = [f"u{user},{'|'.join(f't{one}' for one in range(user % 4))}" for user in range(12)]
    (folder / "users.csv").write_text("\n".join(["user_id,tags", *tags]) + "\n")
    return data_config(
        interactions=str(folder / "interactions.csv"),
        items=str(folder / "items.csv"),
        users=str(folder / "users.csv"),
        label="rating >= 4",
        user_categorical=["tags"],
        item_categorical=["genres"],
        item_dense=["price"],
        event_categorical=["rating"],
        context_categorical=["device"],
        separators={"genres": "|", "tags": "|"},
        max_history=6,
        max_slots=2,
        batching="user",
    )


@pytest.fixture(scope="module")
def table(config):
    return load_dataset(config)


@pytest.fixture(scope="module")
def written(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return folder, fuxictr.write_rows(table, folder)


def samples(dataset, split: str) -> list[dict]:
    """What the project's batches say of each row: a dictionary of lists of ids, read one by one."""
    found = []
    for batch in dataset.batches(split, 5, batching="sample"):
        keyed = batch.sparse_features.to_dict()
        for number in range(len(batch.labels)):
            row = {"label": batch.labels[number].item(), "user": batch.users[number].item()}
            row["dense"] = batch.dense_features[number].tolist()
            for key, one in keyed.items():
                start, end = one.offsets()[number : number + 2].tolist()
                row[key] = one.values()[start:end].tolist()
            found.append(row)
    return found


def slot(ids: list[int], number: int) -> int:
    return ids[number] + 1 if number < len(ids) else 0


@pytest.mark.parametrize("split", fuxictr.SPLITS)
def test_rows_are_those_of_our_batches(table, split):
    rows, expected = fuxictr.peer_rows(table, split, batch_size=7), samples(table, split)
    assert len(rows.labels) == len(expected) == table.num_samples(split)
    sizes = {spec.key: spec.num_embeddings for spec in table.features}
    for number, row in enumerate(expected):
        assert (rows.labels[number], rows.users[number]) == (row["label"], row["user"])
        assert rows.dense[number].tolist() == row["dense"]
        start, end = rows.offsets[number : number + 2]
        for name in ("item_id", "genres_0", "genres_1", "rating", "age"):
            assert (rows.events[name][start:end] - 1).tolist() == row[f"history_{name}"]
        assert rows.target["item_id"][number] == slot(row["item_id"], 0)
        for place in range(2):
            assert rows.target[f"genres_{place}"][number] == slot(row["genres"], place)
        for name in ("rating", "age"):
            assert rows.target[name][number] == sizes[f"history_{name}"] + 1
        assert rows.context["device"][number].tolist() == [row["device"][0] + 1]
        tags = rows.context["tags"][number].tolist()
        assert [one for one in tags if one] == [one + 1 for one in row["tags"]]
    assert max(len(row["history_item_id"]) for row in expected) == 6
    assert split != "train" or min(len(row["history_item_id"]) for row in expected) == 0


def test_ids_are_below_the_size_of_the_vocabulary(table, written):
    folder, _ = written
    meta = json.loads((folder / "meta.json").read_text())
    assert [one["name"] for one in meta["fields"]] == ["item_id", "genres_0", "genres_1", "rating", "age"]
    assert meta["fields"][1]["table"] == meta["fields"][2]["table"]
    assert {one["name"]: one["width"] for one in meta["context"]} == {"tags": 3, "device": 1}
    for split in fuxictr.SPLITS:
        with np.load(folder / f"{split}.npz") as found:
            for one in meta["fields"]:
                for part in ("events", "target"):
                    assert found[f"{part}.{one['name']}"].max() < one["vocab_size"]
            for one in meta["context"]:
                assert found[f"context.{one['name']}"].max() < one["vocab_size"]


@pytest.mark.parametrize("model", ["DIN", "DIEN", "BST"])
def test_batches_in_the_models_layouts(table, written, model):
    folder, _ = written
    meta = json.loads((folder / "meta.json").read_text())
    fields, context = ([one["name"] for one in meta[part]] for part in ("fields", "context"))
    rows = Rows(folder, "train", fields, context)
    job = {"batch_size": 8, "model": model, "seed": 3, "settings": {}}
    batches = Batches(rows, job, meta, shuffle=True)
    expected = samples(table, "train")
    order = torch.randperm(len(expected), generator=torch.Generator().manual_seed(3)).tolist()
    seen = 0
    for batch in batches:
        by_field = model in BY_FIELD
        named = batch if by_field else batch[0]
        count = len(named["label"])
        for number in range(count):
            row = expected[order[seen + number]]
            assert named["label"][number] == row["label"]
            assert named["dense_price"][number] == row["dense"][0]
            assert named["device"][number] == row["device"][0] + 1
            for name in fields:
                if by_field:
                    events, target = batch[f"history_{name}"][number].tolist(), batch[name][number].item()
                    assert len(events) == 6
                else:
                    together = batch[1][name].view(count, -1)[number].tolist()
                    events, target = together[:-1], together[-1]
                    mask = batch[2][number].tolist()
                    assert [e for e, one in zip(events, mask, strict=True) if one] == [e for e in events if e]
                ids = [one + 1 for one in row[f"history_{name}"]]
                padding = [0] * (len(events) - len(ids))
                assert events == (ids + padding if model == "DIEN" else padding + ids)
                assert target == rows.target[name][order[seen + number]]
        seen += count
    assert seen == len(expected) and len(batches) == -(-len(expected) // 8)


def test_histories_are_padded_to_what_a_model_reads(written):
    folder, _ = written
    meta = json.loads((folder / "meta.json").read_text())
    rows = Rows(folder, "test", ["item_id"], [])
    job = {"batch_size": 8, "model": "SIM", "seed": 0, "settings": {"short_seq_len": 9}}
    _, together, mask = next(iter(Batches(rows, job, meta | {"dense": []}, shuffle=False)))
    assert mask.shape[1] == 9 and together["item_id"].view(len(mask), -1).shape[1] == 10


def test_metrics_are_ours_also_of_a_probability_of_one():
    draw = np.random.default_rng(1)
    logits, labels = draw.normal(size=200), (draw.random(200) < 0.4).astype(np.float32)
    users = draw.integers(0, 9, 200)
    expected = Predictions()
    expected.add(torch.from_numpy(logits), torch.from_numpy(labels), torch.from_numpy(users))
    found = fuxictr.metrics(1 / (1 + np.exp(-logits)), labels, users)
    assert found == pytest.approx(expected.metrics(), rel=1e-6)
    assert np.isfinite(
        fuxictr.metrics(np.array([1.0, 0.0]), np.array([0.0, 1.0], np.float32), np.array([0, 0]))["loss"]
    )


def test_implicit_feedback_is_refused(config):
    implicit = load_dataset(dataclasses.replace(config, label=None))
    with pytest.raises(DataError, match=r"data\.label is null"):
        fuxictr.peer_rows(implicit, "train")


def test_a_missing_environment_names_the_command(tmp_path):
    with pytest.raises(fuxictr.PeerError, match=r"pip install -r benchmarks/quality/requirements-peers\.txt"):
        fuxictr.Peers(tmp_path / "python", tmp_path).check()
    with pytest.raises(fuxictr.PeerError, match=r"python -m benchmarks\.quality\.fetch --out data/quality fuxictr"):
        fuxictr.Peers(Path(__file__), tmp_path / "model_zoo").check()


@pytest.mark.slow  # two processes, each of which imports torch and ray
@needs_fuxictr
def test_a_peer_trains_and_its_scores_are_of_our_rows(written):
    folder, splits = written
    job = PEER_TRAINING | {"epochs": 2, "batch_size": 16}
    settings = {"embedding_dim": 4, "dnn_hidden_units": [8], "learning_rate": 0.01, "embedding_regularizer": 1e-5}
    found = fuxictr.train_peer("DIN", folder, splits, PEERS, job, 0, settings)
    assert found["epochs"] == 2 and found["best_epoch"] in (1, 2) and found["parameters"] > 100
    assert all(0 < found[split]["loss"] < 2 for split in ("validation", "test"))
    with pytest.raises(fuxictr.PeerError, match="DIN failed"):
        fuxictr.train_peer("DIN", folder, splits, PEERS, job, 0, settings | {"dnn_activations": "nonsense"})
