"""Digits to int64 and back, whatever their number; what is no ID is refused by its row."""

import pytest
import torch

from jfi.semantic_ids import UNKNOWN_SID, Layout, pack_words


@pytest.mark.parametrize("length", [1, 4, 5, 6, 25, 39, 40])
def test_trits_come_back(length, device):
    digits = torch.randint(-1, 2, (500, length), dtype=torch.int8, device=device)
    digits[0], digits[1] = 1, -1
    sids = Layout(length).pack(digits)
    assert sids.dtype == torch.int64 and sids.shape == (500,)
    assert torch.equal(Layout(length).unpack(sids), digits)
    assert UNKNOWN_SID not in sids


def test_five_trits_are_a_byte_in_base_three():
    digits = torch.tensor([[0, 1, -1, 1, 1, -1, 0, 1]])
    first = 1 + 2 * 3 + 0 * 9 + 2 * 27 + 2 * 81
    second = 0 + 1 * 3 + 2 * 9
    assert Layout(8).pack(digits).item() == first + 256 * second


@pytest.mark.parametrize(("levels", "size"), [(1, 2), (3, 256), (4, 300), (7, 512), (63, 2)])
def test_codes_come_back(levels, size, device):
    codes = torch.randint(0, size, (200, levels), device=device)
    codes[0], codes[1] = size - 1, 0
    sids = Layout(levels, size).pack(codes)
    assert bool((sids >= 0).all())
    assert torch.equal(Layout(levels, size).unpack(sids), codes)


def test_the_unknown_id_has_digits_of_its_own():
    sids = torch.tensor([UNKNOWN_SID])
    assert Layout(7).unpack(sids).tolist() == [[0] * 7]
    assert Layout(2, 16).unpack(sids).tolist() == [[-1, -1]]
    assert Layout(7).pack(torch.zeros(1, 7, dtype=torch.int8)).item() != UNKNOWN_SID


def test_empty():
    for layout in (Layout(25), Layout(3, 8)):
        none = torch.empty(0, layout.num_digits, dtype=torch.int8)
        assert layout.unpack(layout.pack(none)).shape == none.shape


TERNARY = Layout(5)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: Layout(41), ValueError, "num_digits is 41, must be from 1 to 40"),
        (lambda: Layout(0), ValueError, "num_digits is 0, must be from 1 to 40"),
        (lambda: Layout(8, 256), ValueError, "num_levels 8 of codebook_size 256 take 64 bits"),
        (lambda: Layout(0, 256), ValueError, "num_levels is 0, must be at least 1"),
        (lambda: Layout(2, 1), ValueError, "codebook_size is 1, must be at least 2"),
        (
            lambda: Layout(2).pack(torch.tensor([[0, 1], [0, 2]])),
            ValueError,
            r"digits\[1, 1\] is 2, must be from -1 to 1",
        ),
        (lambda: TERNARY.pack(torch.zeros(2, 5)), TypeError, "digits must be a tensor of integers, got torch.float32"),
        (lambda: TERNARY.pack(torch.zeros(3, dtype=torch.int8)), ValueError, r"digits must be \[N, L\]"),
        (lambda: TERNARY.pack(torch.zeros(3, 6).int()), ValueError, r"digits must be \[N, 5\], got the shape \[3, 6\]"),
        (lambda: Layout(2).unpack(torch.tensor([0, 9])), ValueError, r"sids\[1\] is 9, which is no ID of 2 ternary"),
        (lambda: Layout(25).unpack(torch.tensor([243])), ValueError, r"sids\[0\] is 243"),
        (lambda: TERNARY.unpack(torch.tensor([256])), ValueError, r"sids\[0\] is 256"),
        (lambda: TERNARY.unpack(torch.tensor([1.0])), TypeError, "sids must be an int64 tensor, got torch.float32"),
        (lambda: TERNARY.unpack(torch.zeros(1, 1, dtype=torch.int64)), ValueError, r"sids must be \[N\]"),
        (lambda: Layout(2, 5).pack(torch.tensor([[0, 5]])), ValueError, r"digits\[0, 1\] is 5, must be from 0 to 4"),
        (
            lambda: Layout(1, 5).unpack(torch.tensor([5])),
            ValueError,
            r"sids\[0\] is 5, which is no ID of 1 codes below 5",
        ),
        (lambda: Layout(2, 5).unpack(torch.tensor([64])), ValueError, r"sids\[0\] is 64"),
        (lambda: Layout(2, 5).unpack(torch.tensor([-2])), ValueError, r"sids\[0\] is -2"),
        (lambda: pack_words(torch.tensor([[0, 2]])), ValueError, r"digits\[0, 1\] is 2, must be from -1 to 1"),
        (lambda: pack_words(torch.zeros(1, 2)), TypeError, "digits must be a tensor of integers"),
    ],
)
def test_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_integer_dtype(dtype):
    """The bounds are compared as numbers: uint8 has no -1, and no 999."""
    digits = torch.tensor([[1, 0, 1], [0, 0, 1]])
    assert torch.equal(Layout(3).pack(digits.to(dtype)), Layout(3).pack(digits))
    assert torch.equal(pack_words(digits.to(dtype)), pack_words(digits))
    codes, layout = torch.tensor([[100, 2], [3, 120]]), Layout(2, 1000)
    assert torch.equal(layout.pack(codes.to(dtype)), layout.pack(codes))
    with pytest.raises(ValueError, match=r"digits\[0, 0\] is 100"):
        Layout(2).pack(codes.to(dtype))


@pytest.mark.parametrize("num_digits", [1, 16, 17, 25, 40])
def test_words_are_those_of_the_digits(num_digits):
    digits = torch.randint(-1, 2, (50, num_digits))
    words = pack_words(digits)
    assert words.dtype == torch.int32 and words.shape == (50, -(-num_digits // 16))
    for column in range(num_digits):
        bits = words[:, column // 16] >> 2 * (column % 16) & 3
        assert torch.equal(bits, digits[:, column] & 3)
