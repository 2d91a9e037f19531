"""Training steps captured as CUDA graphs: batches padded to a capacity, and what in a model prevents a capture."""

import jfi.utils.lockstep  # noqa: F401  # before TorchRec: a wrong pair of torch and fbgemm is said in one line
from jfi.cuda_graphs.capture_check import why_not_captured
from jfi.cuda_graphs.captured_step import CapturedStep

__all__ = ["CapturedStep", "why_not_captured"]
