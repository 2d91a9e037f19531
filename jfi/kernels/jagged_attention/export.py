"""The forward for torch.export: its kernel launches become nodes of the graph, so that AOTInductor compiles them in.

A package runs in processes without Python, where the operators that jfi registers do not exist.  Only the kernels for
any GPU can be exported: AOTInductor takes no Gluon.
"""

from torch import Tensor
from torch.library import triton_op, wrap_triton

from jfi.kernels.common.launch import Launcher
from jfi.kernels.jagged_attention import triton_fwd
from jfi.kernels.plan import plan_jagged_attention
from jfi.utils.operands import JaggedAttentionInputs


def _launch(launcher: Launcher, grid: tuple, tensors: tuple[Tensor | None, ...], numbers: tuple) -> None:
    """A launch that tracers see.  An absent bias is never read, but Inductor of torch 2.11 fails on None."""
    given = [tensors[0] if x is None else x for x in tensors]
    wrap_triton(launcher.kernel)[grid](*given, *numbers, **launcher.constants)


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
    return triton_fwd.forward(x, plan_jagged_attention(x, "triton", exported=True), _launch)
