"""Embedding tables: look up, step, grow, mark, average, with their kernels."""

import jfi.ops  # noqa: F401  # first: its operators and this folder import each other
