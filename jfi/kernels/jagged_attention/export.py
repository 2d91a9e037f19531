"""The forward of jagged attention for torch.export, of the kernels for any GPU."""

from torch import Tensor
from torch.library import triton_op

from jfi.kernels.common.exported import launch
from jfi.kernels.jagged_attention import triton_fwd
from jfi.kernels.plan import plan_jagged_attention
from jfi.utils.operands import JaggedAttentionInputs


@triton_op("jfi::jagged_attention_exported_fwd", mutates_args=())
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    bias: Tensor | None,
    edges: Tensor | None,
    table: Tensor | None,
    query_time: Tensor | None,
    key_time: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    is_causal: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Runs the forward of `execute`, of queries and keys that may not be empty; arguments as of the operator itself."""
    tensors = (query, key, value, query_offsets, key_offsets, bias, edges, table, query_time, key_time)
    x = JaggedAttentionInputs(*tensors, scale, left, right, is_causal)
    return triton_fwd.forward(x, plan_jagged_attention(x, "triton", exported=True), launch)
