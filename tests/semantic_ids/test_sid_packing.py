"""Digits to int64 and back, whatever their number; what is no ID is refused by its row."""

import pytest
import torch

from jfi.semantic_ids import UNKNOWN_SID, pack_codes, pack_trits, pack_words, sid_words, unpack_codes, unpack_trits


@pytest.mark.parametrize("length", [1, 4, 5, 6, 25, 39, 40])
def test_trits_come_back(length, device):
    digits = torch.randint(-1, 2, (500, length), dtype=torch.int8, device=device)
    digits[0], digits[1] = 1, -1
    sids = pack_trits(digits)
    assert sids.dtype == torch.int64 and sids.shape == (500,)
    assert torch.equal(unpack_trits(sids, length), digits)
    assert UNKNOWN_SID not in sids


def test_five_trits_are_a_byte_in_base_three():
    digits = torch.tensor([[0, 1, -1, 1, 1, -1, 0, 1]])
    first = 1 + 2 * 3 + 0 * 9 + 2 * 27 + 2 * 81
    second = 0 + 1 * 3 + 2 * 9
    assert pack_trits(digits).item() == first + 256 * second


@pytest.mark.parametrize(("levels", "size"), [(1, 2), (3, 256), (4, 300), (7, 512), (63, 2)])
def test_codes_come_back(levels, size, device):
    codes = torch.randint(0, size, (200, levels), device=device)
    codes[0], codes[1] = size - 1, 0
    sids = pack_codes(codes, size)
    assert bool((sids >= 0).all())
    assert torch.equal(unpack_codes(sids, levels, size), codes)


def test_the_unknown_id_has_digits_of_its_own():
    sids = torch.tensor([UNKNOWN_SID])
    assert unpack_trits(sids, 7).tolist() == [[0] * 7]
    assert unpack_codes(sids, 2, 16).tolist() == [[-1, -1]]
    assert pack_trits(torch.zeros(1, 7, dtype=torch.int8)).item() != UNKNOWN_SID


def test_empty():
    assert unpack_trits(pack_trits(torch.empty(0, 25, dtype=torch.int8)), 25).shape == (0, 25)
    assert unpack_codes(pack_codes(torch.empty(0, 3, dtype=torch.int64), 8), 3, 8).shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: pack_trits(torch.tensor([[0, 1], [0, 2]])), ValueError, r"digits\[1, 1\] is 2, must be from -1 to 1"),
        (lambda: pack_trits(torch.zeros(2, 3)), TypeError, "digits must be a tensor of integers, got torch.float32"),
        (
            lambda: pack_trits(torch.zeros(2, 41, dtype=torch.int8)),
            ValueError,
            "num_digits is 41, must be from 1 to 40",
        ),
        (lambda: pack_trits(torch.zeros(3, dtype=torch.int8)), ValueError, r"digits must be \[N, L\]"),
        (lambda: unpack_trits(torch.tensor([0, 9]), 2), ValueError, r"sids\[1\] is 9, which is no ID of 2 ternary"),
        (lambda: unpack_trits(torch.tensor([243]), 25), ValueError, r"sids\[0\] is 243"),
        (lambda: unpack_trits(torch.tensor([256]), 5), ValueError, r"sids\[0\] is 256"),
        (lambda: unpack_trits(torch.tensor([1.0]), 5), TypeError, "sids must be an int64 tensor, got torch.float32"),
        (lambda: unpack_trits(torch.zeros(1, 1, dtype=torch.int64), 5), ValueError, r"sids must be \[N\]"),
        (lambda: pack_codes(torch.tensor([[0, 5]]), 5), ValueError, r"codes\[0, 1\] is 5, must be from 0 to 4"),
        (
            lambda: unpack_codes(torch.tensor([5]), 1, 5),
            ValueError,
            r"sids\[0\] is 5, which is no ID of 1 codes below 5",
        ),
        (lambda: unpack_codes(torch.tensor([64]), 2, 5), ValueError, r"sids\[0\] is 64"),
        (lambda: unpack_codes(torch.tensor([-2]), 2, 5), ValueError, r"sids\[0\] is -2"),
        (lambda: unpack_codes(torch.tensor([0]), 8, 256), ValueError, "num_levels 8 of codebook_size 256 take 64 bits"),
    ],
)
def test_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_integer_dtype(dtype):
    """The bounds are compared as numbers: uint8 has no -1, and no 999."""
    digits = torch.tensor([[1, 0, 1], [0, 0, 1]])
    assert torch.equal(pack_trits(digits.to(dtype)), pack_trits(digits))
    assert torch.equal(pack_words(digits.to(dtype)), pack_words(digits))
    codes = torch.tensor([[100, 2], [3, 120]])
    assert torch.equal(pack_codes(codes.to(dtype), 1000), pack_codes(codes, 1000))
    with pytest.raises(ValueError, match=r"digits\[0, 0\] is 100"):
        pack_trits(codes.to(dtype))


@pytest.mark.parametrize("num_digits", [1, 16, 17, 25, 40])
def test_words_are_those_of_the_digits(num_digits):
    digits = torch.randint(-1, 2, (50, num_digits))
    words = pack_words(digits)
    assert words.dtype == torch.int32 and words.shape == (50, -(-num_digits // 16))
    for column in range(num_digits):
        bits = words[:, column // 16] >> 2 * (column % 16) & 3
        assert torch.equal(bits, digits[:, column] & 3)
    sids = torch.cat([pack_trits(digits), torch.tensor([UNKNOWN_SID])])
    assert torch.equal(sid_words(sids, num_digits)[:-1], words) and (sid_words(sids, num_digits)[-1] == 0).all()


def test_words_take_ternary_digits_alone():
    with pytest.raises(ValueError, match=r"digits\[0, 1\] is 2, must be from -1 to 1"):
        pack_words(torch.tensor([[0, 2]]))
    with pytest.raises(TypeError, match="digits must be a tensor of integers"):
        pack_words(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="which is no ID of 3 ternary digits"):
        sid_words(torch.tensor([27]), 3)
