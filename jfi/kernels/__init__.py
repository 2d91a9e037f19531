"""Kernels and their launchers; imported on first use, since they need Triton."""
