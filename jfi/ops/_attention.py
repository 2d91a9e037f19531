"""The operators of an attention, forward and backward, declared by the NamedTuple of its operands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from jfi.kernels.plan import AttentionPlan, Inputs, is_aligned
from jfi.ops.dispatch import operator
from jfi.tables.rows_by_id import SavedTables
from jfi.utils.operands import JaggedAttentionInputs, TargetAttentionInputs, aligned


@dataclass(slots=True)
class Prepared:
    """The plan that both passes of an eager call share, and the forward's schedule."""

    plan: AttentionPlan | None  # None for impl="torch"
    schedule: Tensor | None = None  # of work tiles, for one backward pass


_SCHEMA = {Tensor: "Tensor", Tensor | None: "Tensor?", list[Tensor]: "Tensor[]"}
_SCHEMA |= {float: "float", int | None: "SymInt?", bool: "bool"}


def attention(
    name: str,
    operands: type[TargetAttentionInputs] | type[JaggedAttentionInputs],
    make_plan: Callable[[Any, str], AttentionPlan],
    forward: Callable,
    backward: Callable,
    differentiable: Sequence[str],
    has_lse_gradient: bool = False,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Registers ``torch.ops.jfi.<name>_fwd`` and ``<name>_bwd`` over the fields of ``operands`` and impl.

    Under torch.export on a GPU the forward is ``<name>_exported_fwd``, which AOTInductor compiles into a package.

    Args:
        name: of the attention.
        operands: the fields, tensors first, then lists, tables and indices without a gradient, then numbers.
        make_plan: takes (x, "triton"), returns their plan, one for both passes of an eager call.
        forward: takes (x, prepared), returns the output and the log-sum-exp.
        backward: takes (grad, dlse, x, out, lse, needed, prepared), returns the gradients of the fields
            ``differentiable``, of which those that are not ``needed`` are ignored.
        differentiable: fields that have a gradient.
        has_lse_gradient: whether the log-sum-exp is differentiable; dlse is then a tensor or None, else None.

    Returns:
        The forward.
    """
    kinds = [_SCHEMA[kind] for kind in operands.__annotations__.values()]
    fields = ", ".join(f"{kind} {field}" for kind, field in zip(kinds, operands._fields, strict=True))
    first_list = sum(kind in ("Tensor", "Tensor?") for kind in kinds)
    first_number = first_list + kinds.count("Tensor[]")
    positions = [operands._fields.index(field) for field in differentiable]

    def fake(*args):
        query, value = args[0], args[2]
        stats = torch.float64 if query.dtype == torch.float64 else torch.float32
        width = query.shape[-1] if value is None or value.dim() == 1 else value.shape[-1]
        return query.new_empty(*query.shape[:-1], width), query.new_empty(query.shape[:-1], dtype=stats)

    def run_forward(*args, ctx=None):
        *tensors, impl = args
        x = operands(*tensors)
        prepared = Prepared(make_plan(x, impl) if impl == "triton" else None)
        if ctx is not None:
            ctx.prepared = prepared
        return forward(x, prepared)

    def run_backward(grad, dlse, *args, prepared=None):
        *tensors, out, lse, needed, impl = args
        x, dlse = operands(*tensors), None if dlse is None else dlse.contiguous()
        if prepared is None or (impl == "triton" and not _holds(prepared.plan, x)):
            prepared = Prepared(make_plan(x, impl) if impl == "triton" else None)
        grads = backward(aligned(grad), dlse, x, out, lse, needed, prepared)
        return [x for x, need in zip(grads, needed, strict=False) if need]

    def fake_backward(grad, dlse, *args):
        wanted = [args[i] for i, need in zip(positions, args[-2], strict=True) if need]
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in wanted]

    saved = "Tensor out, Tensor lse, bool[] needed, str impl"
    schema = f"(Tensor grad, Tensor? dlse, {fields}, {saved}) -> Tensor[]"
    bwd = operator(f"{name}_bwd", run_backward, fake_backward, schema=schema)

    def save(ctx, inputs, output) -> None:
        tables, indices = inputs[first_list:first_number] or ([], [])
        ctx.tables, ctx.numbers = SavedTables(tables) if tables else None, inputs[first_number:]
        ctx.save_for_backward(*inputs[:first_list], *indices, *output)
        if not has_lse_gradient:
            ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def differentiate(ctx, grad, dlse):
        *tensors, out, lse = ctx.saved_tensors
        operands, indices = tensors[:first_list], tensors[first_list:]
        lists = [[None] * len(indices)] * (first_number - first_list)
        gradients = [None] * first_list + lists + [None] * len(ctx.numbers)
        if grad is None and dlse is None:
            return tuple(gradients)
        grad = torch.zeros_like(out) if grad is None else grad
        by_id = [[] for _ in lists]
        if ctx.tables is not None:
            operands[1], *by_id = ctx.tables.read(operands[1], indices)
        operands += by_id
        *numbers, impl = ctx.numbers
        needs = ctx.needs_input_grad  # made anew at each access
        needed = [needs[i] for i in positions]
        prepared = getattr(ctx, "prepared", None)  # torch.library keeps none
        computed = iter(bwd(grad, dlse, *operands, *numbers, out, lse, needed, impl, prepared=prepared))
        for i, need in zip(positions, needed, strict=True):
            gradients[i] = next(computed) if need else None
        return tuple(gradients)

    @cache
    def exported() -> Callable:
        op = import_module("jfi.kernels.exported").operator(name)  # imported when wanted, since it needs Triton
        op.register_autograd(differentiate, setup_context=save)
        return op

    schema = f"({fields}, str impl) -> (Tensor, Tensor)"
    return operator(f"{name}_fwd", run_forward, fake, save, differentiate, schema, exported, keeps=True)


def _holds(plan: AttentionPlan, x: Inputs) -> bool:
    """Returns whether a forward's plan is one for its operands as they were saved, if hooks of autograd moved them.

    Rows by id have been read where their tables were stepped.
    """
    num_tables = plan.problem.num_tables
    return is_aligned(x) and (num_tables == 0 or num_tables == len(x.tables))
