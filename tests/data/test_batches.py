from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic_data import synthetic_data

from jfi.data import Batch, DataConfig, InteractionDataset, load_dataset
from jfi.data.batches.order import assign_samples
from jfi.data.schema.columns import Categorical
from jfi.utils.jagged import ranges, repeat


@pytest.fixture(scope="module")
def labeled() -> InteractionDataset:
    return load_dataset(synthetic_data(num_users=30, num_items=40, mean_length=12.0))


# (user, item) of the moments 0, 1, ...
CLICKS = np.random.default_rng(0).integers(0, (6, 20), (200, 2)).tolist()


@pytest.fixture(scope="module")
def implicit(tmp_path_factory) -> InteractionDataset:
    path = tmp_path_factory.mktemp("data") / "clicks.csv"
    rows = [f"{user},{item},{time}" for time, (user, item) in enumerate(CLICKS)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows]))
    return load_dataset(DataConfig(interactions=str(path), negatives=3))


@pytest.fixture(params=["labeled", "implicit"])
def dataset(request) -> InteractionDataset:
    return request.getfixturevalue(request.param)


def rows_of(batch: Batch) -> list[tuple]:
    """Each sample as a tuple that tells it from the others."""
    keys = [batch.sparse_features[key] for key in batch.sparse_features.keys()]  # noqa: SIM118
    count = len(batch.labels)  # an empty part has the features of another one's sample
    fields = [[tuple(ids.tolist()) for ids in key.to_dense()[:count]] for key in keys]
    return list(zip(batch.users.tolist(), batch.labels.tolist(), *fields, strict=True))


def ids_of(batch: Batch) -> set[tuple[str, int]]:
    return {(key, id) for key, ids in batch.sparse_features.to_dict().items() for id in ids.values().tolist()}


def same(left: Batch, right: Batch) -> bool:
    return (
        torch.equal(left.dense_features, right.dense_features)
        and torch.equal(left.sparse_features.values(), right.sparse_features.values())
        and torch.equal(left.sparse_features.lengths(), right.sparse_features.lengths())
        and torch.equal(left.labels, right.labels)
        and torch.equal(left.users, right.users)
    )


def test_batches_are_a_pure_function_of_their_arguments(dataset):
    def epoch(**arguments):
        return list(dataset.batches("train", 16, shuffle=True, **arguments))

    first = epoch(seed=3, epoch=1)
    list(dataset.batches("test", 5))
    again = epoch(seed=3, epoch=1)
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert not same(first[0], epoch(seed=3, epoch=2)[0])
    assert not same(first[0], epoch(seed=4, epoch=1)[0])


@pytest.mark.parametrize("start", [0, 1, 3, 1000])
def test_an_epoch_continues_where_it_stopped(dataset, start):
    whole = list(dataset.batches("train", 16, shuffle=True, seed=1))
    batches = dataset.batches("train", 16, shuffle=True, seed=1)
    rest = [batches[number] for number in range(start, len(batches))]
    assert len(rest) == max(0, len(whole) - start)
    assert all(same(a, b) for a, b in zip(whole[start:], rest, strict=True))


def test_num_batches(dataset):
    for batch_size in (1, 7, 16, 10_000):
        batches = dataset.batches("validation", batch_size)
        assert len(list(batches)) == len(batches)
        for number in (-1, len(batches)):
            with pytest.raises(IndexError, match=f"batch {number}; there are {len(batches)}"):
                batches[number]


@pytest.mark.parametrize("world_size", [2, 3, 50])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_each_global_batch(dataset, world_size, shuffle):
    size = 4 * world_size + 1
    ranks = [
        list(dataset.batches("train", size, shuffle=shuffle, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert {len(batches) for batches in ranks} == {len(dataset.batches("train", size))}
    alone = list(dataset.batches("train", size, shuffle=shuffle))
    for step, batch in enumerate(alone):
        parts = [ranks[rank][step] for rank in range(world_size)]
        assert Counter(row for part in parts for row in rows_of(part)) == Counter(rows_of(batch))
        sizes = [len(part.labels) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert set().union(*map(ids_of, parts)) == ids_of(batch), "an empty part has other ids"
        assert step == len(alone) - 1 or sum(sizes) == size


@pytest.fixture(scope="module")
def skewed(tmp_path_factory) -> DataConfig:
    """A few users with hundreds of events, many with a few; a batch of 200 samples has some of each."""
    draw = np.random.default_rng(0)
    counts = np.minimum(draw.pareto(1, 60) * 12 + 2, 400).astype(int)
    users = np.repeat(np.arange(60), counts)
    path = tmp_path_factory.mktemp("skewed") / "clicks.csv"
    rows = [f"{user},{draw.integers(30)},{time}" for time, user in enumerate(users)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows]))
    return DataConfig(interactions=str(path), negatives=1, max_history=400)


@pytest.mark.parametrize("settings", [{}, {"batching": "user", "max_history": 10}], ids=["by sample", "by user"])
def test_ranks_have_about_as_much_work(skewed, settings):
    dataset, size = load_dataset(replace(skewed, **settings)), 1000 if settings else 200
    order = dataset.batches("train", size, shuffle=True, seed=3).order
    cut = np.array(
        [
            [len(part) and order._work(part).reshape(len(part), -1)[:, 0].sum() for part in parts]
            for parts in (np.array_split(order._units(batch), 4) for batch in range(order.num_batches))
        ]
    )  # in order
    assert cut.max(axis=1).sum() / cut.mean(axis=1).sum() > 1.1
    balanced = order.imbalance(4)
    assert balanced < 1.05
    parts = [dataset.batches("train", size, shuffle=True, seed=3, rank=rank, world_size=4) for rank in range(4)]
    rows, found = dataset.arrays().samples["train"], []
    for batch in zip(*parts, strict=True):
        work = [dataset._num_events(rows, part.samples.numpy()).sum() for part in batch]
        samples = [len(part.labels) for part in batch]
        assert sum(samples) == batch[0].total
        assert max(samples) - min(samples) <= (0.1 * sum(samples) if settings else 1)
        found.append([max(work), np.mean(work)])
    busiest, mean = np.sum(found, axis=0)
    assert busiest / mean == pytest.approx(balanced)


def test_a_rank_reads_the_columns_of_its_own_samples(labeled, monkeypatch):
    read, fill = [], Categorical.fill

    def counted(column: Categorical, rows: np.ndarray, out: np.ndarray) -> None:
        read.append(len(rows))
        fill(column, rows, out)

    monkeypatch.setattr(Categorical, "fill", counted)

    def rows_read(rank: int, world_size: int) -> int:
        read.clear()
        labeled.batches("train", 90, shuffle=True, rank=rank, world_size=world_size)[0]
        return sum(read)

    alone, parts = rows_read(0, 1), [rows_read(rank, 3) for rank in range(3)]
    assert sum(parts) == alone
    assert max(parts) < 1.1 * alone / 3


def test_a_few_large_samples_are_balanced():
    work = np.array([900, *[100] * 3, *[10] * 60])  # four ranks: no part has less than 900, or more than 16 samples
    rank = assign_samples(work, 4)
    assert np.bincount(rank).tolist() == [16] * 4
    load = np.bincount(rank, weights=work)
    assert load.max() == 900 + 15 * 10
    assert np.array_equal(rank, assign_samples(work, 4))
    assert assign_samples(np.zeros(0, int), 3).tolist() == []
    assert np.bincount(assign_samples(np.zeros(7, int), 3)).tolist() in ([3, 2, 2], [2, 3, 2], [2, 2, 3])


def test_shuffling_keeps_every_sample(labeled):
    in_order = Counter(row for batch in labeled.batches("train", 64) for row in rows_of(batch))
    shuffled = Counter(row for batch in labeled.batches("train", 64, shuffle=True) for row in rows_of(batch))
    assert in_order == shuffled
    assert in_order.total() == labeled.num_samples("train")


def test_layout(labeled):
    batch = labeled.batches("test", 10)[0]
    sparse = batch.sparse_features
    assert sparse.keys() == [spec.key for spec in labeled.features]
    assert (sparse.stride(), sparse.values().dtype, sparse.lengths().dtype) == (10, torch.int64, torch.int64)
    assert sparse.length_per_key() == [sparse[key].values().numel() for key in sparse.keys()]  # noqa: SIM118
    for spec in labeled.features:
        ids = sparse[spec.key].values()
        assert ids.min() >= 0
        assert ids.max() < spec.num_embeddings
        if spec.role == "item":
            assert sparse[spec.key].lengths().tolist() == [1] * 10
        else:
            assert torch.equal(sparse[spec.key].lengths(), sparse["history_item"].lengths())
    assert (batch.labels.dtype, batch.users.dtype, batch.dense_features.dtype) == (
        torch.float32,
        torch.int64,
        torch.float32,
    )
    assert torch.equal(batch.dense_features, torch.zeros(10, 1))


def test_target_and_history_share_a_table(labeled):
    tables = {spec.key: (spec.table, spec.num_embeddings) for spec in labeled.features}
    assert tables["item"] == tables["history_item"]
    assert tables["category"] == tables["history_category"]
    assert len({tables["item"][0], tables["category"][0], tables["history_rating"][0]}) == 3
    assert tables["history_age"][0] == ""


def test_a_pinned_batch_holds_the_same(labeled, monkeypatch):
    pinned = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)  # which needs a GPU
    batch = labeled.batches("test", 10)[0]
    assert same(batch.pin_memory(), batch)
    assert {id(batch.dense_features), id(batch.labels), id(batch.users)} <= set(map(id, pinned))


def test_batch_moves_to_a_device(labeled):
    batch = labeled.batches("test", 10)[0].to(torch.device("meta"), non_blocking=True)
    tensors = (batch.dense_features, batch.sparse_features.values(), batch.labels, batch.users)
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_negatives_are_uniform_over_the_items_unknown_at_that_moment(implicit):
    train = CLICKS[:160]
    assert {item for _, item in train} == set(range(20))
    num_epochs, drawn, expected = 20, np.zeros(20), np.zeros(20)
    for epoch in range(num_epochs):
        batch = implicit.batches("train", 4 * len(train), epoch=epoch)[0]
        assert batch.labels.tolist() == [1.0, 0.0, 0.0, 0.0] * len(train)
        ids = batch.sparse_features["item_id"].values().view(-1, 4) - 1
        assert ids[:, 0].tolist() == [item for _, item in train]
        drawn += np.bincount(ids[:, 1:].flatten(), minlength=20)
    for time, (user, _) in enumerate(train):
        known = {item for other, item in CLICKS[: time + 1] if other == user}
        unknown = [item for item in range(20) if item not in known]
        expected[unknown] += 3 * num_epochs / len(unknown)
    # Five standard deviations of a count.
    assert np.all(np.abs(drawn - expected) < 5 * np.sqrt(expected))


def test_held_out_positives_are_items_of_training(write, caplog):
    rows = [f"{i},{i % 2},{i}" for i in range(8)] + ["8,1,8", "8,7,9", "9,0,10", "9,8,11"]
    config = DataConfig(interactions=write("r.csv", "user_id,item_id,timestamp", *rows), negatives=2)
    dataset = load_dataset(replace(config, fractions=[8 / 12, 2 / 12, 2 / 12]))
    for split in ("validation", "test"):
        assert dataset.num_samples(split) == 3
        batch = dataset.batches(split, 10)[0]
        # Id 0, the unseen item, would tell a positive from the negatives, which are items of the training split.
        assert batch.sparse_features["item_id"].values().min() > 0
        dropped = f"dropped 1 of 2 positives of the {split} split, whose items are not in the training split"
        assert any(dropped in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "tset"}, "split is 'tset'; did you mean 'test'?"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"rank": 2, "world_size": 2}, r"rank is 2; it must be in \[0, world_size = 2\)"),
    ],
)
def test_wrong_arguments(labeled, arguments, message):
    with pytest.raises(ValueError, match=message):
        labeled.batches(**{"split": "train", "batch_size": 4} | arguments)


@given(st.lists(st.tuples(st.integers(-5, 100), st.integers(0, 4)), max_size=12), st.sampled_from([np.int32, np.int64]))
def test_ranges_and_repeated_values_are_those_of_numpy(parts, kind):
    starts, lengths = np.array(parts, kind).reshape(-1, 2).T
    whole = [np.arange(start, start + length) for start, length in parts]
    np.testing.assert_array_equal(ranges(starts, lengths), np.concatenate([*whole, np.empty(0, np.int64)]))
    np.testing.assert_array_equal(repeat(starts, lengths), np.repeat(starts, lengths))
