"""Jagged tensors padded to a capacity, as a captured step has them: rows behind the last sample change nothing."""

import threading

import pytest
import torch
from ops.absorbed import absorbed_target_attention
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.modules import PositionBias
from jfi.modules.events import position_buckets
from jfi.modules.jagged_pooling import pool
from jfi.tables.table_rows import own_rows
from jfi.utils.context import padded_to_capacity, padding_state

#: In an order that has empty samples in front, behind and between.
LENGTHS, PADDING, D = [0, 3, 0, 17, 64, 1, 0], 30, 16


@pytest.fixture
def unread(monkeypatch):
    """On a CPU as on a GPU: nobody reads the contents of offsets to check them."""
    monkeypatch.setattr("jfi.ops.checks.may_read", lambda *_: False)


def padded(rows: torch.Tensor) -> torch.Tensor:
    """The rows and padding behind them, which nothing may read."""
    padding = rows.new_full((PADDING, *rows.shape[1:]), torch.nan if rows.is_floating_point() else 0)
    return torch.cat([rows, padding])


def attend(events: dict, weights: list, target: torch.Tensor, offsets: torch.Tensor) -> tuple:
    """The output and the gradients, those of events for the rows that they have."""
    max_seqlen = events.pop("max_seqlen")
    leaves = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in events.items()}
    fields = tuple(x for name, x in leaves.items() if name.startswith("field"))
    history = tuple(own_rows(x, offsets, [JaggedTensor(x, offsets=offsets)]) for x in fields)
    parameters = [x.clone().requires_grad_() for x in (target, *weights)]
    options = {name: x for name, x in leaves.items() if not name.startswith("field")}
    if "table" in options:
        options["key_bias"] = options.pop("table")
    out = absorbed_target_attention(
        parameters[0],
        history,
        tuple(parameters[1:]),
        offsets=offsets,
        num_heads=2,
        max_seqlen=max_seqlen,
        impl="triton",
        **options,
    )
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out))
    return out, [x.grad for x in parameters], {name: x.grad for name, x in leaves.items() if x.grad is not None}


@pytest.mark.parametrize("queries", [1, pytest.param(8, marks=[] if torch.cuda.is_available() else [pytest.mark.slow])])
@pytest.mark.parametrize("max_seqlen", [None, 64], ids=["split", "whole"])
@pytest.mark.parametrize("kind", ["plain", "two fields", "bias by event", "bias by index"])
def test_attention_leaves_padding_alone(kind, max_seqlen, queries, unread, poisoned, device):
    torch.manual_seed(0)
    size, count = sum(LENGTHS), len(LENGTHS)
    fields = 2 if kind == "two fields" else 1
    events = {f"field {i}": torch.randn(size, D, device=device) for i in range(fields)}
    if kind == "bias by event":
        events["key_bias"] = torch.randn(size, 2, device=device)
    if kind == "bias by index":
        events["key_bias_index"] = torch.randint(5, (size,), device=device)
    table = {"table": torch.randn(5, 2, device=device)} if kind == "bias by index" else {}
    shapes = (queries * D, D), (queries * D,), (D, D * fields), (D, D * fields), (D, queries * D), (D,)
    weights = [torch.randn(1, *shape, device=device) / 4 for shape in shapes]
    target = torch.randn(1, count, D, device=device)
    offsets = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    table["max_seqlen"] = max_seqlen
    want, want_parameters, want_events = attend({**events, **table}, weights, target, offsets)
    with padded_to_capacity():
        longer = {name: padded(x) for name, x in events.items()}
        got, got_parameters, got_events = attend({**longer, **table}, weights, target, offsets)
    torch.testing.assert_close(got, want)
    for a, b in zip(got_parameters, want_parameters, strict=True):
        torch.testing.assert_close(a, b)
    for name, gradient in want_events.items():
        torch.testing.assert_close(got_events[name][: len(gradient)], gradient)
        if name.startswith("field"):
            assert got_events[name].shape[0] == size + PADDING and not got_events[name][size:].any()


def test_sums_over_samples_leave_padding_alone(unread, poisoned, device):
    offsets = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    rows = torch.randn(sum(LENGTHS), D, device=device)
    sums = []
    for values in (rows, padded(rows)):
        values.requires_grad_()
        with padded_to_capacity():
            own = own_rows(values, offsets, [JaggedTensor(values, offsets=offsets)])
        sums.append(pool("item", JaggedTensor(own, offsets=offsets), None, mean=False))
        sums[-1].square().sum().backward()
        assert values.grad.isfinite().all() and not values.grad[len(rows) :].any()
    torch.testing.assert_close(*sums)


def test_buckets_by_position_of_the_events_alone():
    offsets = torch.tensor([0, 3, 3, 8])
    want = position_buckets(offsets, 8, PositionBias())
    assert torch.equal(position_buckets(offsets, 12, PositionBias(), is_padded=True)[:8], want)


def test_a_compiled_function_knows_of_the_padding():
    """A graph that was compiled outside of such a block does not serve within, and the other way round."""
    compiled = torch.compile(lambda x: x + 1 if padding_state.is_padded else x, fullgraph=True, backend="eager")
    x = torch.zeros(1)
    found = [compiled(x).item()]
    with padded_to_capacity():
        found.append(compiled(x).item())
    assert [*found, compiled(x).item()] == [0, 1, 0]


def test_a_thread_does_not_see_the_padding_of_another():
    seen = []
    with padded_to_capacity(frozenset({"user"})):
        thread = threading.Thread(
            target=lambda: seen.append((padding_state.is_padded, padding_state.fixed_length_keys))
        )
        thread.start()
        thread.join()
        with padded_to_capacity():
            assert padding_state.is_padded and not padding_state.fixed_length_keys
        assert padding_state.is_padded and padding_state.fixed_length_keys == {"user"}
    assert seen == [(False, frozenset())] and not padding_state.is_padded
