"""Ranks that write to each other's memory: threads of this process, whose memory all of them reach."""

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.sent_bytes import SentBytes
from jfi.distributed import exchange
from jfi.distributed.exchange import Exchange, PeerMemory, are_peers

SIZE = 3
LOCK = threading.Lock()


class Rank(threading.local):
    number = 0


RANK = Rank()


class Group:
    """All ranks."""

    def size(self) -> int:
        return SIZE

    def rank(self) -> int:
        return RANK.number


class SharedMemory:
    """What `compat.symmetric_memory` makes, of threads."""

    def __init__(self) -> None:
        self.barrier, self.made = threading.Barrier(SIZE, timeout=300), {}

    def __call__(self, size: int, device: torch.device, group: Group) -> tuple[Tensor, SimpleNamespace]:
        own = torch.full((size + 16,), 255, dtype=torch.uint8)
        own = own[-own.data_ptr() % 16 :][:size]
        self.made[RANK.number] = own
        self.barrier.wait()
        pointers = [self.made[rank].data_ptr() for rank in range(SIZE)]
        self.barrier.wait()
        return own, SimpleNamespace(buffer_ptrs=pointers, barrier=lambda channel: self.barrier.wait(), keep=own)


def locked(function: Callable) -> Callable:
    """Triton's interpreter runs one kernel at a time."""

    def call(*args: object) -> object:
        with LOCK:
            return function(*args)

    return call


def on_all_ranks(run: Callable[[PeerMemory], object]) -> list:
    """What `run` returns on each rank, given its memory."""
    found, errors = [None] * SIZE, []

    def body(rank: int) -> None:
        RANK.number = rank
        try:
            found[rank] = run(PeerMemory(Group(), torch.device("cpu")))
        except BaseException as error:
            errors.append(error)

    patches = mock.patch.multiple(
        exchange,
        push=locked(exchange.push),
        compat=SimpleNamespace(symmetric_memory=SharedMemory()),
    )
    with patches, mock.patch("torch.cuda.is_current_stream_capturing", lambda: False):
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(SIZE)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    if errors:
        raise errors[0]
    return found


def rows_of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(count * 6).view(count, 2, 3) + 1000 * rank).to(dtype)


@pytest.mark.parametrize("owners", [[0, 1, 2], [1, 2], [0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_their_owners_and_back(owners, dtype, device):
    if device.type != "cpu":
        pytest.skip("threads share the memory of the CPU")
    chunk = 8

    def run(memory: PeerMemory) -> tuple[list, bool]:
        rank, arrived = RANK.number, []
        to = [chunk if other in owners else 0 for other in range(SIZE)]
        of = [chunk if rank in owners else 0] * SIZE
        there = Exchange(memory.pg, to, of, memory)
        for step in range(3):
            with memory.step():
                sent = rows_of(rank, chunk, dtype)
                shared = memory.send(sent, to, of, shared=True)
                if shared is None:  # no room yet
                    assert step == 0
                    for _ in range(2):
                        assert memory.send(torch.zeros(sum(of), 2, 3, dtype=dtype), of, to, shared=False) is None
                    continue
                back = there.back.send(shared + 1)
                again = there.send(rows_of(rank, chunk * len(owners), dtype))
                arrived = [shared.clone(), back.clone(), again.clone()]
        return arrived

    for rank, (shared, back, again) in enumerate(on_all_ranks(run)):
        own = rows_of(rank, chunk, dtype)
        mine = torch.cat([rows_of(other, chunk, dtype) for other in range(SIZE)]) if rank in owners else own[:0]
        assert torch.equal(shared, mine)
        assert torch.equal(back, torch.cat([own + 1] * len(owners)))
        if rank in owners:
            part = slice(owners.index(rank) * chunk, (owners.index(rank) + 1) * chunk)
            every = [rows_of(other, chunk * len(owners), dtype)[part] for other in range(SIZE)]
            assert torch.equal(again, torch.cat(every))


def test_what_graphs_read_outlives_a_growth(device):
    if device.type != "cpu":
        pytest.skip("threads share the memory of the CPU")

    def run(memory: PeerMemory) -> list[list[bool]]:
        made, found = [], []
        for count in (4, 4000, 16000):
            with memory.step():
                memory.send(torch.zeros(count * SIZE, 8), [count] * SIZE, [count] * SIZE, shared=False)
            made.append(weakref.ref(memory._addresses))
            found.append([one() is not None for one in made])
            if count == 4000:  # further graphs read the memory of now
                memory.forget()
        return found

    assert on_all_ranks(run) == [[[True], [True, True], [False, True, True]]] * SIZE


def test_owners_that_do_not_follow_each_other_use_the_group(device):
    if device.type != "cpu":
        pytest.skip("threads share the memory of the CPU")
    chunk = 2

    def run(memory: PeerMemory) -> list[bool]:
        rank = RANK.number
        to, of = [chunk, 0, chunk], [chunk if rank != 1 else 0] * SIZE
        for _ in range(2):
            with memory.step():
                there = memory.send(torch.zeros(chunk, 4), to, of, shared=True)
                back = memory.send(torch.zeros(sum(of), 4), of, to, shared=False)
        return [there is not None, back is not None]

    assert on_all_ranks(run) == [[True, False]] * SIZE


def test_what_peers_are_sent_is_counted(monkeypatch):
    memory = PeerMemory.__new__(PeerMemory)
    memory.pg = Group()
    monkeypatch.setattr(PeerMemory, "send", lambda memory, rows, sent, received, shared: rows)
    with SentBytes() as counted:
        memory.send(torch.zeros(3, 2), [3] * SIZE, [3] * SIZE, shared=True)
    # Three rows of 8 bytes to each of two others.
    assert counted.sent == {"peer_memory": 48}
    assert counted.calls == {"peer_memory": 1}


@pytest.mark.parametrize(
    ("uuids", "reach", "expected"),
    [(["a", "b"], True, True), (["a", "b"], False, False), (["a", "c"], True, False), (["a", "a"], True, False)],
)
def test_gpus_are_peers_where_they_are_others_of_this_host(monkeypatch, uuids, reach, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="ab"[index]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: reach)

    def gather(found: list, own: tuple[str, set[str]], group: object) -> None:
        found[:] = own, (uuids[1], {"a", "b", "c"})

    monkeypatch.setattr(exchange.dist, "all_gather_object", gather)
    assert are_peers(SimpleNamespace(size=lambda: 2), torch.device("cuda", 0)) is expected
