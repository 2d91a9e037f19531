"""Dwell, surface and session of events, and the policy that chooses among the events of a history by them."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from data_configs import data_config, replace_data
from history_policies.logs import segments_of

from jfi.data import Batch, DataConfig, DataError, InteractionDataset, load_dataset
from jfi.data.batches.order import timeline_ranges
from jfi.data.prepared.event_logs import training_log
from jfi.data.prepared.prepare import prepare_dataset
from jfi.history_policies import EventLog, Policy, fit
from jfi.history_policies.select import CellTables
from jfi.utils.jagged import ranges

SURFACES = ["feed", "search", "story"]
FIELDS = {"dwell": "seconds", "surface": "tab"}


def table(users: int = 12, length: int = 40, seed: int = 0) -> pa.Table:
    """Events of which long ones on `feed` and `search` convert; a few dwells and surfaces are missing."""
    rng = np.random.default_rng(seed)
    count = users * length
    surface = rng.choice(SURFACES, count)
    dwell = rng.lognormal(2.0, 1.5, count)
    user = np.repeat(np.arange(users), length)
    busy = user % 2 == 0
    dwell[~busy] *= 0.2
    buys = (rng.random(count) < np.where((dwell > 10) & (surface != "story"), 0.8, 0.1)).astype(int)
    missing = rng.random(count) < 0.03
    return pa.table(
        {
            "user_id": user,
            "item_id": rng.integers(0, 30, count),
            # Equal times too, in sessions an hour apart.
            "timestamp": np.tile(np.arange(length) // 8 * 3600 + np.arange(length) % 8 // 2 * 60, users),
            "seconds": pa.array(dwell, mask=missing),
            "tab": pa.array(surface, mask=rng.random(count) < 0.03),
            "visit": np.arange(count) // 8,
            "buys": buys,
        }
    )


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    pyarrow.parquet.write_table(table(), tmp_path / "log.parquet")
    given = {"label": "buys", "event_categorical": ["tab"], "event_dense": ["seconds"], "max_history": 16}
    return data_config(interactions=str(tmp_path / "log.parquet"), **FIELDS, **given)


def fitted(config: DataConfig, path: Path, **options) -> DataConfig:
    """The config with a policy that is fitted to its training rows."""
    fit(*training_log(config), num_bins=4, **options).save(path)
    return replace(config, policy=str(path))


def whole(dataset: InteractionDataset, batching: str | None = None) -> Batch:
    return dataset.batches("train", 10_000, batching=batching)[0]


def histories(batch: Batch, key: str) -> list[list[int]]:
    column = batch.sparse_features[key]
    return [part.tolist() for part in column.values().split(column.lengths().tolist())]


def expected_rows(dataset: InteractionDataset, policy: Policy) -> list[list[int]]:
    """The events that stay of each training sample's history, one sample at a time."""
    arrays = dataset.arrays()
    events, fields, found = arrays.events, arrays.engagement, []
    for row in arrays.samples["train"]:
        seen = [
            e for e in range(len(events)) if events.user[e] == events.user[row] and events.time[e] < events.time[row]
        ][-dataset.schema.max_history :]
        names = [None if fields.surface[e] < 0 else fields.surfaces[fields.surface[e]] for e in seen]
        places = policy.surface_ids(names)
        dwell, session = fields.dwell[seen], None if fields.session is None else fields.session[seen]
        segment = 0
        if seen:
            log = EventLog(events.user[seen], events.time[seen], places, dwell, policy.surfaces, session)
            segment = segments_of(policy, log)[1][0]
        stay = policy.select(policy.cells(places, dwell), np.array([segment]), np.array([len(seen)]))
        found.append([seen[i] for i in stay.rows.tolist()])
    return found


@pytest.mark.parametrize("session", [None, "visit"])
def test_the_policy_of_what_precedes_a_sample_chooses_its_events(config, tmp_path, session):
    config = fitted(replace(config, session=session), tmp_path / "p.json", remove=0.5, newest=2, caps={"active": 5})
    dataset = load_dataset(config)
    wanted = expected_rows(dataset, dataset.policy)
    batch, columns = whole(dataset), dataset.arrays().columns
    for spec, column in zip(dataset.features, columns, strict=False):
        if spec.role == "history":
            rows = dataset.arrays().events.item if spec.of == "item" else np.arange(len(dataset.arrays().events))
            assert histories(batch, spec.key) == [[int(column.ids[rows[e]]) for e in one] for one in wanted]
    kept, of_all = sum(map(len, wanted)), whole(load_dataset(replace(config, policy=None)))
    assert 0.3 < kept / of_all.sparse_features["history_item_id"].values().numel() < 0.8


def test_all_fields_are_those_of_the_same_events_with_their_ages_and_weights(config, tmp_path):
    config = fitted(config, tmp_path / "p.json", remove=0.3, boost=["active", "passive"], newest=1)
    dataset = load_dataset(config)
    wanted, batch = expected_rows(dataset, dataset.policy), whole(dataset)
    events, fields = dataset.arrays().events, dataset.arrays().engagement
    sparse, now = batch.sparse_features, events.time[dataset.arrays().samples["train"]]
    ages = [[int(np.log2(t - events.time[e])) + 1 for e in one] for one, t in zip(wanted, now, strict=True)]
    assert histories(batch, "history_age") == ages
    of = dict(zip(sparse.keys(), sparse.weights().split(sparse.length_per_key()), strict=True))
    assert of["item_id"].eq(1).all()
    assert torch.equal(of["history_item_id"], of["history_age"])
    places = np.append([SURFACES.index(name) for name in fields.surfaces], -1)
    cells = dataset.policy.cells(places[fields.surface], fields.dwell)
    table = dataset.policy.tables.weight
    rows = [e for one in wanted for e in one]
    assert all(weight in table[:, cells[e]] for weight, e in zip(of["history_item_id"], rows, strict=True))
    assert of["history_item_id"].unique().numel() > 3


@pytest.mark.parametrize("batching", ["sample", "user"])
def test_the_share_of_removed_events_is_that_of_the_batches(config, tmp_path, batching):
    plain = replace(config, batching=batching)
    chosen = fitted(plain, tmp_path / "p.json", remove=0.5, newest=0)
    kept, of_all = (whole(load_dataset(one)).sparse_features["history_item_id"] for one in (chosen, plain))
    share = load_dataset(chosen).removed_share(10_000)
    assert share == pytest.approx(1 - kept.values().numel() / of_all.values().numel()) and 0 < share < 0.6


@pytest.mark.parametrize("batching", ["sample", "user"])
def test_a_policy_that_keeps_all_changes_no_bit(config, tmp_path, batching):
    plain = load_dataset(config)
    kept = load_dataset(fitted(config, tmp_path / "p.json"))
    assert kept.policy.keeps_all
    one, other = (whole(dataset, batching).sparse_features for dataset in (plain, kept))
    assert torch.equal(one.values(), other.values())
    assert torch.equal(one.lengths(), other.lengths())
    assert other.weights_or_none() is None


@pytest.mark.parametrize("batching", ["sample", "user"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_nothing_after_a_sample_changes_its_history(tmp_path, monkeypatch, batching, seed):
    data, cut = table(seed=seed), 2 * 3600
    given = {"interactions": str(tmp_path / "log.parquet"), "label": "buys", "max_history": 16, "batching": batching}
    monkeypatch.setattr("jfi.data.batches.dataset.TIMELINE", 1)
    config = data_config(**FIELDS, **given)
    pyarrow.parquet.write_table(data, tmp_path / "log.parquet")
    config = fitted(config, tmp_path / "p.json", remove=0.5, newest=1, caps=8)

    def before_the_cut() -> dict[int, list[list[int]]]:
        """By row of the events the histories of the samples up to the cut, themselves included."""
        dataset = load_dataset(config)
        found = {}
        events = dataset.arrays().events
        for split in ("train", "validation", "test"):
            for row in dataset.arrays().samples[split]:
                if events.time[row] <= cut:
                    # A batch by user of one sample: its timeline ends there.
                    batch = dataset.batch_of(np.array([row]), events.item[[row]].astype(np.int64))
                    found[int(row)] = histories(batch, "history_item_id")[0]
        return found

    wanted = before_the_cut()
    # What happens at the time of a sample or later, its own dwell included, is another.
    later = pa.compute.greater_equal(data["timestamp"], cut)
    rng = np.random.default_rng(1)
    columns = {"seconds": rng.lognormal(4, 1, len(data)), "tab": rng.choice(SURFACES, len(data))}
    for name, values in columns.items():
        place = data.column_names.index(name)
        data = data.set_column(place, name, pa.compute.if_else(later, pa.array(values), data[name]))
    pyarrow.parquet.write_table(data, tmp_path / "log.parquet")
    assert before_the_cut() == wanted
    assert any(wanted.values())


def test_a_timeline_keeps_what_any_of_its_samples_keeps_newest_and_the_first_decides_the_segment(config, tmp_path):
    config = fitted(config, tmp_path / "p.json", remove=0.5, newest=2)
    dataset = load_dataset(replace(config, batching="user"))
    batch = whole(dataset)
    events, policy, fields = dataset.arrays().events, dataset.policy, dataset.arrays().engagement
    places = np.append([SURFACES.index(name) for name in fields.surfaces], -1)
    cells, chooser_rows = policy.cells(places[fields.surface], fields.dwell), dataset.arrays().samples["train"]
    first = {}
    for row, seen in zip(chooser_rows, expected_rows(dataset, policy), strict=True):
        first.setdefault(int(events.user[row]), []).append((int(row), seen))
    times, offsets = batch.timelines.event_times, batch.timelines.row_offsets.tolist()
    lengths = batch.sparse_features["history_item_id"].lengths()[: len(offsets) - 1].tolist()
    shared = [set(part.tolist()) for part in times.split(lengths)]
    for u, stays in enumerate(shared):
        rows = slice(offsets[u], offsets[u + 1])
        user = int(batch.users[rows][0])
        mine = [e for e in range(len(events)) if events.user[e] == user]
        for time in batch.timelines.target_times[rows].tolist():
            older = [events.time[e] for e in mine if events.time[e] < time]
            assert {*older[-2:]} <= stays
    assert sum(lengths) < len(events) and cells.max() > 0


def stays_of_timeline(
    tables: CellTables, cells: np.ndarray, times: np.ndarray, seen_at: np.ndarray, segment: int
) -> list[int]:
    """The events of a timeline that stay; each counts back from the end of what the first row sees that sees it."""
    stay, ends = [], []
    for place, cell in enumerate(cells):
        later = seen_at[seen_at > times[place]]
        ends.append(int(times.searchsorted(later[0])) if len(later) else len(times))
        if tables.keep[segment, cell] or ends[place] - place <= tables.newest:
            stay.append(place)
    if tables.cap is not None:
        stay = [one for one in stay if sum(one <= other < ends[one] for other in stay) <= tables.cap[segment]]
    return stay


@pytest.mark.parametrize("history", [None, "buys == 0 or seconds > 5"])
@pytest.mark.parametrize(
    "options",
    [
        {"remove": 0.5, "newest": 2},
        {"remove": 0.5, "newest": 0, "caps": 3},
        {"remove": 0.3, "newest": 3, "caps": {"active": 4}, "boost": ["active"]},
        {"num_segments": 1, "boost": ["all"], "newest": 1},
    ],
)
def test_timelines_are_those_of_a_look_at_all_of_their_events(config, tmp_path, monkeypatch, history, options):
    monkeypatch.setattr("jfi.data.batches.dataset.TIMELINE", 1)
    given = replace(config, history=history, batching="user")
    dataset = load_dataset(fitted(given, tmp_path / "p.json", **options))
    events, fields, policy = dataset.arrays().events, dataset.arrays().engagement, dataset.policy
    places = np.append([SURFACES.index(name) for name in fields.surfaces], -1)
    cells = policy.cells(places[fields.surface], fields.dwell)
    log = EventLog(events.user, events.time, places[fields.surface], fields.dwell, policy.surfaces)
    order = dataset.batches("train", 64, shuffle=True).order
    kept = total = 0
    for number in range(order.num_batches):
        part = order.part(number, 0, 1)
        rows, offsets = dataset.draw("train", part.samples)[0], part.offsets
        start, lengths = timeline_ranges(events, rows[offsets[:-1]], rows[offsets[1:] - 1], 16)
        history_rows = ranges(start, lengths) if events.rows is None else events.rows[ranges(start, lengths)]
        segments = []
        for row in rows[offsets[:-1]]:
            first, length = (int(one[0]) for one in events.histories(np.array([row]), 16))
            seen = np.arange(first, first + length) if events.rows is None else events.rows[first : first + length]
            parts = (one[seen] for one in (log.user, log.time, log.surface, log.dwell))
            segments.append(segments_of(policy, EventLog(*parts, log.surfaces))[1][0] if length else 0)
        seen_at = [events.time[rows[begin:end]] for begin, end in pairwise(offsets)]
        wanted = [
            stays_of_timeline(policy.tables, cells[own], events.time[own], at, segment)
            for own, at, segment in zip(np.split(history_rows, np.cumsum(lengths)[:-1]), seen_at, segments, strict=True)
        ]
        found = dataset.chooser.timelines(rows, offsets)
        begins = np.cumsum(lengths) - lengths
        stay = np.concatenate([begin + np.array(own, int) for begin, own in zip(begins, wanted, strict=True)])
        assert np.array_equal(found.events, history_rows[stay])
        assert found.lengths.tolist() == list(map(len, wanted))
        weight = policy.tables.weight
        assert (found.weights is None) == (weight is None)
        of_events = np.repeat(segments, lengths), cells[history_rows]
        assert found.weights is None or np.array_equal(found.weights, weight[of_events][stay])
        kept, total = kept + len(found.events), total + len(history_rows)
    assert order.num_batches > 2
    assert kept < total or options["newest"] == 1


def test_a_prepared_dataset_has_the_same_batches_with_a_policy_of_the_runs_own(config, tmp_path):
    config = replace(config, session="visit")
    prepare_dataset(config, tmp_path / "prepared", show=False)
    config = fitted(config, tmp_path / "p.json", remove=0.4)
    prepared = load_dataset(DataConfig(prepared=str(tmp_path / "prepared"), policy=config.policy, max_history=16))
    one, other = (whole(dataset).sparse_features for dataset in (load_dataset(config), prepared))
    assert torch.equal(one.values(), other.values())
    assert torch.equal(one.lengths(), other.lengths())
    with pytest.raises(DataError, match=r"^data\.policy is a run's own"):
        prepare_dataset(config, tmp_path / "again", show=False)


def test_the_log_of_a_policy_has_the_training_rows_alone(config):
    log, conversion = training_log(config, "seconds > 30 or tab == search")
    dataset = load_dataset(config)
    events = dataset.arrays().events
    assert len(log) == (events.split == 0).sum() < len(events)
    assert log.time.max() <= events.time[dataset.arrays().samples["validation"]].min()
    search = log.surface == log.surfaces.index("search")
    assert conversion[search].all()
    assert np.array_equal(conversion[~search], log.dwell[~search] > 30)


def test_milliseconds_and_a_log_without_surfaces(config, tmp_path):
    data = table()
    data = data.set_column(3, "seconds", pa.compute.multiply(data["seconds"], 1000.0))
    pyarrow.parquet.write_table(data, tmp_path / "ms.parquet")
    other = replace(config, interactions=str(tmp_path / "ms.parquet"), dwell_unit="ms", surface=None)
    log, wanted = training_log(other)[0], training_log(config)[0]
    np.testing.assert_allclose(log.dwell, wanted.dwell, rtol=1e-6)
    assert log.surfaces == ["all"]
    assert load_dataset(fitted(other, tmp_path / "p.json", remove=0.3)).policy.surfaces == ("all",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dwell": "second"}, r"no column 'second'"),
        ({"dwell": "tab", "surface": None}, r"'tab' is '\w+', not a number"),
        ({"surface": "tabs"}, r"no column 'tabs'"),
        ({"dwell": "user_id"}, r"^data\.user and data\.dwell are both 'user_id'"),
        ({"session": "tab"}, r"^data\.surface and data\.session are both 'tab'"),
        (
            {"event_dense": [], "context_dense": ["seconds"]},
            r"^data\.features lists 'seconds' of context, which is data\.dwell; it is known only after the event",
        ),
        ({"dwell": None, "surface": None, "policy": "p.json"}, r"^data\.policy is set, but neither"),
        ({"policy": "nowhere.json"}, r"^data\.policy: .*nowhere\.json"),
    ],
)
def test_wrong_settings_are_named(config, changes, message):
    with pytest.raises(DataError, match=message):
        load_dataset(replace_data(config, **changes))


def test_a_policy_of_other_surfaces_is_refused_by_name(config, tmp_path):
    log, conversion = training_log(config)
    fit(replace(log, surface=np.minimum(log.surface, 1), surfaces=["feed", "search"]), conversion).save(
        tmp_path / "p.json"
    )
    with pytest.raises(DataError, match=r"^data\.policy: .*no surface 'story'"):
        load_dataset(replace(config, policy=str(tmp_path / "p.json")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dwell": None, "surface": None}, "neither data.dwell nor data.surface is set"),
        ({"label": None}, "there is no binary label; a conversion must say"),
        ({"surface": "many"}, "^data.surface is 'many', which has 480 values; it must have 1 to 256"),
        ({"surface": "none"}, "^data.surface is 'none', which has 0 values; it must have 1 to 256"),
    ],
)
def test_a_log_that_no_policy_can_be_fitted_to(config, changes, message):
    data = table()
    more = {"many": [f"page {i}" for i in range(len(data))], "none": pa.nulls(len(data), pa.string())}
    for name, values in more.items():
        data = data.append_column(name, pa.array(values) if isinstance(values, list) else values)
    pyarrow.parquet.write_table(data, config.interactions)
    with pytest.raises(DataError, match=message):
        training_log(replace_data(config, **changes))
    with pytest.raises(DataError, match="no column 'bought'"):
        training_log(config, "bought")
