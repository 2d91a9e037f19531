"""Sizes of tiles and their numbers."""


def power_of_two(width: int, least: int = 16, most: int | None = None) -> int:
    """Returns the power of two that covers width, but at least the 16 that tensor cores take, and at most ``most``."""
    size = max(least, 1 << (width - 1).bit_length())
    return size if most is None else min(size, most)


def ceil_div(number: int, size: int) -> int:
    """Returns how many tiles of a size cover the number."""
    return -(-number // size)
