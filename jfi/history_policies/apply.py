"""A policy on TorchRec's types: fewer events in all aligned keys of a KeyedJaggedTensor, and their weights."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jfi.history_policies.policy import Policy
from jfi.history_policies.select import CellTables, Selected


class PolicyModule(nn.Module):
    """Applies a policy to the histories of a batch, on the device where the batch is.

    The same events stay as with `Policy.select`. Nothing has parameters; the tables are buffers that no state_dict has,
    since the policy's file has them.

    The events that stay are of a number that only the device knows. Without a capacity the module waits for it. With
    one the results are padded to it, whatever stays, nothing is read back, and the module can be captured in a
    CUDA graph: what lies behind the last history is padding of ids 0 and weights 0, as in `jfi.CapturedStep`. Events
    beyond the capacity would be left out, the last histories' first, and `left_out` counts them; a capacity of the
    histories' own is always enough.

    Args:
        policy: what stays.
        keys: the aligned keys of the history: all have the same lengths.
        capacity: events of each key in the result, or None for as many as stay.
        device: of the tables.

    Example:
        >>> import numpy as np, torch
        >>> from jfi.history_policies import EventLog, PolicyModule, fit
        >>> from torchrec import KeyedJaggedTensor
        >>> dwell = np.tile([1.0, 2.0, 40.0, 80.0], 50)
        >>> user, time, surface = np.repeat(np.arange(20), 10), np.arange(200.0), np.zeros(200, np.int64)
        >>> log = EventLog(user, time, surface, dwell, surfaces=["feed"])
        >>> policy = fit(log, dwell > 30, num_segments=1, remove=0.5, newest=1, num_bins=4)
        >>> features = KeyedJaggedTensor(
        ...     keys=["item", "history_item"],
        ...     values=torch.tensor([9, 8, 5, 1, 7, 3, 2]),
        ...     lengths=torch.tensor([1, 1, 3, 2]),
        ... )
        >>> #                          sample 0          1
        >>> # "history_item"           [5, 1, 7]         [3, 2]
        >>> seconds = torch.tensor([1.0, 80, 40,         2, 2])
        >>> module = PolicyModule(policy, ["history_item"])
        >>> shorter = module(features, torch.zeros(5, dtype=torch.int64), seconds, segments=torch.tensor([0, 0]))
        >>> shorter["history_item"].to_dense()
        [tensor([1, 7]), tensor([2])]
    """

    _edges: Tensor
    _keep: Tensor
    _weight: Tensor | None
    _cap: Tensor | None
    left_out: Tensor

    def __init__(
        self,
        policy: Policy,
        keys: Sequence[str],
        capacity: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if isinstance(keys, str) or not keys or len({*keys}) < len(keys):
            raise ValueError(f"keys must be different names of a history's keys, got {keys!r}")
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.policy, self.keys, self.capacity = policy, list(keys), capacity
        tables, surfaces, bins = policy.tables, len(policy.surfaces), policy.num_bins
        # A row of edges for each surface and for one that is not known, with infinity where a surface has fewer.
        edges = torch.full((surfaces + 1, bins - 2), torch.inf)
        for row, values in zip(edges, policy.edges, strict=False):
            row[: len(values)] = torch.tensor(values)
        parts = {"edges": edges, "keep": tables.keep, "weight": tables.weight, "cap": tables.cap}
        for name, value in parts.items():
            self.register_buffer(
                f"_{name}", None if value is None else torch.as_tensor(value, device=device), persistent=False
            )
        #: int64, how many events were beyond the capacity in all calls together.
        self.register_buffer("left_out", torch.zeros((), dtype=torch.int64, device=device), persistent=False)

    def extra_repr(self) -> str:
        return f"keys={self.keys}, capacity={self.capacity}, policy={self.policy.fingerprint[:12]}"

    def cells(self, surface: Tensor, dwell: Tensor) -> Tensor:
        """`[S]` integers, as `Policy.cells`, on the device, where contents are not checked.

        Args:
            surface: `[S]` integers, -1 for one that the policy does not know.
            dwell: `[S]` seconds, NaN where missing.
        """
        if surface.device.type == "cpu" and not torch.compiler.is_compiling():
            return torch.from_numpy(self.policy.cells(surface.numpy(), dwell.numpy()))
        return find_cells(self._edges, surface, dwell)

    def forward(
        self, features: KeyedJaggedTensor, surface: Tensor, dwell: Tensor, segments: Tensor
    ) -> KeyedJaggedTensor:
        """The batch with shorter histories; keys that are not the history's stay as they are.

        Args:
            features: all keys of the batch, those of the history with S events; on a GPU with its `length_per_key`, as
                batches of `jfi.data` have it, since reading it there waits for the device.
            surface: `[S]` integers, indices of the policy's surfaces, -1 for another one.
            dwell: `[S]` seconds, NaN where missing.
            segments: `[B]` integers, the segment of each history.

        Returns:
            A KeyedJaggedTensor of the same keys and batch size. It has weights where the policy boosts or `features`
            has them: the product of both, 1 for keys that are not the history's. A policy that keeps everything returns
            `features`.

        Raises:
            ValueError: keys that are missing or not aligned, arguments of another number of events or samples.
        """
        cells = self.cells(*check_events(features, self.keys, surface, dwell))
        stride = features.stride()
        if segments.shape != (stride,):
            raise ValueError(f"segments must be [{stride}], the samples, got {list(segments.shape)}")
        index = features.keys().index(self.keys[0])
        lengths = features.lengths().view(len(features.keys()), stride)[index]
        if cells.device.type == "cpu" and self.capacity is None:
            self.policy.check_packed(cells.numpy(), segments.numpy(), lengths.numpy())
        if self.policy.keeps_all and self.capacity is None:
            return features
        tables = CellTables(self._keep, self._weight, self._cap, self.policy.newest)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        selected = select_on_device(tables, cells, segments, offsets, self.capacity)
        if selected.left_out is not None:
            self.left_out += selected.left_out
        return shorten(features, self.keys, selected)


def check_events(
    features: KeyedJaggedTensor, keys: Sequence[str], surface: Tensor, dwell: Tensor
) -> tuple[Tensor, Tensor]:
    """The surfaces and the dwell of a history's events, checked.

    Raises:
        ValueError: keys that are missing or not aligned, another number of events.
    """
    if features.variable_stride_per_key():
        raise ValueError("features must have one batch size for all keys")
    present, stride = features.keys(), features.stride()
    missing = [key for key in keys if key not in present]
    if missing:
        raise ValueError(f"features must have the history's keys, but '{missing[0]}' is missing; it has {present}")
    counts = features.length_per_key()
    events = counts[present.index(keys[0])]
    for key in keys:
        if counts[present.index(key)] != events:
            got = counts[present.index(key)]
            raise ValueError(f"features['{key}'] must have {events} events like '{keys[0]}', got {got}")
    if features.lengths().device.type == "cpu":
        lengths = features.lengths().view(len(present), stride)
        for key in keys[1:]:
            if not torch.equal(lengths[present.index(key)], lengths[present.index(keys[0])]):
                raise ValueError(f"features['{key}'] must be aligned with '{keys[0]}', got other lengths")
    for name, values in (("surface", surface), ("dwell", dwell)):
        if values.shape != (events,):
            raise ValueError(f"{name} must be [{events}], the events of '{keys[0]}', got {list(values.shape)}")
    return surface, dwell


def shorten(features: KeyedJaggedTensor, keys: Sequence[str], selected: Selected) -> KeyedJaggedTensor:
    """The keys of a history cut to the events that were selected; the others stay as they are.

    Args:
        keys: aligned, in `features`.
    """
    stride, old_weights = features.stride(), features.weights_or_none()
    lengths, values, weights, sizes = features.lengths().view(len(features.keys()), stride).clone(), [], [], []
    parts = zip(features.keys(), features.offset_per_key(), features.length_per_key(), strict=False)
    for index, (key, start, count) in enumerate(parts):
        of = features.values()[start : start + count]
        weight = None if old_weights is None else old_weights[start : start + count]
        if key in keys:
            lengths[index] = selected.lengths
            of = _taken(of, selected)
            weight = None if weight is None else _taken(weight, selected)
            if selected.weights is not None:
                weight = selected.weights if weight is None else weight * selected.weights.to(weight.dtype)
        elif weight is None and selected.weights is not None:
            weight = torch.ones(count, dtype=selected.weights.dtype, device=of.device)
        values.append(of)
        sizes.append(of.size(0))
        weights += [] if weight is None else [weight]
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=torch.cat(values),
        weights=torch.cat(weights) if weights else None,
        lengths=lengths.flatten(),
        stride=stride,
        length_per_key=sizes,
        offset_per_key=[0, *accumulate(sizes)],
    )


def _taken(values: Tensor, selected: Selected) -> Tensor:
    """The values of the events that stay, 0 where there is no event."""
    found = take(values, selected.rows)
    return found if selected.inside is None else torch.where(selected.inside, found, 0)


def select_on_device(
    tables: CellTables,
    cells: Tensor,
    segments: Tensor,
    offsets: Tensor,
    capacity: int | None = None,
) -> Selected:
    """Returns the events that stay.

    Args:
        cells: `[S]` integers in [0, C).
        segments: `[B]` integers in [0, K).
        offsets: `[B + 1]` int64, the ranges of the histories among the S events; what lies behind the last is padding.
        capacity: length of the results, for which nothing waits for the device; None for as many as stay. Events
            beyond the capacity are left out, and the lengths count what is in.
    """
    events = cells.size(0)
    positions = torch.arange(events, device=cells.device)
    history = torch.searchsorted(offsets[1:].contiguous(), positions, right=True)  # of padding B

    def spread(of_history: Tensor) -> Tensor:
        return torch.cat([of_history, of_history.new_zeros(1)])[history]

    entry = spread(segments.to(torch.int64) * tables.keep.size(1)) + cells
    end = spread(offsets[1:])
    keep = tables.keep.flatten().index_select(0, entry)
    if tables.newest:
        keep = keep | (end - positions <= tables.newest)
    keep = keep & (history < segments.size(0))
    if tables.cap is not None:  # an event stays if from it to the end no more than the cap stay
        before = _counted(keep)
        keep = keep & (before[:-1] >= before[end] - spread(tables.cap[segments.to(torch.int64)]))
    inside = left_out = None
    if capacity is None:
        rows = keep.nonzero().squeeze(1)
        lengths = torch.searchsorted(rows, offsets).diff()
    else:
        counts = _counted(keep)
        # Each event that stays is written to its index, the others to one behind the capacity.
        to = torch.where(keep, counts[:-1], capacity).clamp(max=capacity)
        rows = torch.zeros(capacity + 1, dtype=torch.int64, device=cells.device).scatter(0, to, positions)[:capacity]
        inside = torch.arange(capacity, device=cells.device) < counts[-1]
        rows = torch.where(inside, rows, 0)
        lengths = counts[offsets].clamp(max=capacity).diff()
        left_out = (counts[-1] - capacity).clamp(min=0)
    weights = None
    if tables.weight is not None:
        weights = tables.weight.flatten().index_select(0, take(entry, rows))
        weights = weights if inside is None else torch.where(inside, weights, 0.0)
    return Selected(rows, lengths, weights, inside, left_out)


def take(values: Tensor, rows: Tensor) -> Tensor:
    """`values[rows]`; a capacity has rows where there are no values at all, which read 0."""
    return values.index_select(0, rows) if values.size(0) else values.new_zeros(rows.shape)


def _counted(keep: Tensor) -> Tensor:
    """`[S + 1]`, how many are true before each index."""
    return torch.nn.functional.pad(keep.cumsum(0), (1, 0))


def find_cells(edges: Tensor, surface: Tensor, dwell: Tensor) -> Tensor:
    """`[S]` int64, the cell of each event, without a look at the contents.

    Args:
        edges: `[G + 1, E]` float32, by surface and for an unknown one, infinite behind the last edge of a surface.
        surface: `[S]` integers in [-1, G).
        dwell: `[S]`, NaN where missing.
    """
    surface = torch.where(surface < 0, edges.size(0) - 1, surface.to(torch.int64))
    own, dwell = edges[surface], dwell.to(torch.float32)
    bins = ((dwell[:, None] >= own) & own.isfinite()).sum(1)
    unknown = edges.size(1) + 1
    cells = surface * (unknown + 1) + torch.where(dwell.isnan(), unknown, bins)
    return torch.where(surface == edges.size(0) - 1, surface * (unknown + 1), cells)
