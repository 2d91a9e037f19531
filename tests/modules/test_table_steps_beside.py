"""The streams on which a collection's tables are stepped, recorded in the place of a GPU's."""

import gc
import weakref

import pytest
import torch
from recorded_streams import Streams
from torch import nn

from jfi.modules.fused_tables import FusedTables


class Recorded:
    """Tables of one width, whose step says on which stream it runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams = Streams(monkeypatch)
        self.log = self.streams.log
        rows = nn.Module()
        rows.weight = nn.Parameter(torch.ones(4, 2))
        self.tables = FusedTables(nn.ModuleDict({"rows": rows}), torch.optim.SGD, {"lr": 1.0}, None)
        self.tables._beside = self.streams.make("tables"), None
        self._step = self.tables._step
        monkeypatch.setattr(self.tables, "_step", self.step)

    def step(self, batches: list) -> None:
        self.log.append(f"step on {self.streams.current.name}")
        self.batches = [weakref.ref(batch.grads[0]) for batch in batches]
        self._step(batches)

    def backward(self) -> None:
        (rows,) = self.tables.look_up([("rows", torch.tensor([1, 1, 3]))], None)
        rows.sum().backward()

    @property
    def weight(self) -> list[float]:
        return self.tables.weights["rows"][:, 0].tolist()


@pytest.fixture
def recorded(monkeypatch) -> Recorded:
    return Recorded(monkeypatch)


STEPPED = [1, -1, 1, 0]


def test_a_step_waits_until_it_is_launched(recorded):
    with recorded.tables.stepping_beside():
        recorded.backward()
        assert recorded.log == [] and recorded.weight == [1, 1, 1, 1]
        recorded.tables.launch_steps()
        assert recorded.log == ["tables waits for main", "step on tables"] and recorded.weight == STEPPED
    assert recorded.log[2:] == ["main waits for tables"]


def test_a_step_that_nobody_launches_is_made_at_the_end(recorded):
    with recorded.tables.stepping_beside():
        recorded.backward()
    assert recorded.log == ["tables waits for main", "step on tables", "main waits for tables"]
    assert recorded.weight == STEPPED


def test_a_look_up_reads_rows_after_their_step(recorded):
    with recorded.tables.stepping_beside():
        recorded.backward()
        recorded.tables.look_up([("rows", torch.tensor([0]))], None)
        assert recorded.log == ["tables waits for main", "step on tables", "main waits for tables"]


def test_what_only_the_step_reads_runs_on_its_stream(recorded):
    with recorded.tables.beside(torch.zeros(1)):
        assert recorded.streams.current.name == "main"
    with recorded.tables.stepping_beside():
        recorded.backward()
        with recorded.tables.beside(torch.zeros(1)):
            assert recorded.streams.current.name == "tables"
        recorded.tables.launch_steps()
    assert recorded.log == ["tables waits for main", "tables waits for main", "step on tables", "main waits for tables"]


def test_the_streams_meet_again_without_a_step(recorded):
    with recorded.tables.stepping_beside(), recorded.tables.beside(torch.zeros(1)):
        pass
    assert recorded.log == ["tables waits for main", "main waits for tables"]


def test_what_is_read_beside_lives_until_the_streams_meet(recorded):
    read = torch.zeros(1)
    kept = weakref.ref(read)
    with recorded.tables.stepping_beside():
        recorded.backward()
        with recorded.tables.beside(read):
            pass
        recorded.tables.launch_steps()
        del read
        gc.collect()
        assert kept() is not None and all(batch() is not None for batch in recorded.batches)
    gc.collect()
    assert kept() is None and not any(batch() is not None for batch in recorded.batches)


def test_a_deferred_step_is_launched_too(recorded):
    with recorded.tables.stepping_beside():
        with recorded.tables.deferring():
            recorded.backward()
            recorded.backward()
        recorded.tables.step_deferred()
        assert recorded.log == [] and recorded.weight == [1, 1, 1, 1]
        recorded.tables.launch_steps()
    assert recorded.log == ["tables waits for main", "step on tables", "main waits for tables"]
    assert recorded.weight == [1, -3, 1, -1]


def test_an_error_drops_the_step(recorded):
    with pytest.raises(KeyError), recorded.tables.stepping_beside():
        recorded.backward()
        raise KeyError
    assert recorded.log == [] and recorded.weight == [1, 1, 1, 1]
    recorded.backward()
    assert recorded.log == ["step on main"] and recorded.weight == STEPPED
