"""Compiles a module of the user's own that holds jfi's layer into a package that needs neither jfi nor Python.

The operators of jfi are registered from Python, so a package cannot call them. On a GPU AOTInductor compiles the Triton
kernels of attention into the package. Other operators are replaced by PyTorch's in the exported program: attention on a
CPU, reading rows of tables, sums of lengths.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

from jfi import reference
from jfi.serving.artifact import ArtifactError
from jfi.serving.export import write_package
from jfi.utils.files import writing_file


def export_module(
    module: nn.Module, args: tuple, path: str | Path, *, dynamic_shapes: Any = None, kwargs: dict | None = None
) -> list[str]:
    """Writes the AOTInductor package of a module's forward, completely or not at all.

    Where jfi is installed or not, ``torch._inductor.aoti_load_package(path)`` gives a function of the same arguments,
    and C++ can load the package too. The forward takes tensors and builds a KeyedJaggedTensor of them inside. Target
    attention (JaggedFeatureInteraction, JaggedPooling) can be exported, with a fixed number of queries; an encoder can
    for a GPU, without times.

    Args:
        module: on the device to serve on, in eval mode.
        args: example of its positional arguments. Sizes that vary must not be 0 or 1 there.
        kwargs: example of its arguments by name, as `args`.
        path: of the package, ends in ".pt2" and does not exist.
        dynamic_shapes: which sizes vary, as `torch.export.export` takes it.

    Returns:
        The operators of other libraries in the package, as "fbgemm::name". A process that loads it must have loaded
        those libraries before.

    Raises:
        ArtifactError: `path` exists, or there is no C++ compiler.
        ValueError: another ending of `path`, or an operator of jfi that has no form without Python.

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
    with torch.no_grad():
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        program = program.run_decompositions(_forms())
    found = operators_of(program)
    own = [name for name in found if name.startswith("jfi::")]
    if refused := [name for name in own if not name.endswith("_exported_fwd")]:
        raise ValueError(
            f"the module uses {', '.join(refused)}, which cannot be exported: only target attention can, and for a GPU "
            "an encoder without times"
        )
    with writing_file(path) as unfinished:
        write_package(program, unfinished)
    return [name for name in found if name not in own]


def operators_of(program: ExportedProgram) -> list[str]:
    """The operators of a program that are not PyTorch's own, sorted."""
    targets = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    return sorted({target._schema.name for target in targets if target.namespace not in ("aten", "prims")})


def _forms() -> dict[torch._ops.OpOverload, Callable]:
    """Returns by operator what takes its place."""
    forms: dict[torch._ops.OpOverload, Callable] = {
        torch.ops.jfi.target_attention_fwd.default: _target_attention,
        torch.ops.jfi.gather_rows.default: _gather_rows,
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


def _complete_cumsum(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])
