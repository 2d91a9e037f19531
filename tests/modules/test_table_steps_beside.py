"""The streams on which a collection's tables are stepped, recorded in the place of a GPU's."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from jfi.modules.fused_tables import FusedTables


class Stream:
    device = torch.device("cpu")

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class Recorded:
    """Tables of one width, whose step says on which stream it runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current = Stream("main", self.log)
        rows = nn.Module()
        rows.weight = nn.Parameter(torch.ones(4, 2))
        self.tables = FusedTables(nn.ModuleDict({"rows": rows}), torch.optim.SGD, {"lr": 1.0}, None)
        self.tables._beside = Stream("tables", self.log), None
        step = self.tables._step
        monkeypatch.setattr(
            self.tables, "_step", lambda batches: (self.log.append(f"step on {self.current.name}"), step(batches))
        )
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

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
        assert recorded.current.name == "main"
    with recorded.tables.stepping_beside():
        recorded.backward()
        with recorded.tables.beside(torch.zeros(1)):
            assert recorded.current.name == "tables"
        recorded.tables.launch_steps()
    assert recorded.log == ["tables waits for main", "tables waits for main", "step on tables", "main waits for tables"]


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
