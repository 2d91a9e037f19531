"""Histories against a slow loop over rows: nothing of the same moment or later, newest kept, whatever the split."""

import math
import tempfile
from pathlib import Path

import torch
from data_configs import data_config
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jfi.data import InteractionDataset, load_dataset

GENRES = {0: [], 1: ["a"], 2: ["b", "a"], 3: ["c", "b", "a"]}

ROW = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 6), st.sampled_from(["", "1", "2", "3"]))


def load(rows: list[tuple[int, int, int, str]], **config) -> InteractionDataset:
    with tempfile.TemporaryDirectory() as folder:
        interactions, items = Path(folder, "r.csv"), Path(folder, "i.csv")
        lines = [f"{user},{item},{time},{rating}" for user, item, time, rating in rows]
        interactions.write_text("\n".join(["user_id,item_id,timestamp,rating", *lines]))
        items.write_text("\n".join(["item_id,genres", *(f"{i},{'|'.join(g)}" for i, g in GENRES.items())]))
        settings = {
            "interactions": str(interactions),
            "items": str(items),
            "item_categorical": ["genres"],
            "separators": {"genres": "|"},
            "event_categorical": ["rating"],
        }
        return load_dataset(data_config(**settings | config))


def ids_of(values: list) -> dict:
    """The vocabulary that training rows give: 1, 2, ... in sorted order."""
    return {value: i for i, value in enumerate(sorted(set(values)), 1)}


def ties(before: list[tuple]) -> list[slice]:
    """The ranges of equal time and item of a history."""
    starts = [i for i, row in enumerate(before) if i == 0 or before[i - 1][1:3] != row[1:3]]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(before)], strict=False)]


@settings(max_examples=60)
@given(
    rows=st.lists(ROW, min_size=10, max_size=40),
    max_history=st.sampled_from([1, 2, 100]),
    split=st.sampled_from(["time", "leave_one_out"]),
)
def test_histories_are_what_the_user_did_strictly_before(rows, max_history, split):
    # User 0 has at least three rows, so that no split is empty.
    rows = rows + [(0, 0, time, "1") for time in (7, 8, 9)]
    by_time = sorted(rows, key=lambda row: (row[2], row[0], row[1]))
    if split == "time":
        cuts = [round(0.8 * len(rows)), round(0.9 * len(rows))]
        parts = {"train": by_time[: cuts[0]], "validation": by_time[cuts[0] : cuts[1]], "test": by_time[cuts[1] :]}
    else:
        parts = {"train": [], "validation": [], "test": []}
        for user in sorted({row[0] for row in rows}):
            mine = [row for row in by_time if row[0] == user]
            held_out = 2 if len(mine) >= 3 else 0
            parts["train"] += mine[: len(mine) - held_out]
            parts["validation"] += mine[len(mine) - held_out :][:1]
            parts["test"] += mine[len(mine) - held_out :][1:]
    parts = {name: sorted(part, key=lambda row: (row[2], row[0], row[1])) for name, part in parts.items()}
    item_ids = ids_of([row[1] for row in parts["train"]])
    # Without labels, a held-out positive that training never saw is no sample.
    parts = {name: [row for row in part if row[1] in item_ids] for name, part in parts.items()}
    genre_ids = ids_of([genre for item in item_ids for genre in GENRES[item]])
    assume(all(parts.values()))
    dataset = load(rows, max_history=max_history, split=split, max_slots=2, negatives=1)
    rating_ids = ids_of([row[3] for row in parts["train"] if row[3]])
    slots = min(2, max(1, max(len(GENRES[item]) for item in item_ids)))  # of training, as the vocabularies

    for name, part in parts.items():
        assert dataset.num_samples(name) == 2 * len(part)
        for i, batch in enumerate(dataset.batches(name, 2)):
            user, item, time, _ = part[i]
            before = [row for row in by_time if row[0] == user and row[2] < time][-max_history:]
            target, drawn = batch.sparse_features["item_id"].values().tolist()
            assert target == item_ids[item]
            assert batch.labels.tolist() == [1.0, 0.0]
            known = {item_ids.get(row[1]) for row in rows if row[0] == user and row[2] <= time}
            assert drawn not in known or set(item_ids.values()) <= known

            genres = batch.sparse_features["genres"].to_dense()[0].tolist()
            assert sorted(genres) == sorted(genre_ids.get(genre, 0) for genre in GENRES[item])
            expected = {
                "history_item_id": [item_ids.get(row[1], 0) for row in before],
                "history_rating": [rating_ids.get(row[3], 0) for row in before],
                "history_age": [math.floor(math.log2(time - row[2])) + 1 for row in before],
            }
            for slot in range(slots):
                padded = [[*GENRES[row[1]], None, None, None][slot] for row in before]
                expected[f"history_genres_{slot}"] = [genre_ids.get(genre, 0) for genre in padded]
            events = list(zip(*expected.values(), strict=True))
            fields = [batch.sparse_features[key].to_dense() for key in expected]
            for sample in range(2):
                given = list(zip(*(field[sample].tolist() for field in fields), strict=True))
                assert len(given) == len(events)
                # Oldest first; ties of a moment among equal (user, item) keep no order of their own.
                for tie in ties(before):
                    assert sorted(given[tie]) == sorted(events[tie])


def test_events_of_the_same_moment_do_not_see_each_other():
    rows = [(0, 1, 1, "1"), (0, 0, 5, "2"), (0, 1, 5, "3"), (0, 0, 6, "1")]
    dataset = load(rows, fractions=[0.5, 0.25, 0.25], negatives=1)
    samples = [batch for split in ("train", "validation", "test") for batch in dataset.batches(split, 2)]
    lengths = [batch.sparse_features["history_item_id"].lengths()[0].item() for batch in samples]
    assert lengths == [0, 1, 1, 3]


def test_rows_without_label_are_history_only():
    rows = [(0, t % 3, t, "" if t % 2 else "12"[t % 4 // 2]) for t in range(16)]
    dataset = load(rows, label="rating >= 2", fractions=[0.5, 0.25, 0.25])
    assert [dataset.num_samples(split) for split in ("train", "validation", "test")] == [4, 2, 2]
    lengths = [
        length
        for split in ("train", "validation", "test")
        for batch in dataset.batches(split, 10)
        for length in batch.sparse_features["history_item_id"].lengths().tolist()
    ]
    assert lengths == [0, 2, 4, 6, 8, 10, 12, 14]


def test_histories_share_the_array_of_events():
    """Memory grows with the events: 2,000 events of one user make two million history entries, and no array of them."""
    rows = [(0, t % 4, t, "12"[t % 2]) for t in range(2000)]
    dataset = load(rows, label="rating >= 2", max_history=2000)
    arrays = [value for value in vars(dataset.arrays().events).values() if hasattr(value, "size")]
    arrays += [column.ids for column in dataset.arrays().columns]
    assert max(array.size for array in arrays) <= 2000
    batch = dataset.batches("test", 200)[0]
    assert batch.sparse_features["history_item_id"].lengths().tolist() == list(range(1800, 2000))
    assert torch.equal(batch.sparse_features["history_age"].lengths(), torch.arange(1800, 2000))
