"""Attention at the owner ranks of the events' rows.

Every rank sends its samples' absorbed queries to the owner ranks of the history's table. An owner attends, for the
samples of all ranks, to the events whose rows it has, and sends back a partial output and the log-sum-exp of its
scores; the samples' rank combines them (`jfi.ops.partial_target_attention`). Backward, the gradient of the output, Δ
and the log-sum-exp of the whole go out, and a part of the query's gradient comes back from every owner, which keeps the
gradients of its rows. No row travels, nor a gradient of one: what is sent does not grow with the history.

It is the attention of context-parallel training (Liu et al., "Ring Attention with Blockwise Transformers", 2023) turned
round: queries move, keys stay on the rank that owns them.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.distributed.exchange import gradient_scale
from jfi.distributed.input_dist import GroupInput
from jfi.modules import SequenceFeatureConfig, WeightBias
from jfi.modules.validation import event_input, unread
from jfi.ops.partial_target_attention import (
    add_parts,
    attend_to_part,
    combine_parts,
    pack_gradient,
    pack_part,
    part_gradients,
    unpack_gradient,
)
from jfi.ops.target_attention import prepare_target_attention
from jfi.tables.rows_by_id import RowsById, SavedTables
from jfi.tables.table_rows import RemoteAttention, join
from jfi.utils.context import may_read, once_differentiable
from jfi.utils.operands import TargetAttentionInputs


class AttentionAtOwners(RemoteAttention):
    """Attention to the events of a table group's features.

    Args:
        arrived: the events whose rows this rank owns.
        by_id: the rows of these events.
        fetch: sends all rows of the group to the samples' ranks.
        ids: by key those of this rank's samples.
        outputs: by embedding the placeholder of the collection's output.
    """

    def __init__(
        self,
        arrived: GroupInput,
        by_id: RowsById,
        fetch: Callable[[], list[Tensor]],
        ids: dict[str, JaggedTensor],
        outputs: dict[str, Tensor],
    ) -> None:
        self._arrived, self._by_id, self._fetch, self._ids, self._outputs = arrived, by_id, fetch, ids, outputs
        self._fetched: list[Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self._by_id.rows.dtype

    @property
    def _names(self) -> list[str]:
        return [feature.name for feature in self._arrived.group.features]

    def reads(self, feature: SequenceFeatureConfig, sequences: dict[str, JaggedTensor]) -> bool:
        group, index, first = self._arrived.group, self._names.index(feature.name), feature.sequence_keys[0]
        if feature.of_events != group.features[index].of_events:
            must = f"feature '{feature.name}' must be that of the model which AttentionCollectionSharder was given"
            raise ValueError(f"{must}, {group.features[index]!r}, got {feature!r}")
        if any([unread(sequences[key]) is not self._outputs[key] for key in feature.sequence_keys]):
            return False
        if feature.reads_weights:
            sent = self._ids[group.weight_keys[index]].weights()
            _check_sent(first, "weights", feature, sequences[first].weights(), sent)
        if feature.bias_key is not None:
            read, sent = event_input(sequences, feature.bias_key).values(), self._ids[feature.bias_key].values()
            _check_sent(feature.bias_key, "bucket ids", feature, read, sent)
        return True

    def rows(self, feature: str) -> Tensor:
        if self._arrived.events is None:
            raise ValueError(f"rows of feature '{feature}' cannot be fetched in a captured step; attention reads them")
        if self._fetched is None or (torch.is_grad_enabled() and not self._fetched[0].requires_grad):
            self._fetched = self._fetch()
        return self._fetched[self._names.index(feature)]

    def attend(self, queries: dict[str, Tensor], tables: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        arrived, group, names = self._arrived, self._arrived.group, self._names
        if not queries.keys() >= set(names):
            must = f"features {names} must be read together, as in the model which AttentionCollectionSharder was given"
            raise ValueError(f"{must}, got a layer that reads {list(queries)}")
        query, table = join([queries[name] for name in names]), None
        if tables:
            table = join([tables[name] for name in names])
        feature, columns = group.features[0], arrived.columns
        shared = arrived.queries.send(query.detach(), shared=True)
        weights = columns[-1].view(torch.float32) if group.has_weight else None
        if isinstance(feature.bias, WeightBias):
            table = weights.log().unsqueeze(1).expand(-1, query.size(2)).to(query.dtype)
        inputs, impl = prepare_target_attention(
            shared,
            self._by_id,
            None,
            offsets=arrived.offsets,
            indices=None,
            key_bias=table,
            key_bias_index=columns[1 + len(group.field_shardings)] if group.has_bucket else None,
            value_scale=weights if feature.weighted_values else None,
            scale=scale,
            max_seqlen=None,
            impl="auto",
        )
        out = _Attend.apply(query, inputs.key, inputs.value, inputs.bias, inputs, impl, arrived)
        return dict(zip(names, out.chunk(len(names)), strict=True))


def _check_sent(key: str, what: str, feature: SequenceFeatureConfig, read: Tensor, sent: Tensor) -> None:
    """Checks, where it may read them, that inputs of a layer are those which the owner ranks of the events have got."""
    if read.data_ptr() == sent.data_ptr() or not may_read(read):
        return
    if read.shape != sent.shape or not (read == sent).all():
        why = f"which feature '{feature.name}' reads at the ranks that own the rows"
        raise ValueError(
            f"sequences['{key}'] must have the {what} that the sharded collection was given, {why}, got others"
        )


class _Attend(torch.autograd.Function):
    """Maps queries [B, T, H, D] of this rank's samples to their outputs; `inputs` are those of the owner's part."""

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        bias: Tensor | None,
        inputs: TargetAttentionInputs,
        impl: str,
        arrived: GroupInput,
    ) -> Tensor:
        out, lse = attend_to_part(inputs, impl)
        if arrived.queries.pg.size() > 1:
            parts = arrived.queries.back.send(pack_part(out, lse, impl))
            out, lse = combine_parts(parts.view(len(arrived.group.owner_ranks), *query.shape[:3], parts.size(-1)), impl)
        ctx.inputs, ctx.impl, ctx.arrived = inputs._replace(query=None, key=None, value=None, bias=None), impl, arrived
        ctx.tables = SavedTables(inputs.tables)
        ctx.save_for_backward(inputs.query, key, value, bias, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        shared, key, value, bias, out, lse = ctx.saved_tensors
        queries, impl = ctx.arrived.queries, ctx.impl
        key, tables, indices = ctx.tables.read(key, ctx.inputs.indices)
        inputs = ctx.inputs._replace(query=shared, key=key, value=value, bias=bias, tables=tables, indices=indices)
        grad, needed = grad.to(out.dtype), ctx.needs_input_grad[:4]
        if queries.pg.size() == 1:
            return *part_gradients(grad.contiguous(), out, lse, needed, inputs, impl), None, None, None
        owners = len(ctx.arrived.group.owner_ranks)
        packed = queries.send(pack_gradient(grad, out, lse, impl), shared=True)
        # A table's gradient is a mean over ranks; those of the query and the bias are sums, of which DDP takes means.
        scale = gradient_scale(queries.pg)
        of_whole = unpack_gradient(packed, grad.size(-1), scale, impl)
        # Every rank takes part in the exchange of the query's gradient.
        dquery, dkey, dvalue, dbias = part_gradients(*of_whole, (True, *needed[1:]), inputs, impl)
        parts = queries.back.send(dquery).view(owners, *grad.shape[:3], dquery.size(-1))
        dquery = add_parts(parts, 1 / scale, impl)
        return dquery, dkey, dvalue, None if dbias is None else dbias / scale, None, None, None
