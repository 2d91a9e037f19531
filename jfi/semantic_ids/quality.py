"""Quality of a catalogue's semantic IDs, in figures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jfi.semantic_ids.codec import BLOCK, Codec, Sources, as_sources, spread
from jfi.semantic_ids.packing import UNKNOWN_SID

#: Scores of items by categories that are held at a time: a label may have very many categories.
_SCORES = 2**24
#: Of the probe, relative to the mean squared size of a feature.
_RIDGE = 1e-3


@dataclass(frozen=True)
class LabelAccuracy:
    """Accuracy of a linear classifier that reads a label from the IDs, fitted to every second item, tested on the rest.

    A codec that was fitted with the labels has seen those of the tested items too.

    Args:
        probe: accuracy from the content that the IDs stand for.
        raw: accuracy from the content itself.
        majority: accuracy of the most frequent category.
        items: on which they were tested.
    """

    probe: float
    raw: float
    majority: float
    items: int


@dataclass(frozen=True)
class SIDQuality:
    """Figures of the semantic IDs of N items; all but `items` and `unknown` leave out items without content.

    Args:
        items: N.
        unknown: items without content, whose ID is UNKNOWN_SID.
        distinct: different IDs.
        no_collision_rate: `distinct` by items.
        single_rate: the part of the items that share their ID with no other.
        largest_collision: items of the most frequent ID.
        entropy: of the IDs, in bits.
        max_entropy: log2 of the items, where each has its own ID.
        reconstruction_error: Σ |x - decode(sid)|² / Σ |x - mean|², over all sources, each scaled to count alike.
        source_errors: the same by source.
        perplexity: by digit, 2 to the power of the entropy of its values.
        dead_codes: by digit, how many of its values no item has.
        labels: by label.
    """

    items: int
    unknown: int
    distinct: int
    no_collision_rate: float
    single_rate: float
    largest_collision: int
    entropy: float
    max_entropy: float
    reconstruction_error: float
    source_errors: list[float]
    perplexity: list[float]
    dead_codes: list[int]
    labels: dict[str, LabelAccuracy]

    def __str__(self) -> str:
        share = self.unknown / self.items if self.items else 0.0
        errors = ", ".join(f"{error:.1%}" for error in self.source_errors)
        lines = [
            f"items                 {self.items:,}, of which {self.unknown:,} ({share:.1%}) without content",
            f"distinct IDs          {self.distinct:,} ({self.no_collision_rate:.1%} of the items with content)",
            f"items with own ID     {self.single_rate:.1%}; the most frequent ID has {self.largest_collision:,} items",
            f"entropy               {self.entropy:.2f} of at most {self.max_entropy:.2f} bits",
            f"reconstruction error  {self.reconstruction_error:.1%} of the variance (by source: {errors})",
            f"values of a digit     perplexity {min(self.perplexity):.2f} to {max(self.perplexity):.2f}, "
            f"{sum(self.dead_codes):,} dead",
        ]
        for name, label in self.labels.items():
            what = f"{label.probe:.1%} from IDs, {label.raw:.1%} from content, {label.majority:.1%} most frequent"
            lines.append(f"{name + ' accuracy':<21s} {what} ({label.items:,} items)")
        return "\n".join(lines)


@torch.no_grad()
def sid_quality(codec: Codec, sources: Sources, sids: Tensor, labels: Mapping[str, Tensor] | None = None) -> SIDQuality:
    """The figures of the SIDs of a catalogue.

    Args:
        codec: that gave the SIDs.
        sources: content, as in `Codec.encode`.
        sids: `[N]` int64.
        labels: by name `[N]` int64, categories from 0 on, -1 where not known.

    Raises:
        ValueError: no item has content, the rows differ in number, or an ID is none of the codec.

    Example:
        >>> from jfi.semantic_ids import DiscretePCA
        >>> content = torch.randn(100, 8)
        >>> codec = DiscretePCA(num_digits=20).fit(content)
        >>> quality = sid_quality(codec, content, codec.encode(content))
        >>> quality.items, quality.unknown, quality.distinct
        (100, 0, 100)
    """
    listed = as_sources(sources, codec.widths)
    if len(listed[0]) != len(sids):
        raise ValueError(f"sids has {len(sids)} rows and sources have {len(listed[0])}")
    known = (sids != UNKNOWN_SID).nonzero()[:, 0]
    if not len(known):
        raise ValueError("no item has content")
    listed, ids = [source[known] for source in listed], sids[known]
    counts = ids.unique(return_counts=True)[1]
    errors, sizes = _errors(codec, listed, ids)
    size = codec.layout.codebook_size
    values = codec.digits(ids).long() + (0 if size else 1)  # from 0 on
    usage = [torch.bincount(column, minlength=size or 3) for column in values.T]
    return SIDQuality(
        items=len(sids),
        unknown=len(sids) - len(known),
        distinct=len(counts),
        no_collision_rate=len(counts) / len(known),
        single_rate=int((counts == 1).sum()) / len(known),
        largest_collision=int(counts.max()),
        entropy=_entropy(counts),
        max_entropy=math.log2(len(known)),
        reconstruction_error=_ratio(errors.sum(), sizes.sum()),
        source_errors=[_ratio(*pair) for pair in zip(errors, sizes, strict=True)],
        perplexity=[2 ** _entropy(one) for one in usage],
        dead_codes=[int((one == 0).sum()) for one in usage],
        labels={name: _accuracy(codec, listed, ids, y[known]) for name, y in (labels or {}).items()},
    )


def _ratio(error: Tensor, size: Tensor) -> float:
    return float(error / size) if size > 0 else 0.0


def _entropy(counts: Tensor) -> float:
    shares = counts.double() / counts.sum()
    return float(torch.special.entr(shares).sum() / math.log(2))


def _decoded(codec: Codec, sids: Tensor) -> Tensor:
    """Returns what SIDs stand for, normalized as the content is, `[n, D]` float64."""
    return (codec.decode(sids).to(codec.device) - codec.tensors["mean"]) / spread(codec.tensors["scale"], codec.widths)


def _errors(codec: Codec, sources: list[Tensor], sids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns by source, the sums of squares of what the IDs miss, and of the content."""
    errors, sizes = torch.zeros(2, len(sources), dtype=torch.float64, device=codec.device)
    for (x, present), part in zip(codec.normalized(sources), sids.split(BLOCK), strict=True):
        missed = (x - _decoded(codec, part)).split(codec.widths, 1)
        for i, (one, whole) in enumerate(zip(missed, x.split(codec.widths, 1), strict=True)):
            errors[i] += (one.square().sum(1) * present[:, i]).sum()
            sizes[i] += whole.square().sum()
    return errors, sizes


def _accuracy(codec: Codec, sources: list[Tensor], sids: Tensor, labels: Tensor) -> LabelAccuracy:
    rows = (labels >= 0).nonzero()[:, 0]
    train, test = rows[::2], rows[1::2]
    if not len(test):
        return LabelAccuracy(0.0, 0.0, 0.0, 0)
    decoded = torch.cat([_decoded(codec, part) for part in sids.split(BLOCK)]).to(labels.device)
    raw = torch.cat([x for x, _ in codec.normalized(sources)]).to(labels.device)
    common = labels[train].mode().values
    return LabelAccuracy(
        probe=_probe(decoded, labels, train, test),
        raw=_probe(raw, labels, train, test),
        majority=float((labels[test] == common).double().mean()),
        items=len(test),
    )


def _probe(features: Tensor, labels: Tensor, train: Tensor, test: Tensor) -> float:
    """Accuracy of ridge regression to one-hot categories."""
    x = torch.cat([features, torch.ones_like(features[:, :1])], 1)
    classes, y = labels[train].unique(return_inverse=True)
    sums = torch.zeros(len(classes), x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, y, x[train])
    gram = x[train].T @ x[train]
    ridge = _RIDGE * gram.diagonal().mean().clamp(min=1e-12)
    weights = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=x.dtype, device=x.device), sums.T)
    parts = test.split(max(1, _SCORES // len(classes)))
    return sum(int((classes[(x[rows] @ weights).argmax(1)] == labels[rows]).sum()) for rows in parts) / len(test)
