"""What the Hopper kernels of jagged attention share beside their pipeline: masks, biases, stores and descriptors."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jfi.kernels.common import online_softmax
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.jagged_attention import tiles
from jfi.kernels.jagged_attention.sm90_pipeline import ROWS

visible_keys = gluon.jit(tiles.visible_keys.fn)
seeing_queries = gluon.jit(tiles.seeing_queries.fn)
is_visible = gluon.jit(tiles.is_visible.fn)
reference_of = gluon.jit(online_softmax.reference_of.fn)
nonzero = gluon.jit(online_softmax.nonzero.fn)
scores_gradient = gluon.jit(online_softmax.scores_gradient.fn)

INF = gl.constexpr(float("inf"))


class Visible(NamedTuple):
    """What the query rows of a consumer see."""

    position: object  # [M], of each query among the keys
    num_keys: object  # of the sample
    begin: object  # from here to ``end`` all of them see the keys
    end: object
    left: object
    right: object


@gluon.jit
def visible_to(position, first, shift, num_keys, schedule, SPEC: gl.constexpr):
    """first: the consumer's first query row within the sample."""
    begin = num_keys * 0
    end = num_keys
    if SPEC.has_left:
        begin = (first + ROWS - 1) // SPEC.qheads_per_kvhead + shift - schedule.left
    if SPEC.has_right:
        end = gl.minimum(end, first // SPEC.qheads_per_kvhead + shift + schedule.right + 1)
    return Visible(position, num_keys, begin, end, schedule.left, schedule.right)


@gluon.jit
def hide(x, n, visible, other: gl.constexpr, SPEC: gl.constexpr):
    """x [M, N], ``other`` where a query does not see one of the keys from n on."""
    BLOCK_N: gl.constexpr = x.shape[1]
    if (n < visible.begin) | (n + BLOCK_N > visible.end):
        key = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, x.type.layout))
        seen = is_visible(key[None, :], visible.position[:, None], visible.left, visible.right, SPEC)
        x = gl.where(seen & (key < visible.num_keys)[None, :], x, other)
    return x


@gluon.jit
def load_bias(bias_ptr, row, end, kv_head, smem, SPEC: gl.constexpr):
    """A head's bias, in base 2, of the keys from a row on, to shared memory; 0 from ``end`` on."""
    LENGTH: gl.constexpr = smem.shape[0]
    at = row + gl.arange(0, LENGTH, gl.BlockedLayout([LENGTH // 32], [32], [1], [0]))
    bias = gl.load(bias_ptr + at.to(gl.int64) * SPEC.num_kv_heads + kv_head, mask=at < end, other=0.0)
    smem.store(bias.to(gl.float32) * LOG2E)


@gluon.jit
def add_bias(scores, scale2, bias_smem, SPEC: gl.constexpr):
    """(scores, what remains to scale them by for base 2)."""
    if SPEC.has_bias:
        scores = scores * scale2 + bias_smem.load(gl.SliceLayout(0, scores.type.layout))[None, :]
        scale2 = 1.0
    return scores, scale2


@gluon.jit
def head_rows(ptr, row, kv_head, WIDTH: gl.constexpr, SPEC: gl.constexpr):
    """(pointers [64, width] to a head's rows from ``row`` on in [rows, G, width], those rows' numbers [64])."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    at = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    start = (at.to(gl.int64) * (SPEC.num_kv_heads * WIDTH) + kv_head * WIDTH)[:, None]
    return ptr + start + col[None, :], at


@gluon.jit
def store_rows(ptr, x, row, end, kv_head, SPEC: gl.constexpr):
    """Store a head's [64, width] to the rows from ``row`` on, up to ``end``, of [rows, G, width]."""
    to, at = head_rows(ptr, row, kv_head, x.shape[1], SPEC)
    x = gl.convert_layout(x.to(ptr.dtype.element_ty), to.type.layout)
    gl.store(to, x, mask=(at < end)[:, None])


@cache
def _tile(rows: int, width: int, dtype: torch.dtype) -> tuple[list[int], gl.NVMMASharedLayout]:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return [rows, width], gl.NVMMASharedLayout.get_default_for([rows, width], element)


def tensor_descriptor(x: Tensor, rows: int, qheads_per_kvhead: int = 1) -> TensorDescriptor:
    """A TMA descriptor of [rows, G, width] in tiles [rows, width] of one head.

    qheads_per_kvhead > 1: x is the query and there is one key head, so the rows of all query heads are packed.
    TensorDescriptor's constructor checks its arguments, which takes longer than the rest; here they are known to hold.
    """
    length, columns, width = x.shape
    if qheads_per_kvhead > 1:
        length, columns = length * columns, 1
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base = x
    descriptor.shape = (length, columns * width)
    descriptor.strides = (columns * width, 1)
    descriptor.block_shape, descriptor.layout = _tile(rows, width, x.dtype)
    return descriptor
