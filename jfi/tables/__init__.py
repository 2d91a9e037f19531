"""Embedding tables: look up, step, grow, mark, average, with their kernels."""

import jfi.ops  # first: its operators and this folder import each other
import jfi.tables.step_rows  # noqa: F401  # registers the gradient of tables
