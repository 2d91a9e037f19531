"""Kernels of the six jagged operators in Table 1 of the Jagged Flash Attention paper."""
