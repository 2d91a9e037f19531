"""Samples with histories, assembled into batches."""
