"""The comparison of semantic IDs on Amazon Office, and the tables of docs/semantic_ids.md, on made-up results."""

import csv

import pytest
from stand_ins import ENVIRONMENT

from benchmarks import sid_tables
from benchmarks.quality import semantic_ids
from benchmarks.quality.results import Results
from benchmarks.quality.semantic_ids import BASE, FORMS, MODELS, part, split_rows

WHERE = {"device": "cpu", "threads": 1, "torch": "2", "commit": "abc"}


def cell(name: str, trial: int, seed: int, validation: float, test: float) -> dict:
    settings = MODELS[name].settings | MODELS[name].trials[trial]
    metrics = {"auc": 0.6, "ne": test, "user_auc": 0.6}
    return WHERE | {
        "model": name,
        "settings": settings,
        "fold": 0,
        "seed": seed,
        "validation": {"auc": 0.5 + 0.01 * trial, "ne": validation},
        "test": metrics,
        "slices": {"warm": metrics, "cold": metrics | {"auc": 0.55}},
        "parameters": 7,
        "train_seconds": 1.0,
    }


def cells(name: str, test: float) -> list[dict]:
    """Four trials, of which the second has the best NE and the last the best AUC, and two more seeds of the second."""
    trials = [cell(name, trial, 0, validation, test) for trial, validation in enumerate((0.99, 0.9, 0.95, 0.98))]
    return [*trials, *(cell(name, 1, seed, 0.9, test) for seed in (1, 2))]


def test_gains_are_those_of_the_trial_with_the_best_ne(tmp_path):
    results = Results(tmp_path / "semantic_ids.json")
    made = {BASE: 1.0, "RQ, decoded": 0.8, "raw embeddings": 0.9}
    for one in [one for name, test in made.items() for one in cells(name, test)]:
        results.add(one)
    results.add(cell("brand", 0, 0, 0.9, 0.9))  # three trials are missing
    found = semantic_ids.figures(results.cells)
    assert list(found) == list(made)
    assert found["RQ, decoded"]["gains"] == pytest.approx([20.0] * 3)
    page = semantic_ids.page(tmp_path)
    assert "| RQ, decoded | 20.0 ± 0.0 |" in page and "0.5500" in page
    assert semantic_ids.draw(tmp_path).stat().st_size > 1000
    with pytest.raises(FileNotFoundError):
        semantic_ids.page(tmp_path / "empty")
    assert semantic_ids.draw(tmp_path / "empty") is None


def test_new_items_are_in_no_row_of_a_training_user(tmp_path):
    (tmp_path / "amazon_office").mkdir()
    rows = [(f"u{user}", str(item), "0", "1", "1") for user in range(60) for item in range(40)]
    with open(tmp_path / "amazon_office/interactions.csv", "w", newline="") as file:
        csv.writer(file).writerows([("user", "item", "time", "event", "label"), *rows])
    split_rows(tmp_path)
    read = {}
    for name in semantic_ids.SPLITS:
        with open(tmp_path / f"semantic_ids/{name}.csv", newline="") as file:
            read[name] = [tuple(row.values()) for row in csv.DictReader(file)]
    users = {name: {row[0] for row in found} for name, found in read.items()}
    assert not users["test"] & users["validation"] and not users["test"] & users["interactions"]
    items = {name: {row[1] for row in found} for name, found in read.items()}
    new = {str(item) for item in range(40) if part(f"item {item}") == 0}
    assert new and items["test"] - items["interactions"] == new
    assert len(read["test"]) == 40 * len(users["test"])


def test_every_form_has_trials_of_its_own_settings():
    assert all(model.chosen_by == "ne" and len(model.trials) == 4 for model in MODELS.values())
    assert MODELS["VQ fusion with brands, digits, no id"].settings["model.item_id"] is False
    assert all(size % 8 == 0 for _, size in FORMS.values())


def test_tables_of_the_suites():
    row = {"suite": "digits", "case": "c", "status": "ok", "headline": True, "D": 25}
    row |= {"kernel_forward_us": 10.0, "kernel_backward_us": 20.0, "memory_training_mb": 7.0}
    rows = [row | {"implementation": name} for name in ("jfi, digits", "jfi, rows")]
    assert "| c | 2 | 10.0 \\| 20.0 | 10.0 \\| 20.0 | 7 | 7 |" in sid_tables.digits(
        {"environment": ENVIRONMENT, "rows": rows}
    )
    step = {"case": "c", "implementation": "a", "status": "ok", "graph_us": None, "eager_us": 1500.0}
    step |= {"memory_mb": 3.0, "batch_bytes": 2e6}
    failed = {"case": "c", "implementation": "b", "status": "failed"}
    table = sid_tables.steps({"environment": ENVIRONMENT, "rows": [step, failed]})
    assert "| c | a | - | 1.50 | 3 | 2.0 |" in table and "| c | b | failed |" in table
