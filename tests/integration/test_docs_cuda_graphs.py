"""docs/cuda-graphs.md on a GPU: its step is captured, and its losses are those of eager steps."""

import pytest
import torch

from integration.page import ROOT, run
from jfi import CapturedStep

PAGE = ROOT / "docs/cuda-graphs.md"


@pytest.fixture(scope="module")
def page():
    return run(path=PAGE)


def test_it_learns(page):
    assert page.losses[-1] < page.losses[0] - 0.05 and page.captured.steps == 60
    assert float(page.total) == pytest.approx(sum(page.losses), rel=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_its_losses_are_those_of_eager_steps(page, monkeypatch):
    assert page.captured.captured >= 50, page.captured.summary()
    monkeypatch.setattr(CapturedStep, "__call__", lambda self, batch: self._run_eagerly(batch, "here"))
    eager = run(path=PAGE)
    assert eager.captured.captured == 0
    assert page.losses == pytest.approx(eager.losses, abs=1e-4)
    for name, value in eager.model.state_dict().items():
        torch.testing.assert_close(page.model.state_dict()[name], value, atol=1e-3, rtol=1e-3, msg=name)
