"""A prepared dataset: what load_dataset makes of the same tables, bit for bit, whatever the length of a block."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from data_configs import data_config, regression, replace_data

from jfi.data import DataConfig, DataError, InteractionDataset, load_dataset
from jfi.data.io import blocks as table_blocks
from jfi.data.prepared import prepare
from jfi.data.prepared.manifest import prepared_config
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.schema import columns as coded
from jfi.data.schema.schema import DataSchema
from jfi.events import events
from jfi.utils.encoding import Vocabulary


def prepare_in_small_blocks(config: DataConfig, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepares in blocks of 7 rows, so that a small table has many."""
    monkeypatch.setattr(coded.blocks, "__defaults__", (7,))
    monkeypatch.setattr(events.user_blocks, "__defaults__", (7,))
    monkeypatch.setattr(events.order_by_item, "__defaults__", (None, 7))
    monkeypatch.setattr(table_blocks, "BLOCK", 7)
    monkeypatch.setattr("jfi.data.io.text.PART", 100)
    monkeypatch.setattr("jfi.data.schema.columns.BLOCK", 7)
    prepare_dataset(config, out)
    monkeypatch.undo()


def write_table(folder: Path, rng: np.random.Generator, count: int = 300) -> str:
    """A Parquet table with a column of each kind, ties in time, repeated rows and missing values."""
    item = rng.integers(0, 25, count)
    words = np.array(["x", "y", "z", "late", ""])

    def lists() -> list:
        drawn = [None if n == 4 else words[rng.integers(0, 5, n)].tolist() for n in rng.integers(0, 5, count)]
        return drawn

    columns = {
        "user_id": [f"u{i:03d}" for i in rng.integers(0, 12, count)],
        "item_id": [str(i) if i % 2 else f"0{i}" for i in item],
        "timestamp": rng.integers(0, 60, count),
        "clicked": np.where(rng.random(count) < 0.1, None, rng.integers(0, 2, count)).tolist(),
        "action": np.where(rng.random(count) < 0.1, None, rng.choice(["view", "buy", "10", "9"], count)).tolist(),
        "tags": lists(),
        "seconds": np.where(rng.random(count) < 0.1, np.nan, np.round(rng.lognormal(2, 1, count), 1)),
        "city": np.where(rng.random(count) < 0.2, None, rng.choice(["Rome", "Oslo"], count)).tolist(),
        "hobbies": lists(),
        "years": rng.normal(40, 9, count),
        "genre": [f"g{i % 4}|g{i % 3}" for i in item],
        "part": rng.choice(["train", "train", "val", "Test"], count),
        "request": np.where(rng.random(count) < 0.2, None, rng.choice(list("abcdefg"), count)).tolist(),
        "whole": [None] * count,
        "price": np.where(rng.random(count) < 0.2, np.nan, rng.lognormal(2, 1, count)),
        "title": np.where(rng.random(count) < 0.2, None, [f"Title {i}" for i in item]).tolist(),
        "shown": np.where(rng.random(count) < 0.1, np.nan, rng.normal(3, 1, count)),
    }
    path = str(folder / "rows.parquet")
    pa.parquet.write_table(pa.table(columns), path, row_group_size=50)
    return path


def config_of(path: str, **settings) -> DataConfig:
    config = data_config(
        interactions=path,
        label="clicked",
        user_categorical=["user_id", "city", "hobbies"],
        user_dense=["years"],
        item_categorical=["genre"],
        item_dense=["price"],
        event_categorical=["action", "tags"],
        event_dense=["seconds"],
        separators={"genre": "|"},
        title="title",
        fractions=[0.6, 0.2, 0.2],
        max_slots=3,
        max_history=20,
    )
    return replace_data(config, **settings)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_batches(left: InteractionDataset, right: InteractionDataset) -> None:
    assert left.features == right.features
    for split in ("train", "validation", "test"):
        pairs = zip(left.batches(split, 16, shuffle=True), right.batches(split, 16, shuffle=True), strict=True)
        for a, b in pairs:
            assert torch.equal(a.sparse_features.values(), b.sparse_features.values())
            assert torch.equal(a.sparse_features.lengths(), b.sparse_features.lengths())
            assert torch.equal(a.dense_features, b.dense_features)
            assert torch.equal(a.labels, b.labels)
            assert torch.equal(a.users, b.users)
            assert a.users.dtype == b.users.dtype == torch.int64


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"split": "leave_one_out"},
        {"label": None, "negatives": 2},
        {"label": None, "split": "leave_one_out"},
        {
            "label": "seconds >= 7",
            "event_dense": [],
            "max_slots": 1,
            "item_categorical": [],
            "title": None,
            "separators": {},
        },
        {"user_categorical": [], "user_dense": [], "item_dense": [], "max_history": 3},
        {"split": "user", "fractions": [0.5, 0.25, 0.25]},
        {"split": "column", "split_column": "part"},
        {"min_count": {"item_id": 8, "tags": 60, "action": 40, "city": 3}},
        {"hash_buckets": {"item_id": 7, "tags": 3, "genre": 5}, "title": None},
        {"hash_buckets": {"item_id": 7}, "label": None},
        {"capacity": {"item_id": 7, "tags": 3, "genre": 5, "action": 9, "city": 4}, "min_count": {"tags": 2}},
        {"capacity": {"item_id": 7}, "label": None},
        {"history": "action in [buy, '10'] or seconds > 8"},
        {"history": "action == view", "label": None, "split": "leave_one_out"},
        {"request_id": "request"},
        {"request_id": "request", "split": "leave_one_out"},
        {"request_id": "request", "split": "leave_one_out", "label": None, "history": "action == buy"},
        {"request_id": "request", "split": "user"},
        {"request_id": "whole", "split": "column", "split_column": "part"},
        {"event_crosses": [["item_id", "action"], ["genre", "action", "item_id"]], "separators": {}},
        {
            "event_crosses": [["action", "item_id"]],
            "hash_buckets": {"action_x_item_id": 9},
            "history": "action != buy",
            "request_id": "request",
        },
        {"event_crosses": [["action", "item_id"]], "min_count": {"action_x_item_id": 4}},
        {"max_values": {"item_id": 5, "tags": 2, "action": 1, "city": 2, "genre": 2}, "min_count": {"tags": 3}},
        {"context_categorical": ["part", "tags", "whole"], "context_dense": ["shown"]},
        {
            "context_categorical": ["hobbies", "action", "request"],
            "context_dense": ["shown", "seconds"],
            "event_dense": [],
            "user_categorical": [],
            "min_count": {"request": 20},
            "hash_buckets": {"hobbies": 4},
            "history": "action == view",
        },
        {"context_categorical": ["action"], "context_dense": ["shown"], "label": None},
    ],
)
def test_a_prepared_dataset_is_the_loaded_one_bit_for_bit(tmp_path, monkeypatch, settings):
    config = config_of(write_table(tmp_path, np.random.default_rng(len(str(settings)))), **settings)
    check_same(config, tmp_path, monkeypatch)


def test_tables_of_users_and_items_and_text_with_dates(tmp_path, write, monkeypatch):
    rng = np.random.default_rng(1)
    days = [f"2020-0{1 + i % 3}-{1 + i % 28:02d}" for i in rng.integers(0, 90, 80)]
    rows = [
        f"u{rng.integers(9)},{rng.integers(12)},{day},{rng.integers(2)},{rng.choice(['a;b', 'b', ''])}" for day in days
    ]
    config = data_config(
        interactions=write("rows.csv", "user_id,item_id,timestamp,clicked,tags", *rows),
        users=write("users.csv", "user_id,city,years", "u0,Rome,20", "u3,,40", "u5,Oslo,31"),
        items=write("items.csv", "item_id,genres,price,title", *(f"{i},g{i % 3}|h,{i},T{i}" for i in range(10))),
        label="clicked",
        user_categorical=["city"],
        user_dense=["years"],
        item_categorical=["genres"],
        item_dense=["price"],
        event_categorical=["clicked", "tags"],
        separators={"genres": "|", "tags": ";"},
        title="title",
        fractions=[0.6, 0.2, 0.2],
    )
    check_same(config, tmp_path, monkeypatch)


def check_same(config: DataConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads the tables, prepares them, and compares batches and, byte for byte, files of blocks of two sizes."""
    loaded, before = load_dataset(config), {path.name for path in folder.iterdir()}
    prepare_in_small_blocks(config, folder / "prepared", monkeypatch)
    assert {path.name for path in folder.iterdir()} - before == {"prepared"}
    prepared = load_dataset(prepared_config(folder / "prepared"))
    assert_same_batches(loaded, prepared)
    assert prepared.summary == loaded.summary
    prepare_dataset(config, folder / "written", show=False)
    assert files_of(folder / "prepared") == files_of(folder / "written")


def test_columns_of_contexts_may_have_the_names_of_columns_of_the_layout(tmp_path, monkeypatch):
    rng = np.random.default_rng(4)
    names = ("user_id", "item_id", "timestamp", "user", "label", "time", "item", "split", "in_history")
    columns = {name: rng.integers(0, 5, 90) for name in names} | {"clicked": np.arange(90) % 2}
    pa.parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    config = DataConfig(interactions=str(tmp_path / "rows.parquet"), label="clicked", history="item != 2")
    config = replace_data(config, context_categorical=["user", "label", "split"])
    check_same(replace_data(config, context_dense=["time", "item", "in_history"]), tmp_path, monkeypatch)


def test_a_column_of_contexts_without_any_value(tmp_path, monkeypatch):
    empty = pa.array([[] for _ in range(20)], pa.list_(pa.string()))
    columns = {name: pa.array(range(20)) for name in ("user_id", "item_id", "timestamp")}
    columns |= {"clicked": pa.array([i % 2 for i in range(20)]), "tags": empty}
    pa.parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    config = data_config(interactions=str(tmp_path / "rows.parquet"), label="clicked", context_categorical=["tags"])
    check_same(config, tmp_path, monkeypatch)


def test_splits_of_files_of_their_own(tmp_path, monkeypatch):
    names = ("train", "validation", "test")
    paths = {}
    for seed, name in enumerate(names):
        (tmp_path / name).mkdir()
        paths[name] = write_table(tmp_path / name, np.random.default_rng(seed), 60)
    config = config_of(str(tmp_path / "train"), split="files")
    check_same(replace(config, validation=[paths["validation"]], test=paths["test"]), tmp_path, monkeypatch)


def test_a_folder_of_text_in_an_encoding_without_quotes(tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    for part in range(3):
        rows = [f'u{i % 5},{i % 7},{i},{i % 2},"Zoë{i % 3}' for i in range(part, 60, 3)]
        text = "\n".join(["user_id,item_id,timestamp,clicked,name", *rows])
        (tmp_path / f"rows/{part}.csv").write_text(text, encoding="cp1252")
    config = data_config(interactions=str(tmp_path / "rows"), label="clicked", event_categorical=["name"])
    check_same(replace(config, encoding="cp1252", quoting=False), tmp_path, monkeypatch)


def test_a_group_that_a_given_split_cuts_is_refused_with_the_line(tmp_path, table, monkeypatch):
    config = config_of(table, split="column", split_column="part", request_id="request")
    with pytest.raises(DataError) as expected:
        load_dataset(config)
    with pytest.raises(DataError) as found:
        prepare_in_small_blocks(config, tmp_path / "prepared", monkeypatch)
    assert str(found.value) == str(expected.value)
    assert "are in more than one split" in str(found.value)


@pytest.mark.parametrize(
    ("rule", "how"), [("action == bye", "none of the 267 rows"), ("years > -100", "every one of the 300")]
)
def test_a_label_rule_that_is_constant_is_refused_with_the_values_of_its_columns(
    tmp_path, table, monkeypatch, rule, how
):
    config = config_of(table, label=rule, user_dense=[])
    with pytest.raises(DataError) as expected:
        load_dataset(config)
    with pytest.raises(DataError) as found:
        prepare_in_small_blocks(config, tmp_path / "prepared", monkeypatch)
    assert str(found.value) == str(expected.value)
    assert f"label '{rule}': {how}" in str(found.value)


def test_columns_whose_names_differ_only_in_case(tmp_path, monkeypatch):
    rng = np.random.default_rng(3)
    columns = {name: rng.integers(0, 4, 90) for name in ("user_id", "item_id", "timestamp", "A", "a", "ROW", "User")}
    pa.parquet.write_table(pa.table(columns | {"clicked": np.arange(90) % 2}), tmp_path / "rows.parquet")
    config = data_config(interactions=str(tmp_path / "rows.parquet"), label="clicked", event_categorical=["A", "a"])
    check_same(replace_data(config, event_dense=["ROW", "User"]), tmp_path, monkeypatch)


def test_a_cross_of_lists_is_refused(tmp_path, table):
    with pytest.raises(DataError, match=r"data.features: a cross has 'tags', whose rows are lists"):
        prepare_dataset(config_of(table, event_crosses=[["item_id", "tags"]]), tmp_path / "prepared")


@pytest.fixture
def table(tmp_path) -> str:
    return write_table(tmp_path, np.random.default_rng(5))


def test_a_dataset_is_encoded_with_the_schema_of_a_run(tmp_path, table):
    (tmp_path / "new").mkdir()
    schema = load_dataset(config_of(table)).schema
    new = config_of(write_table(tmp_path / "new", np.random.default_rng(6)))
    prepare_dataset(new, tmp_path / "prepared", schema=schema)
    prepared = prepared_config(tmp_path / "prepared")
    assert_same_batches(load_dataset(new, schema), load_dataset(prepared, schema))
    with pytest.raises(DataError, match=r"prepared was prepared with other features than the run was started with"):
        load_dataset(prepared, load_dataset(new).schema)


#: Forks processes that each die at a later call of those that write, in the folder that the one before has left; prints
#: their exit codes.
KILL = """
import os, sys
from jfi.data import DataConfig, FeatureConfig
from jfi.data.prepared import prepare, store
from jfi.data.prepared.stages import sort as prepare_sort

calls = 0
def counted(module, name):
    function = getattr(module, name)
    def call(*arguments, **keywords):
        global calls
        calls -= 1
        if calls < 0:
            os._exit(9)
        return function(*arguments, **keywords)
    setattr(module, name, call)

for module, names in {
    prepare: ("RowReader", "sort_rows", "order_and_split", "write_prepared", "sync", "choose_samples"),
    prepare_sort: ("write_arrow", "sort_batches"),
    store: ("write_arrow", "write_sums"),
}.items():
    for name in names:
        counted(module, name)
for calls in range(int(sys.argv[3]), 1000, int(sys.argv[4])):
    child = os.fork()
    if not child:
        prepare.prepare_dataset(DataConfig(**eval(sys.argv[1])), sys.argv[2])
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, os.path.exists(sys.argv[2]), flush=True)
    if code != 9:
        break
"""


@pytest.mark.parametrize(("first", "step"), [(0, 6), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_killed_anywhere_and_called_again_it_ends_with_the_same_files(tmp_path, table, record_property, first, step):
    config = config_of(table).with_absolute_paths()
    prepare_dataset(config, tmp_path / "whole")
    command = [sys.executable, "-c", KILL, repr(vars(config)), str(tmp_path / "prepared"), str(first), str(step)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    *deaths, last = [line.split() for line in run.stdout.splitlines()]
    assert last == ["0", "True"]
    assert len(deaths) >= 4
    record_property("cases", len(deaths))
    assert all(death == ["9", "False"] for death in deaths)
    assert files_of(tmp_path / "prepared") == files_of(tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_it_starts_over_where_the_config_or_a_file_has_changed(tmp_path, table, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "write_prepared", die)
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(config_of(table), tmp_path / "prepared")
    monkeypatch.undo()
    write_table(tmp_path, np.random.default_rng(77), 301)
    config = config_of(table, max_history=3)
    prepare_dataset(config, tmp_path / "prepared")
    assert_same_batches(load_dataset(config), load_dataset(prepared_config(tmp_path / "prepared")))


def with_other_genres(schema: DataSchema) -> DataSchema:
    known = schema.encodings.vocabularies
    reversed_genres = Vocabulary([*known["genre"].values][::-1])
    return replace(schema, encodings=replace(schema.encodings, vocabularies=known | {"genre": reversed_genres}))


def with_another_mean(schema: DataSchema) -> DataSchema:
    return replace(schema, labels=[replace(schema.labels[0], mean=7.0)])


@pytest.mark.parametrize("change", [with_other_genres, with_another_mean])
def test_it_starts_over_where_the_schema_has_changed(tmp_path, table, monkeypatch, change):
    rename = Path.rename

    def stop_before_the_last(path, target):
        if path.name == "result":
            raise KeyboardInterrupt
        return rename(path, target)

    config = data_config(interactions=table, labels=regression("years"), item_categorical=["genre"])
    schema = load_dataset(config).schema
    monkeypatch.setattr(Path, "rename", stop_before_the_last)
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(config, tmp_path / "prepared", schema=schema)
    monkeypatch.undo()
    prepare_dataset(config, tmp_path / "prepared", schema=change(schema))
    prepare_dataset(config, tmp_path / "whole", schema=change(schema))
    assert files_of(tmp_path / "prepared") == files_of(tmp_path / "whole")


def test_one_process_at_a_time_prepares_a_folder(tmp_path, table, monkeypatch):
    def prepare_again(*_):
        prepare_dataset(config_of(table), tmp_path / "prepared")

    monkeypatch.setattr(prepare, "RowReader", prepare_again)
    with pytest.raises(DataError, match="another process is preparing this dataset"):
        prepare_again()


def test_a_run_may_choose_what_changes_no_file(tmp_path, table):
    config = config_of(table, label=None, negatives=2)
    prepare_dataset(config, tmp_path / "prepared")
    prepared = str(tmp_path / "prepared")
    other = load_dataset(prepared_config(prepared, max_history=2, negatives=3))
    own = load_dataset(replace(config, max_history=2, negatives=3))
    assert_same_batches(own, other)
    assert own.summary == other.summary
    assert own.summary.history_lengths["max"] == 2
    ranked = [
        dataset.candidates("test", "sampled", None, 9)
        for dataset in (load_dataset(config), load_dataset(prepared_config(prepared)))
    ]
    left, right = (candidates.pairs(np.arange(len(candidates))) for candidates in ranked)
    assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))
    with pytest.raises(DataError, match=r"^data.label is 'clicked', but \S+ was prepared with None$"):
        load_dataset(DataConfig(prepared=prepared, label="clicked"))
    with pytest.raises(DataError, match=r"^data.prepared is \S+; to prepare tables, leave it unset$"):
        prepare_dataset(DataConfig(prepared=prepared), tmp_path / "again")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "not a prepared dataset, manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest.json is damaged: object missing"),
        (lambda folder: (folder / "items.arrow").unlink(), "damaged, items.arrow is missing"),
        (lambda folder: (folder / "events.arrow").write_bytes(b"ARROW1"), "damaged, events.arrow has 6 bytes instead"),
        (lambda folder: (folder / "schema.json").write_text("{}"), "damaged, schema.json has 2 bytes instead"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tmp_path, table, damage, message):
    prepare_dataset(config_of(table), tmp_path / "prepared")
    damage(tmp_path / "prepared")
    with pytest.raises(DataError, match=message) as caught:
        load_dataset(DataConfig(prepared=str(tmp_path / "prepared")))
    assert "\n" not in str(caught.value)


def test_faults_of_the_tables_name_file_and_line_and_write_nothing(tmp_path, write):
    rows = [f"{i},1,{i % 2},{i}" for i in range(50)]
    path = write("r.csv", "user_id,item_id,clicked,timestamp", *rows, "1,1,2,noon")
    with pytest.raises(
        DataError, match=r"r\.csv:52: 'timestamp' is 'noon', neither a number nor a date; a date is of ISO 8601, "
    ):
        prepare_dataset(DataConfig(interactions=path, label="clicked"), tmp_path / "prepared")
    path = write("r.csv", "user_id,item_id,clicked,timestamp")
    with pytest.raises(DataError, match=r"r\.csv: no rows$"):
        prepare_dataset(DataConfig(interactions=path, label="clicked"), tmp_path / "prepared")
    assert not (tmp_path / "prepared").exists()


def test_a_time_is_of_the_kind_of_the_first_one(tmp_path, write, monkeypatch):
    rows = [f"{i},1,{i % 2},2020-01-{1 + i % 9:02d}" for i in range(20)]
    path = write("r.csv", "user_id,item_id,clicked,timestamp", *rows, "1,1,1,17")
    with pytest.raises(DataError, match=r"r\.csv:22: 'timestamp' is '17', a number; the first value is a date$"):
        prepare_in_small_blocks(DataConfig(interactions=path, label="clicked"), tmp_path / "out", monkeypatch)
