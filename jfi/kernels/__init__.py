"""Kernels and their launchers, file by file beside ``jfi.ops``; imported on first use, since they need Triton."""
