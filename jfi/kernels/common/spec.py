"""The compile-time constants of an attention kernel: one value, ``SPEC``, instead of a parameter each.

A kernel declares ``SPEC: tl.constexpr`` and reads ``SPEC.head_dim``.  Every field must be a ``tl.constexpr`` when the
kernel is launched (Triton takes a plain int for a runtime value), and a spec cannot be built inside of a kernel.
"""

from typing import NamedTuple

import triton.language as tl


class Constant(tl.constexpr, dict):
    """A tl.constexpr that is also a dict: Triton's compile hooks dump constants as JSON, which knows dicts."""

    def __init__(self, value: object):
        super().__init__(value)
        dict.update(self, constexpr=self.value)


class AttentionSpec(NamedTuple):
    """The constants of the kernels of one attention problem, and their tiles.

    Attributes:
        num_kv_heads: G, key heads.
        qheads_per_kvhead: H/G, query heads that share a key head.
        head_dim: D, the width of a query and of a key head.
        value_dim: E, the width of a value head.
        shared_kv: value = key; each history row is loaded once.
        has_bias: scores have a bias by event and head.
        bias_by_index: the bias is a table; each event names one of its rows.
        has_value_scale: values are multiplied by a number per event.
        num_fields: tensors that hold a history row, in equal parts: 1 or 2.
        num_tables: tables that hold the history's rows, which are read by id and summed; 0 where the history is dense.
        num_words: int32 words of an event of packed digits; 0 where events are rows of numbers.
        precision: ``input_precision`` of tl.dot.
        block_m: query rows of a tile.
        block_n: history rows (keys) of a tile.
        block_d, block_e: the powers of two that cover head_dim and value_dim.
    """

    num_kv_heads: tl.constexpr
    qheads_per_kvhead: tl.constexpr
    head_dim: tl.constexpr
    value_dim: tl.constexpr
    shared_kv: tl.constexpr
    has_bias: tl.constexpr
    bias_by_index: tl.constexpr
    has_value_scale: tl.constexpr
    num_fields: tl.constexpr
    num_tables: tl.constexpr
    num_words: tl.constexpr
    precision: tl.constexpr
    block_m: tl.constexpr
    block_n: tl.constexpr
    block_d: tl.constexpr
    block_e: tl.constexpr

    @classmethod
    def of(cls, problem, block_m: int, block_n: int) -> "AttentionSpec":
        """The spec of a `jfi.kernels.plan.AttentionProblem` on such tiles."""
        fields = {name: getattr(problem, name) for name in cls._fields[:12]}
        blocks = {"block_m": block_m, "block_n": block_n, "block_d": problem.block_d, "block_e": problem.block_e}
        return cls(**{name: Constant(x) for name, x in (fields | blocks).items()})
