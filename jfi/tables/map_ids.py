"""Ids of any number mapped to rows, and a record of those that occur.

Ids are searched among ascending ones. On a GPU one kernel does both; to keep the new ids alone, in memory of a fixed
size, torch's operators would need a cumulative sum and two scatters more.
"""

import torch
from torch import Tensor

from jfi.ops.dispatch import PLAIN
from jfi.utils.context import interprets, is_traced
from jfi.utils.operands import MISSING, NO_ID, PADDING, IdMap, SeenIds


def map_ids(ids: Tensor, table: IdMap, seen: SeenIds | None = None) -> Tensor:
    """Returns the row of each id, 0 for one that the table lacks; it never waits for a GPU.

    Args:
        ids: [S] int64; 0 and `NO_ID` are missing, and -1 is padding, which stays -1.
        table: the ids that have rows.
        seen: grows by the ids that occur; None to record none. A compiler or a tracer records none.

    Returns:
        [S] int64.
    """
    tensors = (ids, *table, *(seen or ()))
    plain = not is_traced() and all([type(one) in PLAIN and not one.is_meta for one in tensors])
    if plain and ids.numel() and (ids.is_cuda or interprets()):
        from jfi.tables.kernels.map_ids import map_ids as launch

        return launch(ids.contiguous(), table, seen)
    index = torch.searchsorted(table.sorted_ids[:-1], ids)
    is_known = (table.sorted_ids.take(index) == ids) & (ids != NO_ID)
    if plain and seen is not None:
        _record(ids, index, is_known, seen)
    return torch.where(is_known, table.rows.take(index), torch.where(ids == PADDING, PADDING, 0))


def _record(ids: Tensor, index: Tensor, is_known: Tensor, seen: SeenIds) -> None:
    known, new = index[is_known], ids[~(is_known | (ids == MISSING) | (ids == PADDING) | (ids == NO_ID))]
    seen.known[known] = True
    begin, num_kept = int(seen.num_new), len(seen.new_ids)
    seen.new_ids[begin : begin + len(new)] = new[: max(0, num_kept - begin)]
    seen.num_new.add_(len(new))
    seen.num_reserved.add_((ids == NO_ID).sum())
