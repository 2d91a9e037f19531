"""Time and memory of a call: all numbers of a run are measured by these functions and can be compared.

On a GPU: kernel time by replaying a CUDA graph, eager time between events, the host's time without synchronisation, and
the allocator's peak.  Calls rotate over several sets of inputs, so that the cache does not hold what they read.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

#: Sets of inputs are drawn until they hold this much, several times an H200's 60 MB of L2, or there are SETS of them.
ROTATED_BYTES = 256 * 2**20
LEAST_SETS, SETS = 2, 8

EAGER_CALLS = (8, 60)  # at least, at most
REPLAYS = 12
HOST_CALLS = 40
WALL_REPEATS, WALL_CALLS = 5, 20  # calls of a repeat, at least
CPU_CALLS = 5  # at least
CPU_THREADS = 1

COPY_BYTES = 2**31
RATE_SECONDS = 0.25


def eager_us(calls: Sequence[Call], seconds: float) -> float:
    """Median time of a call, of ``eager_times``."""
    return statistics.median(eager_times(calls, seconds))


def eager_times(calls: Sequence[Call], seconds: float) -> list[float]:
    """Microseconds of calls as the GPU's clock sees them, gaps in which it waits for the host included."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    count = min(EAGER_CALLS[1], max(EAGER_CALLS[0], int(seconds / once)))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for i, (begin, end) in enumerate(events):
        begin.record()
        calls[i % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def kernel_us(build: Callable[[], Sequence[Call]]) -> float:
    """Median time of a call when a CUDA graph replays it: kernels alone.

    ``build`` returns one call a set of inputs.  It runs on the capturing stream: a backward can only be captured on the
    stream of its forward.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls = build()
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        held = [call() for call in calls]  # so that no output takes the place of another
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    del held
    return statistics.median(times[2:]) / len(calls)


def host_us(calls: Sequence[Call], seconds: float) -> float:
    """Median wall time until a call returns, without waiting for the GPU."""
    for call in calls:
        call()
    times = []
    end = time.perf_counter() + seconds
    for i in range(HOST_CALLS):
        torch.cuda.synchronize()
        if time.perf_counter() > end and i >= EAGER_CALLS[0]:
            break
        start = time.perf_counter()
        calls[i % len(calls)]()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def wall_us(calls: Sequence[Call], seconds: float) -> float:
    """Median wall time of a call among calls that follow each other, of which only the last is waited for."""

    def rounds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            for call in calls:
                call()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    rounds(2)
    count = max(-(-WALL_CALLS // len(calls)), int(seconds / WALL_REPEATS / rounds(1)))
    return statistics.median(rounds(count) for _ in range(WALL_REPEATS)) / count / len(calls) * 1e6


def first_peak_mb(call: Call, kept_bytes: Callable[[], int]) -> float:
    """As `peak_mb`, of a call that is made once: without what it keeps for good, which `kept_bytes` counts after it.

    While a CUDA graph is captured the allocator counts what its replays will hold; of a replay itself it knows nothing.
    """
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - kept_bytes()) / 1e6


def peak_mb(call: Call) -> float:
    """The allocator's peak during a call above what it held before, results included, in 10^6 bytes."""
    call()  # whatever a first call keeps for good is not the call's
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = call()
    torch.cuda.synchronize()
    del held
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def interleaved_us(calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """CPU times of each call, ascending: with one thread the wall times on a machine that does nothing else.

    Each round goes over all calls, so that busy spells, in which others share the caches, hit them alike.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while calls and (time.perf_counter() < end or len(next(iter(times.values()))) < CPU_CALLS):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append((time.process_time() - start) * 1e6)
    return {name: sorted(spent) for name, spent in times.items()}


def cpu_peak_mb(call: Call) -> float:
    """The most that torch's CPU allocator held during a call above what it held before, its results included.

    From the profiler's record of every allocation: the resident set of a process also shows pages kept for reuse.
    """
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        held = call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    del held
    sizes = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(sizes, default=0) / 1e6


def copy_bytes_per_second() -> float:
    """Bytes read and written by a large out-of-place elementwise kernel.  (``copy_`` in a graph is a slower engine.)"""
    size = min(COPY_BYTES, torch.cuda.get_device_properties().total_memory // 16)
    pairs = [[torch.ones(size // 4, device="cuda") for _ in range(2)] for _ in range(2)]
    return 2e6 * size / eager_us([lambda x=x, y=y: torch.mul(x, 1, out=y) for x, y in pairs], RATE_SECONDS)


def matmul_flops_per_second() -> float:
    """Of a bfloat16 product of 8192 x 8192 matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2e6 * 8192**3 / eager_us([lambda: a @ b], RATE_SECONDS)
