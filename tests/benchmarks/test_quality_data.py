"""Public tables: conversion, download, checks, and configs that read them."""

import csv
import dataclasses
import hashlib
import io
import json

import numpy as np
import pytest
import yaml

from benchmarks.quality import convert, fetch, impressions, practitioner
from benchmarks.quality.models import LABELED
from benchmarks.quality.sources import SOURCES, Source
from benchmarks.quality.tables import DATA, ROOT, TABLES
from jfi.data import DataError, load_dataset
from jfi.data.config_checks import check_data_config
from jfi.training.config_parser import parse_config
from jfi.utils.exit_codes import run_command


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def answers(*students: tuple[list[int], list[int]]) -> str:
    lines = [(len(skills), ",".join(map(str, skills)), ",".join(map(str, right))) for skills, right in students]
    return "".join(f"{line}\n" for student in lines for line in student)


def test_knowledge_tracing_gives_a_row_an_answer():
    text = answers(([7, 9, 7], [1, 0, 1]), ([3], [0]))
    rows = rows_of(convert.knowledge_tracing(text, "train2"))
    assert [(row["user"], row["position"], row["skill"], row["correct"]) for row in rows] == [
        ("train2-0", "0", "7", "1"),
        ("train2-0", "1", "9", "0"),
        ("train2-0", "2", "7", "1"),
        ("train2-1", "0", "3", "0"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2\n7,9\n1\n", "test: student 0 has 2 skills and 1 answers, must be 2 of each"),
        ("2\n7,9\n", "test: 2 lines, must be three a student"),
    ],
)
def test_malformed_answers_are_named(text, message):
    with pytest.raises(DataError, match=message):
        convert.knowledge_tracing(text, "test")


def next_rows(*rows: tuple[str, list[int], int]) -> str:
    return convert.table(("user_id", "history_item_id", "item_id"), rows)


def test_next_items_become_events_and_negatives():
    validation = next_rows(("a", [5, 6], 7), ("b", [7], 8))
    test = next_rows(("a", [5, 6, 7], 9), ("b", [7, 8], 5), ("c", [1], 6))
    rows = rows_of(convert.next_items(validation, test, negatives=1))
    events = [(row["user"], row["item"], row["time"], row["label"]) for row in rows if row["event"] == "1"]
    assert events == [
        ("a", "5", "0", ""),
        ("a", "6", "1", ""),
        ("a", "7", "3", "1"),
        ("b", "7", "0", ""),
        ("b", "8", "4", "1"),
        ("a", "9", "5", "1"),
        ("b", "5", "6", "1"),
        ("c", "1", "0", ""),
        ("c", "6", "7", "1"),
    ]
    negatives = [row for row in rows if row["event"] == "0"]
    assert [(row["user"], row["time"], row["label"]) for row in negatives] == [
        (user, time, "0") for user, _, time, label in events if label
    ]
    seen = {("a", "5"), ("a", "6"), ("b", "7"), ("c", "1")}
    for positive, negative in zip([e for e in events if e[3]], negatives, strict=True):
        seen.add(positive[:2])
        assert (negative["user"], negative["item"]) not in seen
        assert negative["item"] in {"5", "6", "7", "8", "9"}, "an item that is never a next item"
    assert convert.next_items(validation, test, negatives=1) == convert.next_items(validation, test, negatives=1)


def test_a_history_that_does_not_continue_is_named():
    with pytest.raises(DataError, match="row 2 of user a"):
        convert.next_items(next_rows(("a", [5], 7)), next_rows(("a", [5, 6], 9)), negatives=1)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A mirror with two students a file in place of ASSISTments, and the folder for the tables."""
    files = {}
    for number, path in enumerate(SOURCES["assistments2009"].files):
        text = answers(([1, 2, 1], [1, 0, number % 2]), ([2, 2], [0, 1]))
        files[path] = hashlib.sha256(text.encode()).hexdigest()
        copy = tmp_path / "mirror/owner/name" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    monkeypatch.setitem(SOURCES, "assistments2009", Source("owner/name", "0" * 40, files, "none"))
    return tmp_path


def test_the_fetched_folds_load_as_given_splits(tiny):
    arguments = ["--out", str(tiny / "tables"), "--mirror", str(tiny / "mirror"), "assistments2009"]
    fetch.main(arguments)
    fetch.main(arguments)  # there already: nothing is read or written
    for fold in range(5):
        config = parse_config(TABLES["assistments2009"].arguments(fold, tiny / "tables"))[0]
        assert config.data.interactions.endswith(f"train{fold + 1}.csv")
        assert config.data.validation.endswith(f"valid{fold + 1}.csv")
        dataset = load_dataset(config.data)
        assert [dataset.num_samples(split) for split in ("train", "validation", "test")] == [5, 5, 5]
        batch = dataset.batches("test", 8, batching="sample")[0]
        by_user = [batch.users.tolist().count(user) for user in batch.users.unique().tolist()]
        assert sorted(by_user) == [2, 3]
        assert sorted(batch.sparse_features["history_skill"].lengths().tolist()) == [0, 0, 1, 1, 2]


def test_other_contents_are_refused_and_nothing_is_written(tiny):
    path = next(iter((tiny / "mirror").rglob("*valid3.csv")))
    path.write_text(path.read_text().replace("1", "0", 1))
    with pytest.raises(fetch.FetchError, match=r"valid3\.csv: has the SHA-256"):
        fetch.fetch("assistments2009", tiny / "tables", tiny / "mirror")
    path.unlink()
    with pytest.raises(fetch.FetchError, match=r"valid3\.csv: no such file; --mirror needs"):
        fetch.fetch("assistments2009", tiny / "tables", tiny / "mirror")
    assert not list((tiny / "tables").glob("*"))


def test_without_network_one_line_names_the_address(tmp_path, monkeypatch, capsys):
    source = SOURCES["ml-latest-small"]
    monkeypatch.setattr(Source, "url", lambda self, path: f"http://127.0.0.1:9/{self.commit}/{path}")
    code = run_command(lambda: fetch.main(["--out", str(tmp_path), "ml-latest-small"]))
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1
    assert f"{source.commit}/ml-latest-small/ratings.csv: cannot be downloaded" in said and "--mirror" in said
    assert not list(tmp_path.glob("*"))


def test_sources_are_pinned():
    for source in SOURCES.values():
        assert len(source.commit) == 40 and all(len(digest) == 64 for digest in source.files.values())
        assert source.url("a/b.csv") == f"https://raw.githubusercontent.com/{source.repository}/{source.commit}/a/b.csv"
    assert set(fetch.CONVERSIONS) == set(SOURCES)


def test_movielens_is_copied_from_the_users_folder(tmp_path):
    given = tmp_path / "given"
    given.mkdir()
    (given / "ml-100k.inter").write_text("ratings")
    with pytest.raises(fetch.FetchError, match=r"has no ml-100k\.item$"):
        fetch.copy_movielens(given, tmp_path / "tables")
    (given / "ml-100k.item").write_text("items")
    assert fetch.copy_movielens(given, tmp_path / "tables")
    assert (tmp_path / "tables/ml-100k/ml-100k.item").read_text() == "items"
    assert not fetch.copy_movielens(given, tmp_path / "tables")


def test_office_items_have_content_and_codes():
    items = json.dumps({"0": {"title": 'Pen, 12"', "description": "Blue.", "brand": "HP"}})
    rows = rows_of(convert.office_items(items, json.dumps({"0": ["<a_1>", "<b_2>", "<c_3>"]})))
    content = {"title": 'Pen, 12"', "description": "Blue.", "brand": "HP"}
    assert rows == [{"item": "0", **content, "code_0": "<a_1>", "code_1": "<b_2>", "code_2": "<c_3>"}]


@pytest.fixture(scope="module", params=[False, True], ids=["impressions", "shop"])
def log(request):
    """Items, log and logits of a few users of a generated table."""
    return impressions.simulate(60, 3, request.param)


def test_no_impression_shows_what_became_of_it(log):
    _, rows, logits = log
    shown = rows["action"] == "impression"
    assert (np.isfinite(logits) == shown).all() and (np.isfinite(rows["clicked"]) == shown).all()
    for column in ("hour", "timestamp", "session", "item_id"):
        assert np.isfinite(rows[column]).all()
    assert np.isnan(rows["dwell"][rows["action"] != "view"]).all()
    used = yaml.safe_load((ROOT / "configs/quality/impressions.yaml").read_text())["data"]
    known = {one["name"] for one in used["features"] if one["of"] != "event"}
    assert known == {"category", "brand", "price", "hour", "position"}


def test_each_click_is_followed_by_its_view_before_the_next_page(log):
    _, rows, _ = log
    time, action, clicked = rows["timestamp"], rows["action"], rows["clicked"]
    for user in range(60):
        own = rows["user_id"] == user
        pages = np.unique(time[own & (action == "impression")])
        views = own & (action == "view")
        page = np.searchsorted(pages, time[views]) - 1
        seen = set(zip(pages[page].tolist(), rows["item_id"][views].tolist(), strict=True))
        clicks = own & (clicked == 1)
        assert seen == set(zip(time[clicks].tolist(), rows["item_id"][clicks].tolist(), strict=True))
        assert not np.isin(time[own & (action != "impression")], pages).any()
    at_once = np.stack([rows["user_id"], time, rows["item_id"]])[:, action == "impression"]
    assert np.unique(at_once, axis=1).shape == at_once.shape, "an item twice on a page"


def test_generated_labels_follow_their_logits(log):
    _, rows, logits = log
    shown = np.isfinite(logits)
    chance = 1 / (1 + np.exp(-logits[shown]))
    spread = np.sqrt((chance * (1 - chance)).sum())
    assert abs(rows["clicked"][shown].sum() - chance.sum()) < 4 * spread
    assert 0.7 < impressions.ceiling(rows, logits) < 0.9


def test_generated_files_depend_on_the_seed_alone_and_load(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(fetch.GENERATED, "impressions", lambda: impressions.files(30))
    fetch.main(["--out", str(tmp_path), "impressions"])
    assert "the true logit has a test AUC of 0." in capsys.readouterr().out
    for name, content in impressions.files(30).items():
        assert (tmp_path / "impressions" / name).read_bytes() == content
    assert impressions.files(30, seed=1)["interactions.parquet"] != impressions.files(30)["interactions.parquet"]
    dataset = load_dataset(parse_config(TABLES["impressions"].arguments(0, tmp_path))[0].data)
    _, rows, _ = impressions.simulate(30, impressions.SEED)
    shown = np.count_nonzero(rows["action"] == "impression")
    assert dataset.num_samples("test") == pytest.approx(impressions.TEST * shown, abs=1)
    assert sum(dataset.num_samples(split) for split in ("train", "validation", "test")) == shown
    batch = dataset.batches("test", 512, batching="sample")[0]
    assert batch.sparse_features["history_action"].lengths().max() > 0


@pytest.mark.slow  # the whole table: some ten seconds
@pytest.mark.parametrize(
    ("users", "by_hand", "ceiling"),
    [
        (impressions.USERS, False, impressions.CEILING),
        (impressions.SHOP_USERS, True, impressions.SHOP_CEILING),
    ],
)
def test_the_ceiling_of_a_generated_table_is_that_of_the_page(users, by_hand, ceiling):
    _, rows, logits = impressions.simulate(users, impressions.SEED, by_hand)
    assert np.isfinite(logits).sum() >= 150_000
    assert impressions.ceiling(rows, logits) == pytest.approx(ceiling, abs=5e-5)


def test_features_by_hand_are_of_older_rows(log):
    items, rows, _ = log
    rows = {name: one[: len(one) // 8] for name, one in rows.items()}
    rows["user_id"] = rows["user_id"].astype(int)
    shown, time = rows["action"] == "impression", rows["timestamp"]
    found = practitioner.features(rows, items)
    assert {len(one) for one in found.values()} == {np.count_nonzero(shown)}
    for n, row in enumerate(np.flatnonzero(shown)):
        older = (time < time[row]) & (rows["user_id"] == rows["user_id"][row])
        session = older & (rows["session"] == rows["session"][row])
        assert found["user impressions"][n] == (older & shown).sum()
        assert found["session carts"][n] == (session & (rows["action"] == "cart")).sum()
        own = older & (rows["item_id"] == rows["item_id"][row])
        assert found["bought before"][n] == (own & (rows["action"] == "purchase")).sum()


@pytest.mark.parametrize("name", TABLES)
def test_configs_parse(name):
    table = TABLES[name]
    for fold in range(len(table.folds)):
        config = parse_config(table.arguments(fold, DATA))[0]
        check_data_config(config.data)
        named = {setting: getattr(config.data, setting) for setting in table.folds[fold]}
        assert all(path.startswith(str(DATA)) for path in named.values())
        assert (config.data.label is not None) == (name in LABELED)
    if name != "movielens_100k":  # the config of the examples, whose files are elsewhere
        alone = parse_config(["--config", table.arguments(0, DATA)[1]])[0]
        assert dataclasses.asdict(alone) == dataclasses.asdict(parse_config(table.arguments(0, DATA))[0])
