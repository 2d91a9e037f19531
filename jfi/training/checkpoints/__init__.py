"""Checkpoints: the tensors and the position of a run, whole or not at all."""
