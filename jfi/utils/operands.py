"""The operands of operators as plans, kernels and CPU implementations take them, and their limits."""

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

#: Digits of 2 bits in an int32 word.
DIGITS_PER_WORD = 16
#: Rows of a table of biases by bucket: ages of 64 bits have no more buckets.
MAX_BUCKETS = 64
#: Tables whose rows a kernel sums, one for each aligned field.
MAX_TABLES = 4
#: Ids that a program partitions by owner; the most ranks and the most shards of a table that an id is compared with,
#: and the most programs that partition.
PARTITIONED_IDS, MAX_SHARDS, MAX_PARTITIONS = 2048, 16, 8192
#: Widest row that the optimizer's step takes: a warp holds several at once.
MAX_STEPPED_WIDTH = 2048
#: Ids of growing tables that never have a row of their own: a missing one, whose row is 0, and padding, which stays -1.
MISSING, PADDING = 0, -1
#: Stands among the ids of a growing table for the rows without an owner: an id of this number is as a missing one.
NO_ID = 2**63 - 1
#: By which the number of a row is multiplied for the random bits of its rounding, modulo 2**32.
ROW_FACTOR = 0x9E3779B1
#: The smallest normal number of float16.
FLOAT16_TINY = 2.0**-14


def power_of_two(width: int, least: int = 16, most: int | None = None) -> int:
    """Returns the power of two that covers width, but at least the 16 that tensor cores take, and at most ``most``."""
    size = max(least, 1 << (width - 1).bit_length())
    return size if most is None else min(size, most)


def ceil_div(number: int, size: int) -> int:
    """Returns how many tiles of a size cover the number."""
    return -(-number // size)


def aligned(x: Tensor) -> Tensor:
    """Returns the tensor, contiguous and from a multiple of 16 bytes on, as TMA and the fast launcher want it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


class TargetAttentionInputs(NamedTuple):
    """The operands of `jfi.ops.target_attention`; a plan reads no content."""

    query: Tensor  # [B, T, H, D]
    key: Tensor  # [S, G, D]; with `second` the left half of a row, [S, 1, D / 2]; int32 [S, 1, W] are packed digits
    value: Tensor | None  # [S, G, E]; None: value = key
    offsets: Tensor  # [B+1]
    bias: Tensor | None  # [S, H], or a table [N, H]
    bias_index: Tensor | None  # [S]: the row of the table
    value_scale: Tensor | None  # [S]
    second: Tensor | None  # [S, D / 2]: the right half of each row of key
    tables: list[Tensor]  # [N, G · D]; key, a zero-stride placeholder, is the sum of their rows
    indices: list[Tensor]  # [S] of each table
    scale: float
    max_seqlen: int | None


def is_packed(key: object) -> TypeGuard[Tensor]:
    """Returns whether keys are the words of packed digits."""
    return isinstance(key, Tensor) and key.dtype == torch.int32


class JaggedAttentionInputs(NamedTuple):
    """The operands of `jfi.ops.jagged_attention`."""

    query: Tensor  # [R, H, D]
    key: Tensor  # [S, G, D]; or int32 [S, W], packed digits, D to an event, which all heads share
    value: Tensor | None  # [S, G, E]; None: value = key; of packed digits [S], factors that make values of them
    query_offsets: Tensor  # [B+1]
    key_offsets: Tensor  # [B+1]
    bias: Tensor | None  # [S, H]
    edges: Tensor | None  # [R, num_buckets + 1], as `bucket_edges` makes them; a window then has no bounds of its own
    table: Tensor | None  # [num_buckets, H], added to the scores of a bucket's keys
    query_time: Tensor | None  # [R], of buckets by age; None of those by distance
    key_time: Tensor | None  # [S]
    scale: float
    left: int | None
    right: int | None
    is_causal: bool  # with edges: a query sees its own position

    @property
    def is_packed(self) -> bool:
        """True if key holds the digits of events."""
        return is_packed(self.key)

    @property
    def num_kv_heads(self) -> int:
        """The number of key heads, G."""
        return 1 if self.is_packed else self.key.shape[1]

    @property
    def value_dim(self) -> int:
        """The width of a value head, E."""
        return self.query.shape[2] if self.value is None or self.is_packed else self.value.shape[2]

    @property
    def num_buckets(self) -> int:
        """The number of buckets that the keys of a query are divided into; 0 without edges."""
        return 0 if self.edges is None else self.edges.shape[1] - 1

    @property
    def tapers(self) -> bool:
        """True if later queries of a sample see more keys, and its later keys are seen by fewer queries."""
        return self.edges is not None or self.right is not None


class SortedRows(NamedTuple):
    """The rows that a batch has read, in ascending order; equal rows in the order of the batch."""

    rows: Tensor  # [n] int32 if their number is below 2**31, else int64; padding, the number of rows, comes last
    order: Tensor  # [n] int32, the position of each in the batch


class RowOptimizer(NamedTuple):
    """The optimizer of the rows of tables, without what changes from step to step."""

    name: str  # "sgd", "adagrad", "rowwise_adagrad", "adam" or "adamw"; in kernels also "sum", the gradients themselves
    eps: float = 1e-10
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    ema_decay: float | None = None  # decay of the moving average; None for none


class IdMap(NamedTuple):
    """The rows of ids of any number, and the ids that have occurred since the last admission.

    Attributes:
        sorted_ids: [N] int64, ascending; `NO_ID` stands for a row without an owner, and the last one is.
        rows: [N] int64, the row of each of these; of the last one 0.
        is_seen: [N] bool, whether each of these has occurred.
        new_ids: [P] int64, other ids, each time that they occurred.
        num_new: [1] int64, how many there were: those behind the first P are not kept.
        num_reserved: [1] int64, how often `NO_ID` has occurred, which never gets a row.
    """

    sorted_ids: Tensor
    rows: Tensor
    is_seen: Tensor
    new_ids: Tensor
    num_new: Tensor
    num_reserved: Tensor
