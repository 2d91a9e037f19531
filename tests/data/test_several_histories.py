"""Several named histories of one log, against configs of each history alone, and their settings that are refused."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from data_configs import data_config, regression
from hypothesis import given, settings
from hypothesis import strategies as st

from jfi.data import DataError, HistoryConfig, InteractionDataset, load_dataset
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.store import fingerprint_of

KINDS = ["click", "buy", "search"]
HISTORIES = {
    "clicks": "kind == click",
    "orders": HistoryConfig("kind == buy", max_history=2),
    "recent": HistoryConfig(max_history=3, features=["item_id", "kind"]),
}
ROW = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 9), st.sampled_from(KINDS))


def config_of(folder: Path, rows: list[tuple], **changes):
    path, items = folder / "r.csv", folder / "items.csv"
    lines = [f"u{user},{item},{time},{kind},{number}" for number, (user, item, time, kind) in enumerate(rows)]
    path.write_text("\n".join(["user_id,item_id,timestamp,kind,number", *lines]))
    items.write_text("\n".join(["item_id,genres", "0,", "1,a", "2,b|a", "3,a|b"]))
    own = {
        "labels": regression("number"),
        "event_categorical": ["kind"],
        "item_categorical": ["genres"],
        "separators": {"genres": "|"},
        "histories": HISTORIES,
        "max_history": 4,
    }
    return data_config(interactions=str(path), items=str(items), **own | changes)


def batches_of(dataset: InteractionDataset) -> dict[str, dict[str, tuple]]:
    """By split what keys have, as lengths and values."""
    return {
        split: {
            key: (values.lengths().tolist(), values.values().tolist())
            for batch in dataset.batches(split, 10_000)
            for key, values in batch.sparse_features.to_dict().items()
        }
        for split in ("train", "validation", "test")
    }


def rows_of(count: int) -> list[tuple]:
    draw = np.random.default_rng(0)
    return [(*draw.integers(0, (3, 4, 50)).tolist(), str(draw.choice(KINDS))) for _ in range(count)]


@settings(max_examples=20)
@given(rows=st.lists(ROW, min_size=20, max_size=40))
def test_each_history_is_that_of_a_config_of_it_alone(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    rows = rows + [(0, item, item, kind) for item in range(4) for kind in KINDS]
    found = batches_of(load_dataset(config_of(folder, rows)))
    expected = {split: {} for split in found}
    for name, rule, most in (("clicks", "kind == click", 4), ("orders", "kind == buy", 2), ("recent", None, 3)):
        alone = batches_of(load_dataset(config_of(folder, rows, histories={}, history=rule, max_history=most)))
        for split, keys in alone.items():
            renamed = {re.sub("^history_", f"{name}_", key): one for key, one in keys.items()}
            expected[split] |= {key: one for key, one in renamed.items() if not key.startswith("recent_genres")}
    assert found == expected


def test_statistics_count_the_events_of_any_history(tmp_path):
    rows = rows_of(200)
    groups, either = ["item", "session", "similar"], {"clicks": "kind == click", "orders": "kind == buy"}
    several, one, other = (
        load_dataset(config_of(tmp_path, rows, labels=[], label="number >= 100", **changes))
        for changes in (
            {"histories": either, "statistics": groups},
            {"histories": {}, "statistics": groups, "history": "kind in [click, buy]"},
            {"histories": {}, "statistics": groups, "history": "kind == click"},
        )
    )
    found = [[batch.dense_features for batch in dataset.batches("train", 300)] for dataset in (several, one, other)]
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], found[2][0])


def test_a_prepared_dataset_has_the_same_histories(tmp_path):
    rows = rows_of(200)
    config = config_of(tmp_path, rows)
    prepare_dataset(config, tmp_path / "prepared")
    prepared = load_dataset(data_config(prepared=str(tmp_path / "prepared"), histories=HISTORIES, max_history=4))
    whole = load_dataset(config)
    assert batches_of(prepared) == batches_of(whole)
    assert fingerprint_of(prepared) == fingerprint_of(whole)
    other = HISTORIES | {"clicks": "kind == search"}
    assert fingerprint_of(load_dataset(config_of(tmp_path, rows, histories=other))) != fingerprint_of(whole)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"histories": {"clicks": "kind == click"}}, r"data\.histories has 1; there can be 2 to 7; data\.history is"),
        ({"histories": {f"h{i}": "kind == buy" for i in range(8)}}, "has 8; there can be 2 to 7"),
        ({"history": "kind == click"}, r"data\.history and data\.histories are both set"),
        ({"batching": "user"}, r"data\.batching is user, and data\.histories has several"),
        ({"policy": "p.json", "dwell": "number"}, r"data\.policy is set, and data\.histories has several"),
        (
            {"histories": {"a b": "kind == buy", "c": "kind == click"}},
            r"data\.histories\.a b: the name must be of letters",
        ),
        ({"histories": {"user": "kind == buy", "c": "kind == click"}}, r"data\.histories\.user: the name must be"),
        (
            {"histories": {"a": HistoryConfig(features=["kin"]), "c": "kind == buy"}},
            r"a\.features has 'kin'.*did you mean 'kind'",
        ),
        ({"histories": {"a": HistoryConfig(features=[]), "c": "kind == click"}}, r"a\.features is \[\]; an event must"),
        ({"histories": {"a": "kind = buy", "c": "kind == click"}}, "rule 'kind = buy': expected an operator"),
        ({"histories": {"a": "kind == bye", "c": "kind == click"}}, r"histories\.a 'kind == bye'"),
        ({"histories": {"a": "kin == buy", "c": "kind == click"}}, r"'kin'"),
    ],
)
def test_wrong_histories_are_named(tmp_path, changes, message):
    rows = [(number % 3, number % 4, number, KINDS[number % 3]) for number in range(40)]
    with pytest.raises(DataError, match=message):
        load_dataset(config_of(tmp_path, rows, **changes))
