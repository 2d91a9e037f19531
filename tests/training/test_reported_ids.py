"""Ids outside of their tables are reported with the loss."""

import re
from itertools import pairwise

import pytest
from ops.unchecked import as_on_a_gpu
from test_run import tiny, tiny_data

from jfi.data import InteractionDataset
from jfi.data.batches.dataset import Batches
from jfi.ops import validation
from jfi.training import train
from jfi.training.run.recorder import read_metrics

LOG_EVERY = 2


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)


@pytest.fixture
def far(monkeypatch) -> None:
    """Makes the first id of every batch of training one that no table has."""
    batches = InteractionDataset.batches

    def changed(self, split, *args, **options):
        plain = batches(self, split, *args, **options)

        def make(number):
            batch = plain[number]
            if split == "train":
                batch.sparse_features.values()[0] = 10**9
            return batch

        return Batches(plain.order, make)

    monkeypatch.setattr(InteractionDataset, "batches", changed)


def config(run, device):
    found = tiny(run, epochs=1, batch_size=32, checkpoint_every=0, device=device.type)
    found.data = tiny_data(num_users=30)
    return found


def test_a_run_reports_how_many(tmp_path, device, far, capfd):
    with as_on_a_gpu(device, kernels=False):
        train(config(tmp_path / "run", device))
    out = "".join(capfd.readouterr())
    lines = re.findall(r"step (\d+): ids outside of their tables, which count as missing: ([\d,]+) of '(\w+)'", out)
    logged = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["split"] == "train"]
    assert len(logged) >= 2 and [int(step) for step, *_ in lines] == logged
    assert [int(count) for _, count, _ in lines] == [b - a for a, b in pairwise([0, *logged])]
    assert len({table for *_, table in lines}) == 1


def test_a_run_whose_ids_are_rows_reports_nothing(tmp_path, device, capfd):
    train(config(tmp_path / "run", device))
    assert "outside" not in "".join(capfd.readouterr())


def test_validation_ends_it(tmp_path, device, far):
    own = config(tmp_path / "run", device)
    own.training.cuda_graph = "never"  # which cannot read ids
    with validation(), pytest.raises(ValueError, match=f"must be from 0 to .*, got {10**9}"):
        train(own)
