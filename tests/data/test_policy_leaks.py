"""What a sample reads of its history under a policy depends neither on its future nor on any conversion."""

import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from data_configs import data_config
from hypothesis import given, settings
from hypothesis import strategies as st

from jfi.data import DataConfig, InteractionDataset, load_dataset
from jfi.data.prepared.event_logs import training_log
from jfi.history_policies import fit

SURFACES = ["feed", "search", "story"]
NAMES = ["user", "timestamp", "item", "tab", "seconds", "visit", "buys"]
#: What only an event's time tells: surface, dwell, session and conversion.
HAPPENED = (
    st.sampled_from([*SURFACES, None]),
    st.sampled_from([None, -1.0, 0.0, 0.4, 2.0, 3.0, 7.0, 20.0, 90.0, 1e6]),
    st.sampled_from([None, "a", "b", "c"]),
    st.integers(0, 1),
)
#: Time in units of 20 minutes, so that there are ties, and gaps around 30 minutes.
ROW = st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 5), *HAPPENED)
LOG = st.lists(ROW, min_size=1, max_size=30)
#: A user of whom every split has both labels and every surface.
OTHERS = [(9, 100 + i, i % 6, SURFACES[i % 3], 5.0, "a", i % 2) for i in range(6)]
SPLITS = ["train", "train", "validation", "validation", "test", "test"]
CONFIG = data_config(
    interactions="a table in memory",
    user="user",
    item="item",
    label="buys",
    event_categorical=["tab"],
    event_dense=["seconds"],
    dwell="seconds",
    surface="tab",
    split="column",
    split_column="part",
    max_history=6,
)
#: Options of `fit` by what they try.
POLICIES = {
    "removal": {"remove": 0.6, "newest": 1},
    "caps": {"remove": 0.4, "newest": 0, "caps": {"passive": 2, "active": 3}},
    "weights": {"remove": 0.3, "newest": 2, "boost": ["passive", "active"], "pseudo_count": 1.0},
}


def write(log: list[tuple], config: DataConfig, folder: Path) -> DataConfig:
    """The config with the file of a log."""
    kinds = [pa.int64(), pa.float64(), pa.int64(), pa.string(), pa.float64(), pa.string(), pa.int64()]
    columns = {
        name: pa.array(list(values), kind)
        for name, values, kind in zip(NAMES, zip(*log, *OTHERS, strict=True), kinds, strict=True)
    }
    columns["timestamp"] = pa.compute.multiply(columns["timestamp"], 1200.0)
    columns["part"] = pa.array(["train"] * len(log) + SPLITS)
    pyarrow.parquet.write_table(pa.table(columns), folder / "log.parquet")
    return replace(config, interactions=str(folder / "log.parquet"))


def views(dataset: InteractionDataset, log: list[tuple], batching: str) -> dict[tuple, list]:
    """By user, time and item of the training samples all that a model reads of the history: ids, ages and weights."""
    (batch,) = dataset.batches("train", 10_000, batching=batching)
    sparse, timelines = batch.sparse_features, batch.timelines
    count = len(batch.labels) if timelines is None else timelines.count
    fields = []
    for key in [spec.key for spec in dataset.features if spec.key in sparse.keys()]:  # noqa: SIM118
        if key.startswith("history_"):
            column = sparse[key]
            lengths = column.lengths()[:count].tolist()
            for values in (column.values(), column.weights_or_none()):
                if values is not None:
                    fields.append([part.tolist() for part in values.split(lengths)])
    histories = [list(zip(*parts, strict=True)) for parts in zip(*fields, strict=True)]
    if timelines is not None:
        shared, times = histories, timelines.event_times.split(sparse["history_item"].lengths()[:count].tolist())
        histories = []
        for u, (begin, end) in enumerate(zip(timelines.row_offsets, timelines.row_offsets[1:], strict=False)):
            for now in timelines.target_times[begin:end]:
                seen = [event for event, time in zip(shared[u], times[u], strict=True) if time < now]
                histories.append(seen[-timelines.max_events :])
    of = dataset.arrays().samples["train"][batch.samples.numpy()]
    users, items = (sorted({row[i] for row in (*log, *OTHERS)}) for i in (0, 2))
    rows = dataset.arrays().events
    keys = [(users[rows.user[row]], rows.time[row] / 1200, items[rows.item[row]]) for row in of]
    assert len(keys) == len(histories)
    return dict(zip(keys, histories, strict=True))


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """The schema, and by name the files of policies."""
    draw = random.Random(0)
    log = []
    for user in range(60):  # as short as the logs below, so that one event more often changes a user's segment
        for _ in range(draw.randrange(1, 12)):
            surface, dwell = draw.choice(SURFACES), draw.lognormvariate(2.0, 1.5) * (1 if user % 2 else 0.2)
            buys = int(draw.random() < (0.7 if dwell > 8 and surface != "story" else 0.1))
            log.append((user, draw.randrange(13), draw.randrange(6), surface, dwell, "a", buys))
    folder = tmp_path_factory.mktemp("policies")
    config = write(log, CONFIG, folder)
    for name, options in POLICIES.items():
        fit(*training_log(config), num_bins=4, **options).save(folder / name)
    return load_dataset(config).schema, folder


@pytest.mark.parametrize("session", [None, "visit"])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=30)
@given(log=LOG, now=st.integers(0, 12), later=LOG, data=st.data())
def test_what_happens_later_and_what_converts_change_nothing(learnt, policy, session, log, now, later, data):
    schema, folder = learnt
    config = replace(CONFIG, policy=str(folder / policy), session=session)
    buys = iter(data.draw(st.lists(st.integers(0, 1), min_size=60, max_size=60)))
    other = [(*row[:-1], next(buys)) for row in log if row[1] < now]
    # At the moment itself the samples are the same, but nobody knows yet what happens in them.
    happens = st.tuples(*HAPPENED)
    other += [(*row[:3], *data.draw(happens)) for row in log if row[1] == now]
    other += [(user, min(time + now, 90), *row) for user, time, *row in later]
    found = []
    for one in (log, other):
        dataset = load_dataset(write(one, config, folder), schema)
        found += [views(dataset, one, batching) for batching in ("sample", "user")]
    for before, after in zip(found[:2], found[2:], strict=True):
        known = [(row[0], float(row[1]), row[2]) for row in log if row[1] <= now]
        assert [before[key] for key in known] == [after[key] for key in known]
