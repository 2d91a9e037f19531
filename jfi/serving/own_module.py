"""Compiles a module of the user's own that holds jfi's layer into a package that needs neither jfi nor Python.

The operators of jfi are registered from Python, so a package cannot call them. On a GPU AOTInductor compiles the Triton
kernels of attention into the package. Other operators are replaced by PyTorch's in the exported program: attention on a
CPU, reading rows of tables, sums and softmaxes of histories, sums of lengths.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from jfi import reference
from jfi.serving.artifact import ArtifactError
from jfi.serving.export import write_package
from jfi.utils.files import writing_file

#: A largest size from here on is none: torch writes infinity as an int of 64 bits or a symbol, by release.
_ANY_SIZE = 2**62


def export_module(
    module: nn.Module, args: tuple, path: str | Path, *, dynamic_shapes: Any = None, kwargs: dict | None = None
) -> list[str]:
    """Writes the AOTInductor package of a module's forward, completely or not at all.

    Where jfi is installed or not, ``torch._inductor.aoti_load_package(path)`` gives a function of the same arguments,
    and C++ can load the package too. The forward takes tensors and builds a KeyedJaggedTensor of them inside. Target
    attention (JaggedFeatureInteraction, JaggedPooling) can be exported, with a fixed number of queries, and so can
    jagged_jagged_bmm, jagged_dense_bmm and jagged_softmax of `jfi.table1`; an encoder can for a GPU, without times.
    The package itself checks the sizes of a call only where the environment has AOTI_RUNTIME_CHECK_INPUTS=1.

    Args:
        module: on the device to serve on, in eval mode.
        args: example of its positional arguments, of two samples or more: torch.export takes a size of 0 or 1 for a
            constant.
        kwargs: example of its arguments by name, as `args`.
        path: of the package, ends in ".pt2" and does not exist.
        dynamic_shapes: which sizes vary, as `torch.export.export` takes it.

    Returns:
        The operators of other libraries in the package, as "fbgemm::name". A process that loads it must have loaded
        those libraries before.

    Raises:
        ArtifactError: `path` exists, or there is no C++ compiler.
        ValueError: another ending of `path`, an operator of jfi that has no form without Python, or an example for
            which a size that varies has a largest value that `dynamic_shapes` does not give.

    Example:
        >>> import jfi.serving
        >>> jfi.serving.export_module(torch.nn.Linear(2, 1), (torch.ones(3, 2),), "model.bin")
        Traceback (most recent call last):
        ValueError: path must end in .pt2, got 'model.bin'
    """
    path = Path(path)
    if path.suffix != ".pt2":
        raise ValueError(f"path must end in .pt2, got '{path}'")
    if path.exists():
        raise ArtifactError(f"{path} exists already; name a new file")
    program = program_of(module, args, dynamic_shapes, kwargs)
    with writing_file(path) as unfinished:
        write_package(program, unfinished)
    return [name for name in operators_of(program) if not name.startswith("jfi::")]


def program_of(
    module: nn.Module, args: tuple, dynamic_shapes: Any = None, kwargs: dict | None = None
) -> ExportedProgram:
    """Returns the exported program of a module whose operators need no Python; arguments as of `export_module`."""
    with torch.no_grad():
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        program = program.run_decompositions(_forms())
    own = [name for name in operators_of(program) if name.startswith("jfi::")]
    if refused := [name for name in own if not name.endswith("_exported_fwd")]:
        raise ValueError(
            f"the module uses {', '.join(refused)}, which cannot be exported: target attention, jagged_jagged_bmm, "
            "jagged_dense_bmm and jagged_softmax can, and for a GPU an encoder without times"
        )
    _check_ranges(program, dynamic_shapes)
    return program


def _check_ranges(program: ExportedProgram, dynamic_shapes: Any) -> None:
    """Raises for a size that varies, but not beyond a number that nobody gave."""
    given = {getattr(leaf, "max", None) for leaf in tree_leaves(dynamic_shapes)}
    for node in program.graph.nodes:
        if node.name not in program.graph_signature.user_inputs or not isinstance(node.meta.get("val"), Tensor):
            continue
        for dim, size in enumerate(node.meta["val"].shape):
            bounds = program.range_constraints.get(size.node.expr) if isinstance(size, torch.SymInt) else None
            if bounds is not None and bounds.upper < _ANY_SIZE and int(bounds.upper) not in given:
                raise ValueError(
                    f"args must be an example whose sizes stand for all others, but with this one dimension {dim} of "
                    f"'{node.name}' could only be from {bounds.lower} to {bounds.upper}; give two samples or more"
                )


def operators_of(program: ExportedProgram) -> list[str]:
    """The operators of a program that are not PyTorch's own, sorted."""
    targets = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    return sorted({target._schema.name for target in targets if target.namespace not in ("aten", "prims")})


def _forms() -> dict[torch._ops.OpOverload, Callable]:
    """Returns by operator what takes its place."""
    ops = torch.ops.jfi
    forms: dict[torch._ops.OpOverload, Callable] = {
        ops.target_attention_fwd.default: _target_attention,
        ops.gather_rows.default: _gather_rows,
        ops.segment_sum.default: partial(_segment_reduce, "sum", 0.0),
        ops.segment_max.default: partial(_segment_reduce, "max", -torch.inf),
        ops.segment_expand.default: lambda x, offsets, rows: x[reference.segment_ids(offsets, rows)],
    }
    if hasattr(ops, "jagged_softmax"):  # the module has imported jfi.table1; the formulas are made of the last three
        forms |= {
            ops.jagged_jagged_bmm.default: lambda x, y, offsets, impl: reference.jagged_jagged_bmm(x, y, offsets),
            ops.jagged_dense_bmm.default: lambda x, offsets, dense, *_: reference.jagged_dense_bmm(x, offsets, dense),
            ops.jagged_softmax.default: lambda x, offsets, impl: reference.jagged_softmax(x, offsets),
        }
    if hasattr(torch.ops.fbgemm, "asynchronous_complete_cumsum"):
        forms[torch.ops.fbgemm.asynchronous_complete_cumsum.default] = _complete_cumsum
    return forms


def _target_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    bias_index: Tensor | None,
    value_scale: Tensor | None,
    second: Tensor | None,
    tables: list[Tensor],
    indices: list[Tensor],
    scale: float,
    *_: object,
) -> tuple[Tensor, Tensor]:
    """Returns the output of `jfi.ops.target_attention` and the log-sum-exp of the scores, without [S, T, H, D].

    Inductor fuses the products of queries and keys with their sums, and `embedding_bag` sums weighted values. In the
    order of the events a history's sum would be additions to one element by several threads: many times slower, and
    not the same bits every time.
    """
    if key.dtype == torch.int32:
        raise ValueError("attention to packed digits cannot be exported for a CPU")
    samples, num_queries, num_heads, width = query.shape
    if tables:
        key = _gather_rows(tables, indices, query.dtype).unflatten(1, (-1, width))
    elif second is not None:
        key = torch.cat([key, second.unsqueeze(1)], dim=2)
    num_events, num_kv_heads, _ = key.shape
    rows, dtype = num_queries * num_heads, torch.promote_types(query.dtype, torch.float32)
    scaled, key = query.to(dtype) * scale, key.to(dtype)
    value = key if value is None else value.to(dtype)
    # Pairs of a query row and an event of its sample, sorted by both.
    lengths = offsets.diff().long().unsqueeze(1).expand(-1, rows).reshape(-1)  # of each query row
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])  # Inductor's code for F.pad reads an empty tensor
    row = torch.repeat_interleave(lengths, output_size=num_events * rows)
    event = torch.arange(num_events * rows, device=key.device) - starts[row] + offsets[row // rows]
    head = row % num_heads
    kv_row = event * num_kv_heads + head // (num_heads // num_kv_heads)
    scores = (scaled.flatten(0, 2)[row] * key.flatten(0, 1)[kv_row]).sum(-1)
    if bias is not None:
        scores = scores + bias[event if bias_index is None else bias_index[event], head].to(dtype)
    top = torch.segment_reduce(scores, "max", offsets=starts, initial=-torch.inf, unsafe=True)
    top = top.where(top != -torch.inf, 0.0)
    weights = (scores - top[row]).exp()
    total = torch.segment_reduce(weights, "sum", offsets=starts, initial=0, unsafe=True)
    if value_scale is not None:
        weights = weights * value_scale.to(dtype)[event]
    out = F.embedding_bag(kv_row, value.flatten(0, 1), starts[:-1], mode="sum", per_sample_weights=weights)
    out = out / total.where(total > 0, 1.0).unsqueeze(1)
    shape = (samples, num_queries, num_heads)
    return out.view(*shape, value.shape[2]).to(query.dtype), (total.log() + top).view(shape)


def _gather_rows(tables: list[Tensor], indices: list[Tensor], dtype: torch.dtype, impl: str = "torch") -> Tensor:
    return reference.gather_rows(tuple(tables), tuple(indices), dtype)


def _segment_reduce(reduce: str, initial: float, x: Tensor, offsets: Tensor) -> Tensor:
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    out = torch.segment_reduce(flat, reduce, offsets=offsets.long(), axis=0, initial=initial, unsafe=True)
    return out.view(-1, *x.shape[1:])


def _complete_cumsum(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])
