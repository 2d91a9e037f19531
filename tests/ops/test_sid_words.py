"""Words of semantic IDs against their digits, each way to make them."""

import pytest
import torch

from jfi.ops.sid_words import sid_words
from jfi.semantic_ids import UNKNOWN_SID, Layout, pack_words


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("begins", [0, 1])
def test_words_hold_the_digits_and_whether_the_item_is_known(impl, begins, device):
    """Also of IDs that begin between two multiples of 16 bytes, and of more than a program of the kernel takes."""
    for num_digits in range(1, 41):
        digits = torch.randint(-1, 2, (600, num_digits))
        digits[0], digits[1] = -1, 1
        sids = Layout(num_digits).pack(digits)
        unknown = torch.rand(len(sids)) < 0.1
        digits[unknown], sids[unknown] = 0, UNKNOWN_SID
        flags = torch.stack([~unknown, unknown], 1).long()
        found = sid_words(sids.to(device)[begins:], num_digits, impl)
        assert found.dtype == torch.int32
        assert torch.equal(found.cpu(), pack_words(torch.cat([digits, flags], 1))[begins:])


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_no_ids(impl, device):
    assert sid_words(torch.empty(0, dtype=torch.int64, device=device), 25, impl).shape == (0, 2)
