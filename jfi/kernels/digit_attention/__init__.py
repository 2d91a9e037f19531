"""Attention over histories of packed ternary digits, which are decoded in registers."""
