"""Target attention in Triton, forward and backward: the two launchers that jfi.ops.target_attention calls."""

from jfi.kernels.target_attention_bwd import backward
from jfi.kernels.target_attention_fwd import forward

__all__ = ["backward", "forward"]
