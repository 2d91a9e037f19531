"""Embedding tables: rows read by id, and the optimizer's step of the rows of a batch."""
