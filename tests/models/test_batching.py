"""Batches by user and by sample: the same predictions and the same gradients, row by row."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from data_configs import data_config

from jfi.data import DataConfig, InteractionDataset, load_dataset
from jfi.data.batches.order import cut_chunks
from jfi.models.sequence_arch import _why_not_shared
from jfi.modules import JaggedEncoder, PositionBias
from jfi.training.config import EncoderConfig, ModelConfig
from jfi.training.model.build_model import build_model, draw_tables, table_configs
from jfi.utils.jagged import blocks

WIDTH = 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Of logits around 1; kernels of a GPU add up in another order.
ROUNDING = 1e-5 if DEVICE.type == "cpu" else 1e-4


def write_table(path, seed: int = 0) -> str:
    """Users of many, few and single rows, ties, rows without a label and rows that are no history."""
    rng = np.random.default_rng(seed)
    rows = []
    for user, count in enumerate([1, 2, 3, 17, 40, 75, 5, 120]):
        times = np.sort(rng.integers(0, count, count)) * 100.0  # about a third are ties
        for time in times:
            item, rating, kind = rng.integers(0, 12), rng.integers(1, 6), rng.choice(["view", "buy"])
            shown = "" if rng.random() < 0.2 else rating
            place, tags = rng.choice(["top", "side", ""]), "|".join(rng.choice(["x", "y", "z"], rng.integers(0, 4)))
            known = (place, tags, rng.choice(["", rng.integers(0, 24)]))
            rows.append((user, "fm"[user % 2], item, "abc"[item % 3], time, shown, kind, rng.random(), *known))
    header = "user_id,gender,item_id,genre,timestamp,rating,kind,price,place,tags,hour"
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]))
    return str(path)


@pytest.fixture
def config(tmp_path) -> DataConfig:
    return data_config(
        interactions=write_table(tmp_path / "rows.csv"),
        label="rating >= 3",
        user_categorical=["gender"],
        item_categorical=["genre"],
        item_dense=["price"],
        event_categorical=["kind", "place"],
        context_categorical=["place", "tags"],
        context_dense=["hour"],
        separators={"tags": "|"},
        max_history=10,
        fractions=[0.6, 0.2, 0.2],
    )


def model_of(dataset: InteractionDataset, encoder: EncoderConfig | None = None, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    config = ModelConfig(
        embedding_dim=WIDTH, num_heads=2, dense_arch=[8], over_arch=[16, 8], **{"dropout": 0.0} | options
    )
    model = build_model(config, encoder or EncoderConfig(), dataset.schema)
    draw_tables(model.state_dict(), table_configs(model), seed=1)
    for parameter in model.parameters():
        if parameter.abs().sum() == 0:  # biases, which begin at zero, would hide a wrong bucket
            torch.nn.init.normal_(parameter, std=0.5)
    return model.to(DEVICE)


def run(model, dataset: InteractionDataset, split: str, batching: str, batch_size: int, **order):
    """Logits and labels by sample, users, and the gradients of the sum of squares."""
    logits, users = torch.full((dataset.num_samples(split),), torch.nan), {}
    model.zero_grad()
    for batch in dataset.batches(split, batch_size, batching=batching, **order):
        batch = batch.to(DEVICE)
        out = model(batch.dense_features, batch.sparse_features, batch.timelines).squeeze(-1)
        out.square().sum().backward()
        samples = batch.samples.cpu()
        assert logits[samples].isnan().all()
        logits[samples] = out.detach().cpu()
        users |= zip(batch.samples.tolist(), zip(batch.users.tolist(), batch.labels.tolist(), strict=True), strict=True)
    assert not logits.isnan().any()
    return logits, users, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_equal(model, dataset: InteractionDataset, splits=("train", "validation", "test")) -> None:
    for split in splits:
        logits, users, grads = run(model, dataset, split, "sample", 64, seed=3)
        shared, same_users, shared_grads = run(model, dataset, split, "user", 23, shuffle=True, seed=3)
        assert users == same_users
        torch.testing.assert_close(shared, logits, rtol=ROUNDING, atol=ROUNDING)
        assert grads.keys() == shared_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(
                shared_grads[name], grad, rtol=10 * ROUNDING, atol=10 * ROUNDING * grad.abs().max().item()
            )


@pytest.mark.parametrize(
    "options",
    [
        {"bias": "history_age"},
        {"bias": "position"},
        {"bias": ["history_age", "position"], "cross_layers": 1},
        {"pooling": "mean"},
        {"pooling": "sum"},
        {"pooling": "none"},
    ],
    ids=str,
)
def test_both_ways_give_the_same(config, options):
    dataset = load_dataset(config)
    check_equal(model_of(dataset, **options), dataset)


def test_rows_that_are_only_samples_or_only_history(config):
    dataset = load_dataset(replace(config, history="kind == buy"))
    check_equal(model_of(dataset, bias="history_age"), dataset)


def test_implicit_feedback(config):
    dataset = load_dataset(replace(config, label=None, negatives=3))
    check_equal(model_of(dataset, bias="history_age"), dataset)


def test_impressions_are_of_the_row_in_both_ways(config):
    dataset = load_dataset(replace(config, label=None, negatives=2))
    found = []
    for batching in ("sample", "user"):
        values: dict[int, list] = {}
        for batch in dataset.batches("train", 50, batching=batching, epoch=1):
            keys = [batch.sparse_features[key].to_dense() for key in ("place", "tags")]
            columns = zip(batch.samples.tolist(), *keys, batch.dense_features[:, -1].tolist(), strict=True)
            values |= {sample: (place.tolist(), tags.tolist(), hour) for sample, place, tags, hour in columns}
        found.append(values)
    assert found[0] == found[1]
    assert len({str(one) for one in found[0].values()}) > 50


def test_an_encoder_where_no_window_cuts(config):
    dataset = load_dataset(replace(config, max_history=200))
    encoder = EncoderConfig(num_layers=2, causal=True, relative_bias="distance")
    check_equal(model_of(dataset, encoder, bias="history_age"), dataset)


def test_an_encoder_that_rows_cannot_share_is_refused(config):
    dataset = load_dataset(config)
    model = model_of(dataset, EncoderConfig(num_layers=1))
    with pytest.raises(ValueError, match="causal"):
        run(model, dataset, "test", "user", 64)
    features = model.sequence_arch.features
    encoder = JaggedEncoder([replace(one, bias=PositionBias(32)) for one in features[:1]], WIDTH, causal=True)
    model.sequence_arch._not_shared = _why_not_shared(encoder)
    with pytest.raises(ValueError, match="have no bias, got PositionBias"):
        run(model, dataset, "test", "user", 64)


@pytest.mark.parametrize("pooling", ["attention", "none"])
def test_timelines_that_do_not_fit_the_samples_are_refused(config, pooling):
    dataset = load_dataset(config)
    model = model_of(dataset, pooling=pooling).cpu()
    shared, alone = (dataset.batches("train", 50, batching=way)[0] for way in ("user", "sample"))
    count, rows = shared.timelines.count, len(shared.labels)
    offsets = shared.timelines.row_offsets
    wrong = [
        (shared.sparse_features, {"row_offsets": offsets}, TypeError, "timelines must be Timelines or None, got dict"),
        (
            shared.sparse_features,
            replace(shared.timelines, row_offsets=offsets[:-1]),
            ValueError,
            "row_offsets must end",
        ),
        (
            shared.sparse_features,
            replace(shared.timelines, row_offsets=torch.arange(rows + 2)),
            ValueError,
            f"timelines must be at most {rows}, the samples of sparse_features, got {rows + 1}",
        ),
        (
            alone.sparse_features,  # each sample with a gender of its own
            replace(shared.timelines, row_offsets=torch.tensor([0, len(alone.labels)])),
            ValueError,
            r"sparse_features\['gender'\] must be empty after the first 1 samples",
        ),
    ]
    assert 1 < count < rows
    for ids, timelines, error, message in wrong:
        with pytest.raises(error, match=message):
            model(torch.zeros(ids.stride(), shared.dense_features.size(1)), ids, timelines)


def test_attention_weights_of_timelines(config):
    dataset = load_dataset(config)
    model = model_of(dataset, bias="history_age")
    (shared,) = (batch.to(DEVICE) for batch in dataset.batches("test", 10_000, batching="user"))
    weights = model.attention_weights(shared.dense_features, shared.sparse_features, shared.timelines)["history"]
    for row, sample in zip(weights.to_dense(), shared.samples.tolist(), strict=True):
        alone = dataset.batches("test", 1, batching="sample")[sample].to(DEVICE)
        expected = model.attention_weights(alone.dense_features, alone.sparse_features)["history"].values()
        seen = row[row.sum(dim=(1, 2)) > 0]
        torch.testing.assert_close(seen, expected, rtol=ROUNDING, atol=ROUNDING)


def test_a_timeline_is_looked_up_once(config):
    dataset = load_dataset(replace(config, max_history=200))
    (shared,), (alone,) = (dataset.batches("train", 10_000, batching=way) for way in ("user", "sample"))
    assert len(shared.labels) == len(alone.labels)
    events = [one.sparse_features["history_item_id"].values().numel() for one in (shared, alone)]
    assert events[0] < sum([1, 2, 3, 17, 40, 75, 5, 120])
    assert 10 * events[0] < events[1]
    genders = [one.sparse_features["gender"].values().numel() for one in (shared, alone)]
    assert genders == [shared.timelines.count, len(alone.labels)]


@pytest.mark.parametrize("max_timeline", [10, 11, 25, 1000])
def test_chunks_hold_what_their_rows_see(config, max_timeline):
    dataset = load_dataset(config)
    arrays = dataset.arrays()
    events, rows = arrays.events, arrays.samples["train"]
    chunks = cut_chunks(events, rows, 10, max_timeline).with_at_most(7)
    start, length = chunks.timelines(np.arange(len(chunks)))
    assert length.max() <= max_timeline
    assert sorted(chunks.order.tolist()) == list(range(len(rows)))
    for number, (first, last) in enumerate(zip(chunks.first[:-1], chunks.first[1:], strict=True)):
        own = rows[chunks.order[first:last]].astype(np.int64)
        assert 0 < len(own) <= 7
        assert len(set(events.user[own])) == 1
        begin, count = events.histories(own, 10)
        assert begin.min() == start[number]
        assert (begin + count).max() == start[number] + length[number]


def test_chunks_are_the_same_however_many_rows_are_cut_at_once(config, monkeypatch):
    arrays = load_dataset(config).arrays()
    whole = cut_chunks(arrays.events, arrays.samples["train"], 10, 25)
    monkeypatch.setattr("jfi.data.batches.order.blocks", lambda count: blocks(count, 7))
    parts = cut_chunks(arrays.events, arrays.samples["train"], 10, 25)
    assert np.array_equal(parts.first, whole.first)
    assert np.array_equal(parts.order, whole.order)


def test_a_batch_has_a_positive_and_its_negatives_where_they_are_more_than_its_size(tmp_path):
    rows = [f"{user},{(user + time) % 9},{time}" for user in range(6) for time in range(8)]
    (tmp_path / "clicks.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]))
    dataset = load_dataset(DataConfig(interactions=str(tmp_path / "clicks.csv"), negatives=4))
    batches = list(dataset.batches("train", 2, batching="user"))
    assert {len(one.labels) for one in batches} == {5}
    assert sum(len(one.labels) for one in batches) == dataset.num_samples("train")


def test_an_order_is_made_once_for_all_parts_of_its_batches(config):
    dataset = load_dataset(config)
    options = {"shuffle": True, "epoch": 2, "batching": "user"}
    order = dataset.batches("train", 16, **options).order
    assert dataset.batches("train", 16, rank=1, world_size=2, **options).order is order
    assert dataset.batches("train", 17, **options).order is not order
