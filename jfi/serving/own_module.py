"""Compiles a module of the user's own that holds jfi's layer into a package that needs neither jfi nor Python.

The operators of jfi are registered from Python, so a package cannot call them. They are replaced by PyTorch's operators
in the exported program, which AOTInductor compiles.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from jfi.serving.artifact import ArtifactError
from jfi.serving.export import write_package


def export_module(
    module: nn.Module, args: tuple, path: str | Path, *, dynamic_shapes: Any = None, kwargs: dict | None = None
) -> list[str]:
    """Writes the AOTInductor package of a module's forward, completely or not at all.

    Where jfi is installed or not, ``torch._inductor.aoti_load_package(path)`` gives a function of the same arguments,
    and C++ can load the package too. The forward takes tensors and builds a KeyedJaggedTensor of them inside. Target
    attention (JaggedFeatureInteraction, JaggedPooling) can be exported; an encoder cannot.

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
    if own := [name for name in found if name.startswith("jfi::")]:
        raise ValueError(f"the module uses {', '.join(own)}, which cannot be exported: only target attention can")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.pt2")
    try:
        write_package(program, unfinished)
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return found


def operators_of(program: ExportedProgram) -> list[str]:
    """The operators of a program that are not PyTorch's own, sorted."""
    targets = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    return sorted({target._schema.name for target in targets if target.namespace not in ("aten", "prims")})


def _forms() -> dict[torch._ops.OpOverload, Callable]:
    """Returns by operator what takes its place."""
    forms: dict[torch._ops.OpOverload, Callable] = {torch.ops.jfi.target_attention_fwd.default: _target_attention}
    if hasattr(torch.ops.fbgemm, "asynchronous_complete_cumsum"):
        forms[torch.ops.fbgemm.asynchronous_complete_cumsum.default] = _complete_cumsum
    return forms


def _target_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    buckets: Tensor | None,
    value_scale: Tensor | None,
    second: Tensor | None,
    tables: list[Tensor],
    indices: list[Tensor],
    scale: float,
    *_: object,
) -> tuple[Tensor, Tensor]:
    """The forward of `jfi.ops.target_attention` event by event, without padding: [S, T, H, D] products."""
    if second is not None or tables:
        raise ValueError("target attention that reads rows of tables cannot be exported: give it the embeddings")
    samples, num_queries, num_heads, _ = query.shape
    owner = torch.bucketize(torch.arange(key.shape[0], device=key.device), offsets[1:].long(), right=True)
    # [S, H, D]; no sample has more than its own events.
    key = key.float().repeat_interleave(num_heads // key.shape[1], dim=1)
    value = key if value is None else value.float().repeat_interleave(num_heads // value.shape[1], dim=1)
    scores = (query.float()[owner] * key.unsqueeze(1)).sum(-1) * scale  # [S, T, H]
    if bias is not None:
        scores = scores + (bias if buckets is None else bias[buckets]).float().unsqueeze(1)
    top = scores.new_full((samples, num_queries, num_heads), -torch.inf)
    top = top.scatter_reduce(0, owner[:, None, None].expand_as(scores), scores, "amax")
    top = top.where(top != -torch.inf, 0.0)
    weights = (scores - top[owner]).exp()
    total = torch.zeros_like(top).index_add(0, owner, weights)
    total_or_one = total.where(total > 0, 1.0)
    weights = weights / total_or_one[owner]
    if value_scale is not None:
        weights = weights * value_scale.float()[:, None, None]
    weighted = weights.unsqueeze(-1) * value.unsqueeze(1)
    out = weighted.new_zeros(samples, *weighted.shape[1:]).index_add(0, owner, weighted)
    return out.to(query.dtype), total.log() + top


def _complete_cumsum(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])
