"""The suite of a step over the table's size, on tiny tables."""

import math

import pytest
import torch
from stand_ins import ENVIRONMENT

from benchmarks import report, table_size
from benchmarks.table_size import Steps, TableCase, draw_ids

CPU = torch.device("cpu")
CASE = TableCase("adam", 0.9, "zipf", sizes=(50, 2000), batch_size=16, width=8)


def test_every_size_is_a_row_beside_the_smallest(tmp_path):
    rows = [{"suite": "table_size"} | row for row in table_size.run(CASE, CPU, 0.0)]
    assert [row["items"] for row in rows] == [50, 2000] and rows[0]["over_smallest"] == 1
    ratio = rows[1]["table_step_us"] / rows[0]["table_step_us"]
    assert rows[1]["over_smallest"] == pytest.approx(ratio)
    assert rows[0]["distinct_rows"] <= 50 < rows[1]["distinct_rows"] and rows[0]["steps"] >= table_size.LEAST_STEPS
    report.write(tmp_path, "table_size", ENVIRONMENT, rows)
    assert len(report.read(tmp_path / "table_size.json")["rows"]) == 2
    assert "2,000 items" in report.line(rows[1]) and "the smallest table's" in report.line(rows[1])


def test_a_step_trains_the_rows_that_were_drawn():
    steps = Steps(CASE, 2000)
    weight = steps.trainer.model.embedding_collection.embeddings["item"].weight
    before = weight.detach().clone()
    steps.step()
    ids = steps.batches[0].sparse_features
    read = torch.cat([ids[key].values() for key in ("item", "history_item")]).unique()
    moved = (weight != before).any(1).nonzero().flatten()
    assert steps.distinct == len(read) and torch.equal(moved, read.long())
    assert len(steps.seconds) == 1 and int(steps.trainer.modules["average"].n_averaged) == 1


@pytest.mark.parametrize("rows", [10_000, 3_000_000])
def test_ids_follow_their_law(rows):
    uniform, zipf = (draw_ids(law, 200_000, rows) for law in ("uniform", "zipf"))
    for ids in (uniform, zipf):
        assert ids.min() >= 0 and ids.max() < rows
    assert uniform.float().mean().item() == pytest.approx(rows / 2, rel=0.02)
    first = (zipf == 0).float().mean().item()  # rank 0 has the share log(2) / log(1 + rows)
    assert first == pytest.approx(math.log(2) / math.log(1 + rows), rel=0.05)
    assert zipf.unique().numel() < uniform.unique().numel() or rows == 10_000


def test_the_cases_are_all_optimizers_and_sizes():
    names = {case.name for case in table_size.cases(quick=False)}
    assert len(names) == 12 and "rowwise_adagrad, average, uniform ids" in names
    assert all(case.sizes == table_size.SIZES for case in table_size.cases(quick=False))
    assert all(case.batch_size < table_size.BATCH_SIZE for case in table_size.cases(quick=True))
