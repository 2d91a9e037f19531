"""Bytes that a sharded step sends, from its shapes: they tell which exchange pays on more ranks than were measured.

Counted are bytes that leave a rank for another one, per sample of its batch, forward and backward.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceShape:
    """A sequence feature and how its model reads it.

    Args:
        events: mean length of a history.
        width: D, of a row.
        heads: H.
        fields: tables whose rows an event sums.
        columns: int32 numbers of an event's payload: its row, the ids of small tables, the bucket of a bias, a weight.
    """

    events: float
    width: int
    heads: int = 1
    fields: int = 1
    columns: int = 1


@dataclass(frozen=True)
class Traffic:
    """Bytes a sample: of ids and their payload; of rows, queries, outputs and their gradients. Messages a step."""

    ids: float
    vectors: float
    messages: int  # to each other rank

    @property
    def total(self) -> float:
        """All bytes."""
        return self.ids + self.vectors


def by_rows(shape: SequenceShape, owners: int, itemsize: int = 4) -> Traffic:
    """Returns what TorchRec's row-wise sharding sends: ids to the owners, rows back, their gradients out again.

    Args:
        shape: the feature.
        owners: ranks that its rows are split over.
        itemsize: bytes of an element of a row on the way.

    Example:
        >>> round(by_rows(SequenceShape(events=200, width=64), owners=2).total)
        52008
    """
    away, count = (owners - 1) / owners, shape.events * shape.fields
    ids = 8 * count * away + 8 * shape.fields * (owners - 1)
    return Traffic(ids, 2 * itemsize * shape.width * count * away, 5)


def by_attention(shape: SequenceShape, owners: int, itemsize: int = 2, ranks: int | None = None) -> Traffic:
    """Returns what attention at the owners sends.

    Args:
        shape: the feature.
        owners: ranks that its rows are split over.
        itemsize: bytes of an element of a query on the way.
        ranks: all ranks, of which these are some; None means that there are no others.

    Example:
        >>> round(by_attention(SequenceShape(events=200, width=64, heads=4), owners=2).total)
        2500
    """
    ranks = owners if ranks is None else ranks
    others = owners * (ranks - 1) / ranks  # owners that are not the sample's own rank, on average
    ids = 4 * shape.columns * shape.events * (ranks - 1) / ranks + 4 * others
    # Queries and their gradients, outputs with a log-sum-exp, their gradients with that and Δ.
    vectors = shape.heads * (4 * itemsize * shape.width + 3 * 4)
    return Traffic(ids, vectors * others, 7)
