"""The suite of the model's parts, on a tiny table."""

import pytest
import torch
from stand_ins import ENVIRONMENT

from benchmarks import model_parts, report, table
from benchmarks.model_parts import PARTS, Part, PartsCase, attention_share

CPU = torch.device("cpu")
CASE = PartsCase(32, 10, 8, dict(num_users=20, num_items=30, mean_length=15.0))


def test_every_part_is_a_row_beside_target_attention(tmp_path):
    rows = [{"suite": "parts"} | row for row in model_parts.run(CASE, CPU, 0.0)]
    assert [row["implementation"] for row in rows] == list(PARTS)
    by_name = {row["implementation"]: row for row in rows}
    reference = by_name["target attention"]
    assert reference["over_target_attention"] == 1 and 0 < reference["events_per_sample"] <= 10
    deep = by_name["+ cross network"]
    assert deep["over_target_attention"] == pytest.approx(deep["part_step_us"] / reference["part_step_us"])
    report.write(tmp_path, "parts", ENVIRONMENT, rows)
    found = table.markdown(report.read(tmp_path / "parts.json"))
    assert found.count("\n|") == len(PARTS) + 1 and "| + cross network |" in found
    assert "rows/s" in report.line(rows[0])


def test_a_part_has_what_its_name_says():
    crossed, plain = Part("+ cross network", CASE, CPU), Part("target attention", CASE, CPU)
    names = [{name for name, _ in part.trainer.model.named_parameters()} for part in (crossed, plain)]
    assert any("cross_net" in name for name in names[0]) and not any("cross_net" in name for name in names[1])
    statistics = Part("+ statistics", CASE, CPU).trainer.dataset
    assert len(statistics.schema.dense_names) > len(plain.trainer.dataset.schema.dense_names)
    weight = crossed.trainer.model.over_arch.model[-1].weight
    before = weight.detach().clone()
    crossed.calls()[0]()
    assert not torch.equal(weight, before)


def test_attention_share_is_of_the_time_of_all_kernels():
    kernels = [{"name": "target_attention_single_tile_fwd_kernel", "us": 3.0}, {"name": "gemm", "us": 9.0}]
    assert attention_share(kernels) == 0.25
