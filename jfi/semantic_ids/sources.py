"""Content embeddings of items, one tensor a source: checks, and scales that make the sources count alike."""

from collections.abc import Sequence

import torch
from torch import Tensor

#: `[N, D]`, or several of these with the same items in the rows.
Sources = Tensor | Sequence[Tensor]


def as_sources(sources: Sources, widths: Sequence[int] | None = None) -> list[Tensor]:
    """The sources as a list of `[N, D_i]` tensors, of these widths D_i if they are given.

    Raises:
        TypeError: one is not a floating-point tensor.
        ValueError: the number of sources, a shape or a width is wrong.
    """
    listed = [sources] if isinstance(sources, Tensor) else list(sources)
    if not listed:
        raise ValueError("sources is empty; it must have at least one tensor")
    for i, source in enumerate(listed):
        if not isinstance(source, Tensor) or not source.is_floating_point():
            got = getattr(source, "dtype", type(source).__name__)
            raise TypeError(f"sources[{i}] must be a floating-point tensor, got {got}")
        if source.dim() != 2 or not source.shape[1]:
            raise ValueError(f"sources[{i}] must be [N, D] with D of at least 1, got the shape {list(source.shape)}")
        if len(source) != len(listed[0]):
            raise ValueError(f"sources[{i}] has {len(source)} rows and sources[0] has {len(listed[0])}")
    if widths is not None and [source.shape[1] for source in listed] != list(widths):
        raise ValueError(f"sources have widths {[s.shape[1] for s in listed]}; the codec was fitted on {list(widths)}")
    return listed


def present_rows(sources: Sequence[Tensor], first: int = 0) -> Tensor:
    """`[N, number of sources]` bool: whether an item has that source; a row that is all NaN says that it has not.

    Raises:
        ValueError: a number is infinite, or only part of a row is NaN; it names the row, the first of which is `first`.
    """
    present = []
    for i, source in enumerate(sources):
        finite, missing = source.isfinite().all(1), source.isnan().all(1)
        wrong = ~(finite | missing)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            column = int((~source[row].isfinite()).nonzero()[0])
            what = "must be finite, or all NaN where the item lacks this source"
            raise ValueError(
                f"sources[{i}], row {first + row}: {what}, got {float(source[row, column])} in column {column}"
            )
        present.append(finite)
    return torch.stack(present, 1)


def learn_scales(sources: Sequence[Tensor], present: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of all sources side by side, `[D]`, and the scale of each, `[number of sources]`, in float64.

    A source's scale is the root of the mean squared distance of its rows from their mean: with it each source has as
    much to say as any other, and directions stay as they are. A source that never varies has the scale 1.

    Raises:
        ValueError: no item has a source.
    """
    means, scales = [], []
    for i, source in enumerate(sources):
        rows = source[present[:, i]].double()
        if not len(rows):
            raise ValueError(f"sources[{i}] is missing in every row")
        means.append(rows.mean(0))
        scale = (rows - means[-1]).square().sum(1).mean().sqrt()
        scales.append(torch.where(scale > 0, scale, torch.ones_like(scale)))
    return torch.cat(means), torch.stack(scales)


def normalize(sources: Sequence[Tensor], present: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """The sources side by side, `[N, D]`, less the mean, by their scales; 0 where an item lacks a source."""
    means = mean.split([source.shape[1] for source in sources])
    parts = [(source.to(mean.dtype) - means[i]) / scale[i] for i, source in enumerate(sources)]
    return torch.cat([part.masked_fill(~present[:, i : i + 1], 0.0) for i, part in enumerate(parts)], 1)


def spread(scale: Tensor, widths: Sequence[int]) -> Tensor:
    """The scale of each source `[number of sources]` for each of its columns, `[D]`."""
    return scale.repeat_interleave(torch.tensor(list(widths), device=scale.device))
