"""The forward of target attention for torch.export, of the kernels for any GPU."""

import torch.nn.functional as F
from torch import Tensor
from torch.library import triton_op

from jfi.kernels.common.exported import launch
from jfi.kernels.plan import plan_target_attention
from jfi.kernels.target_attention import execute
from jfi.utils.operands import TargetAttentionInputs


@triton_op("jfi::target_attention_exported_fwd", mutates_args=())
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    bias_index: Tensor | None,
    value_scale: Tensor | None,
    second: Tensor | None,
    tables: list[Tensor],
    indices: list[Tensor],
    scale: float,
    max_seqlen: int | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Runs the forward of `execute`, of a batch with samples; arguments as of the operator itself."""
    # Inductor takes offsets for written, since addresses follow from them, and would copy them: of slices of one
    # tensor, as a request's may be, AOTInductor cannot.  This is a tensor of its own; the first offset is 0.
    offsets = F.pad(offsets[1:], (1, 0))
    tensors = (query, key, value, offsets, bias, bias_index, value_scale, second)
    x = TargetAttentionInputs(*tensors, tables, indices, scale, max_seqlen)
    return execute.launch_forward(x, plan_target_attention(x, "triton", exported=True), launch)
