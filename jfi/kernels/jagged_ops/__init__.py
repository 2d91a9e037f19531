"""The six operators of the paper's Table 1."""
