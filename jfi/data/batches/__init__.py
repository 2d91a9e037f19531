"""Samples with histories, assembled into batches."""

import jfi.utils.lockstep  # noqa: F401  # before TorchRec: a wrong pair of torch and fbgemm is said in one line
