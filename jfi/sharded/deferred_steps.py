"""Gradient accumulation with sharded tables: several backward passes make one step of them.

fbgemm's optimizers step in the backward pass of a look-up. A look-up whose step waits leaves its ids and the gradient
of its rows instead; at the end the ids of all look-ups of a module are looked up together, and the backward pass of
this one, with all gradients, is the step. It is that of one batch of all samples: a row that several passes have read
is stepped once, by the sum of its gradients. Every rank steps the rows that it owns, and nothing is sent.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule

from jfi.sharded.routed import RoutedCollection

#: What TorchRec's collections give fbgemm's tables, if all keys have one batch size.
_IDS = ("indices", "offsets", "per_sample_weights")


@contextmanager
def defer_sharded_steps(model: nn.Module) -> Iterator[None]:
    """Backward passes within make one step of the model's sharded tables together, at the end of the block.

    Until then the gradients of the rows that were looked up stay in memory; activations do not. An error within the
    block drops them.

    Args:
        model: with any number of sharded collections, or none.

    Raises:
        ValueError: tables whose steps cannot wait.
    """
    collections = [module for module in model.modules() if isinstance(module, ShardedEmbeddingModule)]
    with ExitStack() as stack:
        for module in collections:
            if isinstance(module, RoutedCollection):
                stack.enter_context(module.deferring())
            else:
                for tables in _batched(module):
                    stack.enter_context(DeferredSteps(tables).deferring())
        yield


def _batched(collection: ShardedEmbeddingModule) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """The tables that this rank has of a collection."""
    lookups = [getattr(lookup, "module", lookup) for lookup in collection._lookups]
    found = [kernel.emb_module for lookup in lookups for kernel in lookup._emb_modules]
    for one in found:
        if not isinstance(one, SplitTableBatchedEmbeddingBagsCodegen):
            raise ValueError(f"tables whose steps wait must have the compute kernel fused, got a {type(one).__name__}")
    return found


class _LookUp(NamedTuple):
    """What a look-up of F features leaves for the step, as fbgemm takes it: by feature, by sample."""

    indices: Tensor  # [S]
    offsets: Tensor  # [F * B + 1]
    weights: Tensor | None  # [S]
    grad: Tensor  # of bags [B, sum of widths], else [S, D]


class DeferredSteps:
    """The steps of fbgemm's tables that wait.

    Args:
        tables: with an optimizer that steps in the backward pass.
    """

    def __init__(self, tables: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._tables = tables
        self._waiting: list[_LookUp] = []

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Backward passes of look-ups within make one step at the end of the block, unless it raises."""
        with self._tables.register_forward_hook(self._leave, with_kwargs=True):
            yield
        if self._waiting:
            self._step()

    def _leave(self, tables: nn.Module, args: tuple, kwargs: dict, rows: Tensor) -> Tensor:
        """The rows of a look-up, whose gradient is left."""
        if not rows.requires_grad:
            return rows
        ids = [kwargs.get(name) for name in _IDS]
        others = [name for name, one in kwargs.items() if one is not None and name not in _IDS]
        others += ["positional arguments"] if args else []
        others += ["per_sample_weights with a gradient"] if ids[2] is not None and ids[2].requires_grad else []
        if others:
            raise ValueError(f"a look-up whose step waits must have no inputs but {', '.join(_IDS)}, got {others}")
        return _Leave.apply(rows.detach(), rows.new_zeros((), requires_grad=True), self._waiting, *ids)

    def _step(self) -> None:
        waiting = self._waiting
        features = len(self._tables.feature_table_map)
        joined = waiting[0] if len(waiting) == 1 else _joined(waiting, features, self._pools)
        with torch.enable_grad():
            rows = self._tables(joined.indices, joined.offsets, joined.weights)
        rows.backward(joined.grad)

    @property
    def _pools(self) -> bool:
        return self._tables.pooling_mode != PoolingMode.NONE


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        rows: Tensor,
        handle: Tensor,
        waiting: list[_LookUp],
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.waiting, ctx.ids = waiting, (indices, offsets, weights)
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor | None) -> tuple[None, ...]:
        if grad is not None:
            ctx.waiting.append(_LookUp(*ctx.ids, grad))
        return (None,) * 6


def _joined(lookups: list[_LookUp], features: int, pools: bool) -> _LookUp:
    """Several look-ups as one of all their samples."""
    lengths = [one.offsets.diff().view(features, -1) for one in lookups]
    number = torch.arange(features, device=lengths[0].device)
    of_feature = [
        number.repeat_interleave(own.sum(1), output_size=one.indices.numel())
        for one, own in zip(lookups, lengths, strict=True)
    ]
    order = torch.cat(of_feature).argsort(stable=True)
    ends = torch.cat(lengths, 1).flatten().cumsum(0)
    grad = torch.cat([one.grad for one in lookups])
    weights = None if lookups[0].weights is None else torch.cat([one.weights for one in lookups])[order]
    return _LookUp(
        torch.cat([one.indices for one in lookups])[order],
        F.pad(ends, (1, 0)).to(lookups[0].offsets.dtype),
        weights,
        grad if pools else grad[order],
    )
