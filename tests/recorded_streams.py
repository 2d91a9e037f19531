"""CUDA streams that say what they wait for, in the place of a GPU's."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class Stream:
    device = torch.device("cpu")

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class Streams:
    """Takes the place of torch.cuda's current stream, which is called main."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current = self.make("main")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)

    def make(self, name: str) -> Stream:
        return Stream(name, self.log)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
