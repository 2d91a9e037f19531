"""What a step sends, reckoned from the shapes: which exchange pays, and what more ranks would send.

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
        queries: T.
        fields: tables whose rows an event sums.
        columns: int32 numbers that an event brings to the owner of its row: its place, the ids of small tables, the
            bucket of a bias, a weight.
    """

    events: float
    width: int
    heads: int = 1
    queries: int = 1
    fields: int = 1
    columns: int = 1


@dataclass(frozen=True)
class Traffic:
    """Bytes a sample, and messages a step.

    Attributes:
        ids: of ids, and of what events bring along.
        rows: of rows and their gradients.
        queries: of queries, partial outputs and their gradients.
        messages: to each other rank.
    """

    ids: float
    rows: float
    queries: float
    messages: int

    @property
    def total(self) -> float:
        """All bytes."""
        return self.ids + self.rows + self.queries


def by_rows(shape: SequenceShape, owners: int, itemsize: int = 4, unique: float = 1.0) -> Traffic:
    """What TorchRec's row-wise sharding sends: ids to the owners, rows back, their gradients out again.

    Args:
        shape: the feature.
        owners: ranks that its rows are split over.
        itemsize: bytes of an element of a row on the way.
        unique: fraction of a batch's events that are left without repeated ids.

    Example:
        >>> round(by_rows(SequenceShape(events=200, width=64), owners=2).total)
        52008
    """
    away, count = (owners - 1) / owners, shape.events * shape.fields * unique
    ids = 8 * count * away + 8 * shape.fields * (owners - 1)
    return Traffic(ids, 2 * itemsize * shape.width * count * away, 0.0, 5)


def by_attention(shape: SequenceShape, owners: int, itemsize: int = 2, ranks: int | None = None) -> Traffic:
    """What attention at the owners sends.

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
    vectors = shape.queries * shape.heads * (4 * itemsize * shape.width + 3 * 4)
    return Traffic(ids, 0.0, vectors * others, 7)


def replicated(rows: int, width: int, owners: int) -> float:
    """Bytes a step of one rank for small tables that every rank reads whole: two all-reduces of float32.

    Args:
        rows: of all these tables.
        width: D.
        owners: ranks.
    """
    return 2 * 2 * 4 * rows * width * (owners - 1) / owners
