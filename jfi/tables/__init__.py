"""Embedding tables: look up, step, grow, mark, average, with the kernels for it."""
