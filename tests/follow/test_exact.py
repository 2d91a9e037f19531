"""Batches of parts that are followed: those of the whole log in one go, bit for bit."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from jfi.data import Batch, DataConfig, DataSchema, InteractionDataset, LabelConfig, load_dataset
from jfi.data.prepared.event_logs import training_log
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.events.groups import GROUPS
from jfi.follow.parts import PartFolder
from jfi.follow.rows import SAMPLES, PartRows, Reading
from jfi.follow.state import open_state
from jfi.history_policies import Policy, fit

from .followed_log import FEATURES, GROWING, KINDS, START, VISIT, config_of, make_rows, write, write_parts

#: The parts begin within a visit.
BEGIN, BATCH = START + 6 * VISIT + VISIT // 2, 16
LABELS = [LabelConfig("label", "rating >= 4"), LabelConfig("three", "rating >= 3", "auxiliary")]
LABELS += [LabelConfig("five", "rating >= 5", "auxiliary", 0.5)]
CASES = {
    "plain": {},
    "statistics": {"statistics": list(GROUPS), "max_history": 6},
    "auto": {"statistics": "auto"},
    "history": {"statistics": list(GROUPS), "history": "position >= 3"},
    "labels": {"weight": "weight", "label": None, "labels": LABELS},
    "session": {"statistics": ["session", "user"], "session": "visit"},
    "capacity": {"features": [*GROWING, *FEATURES[2:]], "statistics": ["item", "user", "similar"]},
    "policy": {"dwell": "price", "surface": "brand", "session": "visit"},
    "items": {"items": "items.parquet", "statistics": ["item", "user_category"]},
    "milliseconds": {"timestamp_unit": "ms", "null_ids": "drop"},
}


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return make_rows(800)


def batches_of_parts(
    config: DataConfig, schema: DataSchema, policy: Policy | None, folder: Path
) -> Iterator[tuple[list[Batch], int]]:
    """Yields the batches of each part, and its number of samples."""
    settings, parts = config.resolved(), PartFolder(folder / "parts")
    reading = Reading(settings, schema, policy, 0.0)
    named = dataclasses.replace(config, policy=None if policy is None else "policy.json")
    with closing(open_state(folder / "state", named, schema)) as state:
        name, number = "", 0
        while (name := parts.next(name)) is not None:
            part = parts.part(name)
            (work := folder / f"work-{number}").mkdir()
            found = PartRows(part, state, reading, work)
            yield list(found.dataset.batches(SAMPLES, BATCH)), found.counts.labeled
            state.end_part(part.name, found.newest)
            if number % 3 == 0:
                state.commit()
            number += 1


def batches_in_one_go(
    config: DataConfig, schema: DataSchema, policy: Policy | None, folder: Path, sizes: list[int], log: pa.Table
) -> list[list[Batch]]:
    """Those of the rows of all parts, by way of `jfi predict`, in the order of time."""
    (work := folder / "whole").mkdir()
    sources = Sources(log, config.interactions, items=config.items)
    found = ScoringRows(sources, work, schema, config.resolved(), trains=True, policy=policy)
    arrays = found.dataset.arrays()
    samples = arrays.samples["rows"]
    samples = samples[~np.isnan(arrays.events.label[samples])]
    samples = samples[np.argsort(arrays.events.time[samples], kind="stable")]
    whole = []
    for own in np.split(samples, np.cumsum(sizes)[:-1]):
        dataset = dataclasses.replace(arrays, samples={"rows": own})
        whole.append(list(InteractionDataset(dataset, schema, policy=policy).batches("rows", BATCH)))
    return whole


def assert_same(found: Batch, wanted: Batch) -> None:
    assert found.sparse_features.keys() == wanted.sparse_features.keys()
    for name in ("dense_features", "labels", "weights"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one.nan_to_num(-7.0), other.nan_to_num(-7.0)), name
    ids = found.sparse_features.to_dict(), wanted.sparse_features.to_dict()
    for key in ids[0]:
        assert torch.equal(ids[0][key].lengths(), ids[1][key].lengths()), key
        assert torch.equal(ids[0][key].values(), ids[1][key].values()), key


@pytest.mark.parametrize("case", CASES)
def test_parts_have_the_batches_of_the_whole_log(case, rows, tmp_path):
    known = sum(row["timestamp"] < BEGIN for row in rows)
    scale = 1000 if "timestamp_unit" in CASES[case] else 1
    rows = [row | {"timestamp": row["timestamp"] * scale} for row in rows]
    write(tmp_path / "log.parquet", rows[:known])
    write_parts(tmp_path / "parts", rows[known:], 10)
    config = dataclasses.replace(config_of(tmp_path / "log.parquet", tmp_path).data, **CASES[case]).resolved()
    if config.items is not None:  # of which some rows have none
        items = {row["item_id"]: {name: row[name] for name in ("item_id", "tags", "brand")} for row in rows[::2]}
        config = dataclasses.replace(config, items=str(tmp_path / config.items))
        pq.write_table(pa.Table.from_pylist(list(items.values())), config.items)
    schema = load_dataset(config).schema
    policy = fit(*training_log(config), remove=0.3, newest=2) if case == "policy" else None
    found, sizes = zip(*batches_of_parts(config, schema, policy, tmp_path), strict=True)
    log = pa.Table.from_pylist(rows[known:], KINDS)
    wanted = batches_in_one_go(config, schema, policy, tmp_path, list(sizes), log)
    assert sum(sizes) == len(rows) - known
    events = 0
    for part, whole in zip(found, wanted, strict=True):
        for one, other in zip(part, whole, strict=True):
            assert_same(one, other)
            events += len(one.sparse_features["history_item_id"].values())
    assert events > 1000
