"""PositionBias(recency=True): heads that begin as powers of an event's distance."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi import JaggedEncoder, JaggedFeatureInteraction, PositionBias, SequenceFeatureConfig

WIDTH = 8


def feature(name: str = "taste", **bias: object) -> SequenceFeatureConfig:
    return SequenceFeatureConfig(name, ["history"], ["item"], bias=PositionBias(6, **bias))


def weights_of(layer: JaggedFeatureInteraction, length: int) -> torch.Tensor:
    """[length, H]: attention weights of a history whose events are all alike, the newest last."""
    history = JaggedTensor(torch.ones(length, WIDTH), lengths=torch.tensor([length]))
    return layer.attention_weights({"history": history}, {"item": torch.ones(1, WIDTH)})["taste"].values().squeeze(1)


@pytest.mark.parametrize(("num_heads", "exponents"), [(1, [0.0]), (2, [0.0, 0.5]), (4, [0.0, 0.5, 1.0, 2.0])])
def test_heads_begin_as_powers_of_the_distance(num_heads, exponents):
    layer = JaggedFeatureInteraction([feature(recency=True)], WIDTH, num_heads)
    found = weights_of(layer, 7)
    # A bucket is a power of 2 of the distance.
    distance = torch.tensor([4.0, 4.0, 4.0, 4.0, 2.0, 2.0, 1.0])
    expected = distance[:, None] ** -torch.tensor(exponents)
    torch.testing.assert_close(found, expected / expected.sum(0))


def test_a_longer_history_does_not_dilute_recent_events():
    layer = JaggedFeatureInteraction([feature(recency=True)], WIDTH, 4)
    short, long = weights_of(layer, 3), weights_of(layer, 31)
    assert (long[-1, 0] / short[-1, 0]).item() == pytest.approx(3 / 31)
    assert long[-1, 3] > 0.6 * short[-1, 3]


def test_without_it_a_table_begins_at_zero():
    features = [feature("first"), feature("second", recency=True)]
    layer = JaggedFeatureInteraction(features, WIDTH, 2)
    first, second = (value for name, value in layer.state_dict().items() if name.endswith("bucket_bias"))
    assert not first.any() and not second[0].any() and second[:, 1].diff().lt(0).all()
    layer.reset_parameters()
    again = [value for name, value in layer.state_dict().items() if name.endswith("bucket_bias")]
    assert torch.equal(again[0], first) and torch.equal(again[1], second)


def test_an_encoder_begins_so_too():
    encoder = JaggedEncoder([feature(recency=True)], WIDTH, 2, num_layers=2, device=torch.device("meta"))
    encoder.to_empty(device="cpu").reset_parameters()
    tables = [value for name, value in encoder.state_dict().items() if name.endswith("bucket_bias")]
    assert len(tables) == 2 and all(table[1].tolist() == pytest.approx([0.0, -0.5 * 0.693147]) for table in tables)


def test_recency_is_a_bool():
    with pytest.raises(TypeError, match="recency of PositionBias must be a bool, got 2"):
        PositionBias(6, 2)
