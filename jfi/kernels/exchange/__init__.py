"""Kernels that put ids into slots by owner rank, and that write to the memory of other GPUs of a host."""
