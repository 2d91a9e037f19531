"""The figures of IDs against counts by hand, and what they say of good and of bad IDs."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from jfi.semantic_ids import UNKNOWN_SID, DiscretePCA, ResidualKMeans, sid_quality


@pytest.fixture(scope="module")
def catalogue():
    """Six items of which two share their content and one has none, in four clusters of a codebook of four."""
    x = torch.tensor([[0.0, 0.0], [0.0, 9.0], [9.0, 0.0], [9.0, 9.0], [9.0, 9.0], [math.nan, math.nan]])
    codec = ResidualKMeans(num_levels=1, codebook_size=4).fit(x)
    return x, codec, codec.encode(x)


def test_counts(catalogue):
    x, codec, sids = catalogue
    quality = sid_quality(codec, x, sids)
    assert (quality.items, quality.unknown, quality.distinct, quality.largest_collision) == (6, 1, 4, 2)
    assert quality.no_collision_rate == 4 / 5 and quality.single_rate == 3 / 5
    assert quality.entropy == pytest.approx(3 / 5 * math.log2(5) + 2 / 5 * math.log2(5 / 2))
    assert quality.max_entropy == pytest.approx(math.log2(5))
    assert quality.perplexity == [pytest.approx(2**quality.entropy)] and quality.dead_codes == [0]
    assert quality.reconstruction_error == pytest.approx(0.0, abs=1e-9)
    assert json.loads(json.dumps(asdict(quality)))["distinct"] == 4


def test_dead_values(catalogue):
    x, codec, sids = catalogue
    same = torch.full_like(sids, int(sids[0]))
    quality = sid_quality(codec, x[:5], same[:5])
    assert quality.dead_codes == [3] and quality.perplexity == [1.0] and quality.entropy == 0.0
    # One ID for all is worse than the mean, which would miss all of the variance.
    assert quality.reconstruction_error > 1.0


def test_the_error_is_a_part_of_the_variance_by_source():
    x = [torch.randn(500, 6) * 30, torch.randn(500, 2) + 4]
    codec = DiscretePCA(8).fit(x)
    sids = codec.encode(x)
    quality = sid_quality(codec, x, sids)
    parts = zip(codec.decode(sids).split([6, 2], 1), x, strict=True)
    errors = [((a - b).square().sum() / (b - b.mean(0)).square().sum()).item() for a, b in parts]
    assert quality.source_errors == pytest.approx(errors, rel=1e-4)
    assert quality.reconstruction_error == pytest.approx(sum(errors) / 2, rel=1e-4)


def test_labels_are_read_from_ids_that_hold_them(monkeypatch):
    y = torch.arange(400) % 4
    x = torch.nn.functional.one_hot(y, 4).float() + torch.randn(400, 4) * 0.02
    y[::5] = -1
    codec = DiscretePCA(8).fit(x)
    sids = codec.encode(x)
    told = sid_quality(codec, x, sids, {"kind": y}).labels["kind"]
    assert told.probe > 0.95 and told.raw > 0.95 and told.majority < 0.35 and told.items == 160
    shuffled = sid_quality(codec, x, sids[torch.randperm(400)], {"kind": y}).labels["kind"]
    assert shuffled.probe < 0.5
    monkeypatch.setattr("jfi.semantic_ids.quality._SCORES", 30)  # of 4 categories, 7 items at a time
    assert sid_quality(codec, x, sids, {"kind": y}).labels["kind"] == told
    text = str(sid_quality(codec, x, sids, {"kind": y}))
    assert "kind accuracy" in text and "400, of which 0 (0.0%) without content" in text


def test_refused(catalogue):
    x, codec, sids = catalogue
    with pytest.raises(ValueError, match="sids has 5 rows and sources have 6"):
        sid_quality(codec, x, sids[:5])
    with pytest.raises(ValueError, match="no item has content"):
        sid_quality(codec, x, torch.full_like(sids, UNKNOWN_SID))
