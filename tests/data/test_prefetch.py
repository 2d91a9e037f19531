"""Batches assembled ahead: the same ones in the same order, and nothing left behind, however it ends."""

import gc
import os
import signal
import threading
import time
from contextlib import closing, suppress

import pytest
import torch
from synthetic_data import synthetic_data

from jfi.data import Batch, InteractionDataset, load_dataset
from jfi.data.batches.prefetch import loader_threads, prefetch
from jfi.utils.jagged import Timelines

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", params=["sample", "user"])
def dataset(request) -> InteractionDataset:
    return load_dataset(synthetic_data(num_users=40, num_items=30, mean_length=15.0, batching=request.param))


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("jfi-prefetch")]


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    ids, times = batch.sparse_features, batch.timelines
    found = [batch.dense_features, ids.values(), ids.lengths(), batch.labels, batch.users, batch.samples]
    if isinstance(times, Timelines):
        found += [times.row_offsets, times.target_times, times.event_times]
    return found


def assert_same(got: Batch, want: Batch) -> None:
    assert got.total == want.total
    assert got.sparse_features.length_per_key() == want.sparse_features.length_per_key()
    for one, other in zip(tensors_of(got), tensors_of(want), strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("num_threads", [1, 3, 8])
@pytest.mark.parametrize("start", [0, 2, 1000])
def test_batches_are_those_of_one_thread(dataset, num_threads, start):
    order = {"shuffle": True, "seed": 1, "epoch": 2}
    batches = dataset.batches("train", 16, **order)
    want, numbers = list(batches)[start:], range(start, len(batches))
    got = list(prefetch(batches.__getitem__, numbers, num_threads=num_threads))
    assert len(got) == len(want) == len(numbers)
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)


def test_a_slow_batch_does_not_change_the_order():
    def assemble(number: int) -> int:
        time.sleep(0.02 if number % 4 == 0 else 0)
        return number

    assert list(prefetch(assemble, range(20), num_threads=4)) == list(range(20))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_comes_where_its_batch_would(num_threads):
    error = MemoryError("batch 5")

    def assemble(number: int) -> int:
        if number == 5:
            raise error
        return number

    got = []
    with pytest.raises(MemoryError) as caught:
        got.extend(prefetch(assemble, range(100), num_threads=num_threads))
    assert caught.value is error
    # `extend` keeps what came before the error.
    assert got == [0, 1, 2, 3, 4]
    del caught
    assert not loaders()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_no_more_batches_are_begun_than_depth(num_threads):
    begun: list[int] = []
    numbers = map(lambda number: begun.append(number) or number, range(50))
    for taken, number in enumerate(prefetch(lambda number: number, numbers, num_threads=num_threads), 1):
        assert number == taken - 1
        assert len(begun) - taken <= num_threads + 1
    assert begun == list(range(50))


def test_nothing_begins_before_the_first_batch_is_asked_for():
    batches = prefetch(pytest.fail, range(5))
    assert not loaders()
    batches.close()


def test_threads_end_when_the_consumer_stops():
    with closing(prefetch(lambda number: number, range(100))) as batches:
        assert next(batches) == 0
        assert loaders()
    assert not loaders()

    batches = prefetch(lambda number: number, range(100))
    next(batches)
    del batches
    gc.collect()
    assert not loaders()

    with suppress(ZeroDivisionError), closing(prefetch(lambda number: number, range(100))) as batches:
        1 // next(batches)
    assert not loaders()


def test_batches_that_were_not_begun_are_dropped():
    begun, proceed = [], threading.Event()

    def assemble(number: int) -> int:
        begun.append(number)
        if number:
            proceed.wait()
        return number

    batches = prefetch(assemble, range(100))
    assert next(batches) == 0
    threading.Timer(0.05, proceed.set).start()
    batches.close()  # waits for the one that was begun
    assert len(begun) <= 2


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait_for_a_batch(end):
    def raise_it(signum: int, frame: object) -> None:
        raise KeyboardInterrupt(signum)

    def assemble(number: int) -> int:
        if number == 3:
            os.kill(os.getpid(), end)
            time.sleep(0.1)  # the main thread waits for this batch
        return number

    previous, got = signal.signal(end, raise_it), []
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            got.extend(prefetch(assemble, range(1000)))
    finally:
        signal.signal(end, previous)
    assert len(got) <= 4
    del caught
    assert not loaders()


def test_parts_of_a_batch_stay_a_list(dataset):
    parts = [dataset.batches("train", 16, rank=rank, world_size=2) for rank in range(2)]
    for batch in prefetch(lambda number: [part[number] for part in parts], range(3)):
        assert sum(len(part.labels) for part in batch) == batch[0].total


def test_number_of_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    gpu = torch.device("cuda", 0)
    assert loader_threads(torch.device("cpu")) == 1
    assert loader_threads(gpu) == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert loader_threads(gpu) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert loader_threads(gpu) == 1


@needs_gpu
@pytest.mark.parametrize("num_threads", [1, 4])
def test_batches_on_a_gpu_are_those_on_the_host(dataset, num_threads):
    device = torch.device("cuda", torch.cuda.current_device())
    order = {"shuffle": True, "seed": 1}
    assemble = dataset.batches("train", 32, pin_memory=True, **order).__getitem__
    numbers = range(len(dataset.batches("train", 32, **order)))
    assert all(x.is_pinned() for x in tensors_of(assemble(0)))
    busy, sums = torch.randn(2048, 2048, device=device), []
    # Kernels that run long after the host has gone on read the batches: memory must not be used again before.
    for batch in prefetch(assemble, numbers, device, num_threads):
        busy = torch.tanh(busy @ busy)
        sums.append([x.double().sum() + busy[0, 0].double() * 0 for x in tensors_of(batch)])
        del batch
    for number, got in zip(numbers, sums, strict=True):
        want = [x.double().sum() for x in tensors_of(dataset.batches("train", 32, **order)[number])]
        torch.testing.assert_close(torch.stack(got).cpu(), torch.stack(want), rtol=0, atol=1e-6)
    for batch, number in zip(prefetch(assemble, numbers, device, num_threads), numbers, strict=True):
        assert batch.labels.is_cuda
        assert_same(batch, assemble(number))
