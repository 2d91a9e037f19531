"""Kernels that write to the memory of other GPUs of a host."""
