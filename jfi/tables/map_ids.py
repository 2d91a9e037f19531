"""Ids of any number mapped to rows, and a record of those that occur.

Ids are searched among ascending ones. On a GPU one kernel does both; to keep the new ids alone, in memory of a fixed
size, torch's operators would need a cumulative sum and two scatters more.
"""

import torch
from torch import Tensor

from jfi.ops.dispatch import PLAIN
from jfi.utils.context import interprets, is_traced
from jfi.utils.operands import MISSING, NO_ID, PADDING, IdMap


def map_ids(ids: Tensor, table: IdMap, records: bool) -> Tensor:
    """Returns the row of each id, 0 for one that the table lacks; it never waits for a GPU.

    Args:
        ids: [S] int64; 0 and `NO_ID` are missing, and -1 is padding, which stays -1.
        table: the ids that have rows.
        records: whether the ids are recorded in the table; a compiler or a tracer records none.

    Returns:
        [S] int64.
    """
    plain = not is_traced() and all([type(one) in PLAIN and not one.is_meta for one in (ids, *table)])
    if plain and ids.numel() and (ids.is_cuda or interprets()):
        from jfi.tables.kernels.map_ids import map_ids as launch

        return launch(ids.contiguous(), table, records)
    index = torch.searchsorted(table.sorted_ids[:-1], ids)
    is_known = (table.sorted_ids.take(index) == ids) & (ids != NO_ID)
    if plain and records:
        new = ids[~(is_known | (ids == MISSING) | (ids == PADDING) | (ids == NO_ID))]
        table.is_seen[index[is_known]] = True
        begin, num_kept = int(table.num_new), len(table.new_ids)
        table.new_ids[begin : begin + len(new)] = new[: max(0, num_kept - begin)]
        table.num_new.add_(len(new))
        table.num_reserved.add_((ids == NO_ID).sum())
    return torch.where(is_known, table.rows.take(index), torch.where(ids == PADDING, PADDING, 0))
